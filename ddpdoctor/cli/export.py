"""``ddpdoctor export``: all ranks on one clock, as a timeline for Perfetto, or as tables in Parquet or CSV; the diagnosis as figures
and in trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpdoctor.cli.diagnosis_of import diagnosis_at
from ddpdoctor.cli.numpy_threads import import_numpy_single_threaded
from ddpdoctor.cli.outputs import check_outputs, output_file, output_folder, to_stdout
from ddpdoctor.cli.progress import per_item_progress, shown_progress
from ddpdoctor.cli.project_config import chosen_job, configured
from ddpdoctor.cli.say import say
from ddpdoctor.cli.shell_completion import runs
from ddpdoctor.cli.tracker_options import Trackers, tracker_options
from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.stages import Stage, no_progress

if TYPE_CHECKING:
    from ddpdoctor.analysis import PreparedJob
    from ddpdoctor.diagnose.diagnosis import Diagnosis

TABLES = ("steps", "collectives", "events")
_FLAMES = "rank-{rank:05d}.speedscope.json"
BY_NAME = ("details", "counters")
"""On the timeline alone."""
Told = Callable[[float], None]
"""Takes which part of an output is written."""


@click.command("export")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=runs)
@output_file("--timeline", says="Write a Chrome trace; compressed if F ends in .gz.")
@output_folder("--parquet", says="Write steps.parquet, collectives.parquet and events.parquet.")
@output_folder("--speedscope", says="Write the stack samples of each rank as a flame graph.")
@output_folder("--csv", says="Write the same tables as CSV.")
@output_folder(
    "--figures",
    says="Write the report's charts as interactive figures: figures.html, and each as JSON of plotly.",
)
@click.option("--steps", metavar="A:B", help="Only steps A to B-1.")
@tracker_options
@chosen_job
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

    The timeline opens in https://ui.perfetto.dev: one process for each rank, with waiting for other ranks and
    transferring as separate slices, annotations, operators, kernels and sampled lines below them. Trackers of experiments get the
    diagnosis, also from a report or a diagnosis.json.

    \b
    Examples:
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --timeline all-ranks.json.gz
      ddpdoctor export traces/ --timeline all-ranks.json.gz --steps 10:15 --parquet tables
      ddpdoctor export traces/ --csv tables
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --speedscope flames
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --figures figures
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --tensorboard tb --mlflow mlruns --wandb offline
    """
    wanted = _Wanted(timeline, parquet, csv, speedscope, figures)
    trackers = Trackers(**tracking)
    trackers.check()
    chosen = _range(steps)
    _check(paths, wanted, trackers, chosen is not None)
    import_numpy_single_threaded()
    if wanted.recordings:
        _export_recording(paths, wanted, trackers, chosen, job)
        return
    made = diagnosis_at(*paths, job=job)
    if figures is not None:
        from ddpdoctor.report import redact

        for sentence in _figures_written(redact(made) if trackers.redacted else made, figures):
            say(sentence)
    trackers.write(made)


@dataclass(frozen=True)
class _Wanted:
    """Where to write each kind of output; None where it is not wanted."""

    timeline: Path | None
    parquet: Path | None
    csv: Path | None
    speedscope: Path | None
    figures: Path | None

    @property
    def recordings(self) -> list[Path]:
        """Outputs that show what was recorded, and not a diagnosis."""
        listed = (self.timeline, self.parquet, self.csv, self.speedscope)
        return [path for path in listed if path is not None]


def _check(paths: Sequence[str], wanted: _Wanted, trackers: Trackers, steps_chosen: bool) -> None:
    """Raises UsageError or DdpDoctorError where the options do not go together, or what they name cannot be written."""
    if not (wanted.recordings or trackers.requested) and wanted.figures is None:
        raise click.UsageError(
            "nothing to write: give --timeline F, --parquet DIR, --csv DIR, --speedscope DIR, --figures DIR, --tensorboard DIR, "
            "--mlflow DIR or --wandb DIR."
        )
    if trackers.redacted and wanted.recordings:
        raise click.UsageError(
            "--redact is for figures and trackers: timelines, tables and flame graphs keep their names."
        )
    if steps_chosen and not wanted.recordings:
        raise click.UsageError("--steps does not choose what figures and trackers show: the whole run.")
    # What a wrong command line need not wait for.
    from ddpdoctor.written import TIMELINE

    check_outputs(paths, {"--timeline": (wanted.timeline, TIMELINE)})
    _check_folders(wanted)


def _export_recording(
    paths: Sequence[str],
    wanted: _Wanted,
    trackers: Trackers,
    chosen: tuple[int, int] | None,
    job: int | None,
) -> None:
    """Write what was recorded in the steps ``chosen`` (first and last; None: all), and the diagnosis where that is wanted, too."""
    from ddpdoctor.analysis import conclude, prepare
    from ddpdoctor.measure.export import recorded_tables
    from ddpdoctor.report.timeline_export import cut_steps

    aside = to_stdout([wanted.timeline])
    with shown_progress() as progress:
        options = configured(progress, job=job)
        prepared = prepare(list(paths), options)
        # Tables and flame graphs show what was recorded, and nothing of a diagnosis.
        diagnosed = wanted.timeline is not None or wanted.figures is not None or trackers.requested
        diagnosis = conclude(prepared, options) if diagnosed else None
        found = recorded_tables(prepared.logs, prepared.windows, prepared.inputs.telemetry)
    recorded = {name: getattr(found, name) for name in (*TABLES, *BY_NAME)}
    if chosen is not None:
        recorded = cut_steps(recorded, *chosen)
        if recorded["steps"].is_empty():
            raise UnusableInput(f"{', '.join(paths)}: no step from {chosen[0]} to {chosen[1]} was recorded.")
    notes = [*map(str, prepared.inputs.notes), *found.notes]
    said: list[str] = []
    try:
        # Nothing else may stand in a timeline on standard output, which may be the same terminal.
        with nullcontext(no_progress) if aside else shown_progress() as progress:
            turns = per_item_progress(progress, Stage.REPORT, len(wanted.recordings))
            said += _tables_written(wanted, recorded, turns)
            if wanted.speedscope is not None:
                flames = _write_flames(prepared, recorded, wanted.speedscope, next(turns))
                if not flames:
                    notes.insert(0, "no stack samples were recorded, so there is no flame graph.")
                said += _named(flames)
            if wanted.timeline is not None and diagnosis is not None:
                said += _timeline_written(
                    wanted.timeline, recorded, diagnosis, found.hosts, next(turns), cut=chosen is not None
                )
            if wanted.figures is not None and diagnosis is not None:
                said += _figures_written(diagnosis, wanted.figures)
    finally:
        for sentence in said:
            say(sentence, err=aside)
    if diagnosis is not None:
        trackers.write(diagnosis, err=aside)
    for note in notes:
        say(f"Note: {note}", err=True)


def _tables_written(wanted: _Wanted, recorded: Mapping[str, Any], turns: Iterator[Told]) -> list[str]:
    from ddpdoctor.report.timeline_export import write_csv, write_parquet

    tables = {name: recorded[name] for name in TABLES}
    said = _named(write_parquet(tables, wanted.parquet, next(turns))) if wanted.parquet is not None else []
    return said + (_named(write_csv(tables, wanted.csv, next(turns))) if wanted.csv is not None else [])


def _timeline_written(
    timeline: Path,
    recorded: dict[str, Any],
    diagnosis: Diagnosis,
    hosts: Any,
    told: Told,
    *,
    cut: bool,
) -> list[str]:
    """Write the steps that a browser can open, unless they were ``cut`` to those that the user chose; sentences on what was written."""
    from ddpdoctor.report import words
    from ddpdoctor.report.timeline_export import cut_steps, steps_that_fit, write_timeline

    fitting = None if cut else steps_that_fit(recorded)
    if fitting is not None:
        recorded = cut_steps(recorded, *fitting)
    everybody = words.all_ranks_label(diagnosis)
    write_timeline(recorded, diagnosis.findings, hosts, timeline, told, everybody=everybody)
    only = "steps {} to {} only, for a browser to open; --steps A:B chooses others."
    return [
        *([only.format(*fitting)] if fitting is not None else []),
        f"written: {timeline}; open it in https://ui.perfetto.dev",
    ]


def _named(files: Sequence[Path]) -> list[str]:
    return [f"written: {file}" for file in files]


def _figures_written(diagnosis: Diagnosis, folder: Path) -> list[str]:
    from ddpdoctor.report import write_figures

    return _named(write_figures(diagnosis, folder)) or [
        "nothing was measured of which a figure could be drawn."
    ]


def _write_flames(prepared: PreparedJob, recorded: Mapping[str, Any], folder: Path, told: Told) -> list[Path]:
    """A file for each rank whose samples are known; the files. ``told`` which part of them is written."""
    from ddpdoctor.measure.export import flame_graphs
    from ddpdoctor.report.json_output import encoded
    from ddpdoctor.written import WrittenFolder

    numbers = set(recorded["steps"]["step"].to_list())

    def drawn() -> Iterator[tuple[str, bytes]]:
        graphs = flame_graphs(prepared.logs, prepared.inputs.telemetry, numbers)
        for done, (rank, document) in enumerate(graphs):
            told(done / len(prepared.logs))
            if document is not None:
                yield _FLAMES.format(rank=rank), encoded(document)

    target = WrittenFolder(folder, "flame graphs")
    target.check(_FLAMES.format(rank=log.rank) for log in prepared.logs)
    return target.write(drawn())


def _check_folders(to: _Wanted) -> None:
    """Raises DdpDoctorError if one of them holds something that is not ddpdoctor's where it would write, or the timeline lies
    where it would write."""
    from ddpdoctor.written import WrittenFolder

    wanted: list[tuple[Path, str, list[str]]] = []
    for suffix, folder in (("parquet", to.parquet), ("csv", to.csv)):
        if folder is not None:
            wanted.append((folder, "exported tables", [f"{name}.{suffix}" for name in TABLES]))
    if to.speedscope is not None:
        wanted.append((to.speedscope, "flame graphs", []))
    if to.figures is not None:
        from ddpdoctor.report.figures_output import PAGE

        wanted.append((to.figures, "figures", [PAGE]))
    for folder, words, names in wanted:
        WrittenFolder(folder, words).check(names)
        places = [os.path.realpath(folder / name) for name in names]
        if to.timeline is not None and os.path.realpath(to.timeline) in places:
            raise DdpDoctorError(
                f"the timeline {to.timeline} would be one of the {words} in {folder}: name two files."
            )


def _range(text: str | None) -> tuple[int, int] | None:
    """First and last step."""
    if text is None:
        return None
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    if numbers is None or int(numbers[1]) >= int(numbers[2]):
        raise click.BadParameter(f"{text!r} is not a range of steps such as 10:15", param_hint="--steps")
    return int(numbers[1]), int(numbers[2]) - 1
