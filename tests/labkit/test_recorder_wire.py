"""Recordings from outside: what does not fit together is refused, and what passes cannot make a reader fail."""

import copy
import json

import pytest
import torch

from labkit.recorder import Recorder, Recording


@pytest.fixture(scope="module")
def parts():
    model = torch.nn.Linear(4, 4)
    with Recorder(watch=model, budget_bytes=10**5) as rec:
        with rec.phase("forward"):
            model(torch.ones(2, 4)).sum().backward()
        rec.mark("end")
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(10**5)
    return rec.recording.to_wire()


def set_header(**changes):
    return lambda header, tensors: header.update(changes)


def set_row(name, **changes):
    return lambda header, tensors: header[name][0].update(changes)


def set_tensor(name, change):
    return lambda header, tensors: tensors.__setitem__(name, change(tensors[name]))


def fill(value, at=0):
    def change(tensor):
        tensor = tensor.clone()
        tensor[at] = value
        return tensor

    return change


@pytest.mark.parametrize(
    "break_it",
    [
        set_header(version=2),
        set_header(ops="aten.mm"),
        set_header(ops=[""]),
        set_header(modules=[]),
        set_header(phase_names=[""]),
        set_header(names=[""]),
        set_header(marks=[{"name": "end"}]),
        set_header(cycles="many"),
        set_header(seconds=float("nan")),
        set_header(messages=[{"kind": "send"}]),
        set_header(card={"name": 3}),
        set_row("marks", event=10**6),
        set_row("marks", event=True),
        set_row("phases", first_event=-1),
        set_row("phases", last_op=10**6),
        set_row("phases", end_s="late"),
        set_row("refusals", wanted_bytes=None),
        set_tensor("event_sid", fill(10**6)),
        set_tensor("event_sid", lambda t: t[:-1]),
        set_tensor("event_code", fill(0xFFFF)),
        set_tensor("op_code", fill(-1)),
        set_tensor("op_flops", lambda t: t.float()),
        set_tensor("op_seconds", fill(float("inf"))),
        set_tensor("storage_category", fill(6)),
        set_tensor("storage_category", lambda t: t[1:]),
        set_tensor("storage_name", fill(-1)),
        lambda header, tensors: tensors.pop("call_code"),
    ],
)
def test_misfits_are_refused(parts, break_it):
    header, tensors = copy.deepcopy(parts[0]), dict(parts[1])
    break_it(header, tensors)
    with pytest.raises(ValueError, match="recording"):
        Recording.from_wire(header, tensors)


def test_extra_parts_are_dropped(parts):
    r = Recording.from_wire(parts[0], parts[1] | {"more": torch.zeros(3)})
    assert "more" not in r.arrays


def test_files_that_hold_no_recording(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("hello")
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    save_file({"a": torch.zeros(1)}, tmp_path / "odd", metadata={"labkit.recording": "{"})
    save_file({"a": torch.zeros(1)}, tmp_path / "list", metadata={"labkit.recording": "[]"})
    for name in ("text", "other", "odd", "list"):
        with pytest.raises(ValueError, match="recording"):
            Recording.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "absent")


def test_the_header_is_strict_json(parts):
    json.dumps(parts[0], allow_nan=False)


def test_an_empty_recording_travels():
    with Recorder() as rec:
        pass
    r = Recording.from_wire(*rec.recording.to_wire())
    assert r.peak_bytes == 0 and r.ops() == [] and r.alive() == [] and r.comm() == []
