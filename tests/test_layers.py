"""The house's order: which package may import which, how long a file may be, and what no file is called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import ALLOWED, DOORS, INSIDES, ROOMS

pytestmark = pytest.mark.extended
"""``make check`` runs these."""

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddpdoctor"

MOST_LINES = 500
LONGER = {
    "tests/report/samples.py": "sample diagnoses: data, not logic",
}
"""Files beyond MOST_LINES, and why."""
MOST_UNLISTED = 15
"""Modules of a package whose door need not say what each is for."""

FOLDERS = ("ddpdoctor", "tests", "docs", "benchmarks")


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def owner(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def opened(root: Path, name: str) -> set[str]:
    """What the door of the package ``name`` binds: such a name is the door's, also where a module is called so."""
    door = root.parent.joinpath(*name.split("."), "__init__.py")
    if not door.is_file():
        return set()
    names: set[str] = set()
    for node in ast.parse(door.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def is_module(root: Path, package: str, name: str) -> bool:
    place = root.parent.joinpath(*package.split("."), name)
    is_there = place.is_dir() or place.with_suffix(".py").is_file()
    return package == root.name or (is_there and name not in opened(root, package))


def imported(file: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, package or module) of each import of ours in ``file``, nested ones and relative ones too.

    ``from ddpdoctor import rundir`` names a package, ``from ddpdoctor.rundir import x`` what its door has, or a module.
    """
    package = [root.name, *file.relative_to(root).parent.parts] if file.is_relative_to(root) else []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [
                f"{start}.{alias.name}" if is_module(root, start, alias.name) else start
                for alias in node.names
            ]
        else:
            continue
        for name in dict.fromkeys(names):
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


def room(package: str, name: str) -> str | None:
    """The room of ``package`` that the absolute ``name`` lies in; None for the package itself, and for another's."""
    parts = name.split(".")
    return parts[2] if parts[1:2] == [package] and len(parts) > 2 else None


def room_violations(root: Path, file: Path, rooms: dict[str, dict[str, tuple[str, ...]]]) -> list[str]:
    """Imports against the order of the rooms, and past a room's door, in ``file`` of the package or of the tests."""
    outside = not file.is_relative_to(root)
    parts = () if outside else file.relative_to(root).with_suffix("").parts
    problems = []
    for line, name in imported(file, root):
        package = name.split(".")[1] if "." in name else ""
        if package not in rooms:
            continue
        own = parts[1] if parts[:1] == (package,) else None
        target = room(package, name)
        if own is not None and own != "__init__":
            if own not in rooms[package]:
                problems.append(f"{file}: {package}/{own} has no place in the table of rooms")
                break
            if target is None:
                problems.append(f"{file}:{line}: a room of {package} must not import the package's own door")
                continue
            if target != own and target not in rooms[package][own]:
                problems.append(f"{file}:{line}: {package}/{own} must not import {name}")
        if target is not None and target != own and name.count(".") > 2 and not excepted(root, file, name):
            where = f"{name} lies behind the door of {package}/{target}"
            problems.append(
                f"{file}:{line}: {where}: import from there, or give a reason in INSIDES of house.py"
            )
    return problems


def excepted(root: Path, file: Path, name: str) -> bool:
    return any(inside_used(root, file, name, who, inside) for who, inside in INSIDES)


def inside_used(root: Path, file: Path, name: str, who: str, inside: str) -> bool:
    return file.is_relative_to(root.parent / who) and f"{name}.".startswith(f"{inside}.")


@pytest.mark.parametrize("folder", ["ddpdoctor", "tests", "docs", "benchmarks"])
def test_rooms_are_entered_by_their_doors_and_in_their_order(folder):
    assert [line for file in python_files(folder) for line in room_violations(PACKAGE, file, ROOMS)] == []


def test_every_exception_to_a_door_is_used():
    used = {
        (who, inside)
        for file in python_files(*FOLDERS)
        for _, name in imported(file, PACKAGE)
        for who, inside in INSIDES
        if inside_used(PACKAGE, file, name, who, inside)
    }
    assert used == set(INSIDES)


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_the_rooms_of_a_package_are_in_one_way_order(package):
    left = dict(ROOMS[package])
    while left:
        free = [name for name, needs in left.items() if not set(needs) & set(left)]
        assert free, f"these rooms of {package} import each other in a circle: {sorted(left)}"
        for name in free:
            del left[name]


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_every_room_has_a_door_that_explains_itself(package):
    for door in sorted((PACKAGE / package).glob("*/__init__.py")):
        tree = ast.parse(door.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{door}: what comes in, what goes out, the idea"


HOUSE = {"trace": {"store": (), "decode": ("store",), "load": ("decode", "store")}}
"""Rooms to try the check on; on disk: store/archive.py, store/columns.py (whose function columns the door opens)."""


@pytest.mark.parametrize(
    ("place", "code", "problems"),
    [
        ("ddpdoctor/trace/decode/x.py", "from ..store import columns", 0),
        ("ddpdoctor/trace/decode/x.py", "from .y import z", 0),
        ("ddpdoctor/trace/load.py", "from .decode import stream", 0),
        ("ddpdoctor/trace/__init__.py", "from .store import columns\nfrom .load import load", 0),
        (
            "ddpdoctor/measure/x.py",
            "from ddpdoctor.trace.store import columns\nfrom ddpdoctor.trace import load",
            0,
        ),
        ("tests/trace/x.py", "from ddpdoctor.trace.store import columns", 0),
        ("ddpdoctor/trace/store/x.py", "from ..decode import y", 1),
        ("ddpdoctor/trace/store/x.py", "from ddpdoctor.trace import anything", 1),
        ("ddpdoctor/trace/attic/x.py", "from ..decode import y", 1),
        ("ddpdoctor/trace/decode/x.py", "from ..store import archive", 1),
        ("ddpdoctor/trace/decode/x.py", "from ..store.archive import pack", 1),
        ("ddpdoctor/trace/__init__.py", "from .store.archive import pack", 1),
        ("ddpdoctor/measure/x.py", "import ddpdoctor.trace.store.columns", 1),
        ("tests/trace/x.py", "def f():\n    from ddpdoctor.trace.store.archive import pack", 1),
    ],
)
def test_a_way_past_a_door_is_found(tmp_path, place, code, problems):
    root = tmp_path / "ddpdoctor"
    (root / "trace" / "store").mkdir(parents=True)
    (root / "trace" / "store" / "archive.py").touch()
    (root / "trace" / "store" / "columns.py").touch()
    (root / "trace" / "store" / "__init__.py").write_text("from .columns import columns")
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert len(room_violations(root, file, HOUSE)) == problems


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


def test_a_package_of_many_modules_names_each_in_its_door():
    missing = []
    for door in PACKAGE.rglob("__init__.py"):
        modules = [file.stem for file in door.parent.glob("*.py") if file != door]
        words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(door.read_text(encoding="utf-8"))) or ""))
        if len(modules) > MOST_UNLISTED:
            missing += [f"{door.parent.name}/{name}" for name in modules if name not in words]
    assert missing == []


def test_what_is_sorted_is_in_one_order_on_every_processor():
    calls = [
        f"{file.name}: {call}"
        for file in PACKAGE.rglob("*.py")
        for call in re.findall(r"\.argsort\([^\n]*", file.read_text(encoding="utf-8"))
    ]
    assert calls and [call for call in calls if 'kind="stable"' not in call] == []


def test_no_file_is_a_drawer():
    drawers = {"utils.py", "util.py", "helpers.py", "misc.py"}
    assert [file for file in python_files(*FOLDERS) if file.name in drawers] == []
