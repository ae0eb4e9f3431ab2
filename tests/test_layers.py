"""Structure of the code: allowed imports between packages, lengths of files, and forbidden file names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import ALLOWED, INTERNAL_EXCEPTIONS, MODULE_EXCEPTIONS, SUBPACKAGE_IMPORTS

pytestmark = pytest.mark.extended
"""``make check`` runs these."""

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddpdoctor"

MAX_LINES = 500
LONGER = {
    "tests/report/samples.py": "sample diagnoses: data, not logic",
}
"""Files that may be longer than MAX_LINES, and why."""
MAX_UNLISTED = 15
"""If a package has more modules, the docstring of its ``__init__`` must name each."""

FOLDERS = ("ddpdoctor", "tests", "docs", "benchmarks")


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def package_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def exported_names(root: Path, name: str) -> set[str]:
    """Names that the ``__init__`` of the package ``name`` defines. They take precedence over modules of the same name."""
    init = root.parent.joinpath(*name.split("."), "__init__.py")
    if not init.is_file():
        return set()
    names: set[str] = set()
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def is_module(root: Path, package: str, name: str) -> bool:
    place = root.parent.joinpath(*package.split("."), name)
    is_there = place.is_dir() or place.with_suffix(".py").is_file()
    return package == root.name or (is_there and name not in exported_names(root, package))


def imported(file: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, package or module) of each import of the package in ``file``, including nested and relative ones.

    ``from ddpdoctor import rundir`` imports a package, ``from ddpdoctor.rundir import x`` a name of its ``__init__`` or a module.
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
        if target in ALLOWED[own] or any(
            own == who and name.startswith(module) for who, module in MODULE_EXCEPTIONS
        ):
            continue
        found.append(f"{file}:{line}: {own} must not import {name}")
    return found


@pytest.mark.parametrize("package", sorted({package_of(file) for file in python_files("ddpdoctor")}))
def test_imports_follow_the_table(package):
    files = [file for file in python_files("ddpdoctor") if package_of(file) == package]
    assert [line for file in files for line in violations(PACKAGE, file)] == []


def test_every_module_exception_is_used():
    used = {
        (package_of(file), module)
        for file in python_files("ddpdoctor")
        for _, name in imported(file, PACKAGE)
        for who, module in MODULE_EXCEPTIONS
        if who == package_of(file) and name.startswith(module)
    }
    assert used == set(MODULE_EXCEPTIONS)


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("trace/x.py", "from ddpdoctor.measure import measure"),
        ("trace/x.py", "import ddpdoctor.diagnose.rule"),
        ("trace/x.py", "from ..report import words"),
        ("rundir/x.py", "from ddpdoctor.errors import DdpDoctorError"),
        ("hook/x.py", "def f():\n    from ddpdoctor.launch.session import run_job"),
        ("report/x.py", "from ddpdoctor import analysis"),
        ("unknown/x.py", "import json"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, place, code):
    file = tmp_path / "ddpdoctor" / place
    file.parent.mkdir(parents=True)
    file.write_text(code)
    assert len(violations(tmp_path / "ddpdoctor", file)) == 1


def subpackage_of(package: str, name: str) -> str | None:
    """The subpackage of ``package`` that contains the absolute ``name``; None for the package itself and for other packages."""
    parts = name.split(".")
    return parts[2] if parts[1:2] == [package] and len(parts) > 2 else None


def subpackage_violations(
    root: Path, file: Path, allowed: dict[str, dict[str, tuple[str, ...]]]
) -> list[str]:
    """Imports in ``file`` between subpackages that the table does not allow, and imports of a subpackage's internal modules."""
    outside = not file.is_relative_to(root)
    parts = () if outside else file.relative_to(root).with_suffix("").parts
    problems = []
    for line, name in imported(file, root):
        package = name.split(".")[1] if "." in name else ""
        if package not in allowed:
            continue
        own = parts[1] if parts[:1] == (package,) else None
        target = subpackage_of(package, name)
        if own is not None and own != "__init__":
            if own not in allowed[package]:
                problems.append(f"{file}: {package}/{own} is not in the table of subpackages")
                break
            if target is None:
                problems.append(
                    f"{file}:{line}: a subpackage of {package} must not import the package's own __init__"
                )
                continue
            if target != own and target not in allowed[package][own]:
                problems.append(f"{file}:{line}: {package}/{own} must not import {name}")
        if (
            target is not None
            and target != own
            and name.count(".") > 2
            and not is_exception(root, file, name)
        ):
            where = f"{name} is internal to {package}/{target}"
            problems.append(
                f"{file}:{line}: {where}: import from its __init__, or give a reason in INTERNAL_EXCEPTIONS of house.py"
            )
    return problems


def is_exception(root: Path, file: Path, name: str) -> bool:
    return any(matches_exception(root, file, name, who, inside) for who, inside in INTERNAL_EXCEPTIONS)


def matches_exception(root: Path, file: Path, name: str, who: str, inside: str) -> bool:
    return file.is_relative_to(root.parent / who) and f"{name}.".startswith(f"{inside}.")


@pytest.mark.parametrize("folder", ["ddpdoctor", "tests", "docs", "benchmarks"])
def test_imports_between_subpackages_follow_the_table(folder):
    assert [
        line
        for file in python_files(folder)
        for line in subpackage_violations(PACKAGE, file, SUBPACKAGE_IMPORTS)
    ] == []


def test_every_internal_exception_is_used():
    used = {
        (who, inside)
        for file in python_files(*FOLDERS)
        for _, name in imported(file, PACKAGE)
        for who, inside in INTERNAL_EXCEPTIONS
        if matches_exception(PACKAGE, file, name, who, inside)
    }
    assert used == set(INTERNAL_EXCEPTIONS)


@pytest.mark.parametrize("package", sorted(SUBPACKAGE_IMPORTS))
def test_imports_between_subpackages_have_no_cycle(package):
    left = dict(SUBPACKAGE_IMPORTS[package])
    while left:
        free = [name for name, needs in left.items() if not set(needs) & set(left)]
        assert free, f"these subpackages of {package} import each other in a cycle: {sorted(left)}"
        for name in free:
            del left[name]


@pytest.mark.parametrize("package", sorted(SUBPACKAGE_IMPORTS))
def test_every_subpackage_has_a_docstring(package):
    for init_file in sorted((PACKAGE / package).glob("*/__init__.py")):
        tree = ast.parse(init_file.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{init_file}: what comes in, what goes out, the idea"


EXAMPLE_IMPORTS = {"trace": {"store": (), "decode": ("store",), "load": ("decode", "store")}}
"""Subpackages for testing the check. Files: store/archive.py, and store/columns.py, whose function the ``__init__`` exports."""


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
def test_an_internal_import_is_found(tmp_path, place, code, problems):
    root = tmp_path / "ddpdoctor"
    (root / "trace" / "store").mkdir(parents=True)
    (root / "trace" / "store" / "archive.py").touch()
    (root / "trace" / "store" / "columns.py").touch()
    (root / "trace" / "store" / "__init__.py").write_text("from .columns import columns")
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert len(subpackage_violations(root, file, EXAMPLE_IMPORTS)) == problems


def test_import_ddpdoctor_loads_no_dependencies():
    """``import ddpdoctor`` is used in training scripts, which must not import the analysis."""
    code = "import sys; before = set(sys.modules); import ddpdoctor; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert [name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names] == ["ddpdoctor"]


def test_files_are_short():
    lengths = {
        file.relative_to(ROOT).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in python_files(*FOLDERS)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES and name not in LONGER} == {}
    assert {name for name in LONGER if lengths.get(name, 0) <= MAX_LINES} == set(), "no longer exceptions"


def test_a_large_package_names_each_module_in_its_docstring():
    missing = []
    for init_file in PACKAGE.rglob("__init__.py"):
        modules = [file.stem for file in init_file.parent.glob("*.py") if file != init_file]
        words = set(
            re.findall(r"\w+", ast.get_docstring(ast.parse(init_file.read_text(encoding="utf-8"))) or "")
        )
        if len(modules) > MAX_UNLISTED:
            missing += [f"{init_file.parent.name}/{name}" for name in modules if name not in words]
    assert missing == []


def test_argsort_is_stable():
    calls = [
        f"{file.name}: {call}"
        for file in PACKAGE.rglob("*.py")
        for call in re.findall(r"\.argsort\([^\n]*", file.read_text(encoding="utf-8"))
    ]
    assert calls and [call for call in calls if 'kind="stable"' not in call] == []


def test_no_file_is_called_utils():
    forbidden = {"utils.py", "util.py", "helpers.py", "misc.py"}
    assert [file for file in python_files(*FOLDERS) if file.name in forbidden] == []
