"""``ddpdoctor run``: record a job and diagnose it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ddpdoctor.cli.options import FiniteRange
from ddpdoctor.launch.alone import run_alone
from ddpdoctor.launch.options import RunOptions, asked_options


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    *("--out", "out"),
    type=Path,  # click.Path would access the path, whose storage may not respond
    metavar="RUN",
    help="Run directory to write; it must not contain a finished run. Launchers on several hosts can share it. "
    "[default: ddpdoctor-runs/<UTC time>-<script>]",
)
@click.option(
    "--profile-steps",
    metavar="A:B",
    help="Steps A to B-1 for the profiler window. [default: 5 steps after warm-up]",
)
@click.option("--no-profile", is_flag=True, help="No profiler window; record only step times.")
@click.option(
    *("--max-trace-mb",),
    type=click.IntRange(min=1),
    default=RunOptions.max_trace_mb,
    show_default=True,
    metavar="N",
    help="Most MB on disk per rank's trace; the window is shortened to fit.",
)
@click.option(
    *("--telemetry-interval",),
    type=FiniteRange(min=0.05),
    default=RunOptions.telemetry_interval_s,
    show_default=True,
    metavar="S",
    help="Mean interval between samples of GPUs and host, in seconds.",
)
@click.option("--no-telemetry", is_flag=True, help="Do not sample GPUs and host.")
@click.option(
    "--prometheus",
    metavar="[HOST:]PORT",
    help="Serve metrics of the running job at http://HOST:PORT/metrics. [default HOST: 127.0.0.1]",
)
@click.option(
    *("--hang-after",),
    type=FiniteRange(min=0),
    metavar="S",
    help="Report a hang, and where, if no rank finishes a step for S seconds (before the first step: three times as long and at "
    "least 60, unless ranks wait for an inactive one). 0: never. [default: 300, or ten times the job's longest pause if that is longer]",
)
@click.option(
    *("--on-hang",),
    type=click.Choice(["report", "kill"]),
    default=RunOptions.on_hang,
    show_default=True,
    help="What to do about a hang: report it, or report it and end the job.",
)
@click.option("--no-analysis", is_flag=True, help="Only record; `ddpdoctor analyze RUN` diagnoses later.")
@click.option("--no-source-text", is_flag=True, help="Show only file and line, not the text of source lines.")
@click.option("--static", is_flag=True, help="Omit interactive charts from the report (0.6 MB smaller).")
@click.option("-q", "--quiet", is_flag=True, help="Print only the report's path.")
@click.argument("job", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGS]...")
def command(
    no_analysis: bool,
    no_source_text: bool,
    static: bool,
    quiet: bool,
    job: tuple[str, ...],
    **recording: Any,
) -> None:
    """Run COMMAND unchanged, record its ranks, and diagnose them when it ends.

    The job's output, exit code and signals do not change. ddpdoctor prints its verdict to stderr after the job.

    \b
    Examples:
      ddpdoctor run -- torchrun --nproc-per-node 8 train.py --epochs 3
      ddpdoctor run --out runs/big --profile-steps 200:210 -- accelerate launch train.py
      srun --ntasks-per-node 8 ddpdoctor run -- python train.py
    """
    options = asked_options(recording)
    try:
        from ddpdoctor.cli.run_and_present import ReportOptions, run_and_present
    except Exception as error:  # a package of ddpdoctor is missing or broken
        run_alone(job, error)
    run_and_present(
        job,
        options,
        ReportOptions(analysis=not no_analysis, quiet=quiet, source_text=not no_source_text, static=static),
    )
