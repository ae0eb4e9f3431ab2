"""Memory of a recording that is full, or is taken away: what can be kept is, and of the rest it is said which steps they were."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from ddpdoctor.rundir import spool as spool_module
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.liveness import is_over
from ddpdoctor.rundir.segments import SHORT_LIMIT_BYTES, SHORT_SEGMENT_BYTES, UNNAMED_BYTES
from ddpdoctor.rundir.spool import Spool, make_spool_root
from tests.fuzz.spools import failures
from tests.launch.launched import make_run

STEPS = "steps.jsonl"


def line(step: int, filler: int = 100) -> bytes:
    return b'{"step":%d,"t":[1,2],"x":"%s"}\n' % (step, b"x" * filler)


class Rank:
    """One that writes steps, without torch."""

    def __init__(self, tmp_path: Path) -> None:
        self.run = make_run(tmp_path / "run")
        self.root = Path(make_spool_root(str(self.run)))
        self.spool = Spool(str(self.root), 0, str(self.run))
        self.step = 0
        self.lost: list[int] = []

    def take(self, steps: int, filler: int = 100) -> None:
        for _ in range(steps):
            if not self.spool.write(STEPS, line(self.step, filler)):
                self.lost.append(self.step)
            self.step += 1

    def copy(self) -> None:
        drain(self.spool.directory)
        assert not self.spool.restore()

    def text(self) -> list[dict[str, object]]:
        data = (self.run / "ranks" / "00000" / STEPS).read_bytes()
        assert data.endswith(b"\n")
        return [json.loads(each) for each in data.splitlines()]

    def steps(self) -> list[int]:
        return [each["step"] for each in self.text() if "step" in each]

    def notes(self) -> list[str]:
        return [each["note"] for each in self.text() if each.get("note")]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    place = tmp_path / "storage"
    place.mkdir()
    monkeypatch.setattr("ddpdoctor.rundir.spool._base", lambda: str(place))
    return Rank(tmp_path)


def remove_root(rank: Rank) -> None:
    shutil.rmtree(rank.root)


def remove_spool(rank: Rank) -> None:
    shutil.rmtree(rank.spool.directory)


def remove_segments(rank: Rank) -> None:
    """As a cleaner does that looks at each file's age."""
    for path in Path(rank.spool.directory).glob(f"{STEPS}.*"):
        path.unlink()


def remove_documents(rank: Rank) -> None:
    for path in Path(rank.spool.directory).iterdir():
        if not path.name.startswith(STEPS):
            path.unlink()


WAYS = [remove_root, remove_spool, remove_segments, remove_documents]


@pytest.mark.parametrize("remove", WAYS)
def test_a_spool_that_is_removed_is_made_again_with_what_it_holds(
    rank: Rank, remove: Callable[[Rank], None]
) -> None:
    rank.take(20)
    rank.copy()
    assert not rank.spool.restore(), "nothing is missing"
    rank.take(20)
    remove(rank)
    rank.take(5)
    assert rank.spool.restore() and not rank.spool.restore()
    rank.take(20)
    rank.copy()
    assert rank.steps() == list(range(65)) and not rank.notes() and not rank.lost
    assert not is_over(rank.spool.directory)
    rank.take(10)
    rank.copy()
    rank.spool.close()
    assert not rank.spool.restore(), "it has ended"
    assert rank.steps() == list(range(75))
    assert os.listdir(rank.run / "ranks") == ["00000"], "it is the same recording"


@pytest.mark.parametrize("remove", [remove_root, remove_spool])
def test_a_removed_spool_takes_no_step_that_follows(rank: Rank, remove: Callable[[Rank], None]) -> None:
    """The rank fills several segments before its writer thread notices."""
    rank.take(20)
    rank.copy()
    remove(rank)
    rank.take(2000)
    assert rank.spool.restore() and not rank.lost
    rank.take(2000)
    rank.copy()
    assert rank.steps() == list(range(4020)) and not rank.notes() and not rank.lost
    remove(rank)
    rank.take(20_000)
    assert rank.spool.restore() and rank.lost, "no more memory than one segment of a removed spool"
    rank.take(20)
    rank.copy()
    assert rank.steps() == [step for step in range(rank.step) if step not in {*rank.lost}]


@pytest.mark.parametrize("stream", ["memory.jsonl", STEPS])
def test_another_stream_of_a_removed_spool_takes_no_step(rank: Rank, stream: str) -> None:
    """It is new, or its memory is full."""
    rank.take(20)
    rank.copy()
    remove_root(rank)
    assert rank.spool.write(stream, b'{"note":"m"}\n')
    for _ in range(3):
        rank.spool.write("samples.jsonl", b"x" * (UNNAMED_BYTES // 2) + b"\n")
    rank.take(2000)
    assert rank.spool.restore() and not rank.lost
    rank.copy()
    assert rank.steps() == list(range(2020))


def fails_once(monkeypatch: pytest.MonkeyPatch, name: str, error: OSError) -> None:
    """The next use of what the spool's module calls ``name`` fails."""
    real = getattr(spool_module, name)

    def fail(folder: int) -> NoReturn:
        monkeypatch.setattr(spool_module, name, real)
        raise error

    monkeypatch.setattr(spool_module, name, fail)


def test_a_file_that_vanishes_while_room_is_counted_is_no_removal(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank then writes to memory of its own, whose name no file has; nothing is lost if no line follows."""
    rank.take(400)
    fails_once(monkeypatch, "room_for_segment", FileNotFoundError(errno.ENOENT, "vanished"))
    rank.take(520)
    assert not rank.lost and rank.spool.restore() and not rank.spool.restore()
    rank.spool.close()
    drain(rank.spool.directory)
    assert rank.steps() == list(range(920)) and not rank.notes()


def test_a_spool_is_restored_again_after_a_failure(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.take(20)
    rank.copy()
    remove_spool(rank)
    rank.take(2000)
    fails_once(monkeypatch, "WriterMark", OSError(errno.ENOSPC, "full"))
    with pytest.raises(OSError, match="full"):
        rank.spool.restore()
    assert rank.spool.restore() and not rank.spool.restore() and not rank.lost
    rank.copy()
    assert rank.steps() == list(range(2020))
    rank.spool.close()


def test_what_was_lost_is_said_in_its_place(rank: Rank) -> None:
    """Full segments that were removed before they were copied: nobody has their memory any more."""
    rank.take(20)
    rank.copy()
    rank.take(2000)
    remove_root(rank)
    assert rank.spool.restore()
    rank.take(20)
    rank.copy()
    rank.copy()
    (note,) = rank.notes()
    steps = rank.steps()
    missing = sorted({*range(rank.step)} - {*steps})
    assert steps == sorted(set(steps)) and missing[0] == 20 and steps[-1] == rank.step - 1
    assert note.startswith(f"Steps {missing[0]} to {missing[-1]} were lost: their memory was removed")
    rank.take(20)
    rank.copy()
    assert rank.steps()[-1] == rank.step - 1 and len(rank.notes()) == 1


@pytest.mark.parametrize("filler", [100, 5000])
def test_a_log_that_somebody_removes_is_not_written_again_and_again(rank: Rank, filler: int) -> None:
    """What follows was copied anew each second, because its position was taken from the file's size."""
    rank.take(2000, filler)
    rank.copy()
    (rank.run / "ranks" / "00000" / STEPS).unlink()
    for _ in range(3):
        rank.take(700, filler)
        rank.copy()
    steps = rank.steps()
    assert steps == sorted(set(steps)) and steps[-1] == rank.step - 1
    (note,) = rank.notes()
    assert note.startswith(f"Steps 0 to {steps[0] - 1} were lost")
    assert (rank.run / "ranks" / "00000" / STEPS).stat().st_size < (filler + 60) * 6000


def with_room(monkeypatch: pytest.MonkeyPatch, free_mb: float, whole_mb: float = 64) -> None:
    pages = 256
    storage = SimpleNamespace(
        f_bavail=int(free_mb * pages), f_blocks=int(whole_mb * pages), f_frsize=4096, f_bsize=4096
    )
    monkeypatch.setattr(spool_module.os, "statvfs", lambda path: storage)


def test_in_short_storage_records_pass_through_a_little(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's 64 MB, of which the job has filled 58: nothing was recorded at all."""
    with_room(monkeypatch, 6)
    for _ in range(20):
        rank.take(100)
        rank.copy()
        held = sum(path.stat().st_size for path in Path(rank.spool.directory).glob(f"{STEPS}.*"))
        assert held <= 32 * 1024
    assert rank.steps() == list(range(2000)) and not rank.lost


def test_what_storage_has_left_is_for_the_job(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first segment, too, asks whether there is room; what was dropped is counted, with what to do."""
    with_room(monkeypatch, 0.5)
    rank.take(5)
    assert not list(Path(rank.spool.directory).glob(f"{STEPS}.*"))
    assert rank.spool.dropped == 5 and rank.lost == [0, 1, 2, 3, 4]
    assert "shm-size" in str(rank.spool.error) and "0.5 of 67 MB are free" in str(rank.spool.error)
    with_room(monkeypatch, 60)
    rank.spool._no_room_until_s.clear()
    rank.take(5)
    rank.copy()
    assert rank.steps() == [5, 6, 7, 8, 9]


def test_no_more_than_a_little_waits_in_short_storage(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, 6)
    rank.take(5000)
    held = sum(path.stat().st_size for path in Path(rank.spool.directory).glob(f"{STEPS}.*"))
    assert rank.lost and held <= SHORT_LIMIT_BYTES + 2 * SHORT_SEGMENT_BYTES


def test_rank_json_has_room_of_its_own(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which steps found none."""
    before = {path.name for path in Path(rank.spool.directory).iterdir()}
    replace = spool_module.replace_file

    def full(name: str, inside: int, data: bytes) -> None:
        if spool_module.identity_of(spool_module.RESERVE_FILE, inside) is not None or name == "reserve":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(name, inside, data)

    monkeypatch.setattr(spool_module, "replace_file", full)
    with pytest.raises(OSError, match="No space"):
        rank.spool.keep("progress.json", b"{}")
    rank.spool.keep("rank.json", b"{}")
    after = {path.name for path in Path(rank.spool.directory).iterdir()}
    assert after == before - {"reserve"} | {"rank.json"}
    monkeypatch.undo()
    rank.spool.keep("rank.json", b"{}")
    assert (Path(rank.spool.directory) / "reserve").exists()


def test_a_start_without_any_room_leaves_nothing(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spool_module, "replace_file", full)
    with pytest.raises(OSError, match="No space"):
        Spool(str(rank.root), 1, str(rank.run))
    assert not list(rank.root.glob("00001*"))


def test_whatever_is_removed_and_filled_whenever(tmp_path: Path) -> None:
    """No step twice, none out of order, and each that is missing was counted by the rank or is named in a note; see tests/fuzz."""
    assert not failures(1, 5, tmp_path)
