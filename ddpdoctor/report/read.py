"""Read a diagnosis from ``diagnosis.json`` or from an HTML report."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from ddpdoctor.diagnose.diagnosis import DIAGNOSIS_SCHEMA, Diagnosis
from ddpdoctor.errors import UnusableInput
from ddpdoctor.report.validation import validated
from ddpdoctor.rundir import open_regular, read_bounded

SCRIPT_ID = "ddpdoctor-diagnosis"
GENERATOR = "ddpdoctor"
_REPORT = re.compile(rb'<meta\s[^<>]{0,200}?\bname="generator"\s{1,9}content="%b \S' % GENERATOR.encode())
"""Matches the head of a report. Other pages of ddpdoctor contain no diagnosis and have no version there."""
# Regular expressions suffice, as "<" is escaped in all texts of a report. An HTML parser could take time quadratic in the size of a
# hostile page.
_BEGIN = re.compile(rb'<script\s[^<>]{0,200}?\bid="%b"[^<>]{0,200}>' % SCRIPT_ID.encode())
_END = b"</script"
_DIAGNOSIS = DIAGNOSIS_SCHEMA.rpartition("/")[0].encode()
_HEAD_BYTES = 4096
MOST_BYTES = 256 << 20
"""Most bytes of a file that is read. The report of a job with thousands of ranks has about 10 MiB."""


class _Head(msgspec.Struct):
    """The part of a diagnosis that all versions have."""

    schema: str


def holds_diagnosis(path: Path) -> bool:
    """Whether the beginning of ``path`` looks like a file for :func:`read_diagnosis`; False if it cannot be read."""
    head = _head_of(path)
    return bool(_REPORT.search(head)) if path.suffix == ".html" else _DIAGNOSIS in head


def is_foreign_page(path: Path) -> bool:
    """Whether ``path`` is a web page that another program wrote: its first 4 KiB do not name ddpdoctor as generator."""
    head = _head_of(path)
    return (
        len(head) == _HEAD_BYTES
        and head.lstrip().startswith(b"<")
        and b'content="%b' % GENERATOR.encode() not in head
    )


def _head_of(path: Path) -> bytes:
    """The first 4 KiB of ``path``; b"" if it cannot be read."""
    try:
        with os.fdopen(open_regular(os.fspath(path), follow=True), "rb") as source:
            return source.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return b""


def read_diagnosis(path: str | os.PathLike[str]) -> Diagnosis:
    """The diagnosis in ``path``.

    Raises UnusableInput, with one sentence, if ``path`` is not a report that this version can read.
    """
    name = os.fspath(path)
    try:
        data = read_bounded(name, MOST_BYTES, follow=True)
    except OSError as error:
        raise UnusableInput(f"{name}: cannot be read: {error.strerror or error}") from error
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        raise UnusableInput(f"{name}: the file is empty; write the report again")
    if not start.startswith(b"<"):
        return _decode(data, name)
    return _decode(_extract_json(data, name), name)


def _extract_json(data: bytes, name: str) -> bytes:
    """The JSON in the HTML page ``data``, the content of ``name``. Raises UnusableInput if there is none."""
    begin = _BEGIN.search(data)
    end = -1 if begin is None else data.find(_END, begin.end())
    if begin is not None and end >= 0:
        return data[begin.end() : end].strip()
    if begin is not None or _REPORT.search(data):
        raise UnusableInput(f"{name}: the report is truncated; write or copy it again")
    raise UnusableInput(f"{name}: an HTML page, but not a ddpdoctor report (it contains no diagnosis)")


def _decode(data: bytes, name: str) -> Diagnosis:
    try:
        head = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=_Head)
    except msgspec.ValidationError as error:
        raise UnusableInput(f"{name}: JSON, but not a ddpdoctor diagnosis (it has no schema)") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "truncated" in str(error):
            raise UnusableInput(f"{name}: the file is truncated; write or copy it again") from error
        raise UnusableInput(f"{name}: neither a ddpdoctor report nor a diagnosis.json ({error})") from error
    if head.schema != DIAGNOSIS_SCHEMA:
        raise UnusableInput(_wrong_schema(head.schema, name))
    try:
        diagnosis = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=Diagnosis)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableInput(f"{name}: the diagnosis does not follow {DIAGNOSIS_SCHEMA}: {error}") from error
    try:
        return validated(diagnosis)
    except ValueError as error:
        raise UnusableInput(f"{name}: the diagnosis does not follow {DIAGNOSIS_SCHEMA}: {error}") from error


def _wrong_schema(schema: str, name: str) -> str:
    own, _, version = DIAGNOSIS_SCHEMA.rpartition("/")
    match = re.fullmatch(rf"{re.escape(own)}/(\d+)", schema)
    if match and int(match[1]) > int(version):
        return (
            f"{name}: written by a newer ddpdoctor (schema {schema}, this one reads {DIAGNOSIS_SCHEMA}); "
            "upgrade ddpdoctor"
        )
    return (
        f"{name}: schema {schema[:80]!r} is not {DIAGNOSIS_SCHEMA}; "
        "expected a ddpdoctor report or its diagnosis.json"
    )
