"""Which rank a trace belongs to, as far as its file name tells."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_TENSORBOARD = re.compile(r"^(?P<host>.+)_(?P<pid>\d+)\.(?P<stamp>\d{10,})\.pt\.trace\.json")
"""``tensorboard_trace_handler`` without a worker name: host_pid.ns.pt.trace.json, no rank."""
_RANK = (
    re.compile(
        r"(?<![a-z])(?:global[-_ ]?)?(?<!local)(?<!local[-_ ])rank[-_ =]?0*(\d+)(?!\d)", re.IGNORECASE
    ),
    re.compile(r"(?<![a-z])(?:worker|trainer)[-_ ]?0*(\d+)(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])r0*(\d+)(?=[-_.]|$)", re.IGNORECASE),
)
_MIN_PID = 100
"""Below this, the number before the time stamp is rather a step ("worker0_step_12.1694128201545") than a process id."""


MOST_RANKS = 10_000_000
"""No job has so many: a number beyond is no rank, and no number of ranks."""


def rank_of_name(path: str) -> int | None:
    """The rank that a file name (rank-34, rank0, worker3, _r5_) or its folder names; None where neither does."""
    file = PurePosixPath(path.replace("\\", "/"))
    handler = _TENSORBOARD.match(file.name)
    candidates = [file.name] if not (handler and int(handler["pid"]) >= _MIN_PID) else []
    for text in (*candidates, file.parent.name):
        for pattern in _RANK:
            if (match := pattern.search(text)) and (rank := int(match.group(1))) < MOST_RANKS:
                return rank
    return None


def host_of_name(path: str) -> str | None:
    """The host in a name made by ``tensorboard_trace_handler``, else None."""
    handler = _TENSORBOARD.match(PurePosixPath(path.replace("\\", "/")).name)
    return handler["host"] if handler and int(handler["pid"]) >= _MIN_PID else None
