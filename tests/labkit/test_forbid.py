"""Tripwires: laid on what is forbidden wherever it is held, with a survey made before and without."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from labkit.checks import _forbid


def _module(name: str, monkeypatch: pytest.MonkeyPatch, **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of two functions and a class, and nothing surveyed."""
    for name, empty in (("_places", {}), ("_holders", {}), ("_last_surveyed", None)):
        monkeypatch.setattr(_forbid, name, empty)
    made: dict[str, object] = {"__name__": "a_library"}
    exec("def forbidden(): pass\ndef free(): pass\nclass Kind: pass", made)
    return _module("a_library", monkeypatch, **{name: made[name] for name in ("forbidden", "free", "Kind")})


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except _forbid.ForbiddenCall:
        return True
    return False


@pytest.mark.parametrize("surveyed", [(), ("a_library.forbidden", "a_library", "a_library.absent"), ("a_library.free",)])
@pytest.mark.parametrize("forbids", [("a_library.forbidden",), ("a_library",), ("a_library.forbidden", "a_library.Kind")])
def test_every_holder_meets_the_tripwire(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, surveyed: tuple[str, ...], forbids: tuple[str, ...]
) -> None:
    before = _module("holds_before", monkeypatch, own_name=library.forbidden)
    if surveyed:
        _forbid.survey(surveyed)
    after = _module("holds_after", monkeypatch, own_name=library.forbidden)
    tripped = _forbid.lay(forbids)
    assert tripped == []
    assert all(_refused(call) for call in (library.forbidden, before.own_name, after.own_name))
    assert tripped == ["a_library.forbidden"]
    assert _refused(library.free) == ("a_library" in forbids)
    assert _refused(library.Kind) == ("a_library.forbidden" != forbids[-1])
