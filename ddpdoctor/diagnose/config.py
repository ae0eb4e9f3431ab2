"""``ddpdoctor.toml`` or pyproject's ``[tool.ddpdoctor]``: thresholds, suppressed rules, folders of rules."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.diagnose.load import RuleSet
from ddpdoctor.errors import DdpDoctorError, did_you_mean
from ddpdoctor.rundir import open_regular

CONFIG_FILE = "ddpdoctor.toml"
_MAX_BYTES = 1 << 20
"""Larger files are not read."""
COMMON = "all"
"""Name under ``thresholds`` of the thresholds common to all rules."""


class ConfigTable(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a configuration file."""

    thresholds: dict[str, dict[str, float]] = {}
    """By rule id (or ``all``) and threshold name."""
    suppress: list[str] = []
    """Ids of rules that are not run; ``family/*`` for a whole family."""
    rules: list[str] = []
    """Folders of rules, relative to the file that names them; absolute once loaded."""


class Config(ConfigTable, frozen=True, kw_only=True):
    """A project's configuration."""

    file: str | None = None
    """Path of the configuration file."""
    ignored_files: tuple[str, ...] = ()
    """A sentence on each file that was ignored because another user owns it or can write it."""


def load_config(start: Path) -> Config:
    """Return the configuration in ``start`` or its nearest parent that has one; defaults if there is none.

    A file that another user owns or can write is ignored and listed in ``ignored_files``.

    Raises:
        DdpDoctorError: the file is not TOML or has an unknown field; the message names file and field.
    """
    ignored: list[str] = []
    found = next(_nearest(start.resolve(), ignored), Config())
    return msgspec.structs.replace(found, ignored_files=tuple(ignored))


def _nearest(start: Path, ignored: list[str]) -> Iterator[Config]:
    """Yields the trusted configurations of ``start`` and its parents; adds a sentence to ``ignored`` for each untrusted one."""
    for folder in (start, *start.parents):
        for file, prefix in ((folder / CONFIG_FILE, ""), (folder / "pyproject.toml", "tool.ddpdoctor.")):
            content, untrusted = _content(file)
            # Searching the text is faster than parsing; most projects have no such table.
            if content is None or (prefix and b"ddpdoctor" not in content):
                continue
            try:
                table: Any = _table(file, content)
            except DdpDoctorError:
                if not untrusted:
                    raise
            else:
                for key in filter(None, prefix.split(".")):
                    table = table.get(key) if isinstance(table, Mapping) else None
                if table is None:
                    continue
            if untrusted:
                ignored.append(
                    f"{file} is not used: {untrusted}. If you trust it, copy it to a folder of your own and start ddpdoctor "
                    "there; folders of rules can also be named with --rules."
                )
                continue
            yield _decode(file, prefix, table)


def _content(file: Path) -> tuple[bytes | None, str]:
    """(content of a regular file, None if it cannot be read; why the file is untrusted, "" if it is trusted)."""
    try:
        with os.fdopen(open_regular(str(file), follow=True), "rb") as stream:
            status, content = os.fstat(stream.fileno()), stream.read(_MAX_BYTES + 1)
    except OSError:
        return None, ""
    return (content, _untrusted_reason(status, file.parent)) if len(content) <= _MAX_BYTES else (None, "")


def _untrusted_reason(status: os.stat_result, folder: Path) -> str:
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & stat.S_IWOTH:
        return "every user may write to it"
    if folder.stat().st_mode & stat.S_IWOTH:
        return f"every user may put files into {folder}"
    return ""


def check_config(config: Config, rules: RuleSet) -> None:
    """Raise DdpDoctorError if the configuration names a rule or threshold that does not exist."""
    families = {rule_id.partition("/")[0] + "/*" for rule_id in rules.rules}
    for rule_id in config.suppress:
        if rule_id not in rules.rules and rule_id not in families:
            near = did_you_mean(rule_id, (*rules.rules, *families))
            raise DdpDoctorError(
                f"configuration: suppress: no rule {rule_id!r}; see `ddpdoctor rules list`.{near}"
            )
    for rule_id, values in config.thresholds.items():
        if rule_id != COMMON and rule_id not in rules.rules:
            raise DdpDoctorError(
                f"configuration: thresholds: no rule {rule_id!r}; see `ddpdoctor rules list`.{did_you_mean(rule_id, rules.rules)}"
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
        raise DdpDoctorError(
            f"configuration: {key}: {value} is not a valid threshold: it must be a number of at least 0"
        )
    if key.endswith("share") and value > 1:
        raise DdpDoctorError(f"configuration: {key}: {value} is not a share: it must be between 0 and 1")


def _decode(file: Path, prefix: str, table: Any) -> Config:
    for key in table if isinstance(table, Mapping) else ():
        if key not in ConfigTable.__struct_fields__:
            known = ConfigTable.__struct_fields__
            raise DdpDoctorError(
                f"{file}: there is no key `{prefix}{key}`.{did_you_mean(key, known)} The keys are {', '.join(known)}."
            )
    _check_numbers(file, prefix, table.get("thresholds") if isinstance(table, Mapping) else None)
    try:
        config = msgspec.convert(table, ConfigTable, strict=True)
    except msgspec.ValidationError as error:
        reason, _, field = str(error).partition(" - at ")
        field = prefix + field.strip("`").removeprefix("$").removeprefix(".")
        raise DdpDoctorError(f"{file}: field `{field.rstrip('.') or 'top level'}`: {reason}") from None
    folders = [str((file.parent / folder).resolve()) for folder in config.rules]
    return Config(thresholds=config.thresholds, suppress=config.suppress, rules=folders, file=str(file))


def _check_numbers(file: Path, prefix: str, thresholds: Any) -> None:
    """Raises DdpDoctorError for thresholds of a wrong type. Unlike msgspec's error, it names them."""
    for rule_id, values in thresholds.items() if isinstance(thresholds, Mapping) else ():
        field = f"{prefix}thresholds.{rule_id}"
        if not isinstance(values, Mapping):
            raise DdpDoctorError(f"{file}: field `{field}`: expected a table of thresholds, got {values!r}")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DdpDoctorError(f"{file}: field `{field}.{name}`: expected a number, got {value!r}")


def _table(file: Path, content: bytes) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise DdpDoctorError(f"{file}: not TOML: {error}") from None
