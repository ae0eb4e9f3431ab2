"""Whose faulthandler it is: a process has one timer of it and one handler of fatal signals, and the job's own use comes first.

Imported at the start of every Python below the command, before any code of the job's: nobody can ask faulthandler later whether
its timer runs.
"""

from __future__ import annotations

import faulthandler
from typing import Any, Callable

later, cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
enable, disable, is_enabled = faulthandler.enable, faulthandler.disable, faulthandler.is_enabled


class _Owner:
    """Whose they are by now."""

    __slots__ = ("fatal_is_ours", "timer_is_the_jobs")

    def __init__(self) -> None:
        self.timer_is_the_jobs = False
        """For good, from its first call on."""
        self.fatal_is_ours = False


owner = _Owner()


def watch() -> None:
    """Notice the job's own calls."""
    for name, original in (
        ("dump_traceback_later", later),
        ("cancel_dump_traceback_later", cancel),
    ):
        setattr(faulthandler, name, _with_timer(name, original))
    for name, original in (("enable", enable), ("disable", disable)):
        setattr(faulthandler, name, _with_fatal(name, original))
    setattr(
        faulthandler, "is_enabled", _named("is_enabled", lambda: is_enabled() and not owner.fatal_is_ours)
    )


def _with_timer(name: str, original: Callable[..., Any]) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        owner.timer_is_the_jobs = True
        return original(*args, **kwargs)

    return _named(name, called)


def _with_fatal(name: str, original: Callable[..., Any]) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        ours, owner.fatal_is_ours = owner.fatal_is_ours, False
        result = original(*args, **kwargs)
        return result and not ours if name == "disable" else result

    return _named(name, called)


def _named(name: str, function: Any) -> Any:
    function.__name__ = function.__qualname__ = name
    function.__module__ = "faulthandler"
    function.__doc__ = getattr(faulthandler, name).__doc__
    return function
