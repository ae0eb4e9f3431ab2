"""Writes ``diagnosis.json``."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.written import DIAGNOSIS, write_file

_CONTROL_BYTES = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xaa-\xae]|\xe2\x81[\xa6-\xa9]")
"""UTF-8 of characters that JSON allows unescaped and terminals interpret: the control characters U+007F to U+009F, and the
bidirectional controls U+061C, U+200E, U+200F, U+202A to U+202E, U+2066 to U+2069."""


def to_json(value: Any) -> bytes:
    """A diagnosis, or any other ``value``, as JSON (UTF-8).

    Infinities become null, because JSON has none. Invalid bytes of file names are escaped. Control characters, also bidirectional
    ones, are escaped, so that the file can be printed safely on a terminal.
    """
    try:
        data = msgspec.json.encode(value, enc_hook=plain_value)
    except UnicodeEncodeError:
        data = msgspec.json.encode(_without_surrogates(msgspec.to_builtins(value, enc_hook=plain_value)))
    if data.isascii() and b"\x7f" not in data:
        return data
    return _CONTROL_BYTES.sub(lambda found: f"\\u{ord(found[0].decode()):04x}".encode(), data)


def formatted(value: Any) -> bytes:
    """``value`` as indented JSON (UTF-8)."""
    return msgspec.json.format(to_json(value), indent=1)


def write_json(diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Write ``diagnosis.json`` to ``path``. Raises DdpDoctorError if it cannot be written or would replace another file."""
    write_file(path, formatted(diagnosis), DIAGNOSIS)


def plain_value(value: Any) -> Any:
    """NumPy scalars and arrays as Python values. Raises NotImplementedError for any other type."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} in a diagnosis")


def _without_surrogates(value: Any) -> Any:
    """``value`` with lone surrogates (bytes of file names that are not UTF-8) as escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value
