"""Tracks whether the hook or the job enabled faulthandler. A process has one handler of fatal signals; the job's takes precedence.

Imported at the start of every Python process of the command, before any code of the job.
"""

from __future__ import annotations

import faulthandler
from typing import Any, Callable

enable, disable, is_enabled = faulthandler.enable, faulthandler.disable, faulthandler.is_enabled


enabled_by_hook = [False]
"""Whether the hook has enabled faulthandler and the job has not done so since."""


def watch() -> None:
    """Wrap faulthandler's functions to detect calls by the job."""
    for name, original in (("enable", enable), ("disable", disable)):
        setattr(faulthandler, name, _call_detector(name, original))
    setattr(
        faulthandler,
        "is_enabled",
        _with_original_identity("is_enabled", lambda: is_enabled() and not enabled_by_hook[0]),
    )


def _call_detector(name: str, original: Callable[..., Any]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        was_enabled_by_hook, enabled_by_hook[0] = enabled_by_hook[0], False
        result = original(*args, **kwargs)
        return result and not was_enabled_by_hook if name == "disable" else result

    return _with_original_identity(name, wrapper)


def _with_original_identity(name: str, function: Any) -> Any:
    function.__name__ = function.__qualname__ = name
    function.__module__ = "faulthandler"
    function.__doc__ = getattr(faulthandler, name).__doc__
    return function
