"""``python -m tests.mutate``: plants errors in the package, one at a time, and says which of them ``make test`` catches.

An error is a comparison turned, a number changed, a branch dropped or a value replaced by None, drawn by seed from all of ``ddpdoctor/``
outside of texts. It is planted in a copy of the checkout. First run the tests that execute its line, as one run under coverage.py has
shown. That run does not see what other processes execute (ranks, launchers, commands): all tests of the room follow where its code runs
there, those of the commands where it does not; of a line that no test executes, all tests of the room at once.

mutmut and cosmic-ray were weighed and do not serve: both run the whole suite for each error, or see only what pytest's own process
executes, while the hook runs in ranks under another package name. Takes about 15 s for each error: some are found by their own test at
once, and a survivor costs a whole room's tests. With ``--further`` the survivors also meet the room's tests that only ``make test-all``
runs, and those of whole analyses. Exits with 0 whatever survives.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 300
"""Time limit. An error that makes the tests take longer counts as caught, because of the tests' own limits."""
QUICK = "not slow and not extended and not alone"
FURTHER = "(extended or alone) and not slow"
NO_TESTS = 5
"""Exit code of pytest if no test was selected."""
MOST_TESTS = 200
"""Maximum number of tests run for a line; more would give the same result."""
IN_OTHER_PROCESSES = ("cli", "experiment", "hook", "launch", "rundir", "telemetry")
"""Packages whose lines are also executed in other processes, which the coverage map does not include."""
COPIED = ("ddpdoctor", "rules", "tests", "fixtures", "docs", "benchmarks", ".ci")
FILES = (
    "pyproject.toml",
    "Makefile",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "mkdocs.yml",
    "SECURITY.md",
    "LICENSE",
)
TURNED: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


@dataclass(frozen=True)
class Mutant:
    """An error: a replacement for the text of a file between two offsets."""

    file: str
    line: int
    start: int
    stop: int
    text: str
    kind: str

    @property
    def room(self) -> str:
        """The subpackage or top-level module that contains it."""
        return Path(self.file).parts[1].removesuffix(".py")

    def planted(self, source: str) -> str:
        """The text of the file with the error."""
        return source[: self.start] + self.text + source[self.stop :]

    def describe(self, source: str) -> str:
        """One line of text for the output."""
        return f"{self.file}:{self.line}: {self.kind}: {source[self.start : self.stop]!r} -> {self.text!r}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All errors that can be planted in a file."""
    source = path.read_text()
    file = str(path.relative_to(ROOT))
    lines = source.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))

    def place(line: int, column: int) -> int:
        # Columns of the syntax tree are byte offsets.
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def mutant(first: ast.expr, last: ast.expr, text: str, kind: str) -> Mutant:
        assert last.end_lineno is not None and last.end_col_offset is not None
        start, stop = place(first.lineno, first.col_offset), place(last.end_lineno, last.end_col_offset)
        return Mutant(file, first.lineno, start, stop, text, kind)

    for node in _code(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = (
                ast.get_source_segment(source, node.left),
                ast.get_source_segment(source, node.comparators[0]),
            )
            text = f"({left}) {TURNED[type(node.ops[0])]} ({right})"
            yield mutant(node, node, text, "comparison turned")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            changed = repr(node.value * 2 if node.value else 1)
            yield mutant(node, node, changed, "number changed")
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield mutant(node.test, node.test, "False", "branch dropped")
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield mutant(node.value, node.value, "None", "None returned")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that are executed, without annotations and f-strings."""
    yield node
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment") or isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.If) and name == "test" and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def drawn(seed: int, count: int) -> list[Mutant]:
    """``count`` random errors; the same for the same seed and package."""
    files = sorted((ROOT / "ddpdoctor").rglob("*.py"))
    found = [mutant for file in files for mutant in mutants_of(file)]
    return random.Random(seed).sample(found, count)


def copied(folder: Path) -> Path:
    """Copy the checkout into ``folder`` and link the shared data beside it. Returns the copy."""
    root = folder / "checkout"
    root.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, root / name)
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return root


def run_tests(
    root: Path, arguments: Sequence[str], more: dict[str, str] | None = None, marks: str = QUICK
) -> int | None:
    """Run pytest in a copy. Returns its exit code; None after LIMIT_S seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **(more or {})}
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(LIMIT_S if more is None else None)
    except subprocess.TimeoutExpired:
        print(f"ended after {LIMIT_S} s: {' '.join(arguments)[:100]}", flush=True)
        os.killpg(process.pid, 9)
        process.wait()
        return None


def fail(root: Path, tests: Sequence[str], marks: str = QUICK) -> bool:
    """Whether one of the tests fails twice. On a busy machine, a test of real processes may fail once."""
    return all(run_tests(root, ["-x", *tests], marks=marks) not in (0, NO_TESTS) for _ in range(2))


def coverage_map(place: Path) -> None:
    """Write the coverage of one run of the quick tests, by test, to ``place``."""
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        (root / ".coveragerc").write_text("[run]\nsource = ddpdoctor\nrelative_files = true\n")
        options = ["-n", "2", "--cov", "--cov-config=.coveragerc", "--cov-context=test", "--cov-report="]
        run_tests(root, options, {"COVERAGE_FILE": str(place)})


def tests_by_line(place: Path) -> dict[tuple[str, int], list[str]]:
    """The ids of the tests that execute a line, by file and line."""
    from coverage.numbits import numbits_to_nums

    found: dict[tuple[str, int], list[str]] = {}
    with sqlite3.connect(place) as data:
        rows = data.execute(
            "SELECT file.path, context.context, numbits FROM line_bits"
            " JOIN file ON file.id = file_id JOIN context ON context.id = context_id WHERE context.context != ''"
        )
        for file, context, bits in rows:
            test = context.partition("|")[0]
            for line in numbits_to_nums(bits):
                found.setdefault((file, line), []).append(test)
    return found


def chosen_tests(mutant: Mutant, by_line: dict[tuple[str, int], list[str]]) -> list[str]:
    """The tests that execute the error's line, at most about MOST_TESTS; without any, the tests of its package."""
    known = sorted(set(by_line.get((mutant.file, mutant.line), [])))
    if known:
        return known[:: max(1, len(known) // MOST_TESTS)]
    return tests_of_room(mutant)


def tests_of_room(mutant: Mutant) -> list[str]:
    """The folders of the tests of the error's package; all tests if there is no such folder."""
    mirrored = ROOT / "tests" / mutant.room
    rooms = {"hook": ["hook", "ranks"], "rundir": ["rundir", "hook"]}.get(mutant.room, [mutant.room])
    return [f"tests/{room}" for room in rooms] if mirrored.is_dir() else ["tests"]


def caught(mutant: Mutant, root: Path, by_line: dict[tuple[str, int], list[str]], *, further: bool) -> str:
    """The command that finds the error in a copy: "make test", or, with ``further``, "make test-all"; "" for none."""
    path = root / mutant.file
    source = path.read_text()
    path.write_text(mutant.planted(source))
    try:
        chosen, room = chosen_tests(mutant, by_line), tests_of_room(mutant)
        beyond = room if mutant.room in IN_OTHER_PROCESSES else ["tests/cli"]
        goes = [chosen] if chosen == room else [chosen, beyond]
        if any(fail(root, tests) for tests in goes):
            return "make test"
        more = sorted({*room, "tests/analysis"}) if further else []
        return "make test-all" if more and fail(root, more, FURTHER) else ""
    finally:
        path.write_text(source)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant errors, run the tests, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--map", type=Path, help="coverage of an earlier run; made if it is not there")
    parser.add_argument("--json", type=Path, help="write what was found")
    parser.add_argument(
        "--further", action="store_true", help="survivors also meet what only make test-all runs"
    )
    chosen = parser.parse_args(arguments)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = (chosen.map or Path(folder) / "coverage").resolve()
        if not place.exists():
            coverage_map(place)
        by_line = tests_by_line(place)
        mutants = drawn(chosen.seed, chosen.count)
        roots = [copied(Path(folder) / str(number)) for number in range(len(os.sched_getaffinity(0)))]

        def judge(mutant: Mutant) -> str:
            root = roots.pop()
            try:
                found = caught(mutant, root, by_line, further=chosen.further)
            finally:
                roots.append(root)
            print(f"{found or 'SURVIVED':13} {mutant.describe((ROOT / mutant.file).read_text())}", flush=True)
            return found

        with ThreadPoolExecutor(len(roots)) as pool:
            answers = list(pool.map(judge, mutants))
    rooms = Counter(mutant.room for mutant in mutants)
    right = Counter((mutant.room, answer) for mutant, answer in zip(mutants, answers, strict=True))
    print("room         make test, make test-all beyond it, of")
    for room, count in sorted(rooms.items()):
        print(f"{room:12} {right[room, 'make test']:9} {right[room, 'make test-all']:26} {count:3}")
    words = Counter(answers)
    print(
        f"of {len(mutants)}: make test finds {words['make test']}, make test-all {words['make test-all']} more,"
        f" none {words['']}; {(time.monotonic() - began_s) / 60:.0f} min"
    )
    if chosen.json:
        rows = [
            {"file": m.file, "line": m.line, "kind": m.kind, "text": m.text, "caught": a}
            for m, a in zip(mutants, answers, strict=True)
        ]
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
