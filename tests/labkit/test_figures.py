"""Still pictures: what they show is what was recorded, in the picture and in words."""

import base64

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from labkit import Recorder
from labkit.figures import Picture, compare_memory, memory_over_time, u_curve, u_curve_and_memory
from labkit.figures.picture import stamped, still
from labkit.figures.readers import card_samples
from labkit.figures.thin import keep, phase_strip
from labkit.figures.units import human_bytes, human_seconds


@pytest.fixture(scope="module")
def recording():
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    batch = torch.randn(128, 64)
    with Recorder(watch=[model, batch]) as recorder:
        with recorder.phase("forward"):
            loss = model(batch).square().mean()
        with recorder.phase("backward"):
            loss.backward()
    return recorder.recording


def test_memory_over_time_marks_the_recorded_peak_in_picture_and_words(recording):
    picture = memory_over_time(recording, "Four layers", budget_bytes=2**20)
    texts = [text.get_text() for text in picture.axes[0].texts]
    peak = human_bytes(recording.peak_bytes)
    assert any(peak in text for text in texts)
    assert any("budget" in text for text in texts)
    assert {"forward", "backward"} & set(texts)
    assert picture.axes[0].get_xlabel().startswith("time (") and picture.axes[0].get_ylabel().startswith(
        "live memory ("
    )
    for fact in ("Four layers", peak, "parameters", "Budget 1.0 MiB"):
        assert fact in picture.alt


def test_stack_adds_up_to_the_recorded_total(recording):
    axes = memory_over_time(recording).axes[0]
    top = max(path.vertices[:, 1].max() for collection in axes.collections for path in collection.get_paths())
    unit = 1024 if "KiB" in axes.get_ylabel() else 2**20
    assert top * unit == pytest.approx(recording.peak_bytes)


def test_picture_leaves_png_and_words_in_a_notebook(recording):
    data, metadata = memory_over_time(recording, "Words")._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == data["text/plain"]


def test_equal_recordings_give_equal_bytes(recording):
    assert still(memory_over_time(recording)).png == still(memory_over_time(recording)).png


def test_stamp_keeps_a_valid_png(recording):
    png = stamped(still(memory_over_time(recording)).png, "0" * 32)
    from io import BytesIO

    from matplotlib.image import imread

    assert imread(BytesIO(png)).ndim == 3
    assert png[33 + 8 : 33 + 8 + 7] == b"labkit\0"


def test_comparison_names_every_peak_and_the_baseline(recording):
    picture = compare_memory({"plain": recording, "yours": recording}, baseline="plain", born=True)
    assert isinstance(picture, Picture)
    assert "compared with plain" in picture.alt and picture.alt.count(human_bytes(recording.peak(born=True))) == 2


def test_u_curve_marks_its_least_point():
    picture = u_curve(
        {1: 100.0, 4: 30.0, 8: 20.0, 16: 35.0, 64: 101.0}, baseline_bytes=130.0, predicted={8: 25.0}, marked=4
    )
    assert any("20 B at 8" in text.get_text() for text in picture.axes[0].texts)
    assert "least 20 B at 8" in picture.alt and "130 B" in picture.alt


def test_u_curve_and_memory_has_both_panels_and_keeps_the_scale(recording):
    heights = {u_curve_and_memory({1: recording, 2: recording}, choice).axes[1].get_ylim() for choice in (1, 2)}
    assert len(heights) == 1


def test_empty_recording_draws():
    with Recorder() as recorder:
        pass
    assert "nothing was recorded" in memory_over_time(recorder.recording).alt
    still(memory_over_time(recorder.recording))


def test_pictures_leave_matplotlib_settings_alone(recording):
    import matplotlib

    before = dict(matplotlib.rcParams)
    still(memory_over_time(recording))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("columns", [1, 7, 100])
def test_thinning_keeps_every_extreme(columns):
    generator = np.random.default_rng(columns)
    seconds = np.sort(generator.uniform(0, 5, 4000))
    total = generator.integers(0, 10**9, 4000).astype(float)
    chosen = keep(seconds, total, columns)
    assert len(chosen) <= 3 * columns + 1 and chosen[0] == 0 and chosen[-1] == 3999
    assert total[chosen].max() == total.max() and total[chosen].min() == total.min()
    again = keep(seconds[chosen], total[chosen], max(columns // 3, 1))
    assert total[chosen][again].max() == total.max()
    edges = np.linspace(seconds[0], seconds[-1], columns + 1)
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        inside = (seconds > a) & (seconds < b)
        if inside.any():
            assert total[inside].max() in total[chosen]


def test_thinning_when_no_time_passes():
    assert len(keep(np.zeros(1000), np.arange(1000.0), 10)) <= 31


def test_phase_strip_is_exact_for_few_and_bounded_for_many():
    few = [("forward", 0.0, 1.0), ("backward", 1.0, 3.0)]
    assert phase_strip(few, 3.0) == few
    many = [(("a", "b")[i % 2], i * 1.0, i + (0.9 if i % 2 else 0.2)) for i in range(5000)]
    strip = phase_strip(many, 5000.0, cells=100)
    assert len(strip) <= 100 and {name for name, _, _ in strip} == {"b"}


def test_phase_strip_shows_the_innermost():
    many = [("step", 0.0, 1000.0)] + [("inner", float(i), i + 1.0) for i in range(500)]
    strip = phase_strip(many, 1000.0, cells=10)
    assert strip == [("inner", 0.0, 500.0), ("step", 500.0, 1000.0)]


def test_units():
    assert human_bytes(0) == "0 B" and human_bytes(1536) == "1.5 KiB" and human_bytes(131.4 * 2**20) == "131.4 MiB"
    assert human_seconds(0.0123) == "12.3 ms"


def test_a_cards_own_counters_are_drawn_beside_the_stack(recording):
    samples = [{"seconds": i / 1000, "allocated": 2**20 * i, "reserved": 2**21 * i, "used": 0} for i in range(1, 900)]
    with_card = type(recording)({**recording.header, "samples": samples}, recording.arrays)
    axes = memory_over_time(with_card).axes[0]
    assert {"card: allocated", "card: reserved"} <= {line.get_label() for line in axes.lines}
    assert axes.get_ylim()[1] * 2**30 > 2**21 * 899
    assert len(card_samples(samples)) <= 301 and card_samples(samples)[-1][1] == 2**20 * 899
