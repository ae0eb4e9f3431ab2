"""How the project at hand wants its recordings analysed."""

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
    """The configuration here or above; a note on stderr for each file that was passed over as somebody else's."""
    from ddpdoctor.diagnose.config import load_config

    config = load_config(Path.cwd())
    for sentence in config.ignored_files:
        say(f"Note: {sentence}", err=True)
    return config


def configured(progress: Progress = no_progress, rules: Sequence[Path] = (), **reading: Any) -> Options:
    """The options that ``ddpdoctor.toml`` or ``pyproject.toml``, here or above, asks for.

    ``rules``: further folders of rules. ``reading``: other fields of :class:`Options`, as a command line gives them.
    Raises DdpDoctorError where a file cannot be read, or names a rule or threshold that does not exist.
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
        **reading,
    )


chosen_job = click.option(
    "--job",
    type=click.IntRange(min=1),
    metavar="N",
    help="Which job to diagnose, if the traces are from several.",
)
