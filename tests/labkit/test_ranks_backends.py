"""Cards for each, cards shared, several hosts: what can be tested of them on one machine without a card."""

import sys

import pytest

from labkit import doctor
from labkit.ranks import RankError, device, faults, hosts, launch, run_ranks, travel
from labkit.ranks.group import choose
from tests.labkit import ranks_backends as programs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks need fork")


def staged(payload, ranks, backend="staged"):
    reports = launch(
        payload, world_size=ranks, entry=f"{programs.__name__}:over_the_host", timeout=40, init_process_group=True, backend=backend
    )
    assert [report.status for report in reports] == ["ok"] * ranks, reports[0]
    return [travel.loads(report.data) for report in reports]


def test_each_rank_its_card_or_all_over_the_host():
    assert choose(0, 4, True) == "gloo" and choose(0, 1, False) == "gloo"
    assert choose(4, 4, True) == choose(8, 2, True) == "nccl"
    assert choose(1, 2, True) == choose(4, 4, False) == "staged"


def test_what_goes_over_the_host_arrives_as_over_gloo_and_is_recorded_alike():
    for payload in (b"plain", b"staged"):  # with and without what needs the host
        for one, two in zip(staged(b"plain", 2, "gloo"), staged(payload, 2), strict=True):
            assert one[0] == two[0] and one[1] == two[1] and one[4] == two[4] == [2.0, 2.0]
            assert one[2] == two[2], "the same rows in the recording, whoever wrote them"
            assert one[3] == pytest.approx(two[3])


def test_every_kind_of_call_goes_over_the_host():
    assert sorted(staged(b"staged", 4)[0][5]) == sorted(staged(b"plain", 4, "gloo")[0][5])


def test_a_deadlock_over_the_host_is_seen():
    reports = launch(
        b"", world_size=2, entry=f"{programs.__name__}:stuck", timeout=60, init_process_group=True, backend="staged"
    )
    assert [report.status for report in reports] == ["deadlock"] * 2 and "rank 0 waits in recv from rank 1" in reports[0].detail


def test_a_ranks_device_without_a_card_is_the_cpu():
    assert run_ranks(programs.where, 2).values == ["cpu", "cpu"]
    with pytest.raises(RuntimeError, match="this is no rank"):
        device()


def test_hosts_are_handed_to_torchrunx():
    result = run_ranks(programs.reduces, 2, 0.5, record=True, hosts=["localhost"])
    assert result.values == [1.5, 1.5] and [recording.bytes_by_kind()["all_reduce"]["count"] for recording in result.recordings] == [1, 1]


def test_what_hosts_cannot_do_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="one machine"):
        run_ranks(programs.reduces, 2, 0.0, hosts=["localhost"], faults=[faults.kill(0, "send")])
    with pytest.raises(ValueError, match="3 ranks do not divide among 2 hosts"):
        run_ranks(programs.reduces, 3, 0.0, hosts=["one", "two"])
    monkeypatch.setitem(sys.modules, "torchrunx", None)
    with pytest.raises(ImportError, match="pip install torchrunx"):
        run_ranks(programs.reduces, 2, 0.0, hosts=["localhost"])


class Launcher:
    """Stands in for torchrunx: runs the payload's function nowhere, and loses a host or a rank's exception on request."""

    def __init__(self, hostnames, workers_per_host, backend):
        self.hostnames, self.workers, self.backend = hostnames, workers_per_host, backend

    def set_logging_handlers(self, factory):
        return self

    def run(self, function, payload):
        if self.hostnames == ["gone"]:
            raise AgentFailedError("gone did not answer")
        fn, args, _, how = travel.loads(payload)
        told = {host: [(host, worker, self.backend, args, how) for worker in range(self.workers)] for host in self.hostnames}
        results = {host: [travel.dumps((value, None)) for value in values] for host, values in told.items()}
        return type("Results", (), {"results": results})


class AgentFailedError(Exception):
    pass


def test_values_come_in_the_order_of_ranks_and_a_lost_host_is_told(monkeypatch):
    module = type(sys)("torchrunx")
    module.Launcher, module.AgentFailedError, module.WorkerFailedError = Launcher, AgentFailedError, type("Other", (Exception,), {})
    monkeypatch.setitem(sys.modules, "torchrunx", module)
    result = run_ranks(programs.reduces, 4, 7, hosts=["b", "a"])
    assert result.values == [("b", 0, "gloo", (7,), ""), ("b", 1, "gloo", (7,), ""), ("a", 0, "gloo", (7,), ""), ("a", 1, "gloo", (7,), "")]
    with pytest.raises(RankError, match="torchrunx lost a host or a rank: gone did not answer"):
        run_ranks(programs.reduces, 2, 7, hosts=["gone"])


def test_the_doctor_says_which_of_these_there_are(monkeypatch):
    found = {finding.what: finding for finding in doctor._transports()}
    assert found["ZeroMQ"].state == "ok" and set(found) == {"ZeroMQ", "Several hosts"}
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    without = doctor._transports()
    assert [finding.state for finding in without] == ["info", "info"] and "pip install pyzmq" in without[0].advice
    assert doctor._nccl(4, True).state == "ok" and "up to 4 ranks" in doctor._nccl(4, True).told
    assert doctor._nccl(1, True).state == doctor._nccl(4, False).state == "info" and "share a card" in doctor._nccl(1, True).advice
    assert hosts.available() in (True, False)
