"""``ddpdoctor.toml`` or pyproject's ``[tool.ddpdoctor]``: thresholds, suppressed rules, folders of rules."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.diagnose.load import RuleSet
from ddpdoctor.errors import DdpDoctorError

CONFIG_FILE = "ddpdoctor.toml"
COMMON = "all"
"""Under ``thresholds``, the name that stands for the thresholds common to all rules."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file may hold."""

    thresholds: dict[str, dict[str, float]] = {}
    """By rule id (or ``all``) and threshold name."""
    suppress: list[str] = []
    """Ids of rules that are not run; ``family/*`` for a whole family."""
    rules: list[str] = []
    """Folders of rules, relative to the file that names them; absolute once loaded."""


class Config(Table, frozen=True, kw_only=True):
    """What a project sets for itself."""

    file: str | None = None
    """Where it says so."""


def load_config(start: Path) -> Config:
    """Return the configuration nearest to ``start`` among it and its parents; defaults where there is none.

    Raises:
        DdpDoctorError: the file is not TOML or has an unknown field; the message names file and field.
    """
    for folder in (start.resolve(), *start.resolve().parents):
        own = folder / CONFIG_FILE
        if own.is_file():
            return _decode(own, "", _read_toml(own))
        project = folder / "pyproject.toml"
        # The text first: most projects have no such table, and Python 3.10 has no TOML reader.
        if project.is_file() and "tool.ddpdoctor" in project.read_text(encoding="utf-8", errors="replace"):
            return _decode(
                project, "tool.ddpdoctor.", _read_toml(project).get("tool", {}).get("ddpdoctor", {})
            )
    return Config()


def check_config(config: Config, rules: RuleSet) -> None:
    """Raise DdpDoctorError where the configuration names a rule or threshold that does not exist."""
    families = {rule_id.partition("/")[0] + "/*" for rule_id in rules.rules}
    for rule_id in config.suppress:
        if rule_id not in rules.rules and rule_id not in families:
            raise DdpDoctorError(f"configuration: suppress: no rule {rule_id!r}; see `ddpdoctor rules list`")
    for rule_id, values in config.thresholds.items():
        if rule_id != COMMON and rule_id not in rules.rules:
            raise DdpDoctorError(
                f"configuration: thresholds: no rule {rule_id!r}; see `ddpdoctor rules list`"
            )
        known = set(rules.common.thresholds)
        known |= set(rules.rules[rule_id].thresholds) if rule_id != COMMON else set()
        for name in values:
            if name not in known:
                choice = ", ".join(sorted(known))
                raise DdpDoctorError(f"configuration: thresholds.{rule_id}: no {name!r} among its {choice}")
            _check_threshold(f"thresholds.{rule_id}.{name}", values[name])


def _check_threshold(key: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise DdpDoctorError(f"configuration: {key}: {value} is no threshold: it must be a number from 0 on")
    if key.endswith("share") and value > 1:
        raise DdpDoctorError(f"configuration: {key}: {value} is no share: it must lie between 0 and 1")


def _decode(file: Path, prefix: str, table: Mapping[str, Any]) -> Config:
    _check_numbers(file, prefix, table.get("thresholds"))
    try:
        config = msgspec.convert(table, Table, strict=True)
    except msgspec.ValidationError as error:
        reason, _, field = str(error).partition(" - at ")
        field = prefix + field.strip("`").removeprefix("$").removeprefix(".")
        raise DdpDoctorError(f"{file}: field `{field.rstrip('.') or 'top level'}`: {reason}") from None
    folders = [str((file.parent / folder).resolve()) for folder in config.rules]
    return Config(thresholds=config.thresholds, suppress=config.suppress, rules=folders, file=str(file))


def _check_numbers(file: Path, prefix: str, thresholds: Any) -> None:
    """Thresholds of a wrong type by their names, which msgspec would leave out."""
    for rule_id, values in thresholds.items() if isinstance(thresholds, Mapping) else ():
        field = f"{prefix}thresholds.{rule_id}"
        if not isinstance(values, Mapping):
            raise DdpDoctorError(f"{file}: field `{field}`: expected a table of thresholds, got {values!r}")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DdpDoctorError(f"{file}: field `{field}.{name}`: expected a number, got {value!r}")


def _read_toml(file: Path) -> dict[str, Any]:
    for module in ("tomllib", "tomli"):
        try:
            toml: Any = importlib.import_module(module)
        except ImportError:
            continue
        try:
            table: dict[str, Any] = toml.loads(file.read_text(encoding="utf-8"))
            return table
        except (OSError, ValueError) as error:
            raise DdpDoctorError(f"{file}: not TOML: {error}") from None
    raise DdpDoctorError(
        f"{file}: Python 3.10 cannot read TOML by itself; `pip install tomli`, or use Python 3.11"
    )
