"""The samplers of a card, on a stubbed `torch.cuda`: what a machine without a card can test of them."""

import pytest
import torch

from labkit.recorder import Recorder, Recording, _samplers
from labkit.recorder._code import ON_CARD


class Card:
    """Stands in for torch.cuda's readers; `reads` counts the samples."""

    def __init__(self) -> None:
        self.reads = 0

    def stats(self, device):
        self.reads += 1
        return {"allocated_bytes": {"all": {"current": 100 * self.reads}}, "reserved_bytes": {"all": {"current": 2000}}}


@pytest.fixture
def card(monkeypatch):
    card = Card()
    properties = type("Properties", (), {"name": "Test card", "total_memory": 10**9})()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", card.stats)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 5000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9 - 7000, 10**9))
    return card


def test_samples_at_borders_and_not_at_every_operator(card):
    with Recorder() as rec:
        follower = rec.follow()
        with rec.phase("many"):
            for _ in range(100):
                torch.zeros(1)
        rec.mark("end")
        polled = follower.poll()["samples"]
    r = rec.recording
    assert r.card == {"name": "Test card", "total_bytes": 10**9}
    assert 4 <= len(r.samples) < 50 and len(r.samples) == card.reads
    assert polled == r.samples[: len(polled)] and len(polled) == len(r.samples) - 1
    assert [s["allocated"] for s in r.samples] == [100 * (i + 1) for i in range(len(r.samples))]
    assert {s["reserved"] for s in r.samples} == {2000} and {s["used"] for s in r.samples} == {5000}
    assert Recording.from_wire(*r.to_wire()).samples == r.samples


def test_operators_are_sampled_when_time_has_passed(card, monkeypatch):
    monkeypatch.setattr(_samplers, "INTERVAL_S", 0.0)
    with Recorder() as rec:
        for _ in range(10):
            torch.zeros(1)
    assert len(rec.recording.samples) >= 10


def test_without_nvml_the_runtime_answers(card, monkeypatch):
    def missing(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "device_memory_used", missing)
    with Recorder() as rec:
        rec.mark("one")
    assert {s["used"] for s in rec.recording.samples} == {7000}


def test_a_card_that_nobody_uses_is_not_woken(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with Recorder() as rec:
        rec.mark("one")
    assert rec.recording.card is None and rec.recording.samples == [] and card.reads == 0


def test_no_card():
    with Recorder() as rec:
        torch.zeros(1)
    assert rec.recording.card is None and rec.recording.samples == []


def test_the_cards_memory_is_told_from_the_rest():
    """No card here: what such a recording would say is written into one by hand."""
    with Recorder() as rec:
        kept = [torch.zeros(10), torch.zeros(20), torch.zeros(5)]
        rec.mark("end")
    header, tensors = rec.recording.to_wire()
    tensors["event_code"][1] |= ON_CARD
    r = Recording.from_wire(header, tensors)
    assert r.peak_bytes == 140 and r.peak(on_card=True) == 80 and r.peak(on_card=False) == 60
    assert r.at("end", on_card=True) == 80 and [s.on_card for s in r.allocations()] == [False, True, False]
    del kept
