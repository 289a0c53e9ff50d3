"""Lanes of ranks: clocks aligned, spans where they were, simulated links called so, the same facts in words."""

import time

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from labkit import Recorder
from labkit.figures import compare_memory, lanes, memory_over_time
from labkit.figures.picture import still
from labkit.figures.tracks import _merged, _without, lanes_of, offsets
from labkit.recorder import Recording, Transit, note_event, note_message


def record(simulated: bool = True, link: dict | None = None) -> Recording:
    with Recorder() as recorder:
        with recorder.phase("forward"):
            kept = torch.ones(1 << 18)
        start = time.perf_counter()
        if simulated:
            size = {"bytes_sent": 4000, "bytes_received": 0, "payload_bytes": 4000}
            sent = Transit("send", **size, peer=1, group="0", group_size=2, asynchronous=True)
            sent.took(start + 0.1, start + 0.3)
        else:
            note_message("all_reduce", start, bytes_sent=4000, bytes_received=4000, asynchronous=True)
            note_message("recv", start, bytes_received=4000, peer=1)
        time.sleep(0.01)
        note_message("wait", start, peer=1, simulated=simulated)
        note_event("pushed")
        kept += 1
    recording = recorder.recording
    return Recording({**recording.header, "link": link, "seconds": 0.5}, recording.arrays)


def moved(recording: Recording, **header) -> Recording:
    return Recording({**recording.header, **header}, recording.arrays)


LINK = {"bandwidth_bytes_s": 2e8, "latency_s": 1e-3, "per": "pair"}


def test_clocks_of_one_machine_align_by_its_own_clock_and_of_several_by_the_time_of_day():
    one = record()
    two = moved(one, clock_s=one.clock_s + 0.25, started=one.started + 9.0)
    assert offsets([two, one]) == [pytest.approx(0.25), 0.0]
    there = moved(two, machine="another")
    assert offsets([one, there]) == [0.0, pytest.approx(9.0)]
    first, second = lanes_of([one, two])
    assert second.sends[0][0] - first.sends[0][0] == pytest.approx(0.25)
    assert second.memory[0][0] - first.memory[0][0] == pytest.approx(0.25)


def test_a_lane_holds_work_by_phase_messages_waits_and_marks():
    (lane,) = lanes_of([record(link=LINK)])
    assert set(lane.compute) == {"forward", "compute"} and lane.simulated
    ((begin, end, text),) = lane.sends
    assert end - begin == pytest.approx(0.2) and text == "to 1" and not lane.receives and not lane.collectives
    ((waited_from, waited_to),) = lane.waits
    assert waited_to - waited_from >= 0.01
    assert all(stop <= waited_from or start >= waited_to for spans in lane.compute.values() for start, stop in spans)
    assert [name for _, name in lane.marks] == ["pushed"]
    assert lane.memory[1].max() == 1 << 20


def test_of_real_messages_only_those_that_wait_have_a_length():
    (lane,) = lanes_of([record(simulated=False)])
    assert len(lane.launches) == 1 and not lane.collectives and not lane.simulated
    ((begin, end, _),) = lane.receives
    assert end - begin >= 0.01  # to the end of the wait behind it


def test_the_picture_names_a_simulated_link_in_title_and_words():
    picture = lanes([record(link=LINK)] * 2, "Two ranks")
    assert "simulated link: 200 MB/s, 1 ms latency" in picture.axes[0].get_title(loc="left")
    assert "messages on a simulated link: 200 MB/s" in picture.alt and "rank 1 computes" in picture.alt
    assert "1 send (3.9 KiB)" in picture.alt and "peak 1.0 MiB" in picture.alt
    assert [label.get_text() for label in picture.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    assert "simulated" not in lanes([record(simulated=False)]).alt


def test_every_picture_of_a_run_on_a_simulated_link_says_so():
    on_link, plain = record(link=LINK), record(simulated=False)
    words = "simulated link: 200 MB/s, 1 ms latency"
    for picture in (memory_over_time(on_link), compare_memory({"a": plain, "b": on_link})):
        assert words in picture.alt and words in [text.get_text() for text in picture.axes[0].texts]
    for picture in (memory_over_time(plain), compare_memory({"a": plain})):
        assert "simulated" not in picture.alt and not any("simulated" in text.get_text() for text in picture.axes[0].texts)


def test_bars_stand_where_the_messages_were():
    axes = lanes([record(link=LINK)], memory=False).axes[0]
    sends = [c for c in axes.collections if len(c.get_facecolor()) and np.allclose(c.get_facecolor()[0][:3], (0xD5 / 255, 0x5E / 255, 0))]
    (path,) = sends[0].get_paths()
    assert np.ptp(path.vertices[:, 0]) == pytest.approx(200)  # ms


def test_sixteen_ranks_fit_and_seventeen_do_not():
    one = record(link=LINK)
    picture = lanes([one] * 16)
    assert len(picture.axes[0].get_yticks()) == 16 and picture.get_size_inches()[1] < 10
    assert still(picture).png == still(lanes([one] * 16)).png
    for recordings in ([], [one] * 17):
        with pytest.raises(ValueError, match="1 to 16 ranks"):
            lanes(recordings)


def test_a_part_of_time_can_be_shown():
    picture = lanes([record(link=LINK)], start_s=0.1, end_s=0.2)
    assert picture.axes[0].get_xlim() == pytest.approx((100, 200)) and "shown from 100 ms to 200 ms" in picture.alt


def test_spans_merge_and_subtract():
    assert _merged([(3, 4), (0, 1), (1.05, 2)], 0.1) == [(0, 2), (3, 4)]
    assert _without([(0, 10), (12, 13)], [(1, 2), (5, 12.5)]) == [(0, 1), (2, 5), (12.5, 13)]
    assert _without([(0, 1)], []) == [(0, 1)] and _without([(1, 2)], [(0, 3)]) == []
