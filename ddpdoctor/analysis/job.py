"""The job in its own words: what manifest and ranks say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from posixpath import basename
from signal import Signals
from typing import Any

from ddpdoctor import __version__
from ddpdoctor.diagnose.diagnosis import Job
from ddpdoctor.measure.facts import JobFacts
from ddpdoctor.measure.metrics import users_line
from ddpdoctor.measure.steplog import RankLog

from .inputs import Inputs

_MOST_MISSING = 1000
"""Missing ranks that are listed; whoever misses more misses the job."""
_FROM_OUTSIDE = (
    Signals.SIGTERM,
    Signals.SIGINT,
    Signals.SIGHUP,
    Signals.SIGUSR1,
    Signals.SIGUSR2,
    Signals.SIGXCPU,
)
"""What people and schedulers send to end a job."""
_SHELL = 128
"""Added to a signal's number in a shell's exit code."""
_SETTINGS = ("ddp", "loaders", "optimizers", "threads", "process_groups")


def ended_by(manifest: Mapping[str, Any]) -> str | None:
    """The signal by which somebody ended the command, such as a scheduler whose time limit was reached; None where nobody did."""
    number, code = manifest.get("signal"), manifest.get("exit_code") or 0
    sent = {number, code - _SHELL, -code} if isinstance(code, int) else {number}
    return next((each.name for each in _FROM_OUTSIDE if each in sent), None)


def job_of(
    inputs: Inputs, facts: JobFacts, measured_ranks: Sequence[int], manifest: Mapping[str, Any]
) -> Job:
    """What ran, as far as ``inputs`` tell; ``manifest`` is that of the first launcher."""
    infos = [log.record.info for log in inputs.logs]
    first = next((info for info in infos if "rank" in info), {})
    seen = {log.rank for log in inputs.logs} | set(measured_ranks)
    missing = (rank for rank in range(facts.world_size or 0) if rank not in seen)
    hosts = {log.host for log in inputs.logs} | {trace.meta.host for trace in inputs.traces}
    devices = [facts.device_name, *(info.get("device_name") for info in infos)]
    environment = manifest.get("environment") or first.get("environment") or {}
    ended_ns, started_ns = manifest.get("ended_ns"), manifest.get("started_ns")
    return Job(
        world_size=facts.world_size,
        ranks_seen=sorted(seen),
        missing_ranks=list(islice(missing, _MOST_MISSING)),
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
        exit_code=manifest.get("exit_code"),
    )


def _settings(logs: Sequence[RankLog], first: Mapping[str, Any]) -> dict[str, Any]:
    """Of the first rank that has a document, ``first``; the numbers of source lines become the lines."""
    log = next((log for log in logs if "rank" in log.record.info), None)
    settings = {name: first[name] for name in _SETTINGS if first.get(name)}
    return settings if log is None else {name: _with_lines(log, value) for name, value in settings.items()}


def _with_lines(log: RankLog, value: Any) -> Any:
    if isinstance(value, list):
        return [_with_lines(log, one) for one in value]
    if not isinstance(value, Mapping) or "where" not in value:
        return value
    line = users_line(log, value["where"])
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
