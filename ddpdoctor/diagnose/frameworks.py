"""The table ``frameworks.yaml``: the names of torch's settings in frameworks, and the torch calls of their own loops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ddpdoctor.diagnose import rule_texts
from ddpdoctor.diagnose.diagnosis import Fix
from ddpdoctor.measure.places import loop_in


class FrameworkObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object of a framework that takes settings."""

    path: str
    """Import path."""
    form: str
    """Python code that makes the object; ``{{ arguments }}`` are its arguments."""
    passes_on: str | None = None
    """The function that gets the arguments which the object's own signature lacks."""
    calls: list[str]
    """Names of calls in a script that make the object or its container, in order of preference. The line of the call is the line to change.
    If the name is not in ``form``, as that of a subclass, it replaces the first of these names in the code."""


class FrameworkSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A framework's equivalent of a setting in a fix's ``settings``."""

    setting: str
    object: str
    argument: str | None = None
    """Null: the object has no such argument; a fix that changes several settings omits it."""
    value: str = "{{ value }}"
    """Template of the argument. ``value`` is the fix's value as Python."""
    since: str | None = None
    """First version of the framework that has it."""
    before: str | None = None
    """First version without it."""
    imports: str | None = None
    source: str


class FrameworkCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function of the framework that calls torch, in its own loop or for scripts."""

    function: str
    """Its name with its class, or a suffix of that name."""
    does: str
    """What it does, as a clause."""
    setting: str | None = None
    """The fix, a template of Python code for the user's script that changes how often it is called; null if there is none."""
    title: str | None = None
    object: str | None = None
    """The framework's object that takes the setting."""
    since: str | None = None
    trade_off: str | None = None
    source: str


class Framework(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A package with a training loop, or with objects that take torch's settings."""

    name: str
    packages: list[str]
    """Names in the job's record of imported packages."""
    files: list[str]
    """Prefixes of its files' paths, relative to the folder of installed packages."""
    parts: dict[str, str] = {}
    """Packages among its files that are built on it, such as trl: package → name."""
    loops: list[str] = []
    """Functions with their class that run its training loop; a user calls them once."""
    step: str | None = None
    """Python expression for ``step``, the number of the optimizer step, in a user function called by the loop."""
    rank: str | None = None
    """The same for ``rank``."""
    objects: dict[str, FrameworkObject] = {}
    settings: list[FrameworkSetting] = []
    calls: list[FrameworkCall] = []


class FrameworkVersion(NamedTuple):
    """A framework through which a line called torch, and its version, "" if unknown."""

    framework: Framework
    version: str


NAMES: Mapping[str, Any] = dict.fromkeys(
    ("name", "version", "function", "line", "does", "setting", "title", "trade_off", "source")
) | {
    "in_loop": False,
    "fixed": False,
    "by_script": False,
    "changed_at": [],
    "beside": [],
    "beside_share": None,
    "own": [],
}
"""Names under ``framework`` in conditions and texts of rules, with their values if there is no framework. ``name``: framework through
which the finding's first line called torch; ``function``: its function in ``calls``, or else the innermost one; ``in_loop``: whether the
framework's own loop called it; ``fixed``: whether that holds for all lines of the finding and no known setting changes it;
``by_script``: whether the line is the script's, not the framework's own; ``beside``: functions of fixed lines if other lines are not
fixed, with ``beside_share``, their share of the calls, if known; ``own``: lines that no framework's loop called."""


def changeable_first(
    frameworks: Sequence[Framework], where: Sequence[Mapping[str, Any]], job: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The lines of a finding, with those of a framework's own loop that no known setting changes last."""
    return sorted(where, key=lambda line: _is_fixed(_names_of(frameworks, line, job)))


def names(
    frameworks: Sequence[Framework], where: Sequence[Mapping[str, Any]], job: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of :data:`NAMES` for the lines of a finding in a job."""
    lines = changeable_first(frameworks, where, job)
    each = [_names_of(frameworks, line, job) for line in lines]
    if not each:
        return dict(NAMES)
    fixed = [(line.get("share"), one) for line, one in zip(lines, each, strict=True) if _is_fixed(one)]
    beside = fixed if len(fixed) < len(each) else []
    shares = [share for share, _ in beside if share is not None]
    return each[0] | {
        "fixed": len(fixed) == len(each),
        "beside": list(dict.fromkeys(f"{one['function']} of {one['name']}" for _, one in beside)),
        "beside_share": sum(shares) if shares and len(shares) == len(beside) else None,
        "own": [line for line, one in zip(lines, each, strict=True) if not one["in_loop"]],
    }


def _is_fixed(line: Mapping[str, Any]) -> bool:
    return line["in_loop"] and line["setting"] is None


def _names_of(
    frameworks: Sequence[Framework], where: Mapping[str, Any], job: Mapping[str, Any]
) -> dict[str, Any]:
    found = called_through(frameworks, where, job)
    if found is None:
        return _names_in_framework_call(frameworks, where, job)
    through, framework = where["through"], found.framework
    own = [frame for frame in through if _framework_of(frameworks, frame["file"]) is framework]
    calls = ((call, frame) for frame in through if (call := _call_of(found, frame)) is not None)
    call, frame = next(calls, (None, own[0]))
    names = dict(NAMES) | {
        "function": frame["function"],
        "line": rule_texts.file_and_line(frame),
        "by_script": all((each["file"], each["line"]) != (where["file"], where["line"]) for each in through),
        "in_loop": any(_is_named(each, loop) for each in through for loop in framework.loops),
        **({} if call is None else _row_names(found, call)),
        **_part_of(found, frame, job),
    }
    return (
        names | _names_of_hook_call(framework, where, frame if call else through[-1])
        if names["in_loop"]
        else names
    )


def _names_in_framework_call(
    frameworks: Sequence[Framework], where: Mapping[str, Any], job: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of :data:`NAMES` for a line in, or called by, a function in a framework's ``calls``, such as its evaluation."""
    callers = where.get("callers") or ()
    loop = loop_in([each["file"] for each in callers])
    own = _framework_of(frameworks, where["file"]) is not None
    frame = where if own else None if loop is None else callers[loop]
    found = None if frame is None else called_through(frameworks, {"through": [frame]}, job)
    call = None if frame is None or found is None else _call_of(found, frame)
    return dict(NAMES) if found is None or call is None else dict(NAMES) | _row_names(found, call)


def _call_of(found: FrameworkVersion, frame: Mapping[str, Any]) -> FrameworkCall | None:
    """The entry of the framework's ``calls`` for the function of a frame."""
    calls = (each for each in found.framework.calls if _is_named(frame, each.function))
    return next((each for each in calls if _is_in_range(found.version, each.since, None)), None)


def _part_of(found: FrameworkVersion, frame: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """``name`` and ``version`` of the framework, or of the package in its :attr:`Framework.parts` that contains a frame."""
    package = _INSTALLED.sub("", frame["file"]).replace("\\", "/").partition("/")[0]
    if package not in found.framework.parts:
        return {"name": found.framework.name, "version": found.version}
    return {
        "name": found.framework.parts[package],
        "version": (job.get("frameworks") or {}).get(package, ""),
    }


def _row_names(found: FrameworkVersion, call: FrameworkCall) -> dict[str, Any]:
    return {
        "name": found.framework.name,
        "version": found.version,
        "changed_at": found.framework.objects[call.object].calls if call.object else [],
        **{name: getattr(call, name) for name in ("does", "setting", "title", "trade_off", "source")},
    }


def _is_named(frame: Mapping[str, Any], name: str) -> bool:
    """Whether a frame's function is ``name``, with or without its class; Python 3.10 and older record no class."""
    function = frame["function"]
    return f".{function}".endswith(f".{name}") or function == name.rpartition(".")[2]


def _names_of_hook_call(
    framework: Framework, where: Mapping[str, Any], called: Mapping[str, Any]
) -> dict[str, Any]:
    """Changed :data:`NAMES` if a user's hook calls that function of the framework: the user's call is then the line to change."""
    if loop_in([each["file"] for each in where.get("callers", ())]) is None or framework.step is None:
        return {}
    return {
        "setting": f"{framework.step}\nif step % 1000 == 0:\n    {rule_texts.THIS_WORK}",
        "title": f"Call {called['function']} every N steps{rule_texts.at(where)}",
        "trade_off": "Its results come every N steps.",
        "changed_at": [],
    }


_STEP, _RANK = re.compile(r"\bstep %"), re.compile(r"\brank (?:==|in) ")


def with_hook_variables(frameworks: Sequence[Framework], fix: Fix, where: Sequence[Mapping[str, Any]]) -> Fix:
    """The fix, with definitions of ``step`` and ``rank`` if its code uses them and a framework's loop calls the first line's function."""
    files = [each["file"] for each in where[0].get("callers", ())] if where else []
    loop = loop_in(files)
    framework = None if loop is None else _framework_of(frameworks, files[loop])
    if framework is None or fix.snippet is None:
        return fix
    given = [
        text
        for used, text in ((_STEP, framework.step), (_RANK, framework.rank))
        if text and used.search(fix.snippet) and text not in fix.snippet
    ]
    return msgspec.structs.replace(fix, snippet="\n".join([*given, fix.snippet]))


def fixes_of(framework: Mapping[str, Any], tree: Mapping[str, Any]) -> list[Fix]:
    """The fix for a call in the framework's own loop, or of one of its functions that the script calls, from its :data:`NAMES`; []
    if none is known."""
    if framework["setting"] is None:
        return []
    return [
        Fix(
            title=rule_texts.render(framework["title"], tree),
            why=f"{framework['name']} {framework['does']}.",
            snippet=rule_texts.render_snippet(framework["setting"], tree),
            trade_off=framework["trade_off"],
            docs=[framework["source"]],
            changed_at=framework["changed_at"],
        )
    ]


_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]", re.DOTALL)


def called_through(
    frameworks: Sequence[Framework], where: Mapping[str, Any] | None, job: Mapping[str, Any]
) -> FrameworkVersion | None:
    """The framework through which a user's line calls torch; None if it calls torch itself, or a framework not in the table."""
    through = (where or {}).get("through") or ()
    imported = job.get("frameworks") or {}
    # The outermost one is the user's choice: transformers calls accelerate.
    for frame in reversed(through):
        framework = _framework_of(frameworks, frame["file"])
        if framework is not None:
            version = next((imported[name] for name in framework.packages if imported.get(name)), "")
            return FrameworkVersion(framework, version)
    return None


def _framework_of(frameworks: Sequence[Framework], path: str) -> Framework | None:
    file = _INSTALLED.sub("", path).replace("\\", "/")
    return next((each for each in frameworks if any(map(file.startswith, each.files))), None)


def _is_in_range(version: str, since: str | None, before: str | None) -> bool:
    """Whether a version is in a range; True if it is unknown."""
    if not version:
        return True
    return (since is None or rule_texts.since(version, since)) and (
        before is None or not rule_texts.since(version, before)
    )


def as_framework_settings(
    frameworks: Sequence[Framework],
    fix: Fix,
    settings: Mapping[str, str],
    title: str,
    tree: Mapping[str, Any],
) -> Fix | None:
    """A fix as settings of the framework that called the constructor which takes its ``settings``. ``title``: template of its title.
    None if no framework called it, or the table lacks a setting for its version."""
    families = {name.partition(".")[0] for name in settings}
    if len(families) != 1 or not families <= {"ddp", "loader", "engine"}:
        return None
    (family,) = families
    # The line of an engine is that of the finding.
    where = next(iter(tree["where"]), None) if family == "engine" else tree[family]["where"]
    found = called_through(frameworks, where, tree["job"])
    known = [] if found is None else [_row(found, name) for name in settings]
    rows = [row for row in known if row is not None]
    if found is None or len(rows) < len(known) or len({row.object for row in rows}) > 1:
        return None
    if not any(row.argument for row in rows):
        return None
    arguments = ", ".join(_arguments(rows, settings, tree))
    target = found.framework.objects[rows[0].object]
    form = rule_texts.render_snippet(target.form, {**tree, "arguments": arguments})
    # The line of the constructor is in the framework, and is not the line to change.
    without_lines = {name: tree[name] | {"where": None} for name in ("ddp", "loader")} | {"where": []}
    return msgspec.structs.replace(
        fix,
        title=f"{rule_texts.render(title, {**tree, **without_lines})} ({found.framework.name}: {rows[0].object}({arguments}))",
        snippet="\n".join([*(row.imports for row in rows if row.imports), form]),
        docs=[rows[0].source, *fix.docs],
        changed_at=target.calls,
    )


def _row(found: FrameworkVersion, setting: str) -> FrameworkSetting | None:
    rows = (row for row in found.framework.settings if row.setting == setting)
    return next((row for row in rows if _is_in_range(found.version, row.since, row.before)), None)


def _arguments(
    rows: Sequence[FrameworkSetting], settings: Mapping[str, str], tree: Mapping[str, Any]
) -> Iterator[str]:
    for row, value in zip(rows, settings.values(), strict=True):
        if row.argument is None:
            continue
        given = {**tree, "value": _PYTHON.get(value, value)}
        argument, written = (rule_texts.render(text, given) for text in (row.argument, row.value))
        yield f"{argument}={written}"


_PYTHON = {"true": "True", "false": "False"}


def check(frameworks: Sequence[Framework]) -> None:
    """Raises ValueError for a row that names an unknown object of its framework, or an invalid template."""
    for framework in frameworks:
        for row in framework.settings:
            if row.object not in framework.objects:
                raise ValueError(f"{framework.name}: {row.setting}: there is no object {row.object!r}")
            rule_texts.check_template(row.argument or "")
            rule_texts.check_template(row.value)
        for call in framework.calls:
            if call.object is not None and call.object not in framework.objects:
                raise ValueError(f"{framework.name}: {call.function}: there is no object {call.object!r}")
            rule_texts.check_template(call.setting or "")
            rule_texts.check_template(call.title or "")
        for target in framework.objects.values():
            rule_texts.check_template(target.form)
