"""``ddpdoctor doctor``: check what this machine and the job's Python support."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ddpdoctor.cli.options import check_outputs, output_file
from ddpdoctor.cli.session import say

SCHEMA = "ddpdoctor.doctor/1"
_EXIT_NOT_READY = 1


@click.command("doctor", context_settings={"allow_interspersed_args": False})
@output_file("--json", "json_file", help_text="Write the result as JSON; - is stdout.")
@click.argument("job", nargs=-1, type=click.UNPROCESSED, metavar="[[--] COMMAND [ARGS]...]")
def command(json_file: Path | None, job: tuple[str, ...]) -> None:
    """Check what this machine and the job's Python support, and what a recording here would lack.

    COMMAND is the job's command. It is not run; only the Python that it starts is checked. Without COMMAND, the Python of
    the torchrun on the path is checked. Exit code 0: a job can be recorded here; 1: it cannot; 2: COMMAND does not exist.

    \b
    Examples:
      ddpdoctor doctor
      ddpdoctor doctor -- torchrun --nproc-per-node 8 train.py
      ddpdoctor doctor --json - -- /opt/conda/bin/python
    """
    import msgspec

    from ddpdoctor.launch.checkup import CheckState, checks_for
    from ddpdoctor.written import DOCTOR, is_stdout, write_file

    read = [word for word in job if os.path.isfile(word)]  # noqa: PTH113
    check_outputs(read, {"--json": (json_file, DOCTOR)})
    checks = checks_for(job)
    ready = all(check.state != CheckState.NO for check in checks)
    if json_file is not None:
        document = msgspec.json.encode({"schema": SCHEMA, "ready": ready, "checks": checks})
        write_file(json_file, msgspec.json.format(document, indent=1), DOCTOR)
    if json_file is None or not is_stdout(json_file):
        width = max(len(check.name) for check in checks)
        for check in checks:
            say(f"{check.state:4}  {check.name:{width}}  {check.words}")
        missing = [check.name for check in checks if check.state == CheckState.NO]
        say(
            f"A job cannot be recorded here: see {' and '.join(missing)}."
            if missing
            else "A job can be recorded here: ddpdoctor run -- COMMAND"
        )
    if not ready:
        raise click.exceptions.Exit(_EXIT_NOT_READY)
