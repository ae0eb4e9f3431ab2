"""``ddpdoctor export``: all ranks on one clock as a timeline or tables; the diagnosis as figures and in experiment trackers."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpdoctor.cli.completion import runs
from ddpdoctor.cli.options import check_outputs, job_option, output_file, output_folder, to_stdout
from ddpdoctor.cli.session import (
    configured,
    diagnosis_at,
    import_numpy_single_threaded,
    per_item_progress,
    say,
    shown_progress,
)
from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.stages import no_progress

if TYPE_CHECKING:
    from ddpdoctor.analysis import PreparedJob
    from ddpdoctor.diagnose.diagnosis import Diagnosis

TABLES = ("steps", "collectives", "events")
_FLAMES = "rank-{rank:05d}.speedscope.json"
TIMELINE_TABLES = ("details", "counters")
"""Tables that are only in the timeline."""
OnProgress = Callable[[float], None]
"""Called with the share of an output that is written, 0 to 1."""


@dataclass(frozen=True)
class Trackers:
    """The requested trackers; None if not requested."""

    tensorboard: Path | None = None
    mlflow: str | None = None
    wandb: Path | None = None
    redacted: bool = False

    @property
    def requested(self) -> bool:
        """Whether any tracker is requested."""
        return not (self.tensorboard is None and self.mlflow is None and self.wandb is None)

    def check(self) -> None:
        """Raise DdpDoctorError if a tracker would write into a recorded run or another program's database."""
        if not self.requested:
            return
        from ddpdoctor.rundir import is_recorded_file, is_run_directory
        from ddpdoctor.trackers.to_mlflow import check_mlflow

        for option in ("tensorboard", "mlflow", "wandb"):
            place = getattr(self, option)
            if place is not None and "://" not in str(place):
                folder = os.path.realpath(place)
                if is_run_directory(folder) or is_recorded_file(folder):
                    raise DdpDoctorError(
                        f"--{option} {place} would write into a recorded run: name another folder."
                    )

        if self.mlflow is not None and "://" not in self.mlflow:
            check_mlflow(Path(self.mlflow).resolve())

    def write(self, diagnosis: Diagnosis, *, err: bool = False) -> None:
        """Write ``diagnosis`` to each tracker and print the destinations, on stderr if ``err``. Raises DdpDoctorError."""
        if not self.requested:
            return
        from ddpdoctor.report.redaction import redact
        from ddpdoctor.trackers.contents import tracker_run

        run = tracker_run(redact(diagnosis) if self.redacted else diagnosis)
        if run.note:
            say(f"Note: {run.note}", err=True)
        if self.tensorboard is not None:
            from ddpdoctor.trackers.to_tensorboard import write_tensorboard

            files = write_tensorboard(run, self.tensorboard)
            say(f"written: {len(files)} event files in {files[0].parent}", err=err)
            say(f"To view them: tensorboard --logdir {shlex.quote(str(self.tensorboard))}", err=err)
        if self.mlflow is not None:
            from ddpdoctor.trackers.to_mlflow import log_to_mlflow

            view_command = log_to_mlflow(run, self.mlflow)
            say(f"logged to {self.mlflow}; to view it: {view_command}", err=err)
        if self.wandb is not None:
            from ddpdoctor.trackers.to_wandb import log_to_wandb

            sync_command = log_to_wandb(run, self.wandb)
            say(f"written to {self.wandb}, not uploaded; to upload it: {sync_command}", err=err)


@click.command("export")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=runs)
@output_file("--timeline", help_text="Write a Chrome trace; compressed if F ends in .gz.")
@output_folder("--parquet", help_text="Write steps.parquet, collectives.parquet and events.parquet.")
@output_folder(
    "--speedscope", help_text="Write the stack samples of each rank as a flame graph for speedscope."
)
@output_folder("--csv", help_text="Write the same tables as CSV.")
@output_folder(
    "--figures",
    help_text="Write the report's charts as interactive figures: figures.html, and each as plotly's JSON.",
)
@click.option("--steps", metavar="A:B", help="Export only steps A to B-1.")
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write event files with times by step and rank, and findings as text (needs ddpdoctor[tensorboard]).",
)
@click.option(
    "--mlflow",
    metavar="DIR|URI",
    help="Log a run with parameters, metrics, verdict and report to a folder, a tracking server or a database "
    "(needs ddpdoctor[mlflow]).",
)
@click.option(
    "--wandb",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write an offline run of Weights & Biases, which `wandb sync` uploads (needs ddpdoctor[wandb]).",
)
@click.option(
    "--redact",
    "redacted",
    is_flag=True,
    help="Remove host names, user names, paths and arguments from figures and trackers.",
)
@job_option
def command(
    paths: tuple[str, ...],
    timeline: Path | None,
    parquet: Path | None,
    speedscope: Path | None,
    csv: Path | None,
    figures: Path | None,
    steps: str | None,
    job: int | None,
    **tracking: Any,
) -> None:
    """Export all ranks of a run directory, or of profiler traces, on one clock.

    The timeline opens in https://ui.perfetto.dev: one process per rank, waiting for other ranks and transfer as separate
    slices, below them annotations, operators, kernels and sampled lines. Experiment trackers get the diagnosis, also from a
    report or a diagnosis.json.

    \b
    Examples:
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --timeline all-ranks.json.gz
      ddpdoctor export traces/ --timeline all-ranks.json.gz --steps 10:15 --parquet tables
      ddpdoctor export traces/ --csv tables
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --speedscope flames
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --figures figures
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --tensorboard tb --mlflow mlruns --wandb offline
    """
    outputs = _Outputs(timeline, parquet, csv, speedscope, figures)
    trackers = Trackers(**tracking)
    trackers.check()
    step_range = _step_range(steps)
    _check_options(paths, outputs, trackers, step_range is not None)
    import_numpy_single_threaded()
    if outputs.recordings:
        _export_recording(paths, outputs, trackers, step_range, job)
        return
    diagnosis = diagnosis_at(*paths, job=job)
    if figures is not None:
        from ddpdoctor.report.redaction import redact

        for sentence in _write_figures(redact(diagnosis) if trackers.redacted else diagnosis, figures):
            say(sentence)
    trackers.write(diagnosis)


@dataclass(frozen=True)
class _Outputs:
    """Where to write each kind of output; None if it is not requested."""

    timeline: Path | None
    parquet: Path | None
    csv: Path | None
    speedscope: Path | None
    figures: Path | None

    @property
    def recordings(self) -> list[Path]:
        """Outputs that are made from a recording, not from a diagnosis file."""
        listed = (self.timeline, self.parquet, self.csv, self.speedscope)
        return [path for path in listed if path is not None]


def _check_options(paths: Sequence[str], outputs: _Outputs, trackers: Trackers, steps_chosen: bool) -> None:
    """Raise UsageError or DdpDoctorError if options exclude each other or an output cannot be written."""
    if not (outputs.recordings or trackers.requested) and outputs.figures is None:
        raise click.UsageError(
            "nothing to write: give --timeline F, --parquet DIR, --csv DIR, --speedscope DIR, --figures DIR, --tensorboard DIR, "
            "--mlflow DIR or --wandb DIR."
        )
    if trackers.redacted and outputs.recordings:
        raise click.UsageError(
            "--redact is for figures and trackers: timelines, tables and flame graphs keep their names."
        )
    if steps_chosen and not outputs.recordings:
        raise click.UsageError("--steps has no effect on figures and trackers, which show the whole run.")
    # Imported here, so that an invalid command line fails fast.
    from ddpdoctor.written import TIMELINE

    check_outputs(paths, {"--timeline": (outputs.timeline, TIMELINE)})
    _check_folders(outputs)


def _export_recording(
    paths: Sequence[str],
    outputs: _Outputs,
    trackers: Trackers,
    step_range: tuple[int, int] | None,
    job: int | None,
) -> None:
    """Write the outputs made from a recording, then figures and trackers if requested. ``step_range``: (first, last) step; None: all."""
    from ddpdoctor.analysis import conclude, prepare
    from ddpdoctor.measure.export import recorded_tables
    from ddpdoctor.report.timeline_export import cut_steps

    timeline_on_stdout = to_stdout([outputs.timeline])
    with shown_progress() as progress:
        options = configured(progress, job=job)
        prepared = prepare(list(paths), options)
        # Tables and flame graphs need no diagnosis.
        needs_diagnosis = outputs.timeline is not None or outputs.figures is not None or trackers.requested
        diagnosis = conclude(prepared, options) if needs_diagnosis else None
        found = recorded_tables(prepared.logs, prepared.windows, prepared.inputs.telemetry)
    recorded = {name: getattr(found, name) for name in (*TABLES, *TIMELINE_TABLES)}
    if step_range is not None:
        recorded = cut_steps(recorded, *step_range)
        if recorded["steps"].is_empty():
            raise UnusableInput(
                f"{', '.join(paths)}: no step from {step_range[0]} to {step_range[1]} was recorded."
            )
    notes = [*map(str, prepared.inputs.notes), *found.notes]
    sentences: list[str] = []
    try:
        # A progress line would mix with a timeline on standard output if both are the same terminal.
        with nullcontext(no_progress) if timeline_on_stdout else shown_progress() as progress:
            progress_of_outputs = per_item_progress(progress, len(outputs.recordings))
            sentences.extend(_write_tables(outputs, recorded, progress_of_outputs))
            if outputs.speedscope is not None:
                flames = _write_flames(prepared, recorded, outputs.speedscope, next(progress_of_outputs))
                if not flames:
                    notes.insert(0, "no flame graph, because no stack samples were recorded.")
                sentences += _written_lines(flames)
            if outputs.timeline is not None and diagnosis is not None:
                sentences += _write_timeline(
                    outputs.timeline,
                    recorded,
                    diagnosis,
                    found.hosts,
                    next(progress_of_outputs),
                    steps_chosen=step_range is not None,
                )
            if outputs.figures is not None and diagnosis is not None:
                sentences += _write_figures(diagnosis, outputs.figures)
    finally:
        for sentence in sentences:
            say(sentence, err=timeline_on_stdout)
    if diagnosis is not None:
        trackers.write(diagnosis, err=timeline_on_stdout)
    for note in notes:
        say(f"Note: {note}", err=True)


def _write_tables(
    outputs: _Outputs, recorded: Mapping[str, Any], progress_of_outputs: Iterator[OnProgress]
) -> Iterator[str]:
    from ddpdoctor.report.timeline_export import write_tables

    tables = {name: recorded[name] for name in TABLES}
    for suffix, folder in (("parquet", outputs.parquet), ("csv", outputs.csv)):
        if folder is not None:
            yield from _written_lines(write_tables(tables, folder, suffix, next(progress_of_outputs)))


def _write_timeline(
    timeline: Path,
    recorded: dict[str, Any],
    diagnosis: Diagnosis,
    hosts: Any,
    on_progress: OnProgress,
    *,
    steps_chosen: bool,
) -> list[str]:
    """Write the timeline, cut to steps that a browser can open unless ``steps_chosen`` by the user. Returns sentences for the user."""
    from ddpdoctor.report import words
    from ddpdoctor.report.timeline_export import cut_steps, fitting_steps, write_timeline

    fitting = None if steps_chosen else fitting_steps(recorded)
    if fitting is not None:
        recorded = cut_steps(recorded, *fitting)
    all_ranks = words.all_ranks_label(diagnosis)
    write_timeline(recorded, diagnosis.findings, hosts, timeline, on_progress, all_ranks=all_ranks)
    limited = "only steps {} to {}, so that a browser can open the file; --steps A:B selects others."
    return [
        *([limited.format(*fitting)] if fitting is not None else []),
        f"written: {timeline}; open it in https://ui.perfetto.dev",
    ]


def _written_lines(files: Sequence[Path]) -> list[str]:
    return [f"written: {file}" for file in files]


def _write_figures(diagnosis: Diagnosis, folder: Path) -> list[str]:
    from ddpdoctor.report.html import write_figures

    return _written_lines(write_figures(diagnosis, folder)) or [
        "no figures, because nothing was measured that they could show."
    ]


def _write_flames(
    prepared: PreparedJob, recorded: Mapping[str, Any], folder: Path, on_progress: OnProgress
) -> list[Path]:
    """Write a flame graph for each rank with stack samples. Returns the files."""
    from ddpdoctor.measure.flames import flame_graphs
    from ddpdoctor.report.json_output import to_json
    from ddpdoctor.written import WrittenFolder

    numbers = set(recorded["steps"]["step"].to_list())

    def flame_files() -> Iterator[tuple[str, bytes]]:
        graphs = flame_graphs(prepared.logs, prepared.inputs.telemetry, numbers)
        for done, (rank, document) in enumerate(graphs):
            on_progress(done / len(prepared.logs))
            if document is not None:
                yield _FLAMES.format(rank=rank), to_json(document)

    target = WrittenFolder(folder, "flame graphs")
    target.check(_FLAMES.format(rank=log.rank) for log in prepared.logs)
    return target.write(flame_files())


def _check_folders(outputs: _Outputs) -> None:
    """Raise DdpDoctorError if an output would replace another program's file, or if the timeline is the path of another output."""
    from ddpdoctor.written import WrittenFolder

    for folder, words, names in (
        (outputs.parquet, "exported tables", [f"{name}.parquet" for name in TABLES]),
        (outputs.csv, "exported tables", [f"{name}.csv" for name in TABLES]),
        (outputs.speedscope, "flame graphs", []),
        (outputs.figures, "figures", ["figures.html"]),
    ):
        if folder is None:
            continue
        WrittenFolder(folder, words).check(names)
        places = [os.path.realpath(folder / name) for name in names]
        if outputs.timeline is not None and os.path.realpath(outputs.timeline) in places:
            raise DdpDoctorError(
                f"the timeline {outputs.timeline} would be one of the {words} in {folder}: name two files."
            )


def _step_range(text: str | None) -> tuple[int, int] | None:
    """(First, last) step of ``A:B``; None for None. Raises click.BadParameter."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise click.BadParameter(f"{text!r} is not a range of steps such as 10:15", param_hint="--steps")
    return int(match[1]), int(match[2]) - 1
