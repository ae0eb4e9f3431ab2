"""What somebody else has put in the place of our files is neither read nor written through."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.launch.directory import JobIdentity, open_run
from ddpdoctor.launch.leftovers import clear_spools_of_earlier_runs, drain_spools, drain_stale_spools
from ddpdoctor.rundir.draining import discard, drain, recover
from ddpdoctor.rundir.layout import run_id
from ddpdoctor.rundir.owned import UntrustedFileError
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.rundir.spool import Spool, make_spool_root, spool_root
from tests.launch.launched import DEAD, left_behind, make_run

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
PROFILE = "what the victim's shell reads\n"
LINE = b'{"step":0,"t":[1,2]}\n'


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home folder with a file that somebody would like to write to, and a run of the same user beside it."""
    home, storage = tmp_path / "home", tmp_path / "storage"
    home.mkdir()
    storage.mkdir()
    # Not where runs of others, and other tests, have theirs.
    monkeypatch.setattr("ddpdoctor.rundir.spool._base", lambda: str(storage))
    for name in (".profile", "steps.jsonl", "rank.json", "steps.jsonl.tmp"):
        (home / name).write_text(PROFILE)
    make_run(tmp_path / "run")
    return home


def untouched(home: Path) -> bool:
    return {path.read_text() for path in home.iterdir()} == {PROFILE} and len(list(home.iterdir())) == 4


def planted(root: Path, target: Path, stream: str) -> Path:
    """A spool as an attacker would make it: a stream, a document and a target of his choice, two days old."""
    spool = root / f"00000-{DEAD}"
    spool.mkdir(parents=True)
    (spool / "target").write_text(str(target))
    (spool / f"{stream}.000000000000000").write_bytes(b"evil\n")
    (spool / "rank.json").write_text('{"evil": 1}')
    root.chmod(0o700)
    spool.chmod(0o700)
    return spool


def owned_by_a_stranger(root: Path) -> None:
    for path in (*root.rglob("*"), root):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def open_to_others(root: Path) -> None:
    root.chmod(0o777)


def a_link(root: Path) -> None:
    root.rename(root.with_name(f"{root.name}x"))
    root.symlink_to(root.with_name(f"{root.name}x"))


def spools_that_are_links(root: Path) -> None:
    (spool,) = root.iterdir()
    spool.rename(root.with_name(f"{root.name}y"))
    spool.symlink_to(root.with_name(f"{root.name}y"))


def age(root: Path) -> None:
    two_days_ago = time.time() - 2 * 24 * 3600
    for path in (*root.rglob("*"), root):
        os.utime(path, (two_days_ago, two_days_ago), follow_symlinks=False)


def at_the_end_of_any_run(run: Path, root: Path) -> None:
    drain_stale_spools(root.with_name(f"ddpdoctor-{os.getuid()}-1-{'0' * 16}"))


def at_the_end_of_its_run(run: Path, root: Path) -> None:
    drain_spools(root)


def when_its_run_is_read(run: Path, root: Path) -> None:
    recover(str(run))
    RunDirectory.open(str(run))


ENTRANCES = [at_the_end_of_any_run, at_the_end_of_its_run, when_its_run_is_read]
DISGUISES = [
    pytest.param(owned_by_a_stranger, marks=needs_root),
    open_to_others,
    a_link,
    spools_that_are_links,
]


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_root_of_somebody_else_is_left_alone(tmp_path, home, disguise, entrance) -> None:
    """The name is right, and so is the target: but whoever could write it could have written all of it."""
    run = tmp_path / "run"
    (run / "ranks" / "00000").mkdir(parents=True)
    root = Path(spool_root(str(run)))
    spool = planted(root, run / "ranks" / "00000", "steps.jsonl")
    disguise(root)
    age(root)
    entrance(run, root)
    assert not list((run / "ranks" / "00000").iterdir())
    assert os.path.lexists(spool)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    ("name", "stream"), [("", ".profile"), ("", "steps.jsonl"), ("run/ranks/../../home", "steps.jsonl")]
)
@pytest.mark.parametrize("of_the_run", [True, False])
def test_a_target_outside_of_a_run_directory(tmp_path, home, name, stream, of_the_run, entrance) -> None:
    run = tmp_path / "run"
    root = Path(spool_root(str(run)))
    if not of_the_run:
        root = root.with_name(f"ddpdoctor-{os.getuid()}-1-x")
    planted(root, tmp_path / name if name else home, stream)
    age(root)
    entrance(run, root)
    assert untouched(home) and [path.name for path in run.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("stream", [".profile", "manifest.json", "trace.json.gz"])
def test_only_what_a_rank_writes_is_copied(tmp_path, home, stream) -> None:
    run = tmp_path / "run"
    spool = left_behind(run)
    (spool / f"{stream}.000000000000000").write_bytes(b"evil\n")
    (spool / "manifest.json").write_text("{}")
    drain(str(spool))
    assert [path.name for path in (run / "ranks" / "00000").iterdir()] == ["steps.jsonl"]
    assert "run_id" in (run / "manifest.json").read_text()


def link_its_folder(run: Path, home: Path) -> None:
    (run / "ranks" / "00000").rmdir()
    (run / "ranks" / "00000").symlink_to(home)


def link_all_ranks(run: Path, home: Path) -> None:
    shutil.rmtree(run / "ranks")
    (home.parent / "elsewhere").mkdir()
    (home.parent / "elsewhere" / "00000").symlink_to(home)
    (run / "ranks").symlink_to(home.parent / "elsewhere")


def link_its_file(run: Path, home: Path) -> None:
    (run / "ranks" / "00000" / "steps.jsonl").symlink_to(home / ".profile")


def name_its_file_twice(run: Path, home: Path) -> None:
    (run / "ranks" / "00000" / "steps.jsonl").hardlink_to(home / ".profile")


def a_pipe(run: Path, home: Path) -> None:
    os.mkfifo(run / "ranks" / "00000" / "steps.jsonl")


@pytest.mark.parametrize(
    "place", [link_its_folder, link_all_ranks, link_its_file, name_its_file_twice, a_pipe]
)
def test_nothing_is_written_through_what_lies_in_the_run_directory(tmp_path, home, place: Callable) -> None:
    run = tmp_path / "run"
    spool = left_behind(run, line=LINE)
    place(run, home)
    sentences = drain_spools(spool.parent)
    assert untouched(home)
    assert len(sentences) == 1 and str(run) in sentences[0]
    assert list(spool.glob("steps.jsonl.*")), "it stays until the place is mended"


@needs_root
def test_a_run_directory_that_somebody_else_put_there(tmp_path, home) -> None:
    run = tmp_path / "run"
    spool = left_behind(run, line=LINE)
    identity = run_id(str(run))
    shutil.rmtree(run)
    make_run(run, run_id=identity)
    (run / "ranks" / "00000").mkdir(parents=True)
    for path in (*run.rglob("*"), run):
        os.chown(path, STRANGER, STRANGER)
    with pytest.raises(UntrustedFileError, match="another user"):
        drain(str(spool))
    assert not list((run / "ranks" / "00000").iterdir())


def test_a_run_that_says_nothing_of_its_id_is_another_run(tmp_path, home) -> None:
    run = tmp_path / "run"
    spool = left_behind(run, line=LINE)
    (run / "manifest.json").write_text('{"schema": "ddpdoctor.run/1"}')
    drain_spools(spool.parent)
    assert not list((run / "ranks" / "00000").iterdir())


def test_a_root_is_made_for_its_user_alone(tmp_path, home) -> None:
    os.umask(os.umask(0))
    root = Path(make_spool_root(str(tmp_path / "run")))
    spool = Spool(str(root), 0, str(tmp_path / "run"))
    spool.write("steps.jsonl", LINE)
    spool.keep("rank.json", b"{}")
    modes = {path.stat().st_mode & 0o777 for path in (root, Path(spool.directory))}
    assert modes == {0o700}
    assert not [path for path in Path(spool.directory).iterdir() if path.stat().st_mode & 0o077]
    root.chmod(0o755)
    with pytest.raises(UntrustedFileError):
        Spool(str(root), 1, str(tmp_path / "run"))
    root.chmod(0o700)


def in_the_way(root: Path, what: str) -> None:
    if what == "file":
        root.write_text("")
    elif what == "link":
        root.symlink_to(root.parent)
    else:
        root.mkdir(0o755 if what == "open" else 0o700)
        os.chown(root, 54321 if what == "other user" else -1, -1)


@pytest.mark.parametrize("what", ["file", "link", "open", "other user"])
def test_whoever_makes_the_root_first_keeps_nobody_from_recording(tmp_path, monkeypatch, what) -> None:
    if what == "other user" and os.getuid():
        pytest.skip("only root may give a folder away")
    shared = tmp_path / "temporary"
    shared.mkdir()
    monkeypatch.setattr("ddpdoctor.rundir.spool._base", lambda: str(shared))
    run = make_run(tmp_path / "run")
    expected = Path(spool_root(str(run)))
    in_the_way(expected, what)
    root = make_spool_root(str(run))
    assert root != str(expected) and make_spool_root(str(run)) == root, (
        "all launchers of the host find the same"
    )
    spool = Spool(root, 0, str(run))
    spool.write("steps.jsonl", LINE)
    assert recover(str(run)) == [] and (run / "ranks" / "00000" / "steps.jsonl").read_bytes() == LINE
    spool.close()


def test_hosts_that_share_a_folder_for_temporary_files_share_no_root(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ddpdoctor.rundir.spool._base", lambda: str(tmp_path))
    roots = set()
    for boot in ("here", "there"):
        monkeypatch.setattr("ddpdoctor.rundir.spool.boot_id", lambda boot=boot: boot)
        roots.add(make_spool_root(str(tmp_path / "run")))
    assert len(roots) == 2


def test_spools_of_earlier_runs_that_are_not_ours_stay(tmp_path, home) -> None:
    run = tmp_path / "run"
    root = Path(spool_root(str(run)))
    other = root.with_name(f"{root.name[:-16]}{'f' * 16}")
    planted(other, run / "ranks" / "00000", "steps.jsonl")
    (other / "keepsake").symlink_to(home)
    open_to_others(other)
    clear_spools_of_earlier_runs(run, root)
    assert len(list(other.iterdir())) == 2 and untouched(home)


def test_a_spool_is_deleted_with_our_files_only(tmp_path, home) -> None:
    spool = left_behind(tmp_path / "run")
    (spool / "thesis.txt").write_text("years of work")
    with pytest.raises(OSError):
        discard(str(spool))
    assert [path.name for path in spool.iterdir()] == ["thesis.txt"]


def test_runs_beside_a_read_only_folder_are_private(tmp_path, monkeypatch) -> None:
    """Where the working directory takes nothing, runs go to the folder for temporary files, which is everybody's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.chdir(tmp_path)
    document = {"schema": "ddpdoctor.run/1", "host": "here", "pid": os.getpid()}
    place = tmp_path / f"ddpdoctor-runs-{os.getuid()}"
    first = open_run(None, "first", JobIdentity(None, None), document)
    assert first.run.parent == place and place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o777)
    second = open_run(None, "second", JobIdentity(None, None), document)
    assert second.run.parent != place and second.run.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads((second.run / "manifest.json").read_text())["host"] == "here"
