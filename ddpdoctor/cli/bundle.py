"""``ddpdoctor bundle``: write one file that records jobs where ddpdoctor is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ddpdoctor.cli.session import say


@click.command("bundle")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("ddpdoctor.pyz"),
    show_default=True,
    metavar="F",
    help="File to write if the name ends in .pyz, else a folder.",
)
def command(out: Path) -> None:
    """Write one file that records a job with only the job's own Python (3.9 or newer), for container images that cannot be changed.

    The file needs no other packages and installs none. It records the same as `ddpdoctor run`; the diagnosis needs an
    installed ddpdoctor. The same version of ddpdoctor always writes the same bytes.

    \b
    Examples:
      ddpdoctor bundle --out dd.pyz
      python dd.pyz run --out runs/big -- torchrun --nproc-per-node 8 train.py    # in the image
      ddpdoctor analyze runs/big                                                  # here
    """
    from ddpdoctor.bundle.build import write_bundle
    from ddpdoctor.cli.run import command as run

    help_text = run.get_help(click.Context(run, info_name="ddpdoctor run", terminal_width=80))
    bundle = write_bundle(
        out, [_row(each) for each in run.params if isinstance(each, click.Option)], help_text
    )
    versions = ", ".join(f"{name} {version}" for name, version in bundle.versions.items())
    say(
        f"written: {bundle.path} ({bundle.bytes / 1e3:.0f} kB; {versions}; sha256 of its contents {bundle.sha256})"
    )
    say(f"Where the job runs: python {out} run -- torchrun ... ; then, here: ddpdoctor analyze RUN")


def _row(option: click.Option) -> dict[str, Any]:
    """An option in the format of :mod:`ddpdoctor.bundle.recording`."""
    # Without a default, click stores a sentinel there, which depends on click's version.
    default = option.default if isinstance(option.default, str | int | float) else None
    row: dict[str, Any] = {"field": option.name, "names": option.opts, "kind": "text", "default": default}
    if option.is_flag:
        row |= {"kind": "flag", "default": bool(default)}
    elif isinstance(option.type, click.IntRange | click.FloatRange):
        kind = "integer" if isinstance(option.type, click.IntRange) else "number"
        row |= {"kind": kind, "least": option.type.min}
    elif isinstance(option.type, click.Choice):
        row |= {"kind": "choice", "choices": list(option.type.choices)}
    elif option.name == "out":
        row["kind"] = "path"
    return row
