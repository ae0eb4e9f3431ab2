"""A bundle is one file of plain old Python that stands alone, always the same, with the options of ``ddpdoctor run``."""

from __future__ import annotations

import ast
import errno
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpdoctor.bundle import build
from ddpdoctor.bundle.build import write_bundle
from ddpdoctor.bundle.recording import parsed
from ddpdoctor.cli.bundle import command
from ddpdoctor.cli.run import command as run_command
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import NoteCode
from ddpdoctor.written import LIST, folders

FIXTURE = Path(__file__).parents[2] / "fixtures" / "slow-data-one-rank"
OLDEST = (3, 9)
OTHERS = ("python3.9", "python3.10", "python3.12", "python3.13", "python3.14")
NEWER_THAN_OLDEST = {"enum": {"StrEnum"}, "itertools": {"pairwise", "batched"}, "datetime": {"UTC"}}


def bundled(out: Path) -> Path:
    done = CliRunner().invoke(command, ["--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return bundled(tmp_path_factory.mktemp("made") / "dd.pyz")


def started(bundle: Path, *arguments: str, python: tuple[str, ...] = (sys.executable, "-I", "-S"), cwd=None):
    """A bundle under a Python that sees nothing but its standard library."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDPDOCTOR_")}
    return subprocess.run(
        [*python, str(bundle), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        cwd=cwd or bundle.parent,
        timeout=60,
        check=False,
    )


def sources(bundle: Path) -> dict[str, str]:
    with zipfile.ZipFile(bundle) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}


def test_the_same_sources_give_the_same_bytes(bundle, tmp_path):
    assert bundled(tmp_path / "again.pyz").read_bytes() == bundle.read_bytes()
    folder = bundled(tmp_path / "folder")
    inside = {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }
    with zipfile.ZipFile(bundle) as archive:
        assert inside.pop(LIST)
        assert inside == {name: archive.read(name) for name in archive.namelist()}
        assert "standins/pynvml.py" in inside, "the job's Python need not have it"
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}


def test_all_of_it_is_old_python_that_needs_nothing(bundle):
    """Syntax and library of Python 3.9; imports of the standard library, of what is in the bundle, and of the job's torch."""
    names = sources(bundle)
    inside = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names}
    known = set(sys.stdlib_module_names) | {"torch", "_ddpdoctor", "psutil", "pynvml"}
    for name, text in names.items():
        if name.startswith("standins/pynvml"):
            continue
        for node in ast.walk(ast.parse(text, feature_version=OLDEST)):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
                found = {alias.name for alias in node.names}
                assert not found & NEWER_THAN_OLDEST.get(str(node.module), set()), (name, node.lineno)
            elif isinstance(node, ast.Call):
                given = {keyword.arg for keyword in node.keywords}
                called = ast.unparse(node.func)
                assert not (called == "zip" and "strict" in given), (name, node.lineno)
                assert not (called == "dataclass" and given & {"slots", "kw_only"}), (name, node.lineno)
                unions = [each for each in node.args if isinstance(each, ast.BinOp)]
                assert not (called == "isinstance" and unions), (name, node.lineno)
            for module in modules:
                # Type checkers' imports, of what other commands need, are not made.
                top = module.partition(".")[0]
                assert top in known or module in inside or "TYPE_CHECKING" in text, (name, module)


def test_what_records_is_loaded_from_it_alone(bundle, tmp_path):
    """Every module in it can be imported where there is nothing else."""
    names = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in sources(bundle)
        if name.startswith("ddpdoctor/") and not name.startswith("ddpdoctor/hook/")
    ]
    code = (
        f"import sys; sys.path[:0] = [{str(bundle)!r}, {str(bundle / 'standins')!r}]; import importlib\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(len(sys.modules))"
    )
    for python in ([sys.executable, "-I", "-S"], *([found, "-I", "-S"] for found in others())):
        done = subprocess.run(
            [*python, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60
        )
        assert done.returncode == 0, (python, done.stderr)


def others() -> list[str]:
    return [name for name in OTHERS if runs(name)]


@functools.cache
def runs(python: str) -> bool:
    """Whether there is such a Python; a version manager may have put something of its name there."""
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def test_a_job_without_ranks_is_recorded_by_a_python_without_packages(bundle, tmp_path):
    job = """
import glob, os, sys, time
run = os.environ["DDPDOCTOR_RUN"]
print(run)
deadline_s = time.monotonic() + 40
while time.monotonic() < deadline_s:
    if any(open(file).read().count('"ranks":') > 1 for file in glob.glob(run + "/hosts/*/telemetry.jsonl")):
        sys.exit(3)
    time.sleep(0.1)
"""
    for python in ([sys.executable, "-I", "-S"], *([found, "-S"] for found in others())):
        out = tmp_path / Path(python[0]).name
        done = started(bundle, "run", "--out", str(out), "--", *python[:1], "-c", job, python=tuple(python))
        assert done.returncode == 3, done.stderr
        assert done.stdout == f"{out}\n"
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["exit_code"] == 3
        assert NoteCode.NO_RANK.value in manifest["note_codes"]
        assert not [note for note in manifest["notes"] if "Error" in note], manifest["notes"]
        (telemetry,) = out.glob("hosts/*/telemetry.jsonl")
        samples = [json.loads(line) for line in telemetry.read_text().splitlines()]
        hosts = [sample["host"] for sample in samples if "ranks" in sample]
        assert hosts[1]["cpu_percent"] is not None
        assert hosts[-1]["memory_used_bytes"] > 0
        assert not [sample for sample in samples if "cannot be read" in sample.get("note", "")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["analyze", "runs/a"], "`ddpdoctor analyze runs/a`"),
        (["run"], "no command"),
        (["run", "--no-such", "--", "true"], "--no-such not recognized"),
        (["run", "--max-trace-mb", "0", "--", "true"], "--max-trace-mb 0: at least 1."),
        (["run", "--hang-after", "soon", "--", "true"], "--hang-after soon: not a number."),
        (["run", "--hang-after", "inf", "--", "true"], "--hang-after inf: not a finite number."),
        (["run", "--on-hang", "sing", "--", "true"], "--on-hang sing: it is one of report, kill."),
        (["run", "--prometheus", "9400", "--", "true"], "--prometheus needs ddpdoctor installed"),
        (["run", "--profile-steps", "9", "--", "true"], "--profile-steps 9: give the first step"),
    ],
)
def test_what_it_cannot_do_it_says_in_a_sentence(bundle, arguments, words):
    done = started(bundle, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (bundle.parent / "ddpdoctor-runs").exists()


def test_it_says_what_it_was_made_of(bundle):
    done = started(bundle, "--version")
    made = json.loads(zipfile.ZipFile(bundle).read("ddpdoctor/bundle/made.json"))
    assert done.stdout.startswith("ddpdoctor ")
    assert made["sha256"] in done.stdout
    assert "nvidia-ml-py" in done.stdout
    assert "dd.pyz run [OPTIONS]" in started(bundle, "run", "--help").stdout
    assert "dd.pyz run" in started(bundle).stdout


def test_it_reads_the_options_that_run_reads(bundle):
    rows = json.loads(zipfile.ZipFile(bundle).read("ddpdoctor/bundle/made.json"))["options"]
    lines = [
        ["torchrun", "--out", "x", "train.py"],
        ["--out", "a", "--out", "b", "--", "python", "-q"],
        ["-q", "--no-profile", "--no-telemetry", "--hang-after", "7", "--on-hang", "kill", "job"],
        ["--telemetry-interval=0.5", "--max-trace-mb=7", "--profile-steps", "20:25", "--", "job", "--", "-x"],
        ["--no-analysis", "--no-source-text", "--prometheus", "9400", "job"],
    ]
    for line in lines:
        expected = dict(run_command.make_context("run", list(line)).params)
        values, job = parsed(line, rows)
        assert [*expected.pop("job")] == job
        assert values == expected
    with pytest.raises(DdpDoctorError):
        parsed(["--out"], rows)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_the_user_has_below_a_bundle_stays(tmp_path, monkeypatch):
    folder = bundled(tmp_path / "folder")
    own = {
        "train.py": "mine",
        "src/model.py": "mine, too",
        "ddpdoctor/left.py": "here as well",
        "ddpdoctor/notes": "",
    }
    for name, text in own.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    bundled(folder)
    assert {name: (folder / name).read_text() for name in own} == own
    # What another version wrote and this one does not goes, but not once somebody changed it.
    monkeypatch.setattr(build, "_EXCLUDED", (*build._EXCLUDED, "hook/lifetime.py"))
    bundled(folder)
    assert not (folder / "ddpdoctor/hook/lifetime.py").exists()
    assert {name: (folder / name).read_text() for name in own} == own
    (folder / "ddpdoctor/plain.py").write_text("changed")
    monkeypatch.setattr(build, "_EXCLUDED", (*build._EXCLUDED, "plain.py"))
    before = content(folder)
    with pytest.raises(DdpDoctorError, match=r"plain\.py was changed after ddpdoctor wrote it"):
        bundled(folder)
    assert content(folder) == before


def test_a_list_that_leads_out_of_the_folder_removes_nothing(tmp_path):
    folder = bundled(tmp_path / "folder")
    (tmp_path / "victim.py").write_text("")
    (folder / "link").symlink_to(tmp_path)
    empty = hashlib.sha256(b"").hexdigest()
    with (folder / LIST).open("a") as out:
        out.write(f"{empty}  ../victim.py\n{empty}  {tmp_path}/victim.py\n")
    bundled(folder)
    with (folder / LIST).open("a") as out:
        out.write(f"{empty}  link/victim.py\n")
    with pytest.raises(DdpDoctorError, match="name another folder"):
        bundled(folder)
    assert (tmp_path / "victim.py").exists()


def test_a_folder_with_something_in_it_does_not_become_a_bundle(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("")
    with pytest.raises(DdpDoctorError, match="no bundle"):
        bundled(tmp_path / "mine")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["train.py"]


def test_where_the_disk_was_full_the_next_call_goes_on(tmp_path, monkeypatch):
    left = iter([True] * 25)

    def filling(place, data, judge, mode):
        if not next(left, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(place, data, judge, mode)

    put = folders.write_checked
    with (
        monkeypatch.context() as patch,
        pytest.raises(DdpDoctorError, match=r"cannot write .*: No space left"),
    ):
        patch.setattr(folders, "write_checked", filling)
        write_bundle(tmp_path / "b", [], "")
    write_bundle(tmp_path / "b", [], "")
    assert (tmp_path / "b" / "__main__.py").is_file()


def test_a_python_that_is_too_old_is_told_so(bundle):
    if not runs("python3.8"):
        pytest.skip("no Python 3.8 here")
    done = started(bundle, "run", "--", "true", python=("python3.8",))
    assert done.returncode == 1
    assert done.stderr == "ddpdoctor: Python 3.8 is too old to record with; 3.9 or newer is needed.\n"


def test_an_archive_that_is_no_bundle_or_was_added_to_is_not_replaced(bundle, tmp_path):
    file = tmp_path / "own.pyz"
    file.write_bytes(b"notes")
    with pytest.raises(DdpDoctorError, match="not a bundle that ddpdoctor wrote"):
        write_bundle(file, [], "")
    assert file.read_bytes() == b"notes"
    shutil.copy(bundle, file)
    bundled(file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("own.py", "mine")
    before = file.read_bytes()
    with pytest.raises(DdpDoctorError, match="ddpdoctor wrote"):
        bundled(file)
    assert file.read_bytes() == before


def test_nothing_is_written_into_a_recorded_run(tmp_path):
    run = shutil.copytree(FIXTURE, tmp_path / "run")
    for out in (run / "x.pyz", run / "ranks" / "x"):
        with pytest.raises(DdpDoctorError, match="recorded run"):
            write_bundle(out, [], "")
    with pytest.raises(DdpDoctorError, match="name one"):
        write_bundle(Path("-"), [], "")
