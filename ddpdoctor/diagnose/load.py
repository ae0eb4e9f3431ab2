"""Where rules come from: the pack, a team's folders, and packages' entry points ``ddpdoctor.rules``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.diagnose.rule import Common, Rule, read_common, read_rule
from ddpdoctor.errors import RuleError

COMMON_FILE = "common.yaml"
ENTRY_POINTS = "ddpdoctor.rules"
"""Entry point group: each value is a path, or a function that returns one, of a folder of rules."""


@dataclass(frozen=True)
class RuleSet:
    """Rules by id, and what holds for all of them."""

    common: Common
    rules: dict[str, Rule]


def packaged_folder() -> Path:
    """Return the pack's folder: inside the installed package or, in a checkout, above it."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "rules", package.parent / "rules"):
        if (folder / COMMON_FILE).is_file():
            return folder
    raise RuleError(
        f"no rule pack at {package / 'rules'}: the installation is incomplete; install ddpdoctor again"
    )


def load_rules(folders: Iterable[Path | str] = (), *, entry_points: bool = True) -> RuleSet:
    """Read the pack, then installed packages' rules, then ``folders``; of two with one id the later counts.

    Raises:
        RuleError: a folder is missing or a file is wrong; the message names file, field and reason.
    """
    packaged = packaged_folder()
    rules = read_folder(packaged)
    if entry_points:
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
            rules.update(read_folder(_entry_folder(entry)))
    for folder in folders:
        rules.update(read_folder(Path(folder)))
    return RuleSet(read_common(packaged / COMMON_FILE), rules)


def read_folder(folder: Path) -> dict[str, Rule]:
    """Read ``<family>/<name>.yaml`` under ``folder``, sorted by id; :class:`RuleError` if one is wrong."""
    if not folder.is_dir():
        raise RuleError(f"{folder}: no such folder of rules")
    files = sorted(file for pattern in ("*/*.yaml", "*/*.yml") for file in folder.glob(pattern))
    if not files:
        raise RuleError(f"{folder}: holds no rule; a rule is a file <family>/<name>.yaml")
    ids = (file.relative_to(folder).with_suffix("").as_posix() for file in files)
    return {rule_id: read_rule(file, rule_id) for file, rule_id in zip(files, ids, strict=True)}


def _entry_folder(entry: Any) -> Path:
    try:
        value = entry.load()
        return Path(value() if callable(value) else value)
    except Exception as error:  # foreign code: whatever it raises, the user needs the package's name
        raise RuleError(
            f"entry point {entry.name!r} of group {ENTRY_POINTS}: cannot be loaded: {error}"
        ) from error
