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


class Held(Generic[Value]):
    """What is known of things, each held weakly."""

    def __init__(self, gone: Callable[[Value], None] = lambda value: None) -> None:
        """``gone`` is called with what was known of a thing that is no more, on whatever thread that shows."""
        self._known: Dict[int, Tuple[Any, Value]] = {}
        self._gone = gone

    def find(self, thing: Any) -> Optional[Value]:
        """What is known of ``thing``; None where it was not seen before."""
        known = self._known.get(id(thing))
        return known[1] if known is not None and known[0]() is thing else None

    def hold(self, thing: Any, value: Value) -> "weakref.ref[Any]":
        """From now on ``value`` is what is known of ``thing``."""
        key = id(thing)
        reference = weakref.ref(thing, forgetter(self._known, key, self._gone))
        self._known[key] = reference, value
        return reference


class Numbered(Held[Value]):
    """The things of one kind, numbered in the order in which they were first seen, and what is known of each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        """How many there have been: the next one's number."""
        self.listed: List[Listed] = []
        """By number, the first ``MOST_LISTED``."""

    def add(self, thing: Any, line: Optional[int], value: Value) -> None:
        """Give ``thing`` the next number."""
        reference = self.hold(thing, value)
        if self.count < MOST_LISTED:
            self.listed.append((reference, line))
        self.count += 1


def forgetter(
    known: Dict[int, Any], key: int, gone: Callable[[Any], None] = lambda value: None
) -> "Callable[[weakref.ref[Any]], None]":
    """What takes ``key`` out of ``known`` when the thing dies whose reference stands first there, for its id may be another's by
    then, and calls ``gone`` with what stands second."""

    def forget(reference: "weakref.ref[Any]") -> None:
        try:
            entry = known.get(key)
            if entry is not None and entry[0] is reference:
                del known[key]
                gone(entry[1])
        except Exception:
            pass  # Python would print it among what the job prints

    return forget
