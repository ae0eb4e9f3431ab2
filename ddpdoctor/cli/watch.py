"""``ddpdoctor watch``: a live view of a run on the terminal."""

from __future__ import annotations

from pathlib import Path

import click

from ddpdoctor.cli.completion import runs
from ddpdoctor.cli.options import FiniteRange
from ddpdoctor.errors import UnusableInput


@click.command("watch")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN", shell_complete=runs)
@click.option(
    "--interval",
    type=FiniteRange(min=0.2),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between updates.",
)
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option(
    "--prometheus",
    metavar="[HOST:]PORT",
    help="Serve the verdict so far and its findings at http://HOST:PORT/metrics. [default HOST: 127.0.0.1]",
)
def command(run: Path, interval: float, once: bool, prometheus: str | None) -> None:
    """Show a run directory while its job runs: step times, phases, late ranks, GPUs, and the verdict so far.

    Keys: q quits, s changes the order of the ranks, r reverses it, p shows each rank's phases. The view ends with the job
    and does not disturb it. A finished run is shown once.

    \b
    Examples:
      ddpdoctor watch ddpdoctor-runs/20260101T120000Z-train
      ddpdoctor watch ddpdoctor-runs/20260101T120000Z-train --once
      ddpdoctor watch ddpdoctor-runs/20260101T120000Z-train --prometheus 9401 > /dev/null
    """
    from ddpdoctor.cli.watch_loop import watch
    from ddpdoctor.launch.options import parse_address
    from ddpdoctor.rundir import is_run_directory

    if not is_run_directory(str(run)):
        raise UnusableInput(
            f"{run} is not a ddpdoctor run directory. To record one: `ddpdoctor run --out {run} -- COMMAND`."
        )
    if once and prometheus is not None:
        raise UnusableInput(
            "--once prints one frame and ends, so it cannot serve metrics: leave out one of the two."
        )
    watch(run, interval, once=once, address=None if prometheus is None else parse_address(prometheus))
