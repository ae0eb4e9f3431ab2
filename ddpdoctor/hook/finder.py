"""Calls a function after a module is imported. It does not import the module and leaves no attribute in it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_awaited: dict[str, tuple[str, str]] = {}
"""Name of an awaited module: (module to import after it, function of that module to call)."""


class _Finder:
    """First entry of ``sys.meta_path``. Costs one dictionary lookup per imported module."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _awaited:
            return None
        try:
            return _watched_spec(name, path, target)
        except Exception:
            return None


def after_import(name: str, module: str, function: str) -> None:
    """Import ``module`` and call its ``function`` after ``name`` is imported, or now if it already is. Errors in a call after an
    import are ignored."""
    if name in sys.modules:
        getattr(importlib.import_module(module), function)()
        return
    _awaited[name] = (module, function)
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
        # Set on this loader instance only and removed before the import, so type(torch.__loader__) is unchanged.
        vars(loader).pop("exec_module", None)
        try:
            execute(module)
        except BaseException as raised:
            raised.__traceback__ = raised.__traceback__ and raised.__traceback__.tb_next
            raise
        callback = _awaited.pop(name, None)
        if callback is not None:
            try:
                getattr(importlib.import_module(callback[0]), callback[1])()
            except Exception:
                pass

    loader.exec_module = exec_module
    return spec
