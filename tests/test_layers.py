"""The house's order: which package may import which, how long a file may be, and what no file is called."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddpdoctor"

ALLOWED = {
    "errors": (),
    "aside": (),
    "cachefolder": (),
    "deferred": (),
    "plain": (),
    "rundir": (),
    "hook": ("rundir",),
    "telemetry": ("rundir", "deferred", "plain"),
    "trace": ("rundir", "errors", "aside", "cachefolder"),
    "measure": ("trace", "rundir", "errors"),
    "diagnose": ("measure", "rundir", "errors", "aside", "cachefolder", "plain"),
    "report": ("diagnose", "rundir", "errors", "deferred", "plain"),
    "launch": ("rundir", "telemetry", "errors"),
    "demo": ("errors",),
    "analysis": ("rundir", "telemetry", "trace", "measure", "diagnose", "errors"),
    "cli": (
        "rundir",
        "telemetry",
        "launch",
        "demo",
        "analysis",
        "measure",
        "diagnose",
        "report",
        "trace",
        "errors",
        "plain",
    ),
    "__main__": ("cli",),
    "__init__": ("analysis", "diagnose"),
}
"""Package or top-level module → what of ours it may import. Nothing imports upwards."""

DOORS = {
    ("diagnose", "ddpdoctor.report.notebook"): "a diagnosis shows itself in notebooks",
    ("launch", "ddpdoctor.hook.environment"): "the names of the variables by which launcher and hook talk",
    ("report", "ddpdoctor.measure.facts"): "the types of the facts that a Diagnosis is made of",
}
"""Single modules that may be imported beyond the table, and why."""

MOST_LINES = 400
LONGER = {
    "tests/report/samples.py": "sample diagnoses: data, not logic",
}
"""Files beyond MOST_LINES, and why."""

FOLDERS = ("ddpdoctor", "tests", "docs", "benchmarks")


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def owner(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(file: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of each import of ours in ``file``, nested ones and relative ones too."""
    package = [root.name, *file.relative_to(root).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            # `from ddpdoctor import rundir` names a package, `from ddpdoctor.rundir import x` what is in one.
            names = [f"{start}.{alias.name}" for alias in node.names] if "." not in start else [start]
        else:
            continue
        for name in names:
            if name.split(".")[0] == root.name:
                yield node.lineno, name


def violations(root: Path, file: Path) -> list[str]:
    own = file.relative_to(root).with_suffix("").parts[0]
    if own not in ALLOWED:
        return [f"{file}: {own} has no place in the table of layers"]
    found = []
    for line, name in imported(file, root):
        target = name.split(".")[1] if "." in name else None
        if target is None or target == own or target in ("__version__",):
            continue
        if target in ALLOWED[own] or any(own == who and name.startswith(door) for who, door in DOORS):
            continue
        found.append(f"{file}:{line}: {own} must not import {name}")
    return found


@pytest.mark.parametrize("part", sorted({owner(file) for file in python_files("ddpdoctor")}))
def test_imports_follow_the_table(part):
    files = [file for file in python_files("ddpdoctor") if owner(file) == part]
    assert [line for file in files for line in violations(PACKAGE, file)] == []


def test_every_door_is_used():
    used = {
        (owner(file), door)
        for file in python_files("ddpdoctor")
        for _, name in imported(file, PACKAGE)
        for who, door in DOORS
        if who == owner(file) and name.startswith(door)
    }
    assert used == set(DOORS)


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("trace/x.py", "from ddpdoctor.measure import measure"),
        ("trace/x.py", "import ddpdoctor.diagnose.rule"),
        ("trace/x.py", "from ..report import words"),
        ("rundir/x.py", "from ddpdoctor.errors import DdpDoctorError"),
        ("hook/x.py", "def f():\n    from ddpdoctor.launch import run_job"),
        ("report/x.py", "from ddpdoctor import analysis"),
        ("unknown/x.py", "import json"),
    ],
)
def test_an_import_upwards_is_found(tmp_path, place, code):
    file = tmp_path / "ddpdoctor" / place
    file.parent.mkdir(parents=True)
    file.write_text(code)
    assert len(violations(tmp_path / "ddpdoctor", file)) == 1


def test_the_light_import_stays_light():
    """``import ddpdoctor`` stands in training scripts; a job must not pay for the analysis."""
    code = "import sys; before = set(sys.modules); import ddpdoctor; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert [name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names] == ["ddpdoctor"]


def test_files_are_short():
    lengths = {
        file.relative_to(ROOT).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in python_files(*FOLDERS)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES and name not in LONGER} == {}
    assert {name for name in LONGER if lengths.get(name, 0) <= MOST_LINES} == set(), "no longer exceptions"


def test_no_file_is_a_drawer():
    drawers = {"utils.py", "util.py", "helpers.py", "misc.py"}
    assert [file for file in python_files(*FOLDERS) if file.name in drawers] == []
