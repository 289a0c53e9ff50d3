"""Lines and stacked bars: what they were given stands in the picture and in its words."""

import math

import pytest

pytest.importorskip("matplotlib")

from labkit.figures import lines, stacked_bars
from labkit.figures.colours import COLOURS
from labkit.figures.picture import still


def test_lines_draw_their_points_and_leave_gaps():
    picture = lines({"fp32": ([1, 2, 3], [5.0, 4.0, 3.0]), "fp16": ([1, 2, 3], [5.0, math.nan, math.inf])},
                    title="Loss", x="step", y="loss (nats)", log="y", limits={"floor": 2.0}, marks={"overflow": 2})  # fmt: skip
    axes = picture.axes[0]
    assert list(axes.lines[0].get_ydata()) == [5.0, 4.0, 3.0]
    assert axes.lines[1].get_ydata()[0] == 5.0 and all(math.isnan(value) for value in axes.lines[1].get_ydata()[1:])
    assert axes.get_yscale() == "log" and axes.get_xscale() == "linear"
    assert axes.lines[0].get_linestyle() != axes.lines[1].get_linestyle()  # told apart without colours
    for fact in ("Loss", "fp32: from 5 at 1 to 3 at 3", "floor at 2", "overflow at 2"):
        assert fact in picture.alt
    assert still(picture).png.startswith(b"\x89PNG")


def test_a_curve_without_a_number_is_told():
    assert "no finite value" in lines({"nan": ([1], [math.nan])}, title="t", x="x", y="y").alt


def test_bars_stack_in_the_categories_order_and_colours():
    picture = stacked_bars({"fp32": {"activations": 3.0, "parameters": 4.0}, "amp": {"parameters": 2.0, "masters": 1.0}},
                           title="States", y="GB", limits={"24 GB card": 9.0})  # fmt: skip
    axes = picture.axes[0]
    names = [container.get_label() for container in axes.containers]
    assert names == ["parameters", "activations", "masters"]
    boxes = [[(bar.get_y(), bar.get_height()) for bar in container] for container in axes.containers]
    assert boxes == [[(0.0, 4.0), (0.0, 2.0)], [(4.0, 3.0), (2.0, 0.0)], [(7.0, 0.0), (2.0, 1.0)]]
    colours = ["#" + "".join(f"{round(255 * part):02x}" for part in container[0].get_facecolor()[:3]) for container in axes.containers]
    assert colours[:2] == [COLOURS["parameters"], COLOURS["activations"]] and colours[2] not in COLOURS.values()
    assert axes.get_ylim()[1] > 9.0
    assert "fp32: activations 3, parameters 4, in all 7" in picture.alt and "24 GB card at 9" in picture.alt


def test_a_logarithmic_axis_names_powers_of_two():
    ranks = [2**k for k in range(7)]
    axes = lines({"loss": (ranks, ranks)}, title="t", x="rank", y="y", log="x").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "8", "16", "32", "64"]
    axes = lines({"loss": ([1, 10, 1000], [1, 2, 3])}, title="t", x="scale", y="y", log="x").axes[0]
    assert axes.get_xscale() == "log" and 10 in list(axes.get_xticks())
