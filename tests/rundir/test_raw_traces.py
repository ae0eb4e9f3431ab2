"""The uncompressed trace: nobody else's links are followed, and what a killed rank left is found again."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.hook.profiling import trace_file
from ddpdoctor.rundir.handover import HANDED_OVER, clear_raw_folders, raw_folder
from ddpdoctor.rundir.layout import run_id
from ddpdoctor.rundir.spool import make_spool_root
from tests.launch.launched import make_run

MINE, OTHERS = "0123456789abcdef", "fedcba9876543210"


def killed(base: Path, run_id: str = MINE) -> Path:
    """What a rank leaves that is killed while it saves."""
    before = set(base.iterdir())
    child = os.fork()
    if child == 0:
        with raw_folder(str(base), run_id) as folder:
            Path(folder.place, "trace.json.tmp").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = set(base.iterdir()) - before
    assert left / "trace.json.tmp" in left.iterdir()
    return left


def aged(folder: Path) -> Path:
    day_ago_s = time.time() - 25 * 3600
    for path in (*folder.iterdir(), folder):
        os.utime(path, (day_ago_s, day_ago_s))
    return folder


def test_the_folder_is_private_and_goes(tmp_path) -> None:
    with raw_folder(str(tmp_path), MINE) as folder:
        (made,) = tmp_path.iterdir()
        assert made.stat().st_mode & 0o777 == 0o700
        moved, planted = tmp_path / "moved", tmp_path / "planted"
        made.rename(moved)
        planted.mkdir()
        made.symlink_to(planted)
        Path(folder.place, "trace.json").write_text("{}")
        assert (moved / "trace.json").exists() and not list(planted.iterdir())
        made.unlink()
        moved.rename(made)
    assert list(tmp_path.iterdir()) == [planted]


def test_what_the_killed_ranks_of_a_run_left_goes_with_it(tmp_path) -> None:
    mine, others, old = killed(tmp_path), killed(tmp_path, OTHERS), aged(killed(tmp_path, OTHERS))
    with raw_folder(str(tmp_path), MINE):
        clear_raw_folders([str(tmp_path), str(tmp_path / "none")], MINE)
        assert not mine.exists() and not old.exists()
        assert len(list(tmp_path.iterdir())) == 2 and others.exists(), "a living rank's, and another run's"


def test_only_ones_own_folders_are_cleared(tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    aged(precious)
    link = tmp_path / f"ddpdoctor-raw-{MINE}-4194303-link"
    link.symlink_to(precious)
    open_to_others = aged(killed(tmp_path))
    open_to_others.chmod(0o777)
    file = tmp_path / f"ddpdoctor-raw-{MINE}-4194303-file"
    file.write_text("")
    with_folder = killed(tmp_path)
    (with_folder / "inner").mkdir()
    theirs = killed(tmp_path)
    if os.getuid() == 0:
        os.chown(theirs, 54321, 54321)
    clear_raw_folders([str(tmp_path)], MINE)
    assert (precious / "file").read_text() == "keep" and link.is_symlink()
    assert open_to_others.exists() and file.exists() and (with_folder / "inner").exists()
    assert theirs.exists() == (os.getuid() == 0)


def test_what_was_handed_over_stays_as_long_as_its_spool(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    with raw_folder(str(tmp_path), run_id(str(run))) as folder, folder.handing_over():
        pass
    clear_raw_folders([str(tmp_path)], run_id(str(run)))
    assert os.path.exists(folder.path)
    os.rmdir(root)
    clear_raw_folders([str(tmp_path)], run_id(str(run)))
    assert not os.path.exists(folder.path)


@pytest.mark.parametrize(("ranks", "place"), [(1, "first"), (4, "second"), (8, None)])
def test_the_ranks_of_a_host_share_what_is_free(monkeypatch, ranks: int, place: str | None) -> None:
    free = {"first": 4_000_000, "second": 16_000_000}
    monkeypatch.setattr(
        trace_file.os, "statvfs", lambda path: SimpleNamespace(f_bavail=free[path], f_frsize=1)
    )
    if place is None:
        with pytest.raises(trace_file.TooLargeError, match="for each of the 8 ranks of this host"):
            trace_file.folder_with_space(2_000_000, tuple(free), ranks)
    else:
        assert trace_file.folder_with_space(2_000_000, tuple(free), ranks) == place


def test_it_is_marked_before_anybody_else_is_told_of_it(tmp_path) -> None:
    """Who compresses it may be done, and remove the folder, before the rank has come back from telling."""
    with raw_folder(str(tmp_path), MINE) as folder, folder.handing_over():
        assert os.listdir(folder.place).count(HANDED_OVER) == 1
        shutil.rmtree(folder.path)
    assert list(tmp_path.iterdir()) == []


def test_one_that_could_not_be_handed_over_goes(tmp_path) -> None:
    with (
        pytest.raises(OSError, match="full"),
        raw_folder(str(tmp_path), MINE) as folder,
        folder.handing_over(),
    ):
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
