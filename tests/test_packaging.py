"""The wheel: built, installed outside the checkout, and used; and the code that runs in a job."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddpdoctor"
IN_THE_JOB = sorted(file for folder in ("hook", "rundir") for file in (PACKAGE / folder).rglob("*.py"))
JOBS_OLDEST_PYTHON = (3, 9)
needs_wheel = pytest.mark.extended
"""Tests that build and install a wheel, whose content rarely changes."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, source archive), built from the checkout with installed packages, without a network."""
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl")), next(target.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """``installed(*arguments)``: run Python outside the checkout, with the unpacked wheel first on its path."""
    site = tmp_path_factory.mktemp("site")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*install, str(built[0])], capture_output=True, text=True, check=True)

    def run(*arguments):
        # With an editable install the checkout is also on sys.path, but the wheel is found first.
        environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.site = site
    return run


@needs_wheel
def test_the_wheel_is_imported(installed):
    place = installed("-c", "import ddpdoctor; print(ddpdoctor.__file__)").strip()
    assert Path(place) == installed.site / "ddpdoctor" / "__init__.py"


@needs_wheel
def test_the_wheel_contains_the_rules(installed):
    listed = installed("-m", "ddpdoctor", "rules", "list")
    ours = {
        file.relative_to(ROOT / "rules").with_suffix("").as_posix() for file in ROOT.glob("rules/*/*.yaml")
    }
    assert ours
    assert {rule for rule in ours if rule not in listed} == set()
    folder = installed("-c", "from ddpdoctor.diagnose.load import packaged_folder; print(packaged_folder())")
    assert Path(folder.strip()) == installed.site / "ddpdoctor" / "rules"


@needs_wheel
def test_the_wheel_contains_the_whole_package(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    wanted = {
        file.relative_to(ROOT).as_posix()
        for file in PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert wanted - names == set()
    assert "ddpdoctor/hook/site/sitecustomize.py" in names
    assert any(name.startswith("ddpdoctor/report/templates/") and name.endswith(".css") for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs", "rules"))]
    # The copy of plotly is distributed with its own licence.
    assert [name for name in names if re.search(r"report/figures/library/plotly.*\.js\.gz$", name)]
    assert [name for name in names if name.endswith("licenses/ddpdoctor/report/figures/library/LICENSE")]


@needs_wheel
def test_the_wheel_has_its_licence_and_does_not_require_torch(built):
    with zipfile.ZipFile(built[0]) as wheel:
        metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        lines = wheel.read(metadata).decode().splitlines()
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert "License-Expression: Apache-2.0 AND MIT" in lines
    plain = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert plain
    assert not [line for line in plain if line.split()[1].startswith(("torch", "Holistic", "pandas"))]


@needs_wheel
def test_the_wheel_writes_a_report(installed):
    code = """
from pathlib import Path
from ddpdoctor.diagnose.diagnosis import Diagnosis, Job, Steps, Verdict
from ddpdoctor.report.html import write_html
write_html(Diagnosis(healthy=True, verdict=Verdict(None, "fine"), job=Job(), steps=Steps()), Path("r.html"))
print(Path("r.html").read_text())
"""
    page = installed("-c", code)
    assert "<style" in page
    assert "fine" in page


@needs_wheel
def test_the_source_archive_builds_the_same_package(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        "ddpdoctor/__init__.py",
        "rules/common.yaml",
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "Makefile",
    ):
        assert wanted in names
    assert not [name for name in names if name.startswith((".venv", "ddpdoctor-runs", "artifacts", ".ci"))]


def test_code_in_the_job_is_python_3_9_without_dependencies():
    """The code uses Python 3.9 syntax and imports only the standard library, torch and itself."""
    known = {*sys.stdlib_module_names, "torch", "_ddpdoctor"}
    foreign = set()
    for file in IN_THE_JOB:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=JOBS_OLDEST_PYTHON)
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            foreign |= {(file.name, name) for name in names if name.split(".")[0] not in known}
    assert len(IN_THE_JOB) > 50 and foreign == set()
