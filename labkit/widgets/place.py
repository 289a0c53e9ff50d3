"""Where a view appears: live in a notebook that a person watches, as a picture when the cell is done, as a line of text
elsewhere.
"""

from __future__ import annotations

import secrets
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib is not needed before there is a picture
    from labkit.figures.picture import Still

_STATIC = Path(__file__).parent / "static"
_OPEN_VIEWS = 24  # finished views whose data a reloaded browser page can still fetch from the kernel

_open: OrderedDict[str, Any] = OrderedDict()


def static_source(*names: str) -> str:
    """The text of files under `static/`, joined: a view is uPlot, the shared page code and its own code, in one
    module.
    """
    return "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in names)


def notebook_kernel() -> Any | None:
    """The ipykernel that runs this cell, or None in plain Python, in a terminal and in other threads' processes."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return getattr(shell, "kernel", None)


def someone_watches() -> bool:
    """Whether a person's front end runs this cell. One that cannot answer `input()` (nbclient, nbconvert, a grader) has
    no eyes either.
    """
    return bool(getattr(notebook_kernel(), "_allow_stdin", False))


class Place:
    """One output of one cell. `key` links the live view, the picture that replaces it, and what the browser page
    remembers.
    """

    def __init__(self) -> None:
        self.key = secrets.token_hex(16)
        self._handle: Any = None
        self._widget: Any = None

    def show_live(self, widget: Any, words: str) -> None:
        """Put `widget` into the running cell's output."""
        from IPython.display import display

        self._widget = widget
        view = {"version_major": 2, "version_minor": 1, "model_id": widget.model_id}
        bundle = {"application/vnd.jupyter.widget-view+json": view, "text/plain": words}
        self._handle = display(bundle, raw=True, display_id=True)

    def keep(self, widget: Any) -> None:
        """A view without a live phase: the page learns of it now, and puts it over the picture that follows."""
        self._widget = widget

    def show_picture(self, picture: Still) -> None:
        """Leave the picture as the output, in place of the live view; the page that drew the view may put it over the
        picture again.
        """
        from IPython.display import display

        data, metadata = picture.mime_bundle(self.key if self._widget else "")
        if self._handle is None:
            display(data, metadata=metadata, raw=True)
        else:
            self._handle.update(data, metadata=metadata, raw=True)
        if self._widget is not None:
            self._keep_open()

    def _keep_open(self) -> None:
        _open[self.key] = self._widget
        while len(_open) > _OPEN_VIEWS:
            _open.popitem(last=False)[1].close()
