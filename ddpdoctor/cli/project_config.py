"""The project's configuration of the analysis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpdoctor.cli.say import say
from ddpdoctor.stages import Progress, no_progress

if TYPE_CHECKING:
    from ddpdoctor.analysis import Options
    from ddpdoctor.diagnose.config import Config


def own_config() -> Config:
    """The configuration from the working directory or a folder above. Prints a note for each file that is ignored because another
    user owns it."""
    from ddpdoctor.diagnose.config import load_config

    config = load_config(Path.cwd())
    for sentence in config.ignored_files:
        say(f"Note: {sentence}", err=True)
    return config


def configured(progress: Progress = no_progress, rules: Sequence[Path] = (), **fields: Any) -> Options:
    """Options of the analysis from ``ddpdoctor.toml`` or ``pyproject.toml`` in the working directory or above.

    ``rules``: additional folders of rules. ``fields``: further fields of :class:`Options`. Raises DdpDoctorError if a file cannot
    be read or names a rule or threshold that does not exist.
    """
    from ddpdoctor.analysis import Options
    from ddpdoctor.diagnose.config import check_config
    from ddpdoctor.diagnose.load import load_rules

    config = own_config()
    loaded = load_rules([*config.rules, *rules])
    check_config(config, loaded)
    return Options(
        loaded_rules=loaded,
        thresholds=config.thresholds,
        suppressed=config.suppress,
        suppressed_by=config.file or "",
        progress=progress,
        **fields,
    )


chosen_job = click.option(
    "--job",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of the job to diagnose, if the traces are from several jobs.",
)
