"""The road from paths to a diagnosis: load, measure, diagnose. The command line and the Python API both take
it.

This is the one module that knows all stages; each stage knows only the ones below it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor import __version__
from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.contradictions import without_contradictions
from ddpdoctor.diagnose.diagnosis import Coverage, Diagnosis, Job, Steps
from ddpdoctor.diagnose.engine import diagnose
from ddpdoctor.diagnose.load import RuleSet, load_rules
from ddpdoctor.diagnose.verdict import verdict
from ddpdoctor.diagnose.waterfall import waterfall
from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.align import moved_trace, put_in_order
from ddpdoctor.measure.facts import Facts, StepFacts
from ddpdoctor.measure.flow import Measurement, measure
from ddpdoctor.measure.metrics import telemetry_series, window_cost
from ddpdoctor.measure.steplog import PROFILED, RankLog, notes_on_records, read_logs
from ddpdoctor.measure.window import Window, read_window
from ddpdoctor.rundir import RunDirectory, is_run_directory, recover, run_directories
from ddpdoctor.telemetry.nvml import NO_GPU_TELEMETRY
from ddpdoctor.telemetry.reader import Telemetry, read_telemetry
from ddpdoctor.trace import RankTrace, find_traces, load_traces
from ddpdoctor.trace.digest import trace_digest
from ddpdoctor.trace.operations import find_operations

_NO_RANK = "no rank was recorded: "
"""How the launcher's own note begins, which says why."""

Progress = Callable[[int, int], None]


@dataclass
class Inputs:
    """What was found at the paths."""

    runs: list[RunDirectory] = field(default_factory=list)
    logs: list[RankLog] = field(default_factory=list)
    traces: list[RankTrace] = field(default_factory=list)
    telemetry: dict[str, Telemetry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """How to analyse."""

    rules: Sequence[Path | str] = ()
    loaded_rules: RuleSet | None = None
    """The rules themselves, where the caller has read them already; ``rules`` is then not read."""
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    suppressed: Collection[str] = ()
    suppressed_by: str = ""
    """The file that says so, for the note."""
    jobs: int | None = None
    cache: bool = True
    engine: str | None = None
    """Where traces are read, see :func:`ddpdoctor.trace.engines.open_engine`; None: processes of this machine."""
    job: int | None = None
    """Which of several jobs, numbered as the refusal lists them; None: there must be one."""
    hta: bool = False
    progress: Progress | None = None


@dataclass(frozen=True)
class Prepared:
    """What :func:`prepare` found: ``logs`` are those with steps, ``windows`` the profiler windows, both by rank."""

    paths: list[str]
    inputs: Inputs
    logs: list[RankLog]
    windows: list[Window]


def analyze(paths: Sequence[str] | str, options: Options | None = None) -> Diagnosis:
    """Diagnose run directories, profiler traces, or a table of operations (Parquet).

    Several run directories are joined: the hosts of one job that wrote to separate folders. Raises
    UnusableInput where nothing can be analysed; what is missing or broken besides becomes a note.
    """
    chosen = options or Options()
    listed = [paths] if isinstance(paths, str) else list(paths)
    tables = [table for path in listed if not is_run_directory(path) for table in find_operations(path)]
    if tables:
        return _analyze_operations(listed, tables, chosen)
    return conclude(prepare(listed, chosen), chosen)


def _with_runs_below(paths: Sequence[str]) -> list[str]:
    """``paths``, with a folder that holds run directories replaced by those. Raises UnusableInput where they are of
    several jobs: hosts of one job may each have recorded to a folder of their own.
    """
    expanded: list[str] = []
    for path in paths:
        found = run_directories(path)
        if len(found) > 1 and not _of_one_job(found):
            newest = max(found, key=lambda run: Path(run).stat().st_mtime)
            raise UnusableInput(
                f"{path} holds {len(found)} recorded runs, not of one job: name one of them, such as {newest}, the newest."
            )
        expanded += found or [path]
    return expanded


def _of_one_job(runs: Sequence[str]) -> bool:
    """Whether each rank was recorded in one of ``runs`` only, and all ranks say that they belong together."""
    ranks = [record for run in runs for record in RunDirectory.open(run).ranks]
    jobs = {(record.info.get("job_id"), record.info.get("world_size")) for record in ranks}
    return len(jobs) == 1 and len({record.rank for record in ranks}) == len(ranks)


def prepare(paths: Sequence[str], options: Options) -> Prepared:
    """Read everything at the paths. Raises UnusableInput where there is nothing to measure."""
    paths = _with_runs_below(paths)
    inputs = load(paths, options)
    windows = _windows(inputs)
    if not windows and not any(log.steps for log in inputs.logs):
        raise UnusableInput(_nothing(paths, inputs))
    return Prepared(list(paths), inputs, [log for log in inputs.logs if log.steps], windows)


def conclude(prepared: Prepared, options: Options) -> Diagnosis:
    """Measure and diagnose. Puts the logs and windows of ``prepared`` on one clock, in place."""
    hta = _hta(prepared.inputs, options)
    measured = measure(prepared.logs, prepared.windows, prepared.inputs.telemetry)
    coverage = Coverage(measured.facts.steps.measured, len(measured.graphs.speaking.ranks))
    inputs = prepared.inputs
    judged = _judge(
        prepared.paths,
        measured.facts,
        coverage,
        options,
        measured.set_aside,
        inputs.notes + measured.notes,
    )
    steps = msgspec.structs.replace(judged.steps, window=window_cost(measured.logs, judged.steps.median_ms))
    return _with_details(msgspec.structs.replace(judged, steps=steps), inputs, measured, hta)


def _analyze_operations(paths: Sequence[str], tables: Sequence[str], options: Options) -> Diagnosis:
    """A table of operations has neither ranks' traces nor step logs: what-if analysis is all there is."""
    if len(tables) > 1:
        raise UnusableInput(
            f"{', '.join(paths)}: {len(tables)} tables of operations, each a job of its own; name one."
        )
    from ddpdoctor.measure.pipeline import measure_stragglers, straggler_facts, summary_of
    from ddpdoctor.trace.operations import read_operations

    found = measure_stragglers(read_operations(tables[0]))
    facts = straggler_facts(found)
    coverage = Coverage(facts.steps.measured, facts.job.ranks_seen)
    aside = {"incomplete": found.set_aside} if found.set_aside else {}
    judged = _judge(paths, facts, coverage, options, aside, [*found.notes, summary_of(found)])
    ranks = sorted(worker.rank for worker in found.workers)
    return msgspec.structs.replace(judged, job=Job(world_size=found.world_size, ranks_seen=ranks))


def _judge(
    paths: Sequence[str],
    facts: Facts,
    coverage: Coverage,
    options: Options,
    set_aside: dict[str, int],
    notes: Sequence[str],
) -> Diagnosis:
    """Facts against rules: the diagnosis, but for what only traces and step logs can tell."""
    outcome = diagnose(
        facts,
        options.loaded_rules or load_rules(options.rules),
        coverage=coverage,
        thresholds=options.thresholds,
        suppressed=options.suppressed,
    )
    comms, tree = facts.communication, facts_view.tree(facts)
    outcome = without_contradictions(outcome, tree)
    healthy, sentence = verdict(
        outcome, coverage=coverage, matched=bool(comms.matched) or not comms.unmatched
    )
    return Diagnosis(
        tool_version=__version__,
        created_ns=time.time_ns(),
        source=list(paths),
        healthy=healthy,
        verdict=sentence,
        job=Job(),
        steps=_steps(facts.steps, set_aside),
        breakdown=facts.breakdown,
        findings=outcome.findings,
        notes=list(dict.fromkeys([*_suppressed(outcome.suppressed, options), *notes, *outcome.errors])),
        checked=outcome.checked,
        skipped=outcome.skipped,
        waterfall=waterfall(facts.steps.mean_ms, outcome),
        facts=tree,
    )


def _suppressed(rules: Sequence[str], options: Options) -> list[str]:
    if not rules:
        return []
    many = f"{len(rules)} rules" if len(rules) > 1 else "1 rule"
    return [f"{many} suppressed by {options.suppressed_by or 'the caller'}: {', '.join(rules)}."]


def load(paths: Sequence[str], options: Options) -> Inputs:
    """Read everything at the paths."""
    inputs = Inputs()
    runs = [path for path in paths if is_run_directory(path)]
    others = [path for path in paths if path not in runs]
    _load_runs(runs, inputs)
    recorded = [record for run in inputs.runs for record in run.ranks]
    places = [(record.trace or trace_digest(record.path), record.rank) for record in recorded]
    files: dict[str, int | None] = {file: rank for file, rank in places if file is not None}
    loose = find_traces(others) if others else None
    if loose is not None:
        inputs.notes += loose.notes
        files |= dict.fromkeys(loose.files)
    if files:
        known = {path: rank for path, rank in files.items() if rank is not None}
        try:
            loaded = load_traces(
                list(files),
                jobs=options.jobs,
                cache=options.cache,
                ranks=known,
                progress=options.progress,
                engine=options.engine,
                job=options.job,
            )
        except UnusableInput as error:
            if not inputs.logs:
                raise
            inputs.notes.append(str(error))
        else:
            inputs.traces = loaded.traces
            inputs.notes += loaded.notes
            inputs.notes += [reason for _, reason in loaded.failed]
    inputs.logs.sort(key=lambda log: log.rank)
    inputs.logs, set_clocks = put_in_order(inputs.logs)
    inputs.notes += set_clocks
    return inputs


def _load_runs(paths: Sequence[str], inputs: Inputs) -> None:
    unsaved = [[f"{sentence} This diagnosis has read it there." for sentence in recover(p)] for p in paths]
    runs = [RunDirectory.open(path) for path in paths]
    for run, sentences, found in zip(runs, unsaved, read_logs(runs), strict=True):
        inputs.notes += [*sentences, *run.notes, *found.notes]
        inputs.runs.append(run)
        inputs.logs += found.logs
        _load_rest(run, found.logs, inputs)


def _load_rest(run: RunDirectory, logs: Sequence[RankLog], inputs: Inputs) -> None:
    for host, file in run.telemetry.items():
        telemetry = read_telemetry(Path(file))
        inputs.telemetry[telemetry.host or host] = telemetry
        inputs.notes += [f"Host {host}: {note}" for note in telemetry.notes]
    said = set(inputs.notes) | {note.partition(": ")[2] for note in inputs.notes}
    inputs.notes += [str(note) for note in run.manifest.get("notes") or [] if note not in said]
    inputs.notes += notes_on_records(logs, ended=bool(run.manifest.get("ended_ns")))
    if all(record.info.get("device", "cpu") == "cpu" for record in run.ranks):
        # Nobody misses the readings of GPUs that the job does not use.
        inputs.notes[:] = [note for note in inputs.notes if NO_GPU_TELEMETRY not in note]


def _windows(inputs: Inputs) -> list[Window]:
    """Each trace reduced; for recorded ranks with the steps of their own log, which know better than marks in
    the trace."""
    logs = {log.rank: log for log in inputs.logs}
    windows = []
    for trace in inputs.traces:
        log = logs.get(trace.meta.rank if trace.meta.rank is not None else -1)
        known = log.steps if log is not None and trace.size else []
        profiled = [step for step in known if PROFILED in step.marks]
        bounds = [(step.number, step.start_ns, step.end_ns) for step in profiled]
        host = log.host if log is not None else ""
        windows.append(read_window(moved_trace(trace, profiled), bounds or None, host))
    return windows


def _nothing(paths: Sequence[str], inputs: Inputs) -> str:
    where = ", ".join(paths)
    if inputs.runs:
        told = [note for note in inputs.notes if note.startswith(_NO_RANK) or " cannot be read: " in note]
        if told and not inputs.logs:
            return f"{where}: {told[0]}"
        reason = "no rank recorded a step" if inputs.logs else "no rank was recorded"
        more = f" ({inputs.notes[0]})" if inputs.notes else ""
        return f"{where}: {reason}. The command may not have started a PyTorch job, or ended before its first optimizer step{more}."
    return f"{where}: nothing to analyse: neither a run directory of ddpdoctor nor a profiler trace."


def _hta(inputs: Inputs, options: Options) -> dict[str, Any] | None:
    if not options.hta:
        return None
    from ddpdoctor.measure.export import hta_results

    return hta_results(inputs.traces)


def _with_details(
    judged: Diagnosis, inputs: Inputs, measured: Measurement, hta: dict[str, Any] | None
) -> Diagnosis:
    """Adds the job's own description and what reports draw."""
    manifest = inputs.runs[0].manifest if inputs.runs else {}
    return msgspec.structs.replace(
        judged,
        job=_job(inputs, measured, manifest),
        ranks=measured.ranks,
        series=measured.series,
        timeline=measured.timeline,
        bandwidth=measured.bandwidth,
        telemetry=telemetry_series(inputs.telemetry, manifest.get("started_ns")),
        hta=hta,
    )


def _steps(steps: StepFacts, set_aside: dict[str, int]) -> Steps:
    return Steps(
        count=steps.seen,
        measured=steps.measured,
        source=steps.source,
        median_ms=steps.median_ms,
        mean_ms=steps.mean_ms,
        p95_ms=steps.p95_ms,
        samples_per_s=steps.samples_per_s,
        set_aside=set_aside,
    )


def _job(inputs: Inputs, measured: Measurement, manifest: Mapping[str, Any]) -> Job:
    facts = measured.facts.job
    infos = [log.record.info for log in inputs.logs]
    seen = sorted({log.rank for log in inputs.logs} | set(measured.graphs.speaking.ranks))
    known, world = set(seen), facts.world_size
    hosts = sorted(
        {log.host for log in inputs.logs if log.host} | {t.meta.host for t in inputs.traces if t.meta.host}
    )
    ended, started = manifest.get("ended_ns"), manifest.get("started_ns")
    first = next((info for info in infos if "rank" in info), {})
    return Job(
        world_size=world,
        ranks_seen=seen,
        missing_ranks=list(islice((rank for rank in range(world or 0) if rank not in known), 1000)),
        hosts=hosts,
        backend=facts.backend,
        device=facts.device,
        device_names=sorted(
            {str(name) for name in [facts.device_name, *(i.get("device_name") for i in infos)] if name}
        ),
        command=[str(part) for part in manifest.get("command") or []],
        versions=_versions(facts, first, manifest),
        settings={
            key: first[key]
            for key in ("ddp", "loaders", "optimizers", "threads", "process_groups")
            if first.get(key)
        },
        environment={
            str(k): str(v) for k, v in (manifest.get("environment") or first.get("environment") or {}).items()
        },
        started_ns=started,
        duration_s=(ended - started) / 1e9 if ended and started and ended >= started else None,
        exit_code=manifest.get("exit_code"),
    )


def _versions(facts: Any, first: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, str]:
    found = {
        "ddpdoctor": manifest.get("ddpdoctor") or __version__,
        "torch": facts.torch,
        "NCCL": facts.nccl,
        "CUDA": first.get("cuda"),
        "Python": first.get("python"),
    }
    return {name: str(value) for name, value in found.items() if value}
