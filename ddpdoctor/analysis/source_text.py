"""Adds to a diagnosis the text of the source lines that it names, and their folder's path in its repository."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.measure.places import CodeLine, SourceText, Where
from ddpdoctor.report.job_view import project_root
from ddpdoctor.rundir import Note, hash_of, parsed_python, read_sources, source_bytes

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
    """The diagnosis with the text of its findings' source lines; secrets in the text are masked. Where a framework makes the model or the
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

    findings = [
        replace(finding, where=[with_text(where) for where in _places(finding, lines_of)])
        for finding in diagnosis.findings
    ]
    return replace(diagnosis, findings=findings)


def _places(finding: Finding, lines_of: Callable[[str], list[str] | str | None]) -> list[Where]:
    """The finding's lines. Where the first only calls a framework, first the one in its file that calls what a fix names."""
    names = next((fix.changed_at for fix in finding.fixes if fix.changed_at), [])
    file = finding.where[0].file if names and finding.where and finding.where[0].through else ""
    lines = lines_of(file) if file else None
    made = _call_of(names, "\n".join(lines)) if isinstance(lines, list) else None
    if made is None:
        return finding.where
    rest = [where for where in finding.where if (where.file, where.line) != (file, made.line)]
    return [Where(file, made.line, made.function), *rest]


def _call_of(names: Sequence[str], text: str) -> CodeLine | None:
    """The line in ``text`` that calls the first of these names that is called at all; None if several lines do."""
    tree = parsed_python(text)
    if tree is None:
        return None
    for name in names:
        calls = list(_calls_of(name, tree))
        if calls:
            return calls[0] if len({call.line for call in calls}) == 1 else None
    return None


def _calls_of(name: str, tree: ast.AST) -> Iterator[CodeLine]:
    waiting: list[tuple[ast.AST, str]] = [(tree, "<module>")]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) == name:
            yield CodeLine("", node.lineno, inside)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node.name
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
