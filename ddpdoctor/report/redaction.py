"""``--redact``: a diagnosis that may leave the house.

The same name gets the same stand-in wherever it occurs. Where a value's place says what it is (environment, command,
sources, hosts), kept is what is known to be harmless; in sentences, replaced is what is known or looks like a name.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Series, Where
from ddpdoctor.report.json_output import plain_value
from ddpdoctor.report.project import project_root
from ddpdoctor.report.redact_names import (
    Pseudonyms,
    any_of,
    hidden_values,
    host_names,
    hosts_named_alike,
    is_public,
    redacted_command,
    redacted_environment,
    relative_path,
    replacer,
    source_host,
    user_names,
    without_identifiers,
    without_paths,
)


def redact(diagnosis: Diagnosis) -> Diagnosis:
    """The same diagnosis without names of hosts and users, addresses, outer paths and command arguments.

    Paths inside the project and inside libraries become relative, all others a stand-in.
    Numbers, rules, kernel names and the user's own file and function names inside the project stay.
    """
    worded = _without_trial_messages(_without_series(without_source_text(diagnosis)))
    texts = list(_strings(msgspec.to_builtins(worded, enc_hook=plain_value)))
    stand_ins = Pseudonyms()
    root = project_root(worded)
    hosts = host_names(worded, stand_ins)
    hosts |= hosts_named_alike(texts, hosts, stand_ins)
    users = user_names(worded, texts, stand_ins)
    command, arguments = redacted_command(worded.job.command, root, stand_ins)
    environment = redacted_environment(worded.job.environment, stand_ins)
    values = arguments | hidden_values(worded.job.environment, environment)
    replace_names = replacer(users | hosts, {v: s for v, s in values.items() if v.lower() not in hosts})
    hide_sources = _sources(worded.source, root, stand_ins)

    @cache
    def clean(text: str) -> str:
        text = without_paths(hide_sources(text), root, stand_ins)
        return without_identifiers(replace_names(text), stand_ins)

    plain = msgspec.to_builtins(_placed(worded, command, environment, root, stand_ins), enc_hook=plain_value)
    cleaned = _walk(plain, clean)
    # Addresses of documentation are public, and must stay usable.
    for finding, before in zip(cleaned["findings"], diagnosis.findings, strict=True):
        if before.read_more and is_public(before.read_more):
            finding["read_more"] = before.read_more
        for fix, fix_before in zip(finding["fixes"], before.fixes, strict=True):
            fix["docs"] = [link if is_public(link) else clean(link) for link in fix_before.docs]
    return _with_series(msgspec.convert(cleaned, Diagnosis), diagnosis)


def without_source_text(diagnosis: Diagnosis) -> Diagnosis:
    """The same diagnosis without the text of source lines."""
    replace = msgspec.structs.replace
    findings = [
        replace(finding, where=[replace(where, text=None, text_missing=None) for where in finding.where])
        for finding in diagnosis.findings
    ]
    return replace(diagnosis, findings=findings)


def _without_trial_messages(diagnosis: Diagnosis) -> Diagnosis:
    """Without the command that was tried, and the job's own error messages."""
    tried, replace = diagnosis.tried, msgspec.structs.replace
    if tried is None:
        return diagnosis
    variants = [replace(each, why="" if each.verdict == "failed" else each.why) for each in tried.variants]
    baseline = replace(tried.baseline, failed=[])
    return replace(diagnosis, tried=replace(tried, command=[], baseline=baseline, variants=variants))


def _placed(
    diagnosis: Diagnosis,
    command: list[str],
    environment: dict[str, str],
    root: str | None,
    stand_ins: Pseudonyms,
) -> Diagnosis:
    """With a stand-in in every place whose whole value is a name, whatever it looks like."""
    replace = msgspec.structs.replace

    def host(name: str) -> str:
        return (
            stand_ins("address", name)
            if re.fullmatch(r"[\d.]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:]*", name)
            else stand_ins.host(name)
        )

    def inside(path: str) -> str:
        return relative_path(path, root, stand_ins) if _is_absolute(path) else path

    job = replace(
        diagnosis.job,
        command=command,
        environment=environment,
        hosts=[host(name) for name in diagnosis.job.hosts],
    )
    ranks = [replace(rank, host=host(rank.host) if rank.host else rank.host) for rank in diagnosis.ranks]
    telemetry = []
    for series in diagnosis.telemetry:
        name = source_host(series.source)
        telemetry.append(replace(series, source=host(name) + series.source[len(name) :]))

    def line(one: Where) -> Where:
        callers = tuple(replace(each, file=inside(each.file)) for each in one.callers)
        return replace(one, file=inside(one.file), callers=callers)

    findings = [replace(one, where=[line(where) for where in one.where]) for one in diagnosis.findings]
    standing = [
        replace(
            one,
            host=host(one.host) if one.host else one.host,
            where=line(one.where) if one.where else None,
            stack=[replace(each, file=inside(each.file)) for each in one.stack],
        )
        for one in diagnosis.standing
    ]
    flames = [
        replace(one, places=[replace(each, file=inside(each.file)) for each in one.places])
        for one in diagnosis.flames
    ]
    return replace(
        diagnosis,
        flames=flames,
        job=job,
        ranks=ranks,
        telemetry=telemetry,
        findings=findings,
        standing=standing,
        source=[inside(path) for path in diagnosis.source],
    )


def _is_absolute(path: str) -> bool:
    return path.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:[/\\]", path) is not None


def _without_series(diagnosis: Diagnosis) -> Diagnosis:
    """Without the long lists of numbers: they name nobody, and walking them takes seconds."""
    telemetry = [msgspec.structs.replace(one, t_s=[], values=[]) for one in diagnosis.telemetry]
    return msgspec.structs.replace(diagnosis, series=Series(), telemetry=telemetry)


def _with_series(cleaned: Diagnosis, diagnosis: Diagnosis) -> Diagnosis:
    telemetry = [
        msgspec.structs.replace(one, t_s=before.t_s, values=before.values)
        for one, before in zip(cleaned.telemetry, diagnosis.telemetry, strict=True)
    ]
    return msgspec.structs.replace(cleaned, series=diagnosis.series, telemetry=telemetry)


def _walk(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {
            clean(key) if isinstance(key, str) else key: _walk(item, clean) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_walk(item, clean) for item in value]
    return value


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _sources(sources: Iterable[str], root: str | None, stand_ins: Pseudonyms) -> Callable[[str], str]:
    """Replaces the paths that were given, of which notes name the files: whole, or before a separator.

    Of a pattern, it is the folder before its first wildcard.
    """
    given: dict[str, str] = {}
    absolute: dict[str, str] = {}
    for source in sources:
        if "://" in source:
            continue
        fixed = re.split(r"[*?\[]", source)[0]
        path = os.path.normpath(source if fixed == source else fixed.rpartition("/")[0])
        if Path(source).is_absolute():
            absolute[path] = relative_path(path, root, stand_ins)
        elif path.strip("./"):
            given[path] = stand_ins("path", path)
    whole = re.compile(rf"(?<![\w./\-]){any_of(absolute)}(?![\w\-])") if absolute else None
    names = any_of(given) if given else ""
    # A name without a folder may be any word: it is one of a path only before a separator.
    inside = re.compile(rf"(?<![\w./\-])(?:\./)?({names})(?=/)") if names else None
    alone = re.compile(rf"(?<![\w./\-])(?:\./)?({names})(?![\w\-])") if names else None

    def hide(text: str) -> str:
        if whole:
            text = whole.sub(lambda match: absolute[match[0]], text)
        if inside is None or alone is None:
            return text
        text = inside.sub(lambda match: given[match[1]], text)
        if text in given:
            return given[text]
        return alone.sub(lambda match: given[match[1]] if "/" in match[1] else match[0], text)

    return hide
