"""Imported by the process that probes are forked from: what each of them would do again if it were not done here.

A probe starts with every page of that process shared, and pays for each that it touches: importing a lab's checks, or looking for
who holds what is forbidden, takes it longer than most exercises run.
"""

from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules

from labkit import checks
from labkit.checks import _core, _forbid

for _module in iter_modules(checks.__path__):
    if not _module.name.startswith("_"):
        with suppress(Exception):  # a fault in one lab's module is told where that lab is checked
            import_module(f"{checks.__name__}.{_module.name}")
_forbid.survey({name for check in _core._registry.values() for name in check.forbids})
