"""``ddpdoctor export``: all ranks on one clock, as a timeline for Perfetto, or as tables in Parquet or CSV."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpdoctor.cli.completing import runs
from ddpdoctor.cli.configured import chosen_job, configured
from ddpdoctor.cli.outputs import check_outputs, to_stdout
from ddpdoctor.cli.progress import shown_progress
from ddpdoctor.cli.say import say
from ddpdoctor.errors import UnusableInput

if TYPE_CHECKING:
    from ddpdoctor.measure.steplog import RankLog

TABLES = ("steps", "collectives", "events")
BY_NAME = ("details", "counters")
"""On the timeline alone."""


@click.command("export")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=runs)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    metavar="F",
    help="Write a Chrome trace; compressed where F ends in .gz.",
)
@click.option(
    "--parquet",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write steps.parquet, collectives.parquet and events.parquet.",
)
@click.option(
    "--speedscope",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the stack samples of each rank as a flame graph.",
)
@click.option(
    "--csv",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the same tables as CSV.",
)
@click.option("--steps", metavar="A:B", help="Only steps A to B-1.")
@chosen_job
def command(
    paths: tuple[str, ...],
    timeline: Path | None,
    parquet: Path | None,
    speedscope: Path | None,
    csv: Path | None,
    steps: str | None,
    job: int | None,
) -> None:
    """Export all ranks of a run directory, or of profiler traces, on one clock.

    The timeline opens in https://ui.perfetto.dev: one process for each rank, with waiting for other ranks and
    transferring as separate slices, annotations, operators, kernels and sampled lines below them.

    \b
    Examples:
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --timeline all-ranks.json.gz
      ddpdoctor export traces/ --timeline all-ranks.json.gz --steps 10:15 --parquet tables
      ddpdoctor export traces/ --csv tables
      ddpdoctor export ddpdoctor-runs/20260101T120000Z-train --speedscope flames
    """
    if timeline is None and parquet is None and csv is None and speedscope is None:
        raise click.UsageError(
            "nothing to write: give --timeline F, --parquet DIR, --csv DIR or --speedscope DIR."
        )
    chosen = _range(steps)
    named = {"--timeline": timeline}
    for option, folder in (("parquet", parquet), ("csv", csv)):
        if folder is not None:
            named |= {f"--{option} {name}": folder / f"{name}.{option}" for name in TABLES}
    from ddpdoctor.analysis import conclude, prepare
    from ddpdoctor.measure.export import late_steps, recorded_tables
    from ddpdoctor.report.timeline_export import (
        cut_steps,
        steps_that_fit,
        write_csv,
        write_parquet,
        write_timeline,
    )

    check_outputs(paths, named)
    aside = to_stdout([timeline])
    with shown_progress() as progress:
        options = configured(progress, job=job)
        prepared = prepare(list(paths), options)
        diagnosis = conclude(prepared, options)
        found = recorded_tables(prepared.logs, prepared.windows, prepared.inputs.telemetry)
    recorded = {name: getattr(found, name) for name in (*TABLES, *BY_NAME)}
    if chosen is not None:
        recorded = cut_steps(recorded, *chosen)
        if recorded["steps"].is_empty():
            raise UnusableInput(f"{', '.join(paths)}: no step from {chosen[0]} to {chosen[1]} was recorded.")
    tables = {name: recorded[name] for name in TABLES}
    files = write_parquet(tables, parquet) if parquet is not None else []
    files += write_csv(tables, csv) if csv is not None else []
    for file in files:
        say(f"written: {file}", err=aside)
    if speedscope is not None:
        late = late_steps(recorded["collectives"], recorded["steps"])
        wanted = set(recorded["steps"]["step"].to_list())
        files = _write_flames(prepared.logs, late, wanted, speedscope)
        if not files:
            say("Note: no stack samples were recorded, so there is no flame graph.", err=True)
        for file in files:
            say(f"written: {file}", err=aside)
    if timeline is not None:
        fitting = steps_that_fit(recorded) if chosen is None else None
        if fitting is not None:
            recorded = cut_steps(recorded, *fitting)
            say(
                f"steps {fitting[0]} to {fitting[1]} only, for a browser to open; --steps A:B chooses others.",
                err=aside,
            )
        write_timeline(recorded, diagnosis.findings, found.hosts, timeline)
        say(f"written: {timeline}; open it in https://ui.perfetto.dev", err=aside)
    for note in found.notes:
        say(f"Note: {note}", err=True)


def _write_flames(
    logs: Sequence[RankLog], late: Mapping[int, set[int]], wanted: set[int], folder: Path
) -> list[Path]:
    """A file for each rank whose samples are known; the files."""
    import msgspec

    from ddpdoctor.measure.export import flame_graph
    from ddpdoctor.report.replace import write_whole

    written = []
    for log in logs:
        chosen = replace(log, steps=[step for step in log.steps if step.number in wanted])
        document = flame_graph(chosen, late.get(log.rank, ()))
        if document is not None:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"rank-{log.rank:05d}.speedscope.json"
            write_whole(file, msgspec.json.encode(document))
            written.append(file)
    return written


def _range(text: str | None) -> tuple[int, int] | None:
    """First and last step."""
    if text is None:
        return None
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    if numbers is None or int(numbers[1]) >= int(numbers[2]):
        raise click.BadParameter(f"{text!r} is not a range of steps such as 10:15", param_hint="--steps")
    return int(numbers[1]), int(numbers[2]) - 1
