"""Who still writes to a spool: what a lock says, what a process id says, and what neither says alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpdoctor.rundir.draining import discard, drain
from ddpdoctor.rundir.host_files import HostLock, copier_lock_is_held
from ddpdoctor.rundir.liveness import CLOSED_S, LOCK_FILE, WRITER_FILE, State, is_over, writer_of
from ddpdoctor.rundir.spool import Spool, make_spool_root
from tests.hook.recording import REPOSITORY
from tests.launch.launched import DEAD, left_behind, make_run, written_by

pytestmark = pytest.mark.usefixtures("storage")


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "storage"
    place.mkdir()
    monkeypatch.setattr("ddpdoctor.rundir.spool._base", lambda: str(place))
    return place


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """A child that has done ``work`` and lives until it is killed; it is a zombie, or gone where somebody waits for it, then."""
    told, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            os.write(said, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(told, 1) == b"x"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(said)


def spool_of(run: Path) -> str:
    (found,) = [path for path in Path(make_spool_root(str(run))).iterdir() if path.is_dir()]
    return str(found)


def test_a_rank_holds_its_spool_until_it_ends_and_a_zombie_does_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    with forked(lambda: Spool(root, 0, str(run))) as child:
        spool = spool_of(run)
        assert writer_of(spool) == (State.WRITING, child)
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert writer_of(spool) == (State.OVER, child) and is_over(spool)


def test_a_job_that_closes_all_descriptors_goes_on_writing(tmp_path: Path) -> None:
    """As one that daemonises does; the lock is lost, and its process is seen."""
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    ready, reader = os.pipe()

    def work() -> None:
        Spool(root, 0, str(run))
        os.closerange(3, ready)

    with forked(work) as child:
        spool = spool_of(run)
        assert writer_of(spool) == (State.WRITING, child) and not is_over(spool)
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert is_over(spool)
    os.close(ready)
    os.close(reader)


def test_what_a_rank_has_forked_does_not_hold_its_spool(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    children: list[int] = []
    told, said = os.pipe()

    def work() -> None:
        Spool(root, 0, str(run))
        worker = os.fork()
        if worker == 0:
            signal.pause()
        os.write(said, worker.to_bytes(4, "big"))

    with forked(work) as child:
        children.append(int.from_bytes(os.read(told, 4), "big"))
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert is_over(spool_of(run))
    os.kill(children[0], signal.SIGKILL)
    os.close(told)
    os.close(said)


TABLE = [
    ("recycled number", os.getpid(), {"started": 1}, State.OVER),
    ("dead", DEAD, {}, State.OVER),
    ("another namespace, a number that exists here", os.getpid(), {"namespace": 1}, State.UNKNOWN),
    ("another namespace, a number that does not", DEAD, {"namespace": 1}, State.UNKNOWN),
    ("said so", DEAD, {"namespace": 1, "closed_ns": 1}, State.OVER),
    ("before this host was started", os.getpid(), {"boot": "earlier"}, State.OVER),
    ("another host", os.getpid(), {"boot": "other", "host": "elsewhere"}, State.UNKNOWN),
]


@pytest.mark.parametrize(
    ("pid", "document", "state"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_where_nobody_holds_the_lock(
    tmp_path: Path, pid: int, document: dict[str, object], state: State
) -> None:
    spool = left_behind(make_run(tmp_path / "run"), pid=pid)
    written_by(spool, pid, **document)
    assert writer_of(str(spool)).state is state
    assert is_over(str(spool)) == (state is State.OVER)


def test_without_a_document_nothing_is_known_for_long(tmp_path: Path) -> None:
    """It is being made, or was damaged; the launcher's manifest and a minute decide."""
    run = make_run(tmp_path / "run")
    spool = left_behind(run)
    for name in (WRITER_FILE, LOCK_FILE):
        (spool / name).unlink()
    assert writer_of(str(spool)) == (State.UNKNOWN, 0) and not is_over(str(spool))
    (run / "manifest.json").write_text(json.dumps({"schema": "ddpdoctor.run/1", "ended_ns": 1}))
    assert not is_over(str(spool))
    for path in (*spool.iterdir(), spool):
        os.utime(path, (1, 1))
    assert is_over(str(spool))


def test_a_recording_that_ended_before_its_process_is_over(tmp_path: Path) -> None:
    """A job that makes and destroys its process group a thousand times leaves no thousand spools, and the last words of each are
    there for whoever watches."""
    run = make_run(tmp_path / "run")
    spool = Spool(make_spool_root(str(run)), 0, str(run))
    spool.close()
    assert not is_over(spool.directory)
    document = Path(spool.directory) / WRITER_FILE
    said = json.loads(document.read_text())
    document.write_text(json.dumps({**said, "closed_ns": said["closed_ns"] - int((CLOSED_S + 1) * 1e9)}))
    assert is_over(spool.directory)


@pytest.mark.parametrize("count", [60, pytest.param(1100, marks=pytest.mark.extended)])
def test_many_recordings_of_one_process_have_names_of_their_own(tmp_path: Path, count: int) -> None:
    """As of a job that makes its process group anew for each evaluation; whoever watches knows a spool by its name."""
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    names = set()
    for _ in range(count):
        spool = Spool(root, 7, str(run))
        drain(spool.directory)
        spool.close()
        discard(spool.directory)
        names.add(os.path.basename(spool.directory))
    assert len(names) == len(os.listdir(run / "ranks")) == count


def test_descriptors_that_the_job_has_closed_and_used_again_are_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    program = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from ddpdoctor.rundir.spool import Spool
spool = Spool({root!r}, 0, {str(run)!r})
spool.write("steps.jsonl", b"x\\n")
os.closerange(3, 256)
mine = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
assert spool.restore() and not spool.restore(), "the lock was lost"
spool.close()
for each in mine:
    os.fstat(each)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_who_asks_for_the_copier_is_not_taken_for_it(tmp_path: Path) -> None:
    """Two ranks that look at the same moment once took each other for it, and neither copied."""
    root = make_spool_root(str(make_run(tmp_path / "run")))
    first = HostLock(root)
    assert first.take()
    first.release()

    def ask() -> None:
        asking = os.getpid()
        if os.fork() == 0:
            while os.getppid() == asking:
                copier_lock_is_held(root)
            os._exit(0)

    with forked(ask):
        deadline_s = time.monotonic() + 0.5
        while time.monotonic() < deadline_s:
            assert not copier_lock_is_held(root)


def test_a_lock_whose_file_was_removed_is_taken_again(tmp_path: Path) -> None:
    root = Path(make_spool_root(str(make_run(tmp_path / "run"))))
    copier = HostLock(str(root))
    assert copier.take()
    (root / "storage").unlink()
    assert copier.take() and (root / "storage").exists()
    assert forked_says(lambda: copier_lock_is_held(str(root)))
    copier.release()


def forked_says(question: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(3 if question() else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
