"""Adds to a diagnosis the text of its source lines, and the path of their folder in the repository."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import asdict, replace

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding, Fix
from ddpdoctor.diagnose.rule_texts import file_and_line
from ddpdoctor.measure.places import CodeLine, SourceText, Where
from ddpdoctor.report.job_view import project_root
from ddpdoctor.rundir import Note
from ddpdoctor.rundir.packages import is_library
from ddpdoctor.rundir.sources import hash_of, parsed_python, read_sources, source_bytes

AROUND = 2
"""Lines of context before and after."""
_MAX_CHARACTERS = 200
"""Most characters of a line."""
CHANGED = "the file has changed since the run"


def with_repository(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with :attr:`.Job.folder_in_repository`, if the repository is on this machine."""
    root = project_root(diagnosis)
    if root is None:
        return diagnosis
    folder = Path(root)
    for above in (folder, *folder.parents):
        if os.path.lexists(above / ".git"):
            inside = folder.relative_to(above).as_posix()
            job = replace(diagnosis.job, folder_in_repository="" if inside == "." else inside)
            return replace(diagnosis, job=job)
    return diagnosis


def with_source_text(diagnosis: Diagnosis, runs: Sequence[str]) -> Diagnosis:
    """The diagnosis with the text of its findings' source lines; secrets in the text are masked. If a framework makes the model or the
    loader, the line that a fix changes comes first."""
    notes: list[Note] = []
    hashes = [files for run in runs for files in read_sources(run, notes)]
    if notes:
        diagnosis = replace(diagnosis, notes=[*diagnosis.notes, *map(str, notes)])
    if not hashes:
        return diagnosis

    @cache
    def lines_of(path: str) -> list[str] | str | None:
        """The file's lines, or a reason why they are not shown; None if the run has no hash of the file or it cannot be read."""
        known = {files[path] for files in hashes if path in files}
        if not known:
            return None
        try:
            data = source_bytes(path)
        except (OSError, ValueError):
            return None
        return data.decode("utf-8", "replace").split("\n") if known == {hash_of(data)} else CHANGED

    def with_text(where: Where) -> Where:
        lines = lines_of(where.file)
        if isinstance(lines, str):
            return replace(where, text_missing=lines)
        if lines is None or not 1 <= where.line <= len(lines):
            return where
        from ddpdoctor.rundir.privacy import mask_text

        first = max(1, where.line - AROUND)
        shown = lines[first - 1 : where.line + AROUND]

        def masked(line: str) -> str:
            return mask_text(line.rstrip("\r")[:_MAX_CHARACTERS])

        call = where.call
        calling = lines_of(call.file)
        of_call = calling[call.line - 1 : call.line] if isinstance(calling, list) and call.line > 0 else []
        text = SourceText(
            first, [masked(line) for line in shown], masked(of_call[0]).strip() if of_call else None
        )
        return replace(where, text=text)

    return replace(
        diagnosis,
        findings=[_with_source_lines(finding, lines_of, with_text) for finding in diagnosis.findings],
    )


_LinesOf = Callable[[str], list[str] | str | None]


def _with_source_lines(finding: Finding, lines_of: _LinesOf, with_text: Callable[[Where], Where]) -> Finding:
    """A finding with the text of its lines and with the lines to which its fixes apply."""
    made = [_find_call(fix.changed_at, finding.where, lines_of) for fix in finding.fixes]
    # If the first line only calls a framework, the line to which a fix applies precedes it.
    first = next(filter(None, made), None) if finding.where and finding.where[0].through else None
    return replace(
        finding,
        where=[with_text(each) for each in _call_site_first(finding.where, first)],
        fixes=[
            fix if at is None else _with_call_site(fix, at)
            for fix, at in zip(finding.fixes, made, strict=True)
        ],
    )


class _CallSite(NamedTuple):
    """The user's line to which a fix applies, and the name called there."""

    line: CodeLine
    name: str


def _find_call(names: Sequence[str], recorded: Sequence[Where], lines_of: _LinesOf) -> _CallSite | None:
    """The call of one of ``names``, in the first file of the user's lines that has one."""
    stacks = [[each for each in where.call_path if not is_library(each.file)] for where in recorded if names]
    for file in dict.fromkeys(each.file for way in stacks for each in way):
        lines = lines_of(file)
        inside = {each.function.rpartition(".")[2] for way in stacks for each in way if each.file == file}
        call_site = _call_of(names, file, "\n".join(lines), inside) if isinstance(lines, list) else None
        if call_site is not None:
            return call_site
    return None


def _call_site_first(recorded: Sequence[Where], call_site: _CallSite | None) -> Sequence[Where]:
    """The finding's lines; the one to which a fix applies comes first."""
    if call_site is None:
        return recorded
    at = call_site.line
    rest = [where for where in recorded if (where.file, where.line) != (at.file, at.line)]
    return [Where(at.file, at.line, at.function), *rest]


def _with_call_site(fix: Fix, call_site: _CallSite) -> Fix:
    """The fix with the line to which it applies. If a subclass is called there, its name replaces that of the class in the fix."""
    code, title = fix.snippet or "", fix.title
    if not re.search(rf"\b{call_site.name}\b", code):
        written = re.compile(rf"\b{fix.changed_at[0]}\(")
        code, title = (written.sub(f"{call_site.name}(", text) for text in (code, title))
    named = file_and_line(asdict(call_site.line))
    return replace(fix, title=title, snippet=code if named in code or not code else f"# {named}\n{code}")


def _call_of(names: Sequence[str], file: str, text: str, inside: Container[str]) -> _CallSite | None:
    """The line in ``text`` that calls the first of ``names`` with any call; calls in the functions ``inside`` take precedence. None if
    several lines call it."""
    tree = parsed_python(text)
    if tree is None:
        return None
    calls = [(name, number, function) for name in names for number, function in _calls_of(name, tree)]
    calls = [each for each in calls if each[2] in inside] or calls
    lines = {number: function for name, number, function in calls if name == calls[0][0]}
    if len(lines) != 1:
        return None
    ((number, function),) = lines.items()
    return _CallSite(CodeLine(file, number, function), calls[0][0])


def _calls_of(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that call ``name``, and the functions that contain them."""
    waiting: list[tuple[ast.AST, str]] = [(tree, "<module>")]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) == name:
            yield node.lineno, inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node.name
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
