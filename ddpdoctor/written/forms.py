"""The kinds of files that ddpdoctor writes for the user, and how an earlier file of each kind is recognised."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import zlib
from dataclasses import dataclass
from typing import BinaryIO

from ddpdoctor.rundir import is_hollow

_HEAD_BYTES, _SEAL_BYTES = 4096, 200
_BLOCK_BYTES = 1 << 20
_SEAL = re.compile(rb"(?s).*\n[^\n]{0,8}ddpdoctor ([a-z-]{1,20}) sha256:([0-9a-f]{64})[^\n]{0,8}\n")


@dataclass(frozen=True)
class Form:
    """A kind of file that ddpdoctor writes. ``words`` is its name in messages. It is recognised by a seal, enclosed in the two
    parts of ``comment``, or by its beginning ``head``."""

    words: str
    kind: str = ""
    comment: tuple[bytes, bytes] = (b"<!-- ", b" -->")
    head: re.Pattern[bytes] | None = None

    def sealed(self, data: bytes) -> bytes:
        """``data`` with its seal, if this form has one."""
        return data if self.head is not None else data + self.seal_of(data)

    def seal_of(self, data: bytes) -> bytes:
        """The last line of a file with the content ``data``."""
        return self._seal(hashlib.sha256(data).hexdigest().encode())

    @property
    def seal_bytes(self) -> int:
        """Length of a seal, bytes."""
        return len(self._seal(b"0" * 64))

    def fault(self, file: BinaryIO) -> str | None:
        """Why ``file``, open at its beginning, is not one that ddpdoctor wrote; None if it is, or if it is empty. Raises OSError."""
        other = f"is not {self.words} that ddpdoctor wrote"
        if self.head is not None:
            head = file.read(_HEAD_BYTES)
            return None if not head or self.head.match(_unpacked(head)) else other
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _SEAL_BYTES))
        found = _SEAL.fullmatch(file.read(_SEAL_BYTES))
        if found is None or found[1] != self.kind.encode():
            return None if size == 0 else other
        file.seek(0)
        whole = hash_of(file, size - self.seal_bytes)
        return None if whole == found[2].decode() else "was changed after ddpdoctor wrote it"

    def _seal(self, digest: bytes) -> bytes:
        begin, end = self.comment
        return b"\n" + begin + b"ddpdoctor " + self.kind.encode() + b" sha256:" + digest + end + b"\n"


def _json(schema: str) -> re.Pattern[bytes]:
    return re.compile(rb'\s*\{\s*"schema":\s*"ddpdoctor\.' + schema.encode() + rb'/\d+"')


REPORT = Form("an HTML report", "report")
MARKDOWN = Form("a Markdown summary", "markdown")
JUNIT = Form("a JUnit file", "junit")
COMPARISON_PAGE = Form("an HTML comparison", "comparison")
HISTORY_PAGE = Form("an HTML history", "history")
PATCH = Form("a patch", "patch", (b"# ", b""))
BUNDLE = Form("a bundle", "bundle", (b"# ", b""))
DIAGNOSIS = Form("a diagnosis", head=_json("diagnosis"))
COMPARISON = Form("a comparison", head=_json("comparison"))
HISTORY = Form("a history", head=_json("history"))
TRIALS = Form("an answer of `try`", head=_json("trials"))
DOCTOR = Form("an answer of `doctor`", head=_json("doctor"))
SARIF = Form(
    "a SARIF log",
    head=re.compile(rb'\s*\{\s*"\$schema":[^,]*,\s*"version":[^,]*,\s*"runs":[\s\[{]*"tool":[\s{]*"driver":[\s{]*"name":\s*"ddpdoctor"'),
)  # fmt: skip
TIMELINE = Form(
    "a timeline", head=re.compile(rb'\{"displayTimeUnit":"ms","otherData":\{"producer":"ddpdoctor"')
)
EVENTS = Form("an event file of TensorBoard", head=re.compile(rb"(?s).{8,60}brain\.Event:\d"))
FORMS = (
    *(REPORT, MARKDOWN, JUNIT, COMPARISON_PAGE, HISTORY_PAGE, PATCH, BUNDLE, DIAGNOSIS, COMPARISON, HISTORY),
    *(TRIALS, DOCTOR, SARIF, TIMELINE, EVENTS),
)


def hash_of(file: BinaryIO, size: int | None = None) -> str:
    """SHA-256 of the next ``size`` bytes of ``file``, or of all; "" for a sparse file, which ddpdoctor does not write."""
    if is_hollow(os.fstat(file.fileno())):
        return ""
    whole, left = hashlib.sha256(), sys.maxsize if size is None else size
    while left > 0 and (block := file.read(min(_BLOCK_BYTES, left))):
        whole.update(block)
        left -= len(block)
    return whole.hexdigest()


def _unpacked(head: bytes) -> bytes:
    """``head`` decompressed, if it is the beginning of a gzip file."""
    if not head.startswith(b"\x1f\x8b"):
        return head
    with contextlib.suppress(zlib.error):
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    return b""
