"""The attempts of a run that a launcher restarted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from ddpdoctor import stall
from ddpdoctor.measure.steplog import RankLog, read_rank_log
from ddpdoctor.measure.wholerun import AttemptRecord
from ddpdoctor.report import words
from ddpdoctor.rundir import Note, RunDirectory
from ddpdoctor.rundir.attempts import Attempt, attempts_of
from ddpdoctor.rundir.stops import Stops

_LEAST_WAIT_S = 30.0
"""Seconds between the last rank's end and the command's; launchers end within a few after their ranks."""
_MOST_LOGS = 8
"""Ranks of which the steps of an attempt that is not measured are read."""


def attempt_records(
    runs: Sequence[RunDirectory], logs: Sequence[RankLog]
) -> tuple[list[AttemptRecord], list[Note]]:
    """(All attempts of the ``runs`` of one job, in order, [] if there is only one; notes). ``logs`` are those of the measured one."""
    attempts = attempts_of([record for run in runs for record in run.recordings])
    unrecorded = [_unrecorded(old, new) for old, new in pairwise([None, *attempts]) if new is not None]
    notes = [_unrecorded_note(count, number) for number, count in enumerate(unrecorded, 1) if count]
    if len(attempts) < 2:
        return [], [*notes, *(_unjoined(attempts[0], runs, logs) if attempts else [])]
    stops = stall.stops_of(runs, [])
    records = [_record(attempt, runs, logs, stops) for attempt in attempts]
    return [
        replace(record, unrecorded=count) for record, count in zip(records, unrecorded, strict=True)
    ], notes


def _unrecorded(old: Attempt | None, new: Attempt) -> int:
    """How many attempts between the two are not in the recording, by their launcher's count of restarts; before the first one for None."""
    if old is None:
        return new.restarts
    return max(new.restarts - old.restarts - 1, 0) if new.job_id and new.job_id == old.job_id else 0


def _unrecorded_note(count: int, number: int) -> Note:
    which, are, whose = ("An attempt", "is", "its") if count == 1 else (f"{count} attempts", "are", "their")
    return Note(
        f"{which} before attempt {number} {are} not in this recording; most likely {whose} ranks ended before they had created a "
        "process group. The launcher's output may say why."
    )


def _unjoined(attempt: Attempt, runs: Sequence[RunDirectory], logs: Sequence[RankLog]) -> list[Note]:
    """A note on the one recorded ``attempt`` where the launcher may restart ranks, and its command ended long after all ranks: the next
    attempt never created its process group, so nothing was recorded of it."""
    ended_ns = max(
        (end for run in runs if isinstance(end := run.manifest.get("ended_ns"), int)), default=None
    )
    may_restart = any(
        str((log.record.info.get("environment") or {}).get("TORCHELASTIC_MAX_RESTARTS") or "0") != "0"
        for log in logs
    )
    if ended_ns is None or not may_restart:
        return []
    last_ns = stall.attempt_end(attempt, runs, logs).ended_ns
    waited_s = (ended_ns - last_ns) / 1e9 if last_ns is not None else 0.0
    if waited_s < _LEAST_WAIT_S:
        return []
    return [
        Note(
            f"All recorded ranks had ended {words.seconds(waited_s)} before the command did. If its launcher restarted them, the "
            "new ranks had not created their process group by then. With Gloo and torchrun of torch 2.13, the new ranks may read "
            "addresses of the ended ones; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the job's environment prevents this."
        )
    ]


def _record(
    attempt: Attempt, runs: Sequence[RunDirectory], logs: Sequence[RankLog], stops: Mapping[str, Stops]
) -> AttemptRecord:
    paths = {record.path for record in attempt.ranks}
    own = [log for log in logs if log.record.path in paths]
    read = own or [read_rank_log(record) for record in attempt.ranks[:_MOST_LOGS]]
    end = stall.attempt_end(attempt, runs, read, stops)
    return AttemptRecord(
        logs=read,
        started_ns=attempt.started_ns,
        failed_ns=end.failed_ns,
        ended_ns=end.ended_ns,
        ranks=(end.cause.ranks or []) if end.cause is not None else [],
        ended=end.how,
        where=end.cause.where if end.cause is not None else [],
        world_size=next((size for r in attempt.ranks if (size := r.info.get("world_size"))), None),
        is_measured=bool(own),
    )
