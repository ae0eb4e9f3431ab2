"""Whether a data set shares its samples among the workers of a loader."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any, Dict, Iterator

_ASKS = "get_worker_info"


def asks_for_worker(data: Any) -> bool:
    """Whether the code of an iterable data set, of its class or of what it wraps, names the function that tells the worker.

    Code is looked at, not run: its own, and that of functions of its module which it calls.
    """
    held = vars(data).values() if hasattr(data, "__dict__") else ()
    return any(_class_asks(owner) for kind in {type(data), *map(type, held)} for owner in kind.__mro__)


def _class_asks(owner: type) -> bool:
    if owner.__module__.partition(".")[0] in ("builtins", "torch"):
        return False
    beside: Dict[str, Any] = vars(sys.modules.get(owner.__module__, object))  # type: ignore[assignment]
    for member in vars(owner).values():
        for code in _codes(_code_of(member)):
            called = [_code_of(beside.get(name)) for name in code.co_names]
            if any(_ASKS in each.co_names for each in (code, *called) if each is not None):
                return True
    return False


def _code_of(function: Any) -> Any:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if type(code) is CodeType else None


def _codes(code: Any) -> Iterator[CodeType]:
    if code is None:
        return
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _codes(constant)
