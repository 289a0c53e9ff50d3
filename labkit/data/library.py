"""Two more frozen texts, to adapt a model to: what the modules of Python's library say of themselves, and how they are written.

`python -m labkit.data.library` froze them from CPython 3.11: the docstrings of 24 modules (English prose about Python, near to the
documentation topics), and the first 12,000 characters of the code of 24 others, with docstrings and comments taken out (far from them).
Modules with a copyright notice of their own are not among them; what is here stays under the Python Software Foundation's license,
LICENSE.python.txt.
"""

import ast
import json
import lzma
import sysconfig
from functools import cache
from pathlib import Path

import torch

from labkit.data import tokens

KINDS = ("docstrings", "code")
_CHARACTERS = 12_000  # of each module's code: as much in all as there are docstrings
_FILE = Path(__file__).parent / "python_library.json.xz"
_DOCSTRINGS = """typing difflib statistics inspect threading configparser pdb random fractions contextlib collections/__init__
    json/__init__ uuid urllib/parse http/client smtplib traceback timeit mimetypes pkgutil asyncio/events asyncio/tasks asyncio/locks
    xmlrpc/server""".split()
_CODE = """argparse zipfile pickle dataclasses enum cgi tokenize calendar socket shutil bdb tempfile copy dis csv gettext
    glob pydoc locale mailbox ftplib imaplib urllib/request asyncio/base_events""".split()


@cache
def library() -> dict[str, dict[str, str]]:
    """Texts by kind ("docstrings", "code") and module."""
    return json.loads(lzma.decompress(_FILE.read_bytes()))


def python_library(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids to train on and to validate with, of one of `KINDS`: every sixth module is held out."""
    parts = list(library()[kind].values())
    train = "\n".join(part for index, part in enumerate(parts) if index % 6 != 5)
    return tokens(train), tokens("\n".join(parts[5::6]))


def _with_docstring(tree: ast.Module) -> list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)]


def _prose(tree: ast.Module) -> str:
    return "\n\n".join(ast.get_docstring(node) or "" for node in _with_docstring(tree))


def _code(tree: ast.Module) -> str:
    for node in _with_docstring(tree):
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)[:_CHARACTERS]


def freeze() -> None:
    """Write the file anew, from the running Python's library."""
    folder = Path(sysconfig.get_path("stdlib"))
    trees = {name: ast.parse((folder / f"{name}.py").read_text()) for name in (*_DOCSTRINGS, *_CODE)}
    texts = {
        "docstrings": {name: _prose(trees[name]) for name in _DOCSTRINGS},
        "code": {name: _code(trees[name]) for name in _CODE},
    }
    _FILE.write_bytes(lzma.compress(json.dumps(texts, ensure_ascii=False).encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    freeze()
