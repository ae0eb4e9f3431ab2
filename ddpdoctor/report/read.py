"""Reading a diagnosis back: from ``diagnosis.json`` or from an HTML report that carries it."""

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
"""In the head of a report; other pages of ddpdoctor carry no diagnosis, and name no version there."""
# Of a page of ours only these two places matter, and neither can stand in a text: there, "<" is escaped. A parser of HTML takes
# time that grows with the square of a page that somebody made for it.
_BEGIN = re.compile(rb'<script\s[^<>]{0,200}?\bid="%b"[^<>]{0,200}>' % SCRIPT_ID.encode())
_END = b"</script"
_DIAGNOSIS = DIAGNOSIS_SCHEMA.rpartition("/")[0].encode()
_HEAD_BYTES = 4096
MOST_BYTES = 256 << 20
"""A report of a job with thousands of ranks has some 10 MiB."""


class _Head(msgspec.Struct):
    """The part of a diagnosis that every version shares."""

    schema: str


def holds_diagnosis(path: Path) -> bool:
    """Whether ``path`` looks like a file for :func:`read_diagnosis`; no, where it cannot be read."""
    head = _head_of(path)
    return bool(_REPORT.search(head)) if path.suffix == ".html" else _DIAGNOSIS in head


def is_page_of_others(path: Path) -> bool:
    """Whether ``path`` is a whole web page, or the beginning of one, that another program wrote: ours say who wrote them in their first
    kilobyte."""
    head = _head_of(path)
    return (
        len(head) == _HEAD_BYTES
        and head.lstrip().startswith(b"<")
        and b'content="%b' % GENERATOR.encode() not in head
    )


def _head_of(path: Path) -> bytes:
    """Its first bytes; none where it cannot be read."""
    try:
        with os.fdopen(open_regular(os.fspath(path), follow=True), "rb") as source:
            return source.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return b""


def read_diagnosis(path: str | os.PathLike[str]) -> Diagnosis:
    """The diagnosis in ``path``.

    Raises UnusableInput, in one sentence, for anything else than a report this version can read.
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
    return _decode(_carried_in(data, name), name)


def _carried_in(data: bytes, name: str) -> bytes:
    """The JSON in the page ``data``, the content of ``name``. Raises UnusableInput where there is none."""
    begin = _BEGIN.search(data)
    end = -1 if begin is None else data.find(_END, begin.end())
    if begin is not None and end >= 0:
        return data[begin.end() : end].strip()
    if begin is not None or _REPORT.search(data):
        raise UnusableInput(f"{name}: the report is cut off half way; write or copy it again")
    raise UnusableInput(f"{name}: an HTML page, but not a ddpdoctor report (it carries no diagnosis)")


def _decode(data: bytes, name: str) -> Diagnosis:
    try:
        head = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=_Head)
    except msgspec.ValidationError as error:
        raise UnusableInput(
            f"{name}: this is JSON, but not a ddpdoctor diagnosis (no schema named in it)"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "truncated" in str(error):
            raise UnusableInput(f"{name}: the file is cut off; write or copy it again") from error
        raise UnusableInput(
            f"{name}: this is neither a ddpdoctor report nor a diagnosis.json ({error})"
        ) from error
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
        "give a ddpdoctor report or its diagnosis.json"
    )
