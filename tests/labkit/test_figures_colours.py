"""Categories stay apart for colour-blind eyes: simulated, then measured."""

import itertools

import numpy as np
import pytest

from labkit.figures.colours import COLOURS, STACK
from labkit.recorder import CATEGORIES

# Machado, Oliveira and Fernandes 2009, severity 1: what an eye without one kind of cone makes of linear RGB.
EYES = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(np.maximum(_XYZ @ rgb / [0.9505, 1.0, 1.089], 0.009))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", EYES)
def test_every_pair_of_categories_is_told_apart(eye):
    seen = {name: lab(np.clip(np.array(EYES[eye]) @ linear(colour), 0, 1)) for name, colour in COLOURS.items()}
    distances = {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in itertools.combinations(seen, 2)}
    nearest = min(distances, key=distances.__getitem__)
    assert distances[nearest] > 12, f"{nearest} are {distances[nearest]:.1f} apart"


@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
def test_every_category_stands_out_from_the_ground(ground):
    for name, colour in COLOURS.items():
        light, dark = sorted((float(_XYZ[1] @ linear(c)) for c in (colour, ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 1.9, name


def test_every_category_has_a_colour_and_a_place_in_the_stack():
    assert set(COLOURS) == set(STACK) == set(CATEGORIES)
