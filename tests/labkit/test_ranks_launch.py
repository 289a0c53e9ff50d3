"""``launch``: one clear status for whatever a rank does, and no process left behind."""

import os
import pickle
import signal
import sys
import threading
import time

import psutil
import pytest

from labkit.ranks import NestedRanksError, jobs, launch, system, warm_up
from tests.labkit import ranks_entries

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks need fork")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(entry, world_size=1, payload=b"", timeout=20.0, group=False, **options):
    return launch(
        payload, world_size=world_size, entry=f"{ranks_entries.__name__}:{entry.__name__}", timeout=timeout,
        init_process_group=group, **options,
    )


def others() -> list[psutil.Process]:
    """Processes that the ranks' tests left below this one: not the warm server (which adopts whoever loses its parent), nor a
    browser that tests of other files keep open.
    """
    server = jobs._server.process.pid if jobs._server else 0
    below = psutil.Process().children(recursive=True)
    browsers = {child.pid for root in below if _is_browser(root) for child in (root, *_below(root))}
    return [process for process in below if process.pid not in (server, *browsers) and alive(process)]


def _is_browser(process: psutil.Process) -> bool:
    try:
        return "playwright" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def nothing_left() -> None:
    end = time.monotonic() + 5.0
    while others() and time.monotonic() < end:
        time.sleep(0.01)
    assert others() == []


@pytest.fixture(autouse=True)
def no_process_left():
    yield
    nothing_left()


def test_returns_bytes_output_and_seconds_per_rank():
    reports = run(ranks_entries.echo, 3, b"payload")
    assert [(report.rank, report.status, report.data) for report in reports] == [(n, "ok", b"payload" + bytes([n])) for n in range(3)]
    assert [report.output for report in reports] == [f"rank {n} of 3\n" for n in range(3)]
    assert all(report.seconds >= 0 and report.detail == "" and report.error is None for report in reports)


def test_group_reduces():
    assert [report.data for report in run(ranks_entries.reduce, 4, group=True)] == [b"6.0"] * 4


def test_sees_the_callers_present_environment_and_folder(tmp_path, monkeypatch):
    run(ranks_entries.echo)  # the server is up before these change
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(os.path.dirname(os.path.dirname(os.path.dirname(ranks_entries.__file__))))
    monkeypatch.setenv("LABKIT_TEST", "now")
    one, two = run(ranks_entries.settings, 2)
    assert one.data.decode() == f"{tmp_path}|now|0|{max(1, system.cores() // 2)}"
    assert two.data.decode().split("|")[2] == "1"
    assert run(ranks_entries.settings, env={"LABKIT_TEST": "given"})[0].data.decode().split("|")[1] == "given"


def test_each_rank_has_randomness_of_its_own():
    drawn = {report.data for _ in range(2) for report in run(ranks_entries.random_numbers, 2)}
    assert len(drawn) == 4


def test_an_error_is_told_as_plain_data():
    (report,) = run(ranks_entries.raises)
    assert report.status == "error"
    assert report.error["type"] == "ValueError" and report.error["message"] == "no such \udcff thing"
    assert report.error["notes"] == ["seen here"]
    assert "in raises\n" in report.error["traceback"] and "labkit/ranks/" not in report.error["traceback"]


@pytest.mark.parametrize("entry", [ranks_entries.raises_huge, ranks_entries.raises_unprintable, ranks_entries.wrong_type])
def test_odd_errors_are_errors(entry):
    (report,) = run(entry)
    assert report.status == "error"
    assert len(report.error["message"]) + len(report.error["traceback"]) < 100_000


def test_a_result_over_the_limit_is_refused():
    (report,) = run(ranks_entries.too_large, max_result_bytes=1000)
    assert report.status == "error" and "100000 bytes" in report.error["message"]


@pytest.mark.parametrize(
    ("entry", "status", "words"),
    [
        (ranks_entries.leaves, "exit", "exit code 3"),
        (ranks_entries.segfault, "exit", "SIGSEGV"),
        (ranks_entries.killed, "memory", "SIGKILL"),
        (ranks_entries.closes_everything, "exit", "file descriptor"),
    ],
)
def test_leaving_early_is_told(entry, status, words):
    (report,) = run(entry)
    assert report.status == status and words in report.detail


def test_sys_exit_is_an_exit_and_memory_errors_are_memory():
    (report,) = run(ranks_entries.sys_exit)
    assert report.status == "exit" and report.error["type"] == "SystemExit"
    assert run(ranks_entries.memory_error)[0].status == "memory"
    assert run(ranks_entries.torch_memory)[0].status == "memory"


def test_output_is_whole_in_order_and_capped():
    (report,) = run(ranks_entries.loud)
    assert report.status == "ok"
    assert report.output.startswith("from a subprocess\nfrom C\nstderr too\nxxx") and report.output.endswith("xxx\nthe end\n")
    assert "bytes of output left out" in report.output and len(report.output) < 300_000


def test_threads_and_processes_left_behind_are_told_and_ended():
    (report,) = run(ranks_entries.keeps_thread)
    assert (report.status, report.data) == ("ok", b"done") and "sleeper" in report.detail
    (report,) = run(ranks_entries.leaves_child)
    assert (report.status, report.data) == ("ok", b"done") and "sleep 60" in report.detail


@pytest.mark.parametrize(
    ("entry", "data"), [(ranks_entries.forks, b"parent"), (ranks_entries.closes_output, b"still here")]
)
def test_forking_and_closing_output_do_no_harm(entry, data):
    (report,) = run(entry)
    assert (report.status, report.data) == ("ok", data)


def test_a_fork_that_returns_as_well_is_not_heard():
    (report,) = run(ranks_entries.fork_returns_too)
    assert (report.status, report.data) == ("ok", b"both")


def test_timeout_tells_the_stack_and_ends_the_stubborn():
    one, two = run(ranks_entries.stubborn, 2, timeout=2)
    assert one.status == two.status == "timeout" and one.detail.startswith("not done after 2 s\nrank 0 stood at")
    assert "in stubborn" in one.detail and "time.sleep(1)" in one.detail and "labkit/ranks/" not in one.detail
    assert one.output == "begun\n"
    nothing_left()
    (report,) = run(ranks_entries.blocks_in_c, timeout=1.5)
    assert report.status == "timeout" and "in blocks_in_c" in report.detail


@linux
@pytest.mark.parametrize("entry", [ranks_entries.garbage, ranks_entries.endless_frame, ranks_entries.forged_error])
def test_what_cannot_be_read_is_a_protocol_fault(entry):
    (report,) = run(entry, timeout=5)
    assert report.status == "protocol" and report.data == b"" and report.detail


def test_nothing_is_unpickled_on_the_way(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    data = pickle.dumps(Bomb())
    (report,) = run(ranks_entries.echo, payload=data)
    assert report.data == data + b"\0" and not (tmp_path / "exploded").exists()


def test_a_killed_supervisor_costs_the_job_and_leaves_nothing():
    reports = run(ranks_entries.kills_supervisor, 2)
    assert [report.status for report in reports] == ["protocol"] * 2
    nothing_left()
    assert run(ranks_entries.echo)[0].status == "ok"


@pytest.mark.parametrize("how", [b"raise", b"exit"])
def test_who_falls_with_a_peer_is_not_the_cause(how):
    reports = run(ranks_entries.rank_two_fails, 4, how, group=True)
    assert reports[2].status == {b"raise": "error", b"exit": "exit"}[how]
    assert [reports[rank].status for rank in (0, 1, 3)] == ["interrupted"] * 3
    assert all("rank 2" in reports[rank].detail for rank in (0, 1, 3))
    if how == b"raise":
        assert reports[2].ended == min(report.ended for report in reports)


def test_a_killed_server_is_replaced():
    warm_up()
    run(ranks_entries.echo)
    first = jobs._server.process.pid
    os.kill(first, signal.SIGKILL)
    assert run(ranks_entries.echo)[0].status == "ok"
    assert jobs._server.process.pid != first


def test_many_threads_may_launch_at_once():
    statuses = []

    def work():
        statuses.extend(report.data for report in run(ranks_entries.reduce, 2, group=True))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [b"1.0"] * 6


def test_nested_calls_are_refused_with_a_clear_word():
    (report,) = run(ranks_entries.nested)
    assert report.error["type"] == NestedRanksError.__name__ and "rank 0" in report.error["message"]


def test_a_bad_size_or_entry_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        run(ranks_entries.echo, 0)
    (report,) = launch(b"", world_size=1, entry="no.such.module:f", timeout=5, init_process_group=False)
    assert report.error["type"] == "ModuleNotFoundError"
