"""Whether a data set shares its samples among the workers of a loader."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any, Iterator

_ASKS = "get_worker_info"


def asks_for_worker(data: Any) -> bool:
    """Whether the code of an iterable data set, of its class or of what it wraps, names the function that tells the worker.

    Code is looked at, not run: a function of another module that it calls is not seen.
    """
    kinds = (
        [type(data), *(type(value) for value in vars(data).values())]
        if hasattr(data, "__dict__")
        else [type(data)]
    )
    for kind in kinds:
        for owner in kind.__mro__:
            if owner is object or owner.__module__.startswith("torch.utils.data.dataset"):
                continue
            for member in vars(owner).values():
                code = getattr(getattr(member, "__func__", member), "__code__", None)
                if code is not None and any(_ASKS in each.co_names for each in _codes(code)):
                    return True
            if getattr(sys.modules.get(owner.__module__), _ASKS, None) is not None:
                return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _codes(constant)
