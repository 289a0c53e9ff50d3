"""The learner's page of a submission that has no notebook to show: one sentence about what to do."""

from __future__ import annotations

import html
from pathlib import Path

from autograder.build.builder import write_if_changed

# As nbgrader's feedback pages look, whose template needs a graded notebook.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px/1.43 "Helvetica Neue", Helvetica, Arial, sans-serif; color: #333; padding-top: 1em; }}
.panel {{ max-width: 1140px; margin: 0 auto; border: 1px solid #ddd; border-radius: 2px; }}
.panel-heading {{ padding: 10px 15px; background: #f5f5f5; border-bottom: 1px solid #ddd; }}
.panel-heading h4 {{ font-size: 17px; font-weight: 500; margin: 9px 0; }}
.panel-body {{ padding: 15px; }}
</style>
</head>
<body>
<div class="panel">
<div class="panel-heading"><h4>{title} ({score})</h4></div>
<div class="panel-body"><p>{sentence}</p></div>
</div>
</body>
</html>
"""


def write_note(path: Path, title: str, score: str, sentence: str) -> None:
    """Write such a page to `path`; all texts are taken as plain text. Raises OSError."""
    texts = {"title": title, "score": score, "sentence": sentence}
    page = PAGE.format(**{name: html.escape(text) for name, text in texts.items()})
    write_if_changed(path, page.encode("utf-8", "replace"))
