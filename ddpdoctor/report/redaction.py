"""Implements ``--redact``: replaces hosts, users, paths and arguments by pseudonyms, so that a diagnosis can be shared.

A name gets the same pseudonym everywhere. In fields with a known meaning (environment, command, sources, hosts) only values known to
be harmless are kept. In sentences, known names and everything that looks like a name are replaced.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Series
from ddpdoctor.report.job_view import project_root
from ddpdoctor.report.json_output import plain_value
from ddpdoctor.report.redact_names import (
    Pseudonyms,
    any_of,
    hidden_values,
    hide_programs,
    host_names,
    is_public,
    redacted_command,
    redacted_environment,
    relative_path,
    replacer,
    similarly_named_hosts,
    source_host,
    user_names,
    without_identifiers,
    without_paths,
)


def redact(diagnosis: Diagnosis) -> Diagnosis:
    """``diagnosis`` without names of hosts and users, addresses, paths outside the project and command arguments.

    Paths inside the project and inside libraries become relative; all others become pseudonyms. Numbers, rules, kernel names, and
    names of the user's files and functions inside the project are kept. Raises DdpDoctorError if there are too many names.
    """
    without_series = _without_trial_messages(_without_series(without_source_text(diagnosis)))
    document = msgspec.to_builtins(without_series, enc_hook=plain_value)
    texts: list[str] = []
    _map_strings(document, texts.append)
    pseudonyms = Pseudonyms()
    root = project_root(without_series)
    hosts = host_names(without_series, pseudonyms)
    hosts |= similarly_named_hosts(texts, hosts, pseudonyms)
    users = user_names(without_series, texts, pseudonyms)
    command, arguments = redacted_command(without_series.job.command, root, pseudonyms)
    environment = redacted_environment(without_series.job.environment, pseudonyms)
    values = arguments | hidden_values(without_series.job.environment, environment)
    values |= hide_programs(document, pseudonyms)
    replace_names = replacer(users | hosts, {v: s for v, s in values.items() if v.lower() not in hosts})
    replace_sources = _source_replacer(without_series.source, root, pseudonyms)

    @cache
    def redact_text(text: str) -> str:
        text = without_paths(replace_sources(text), root, pseudonyms)
        return without_identifiers(replace_names(text), pseudonyms)

    document["job"] |= {"command": command, "environment": environment}
    _replace_names(document, root, pseudonyms)
    cleaned = _map_strings(document, redact_text)
    # Links to public documentation are kept.
    for finding, before in zip(cleaned["findings"], diagnosis.findings, strict=True):
        if before.read_more and is_public(before.read_more):
            finding["read_more"] = before.read_more
        for fix, fix_before in zip(finding["fixes"], before.fixes, strict=True):
            fix["docs"] = [link if is_public(link) else redact_text(link) for link in fix_before.docs]
    return _with_series(msgspec.convert(cleaned, Diagnosis), diagnosis)


def without_source_text(diagnosis: Diagnosis) -> Diagnosis:
    """``diagnosis`` without the text of source lines."""
    replace = msgspec.structs.replace
    findings = [
        replace(finding, where=[replace(where, text=None, text_missing=None) for where in finding.where])
        for finding in diagnosis.findings
    ]
    return replace(diagnosis, findings=findings)


def _without_trial_messages(diagnosis: Diagnosis) -> Diagnosis:
    """``diagnosis`` without the command and the error messages of its trials."""
    tried, replace = diagnosis.tried, msgspec.structs.replace
    if tried is None:
        return diagnosis
    variants = [replace(each, why="" if each.verdict == "failed" else each.why) for each in tried.variants]
    baseline = replace(tried.baseline, failed=[])
    return replace(diagnosis, tried=replace(tried, command=[], baseline=baseline, variants=variants))


def _replace_names(document: dict[str, Any], root: str | None, pseudonyms: Pseudonyms) -> None:
    """Replace, in ``document``, all fields whose value is a host or a path."""

    def host(name: str) -> str:
        is_address = re.fullmatch(r"[\d.]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:]*", name)
        return pseudonyms("address", name) if is_address else pseudonyms.host(name)

    def relative(path: str) -> str:
        return relative_path(path, root, pseudonyms) if _is_absolute(path) else path

    document["job"]["hosts"] = [host(name) for name in document["job"]["hosts"]]
    for each in (*document["ranks"], *document["standing"]):
        each["host"] = host(each["host"]) if each["host"] else each["host"]
    for series in document["telemetry"]:
        name = source_host(series["source"])
        series["source"] = host(name) + series["source"][len(name) :]
    for field in ("findings", "standing", "flames"):
        _replace_files(document[field], relative)
    document["source"] = [relative(path) for path in document["source"]]


def _replace_files(value: Any, relative: Callable[[str], str]) -> None:
    """Apply ``relative`` to the file of each line of code in ``value``."""
    if isinstance(value, dict):
        for item in value.values():
            _replace_files(item, relative)
        if isinstance(value.get("file"), str):
            value["file"] = relative(value["file"])
    elif isinstance(value, list | tuple):
        for item in value:
            _replace_files(item, relative)


def _is_absolute(path: str) -> bool:
    return path.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:[/\\]", path) is not None


def _without_series(diagnosis: Diagnosis) -> Diagnosis:
    """``diagnosis`` without its series, which contain no names and would take seconds to traverse."""
    telemetry = [msgspec.structs.replace(one, t_s=[], values=[]) for one in diagnosis.telemetry]
    return msgspec.structs.replace(diagnosis, series=Series(), telemetry=telemetry)


def _with_series(cleaned: Diagnosis, diagnosis: Diagnosis) -> Diagnosis:
    telemetry = [
        msgspec.structs.replace(one, t_s=before.t_s, values=before.values)
        for one, before in zip(cleaned.telemetry, diagnosis.telemetry, strict=True)
    ]
    return msgspec.structs.replace(cleaned, series=diagnosis.series, telemetry=telemetry)


def _map_strings(value: Any, redact_text: Callable[[str], object]) -> Any:
    """The JSON ``value`` with ``redact_text`` applied to all its keys and strings."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {
            redact_text(key) if isinstance(key, str) else key: _map_strings(item, redact_text)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(item, redact_text) for item in value]
    return value


def _source_replacer(
    sources: Iterable[str], root: str | None, pseudonyms: Pseudonyms
) -> Callable[[str], str]:
    """A function that replaces the analysed paths, and paths below them, in a text. For a glob pattern, the folder before its first
    wildcard is replaced."""
    relative: dict[str, str] = {}
    absolute: dict[str, str] = {}
    for source in sources:
        if "://" in source:
            continue
        before_wildcard = re.split(r"[*?\[]", source)[0]
        path = os.path.normpath(source if before_wildcard == source else before_wildcard.rpartition("/")[0])
        if Path(source).is_absolute():
            absolute[path] = relative_path(path, root, pseudonyms)
        elif path.strip("./"):
            relative[path] = pseudonyms("path", path)
    absolute_pattern = re.compile(rf"(?<![\w./\-]){any_of(absolute)}(?![\w\-])") if absolute else None
    names = any_of(relative) if relative else ""
    # A name without a folder may be an ordinary word, so it is replaced only before a separator.
    before_separator = re.compile(rf"(?<![\w./\-])(?:\./)?({names})(?=/)") if names else None
    anywhere = re.compile(rf"(?<![\w./\-])(?:\./)?({names})(?![\w\-])") if names else None

    def replace(text: str) -> str:
        if absolute_pattern:
            text = absolute_pattern.sub(lambda match: absolute[match[0]], text)
        if before_separator is None or anywhere is None:
            return text
        text = before_separator.sub(lambda match: relative[match[1]], text)
        if text in relative:
            return relative[text]
        return anywhere.sub(lambda match: relative[match[1]] if "/" in match[1] else match[0], text)

    return replace
