"""``ddpdoctor completion``: print the script with which a shell completes ddpdoctor's commands and options."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_DDPDOCTOR_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script for SHELL: bash, zsh or fish.

    \b
    Examples:
      ddpdoctor completion bash >> ~/.bashrc
      ddpdoctor completion zsh >> ~/.zshrc
      ddpdoctor completion fish > ~/.config/fish/completions/ddpdoctor.fish
    """
    from ddpdoctor.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None, "every shell of SHELLS is known to click"
    click.echo(kind(cli, {}, "ddpdoctor", COMPLETE_VARIABLE).source())


RUNS_FOLDER = "ddpdoctor-runs"
"""Default folder of ``run``."""
_MAX_RUNS = 200


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Runs in the typed folder, else ``ddpdoctor-runs``, and in the working directory, newest first. Without a match, files."""
    from ddpdoctor.rundir import is_run_directory

    typed = Path(incomplete).parent if "/" in incomplete else Path(RUNS_FOLDER)
    try:
        folders = [folder for place in dict.fromkeys((typed, Path())) for folder in _folders(place)]
        fitting = [name for name in map(str, folders) if name.startswith(incomplete)]
        found = [name for name in fitting[:_MAX_RUNS] if is_run_directory(name)]
    except OSError:
        found = []
    return [CompletionItem(name) for name in found] or [CompletionItem(incomplete, type="file")]


def _folders(place: Path) -> list[Path]:
    """Folders in ``place``, newest first, because the names of runs begin with their time."""
    if not place.is_dir():
        return []
    return sorted((each for each in place.iterdir() if each.is_dir()), reverse=True)


def rule_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of the built-in rules, from file names."""
    from ddpdoctor.diagnose.load import packaged_folder

    files = sorted(packaged_folder().glob("*/*.yaml"))
    names = (f"{file.parent.name}/{file.stem}" for file in files)
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def setting_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the settings of ``try``, followed by "="."""
    from ddpdoctor.experiment.settings import SETTINGS

    return [CompletionItem(f"{name}=") for name in SETTINGS if name.startswith(incomplete)]
