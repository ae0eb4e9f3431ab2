"""Calls a function once a module has been imported, without importing it or leaving a trace in it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_wanted: dict[str, tuple[str, str]] = {}
"""By the name of a module that is waited for: the module to import then, and the function in it to call."""


class _Finder:
    """First on ``sys.meta_path``: a dictionary look-up for every module, and for the wanted ones a call after its execution."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _wanted:
            return None
        try:
            return _watched_spec(name, path, target)
        except Exception:
            return None


def after_import(name: str, module: str, function: str) -> None:
    """Once ``name`` is imported, import ``module`` and call its ``function``; at once where it is. Errors after an import are swallowed."""
    if name in sys.modules:
        getattr(importlib.import_module(module), function)()
        return
    _wanted[name] = (module, function)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _watched_spec(name: str, path: Any, target: Any) -> ModuleSpec | None:
    spec = None
    for finder in sys.meta_path:
        if finder is not _Finder and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
    if spec is None or not hasattr(spec.loader, "exec_module"):
        return spec
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        # An attribute of this one loader, gone before the import: type(torch.__loader__) stays what it was.
        vars(loader).pop("exec_module", None)
        try:
            execute(module)
        except BaseException as raised:
            raised.__traceback__ = raised.__traceback__ and raised.__traceback__.tb_next
            raise
        wanted = _wanted.pop(name, None)
        if wanted is not None:
            try:
                getattr(importlib.import_module(wanted[0]), wanted[1])()
            except Exception:
                pass

    loader.exec_module = exec_module
    return spec
