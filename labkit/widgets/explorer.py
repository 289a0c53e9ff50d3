"""The synced state of `explore`'s view: controls and the pictures drawn so far. `static/explore.js` makes the screen of
it.
"""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from labkit.widgets.place import static_source


class Explorer(anywidget.AnyWidget):
    """A state's name is its controls' positions, joined by commas. A missing picture is asked for by the message
    {"want": name}.
    """

    _esm = static_source("page.js", "explore.js")
    _css = static_source("labkit.css")
    key = traitlets.Unicode().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    controls = traitlets.List().tag(sync=True)
    start = traitlets.List().tag(sync=True)
    pictures = traitlets.Dict().tag(sync=True)
    words = traitlets.Dict().tag(sync=True)
    width = traitlets.Int().tag(sync=True)  # of the first picture, in CSS pixels

    def __init__(self, key: str, title: str, states: Any, at: tuple[int, ...]) -> None:
        self._states = states
        super().__init__(
            key=key,
            title=title,
            controls=[
                {
                    "name": name,
                    "labels": [str(v) for v in values],
                    "slides": all(isinstance(v, (int, float)) for v in values),
                }
                for name, values in states.controls.items()
            ],
            start=list(at),
            width=states.still(at).width,
            pictures={_name(state): drawn.png for state, drawn in states.drawn.items()},
            words={_name(state): drawn.alt for state, drawn in states.drawn.items()},
        )
        self.on_msg(self._asked)

    def _asked(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        name = str(content["want"])
        drawn = self._states.still(tuple(int(part) for part in name.split(",")))
        self.send({"at": name, "words": drawn.alt}, [drawn.png])


def _name(state: tuple[int, ...]) -> str:
    return ",".join(map(str, state))
