"""``ddpdoctor capture``: a profiler window in a job that is running."""

from __future__ import annotations

from pathlib import Path

import click

MOST_STEPS = 64
"""``rundir.MOST_CAPTURE_STEPS``, to which a test holds it: with that package, help would take half as long again."""


@click.command("capture")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "--steps",
    type=click.IntRange(1, MOST_STEPS),
    default=8,
    show_default=True,
    metavar="N",
    help="How many steps.",
)
@click.option(
    "--first",
    type=click.IntRange(min=1),
    metavar="STEP",
    help="The first step; needed where ranks run on several hosts: give the same on each.",
)
def command(run: Path, steps: int, first: int | None) -> None:
    """Open a profiler window in a job that runs under `ddpdoctor run`, on all ranks in the same steps.

    Catches a slow phase that `ddpdoctor watch` shows while it lasts. The traces are stored beside the first ones in the run
    directory; nothing is overwritten. `ddpdoctor analyze RUN --window N` diagnoses them. Gives up if the job ends, is killed or hangs.

    \b
    Examples:
      ddpdoctor capture ddpdoctor-runs/20260101T120000Z-train
      ddpdoctor capture ddpdoctor-runs/20260101T120000Z-train --steps 20
    """
    from ddpdoctor.cli.capture_request import capture

    capture(run, steps, first)
