"""Finds the processes of a run on this host (its launcher, and the ranks that record) from memory-backed files, and sends requests to
ranks: files in their spools, which the status threads check once a second.

::

    <spool>/question          requests the status when no rank makes progress; the answer is ``standing.json``
    <spool>/stacks.question   requests the status for ``ddpdoctor stacks``, also if ranks make progress; the answer is ``stacks.json``
    <spool>/capture.order     requests a profiler window from a later step on; the answer is ``capture.json``

Spools are opened by :mod:`.owned`, so only their own user can have written these files, and the content is checked. Nothing is
sent through the job's process groups.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import layout
from .draining import spools_of
from .host_files import copier_lock_is_held
from .liveness import is_over, is_running
from .owned import encoded, open_file, read_file, read_object, replace_file
from .spool import roots_of
from .stops import PROGRESS_SCHEMA, document_in
from .typed import PROGRESS

_MOST_DIGITS, _MOST_NUMBER = 9, 999_999_999
_MOST_ORDER_BYTES = 500
_LAST_STEP = 1 << 53
CAPTURE_SCHEMA = "ddpdoctor.capture/1"
MOST_CAPTURE_STEPS = 64
"""Upper limit of the steps of one capture, because the profiler keeps all of them in the rank's memory."""


class CaptureRequest(NamedTuple):
    """A request for a profiler window while the job runs."""

    request: int
    """Unique number of this request."""
    number: int
    """Number of the window; its trace is ``trace.<number>.json.gz``."""
    first: int
    steps: int


def ask(spool: str, number: int, question: str = layout.QUESTION_FILE) -> None:
    """Write a request to the rank of this spool; ``number`` must not have been used for it before. Raises OSError."""
    with layout.opened_spool(spool) as spool_fd:
        replace_file(question, spool_fd, str(number).encode())


def request_in(spool: str, question: str = layout.QUESTION_FILE) -> int:
    """The number of the last request to the rank of this spool; 0 if there is none. Never raises."""
    try:
        handle = open_file(os.path.join(spool, question), None, os.O_RDONLY)
    except OSError:
        return 0
    with open(handle, "rb") as source:
        text = source.read(_MOST_DIGITS)
    return int(text) if text.isdigit() else 0


def new_request() -> int:
    """Return a number for a request that does not recur for years."""
    return int(time.time() * 10) % _MOST_NUMBER + 1


def request_capture(spool: str, order: CaptureRequest) -> None:
    """Request a profiler window from the rank of this spool. Raises OSError."""
    with layout.opened_spool(spool) as spool_fd:
        replace_file(layout.CAPTURE_ORDER, spool_fd, encoded(order._asdict()))


def capture_requested(spool: str) -> CaptureRequest | None:
    """The window requested from the rank of this spool; None if there is none, or the file is not a valid request of this user.
    Never raises."""
    if not os.path.lexists(os.path.join(spool, layout.CAPTURE_ORDER)):
        return None
    try:
        with layout.opened_spool(spool) as spool_fd:
            data = read_file(layout.CAPTURE_ORDER, spool_fd)
        found = json.loads(data) if len(data) <= _MOST_ORDER_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return _valid_request(found)


def _valid_request(found: Any) -> CaptureRequest | None:
    if not isinstance(found, dict) or set(found) != set(CaptureRequest._fields):
        return None
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in found.values()):
        return None
    order = CaptureRequest(**found)
    possible = (
        0 < order.request <= _MOST_NUMBER
        and 0 < order.number <= layout.MOST_CAPTURES
        and 0 < order.first <= _LAST_STEP
        and 0 < order.steps <= MOST_CAPTURE_STEPS
    )
    return order if possible else None


def answer_of(spool: str, answer: str, request: int, since_ns: int | None = None) -> dict[str, Any] | None:
    """The rank's answer to ``request`` or, with ``since_ns``, any answer since then; None if there is none. Never raises."""
    found = _document(spool, answer)
    if found is None or found.get("request") == request:
        return found
    at_ns = found.get("at_ns")
    return found if since_ns is not None and isinstance(at_ns, int) and at_ns >= since_ns else None


def _document(spool: str, name: str) -> dict[str, Any] | None:
    try:
        with layout.opened_spool(spool) as spool_fd:
            return read_object(name, spool_fd)
    except OSError:
        return None


def delete_requests(spool: str, request: int, *names: str) -> None:
    """Remove a request and its answer, unless another process has written a request since. Never raises."""
    for name in {
        layout.STACKS_QUESTION,
        layout.STACKS_FILE,
        layout.CAPTURE_ORDER,
        layout.CAPTURE_ANSWER,
    }.intersection(names):
        with suppress(OSError):
            asked = (
                request_in(spool, name)
                if name == layout.STACKS_QUESTION
                else (_document(spool, name) or {}).get("request")
            )
            if asked == request:
                with layout.opened_spool(spool) as spool_fd:
                    os.unlink(name, dir_fd=spool_fd)


@dataclass(frozen=True)
class Present:
    """A rank with a spool: it runs, or its spool still exists."""

    rank: int
    pid: int
    """Process id in its own pid namespace."""
    spool: str

    @property
    def progress(self) -> dict[str, Any] | None:
        """Its last status; None if its steps take less than a second. Never raises."""
        return document_in(self.spool, layout.PROGRESS_FILE, PROGRESS_SCHEMA, PROGRESS, [])


def present_ranks(run: str) -> list[Present]:
    """The ranks of this host, sorted; the newest process of each, because an elastic restart leaves several. Never raises."""
    found: dict[int, Present] = {}
    for spool, _ in sorted(spools_of(run), key=lambda each: _created_s(each[0])):
        named = layout.parse_spool_name(spool)
        if named is not None:
            found[named[0]] = Present(*named, spool)
    return [found[rank] for rank in sorted(found)]


def living_ranks(run: str) -> list[Present]:
    """The present ranks that still record. Never raises."""
    return [rank for rank in present_ranks(run) if not is_over(rank.spool)]


def launcher_runs(run: str, manifest: Mapping[str, Any]) -> bool | None:
    """Whether the launcher that wrote the run's manifest is running; None if unknown. Never raises.

    If it is in another pid namespace of this host, its process id is meaningless; the lock of the process that copies its ranks'
    records is checked instead, if visible here.
    """
    runs = is_running(manifest)
    if runs is None and manifest.get("host") == socket.gethostname():
        roots = list(filter(os.path.exists, roots_of(run)))
        return any(map(copier_lock_is_held, roots)) if roots else None
    return runs


def _created_s(spool: str) -> float:
    try:
        return os.stat(spool).st_ctime
    except OSError:
        return 0.0
