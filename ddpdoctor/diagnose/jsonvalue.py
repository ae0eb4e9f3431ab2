"""The type of untyped JSON values in a diagnosis, and the conversion of NumPy values to them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

if TYPE_CHECKING:
    JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
else:
    JsonValue = Any  # msgspec knows no types that refer to themselves

_Value = TypeVar("_Value")
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
"""Exact types that need no conversion; NumPy scalars can be subclasses of them."""


def without_numpy(value: _Value) -> _Value:
    """``value`` with NumPy scalars and arrays replaced by Python numbers and lists at any depth; the rest is not copied."""
    plain: _Value = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        pairs = [(_plain(key), _plain(item)) for key, item in value.items()]
        same = all(
            key is old and item is kept for (key, item), (old, kept) in zip(pairs, value.items(), strict=True)
        )
        return value if same else dict(pairs)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        same = all(item is old for item, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    names: tuple[str, ...] = ()
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    elif is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value))
    changed = {name: plain for name in names if (plain := _plain(old := getattr(value, name))) is not old}
    if not changed:
        return value
    return (
        msgspec.structs.replace(value, **changed)
        if isinstance(value, msgspec.Struct)
        else replace(value, **changed)
    )
