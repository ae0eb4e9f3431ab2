"""Determines how a job and its ranks ended.

The exit status of a rank's process is one source. Others are the rank's own records, those of other ranks, the launcher's exit
code, and a request to end. ``docs/job-ends.md`` has the table, with a job for each row.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

POLITE = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Signals with which a launcher, scheduler, controller or user asks a process to end."""


class Conclusion(str, Enum):
    """How an end is classified."""

    WELL = "ended well"
    FAILED = "failed"
    REQUESTED = "ended on request"
    UNKNOWN = "unknown"


class Exit(str, Enum):
    """How a rank's process ended, according to the kernel."""

    ZERO = "exit code 0"
    OWN_CODE = "exit code that its program chose"
    """Not 0, and Python's exit handlers ran: ``sys.exit(3)``."""
    CODE = "exit code, not by its program's own end"
    """Not 0, and Python's exit handlers did not run: ``os._exit``, a runtime that ends its worker, an abort without a signal."""
    SAME_CODE = "the same exit code on all ranks at one moment"
    """Not 0, and Python's exit handlers ran on no rank: a controller, such as Ray's, ends its workers like that."""
    POLITE = "SIGTERM, SIGINT or SIGHUP"
    FORCE = "another signal"
    UNKNOWN = "not known"


class RankEnd(NamedTuple):
    """Evidence on one rank's end."""

    exit: Exit
    closed: bool
    """Whether it ended its recording in order: it destroyed its process group, or Python's exit handlers ran."""
    raised: bool = False
    """Whether it recorded an uncaught exception."""
    requested: bool = False
    """Whether the job had been requested to end before."""
    lost: bool = False
    """Whether other ranks lost it: they later raised because of a lost connection, hang, or were ended before they closed."""
    confirmed: bool = False
    """Whether a second source shows a failure: ``lost``, the kernel's count of out-of-memory kills, faulthandler's text, or the
    job's own end."""


class JobEnd(NamedTuple):
    """The end of a job, from the records of all its launchers."""

    over: bool = False
    """Whether the run's own launcher, or any launcher if there are several runs, has recorded its end."""
    complete: bool = False
    """Whether all launchers have recorded their end."""
    code: int | None = None
    """Exit code; with several launchers, that of the first to end with a code other than 0."""
    signal: int | None = None
    killed: bool = False
    """Whether no end is recorded and the run's own launchers are known not to run any more."""

    @property
    def succeeded(self) -> bool:
        """Whether the recorded end shows success."""
        return self.complete and self.code == 0 and not self.signal

    @property
    def failed(self) -> bool:
        """Whether the recorded end shows a failure. Both are False if the end is not known."""
        return bool(self.code or self.signal)


_ANY: bool | None = None
_ENDED_BY_OTHERS = (Exit.CODE, Exit.FORCE, Exit.SAME_CODE)
# exits, closed, lost, confirmed, the job succeeded → conclusion; the first matching row counts.
_TABLE: tuple[tuple[tuple[Exit, ...], bool | None, bool | None, bool | None, bool | None, Conclusion], ...] = (
    ((Exit.ZERO,), _ANY, _ANY, _ANY, _ANY, Conclusion.WELL),
    ((Exit.OWN_CODE,), _ANY, _ANY, True, _ANY, Conclusion.FAILED),
    ((Exit.OWN_CODE,), _ANY, _ANY, _ANY, True, Conclusion.WELL),
    ((Exit.POLITE,), _ANY, True, _ANY, _ANY, Conclusion.FAILED),
    ((Exit.POLITE,), _ANY, _ANY, _ANY, _ANY, Conclusion.REQUESTED),
    ((Exit.UNKNOWN,), True, _ANY, _ANY, _ANY, Conclusion.WELL),
    ((Exit.UNKNOWN,), _ANY, False, _ANY, True, Conclusion.WELL),
    (_ENDED_BY_OTHERS, True, _ANY, _ANY, True, Conclusion.WELL),
    ((Exit.CODE,), True, _ANY, _ANY, _ANY, Conclusion.UNKNOWN),
    ((Exit.CODE, Exit.FORCE), _ANY, _ANY, True, _ANY, Conclusion.FAILED),
)  # fmt: skip


def conclude(rank: RankEnd, job: JobEnd) -> Conclusion:
    """Classify a rank's end. FAILED needs two independent sources and none that contradicts them. A rank whose process was killed,
    in a job that succeeded, is UNKNOWN without a second source."""
    if rank.requested and not (rank.closed and rank.exit is Exit.ZERO):
        return Conclusion.REQUESTED
    if rank.raised:
        return Conclusion.FAILED
    for exits, closed, lost, confirmed, succeeded, conclusion in _TABLE:
        evidence = (
            (closed, rank.closed),
            (lost, rank.lost),
            (confirmed, rank.confirmed),
            (succeeded, job.succeeded),
        )
        if rank.exit in exits and all(wanted is _ANY or wanted == seen for wanted, seen in evidence):
            return conclusion
    return Conclusion.UNKNOWN


def exit_of(code: int | None, number: int | None, *, left: bool, polite: Collection[int] = POLITE) -> Exit:
    """Classify an exit from ``code`` and ``number``, the signal, as given by the kernel. ``left``: Python's exit handlers ran,
    without an exception."""
    if number is None and code is not None and code - 128 in polite:
        number = code - 128  # from a shell, or a handler that follows its convention
    if number is not None:
        return Exit.POLITE if number in polite else Exit.FORCE
    if code is None:
        return Exit.UNKNOWN
    if code == 0:
        return Exit.ZERO
    return Exit.OWN_CODE if left else Exit.CODE


def job_end(
    manifests: Iterable[Mapping[str, Any]], launches: Iterable[Mapping[str, Any]] = (), since_ns: int = 0
) -> JobEnd:
    """Combine the manifests of the job's runs, written by the launchers that created them, and the records of all launchers. A
    launcher that ended before ``since_ns``, the start of the last attempt, counts only if there is no other: the job continued
    without it."""
    from .liveness import is_running

    own = [each for each in manifests if each]
    own_launchers = [_launcher(each) for each in own]
    known = [*own, *(each for each in launches if _launcher(each) not in own_launchers)]
    over = [each for each in known if each.get("ended_ns")]
    earlier = [each for each in over if each["ended_ns"] < since_ns]
    if len(earlier) < len(known):
        over, known = ([each for each in some if each not in earlier] for some in (over, known))
    failed = [each for each in over if each.get("exit_code") or each.get("signal")]
    first = min(failed, key=lambda each: int(each["ended_ns"]), default=None) or (over[0] if over else {})
    noted = any(each.get("ended_ns") for each in own)
    return JobEnd(
        noted,
        bool(over) and len(over) == len(known),
        first.get("exit_code"),
        first.get("signal"),
        killed=bool(own) and not noted and all(is_running(each) is False for each in own),
    )


def _launcher(document: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(map(document.get, ("host", "pid_namespace", "pid", "started_ns")))
