"""The constants by which jobs are measured, found by looking: who adds one to a room's ``Tuning`` has it swept."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr

ROOMS = ("align", "window", "graph", "attribution", "replay", "costs", "numerics")
"""Of ``ddpdoctor.measure``; the arithmetic of persistence and chance is attribution's."""
MOVED_BY = 0.3
"""Of a constant, in either direction."""


@dataclass(frozen=True)
class Constant:
    """One field of one room's tuning."""

    name: str
    """Such as ``align.matching.scatters``."""
    holder: Any
    """The frozen instance that everybody imports."""
    field: str

    @property
    def value(self) -> Any:
        return getattr(self.holder, self.field)

    def moved(self, direction: int) -> Any:
        """The value 30 % down (-1) or up (+1); a tuple with all its numbers."""
        if isinstance(self.value, tuple):
            return tuple(moved_number(value, direction) for value in self.value)
        return moved_number(self.value, direction)


def moved_number(value: float, direction: int) -> float:
    """``value`` 30 % down or up: a count by one at least, and a share or a ratio, which that would carry over one, by 30 % of
    its distance from one."""
    if isinstance(value, int):
        return max(0, value + direction * max(1, round(MOVED_BY * abs(value))))
    if value > 0 and (value * (1 - MOVED_BY) < 1 < value or value < 1 < value * (1 + MOVED_BY)):
        return value + direction * MOVED_BY * abs(1 - value)
    return value * (1 + direction * MOVED_BY)


def constants() -> list[Constant]:
    """All of them, by room and place."""
    return [
        Constant(f"{module.__name__.removeprefix('ddpdoctor.measure.')}.{field}", holder, field)
        for module in _modules()
        for holder in _tunings(module)
        for field in holder.__struct_fields__
        if _is_number(getattr(holder, field))
    ]


def _modules() -> Iterator[ModuleType]:
    for room in ROOMS:
        own = importlib.import_module(f"ddpdoctor.measure.{room}")
        yield own
        for found in pkgutil.walk_packages(getattr(own, "__path__", ()), f"{own.__name__}."):
            yield importlib.import_module(found.name)


def _tunings(module: ModuleType) -> list[Any]:
    """The instances that this module makes of its own tuning classes."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, Struct)
        and type(value).__name__.endswith("Tuning")
        and type(value).__module__ == module.__name__
    ]


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextmanager
def at(constant: Constant, value: Any) -> Iterator[None]:
    """The constant with another value, for all who imported its holder."""
    measured = constant.value
    force_setattr(constant.holder, constant.field, value)
    try:
        yield
    finally:
        force_setattr(constant.holder, constant.field, measured)


@contextmanager
def looked_at(among: list[Constant]) -> Iterator[set[str]]:
    """Collects the names of the constants that are read inside."""
    names: set[str] = set()
    of_holder: dict[int, dict[str, str]] = {}
    for constant in among:
        of_holder.setdefault(id(constant.holder), {})[constant.field] = constant.name

    def read(holder: Any, field: str) -> Any:
        if (name := of_holder.get(id(holder), {}).get(field)) is not None:
            names.add(name)
        return object.__getattribute__(holder, field)

    kinds: set[Any] = {type(constant.holder) for constant in among}
    for kind in kinds:
        kind.__getattribute__ = read
    try:
        yield names
    finally:
        for kind in kinds:
            del kind.__getattribute__
