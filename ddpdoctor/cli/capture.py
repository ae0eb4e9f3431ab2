"""``ddpdoctor capture``: open a profiler window in a running job."""

from __future__ import annotations

from pathlib import Path

import click

MAX_STEPS = 64
"""Equal to ``rundir.MOST_CAPTURE_STEPS``, as a test checks. Importing that package would make --help 50 % slower."""


@click.command("capture")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "--steps",
    type=click.IntRange(1, MAX_STEPS),
    default=8,
    show_default=True,
    metavar="N",
    help="Number of steps.",
)
@click.option(
    "--first",
    type=click.IntRange(min=1),
    metavar="STEP",
    help="First step. Required if the ranks run on several hosts; give the same value on each.",
)
def command(run: Path, steps: int, first: int | None) -> None:
    """Open a profiler window on all ranks, in the same steps, of a job that runs under `ddpdoctor run`.

    Use it to profile a slow phase that `ddpdoctor watch` shows. The traces are added to the run directory; nothing is
    overwritten. `ddpdoctor analyze RUN --window N` diagnoses them. The command fails if the job ends, is killed or hangs.

    \b
    Examples:
      ddpdoctor capture ddpdoctor-runs/20260101T120000Z-train
      ddpdoctor capture ddpdoctor-runs/20260101T120000Z-train --steps 20
    """
    from ddpdoctor.cli.rank_requests import capture

    capture(run, steps, first)
