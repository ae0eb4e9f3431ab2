"""Determines how each attempt of a run ended, with the same analysis as for the end of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ddpdoctor.measure.runfacts import StopFacts
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.rundir import ranks_in_words
from ddpdoctor.rundir.attempts import Attempt
from ddpdoctor.rundir.ends import POLITE, JobEnd
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.rundir.stops import Stops, signal_name

from .evidence import RunEvidence, evidence_of
from .verdict import of_run


class AttemptEnd(msgspec.Struct, frozen=True):
    """The end of an attempt."""

    cause: StopFacts | None
    """Cause of the end; None if no rank failed or the failed rank is unknown."""
    how: str
    """The end in words: "rank 1 raised RuntimeError: ..."; "finished normally"; "" if unknown."""
    failed_ns: int | None
    """When the first rank failed, or began the step in which it hung, epoch ns of its host; None if none did."""
    ended_ns: int | None
    """When the last of its ranks had ended; None if unknown."""


def attempt_end(
    attempt: Attempt,
    runs: Sequence[RunDirectory],
    logs: Sequence[RankLog],
    stops: Mapping[str, Stops] | None = None,
) -> AttemptEnd:
    """The end of an ``attempt`` that is followed by another one. ``logs``: its own; ``stops``: see :func:`.evidence_of`."""
    seen = evidence_of(runs, logs, [], records=attempt.ranks, stops=stops)
    ranks = seen.ranks.values()
    has_failed = any(each.raised or each.signal or each.code for each in ranks)
    job = JobEnd(over=True, complete=True, code=1 if has_failed else 0)
    facts = of_run(msgspec.structs.replace(seen, job=job, end_request=None, hangs=False, killed=False)).facts
    found = ((name, getattr(facts, name)) for name in facts.__struct_fields__)
    name, cause = next(((name, each) for name, each in found if isinstance(each, StopFacts)), ("", None))
    # A launcher ends its ranks when others join or leave.
    replaced = [each for each in ranks if cause is None and each.signal in POLITE]
    failed = replaced or [each for each in ranks if cause is not None and each.rank in (cause.ranks or ())]
    if cause is not None:
        how = _in_words(name, cause)
    elif replaced:
        how = f"{ranks_in_words([each.rank for each in replaced])} ended by {signal_name(replaced[0].signal or 0)}"
    else:
        how = "finished normally" if not has_failed and all(each.in_order for each in ranks) else ""
    hung = cause is not None and cause.since_s is not None
    ends_ns = [each.step_since_ns if hung else each.raised_ns or each.gone_ns for each in failed]
    return AttemptEnd(
        cause=cause,
        how=how,
        failed_ns=min((ns for ns in ends_ns if ns is not None), default=None),
        ended_ns=_last_end_ns(seen, logs),
    )


_HUNG = {
    "not_reached": "did not reach the point where the others waited",
    "uneven": "had no batches left while the others went on",
    "different": "called a different collective than the others",
}
"""By name of the fact, the end of an attempt that hung until a timeout; used if the fact has no text of its own."""


def _in_words(name: str, cause: StopFacts) -> str:
    who = ranks_in_words(cause.ranks) if cause.ranks else ""
    if name == "raised":
        how = f"raised {cause.message}" if cause.message else "raised an exception"
    elif name == "died" and cause.message:
        how = f"ended with {cause.message}" if cause.kind == "code" else f"ended by {cause.message}"
    else:
        how = cause.message or (cause.says if name == "uneven" else None) or _HUNG.get(name, "failed")
    return f"{who} {how}".strip()


def _last_end_ns(seen: RunEvidence, logs: Sequence[RankLog]) -> int | None:
    gone_ns = [each.gone_ns for each in seen.ranks.values() if each.gone_ns is not None]
    steps_ns = [log.steps[-1].recorded_ns[1] for log in logs if log.steps]
    return max([*gone_ns, *steps_ns], default=None)
