"""The job section of a diagnosis, from the manifest and the ranks' records, and how the job ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from posixpath import basename
from typing import Any

import msgspec

from ddpdoctor import __version__
from ddpdoctor.diagnose import words
from ddpdoctor.diagnose.diagnosis import RUNNING, UNKNOWN, Job
from ddpdoctor.measure.facts import JobFacts
from ddpdoctor.measure.hangfacts import Standing
from ddpdoctor.measure.metrics import creation_line
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.wholerun import Launch
from ddpdoctor.rundir import RunDirectory
from ddpdoctor.rundir.stops import launches_of
from ddpdoctor.stall import Verdict

from .inputs import Inputs, is_running_here, launch_of, missing_ranks

_MAX_LINES = 4
"""Most different positions in one sentence; the report's table has all."""
_SETTINGS = ("ddp", "loaders", "optimizers", "threads", "process_groups")


def termination_summary(stopped: Verdict) -> str | None:
    """Sentence, without full stop, on a job that was ended from outside, for example by a scheduler's time limit: signal, exit code,
    last step, and last known positions of ranks. None if it was not."""
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
            ranks.setdefault(f"at {words.line(msgspec.to_builtins(each.where))}", []).append(each.rank)
        elif each.step is None and each.state is not None:
            ranks.setdefault(each.state.partition(",")[0], []).append(each.rank)
    if not ranks:
        return ""
    found = [f"{words.ranks(of_place)} {place}" for place, of_place in ranks.items()]
    if len(found) > _MAX_LINES:
        return f"last seen: {'; '.join(found[:_MAX_LINES])}; others elsewhere"
    return f"last seen: {'; '.join(found)}"


def command_and_start(path: str) -> tuple[list[str], int]:
    """(command, start in epoch ns) of the run directory ``path``. Without a recorded start, that of its first rank, else the
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
    stopped: Verdict,
) -> Job:
    """The job section, as far as known from ``inputs``; ``manifest`` is the first launcher's, or its record."""
    infos = [log.record.info for log in inputs.logs]
    first = next((info for info in infos if "rank" in info), {})
    # In a job that stopped, a rank without steps is not missing: its last position is known.
    seen = {log.rank for log in inputs.logs if log.steps or stopped.facts.state} | set(measured_ranks)
    hosts = {log.host for log in inputs.logs} | {trace.meta.host for trace in inputs.traces}
    devices = [facts.device_name, *(info.get("device_name") for info in infos)]
    environment = manifest.get("environment") or first.get("environment") or {}
    ended_ns = manifest.get("ended_ns")
    started_ns = manifest.get("started_ns") if manifest else _first_seen_ns(inputs.logs)
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
        settings=_settings(inputs.logs, first),
        environment={str(name): str(value) for name, value in environment.items()},
        started_ns=started_ns,
        duration_s=(ended_ns - started_ns) / 1e9
        if ended_ns and started_ns and ended_ns >= started_ns
        else None,
        exit_code=stopped.job.code,
        end=_end(inputs.starts[-1] if inputs.starts else [], stopped),
    )


def _end(runs: Sequence[RunDirectory], stopped: Verdict) -> str | None:
    """See :class:`~ddpdoctor.diagnose.diagnosis.Job`; ``runs`` are those of its last start."""
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


def _first_seen_ns(logs: Sequence[RankLog]) -> int | None:
    """Start of the first rank, from its record or its first step, epoch ns; None if both are unknown."""
    text = [info["started_ns"] for log in logs if (info := log.record.info).get("started_ns")]
    return min(text or [log.steps[0].recorded_ns[0] for log in logs if log.steps], default=None)


def _settings(logs: Sequence[RankLog], first: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the first rank that has a record, ``first``, with ids of source lines replaced by file and line."""
    log = next((log for log in logs if "rank" in log.record.info), None)
    settings = {name: first[name] for name in _SETTINGS if first.get(name)}
    return settings if log is None else {name: _with_lines(log, value) for name, value in settings.items()}


def _with_lines(log: RankLog, value: Any) -> Any:
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
    """When the launcher of each host started and ended: of several launchers on a host the first start and the last end. Of a job that was
    started several times, the same for all hosts: the first start and the last end."""
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
