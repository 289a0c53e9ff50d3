"""What a check says: points for nbgrader, a table, one hint and a picture for people, data for tools."""

import base64
import html
import io
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

MIME = "application/vnd.labkit.verdict+json"
STATUSES = (
    "pass",
    "partial",
    "fail",
    "unfinished",
    "error",
    "timeout",
    "memory",
    "deadlock",
    "protocol",
    "flagged",
    "infrastructure",
)


@dataclass(frozen=True)
class Outcome:
    """One criterion over all cases: passed only if it held in each. `earned` follows the rule of points."""

    name: str
    role: str
    points: float
    witness: str
    passed: bool
    expected: str
    observed: str
    case: str
    earned: float = 0.0


@dataclass
class Verdict:
    """The result of one check.

    status   : one of STATUSES
    points   : earned, of max_points
    criteria : outcomes in the check's order
    failed   : name of the criterion that the hint belongs to, or "runs" when the code did not finish
    hint     : one question; hint_id is its key
    detail   : what happened when the code did not finish (message, the learner's own lines, each rank's stack), or what was alive at a peak
    summary  : the measured figure for the quiet line of a pass
    """

    check: str
    status: str
    points: float
    max_points: float
    criteria: list[Outcome] = field(default_factory=list)
    failed: str | None = None
    hint: str | None = None
    hint_id: str | None = None
    detail: str = ""
    summary: str = ""
    seconds: float = 0.0
    hidden: bool = False
    draw: "Callable[[], Figure | None] | None" = field(default=None, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        return self.status == "pass"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the picture, as JSON values."""
        plain = {name: value for name, value in self.__dict__.items() if name not in ("criteria", "draw", "_picture")}
        return plain | {"criteria": [asdict(outcome) for outcome in self.criteria]}

    @cached_property
    def _picture(self) -> tuple[str, str] | None:
        """(PNG in base64, text alternative), drawn only when somebody looks."""
        if self.draw is None:
            return None
        try:
            figure = self.draw()
        except Exception:  # no matplotlib in a core install, or nothing to draw: the table says the same, and a verdict is never lost
            return None
        if figure is None:
            return None
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return base64.b64encode(buffer.getvalue()).decode(), str(figure.get_label())

    # -- for nbgrader and Python --

    def __repr__(self) -> str:
        return f"{self.points:g}"

    def __float__(self) -> float:
        return float(self.points)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": repr(self), "text/html": self._repr_html_(), MIME: self.to_dict()}

    # -- for people --

    def mark(self, outcome: Outcome) -> str:
        """The result column: FAIL, pass, or pass* where it earns nothing yet (see `gate`)."""
        if not outcome.passed:
            return "FAIL"
        return "pass*" if outcome.points and not outcome.earned else "pass"

    @property
    def gate(self) -> str:
        """The footnote of pass*: which criterion has to hold first. Empty where none is marked so."""
        if not any(self.mark(outcome) == "pass*" for outcome in self.criteria):
            return ""
        roles = ("numbers", "technique")
        first = next((o.name for role in roles for o in self.criteria if o.role == role and not o.passed), "every case")
        return f"* counts once “{first}” passes"

    @property
    def headline(self) -> str:
        score = f"{self.points:g} of {self.max_points:g} points"
        if self.hidden:
            return f"hidden cases: {score}"
        if self.status == "pass":
            return f"{score} · {self.summary}" if self.summary else score
        if self.status in ("partial", "fail"):
            return score
        return f"{self.status} · {score}"

    def as_text(self, width: int = 100) -> str:
        """The verdict for a terminal of `width` columns."""
        return verdict_text(self, width)

    def _repr_html_(self) -> str:
        return verdict_html(self)


def verdict_text(verdict: Verdict, width: int = 100) -> str:
    """Plain text, never wider than `width` columns: a table where it fits, one block per criterion where it does not."""
    import textwrap

    def wrap(text: str, indent: str = "") -> list[str]:
        lines = []
        for line in text.splitlines() or [""]:
            lines += textwrap.wrap(line, max(width, 20), initial_indent=indent, subsequent_indent=indent) or [""]
        return lines

    title, score = verdict.check, verdict.headline
    gap = width - len(title) - len(score)
    lines = [title + " " * gap + score] if gap >= 2 else wrap(title) + wrap(score, "  ")
    if verdict.status == "pass":
        return "\n".join(lines)
    name_width = max((len(outcome.name) for outcome in verdict.criteria), default=0)
    for outcome in verdict.criteria:
        mark = verdict.mark(outcome)
        what = f"{outcome.observed} ({outcome.expected})" if outcome.expected else outcome.observed
        row = f"  {outcome.name:<{name_width}}  {what}"
        if len(row) + 7 <= width:
            lines.append(f"{row:<{width - 5}}{mark}")
        else:
            lines += wrap(f"{mark}  {outcome.name}", "  ") + wrap(what, "        ")
    if verdict.gate:
        lines += wrap(verdict.gate, "  ")
    for text in (verdict.hint, verdict.detail):
        if text:
            lines += ["", *wrap(text)]
    return "\n".join(lines)


# Readable on a plain page and in JupyterLab's light and dark themes; state is told in words, colour only helps.
_STYLE = """<style>
.labkit-verdict{font-size:var(--jp-content-font-size1,14px);line-height:1.45;max-width:60em;overflow-x:auto}
.labkit-verdict table{border-collapse:collapse;margin:.4em 0;width:100%}
.labkit-verdict caption{text-align:left;padding:.2em 0;color:inherit}
.labkit-verdict table th,.labkit-verdict table td{text-align:left!important;padding:.25em .8em .25em 0;vertical-align:top}
.labkit-verdict th,.labkit-verdict td{border-top:1px solid #8884;font-weight:normal}
.labkit-verdict td:last-child{white-space:nowrap;padding-right:0}
.labkit-verdict .ok{color:#1a7f37}.labkit-verdict .no{color:#b3261e;font-weight:bold}
[data-jp-theme-light="false"] .labkit-verdict .ok{color:#6fdd8b}[data-jp-theme-light="false"] .labkit-verdict .no{color:#ff8a80}
.labkit-verdict .hint{border-left:3px solid #e69f00;padding:.2em .8em;margin:.6em 0}
.labkit-verdict pre{white-space:pre-wrap;margin:.4em 0;font-size:.92em}
.labkit-verdict img{max-width:100%;height:auto;background:#fff}
</style>"""


def verdict_html(verdict: Verdict) -> str:
    """A table, one hint, what happened, the picture; all text escaped, state in words beside the colours."""
    escape = html.escape
    mark = "ok" if verdict.passed else "no"
    head = f'<strong>{escape(verdict.check)}</strong> &nbsp; <span class="{mark}">{escape(verdict.headline)}</span>'
    parts = [
        _STYLE,
        '<div class="labkit-verdict" role="group" aria-label="',
        escape(f"{verdict.check}: {verdict.headline}"),
        '">',
    ]
    if verdict.passed or not verdict.criteria:
        parts.append(f"<div>{head}</div>")
    else:
        rows = "".join(
            f'<tr><th scope="row">{escape(outcome.name)}</th><td>{escape(outcome.observed)}</td><td>{escape(outcome.expected)}</td>'
            f'<td class="{"ok" if outcome.passed else "no"}">{verdict.mark(outcome)}</td></tr>'
            for outcome in verdict.criteria
        )
        columns = "".join(f'<th scope="col">{name}</th>' for name in ("criterion", "observed", "expected", "result"))
        parts.append(f"<table><caption>{head}</caption><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>")
        if verdict.gate:
            parts.append(f"<div>{escape(verdict.gate)}</div>")
    if verdict.hint:
        parts.append(f'<div class="hint">{escape(verdict.hint)}</div>')
    if verdict.detail:
        parts.append(f"<pre>{escape(verdict.detail)}</pre>")
    if verdict._picture:
        data, alt = verdict._picture
        parts.append(f'<img alt="{escape(alt, quote=True)}" src="data:image/png;base64,{data}">')
    parts.append("</div>")
    return "".join(parts)
