"""The interactive views of labs 01 and 02 in JupyterLab: quick to answer, saved as a picture."""

from __future__ import annotations

import pytest

from tests.browser.notebooks import write_notebook
from tests.browser.pages import LabPage

SETUP = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential
from labkit import Recorder
from labkit.widgets import explore, explore_segments, step_through
from labkit.figures import u_curve

model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(32)])
batch = torch.randn(1024, 128, requires_grad=True)

def record(segments):
    with Recorder(watch=[model, batch]) as recorder:
        with recorder.phase("forward"):
            run = checkpoint_sequential(model, segments, batch, use_reentrant=False) if segments else model(batch)
            loss = run.square().mean()
        with recorder.phase("backward"):
            loss.backward()
        model.zero_grad()
    return recorder.recording

recordings = {segments: record(segments) for segments in (1, 2, 4, 6, 8, 12, 16, 32)}
plain = record(0)
"""
SEGMENTS = "explore_segments(recordings, baseline=plain)"
STEPS = """
layers = [nn.Linear(64, 64) for _ in range(10)]

def pingpong(layers, x):
    buffers = [torch.empty(len(x), 64), torch.empty(len(x), 64)]
    for i, layer in enumerate(layers):
        x = torch.addmm(layer.bias, x, layer.weight.t(), out=buffers[i % 2]).relu_()
    return x

step_through(pingpong, layers, torch.randn(32, 64))
"""
MANY = """
def draw(n, kind):
    return u_curve({1: n, 2: n, 3: n * (1 if kind == "straight" else 2)}, title=f"{kind} {n}")

explore({"n": list(range(1, 400)), "kind": ["straight", "bent"]}, draw, title="Many states")
"""

# Move a slider as a hand does; milliseconds until the new picture is decoded and shown.
_MOVE = """async ([input, position]) => {
    const picture = input.closest(".labkit-explore").querySelector("img"), start = performance.now();
    input.value = position;
    input.dispatchEvent(new Event("input"));
    await picture.decode();
    return performance.now() - start;
}"""


@pytest.fixture(scope="module")
def server(jupyter, browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    write_notebook(folder / "views.ipynb", SETUP, SEGMENTS, STEPS, MANY)
    return jupyter(folder)


def test_views_answer_quickly_and_leave_a_picture(browser_page, server):
    lab = LabPage(browser_page, server)
    lab.open("views.ipynb")
    lab.hide_sidebars()
    lab.run_all()
    lab.wait_idle(90)

    view = lab.output(1).locator(".labkit-explore")
    view.wait_for()
    view.scroll_into_view_if_needed()
    slider = view.get_by_role("slider")
    before = view.locator(".labkit-words").inner_text()
    slider.focus()
    moves = [browser_page.evaluate(_MOVE, [slider.element_handle(), position]) for position in (5, 6, 2)]
    assert min(moves) < 200, f"milliseconds from move to picture: {moves}"
    browser_page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "segments 6"
    assert view.locator("img").get_attribute("alt") == view.locator(".labkit-words").inner_text() != before
    lab.screenshot("segments")

    steps = lab.output(2).locator(".labkit-explore")
    steps.scroll_into_view_if_needed()
    steps.get_by_role("slider").fill("4")
    assert "Layer 5 of 10" in steps.locator(".labkit-words").inner_text()
    lab.screenshot("pingpong-steps")

    many = lab.output(3).locator(".labkit-explore")
    many.scroll_into_view_if_needed()
    many.get_by_role("slider").fill("390")  # never drawn ahead: the kernel draws it now
    many.get_by_role("combobox").select_option(label="bent")
    many.locator("xpath=self::*[@data-waiting='false']").wait_for()
    assert many.locator(".labkit-words").inner_text().startswith("bent 391")
    assert lab.errors == []

    lab.save()
    server.stop()
    server.start()
    again = LabPage(browser_page.context.new_page(), server)
    again.open("views.ipynb")
    for index in (1, 2, 3):
        picture = again.output(index).locator("img")
        picture.scroll_into_view_if_needed()
        assert picture.is_visible() and picture.evaluate("(img) => img.naturalWidth") > 600
        assert again.output(index).locator(".labkit-explore").count() == 0
