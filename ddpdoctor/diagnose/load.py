"""Loads rules from ddpdoctor's rule pack, from folders, and from packages' entry points ``ddpdoctor.rules``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ddpdoctor.diagnose.rule import Common, Rule, checked_common, checked_frameworks, checked_rule, read_file
from ddpdoctor.diagnose.rule_cache import CachedResult
from ddpdoctor.errors import RuleError

GROUP = "ddpdoctor.rules"
"""Entry point group; each value is the path of a folder of rules, or a function that returns it."""
_EGG = ".egg"
_METADATA = (".dist-info", ".egg-info", _EGG)


def rule_packages() -> list[Any]:
    """The entry points of the group.

    Few environments have one, and importing :mod:`importlib.metadata` takes longer than reading all rules. So it is imported
    only if a package's ``entry_points.txt`` contains the group's name, or if packages may be installed outside of folders.
    """
    if not _may_have_entry_points():
        return []
    import importlib.metadata

    return list(importlib.metadata.entry_points(group=GROUP))


def _may_have_entry_points() -> bool:
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    if finders != [PathFinder]:
        return True
    try:
        return any(
            GROUP.encode() in text for folder in set(sys.path) for text in _declarations(folder or ".")
        )
    except OSError:
        return True


def _declarations(folder: str) -> Iterator[bytes]:
    """Yields the content of each ``entry_points.txt`` of the packages in ``folder``. Raises OSError if it is not a folder."""
    if not os.path.lexists(folder):
        return
    with os.scandir(folder) as entries:
        places = [entry.path for entry in entries if entry.name.lower().endswith(_METADATA)]
    if folder.lower().endswith(_EGG):
        places.append(folder)
    for place in places:
        inside = "EGG-INFO" if place.lower().endswith(_EGG) else ""
        try:
            with open(os.path.join(place, inside, "entry_points.txt"), "rb") as file:  # noqa: PTH118, PTH123
                yield file.read()
        except (FileNotFoundError, NotADirectoryError):
            continue


COMMON_FILE, FRAMEWORKS_FILE = "common.yaml", "frameworks.yaml"


class RuleSet(msgspec.Struct, frozen=True):
    """Rules by id, and the settings common to all of them."""

    common: Common
    rules: dict[str, Rule]
    replaced: tuple[str, ...] = ()
    """Ids of the pack's rules that another folder overrides."""


def packaged_folder() -> Path:
    """Return the rule pack's folder: inside the installed package or, in a checkout, next to it."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "rules", package.parent / "rules"):
        if (folder / COMMON_FILE).is_file():
            return folder
    raise RuleError(
        f"no rule pack at {package / 'rules'}: the installation is incomplete; reinstall ddpdoctor"
    )


def load_rules(folders: Iterable[Path | str] = (), *, entry_points: bool = True) -> RuleSet:
    """Read the pack, then installed packages' rules, then ``folders``. A later rule overrides an earlier one with the same id.

    Raises:
        RuleError: a folder is missing or a file is invalid; the message names file, field and reason.
    """
    packaged = packaged_folder()
    pack = read_folder(packaged)
    others = [_entry_folder(entry) for entry in rule_packages()] if entry_points else []
    own: dict[str, Rule] = {}
    for folder in (*others, *map(Path, folders)):
        own.update(read_folder(folder))
    replaced = tuple(name for name, rule in own.items() if name in pack and rule != pack[name])
    return RuleSet(_read_common(packaged), {**pack, **own}, replaced)


def read_folder(folder: Path) -> dict[str, Rule]:
    """Read ``<family>/<name>.yaml`` under ``folder``, sorted by id. Raises :class:`RuleError` if one is invalid."""
    if not folder.is_dir():
        raise RuleError(f"{folder}: no such folder of rules")
    files = sorted(file for pattern in ("*/*.yaml", "*/*.yml") for file in folder.glob(pattern))
    if not files:
        raise RuleError(f"{folder}: contains no rules; a rule is a file <family>/<name>.yaml")
    contents = {file.relative_to(folder).as_posix(): read_file(file) for file in files}
    cached = CachedResult(dict[str, Rule], contents)
    rules = cached.read()
    if rules is None:
        checked = (checked_rule(contents[name], folder / name, _id(name)) for name in contents)
        rules = {rule.id: rule for rule in checked}
        cached.write(rules)
    return rules


def _id(name: str) -> str:
    return PurePosixPath(name).with_suffix("").as_posix()


def _read_common(folder: Path) -> Common:
    path, table = folder / COMMON_FILE, folder / FRAMEWORKS_FILE
    contents = {file.name: read_file(file) for file in (path, table)}
    cached = CachedResult(Common, contents)
    common = cached.read()
    if common is None:
        common = msgspec.structs.replace(
            checked_common(contents[path.name], path),
            frameworks=checked_frameworks(contents[table.name], table),
        )
        cached.write(common)
    return common


def _entry_folder(entry: Any) -> Path:
    try:
        value = entry.load()
        return Path(value() if callable(value) else value)
    except Exception as error:  # another package's code may raise anything
        raise RuleError(f"entry point {entry.name!r} of group {GROUP}: cannot be loaded: {error}") from error
