"""Reads all input at the given paths: run directories with step logs and telemetry, profiler traces, flight recorder dumps."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.diagnose import rule_texts
from ddpdoctor.diagnose.diagnosis import RUNNING, UNKNOWN
from ddpdoctor.diagnose.load import RuleSet
from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.align import use_monotonic_time
from ddpdoctor.measure.steplog import RankLog, notes_on_records, read_logs, span_around
from ddpdoctor.measure.telemetry import HostTelemetry, read_telemetry
from ddpdoctor.rundir import (
    STEPS_FILE,
    FilesBelow,
    Note,
    NoteCode,
    closed_folders,
    files_below,
    is_run_directory,
    ranks_in_words,
    recorded_notes,
    run_directories,
)
from ddpdoctor.rundir.attempts import starts_of
from ddpdoctor.rundir.reader import RankRecord, RunDirectory, UnknownAttemptError
from ddpdoctor.rundir.sources import read_sources
from ddpdoctor.rundir.stops import launches_of
from ddpdoctor.stages import Progress, Stage, no_progress, progress_counter
from ddpdoctor.stall import Dumps, find_dumps
from ddpdoctor.trace import RankTrace, TraceSet, find_traces, load_traces
from ddpdoctor.trace.digest import trace_digest
from ddpdoctor.trace.sources import is_url

_MAX_MISSING_RANKS = 1000
"""Most missing ranks that are listed."""
_RANK_PREFIX = re.compile(r"Rank (\d+): ")
_FOLDER = re.compile(r"/ranks/(\d{5,})(?:\.\d+)?(?=[/ :])")


class Options(msgspec.Struct, frozen=True):
    """Options of an analysis; the defaults are those of the Python API."""

    rules: Sequence[Path | str] = ()
    loaded_rules: RuleSet | None = None
    """Rules that the caller has already loaded; ``rules`` is then ignored."""
    thresholds: Mapping[str, Mapping[str, float]] = msgspec.field(default_factory=dict)
    suppressed: Collection[str] = ()
    suppressed_by: str = ""
    """File that suppresses the rules, for the note."""
    jobs: int | None = None
    cache: bool = True
    engine: str | None = None
    """Engine that reads traces, see :func:`ddpdoctor.trace.clusters.open_engine`; None: local processes."""
    job: int | None = None
    """Number of the job to analyse, as listed in the error message; None: there must be only one."""
    window: int | None = None
    """Number, from 1, of a profiler window requested with ``ddpdoctor capture``; None: the run's first window."""
    attempt: int | None = None
    """Number, from 1, of the attempt of a restarted run whose steps to measure; None: the one with the most steps."""
    training: int | None = None
    """Number, from 1, of the training to measure if the same processes take several; None: the longest one."""
    hta: bool = False
    source_text: bool = True
    """Whether findings include the text of their source lines, if the files are present and unchanged."""
    progress: Progress = no_progress
    """Called at the start of each stage and with its completed share."""


class Inputs(msgspec.Struct, frozen=True):
    """All data that were read, sorted by rank."""

    starts: list[list[RunDirectory]]
    """The run directories by start of the job, in order; [] if there are none."""
    logs: Sequence[RankLog]
    traces: list[RankTrace]
    telemetry: dict[str, HostTelemetry]
    """By host."""
    notes: list[Note]
    dumps: Dumps
    """Dumps of torch's flight recorder that ddpdoctor did not record."""

    @property
    def runs(self) -> list[RunDirectory]:
        """The run directories of all starts."""
        return [run for start in self.starts for run in start]


class _Run(msgspec.Struct, frozen=True):
    """The data of one run directory."""

    directory: RunDirectory
    logs: Sequence[RankLog]
    telemetry: dict[str, HostTelemetry]
    notes: list[Note]


def expand_run_directories(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """(``paths`` with each folder of run directories replaced by these; notes on folders that cannot be listed, one sentence each).
    Hosts of one job may have recorded to separate folders. Raises UnusableInput if the run directories are of several jobs."""
    expanded: list[str] = []
    notes: list[str] = []
    for path in paths:
        below, errors = run_directories(path)
        if len(below) > 1 and not _are_of_one_job(below):
            newest = max(below, key=lambda run: Path(run).stat().st_mtime)
            raise UnusableInput(
                f"{path} holds {len(below)} recorded runs, not of one job: name one of them, such as {newest}, the newest."
            )
        expanded += below or [path]
        notes += closed_folders(errors) if below else []  # otherwise find_traces reports them
    return expanded, notes


def _are_of_one_job(runs: Sequence[str]) -> bool:
    """Whether ``runs`` are starts of one job, or all ranks have the same job id and world size and each is in only one of ``runs``."""
    opened = [RunDirectory.open(run) for run in runs]
    if len(starts_of(opened)) > 1:
        return True
    ranks = [record for run in opened for record in run.ranks]
    jobs = {(record.info.get("job_id"), record.info.get("world_size")) for record in ranks}
    return len(jobs) == 1 and len({record.rank for record in ranks}) == len(ranks)


def load(paths: Sequence[str], options: Options, skipped: Sequence[str] = ()) -> Inputs:
    """Read all input at the paths. ``skipped``: notes of :func:`expand_run_directories`. Raises UnusableInput if there are traces
    and none can be read."""
    folders = [path for path in paths if is_run_directory(path)]
    recorded_at = set(folders)
    runs = _read_runs(folders, options) if folders else []
    others = [path for path in paths if path not in recorded_at]
    local = [path for path in others if not is_url(path)]
    below = {path: files_below(path) for path in local if os.path.isdir(path)}  # noqa: PTH112
    dumps = find_dumps(local, below)
    traces, trace_notes = _read_traces(
        runs, [path for path in others if path not in dumps.files], options, dumps, below
    )
    complete = [trace for trace in traces if trace.meta.truncated is None]
    # Truncated traces are only used if there is nothing else to measure.
    measured = complete if complete or any(run.logs for run in runs) else traces
    if len(measured) < len(traces):
        left_out = rule_texts.count(len(traces) - len(measured), "truncated trace")
        trace_notes.insert(
            0, Note(f"{left_out} left out of the measurement: any step may lack events there.")
        )
    measured_runs = [run for run in runs if run.directory.ranks] or runs
    recorded = sorted((log for run in runs for log in run.logs), key=lambda log: log.rank)
    logs, set_clocks = use_monotonic_time(recorded)
    return Inputs(
        starts=starts_of([run.directory for run in runs]) if runs else [],
        logs=logs,
        traces=measured,
        telemetry={host: telemetry for run in measured_runs for host, telemetry in run.telemetry.items()},
        notes=merge_notes(
            [
                *map(Note, skipped),
                *(note for run in runs for note in run.notes),
                *_missing_rank_notes(runs, logs),
                *_no_rank_notes([run.directory for run in runs]),
                *trace_notes,
                *map(Note, set_clocks),
            ]
        ),
        dumps=dumps,
    )


def _missing_rank_notes(runs: Sequence[_Run], logs: Sequence[RankLog]) -> list[Note]:
    """A note on each rank of the job that has no folder in any of ``runs``."""
    worlds = [size for log in logs if isinstance(size := log.record.info.get("world_size"), int)]
    known = {log.rank for log in logs} | {rank for run in runs for note in run.notes for rank in note.ranks}
    where = runs[0].directory.path if len(runs) == 1 else "*"
    return [
        Note(f"{where}/ranks/{rank:05d} is missing: what this rank recorded is not here.").of_rank(rank)
        for rank in missing_ranks(max(worlds, default=0), known)
    ]


def _no_rank_notes(runs: Sequence[RunDirectory]) -> list[Note]:
    """A note on each of ``runs`` without a recording, if others have one."""
    if not any(run.recordings for run in runs):
        return []
    return [
        Note(
            f"{run.path} has no recorded rank, and is in no table: its processes may have ended before they had created a process group. "
            f"Exit code of its command: {run.manifest.get('exit_code', 'unknown')}."
        )
        for run in runs
        if not run.recordings
    ]


def missing_ranks(world: int, known: Collection[int]) -> list[int]:
    """Ranks of a job with ``world`` ranks that are not ``known``, at most ``_MAX_MISSING_RANKS``."""
    return list(islice((rank for rank in range(world) if rank not in known), _MAX_MISSING_RANKS))


def merge_notes(notes: Sequence[Note]) -> list[Note]:
    """``notes``, with equal ones on several ranks or their files merged into one that lists the ranks."""
    same: dict[str, dict[int, Note]] = {}
    for note in notes:
        sentence, rank = _split_rank(note.text)
        if rank is not None:
            same.setdefault(sentence, {}).setdefault(rank, note)
    merged: dict[str, Note] = {}
    for note in notes:
        sentence, _ = _split_rank(note.text)
        ranks = tuple(sorted(same.get(sentence, ())))
        if len(ranks) > 1:
            text = f"{ranks_in_words(ranks).capitalize()}: {sentence.replace('this rank', 'each rank')}"
            merged.setdefault(text, replace(note, text=text, ranks=ranks))
        else:
            merged.setdefault(note.text, note)
    return list(merged.values())


def _split_rank(text: str) -> tuple[str, int | None]:
    """(the sentence without its rank, the rank); the rank is None if the sentence has none."""
    prefix = _RANK_PREFIX.match(text)
    sentence = text[prefix.end() :] if prefix else text
    folder = _FOLDER.search(sentence)
    found = prefix or folder
    return (text, None) if found is None else (_FOLDER.sub("/ranks/*", sentence), int(found[1]))


def no_data_reason(paths: Sequence[str], inputs: Inputs) -> str:
    """Error message with the reason why there is nothing to measure in ``inputs``."""
    where = ", ".join(paths)
    if inputs.dumps.notes:
        return f"{where}: {inputs.dumps.notes[0]}"
    if not inputs.runs:
        return f"{where}: nothing to analyze: neither a run directory of ddpdoctor nor a profiler trace nor a flight recorder dump."
    reasons = [note for note in inputs.notes if note.code in (NoteCode.NO_RANK, NoteCode.UNREADABLE)]
    if inputs.logs:
        reasons = [note for note in reasons if STEPS_FILE in note.text]
    if reasons:
        return f"{where}: {reasons[0]}"
    from ddpdoctor.rundir.requests import launcher_runs

    unfinished = [run for run in inputs.runs if run.manifest.get("ended_ns") is None]
    if any(map(is_running_here, unfinished)):
        return f"{where}: {_RUNNING[bool(inputs.logs)].format(run=inputs.runs[0].path)}."
    reason = "no rank recorded a step" if inputs.logs else "no rank was recorded"
    more = f" ({inputs.notes[0]})" if inputs.notes else ""
    why = "The command may not have started a PyTorch job, or ended before its first optimizer step"
    if unfinished and all(launcher_runs(run.path, run.manifest) is False for run in unfinished):
        why = "Its launcher was killed before that"
    elif unfinished:
        why = f"The job may run and {'be in its first step' if inputs.logs else 'not have come so far'}, or was killed there"
    return f"{where}: {reason}. {why}{more}."


def provisional_notes(inputs: Inputs, end: str | None) -> list[Note]:
    """A note that the job may take further steps; [] if its ``end`` is known, see
    :class:`~ddpdoctor.diagnose.diagnosis.Job`."""
    finished = max((log.steps[-1].number + 1 for log in inputs.logs if log.steps), default=0)
    steps = rule_texts.count(finished, "step")
    if end == RUNNING:
        return [Note(f"The job still runs ({steps} so far): what is said here may change until it ends.")]
    if end == UNKNOWN and any(run.manifest.get("started_ns") for run in inputs.runs):
        return [Note(f"The job's end was not recorded ({steps} so far): it may still run.")]
    return []


_RUNNING = {
    False: "its command is running, and no rank has joined a process group yet. Try again once it trains; `ddpdoctor watch {run}` "
    "shows its steps as they end",
    True: "its job is running, and has not finished a step yet. `ddpdoctor watch {run}` shows its steps as they end, `ddpdoctor stacks "
    "{run}` where its ranks are now",
}
"""Key: whether a rank was recorded."""


def is_running_here(run: RunDirectory) -> bool:
    """Whether a launcher or rank of the job is known to run on this machine."""
    from ddpdoctor.rundir.liveness import is_running
    from ddpdoctor.rundir.requests import launcher_runs

    documents = [*launches_of(run.path, []), *(record.info for record in run.recordings)]
    return any(map(is_running, documents)) or launcher_runs(run.path, run.manifest) is True


def _no_such_window(runs: Sequence[_Run], number: int) -> str:
    captures = [
        capture
        for run in runs
        for record in run.directory.ranks
        for capture in record.info.get("captures") or []
        if capture.get("state") == "saved"
    ]
    if not captures:
        return f"there is no window {number}: `ddpdoctor capture RUN` opens windows in a running job."
    known = ", ".join(str(number) for number in sorted({capture.get("number", 0) for capture in captures}))
    return f"there is no window {number}: {', '.join(run.directory.path for run in runs)} has {known}."


def _read_runs(folders: Sequence[str], options: Options) -> list[_Run]:
    from ddpdoctor.rundir.draining import recover

    unsaved = {folder: recover(folder) for folder in folders}
    try:
        directories, others = _runs_of_first_job(RunDirectory.open_all(folders, options.attempt))
    except UnknownAttemptError as error:
        raise UnusableInput(f"{', '.join(folders)}: {error}.") from None
    runs: list[_Run] = []
    report_progress = progress_counter(options.progress, Stage.LOGS)
    for directory, read in zip(directories, read_logs(directories, report_progress), strict=True):
        around = span_around(log.steps for log in read.logs)
        telemetry = {host: read_telemetry(Path(file), around) for host, file in directory.telemetry.items()}
        notes = [
            *([] if runs else others),
            *(Note(f"{sentence} This diagnosis has read it there.") for sentence in unsaved[directory.path]),
            *directory.notes,
            *(Note(sentence) for sentence in read.notes),
            *(note.of(f"Host {host}") for host, each in telemetry.items() for note in each.notes),
            *_launcher_notes(directory, telemetry),
            *notes_on_records(
                read.logs,
                ended=bool(directory.manifest.get("ended_ns")),
                window=options.window,
                sampled=bool(read_sources(directory.path)),
            ),
        ]
        by_own_name = {each.host or host: each for host, each in telemetry.items()}
        uses_gpus = any(record.info.get("device", "cpu") != "cpu" for record in directory.ranks)
        kept = [note for note in notes if uses_gpus or note.code != NoteCode.NO_GPU]
        runs.append(_Run(directory, read.logs, by_own_name, kept))
    return runs


def _runs_of_first_job(runs: Sequence[RunDirectory]) -> tuple[list[RunDirectory], list[Note]]:
    """(``runs`` without those that have a rank of an earlier one and are therefore of another job, another start of it, or a copy;
    notes on these). A folder that repeats only some ranks of an earlier one, for the same job, is kept."""
    kept: list[RunDirectory] = []
    notes: list[Note] = []
    first: dict[int, RankRecord] = {}
    for run in runs:
        repeated = [record for record in run.ranks if record.rank in first]
        is_other = any(
            _process_identity(record) != _process_identity(first[record.rank]) for record in repeated
        )
        if repeated and (is_other or len(repeated) == len(run.ranks)):
            who = ranks_in_words([record.rank for record in repeated])
            notes.append(
                Note(
                    f"{run.path} is skipped: {who} {'was' if len(repeated) == 1 else 'were'} already read from another folder, and "
                    "it is not known to be another start of that job. `ddpdoctor compare` compares two runs."
                )
            )
            continue
        kept.append(run)
        first.update({record.rank: record for record in run.ranks if record.rank not in first})
    return kept, notes


def _process_identity(record: RankRecord) -> tuple[Any, ...]:
    """Identity of the recording process, which is the same in copies of the recording."""
    return tuple(map(record.info.get, ("host", "boot", "pid_namespace", "pid", "started_ns")))


def launch_of_starts(starts: Sequence[Sequence[RunDirectory]]) -> Mapping[str, Any]:
    """Start of the job, from :func:`launch_of` its first run directory; with several ``starts``, the end is that of the last one. {} if
    there are none."""
    if not starts:
        return {}
    first = launch_of(starts[0][0])
    return first if len(starts) == 1 else {**first, "ended_ns": launch_of(starts[-1][0]).get("ended_ns")}


def launch_of(run: RunDirectory) -> Mapping[str, Any]:
    """Start of the job: the manifest or, if that is missing or damaged, the record of the first launcher; {} if there is neither."""
    if run.manifest.get("command"):
        return run.manifest
    launches = launches_of(run.path, [])
    return min(launches, key=lambda each: each.get("started_ns") or 0, default=run.manifest)


def _launcher_notes(run: RunDirectory, telemetry: dict[str, HostTelemetry]) -> list[Note]:
    """The manifest's notes that are not also in a host's telemetry; and one note if a launcher's record replaces the manifest."""
    report_progress = {note.text for each in telemetry.values() for note in each.notes}
    notes = recorded_notes(run.manifest.get("notes") or [], run.manifest.get("note_codes") or [])
    if launch_of(run) is not run.manifest:
        notes.append(Note(f"{run.path}: command, start and end are taken from its launcher's own record."))
    return [note for note in notes if note.text not in report_progress]


def _read_traces(
    runs: Sequence[_Run],
    others: Sequence[str],
    options: Options,
    dumps: Dumps,
    below: Mapping[str, FilesBelow],
) -> tuple[list[RankTrace], list[Note]]:
    """The profiler windows or digests of the recorded ranks, and the traces at ``others``, where ``dumps`` may also be; with notes."""
    ranks: dict[str, int] = {}
    for record in (record for run in runs for record in run.directory.ranks):
        number = options.window
        file = record.capture(number) if number is not None else record.trace or trace_digest(record.path)
        if file is not None:
            ranks[file] = record.rank
    if options.window is not None and not ranks:
        raise UnusableInput(_no_such_window(runs, options.window))
    loose = TraceSet(())
    try:
        loose = find_traces(others, below) if others else loose
    except UnusableInput:
        if not dumps.files:
            raise
    files = list(dict.fromkeys([*ranks, *loose.files]))
    skipped_notes = list(map(Note, loose.notes))
    if not files:
        return [], skipped_notes
    report_progress = partial(options.progress, Stage.TRACES)
    report_progress(0.0)
    try:
        loaded = load_traces(
            files,
            jobs=options.jobs,
            cache=options.cache,
            ranks={file: rank for file, rank in ranks.items() if file not in loose.files},
            progress=report_progress,
            engine=options.engine,
            job=options.job,
        )
    except UnusableInput as error:
        if not dumps.recordings and not any(run.logs for run in runs):
            raise UnusableInput(" ".join([str(error), *map(str, skipped_notes)])) from error
        return [], [*skipped_notes, Note(str(error))]
    unread = [Note(reason, ranks=(ranks[file],) if file in ranks else ()) for file, reason in loaded.failed]
    return loaded.traces, [*skipped_notes, *map(Note, loaded.notes), *unread]
