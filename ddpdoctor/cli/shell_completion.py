"""What a shell offers for our arguments: run directories, rules, settings. Asked at each press of a key, so it reads next to nothing."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

RUNS_FOLDER = "ddpdoctor-runs"
"""Where ``run`` writes by default."""
_MOST_RUNS = 200


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Recorded runs here, in ``ddpdoctor-runs`` and in the folder that is typed, the newest first; where none fits, files."""
    from ddpdoctor.rundir import is_run_directory

    typed = Path(incomplete).parent if "/" in incomplete else Path(RUNS_FOLDER)
    try:
        folders = [folder for place in dict.fromkeys((typed, Path())) for folder in _folders(place)]
        fitting = [name for name in map(str, folders) if name.startswith(incomplete)]
        found = [name for name in fitting[:_MOST_RUNS] if is_run_directory(name)]
    except OSError:
        found = []
    return [CompletionItem(name) for name in found] or [CompletionItem(incomplete, type="file")]


def _folders(place: Path) -> list[Path]:
    """Folders in ``place``, whose names begin with the time of the run: the newest first."""
    if not place.is_dir():
        return []
    return sorted((each for each in place.iterdir() if each.is_dir()), reverse=True)


def rule_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The rules of the pack, by the names of their files: none is read."""
    from ddpdoctor.diagnose.load import packaged_folder

    files = sorted(packaged_folder().glob("*/*.yaml"))
    names = (f"{file.parent.name}/{file.stem}" for file in files)
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def setting_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of what ``try`` can set, up to where the value begins."""
    from ddpdoctor.experiment.settings import SETTINGS

    return [CompletionItem(f"{name}=") for name in SETTINGS if name.startswith(incomplete)]
