"""``--redact``: a diagnosis that may leave the house.

The same name gets the same stand-in wherever it occurs.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Series
from ddpdoctor.report.json_output import plain_value

PATH = re.compile(r"(?<![\w.:/\-])(?:[A-Za-z]:)?(?:[/\\](?!/)[^\s'\"`,;:<>|()\[\]{}=/\\]+)+[/\\]?")
"""An absolute path inside any text; what follows "://" is an address, not a path."""
LIBRARY = re.compile(r".*[/\\](site-packages|dist-packages|lib[/\\]python[\d.]+)[/\\]")
IP_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}(?:\.\d{1,3}){3}|(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4})(?![\w.])"
)
HOME = re.compile(r"(?:(?<![\w.\-])|[/\\])(?:home|Users|users|scratch|fsx)[/\\]([^/\\\s'\"]+)")
KEPT_VARIABLES = re.compile(
    r"(NCCL|TORCH|PYTORCH|OMP|MKL|OPENBLAS|KMP|GLOO|CUDA|NVIDIA|HIP|ROCR|UCX|FI|RCCL)_\w+"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
)
"""Environment variables that tune a job and name nobody; the values of all others are replaced."""
USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SLURM_JOB_USER", "SUDO_USER")
LONG_ARGUMENT = 8
"""From this length on an argument's value is replaced in every other text too; shorter ones ("gloo", "32")
are common words.
"""


class _StandIns:
    """One stand-in per name and kind, in the order of first sight."""

    def __init__(self) -> None:
        self._given: dict[str, dict[str, str]] = {}

    def of(self, kind: str, name: str) -> str:
        known = self._given.setdefault(kind, {})
        return known.setdefault(name, f"{kind}-{len(known) + 1}")


def redact(diagnosis: Diagnosis) -> Diagnosis:
    """The same diagnosis without names of hosts and users, addresses, outer paths and command arguments.

    Paths inside the project and inside libraries become relative, all others a stand-in.
    Numbers, rules, kernel names and the user's own file and function names inside the project stay.
    """
    worded = _without_series(diagnosis)
    stand_ins = _StandIns()
    root = project_root(worded)
    names = _host_names(worded, stand_ins) | _user_names(worded, stand_ins)
    command, arguments = _command(worded.job.command, root, stand_ins)
    replace_names = _replacer(names | arguments)

    hide_sources = _sources(worded.source, stand_ins)

    def clean(text: str) -> str:
        text = PATH.sub(lambda match: _path(match[0], root, stand_ins), hide_sources(text))
        return IP_ADDRESS.sub(lambda match: stand_ins.of("address", match[0]), replace_names(text))

    job = msgspec.structs.replace(
        worded.job, command=command, environment=_environment(worded.job.environment, stand_ins)
    )
    plain = msgspec.to_builtins(msgspec.structs.replace(worded, job=job), enc_hook=plain_value)
    cleaned = _walk(plain, clean)
    # Addresses of documentation are public, and must stay usable.
    for finding, before in zip(cleaned["findings"], diagnosis.findings, strict=True):
        for fix, fix_before in zip(finding["fixes"], before.fixes, strict=True):
            fix["docs"] = [link if link.startswith("https://") else clean(link) for link in fix_before.docs]
    return _with_series(msgspec.convert(cleaned, Diagnosis), diagnosis)


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


def project_root(diagnosis: Diagnosis) -> str | None:
    """The deepest folder that holds all of the user's own source lines; None where there are no absolute
    ones.
    """
    files = [where.file for finding in diagnosis.findings for where in finding.where]
    files += [word for word in diagnosis.job.command if word.endswith(".py")]
    folders = [name.rpartition("/")[0] for name in files if name.startswith("/") and not LIBRARY.match(name)]
    if not folders:
        return None
    common = os.path.commonpath(folders)
    return common if common != os.sep else None


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


def _path(path: str, root: str | None, stand_ins: _StandIns) -> str:
    library = LIBRARY.match(path)
    if library:
        return f"{library[1]}/{path[library.end() :]}"
    if root and (path.rstrip("/") == root or path.startswith(root + os.sep)):
        return path[len(root) :].strip("/") or "."
    folder, name = os.path.split(path.replace("\\", "/").rstrip("/"))
    if name.endswith(".py"):
        return f"{stand_ins.of('path', folder)}/{name}"
    return stand_ins.of("path", f"{folder}/{name}")


def _sources(sources: Iterable[str], stand_ins: _StandIns) -> Callable[[str], str]:
    """Replaces the relative paths that were given, of which notes name the files: whole, or before a separator.

    Of a pattern, it is the folder before its first wildcard.
    """
    given: dict[str, str] = {}
    for source in sources:
        if Path(source).is_absolute() or "://" in source:
            continue
        fixed = re.split(r"[*?\[]", source)[0]
        path = source if fixed == source else fixed.rpartition("/")[0]
        path = os.path.normpath(path)
        if path.strip("./"):
            given[path] = stand_ins.of("path", path)
    if not given:
        return lambda text: text
    names = "|".join(map(re.escape, sorted(given, key=len, reverse=True)))
    # A name without a folder may be any word: it is one of a path only before a separator.
    inside = re.compile(rf"(?<![\w./\-])(?:\./)?({names})(?=/)")
    alone = re.compile(rf"(?<![\w./\-])(?:\./)?({names})(?![\w\-])")

    def hide(text: str) -> str:
        text = inside.sub(lambda match: given[match[1]], text)
        if text in given:
            return given[text]
        return alone.sub(lambda match: given[match[1]] if "/" in match[1] else match[0], text)

    return hide


def _host_names(diagnosis: Diagnosis, stand_ins: _StandIns) -> dict[str, str]:
    """Every host under its full and its short name."""
    hosts = [*diagnosis.job.hosts, *(rank.host for rank in diagnosis.ranks if rank.host)]
    hosts += [re.sub(r" GPU \d+$", "", series.source) for series in diagnosis.telemetry]
    found: dict[str, str] = {}
    for host in hosts:
        short, _, domain = host.partition(".")
        stand_in = stand_ins.of("host", short)
        found[host] = found[short] = stand_in
        if domain and not domain.replace(".", "").isdigit():
            found[domain] = "domain"
    return found


def _user_names(diagnosis: Diagnosis, stand_ins: _StandIns) -> dict[str, str]:
    texts = list(_strings(msgspec.to_builtins(diagnosis, enc_hook=plain_value)))
    users = [
        diagnosis.job.environment[name] for name in USER_VARIABLES if diagnosis.job.environment.get(name)
    ]
    users += [user for text in texts for user in HOME.findall(text)]
    return {user: stand_ins.of("user", user) for user in users if user != "root"}


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


def _command(command: list[str], root: str | None, stand_ins: _StandIns) -> tuple[list[str], dict[str, str]]:
    """The program and its scripts stay (without their folders); every argument becomes a stand-in."""
    words, replaced = [], {}
    for index, word in enumerate(command):
        if index == 0:
            words.append(word.rpartition("/")[2])
        elif word.endswith(".py") and not word.startswith("-"):
            inside = root is not None and word.startswith(root + os.sep)
            words.append(word if inside else word.rpartition("/")[2])
        elif word == "--":
            words.append(word)
        else:
            words.append(stand_ins.of("argument", word))
            value = word.partition("=")[2] if word.startswith("-") else word
            if len(value) >= LONG_ARGUMENT:
                replaced[value] = stand_ins.of("argument", word)
    return words, replaced


def _environment(environment: Mapping[str, str], stand_ins: _StandIns) -> dict[str, str]:
    return {
        name: value if KEPT_VARIABLES.fullmatch(name) else stand_ins.of("value", value)
        for name, value in environment.items()
    }


def _replacer(names: Mapping[str, str]) -> Callable[[str], str]:
    """Replaces whole words only, longest first, so that "node1" does not touch "node12"."""
    wanted = sorted((name for name in names if name), key=len, reverse=True)
    if not wanted:
        return lambda text: text
    pattern = re.compile(rf"(?<![\w])(?:{'|'.join(map(re.escape, wanted))})(?![\w])")
    return lambda text: pattern.sub(lambda match: names[match[0]], text)
