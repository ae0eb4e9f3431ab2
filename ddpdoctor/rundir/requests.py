"""Requests to a rank, as files in its spool, which its status thread checks once a second.

::

    <spool>/question          its status, requested by the launcher because no rank makes progress; the answer is ``standing.json``
    <spool>/stacks.question   the same for ``ddpdoctor stacks``, also if ranks make progress; the answer is ``stacks.json``
    <spool>/capture.order     a profiler window from a step on that all ranks reach later; the answer is ``capture.json``

Of a spool only its own user can have written them: it is opened as :mod:`.owned` says, and its content is checked.
Nothing is sent through the job's process groups.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, NamedTuple

from .handover import CAPTURE_ANSWER, CAPTURE_ORDER, QUESTION_FILE, STACKS_FILE, STACKS_QUESTION
from .layout import MOST_CAPTURES, opened_spool
from .owned import encoded, open_file, read_file, read_object, replace_file

_MOST_DIGITS, _MOST_NUMBER = 9, 999_999_999
_MOST_ORDER_BYTES = 500
_LAST_STEP = 1 << 53
CAPTURE_SCHEMA = "ddpdoctor.capture/1"
MOST_CAPTURE_STEPS = 64
"""Steps of one capture: the profiler keeps all of it in the memory of the rank."""


class CaptureRequest(NamedTuple):
    """A request for a profiler window while the job runs."""

    request: int
    """Unique number of this request."""
    number: int
    """Number of the window: its trace is ``trace.<number>.json.gz``."""
    first: int
    steps: int


def ask(spool: str, number: int, question: str = QUESTION_FILE) -> None:
    """Write a request to the rank of this spool, with a ``number`` not used for it before. Raises OSError."""
    with opened_spool(spool) as spool_fd:
        replace_file(question, spool_fd, str(number).encode())


def request_in(spool: str, question: str = QUESTION_FILE) -> int:
    """The number of the last request to the rank of this spool; 0 without one. Never raises."""
    try:
        handle = open_file(os.path.join(spool, question), None, os.O_RDONLY)
    except OSError:
        return 0
    with open(handle, "rb") as source:
        text = source.read(_MOST_DIGITS)
    return int(text) if text.isdigit() else 0


def new_request() -> int:
    """A number for a request, not reused for years."""
    return int(time.time() * 10) % _MOST_NUMBER + 1


def request_capture(spool: str, order: CaptureRequest) -> None:
    """Request a profiler window of the rank of this spool. Raises OSError."""
    with opened_spool(spool) as spool_fd:
        replace_file(CAPTURE_ORDER, spool_fd, encoded(order._asdict()))


def capture_requested(spool: str) -> CaptureRequest | None:
    """The requested window of the rank of this spool; None without one, or if the file is no request of this user's.
    Never raises."""
    if not os.path.lexists(os.path.join(spool, CAPTURE_ORDER)):
        return None
    try:
        with opened_spool(spool) as spool_fd:
            data = read_file(CAPTURE_ORDER, spool_fd)
        found = json.loads(data) if len(data) <= _MOST_ORDER_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return _checked(found)


def _checked(found: Any) -> CaptureRequest | None:
    if not isinstance(found, dict) or set(found) != set(CaptureRequest._fields):
        return None
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in found.values()):
        return None
    order = CaptureRequest(**found)
    possible = (
        0 < order.request <= _MOST_NUMBER
        and 0 < order.number <= MOST_CAPTURES
        and 0 < order.first <= _LAST_STEP
        and 0 < order.steps <= MOST_CAPTURE_STEPS
    )
    return order if possible else None


def answer_of(spool: str, answer: str, request: int, since_ns: int | None = None) -> dict[str, Any] | None:
    """The rank's answer to ``request``, or, with ``since_ns``, any answer since then; None without one. Never
    raises."""
    found = _document(spool, answer)
    if found is None or found.get("request") == request:
        return found
    at_ns = found.get("at_ns")
    return found if since_ns is not None and isinstance(at_ns, int) and at_ns >= since_ns else None


def _document(spool: str, name: str) -> dict[str, Any] | None:
    try:
        with opened_spool(spool) as spool_fd:
            return read_object(name, spool_fd)
    except OSError:
        return None


def delete_requests(spool: str, request: int, *names: str) -> None:
    """Remove a request and its answer, unless another process has made a request since. Never raises."""
    for name in {STACKS_QUESTION, STACKS_FILE, CAPTURE_ORDER, CAPTURE_ANSWER}.intersection(names):
        try:
            asked = (
                request_in(spool, name)
                if name == STACKS_QUESTION
                else (_document(spool, name) or {}).get("request")
            )
            if asked == request:
                with opened_spool(spool) as spool_fd:
                    os.unlink(name, dir_fd=spool_fd)
        except OSError:
            pass
