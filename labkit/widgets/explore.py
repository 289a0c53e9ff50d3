"""`explore`: controls over pictures that were made of real recordings, answered at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from labkit.figures.picture import Still, still
from labkit.widgets.place import Place, notebook_kernel, someone_watches

_AHEAD_S = 3.0  # seconds spent on drawing states before anyone asks; the others are drawn when asked for


def explore(
    controls: Mapping[str, Sequence[Any]],
    draw: Callable[..., Figure],
    *,
    start: Mapping[str, Any] | None = None,
    title: str = "",
) -> None:
    """Show the picture `draw(**values)` with one control per entry of `controls`; moving a control changes the picture.

    controls : name -> its values in order: numbers make a slider, anything else a choice
    draw     : a function of the controls' values, by name, to a `Picture` or a matplotlib Figure. Record before, once;
               `draw` only draws. It is called once per state: the pictures are kept, and most are drawn before the cell
               ends. start    : the state shown first and left in a saved notebook: choose the one that teaches most.
               Default: the middle values.

    A saved notebook, GitHub and a grader show the picture of `start`. Raises ValueError for an empty control or an
    unknown start.
    """
    states = States(controls, draw)
    at = states.index_of(start or {})
    picture = states.still(at)
    if notebook_kernel() is None:
        print(picture.alt)
        return
    place = Place()
    if someone_watches():
        from labkit.widgets.explorer import Explorer

        states.draw_ahead(at, _AHEAD_S)
        place.keep(Explorer(key=place.key, title=title, states=states, at=at))
    place.show_picture(picture)


class States:
    """All states of a set of controls, and their pictures: drawn once each, kept."""

    def __init__(self, controls: Mapping[str, Sequence[Any]], draw: Callable[..., Figure]) -> None:
        self.controls = {name: list(values) for name, values in controls.items()}
        if not self.controls or not all(self.controls.values()):
            raise ValueError("explore needs at least one control, and at least one value for each")
        self._draw = draw
        self.drawn: dict[tuple[int, ...], Still] = {}

    def index_of(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Positions of the given values; a control without one stands in its middle. Raises ValueError for an unknown
        name or value.
        """
        unknown = set(values) - set(self.controls)
        if unknown:
            raise ValueError(f"no control named {sorted(unknown)}; there are {list(self.controls)}")
        for name, value in values.items():
            if value not in self.controls[name]:
                raise ValueError(f"{name} has no value {value!r}; it has {self.controls[name]}")
        return tuple(
            choices.index(values[name]) if name in values else (len(choices) - 1) // 2
            for name, choices in self.controls.items()
        )

    def still(self, at: tuple[int, ...]) -> Still:
        """The picture of a state, drawn now if it never was. Raises IndexError for a state that does not exist."""
        if at not in self.drawn:
            choices = list(self.controls.values())
            if len(at) != len(choices) or not all(0 <= i < len(values) for i, values in zip(at, choices, strict=True)):
                raise IndexError(f"no state {at}")
            values = {name: choices[i] for (name, choices), i in zip(self.controls.items(), at, strict=True)}
            figure = self._draw(**values)
            words = getattr(figure, "alt", "") or ", ".join(f"{name} {value}" for name, value in values.items())
            self.drawn[at] = still(figure, words)
        return self.drawn[at]

    def draw_ahead(self, around: tuple[int, ...], seconds: float) -> None:
        """Draw states, the nearest to `around` first, until all are drawn or the time is up."""
        end = time.monotonic() + seconds
        everything = itertools.product(*(range(len(choices)) for choices in self.controls.values()))
        for at in sorted(everything, key=lambda state: sum(abs(a - b) for a, b in zip(state, around, strict=True))):
            if time.monotonic() > end:
                return
            self.still(at)
