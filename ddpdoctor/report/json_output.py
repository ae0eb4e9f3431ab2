"""``diagnosis.json`` and its published JSON Schema."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.diagnose.diagnosis import DIAGNOSIS_SCHEMA, Diagnosis
from ddpdoctor.report.replace import write_whole


def to_json(diagnosis: Diagnosis) -> bytes:
    """The diagnosis as JSON (UTF-8).

    Infinities become null, as JSON has none; broken file names keep an escape for each bad byte.
    """
    try:
        return msgspec.json.encode(diagnosis, enc_hook=plain_value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_valid(msgspec.to_builtins(diagnosis, enc_hook=plain_value)))


def write_json(diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Write ``diagnosis.json`` to ``path``, replacing what is there as a whole.

    Raises DdpDoctorError where it cannot.
    """
    write_whole(path, msgspec.json.format(to_json(diagnosis), indent=1))


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of ``diagnosis.json``."""
    schema: dict[str, Any] = msgspec.json.schema(Diagnosis)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"ddpdoctor diagnosis ({DIAGNOSIS_SCHEMA})",
        **schema,
    }


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
