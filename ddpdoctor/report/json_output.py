"""``diagnosis.json``."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.written import DIAGNOSIS, write_file

_OBEYED = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xaa-\xae]|\xe2\x81[\xa6-\xa9]")
"""In UTF-8, what JSON lets stand and a terminal obeys: U+007F to U+009F; and the marks for the direction of writing, U+061C, U+200E
and U+200F, U+202A to U+202E, U+2066 to U+2069."""


def to_json(diagnosis: Diagnosis) -> bytes:
    """The diagnosis as JSON, see :func:`encoded`."""
    return encoded(diagnosis)


def encoded(value: Any) -> bytes:
    """``value`` as JSON (UTF-8).

    Infinities become null, as JSON has none; broken file names keep an escape for each bad byte. Marks for the direction of
    writing and control characters are escapes: who reads the file as text reads it in the order in which it stands there, and
    no terminal obeys it.
    """
    try:
        data = msgspec.json.encode(value, enc_hook=plain_value)
    except UnicodeEncodeError:
        data = msgspec.json.encode(_valid(msgspec.to_builtins(value, enc_hook=plain_value)))
    if data.isascii() and b"\x7f" not in data:
        return data
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0].decode()):04x}".encode(), data)


def formatted(value: Any) -> bytes:
    """The same on lines, for a file that people read."""
    return msgspec.json.format(encoded(value), indent=1)


def write_json(diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Write ``diagnosis.json`` to ``path``. Raises DdpDoctorError where it cannot, or another file is there."""
    write_file(path, formatted(diagnosis), DIAGNOSIS)


def plain_value(value: Any) -> Any:
    """Numbers of numpy as Python's own; NotImplementedError for everything else that JSON does not know."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} in a diagnosis")


def _valid(value: Any) -> Any:
    """The same with lone surrogates, which stand for the bytes of a file name that is no UTF-8, written as
    escapes.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_valid(key): _valid(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_valid(item) for item in value]
    return value
