"""``ddpdoctor export``: all ranks on one clock, as a timeline for Perfetto, or as tables in Parquet or CSV; the diagnosis as figures
and in trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpdoctor.cli.completing import runs
from ddpdoctor.cli.configured import chosen_job, configured
from ddpdoctor.cli.diagnosed import diagnosis_at
from ddpdoctor.cli.onethread import import_numpy
from ddpdoctor.cli.outputs import check_outputs, output_file, output_folder, to_stdout
from ddpdoctor.cli.progress import in_turn, shown_progress
from ddpdoctor.cli.say import say
from ddpdoctor.cli.tracking import Trackers, tracker_options
from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.stages import Stage, untold

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.measure.steplog import RankLog

TABLES = ("steps", "collectives", "events")
_FLAMES = "rank-{rank:05d}.speedscope.json"
BY_NAME = ("details", "counters")
"""On the timeline alone."""


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
    trackers = Trackers(**tracking)
    trackers.check()
    recordings = any(given is not None for given in (timeline, parquet, csv, speedscope))
    if not (recordings or trackers.any) and figures is None:
        raise click.UsageError(
            "nothing to write: give --timeline F, --parquet DIR, --csv DIR, --speedscope DIR, --figures DIR, --tensorboard DIR, "
            "--mlflow DIR or --wandb DIR."
        )
    if trackers.redacted and recordings:
        raise click.UsageError(
            "--redact is for figures and trackers: timelines, tables and flame graphs keep their names."
        )
    chosen = _range(steps)
    from ddpdoctor.written import TIMELINE

    import_numpy()
    check_outputs(paths, {"--timeline": (timeline, TIMELINE)})
    _check_folders(timeline, parquet, csv, speedscope, figures)
    if not recordings:
        if chosen is not None:
            raise click.UsageError("--steps does not choose what figures and trackers show: the whole run.")
        made = diagnosis_at(*paths, job=job)
        if figures is not None:
            from ddpdoctor.report import redact

            for sentence in _figures_written(redact(made) if trackers.redacted else made, figures):
                say(sentence)
        trackers.write(made)
        return
    from ddpdoctor.analysis import conclude, prepare
    from ddpdoctor.measure.export import late_steps, recorded_tables
    from ddpdoctor.report import words
    from ddpdoctor.report.timeline_export import (
        cut_steps,
        steps_that_fit,
        write_csv,
        write_parquet,
        write_timeline,
    )

    aside = to_stdout([timeline])
    with shown_progress() as progress:
        options = configured(progress, job=job)
        prepared = prepare(list(paths), options)
        # Tables and flame graphs show what was recorded, and nothing of a diagnosis.
        diagnosed = timeline is not None or figures is not None or trackers.any
        diagnosis = conclude(prepared, options) if diagnosed else None
        found = recorded_tables(prepared.logs, prepared.windows, prepared.inputs.telemetry)
    recorded = {name: getattr(found, name) for name in (*TABLES, *BY_NAME)}
    if chosen is not None:
        recorded = cut_steps(recorded, *chosen)
        if recorded["steps"].is_empty():
            raise UnusableInput(f"{', '.join(paths)}: no step from {chosen[0]} to {chosen[1]} was recorded.")
    tables = {name: recorded[name] for name in TABLES}
    said, noted = [], [*map(str, prepared.inputs.notes), *found.notes]
    wanted = [output for output in (parquet, csv, speedscope, timeline) if output is not None]
    try:
        # Nothing else may stand in a timeline on standard output, which may be the same terminal.
        with nullcontext(untold) if aside else shown_progress() as progress:
            turns = in_turn(progress, Stage.REPORT, len(wanted))
            if parquet is not None:
                said += _named(write_parquet(tables, parquet, next(turns)))
            if csv is not None:
                said += _named(write_csv(tables, csv, next(turns)))
            if speedscope is not None:
                late = late_steps(recorded["collectives"], recorded["steps"])
                numbers = set(recorded["steps"]["step"].to_list())
                flames = _write_flames(prepared.logs, late, numbers, speedscope, next(turns))
                if not flames:
                    noted.insert(0, "no stack samples were recorded, so there is no flame graph.")
                said += _named(flames)
            if timeline is not None and diagnosis is not None:
                fitting = steps_that_fit(recorded) if chosen is None else None
                if fitting is not None:
                    recorded = cut_steps(recorded, *fitting)
                    said.append(
                        f"steps {fitting[0]} to {fitting[1]} only, for a browser to open; --steps A:B chooses others."
                    )
                everybody = words.everybody(diagnosis.job)
                write_timeline(
                    recorded, diagnosis.findings, found.hosts, timeline, next(turns), everybody=everybody
                )
                said.append(f"written: {timeline}; open it in https://ui.perfetto.dev")
            if figures is not None and diagnosis is not None:
                said += _figures_written(diagnosis, figures)
    finally:
        for sentence in said:
            say(sentence, err=aside)
    if diagnosis is not None:
        trackers.write(diagnosis, err=aside)
    for note in noted:
        say(f"Note: {note}", err=True)


def _named(files: Sequence[Path]) -> list[str]:
    return [f"written: {file}" for file in files]


def _figures_written(diagnosis: Diagnosis, folder: Path) -> list[str]:
    from ddpdoctor.report import write_figures

    return _named(write_figures(diagnosis, folder)) or [
        "nothing was measured of which a figure could be drawn."
    ]


def _write_flames(
    logs: Sequence[RankLog],
    late: Mapping[int, set[int]],
    wanted: set[int],
    folder: Path,
    told: Callable[[float], None],
) -> list[Path]:
    """A file for each rank whose samples are known; the files. ``told`` which part of them is written."""
    from ddpdoctor.measure.export import flame_graphs
    from ddpdoctor.report.json_output import encoded
    from ddpdoctor.written import WrittenFolder

    def drawn() -> Iterator[tuple[str, bytes]]:
        for done, (rank, document) in enumerate(flame_graphs(logs, late, wanted)):
            told(done / len(logs))
            if document is not None:
                yield _FLAMES.format(rank=rank), encoded(document)

    target = WrittenFolder(folder, "flame graphs")
    target.check(_FLAMES.format(rank=log.rank) for log in logs)
    return target.write(drawn())


def _check_folders(
    timeline: Path | None,
    parquet: Path | None,
    csv: Path | None,
    speedscope: Path | None,
    figures: Path | None,
) -> None:
    """Raises DdpDoctorError if one of them holds something that is not ddpdoctor's where it would write, or the timeline lies
    where it would write."""
    from ddpdoctor.written import WrittenFolder

    wanted: list[tuple[Path, str, list[str]]] = []
    for suffix, folder in (("parquet", parquet), ("csv", csv)):
        if folder is not None:
            wanted.append((folder, "exported tables", [f"{name}.{suffix}" for name in TABLES]))
    if speedscope is not None:
        wanted.append((speedscope, "flame graphs", []))
    if figures is not None:
        from ddpdoctor.report.figures_output import PAGE

        wanted.append((figures, "figures", [PAGE]))
    for folder, words, names in wanted:
        WrittenFolder(folder, words).check(names)
        if timeline is not None and os.path.realpath(timeline) in [
            os.path.realpath(folder / name) for name in names
        ]:
            raise DdpDoctorError(
                f"the timeline {timeline} would be one of the {words} in {folder}: name two files."
            )


def _range(text: str | None) -> tuple[int, int] | None:
    """First and last step."""
    if text is None:
        return None
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    if numbers is None or int(numbers[1]) >= int(numbers[2]):
        raise click.BadParameter(f"{text!r} is not a range of steps such as 10:15", param_hint="--steps")
    return int(numbers[1]), int(numbers[2]) - 1
