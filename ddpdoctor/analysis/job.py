"""The job section of a diagnosis, from the manifest and the ranks' records; also the job's end and the attempts of a restarted run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from posixpath import basename
from typing import Any

import msgspec
from msgspec.structs import replace

from ddpdoctor import __version__
from ddpdoctor.diagnose import rule_texts
from ddpdoctor.diagnose.diagnosis import RUNNING, UNKNOWN, Job
from ddpdoctor.measure.facts import JobFacts
from ddpdoctor.measure.metrics import creation_line
from ddpdoctor.measure.runfacts import Standing
from ddpdoctor.measure.steplog import RankLog, read_rank_log
from ddpdoctor.measure.wholerun import AttemptRecord, Launch
from ddpdoctor.report.words import seconds
from ddpdoctor.rundir import Note
from ddpdoctor.rundir.attempts import Attempt, attempts_of
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.rundir.stops import Stops, launches_of
from ddpdoctor.stall import StopVerdict

from .inputs import Inputs, is_running_here, launch_of, missing_ranks

_MAX_LINES = 4
"""Most different positions in one sentence; the report's table has all."""
_SETTINGS = ("ddp", "loaders", "optimizers", "threads", "process_groups")


def termination_summary(stopped: StopVerdict) -> str | None:
    """Sentence, without full stop, on a job that was ended from outside, for example by a scheduler's time limit: signal, exit code,
    last step, and last known positions of ranks. None for other jobs."""
    if stopped.ended_by is None:
        return None
    code, step = stopped.job.code, stopped.facts.step
    if stopped.ended_by:
        unseen = "" if stopped.job.over else " (its own end was not recorded)"
        text = f"The job was ended by {stopped.ended_by}{f' (exit code {code})' if code else unseen}"
    else:
        text = "The job was killed together with its launcher"
    text += f", in step {step}" if step else " before its first step ended"
    lines = _last_lines(stopped.standing)
    return f"{text}; {lines}" if lines else text


def _last_lines(standing: Sequence[Standing]) -> str:
    """Last known source lines of ranks, grouped by line; for ranks without a step, their state."""
    ranks: dict[str, list[int]] = {}
    for each in standing:
        if each.where is not None:
            ranks.setdefault(f"at {rule_texts.line(msgspec.to_builtins(each.where))}", []).append(each.rank)
        elif each.step is None and each.state is not None:
            ranks.setdefault(each.state.partition(",")[0], []).append(each.rank)
    if not ranks:
        return ""
    found = [f"{rule_texts.ranks(of_place)} {place}" for place, of_place in ranks.items()]
    if len(found) > _MAX_LINES:
        return f"last seen: {'; '.join(found[:_MAX_LINES])}; others elsewhere"
    return f"last seen: {'; '.join(found)}"


def command_and_start(path: str) -> tuple[list[str], int]:
    """(command, start in epoch ns) of the run directory ``path``. Without a recorded start, that of its first rank, or else the
    folder's modification time. Raises OSError."""
    run = RunDirectory.open(path)
    launch = launch_of(run)
    starts = [record.info["started_ns"] for record in run.ranks if record.info.get("started_ns")]
    started_ns = launch.get("started_ns") or min(starts, default=None) or Path(path).stat().st_mtime_ns
    return [str(part) for part in launch.get("command") or []], started_ns


def job_of(
    inputs: Inputs,
    facts: JobFacts,
    measured_ranks: Sequence[int],
    manifest: Mapping[str, Any],
    stopped: StopVerdict,
) -> Job:
    """The job section, as far as known from ``inputs``. ``manifest``: the first launcher's manifest or record."""
    infos = [log.record.info for log in inputs.logs]
    log = next((log for log in inputs.logs if "rank" in log.record.info), None)
    first = log.record.info if log is not None else {}
    # In a job that stopped, a rank without steps is not missing: its last position is known.
    seen = {log.rank for log in inputs.logs if log.steps or stopped.facts.state} | set(measured_ranks)
    hosts = {log.host for log in inputs.logs} | {trace.meta.host for trace in inputs.traces}
    devices = [facts.device_name, *(info.get("device_name") for info in infos)]
    environment = manifest.get("environment") or first.get("environment") or {}
    ended_ns = manifest.get("ended_ns")
    if manifest:
        started_ns = manifest.get("started_ns")
    else:
        begins = [info["started_ns"] for info in infos if info.get("started_ns")]
        begins = begins or [log.steps[0].recorded_ns[0] for log in inputs.logs if log.steps]
        started_ns = min(begins, default=None)
    return Job(
        world_size=facts.world_size,
        ranks_seen=sorted(seen),
        missing_ranks=missing_ranks(facts.world_size or 0, seen),
        hosts=sorted(host for host in hosts if host),
        backend=facts.backend,
        device=facts.device,
        device_names=sorted({str(name) for name in devices if name}),
        command=[str(part) for part in manifest.get("command") or []],
        versions=_versions(facts, first, manifest),
        settings={name: _with_lines(log, first[name]) for name in _SETTINGS if log and first.get(name)},
        environment={str(name): str(value) for name, value in environment.items()},
        started_ns=started_ns,
        duration_s=(ended_ns - started_ns) / 1e9
        if ended_ns and started_ns and ended_ns >= started_ns
        else None,
        exit_code=stopped.job.code,
        end=_end_of_job(inputs.starts[-1] if inputs.starts else [], stopped),
    )


def _end_of_job(runs: Sequence[RunDirectory], stopped: StopVerdict) -> str | None:
    """Value of :attr:`.Job.end`. ``runs``: run directories of the last start."""
    if not runs:
        return None
    over = stopped.job.complete or any(run.manifest.get("ended_ns") for run in runs)
    if not over and any(map(is_running_here, runs)):
        return RUNNING
    if stopped.ended_by and not stopped.requested:
        return "killed"
    if over or stopped.ended_by:
        return "ended"
    return "cut off" if stopped.job.killed else UNKNOWN


def _with_lines(log: RankLog, value: Any) -> Any:
    """The settings of a rank, with ids of source lines replaced by file and line."""
    if isinstance(value, list):
        return [_with_lines(log, one) for one in value]
    if not isinstance(value, Mapping) or "where" not in value:
        return value
    line = creation_line(log, value["where"])
    return {**value, "where": None if line is None else f"{basename(line.file)}:{line.line}"}


def _versions(facts: JobFacts, first: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, str]:
    known = {
        "ddpdoctor": manifest.get("ddpdoctor") or __version__,
        "torch": facts.torch,
        "NCCL": facts.nccl,
        "CUDA": first.get("cuda"),
        "Python": first.get("python"),
    }
    return {name: str(value) for name, value in known.items() if value}


def launches_by_host(starts: Sequence[Sequence[RunDirectory]]) -> dict[str, Launch]:
    """Start and end of the launcher of each host; if a host had several launchers, the first start and the last end. If the job was
    started several times, the first start and the last end of all hosts apply to each host."""
    found: dict[str, Launch] = {}
    for run in (run for start in starts for run in start):
        for record in (run.manifest, *launches_of(run.path, [])):
            host, started_ns, ended_ns = (record.get(name) for name in ("host", "started_ns", "ended_ns"))
            if not isinstance(host, str) or not isinstance(started_ns, int):
                continue
            before = found.get(host)
            known = [end for end in (ended_ns, before and before.ended_ns) if isinstance(end, int)]
            first_ns = min(started_ns, before.started_ns) if before else started_ns
            found[host] = Launch(first_ns, max(known, default=None))
    if len(starts) > 1 and found:
        ends = [launch.ended_ns for launch in found.values() if launch.ended_ns is not None]
        whole = Launch(min(launch.started_ns for launch in found.values()), max(ends, default=None))
        return dict.fromkeys(found, whole)
    return found


_LEAST_WAIT_S = 30.0
"""Seconds between the last rank's end and the command's end; launchers end within a few seconds after their ranks."""
_MOST_LOGS = 8
"""Most ranks whose steps are read for an attempt that is not measured."""


def attempt_records(
    runs: Sequence[RunDirectory], logs: Sequence[RankLog]
) -> tuple[list[AttemptRecord], list[Note]]:
    """(all attempts of the ``runs`` of one job, in order, [] if there is only one; notes). ``logs``: those of the measured attempt."""
    attempts = attempts_of([record for run in runs for record in run.recordings])
    unrecorded = [_unrecorded(old, new) for old, new in pairwise([None, *attempts]) if new is not None]
    notes = [_unrecorded_note(count, number) for number, count in enumerate(unrecorded, 1) if count]
    if len(attempts) < 2:
        return [], [*notes, *(_unjoined_attempt_notes(attempts[0], runs, logs) if attempts else [])]
    from ddpdoctor.stall.evidence import stops_of

    stops = stops_of(runs, [])
    records = [_record(attempt, runs, logs, stops) for attempt in attempts]
    return [
        replace(record, unrecorded=count) for record, count in zip(records, unrecorded, strict=True)
    ], notes


def _unrecorded(old: Attempt | None, new: Attempt) -> int:
    """Number of attempts between the two, or before the first one (None), that are not recorded, by the launcher's restart count."""
    if old is None:
        return new.restarts
    return max(new.restarts - old.restarts - 1, 0) if new.job_id and new.job_id == old.job_id else 0


def _unrecorded_note(count: int, number: int) -> Note:
    which, is_, whose = (
        ("one more attempt", "is", "its") if count == 1 else (f"{count} more attempts", "are", "their")
    )
    when = (
        "Before recorded attempt 1" if number == 1 else f"Between recorded attempts {number - 1} and {number}"
    )
    return Note(
        f"{when}, the launcher started {which}, which {is_} not in this recording; most likely {whose} ranks ended before they had "
        "created a process group. The launcher's output may say why."
    )


def _unjoined_attempt_notes(
    attempt: Attempt, runs: Sequence[RunDirectory], logs: Sequence[RankLog]
) -> list[Note]:
    """A note on the only recorded ``attempt`` if the launcher may restart ranks and its command ended long after all ranks. The next
    attempt then never created its process group, so it has no recording."""
    ended_ns = max(
        (end for run in runs if isinstance(end := run.manifest.get("ended_ns"), int)), default=None
    )
    may_restart = any(
        str((log.record.info.get("environment") or {}).get("TORCHELASTIC_MAX_RESTARTS") or "0") != "0"
        for log in logs
    )
    if ended_ns is None or not may_restart:
        return []
    from ddpdoctor.stall.attempt_ends import attempt_end

    last_ns = attempt_end(attempt, runs, logs).ended_ns
    waited_s = (ended_ns - last_ns) / 1e9 if last_ns is not None else 0.0
    if waited_s < _LEAST_WAIT_S:
        return []
    return [
        Note(
            f"All recorded ranks had ended {seconds(waited_s)} before the command did. If its launcher restarted them, the "
            "new ranks had not created their process group by then. With Gloo and torchrun of torch 2.13, the new ranks may read "
            "addresses of the ended ones; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the job's environment prevents this."
        )
    ]


def _record(
    attempt: Attempt, runs: Sequence[RunDirectory], logs: Sequence[RankLog], stops: Mapping[str, Stops]
) -> AttemptRecord:
    from ddpdoctor.stall.attempt_ends import attempt_end

    paths = {record.path for record in attempt.ranks}
    own = [log for log in logs if log.record.path in paths]
    read = own or [read_rank_log(record) for record in attempt.ranks[:_MOST_LOGS]]
    end = attempt_end(attempt, runs, read, stops)
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
