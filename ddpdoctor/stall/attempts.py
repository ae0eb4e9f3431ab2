"""Which recordings, and which rows of ends, belong to the attempt whose end is the job's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.rundir import STEPS_FILE, LineField, RankRecord, RunDirectory
from ddpdoctor.rundir.stops import HostStop

_STEP = f"{{{LineField.STEP.key}".encode()


def last_attempt(runs: Sequence[RunDirectory], logs: Sequence[RankLog]) -> list[RankRecord]:
    """The recordings whose end is the job's: those that are analysed, or, where ranks took steps in a later attempt, those of the last
    one. Of the attempts an elastic launcher has started, the one with the most steps is analysed."""
    analysed = [record for run in runs for record in run.ranks]
    ends = [log.steps[-1].end_ns for log in logs if log.steps]
    later = [
        record
        for run in runs
        for record in run.recordings
        if ends and (record.info.get("started_ns") or 0) > max(ends) and _has_steps(record)
    ]
    if not later:
        return analysed
    newest = _attempt_of(max(later, key=lambda record: int(record.info["started_ns"])))
    last = {record.rank: record for record in later if _attempt_of(record) == newest}
    return [last[rank] for rank in sorted(last)]


def _has_steps(record: RankRecord) -> bool:
    try:
        return any(line.startswith(_STEP) for line in record.lines(STEPS_FILE))
    except OSError:
        return False


def _attempt_of(record: RankRecord) -> tuple[str, int, int]:
    return str(record.info.get("job_id")), record.attempt, int(record.info.get("world_size") or 0)


def rows_by_rank(
    hosts: Sequence[HostStop], document: str, rows: str, pids: Mapping[int, Any], before: set[Any]
) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """The rows of ranks, by number, whose processes are ``pids`` or are not known; and those of other attempts, ``before`` are theirs."""
    found, others = dict[int, dict[str, Any]](), list[dict[str, Any]]()
    for host in hosts:
        for row in (getattr(host, document) or {}).get(rows) or ():
            if not isinstance(row.get("rank"), int):
                continue
            pid = row.get("pid")
            if pid == pids.get(row["rank"]) or (pids.get(row["rank"]) is None and pid not in before):
                found[row["rank"]] = row | {"host": host.host}
            else:
                others.append(row | {"host": host.host})
    return found, others


def end_by_launcher(record: RankRecord, launches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The end of a rank whose launcher started it without a shell or torchrun between, as its launcher waited for it; {} for others."""
    info = record.info
    parent = info.get("host"), info.get("pid_namespace"), info.get("parent_pid")
    names = ("host", "pid_namespace", "pid")
    own = (each for each in launches if None not in parent and tuple(map(each.get, names)) == parent)
    launch = next(own, {})
    if not launch.get("ended_ns"):
        return {}
    return {
        "code": launch.get("exit_code"),
        "signal": launch.get("signal"),
        "seen_ns": launch["ended_ns"],
    }
