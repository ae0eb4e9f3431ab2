"""Predicates over event names, asked once for each name: the ranks of a job share nearly all of theirs."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

Predicate = Callable[[str], Any]

KNOWN_NAMES = 1 << 16
"""Names whose answer one predicate remembers: the ranks of a job share nearly all of theirs."""
_PREDICATES = 1 << 10
"""Predicates whose answers are remembered: the whole analysis asks some dozens. Beyond both, they are asked anew."""


class _Answers(dict[str, bool]):
    """What a predicate says about names; looking one up stays in C."""

    def __init__(self, predicate: Predicate) -> None:
        super().__init__()
        self._predicate = predicate

    def __missing__(self, name: str) -> bool:
        answer = bool(self._predicate(name))
        if len(self) < KNOWN_NAMES:
            self[name] = answer
        return answer


_ALL: dict[CodeType, _Answers] = {}


def remembered(predicate: Predicate) -> Predicate:
    """``predicate``, a pure function of the name, with its answers remembered from one call of this to the next.

    A lambda is made anew each time its line runs, but it is the same function if it holds nothing of its
    surroundings: such functions are told by their code. Others are returned as they are.
    """
    if not isinstance(predicate, FunctionType) or _holds_something(predicate):
        return predicate
    known = _ALL.get(predicate.__code__)
    if known is None:
        if len(_ALL) >= _PREDICATES:
            return predicate
        known = _ALL[predicate.__code__] = _Answers(predicate)
    return known.__getitem__


def _holds_something(function: FunctionType) -> bool:
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__)
