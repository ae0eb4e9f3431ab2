"""The stages in their order, and where a run and a table of operations part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ddpdoctor import stall
from ddpdoctor.diagnose.diagnosis import Coverage, Diagnosis, Job
from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.align import move_trace
from ddpdoctor.measure.facts import Facts, JobFacts
from ddpdoctor.measure.flow import measure
from ddpdoctor.measure.hangfacts import HangFacts
from ddpdoctor.measure.metrics import device_errors, telemetry_series, window_cost
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.window import Window, read_window
from ddpdoctor.report.read import holds_diagnosis, read_diagnosis
from ddpdoctor.rundir import Note, is_run_directory
from ddpdoctor.stages import WINDOWS_READ, Progress, Stage, counted, no_progress
from ddpdoctor.stall import Verdict
from ddpdoctor.trace import RankTrace
from ddpdoctor.trace.operations import find_operations

from .inputs import Inputs, launch_of, load, why_nothing, why_provisional, with_runs_below
from .job import how_it_ended, job_of, launches_by_host
from .judge import Measured, judged
from .options import Options
from .profiled import profiled_in
from .sources import with_repository, with_source_text
from .trials import with_trials

_MOST_WHY = 200
"""Letters of an error's text."""


class Prepared(msgspec.Struct, frozen=True):
    """What :func:`prepare` found: ``logs`` are those with steps, ``windows`` the profiler windows, both by rank."""

    paths: list[str]
    inputs: Inputs
    logs: list[RankLog]
    windows: list[Window]
    stopped: Verdict
    """Whether and how the job stopped."""


def analyze(paths: Sequence[str] | str, options: Options | None = None) -> Diagnosis:
    """Diagnose run directories, profiler traces, or a table of operations (Parquet).

    Several run directories are joined: the hosts of one job that wrote to separate folders. Raises
    UnusableInput where nothing can be analysed; what is missing or broken besides becomes a note.
    """
    chosen = options or Options()
    listed = [paths] if isinstance(paths, str) else list(paths)
    tables = [table for path in listed if not is_run_directory(path) for table in find_operations(path)]
    if tables:
        return judged(_measured_operations(listed, tables), chosen)
    return conclude(prepare(listed, chosen), chosen)


def analyze_or_read(paths: Sequence[str], options: Callable[[], Options]) -> Diagnosis:
    """The same; a single path that is a ``diagnosis.json`` or a report is read, not analysed, and nobody is asked for
    ``options``. Raises DdpDoctorError."""
    if len(paths) == 1 and holds_diagnosis(Path(paths[0])):
        return read_diagnosis(Path(paths[0]))
    return analyze(paths, options())


def prepare(paths: Sequence[str], options: Options) -> Prepared:
    """Read everything at the paths. Raises UnusableInput where there is nothing to measure."""
    places, left_out = with_runs_below(paths)
    inputs = load(places, options, left_out)
    logs = [log for log in inputs.logs if log.steps]
    stopped = _stopped(inputs)
    tells = inputs.traces or logs or inputs.dumps.recordings
    if not tells and stopped.facts.state is None and stopped.ended_by is None:
        raise UnusableInput(why_nothing(places, inputs))
    return Prepared(places, inputs, logs, windows_of(inputs, options.progress), stopped)


def _stopped(inputs: Inputs) -> Verdict:
    """Whether and how the job stopped; whatever files that others wrote hold, the rest of the diagnosis stands."""
    try:
        return _verdict(inputs)
    except Exception as error:  # Files of a job that broke, or of anybody, are read here.
        why = " ".join(str(error).split())[:_MOST_WHY]
        kind = type(error).__name__
        return Verdict(
            HangFacts(), [], [f"What stopped could not be analysed: {kind}{': ' if why else ''}{why}."]
        )


def _verdict(inputs: Inputs) -> Verdict:
    """By the run's own records, or where those explain nothing by dumps that others collected."""
    if not inputs.runs:
        return stall.of_dumps(inputs.dumps) if inputs.dumps.files else Verdict()
    notes: list[Note] = []
    devices = device_errors(inputs.logs, inputs.telemetry)
    own = stall.of_run(stall.evidence_of(inputs.runs, inputs.logs, notes, devices))
    said = [*(str(note) for note in notes), *own.notes]
    if inputs.dumps.recordings and (own.facts.state is None or own.facts.unexplained is not None):
        collected = stall.of_dumps(inputs.dumps)
        if collected.facts.state is not None:
            facts = replace(collected.facts, lasts=False if own.job.over else None)
            return replace(collected, facts=facts, notes=[*said, *collected.notes], job=own.job)
    return replace(own, notes=[*said, *inputs.dumps.notes])


def conclude(prepared: Prepared, options: Options) -> Diagnosis:
    """Measure and diagnose."""
    diagnosis = with_trials(judged(_measured(prepared, options), options), prepared.inputs.runs)
    diagnosis = with_repository(diagnosis)
    if not options.source_text:
        return diagnosis
    return with_source_text(diagnosis, [run.path for run in prepared.inputs.runs])


def windows_of(inputs: Inputs, progress: Progress = no_progress) -> list[Window]:
    """Each trace reduced, with the steps of its rank's own log, which know better than marks in the trace. Where one has none, all
    go by their marks: of windows that begin differently, collectives match badly."""
    logs: dict[int | None, RankLog] = {log.rank: log for log in inputs.logs}
    logged = {rank for rank, log in logs.items() if log.steps}
    by_logs = all(trace.meta.rank in logged for trace in inputs.traces)
    told = counted(progress, Stage.ALIGN, end=WINDOWS_READ)
    windows: list[Window] = []
    for done, trace in enumerate(inputs.traces):
        told(done, len(inputs.traces))
        windows.append(_window(trace, logs.get(trace.meta.rank), by_logs))
    return windows


def _window(trace: RankTrace, log: RankLog | None, by_log: bool) -> Window:
    if log is None or not by_log:
        return read_window(trace, host=log.host if log is not None else "")
    profiled = profiled_in(trace, log.steps)
    bounds = [(step.number, step.start_ns, step.end_ns) for step in profiled]
    return read_window(move_trace(trace, profiled), bounds or None, log.host)


def _measured(prepared: Prepared, options: Options) -> Measured:
    """A run or traces, in numbers."""
    inputs, stopped = prepared.inputs, prepared.stopped
    if not prepared.logs and not prepared.windows:
        return _measured_end(prepared)
    hta = _hta(inputs, options)
    measurement = measure(
        prepared.logs,
        prepared.windows,
        inputs.telemetry,
        stopped.facts,
        options.progress,
        launches_by_host(inputs.runs),
    )
    facts, seen = measurement.facts, measurement.graphs.primary.ranks
    manifest = launch_of(inputs.runs[0]) if inputs.runs else {}
    job = job_of(inputs, facts.job, seen, manifest, stopped)
    return Measured(
        source=prepared.paths,
        facts=facts,
        coverage=Coverage(facts.steps.measured, len(seen)),
        set_aside=measurement.set_aside,
        notes=[
            *([] if stopped.facts.state else why_provisional(inputs, job.end)),
            *inputs.notes,
            *map(Note, (*stopped.notes, *measurement.notes)),
        ],
        job=job,
        ended=how_it_ended(stopped),
        standing=stopped.standing,
        drawn=replace(
            measurement.drawn,
            window=window_cost(measurement.logs, facts.steps.median_ms),
            telemetry=telemetry_series(inputs.telemetry, manifest.get("started_ns")),
        ),
        hta=hta,
    )


def _measured_end(prepared: Prepared) -> Measured:
    """A job of which nothing is known but how it stopped."""
    inputs, stopped = prepared.inputs, prepared.stopped
    manifest = launch_of(inputs.runs[0]) if inputs.runs else {}
    ranks = [each.rank for each in inputs.dumps.recordings] or [log.rank for log in inputs.logs]
    infos = [log.record.info for log in inputs.logs]
    worlds = [info["world_size"] for info in infos if info.get("world_size")]
    facts = Facts(
        job=JobFacts(
            world_size=max(worlds, default=None) or inputs.dumps.world_size,
            ranks_seen=len(ranks),
            backend=next((str(i["backend"]) for i in infos if i.get("backend")), inputs.dumps.backend),
        ),
        hang=stopped.facts,
    )
    return Measured(
        source=prepared.paths,
        facts=facts,
        coverage=Coverage(0, len(ranks)),
        set_aside={},
        notes=[*inputs.notes, *map(Note, stopped.notes)],
        job=job_of(inputs, facts.job, ranks, manifest, stopped),
        ended=how_it_ended(stopped),
        standing=stopped.standing,
    )


def _measured_operations(paths: Sequence[str], tables: Sequence[str]) -> Measured:
    """A table of operations, in numbers: it has neither ranks' traces nor step logs, so what-if analysis is all there is."""
    if len(tables) > 1:
        raise UnusableInput(
            f"{', '.join(paths)}: {len(tables)} tables of operations, each for a separate job; name one."
        )
    from ddpdoctor.measure.pipeline import measure_stragglers, straggler_facts, summary_of
    from ddpdoctor.trace.operations import read_operations

    stragglers = measure_stragglers(read_operations(tables[0]))
    facts = straggler_facts(stragglers)
    ranks = sorted(worker.rank for worker in stragglers.workers)
    return Measured(
        source=list(paths),
        facts=facts,
        coverage=Coverage(facts.steps.measured, facts.job.ranks_seen),
        set_aside={"incomplete": stragglers.set_aside} if stragglers.set_aside else {},
        notes=[Note(sentence) for sentence in (*stragglers.notes, summary_of(stragglers))],
        job=Job(world_size=stragglers.world_size, ranks_seen=ranks),
    )


def _hta(inputs: Inputs, options: Options) -> dict[str, Any] | None:
    if not options.hta:
        return None
    from ddpdoctor.measure.export import hta_results

    return hta_results(inputs.traces)
