"""The constants by which jobs are measured, found by looking: who adds one to a room's ``Tuning`` has it swept."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

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
        Constant(f"{module.__name__.removeprefix('ddpdoctor.measure.')}.{field.name}", holder, field.name)
        for module in _modules()
        for holder in _tunings(module)
        for field in fields(holder)
        if _is_number(getattr(holder, field.name))
    ]


def _modules() -> Iterator[ModuleType]:
    for room in ROOMS:
        package = importlib.import_module(f"ddpdoctor.measure.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def _tunings(module: ModuleType) -> list[Any]:
    """The instances that this module makes of its own tuning classes."""
    return [
        value
        for value in vars(module).values()
        if is_dataclass(value)
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
    object.__setattr__(constant.holder, constant.field, value)
    try:
        yield
    finally:
        object.__setattr__(constant.holder, constant.field, measured)


@contextmanager
def looked_at(among: list[Constant]) -> Iterator[set[str]]:
    """Collects the names of the constants that are read inside."""
    names: set[str] = set()
    holders = {id(constant.holder): constant.holder for constant in among}
    kinds = {key: type(holder) for key, holder in holders.items()}
    of_holder: dict[int, dict[str, str]] = {key: {} for key in holders}
    for constant in among:
        of_holder[id(constant.holder)][constant.field] = constant.name
    for key, holder in holders.items():
        object.__setattr__(holder, "__class__", _watched(kinds[key], of_holder[key], names))
    try:
        yield names
    finally:
        for key, holder in holders.items():
            object.__setattr__(holder, "__class__", kinds[key])


def _watched(kind: type, of_field: dict[str, str], names: set[str]) -> type:
    def read(holder: Any, field: str) -> Any:
        if field in of_field:
            names.add(of_field[field])
        return object.__getattribute__(holder, field)

    return type(kind.__name__, (kind,), {"__getattribute__": read})
