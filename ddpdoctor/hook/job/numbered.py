"""Optimizers, loaders and models of the job by number: found in constant time, held weakly, forgotten once they are gone.

A job may make thousands: an optimizer for each task of meta-learning, a loader for each epoch.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, Generic, List, Optional, Tuple, TypeVar

MOST_LISTED = 256
"""Of a kind, the first ones, are described in rank.json (some 400 bytes each); the others are counted there."""

Value = TypeVar("Value")
Listed = Tuple["weakref.ref[Any]", Optional[int]]
"""A thing, weakly, and the number of its source line."""


class Numbered(Generic[Value]):
    """The things of one kind, numbered in the order in which they were first seen, and what is known of each."""

    def __init__(self) -> None:
        self.count = 0
        """How many there have been: the next one's number."""
        self.listed: List[Listed] = []
        """By number, the first ``MOST_LISTED``."""
        self._known: Dict[int, Tuple[Any, Value]] = {}

    def find(self, thing: Any) -> Optional[Value]:
        """What is known of ``thing``; None where it was not seen before."""
        known = self._known.get(id(thing))
        return known[1] if known is not None and known[0]() is thing else None

    def add(self, thing: Any, line: Optional[int], value: Value) -> None:
        """Give ``thing`` the next number."""
        key = id(thing)
        reference = weakref.ref(thing, forgetter(self._known, key))
        self._known[key] = reference, value
        if self.count < MOST_LISTED:
            self.listed.append((reference, line))
        self.count += 1


def forgetter(known: Dict[int, Any], key: int) -> "Callable[[weakref.ref[Any]], None]":
    """What takes ``key`` out of ``known`` when the thing dies whose reference stands first there: its id may be another's by
    then."""

    def forget(reference: "weakref.ref[Any]") -> None:
        entry = known.get(key)
        if entry is not None and entry[0] is reference:
            del known[key]

    return forget
