"""Runs the stages of an analysis in order, up to the diagnosis, for run directories and traces and for tables of operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from ddpdoctor import __version__
from ddpdoctor.diagnose import facts_view, rule_texts
from ddpdoctor.diagnose.diagnosis import (
    Coverage,
    Diagnosis,
    Finding,
    Job,
    Standing,
    Steps,
    Verdict,
    without_numpy,
)
from ddpdoctor.diagnose.engine import diagnose
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.trials import TRIALS_FILE, read_trials
from ddpdoctor.diagnose.verdict import verdict, waterfall, withheld, without_contradictions
from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.align import windows_of
from ddpdoctor.measure.facts import Facts, JobFacts
from ddpdoctor.measure.flow import measure
from ddpdoctor.measure.metrics import device_errors, program_errors, telemetry_series, window_cost
from ddpdoctor.measure.runfacts import HangFacts
from ddpdoctor.measure.steplog import RankLog, Training, trainings_of
from ddpdoctor.measure.summary import Drawn
from ddpdoctor.measure.wholerun import AttemptRecord, with_first_findings, with_trainings
from ddpdoctor.measure.window import Window
from ddpdoctor.report.read import holds_diagnosis, read_diagnosis
from ddpdoctor.rundir import Note, is_run_directory
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.stages import Stage, no_progress
from ddpdoctor.stall import StopVerdict
from ddpdoctor.trace.operations import find_operations

from .inputs import (
    Inputs,
    Options,
    expand_run_directories,
    launch_of_starts,
    load,
    merge_notes,
    no_data_reason,
    provisional_notes,
)
from .job import attempt_records, job_of, launches_by_host, termination_summary
from .source_text import with_repository, with_source_text

_MOST_OTHERS = 7
"""Most attempts or trainings that are diagnosed besides the measured one."""
_MAX_OTHERS_S = 20.0
"""Seconds after which no further one is diagnosed."""
_MAX_ERROR_TEXT = 200
"""Most characters of an error's text in a note."""


class PreparedJob(msgspec.Struct, frozen=True):
    """Result of :func:`prepare`. ``logs``: the step logs with steps; ``windows``: the profiler windows; both sorted by rank. If there are
    several trainings, both are of one training."""

    paths: list[str]
    inputs: Inputs
    logs: list[RankLog]
    windows: list[Window]
    stopped: StopVerdict
    """Whether and why the job stopped."""
    trainings: list[Training] = []
    """All trainings; [] if there is only one."""
    training: int | None = None
    """Number of the training of ``logs`` and ``windows``."""


class MeasuredJob(msgspec.Struct, frozen=True):
    """The measurements of a job. ``facts`` are for rules; fields from ``standing`` on are data that only reports show."""

    source: list[str]
    facts: Facts
    coverage: Coverage
    set_aside: dict[str, int]
    """Number of steps excluded from measurement, by reason."""
    notes: list[Note]
    job: Job
    truncated: str | None = None
    """Clause on truncated traces if all measured traces are truncated; None otherwise."""
    termination: str | None = None
    """Sentence, without full stop, on how the job was ended from outside; None if it was not."""
    standing: list[Standing] = msgspec.field(default_factory=list)
    drawn: Drawn = msgspec.field(default_factory=Drawn)
    hta: dict[str, Any] | None = None


def analyze(paths: Sequence[str] | str, options: Options | None = None) -> Diagnosis:
    """Diagnose run directories, profiler traces, or a table of operations (Parquet).

    Several run directories are joined; they must be of one job whose hosts recorded to separate folders. Raises UnusableInput if
    nothing can be analysed; other missing or damaged data become notes.
    """
    chosen = options or Options()
    listed = [paths] if isinstance(paths, str) else list(paths)
    tables = [table for path in listed if not is_run_directory(path) for table in find_operations(path)]
    if tables:
        return _diagnosis_of(_measure_operations(listed, tables), chosen)
    return conclude(prepare(listed, chosen), chosen)


def analyze_or_read(paths: Sequence[str], options: Callable[[], Options]) -> Diagnosis:
    """Like :func:`analyze`, but if the single path is a ``diagnosis.json`` or report, it is read instead, and ``options`` is not called.
    Raises DdpDoctorError."""
    if len(paths) == 1 and holds_diagnosis(Path(paths[0])):
        return read_diagnosis(Path(paths[0]))
    return analyze(paths, options())


def prepare(paths: Sequence[str], options: Options) -> PreparedJob:
    """Read everything at the paths. Raises UnusableInput if there is nothing to measure."""
    places, left_out = expand_run_directories(paths)
    inputs = load(places, options, left_out)
    logs = [log for log in inputs.logs if log.steps]
    stopped = _find_stop(inputs)
    has_data = inputs.traces or logs or inputs.dumps.recordings
    if not has_data and stopped.facts.state is None and stopped.ended_by is None:
        raise UnusableInput(no_data_reason(places, inputs))
    trainings = trainings_of(logs)
    chosen = _chosen_training(trainings, options.training)
    if chosen is not None:
        logs = chosen.logs
        why = "" if options.training is not None else ", the longest one"
        inputs.notes.append(
            Note(
                f"Each process took {len(trainings)} trainings, one after the other: number {chosen.number} is measured{why}; "
                "`--training N` chooses another one."
            )
        )
    windows = windows_of(inputs.traces, logs, options.progress)
    number = None if chosen is None else chosen.number
    return PreparedJob(places, inputs, logs, windows, stopped, trainings, number)


def _chosen_training(trainings: Sequence[Training], number: int | None) -> Training | None:
    """The training with this ``number``, or else the longest one in which the ranks synchronise; None if there is only one. Raises
    UnusableInput."""
    if number is not None and not 1 <= number <= max(len(trainings), 1):
        has = rule_texts.count(max(len(trainings), 1), "training")
        raise UnusableInput(f"there is no training {number}: the ranks took {has}.")
    if not trainings:
        return None
    if number is not None:
        return trainings[number - 1]
    return max(trainings, key=lambda each: (each.is_synchronised, each.steps_s))


def _find_stop(inputs: Inputs) -> StopVerdict:
    """Whether and why the job stopped. An error in this analysis becomes a note, so that it does not prevent the diagnosis."""
    try:
        return _stop_verdict(inputs)
    except Exception as error:  # reads files of a failed job, which may contain anything
        return StopVerdict(HangFacts(), [], [f"What stopped could not be analyzed: {_in_one_line(error)}."])


def _stop_verdict(inputs: Inputs) -> StopVerdict:
    """The verdict from the run's own records, or from flight recorder dumps if those do not explain the stop."""
    if not (inputs.runs or inputs.dumps.files):
        return StopVerdict()
    # Not needed for traces.
    from ddpdoctor.stall.evidence import evidence_of
    from ddpdoctor.stall.verdict import of_dumps, of_run

    if not inputs.runs:
        return of_dumps(inputs.dumps)
    notes: list[Note] = []
    devices = device_errors(inputs.logs, inputs.telemetry)
    programs = program_errors(inputs.logs, inputs.telemetry)
    own = of_run(evidence_of(inputs.runs, inputs.logs, notes, devices, programs))
    sentences = [*(str(note) for note in notes), *own.notes]
    if inputs.dumps.recordings and (own.facts.state is None or own.facts.unexplained is not None):
        collected = of_dumps(inputs.dumps)
        if collected.facts.state is not None:
            facts = replace(collected.facts, lasts=False if own.job.over else None, only_dumps=None)
            return replace(collected, facts=facts, notes=[*sentences, *collected.notes], job=own.job)
    return replace(own, notes=[*sentences, *inputs.dumps.notes])


def conclude(prepared: PreparedJob, options: Options) -> Diagnosis:
    """Measure and diagnose."""
    attempts = _attempts(prepared)
    measured = _measure(prepared, attempts, options)
    run = measured.facts.run
    has_choice = options.training is not None or options.attempt is not None
    if attempts:
        run = with_first_findings(
            run, {} if has_choice else _findings_of_other_attempts(prepared, attempts, options)
        )
    if prepared.training is not None:
        others = {} if has_choice else _findings_of_other_trainings(prepared, options)
        run = with_trainings(run, prepared.trainings, prepared.training, others)
    measured = replace(measured, facts=replace(measured.facts, run=run))
    diagnosis = _with_trials(_diagnosis_of(measured, options), prepared.inputs.runs)
    diagnosis = with_repository(diagnosis)
    if not options.source_text:
        return diagnosis
    return with_source_text(diagnosis, [run.path for run in prepared.inputs.runs])


def _findings_of_other_trainings(prepared: PreparedJob, options: Options) -> dict[int, str]:
    """The first findings of the trainings that are not measured, see :func:`_first_findings`."""

    def alone(training: Training) -> PreparedJob:
        windows = windows_of(prepared.inputs.traces, training.logs)
        return replace(prepared, logs=training.logs, windows=windows, training=training.number)

    others = [each for each in prepared.trainings if each.number != prepared.training]
    others.sort(key=lambda each: each.steps_s, reverse=True)
    return _first_findings({each.number: partial(alone, each) for each in others}, options)


def _findings_of_other_attempts(
    prepared: PreparedJob, attempts: Sequence[AttemptRecord], options: Options
) -> dict[int, str]:
    """The first findings of the attempts that are not measured, see :func:`_first_findings`."""

    def alone(number: int) -> PreparedJob:
        return prepare(prepared.paths, replace(options, attempt=number, progress=no_progress))

    steps = {number: each.steps for number, each in enumerate(attempts, 1) if not each.is_measured}
    others = sorted(filter(steps.get, steps), key=steps.__getitem__, reverse=True)
    return _first_findings({number: partial(alone, number) for number in others}, options)


def _first_findings(others: Mapping[int, Callable[[], PreparedJob]], options: Options) -> dict[int, str]:
    """Number of an attempt or training → rule of the first finding when it is diagnosed alone; "" if there is none. Only the first few of
    ``others`` are prepared and diagnosed."""
    found: dict[int, str] = {}
    begun_s = time.monotonic()
    options = replace(options, hta=False, progress=no_progress)
    for number, prepared in list(others.items())[:_MOST_OTHERS]:
        if time.monotonic() - begun_s > _MAX_OTHERS_S:
            break
        try:
            measured = _measure(replace(prepared(), stopped=StopVerdict()), [], options)
            findings = _diagnosis_of(measured, options).findings
            found[number] = findings[0].rule if findings else ""
        except Exception:
            continue  # only a cell of a table is missing
    return found


def _measure(prepared: PreparedJob, attempts: list[AttemptRecord], options: Options) -> MeasuredJob:
    """Measures a run or traces. ``attempts``: all of the run."""
    inputs, stopped = prepared.inputs, prepared.stopped
    if not prepared.logs and not prepared.windows:
        return _measure_end(prepared)
    hta = None
    if options.hta:
        from ddpdoctor.measure.hta import hta_results

        hta = hta_results(inputs.traces)
    measurement = measure(
        prepared.logs,
        prepared.windows,
        inputs.telemetry,
        stopped.facts,
        options.progress,
        launches_by_host(inputs.starts),
        attempts,
    )
    facts, seen = measurement.facts, measurement.graphs.primary.ranks
    truncated = _truncated(measurement.graphs.primary_is_window, prepared.windows)
    if truncated is not None:
        facts = replace(facts, steps=replace(facts.steps, truncated=True))
    manifest = launch_of_starts(inputs.starts)
    job = job_of(inputs, facts.job, seen, manifest, stopped)
    return MeasuredJob(
        source=prepared.paths,
        facts=facts,
        coverage=Coverage(facts.steps.measured, len(seen)),
        set_aside=measurement.set_aside,
        notes=[
            *([] if stopped.facts.state else provisional_notes(inputs, job.end)),
            *inputs.notes,
            *map(Note, (*stopped.notes, *measurement.notes)),
        ],
        job=job,
        truncated=truncated,
        termination=termination_summary(stopped),
        standing=stopped.standing,
        drawn=replace(
            measurement.drawn,
            window=window_cost(measurement.logs, facts.steps.median_ms),
            telemetry=telemetry_series(inputs.telemetry, manifest.get("started_ns")),
        ),
        hta=hta,
    )


def _attempts(prepared: PreparedJob) -> list[AttemptRecord]:
    """The attempts of the run. An error in their analysis becomes a note, as for :func:`_find_stop`."""
    try:
        attempts, notes = attempt_records(
            prepared.inputs.runs, [log for log in prepared.inputs.logs if log.steps]
        )
        prepared.inputs.notes.extend(notes)
        return attempts
    except Exception as error:
        why = f"The attempts of the run could not be analyzed: {_in_one_line(error)}."
        prepared.inputs.notes.append(Note(why))
        return []


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:_MAX_ERROR_TEXT]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _truncated(measured: bool, windows: Sequence[Window]) -> str | None:
    """See :attr:`.MeasuredJob.truncated`. ``measured``: whether these windows are used to measure causes."""
    if not measured or any(window.trace.meta.truncated is None for window in windows):
        return None
    first, many = windows[0].trace.meta, len(windows) > 1
    which = f"all {len(windows)} traces are" if many else f"{first.source} is"
    return f"{which} truncated ({first.truncated}), so any step may lack events; copy or record {'them' if many else 'it'} again"


def _measure_end(prepared: PreparedJob) -> MeasuredJob:
    """Measures a job without recorded steps, of which only the end is known."""
    inputs, stopped = prepared.inputs, prepared.stopped
    manifest = launch_of_starts(inputs.starts)
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
    return MeasuredJob(
        source=prepared.paths,
        facts=facts,
        coverage=Coverage(0, len(ranks)),
        set_aside={},
        notes=[*inputs.notes, *map(Note, stopped.notes)],
        job=job_of(inputs, facts.job, ranks, manifest, stopped),
        termination=termination_summary(stopped),
        standing=stopped.standing,
    )


def _measure_operations(paths: Sequence[str], tables: Sequence[str]) -> MeasuredJob:
    """Measures a table of operations by what-if analysis; it has neither traces nor step logs."""
    if len(tables) > 1:
        raise UnusableInput(
            f"{', '.join(paths)}: {len(tables)} tables of operations, each for a separate job; name one."
        )
    from ddpdoctor.measure.pipeline import measure_stragglers, straggler_facts, summary_of
    from ddpdoctor.trace.operations import read_operations

    stragglers = measure_stragglers(read_operations(tables[0]))
    facts = straggler_facts(stragglers)
    ranks = sorted(worker.rank for worker in stragglers.workers)
    return MeasuredJob(
        source=list(paths),
        facts=facts,
        coverage=Coverage(facts.steps.measured, facts.job.ranks_seen),
        set_aside={"incomplete": stragglers.excluded_steps} if stragglers.excluded_steps else {},
        notes=[Note(sentence) for sentence in (*stragglers.notes, summary_of(stragglers))],
        job=Job(world_size=stragglers.world_size, ranks_seen=ranks),
    )


_NO_LATE_RANK = "Cannot tell: no training steps were recorded, and nothing shows a rank that others wait for."
_NONE_IN_DUMPS = "Cannot tell: the flight recorder dumps show no rank that others wait for."


def _undecided(hang: HangFacts) -> str:
    """The verdict on a job without recorded steps and without a known hang."""
    if hang.undecided is not None:
        return f"Cannot tell for which rank the others wait: {hang.undecided}."
    return _NONE_IN_DUMPS if hang.only_dumps else _NO_LATE_RANK


def _diagnosis_of(measured: MeasuredJob, options: Options) -> Diagnosis:
    """The diagnosis of ``measured`` by the rules of ``options``."""
    options.progress(Stage.RULES, None)
    facts = measured.facts
    rules = options.loaded_rules or load_rules(options.rules)
    tree = facts_view.tree(facts)
    outcome = without_contradictions(
        diagnose(
            facts,
            rules,
            coverage=measured.coverage,
            thresholds=options.thresholds,
            suppressed=options.suppressed,
        ),
        tree,
    )
    is_unsure = measured.truncated is not None and not outcome.stopping
    if is_unsure:
        outcome = withheld(outcome, outcome.findings, str(measured.truncated))
    found = facts.communication
    matched = found.ranks_meet is not False or not (found.matched or found.unmatched)
    healthy, sentence = verdict(
        outcome,
        coverage=measured.coverage,
        matched=matched,
        marked=facts.steps.marked is not False,
        stopped=_undecided(facts.hang) if facts.hang.looked and facts.hang.state is None else None,
    )
    if is_unsure:
        healthy, sentence = False, Verdict(None, f"Cannot tell: {measured.truncated}.")
    if measured.termination is not None:
        headline = rule_texts.inside_sentence(sentence.headline)
        before = f"In the steps before that: {headline}" if facts.steps.seen else "No step was recorded."
        sentence = Verdict(sentence.rule, f"{measured.termination}. {before}")
    of_steps = {name: value for name, value in asdict(facts.steps).items() if name in Steps.__struct_fields__}
    drawn = {name: value for name, value in asdict(measured.drawn).items() if name != "window"}
    noted = [note.text for note in merge_notes(measured.notes)]
    chosen = []
    if outcome.suppressed:
        by = options.suppressed_by or "the caller"
        chosen.append(_rules_note(f"suppressed by {by}", outcome.suppressed))
    if rules.replaced:
        others = "another" if len(rules.replaced) == 1 else "others"
        chosen.append(_rules_note(f"of ddpdoctor's own replaced by {others} of the same id", rules.replaced))
    diagnosis = Diagnosis(
        tool_version=__version__,
        created_ns=time.time_ns(),
        source=measured.source,
        healthy=healthy,
        verdict=sentence,
        job=measured.job,
        steps=Steps(
            count=facts.steps.seen, set_aside=measured.set_aside, window=measured.drawn.window, **of_steps
        ),
        breakdown=facts.breakdown,
        findings=_headline_first(outcome.findings, sentence.rule),
        notes=list(dict.fromkeys([*chosen, *noted, *outcome.errors])),
        checked=outcome.checked,
        skipped=outcome.skipped,
        standing=measured.standing,
        waterfall=waterfall(facts.steps.mean_ms, outcome),
        **drawn,
        facts=tree,
        hta=measured.hta,
    )
    return without_numpy(diagnosis)


def _headline_first(findings: Sequence[Finding], rule: str | None) -> list[Finding]:
    """``findings`` by cost, with those of the verdict's ``rule`` first, unless they are effects of another one."""
    return sorted(findings, key=lambda finding: finding.rule != rule or finding.caused_by is not None)


def _rules_note(what: str, rules: Sequence[str]) -> str:
    return f"{rule_texts.count(len(rules), 'rule')} {what}: {', '.join(rules)}."


def _with_trials(diagnosis: Diagnosis, runs: Sequence[RunDirectory]) -> Diagnosis:
    """The diagnosis with the trial results of the first of ``runs``. An unreadable file becomes a note."""
    try:
        return replace(diagnosis, tried=read_trials(Path(runs[0].path) / TRIALS_FILE)) if runs else diagnosis
    except FileNotFoundError:
        return diagnosis
    except (UnusableInput, OSError) as error:
        return replace(diagnosis, notes=[*diagnosis.notes, f"Trials are not shown: {error}"])
