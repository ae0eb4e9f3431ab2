"""Whatever does not answer, a lock, a file system, a thread of ours: the job ends, as it would, and nothing is lost."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpdoctor.launch.helper import StorageTimeoutError, run_with_timeout
from ddpdoctor.launch.leftovers import drain_spools
from ddpdoctor.rundir.draining import BusyError, drain, recover
from ddpdoctor.rundir.liveness import LOCK_FILE
from ddpdoctor.rundir.spool import spool_root
from tests.hook.recording import JOBS, forked
from tests.waiting import until

from .launched import (
    DDPDOCTOR_RUN,
    TINY,
    age,
    left_behind,
    make_run,
    run_under,
    running,
    steps_taken,
)

pytestmark = pytest.mark.usefixtures("no_spool_stays")
needs_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="a frozen file system needs root and FUSE"
)
ENDS_WITHIN_S = 60
"""Far above what any of this takes; what it guards against does not end at all."""
DETACH = 2


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Nobody serves the file system at ``folder``: what asks for a file there waits, as for an NFS server that is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    try:
        if libc.mount(b"frozen", os.fsencode(folder), b"fuse", 0, options):
            pytest.skip("file systems cannot be mounted here")
        yield
    finally:
        libc.umount2(os.fsencode(folder), DETACH)
        os.close(server)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Starts a job under ``ddpdoctor run``."""
    with contextlib.ExitStack() as stack:
        yield lambda job: stack.enter_context(running(tmp_path, job))


@contextlib.contextmanager
def held(spool: Path) -> Iterator[None]:
    """The lock of a spool is with a process that was stopped."""
    code = """
        import fcntl, os, sys
        handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(handle, fcntl.LOCK_EX)
        print(flush=True)
        os.kill(os.getpid(), 19)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(spool / "lock")], stdout=subprocess.PIPE
    )
    try:
        holder.stdout.readline()
        yield
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def steps_of(run: Path, rank: int = 0) -> list[int]:
    lines = (run / "ranks" / f"{rank:05d}" / "steps.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if "step" in line]


def test_a_child_that_was_forked_during_a_copy_does_not_keep_the_lock(tmp_path, monkeypatch) -> None:
    spool = left_behind(make_run(tmp_path / "run"))
    children = []

    def forking(here: int, place: int, beat: Callable[[], None]) -> None:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)

    monkeypatch.setattr("ddpdoctor.rundir.draining._copy_all", forking)
    drain(str(spool))
    monkeypatch.undo()
    try:
        code = "import sys; from ddpdoctor.rundir.draining import drain; drain(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, str(spool)], check=True, timeout=ENDS_WITHIN_S)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
    assert steps_of(tmp_path / "run") == [0]


def test_a_copy_waits_for_another_one_until_its_deadline(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    spool = left_behind(run)
    with held(spool):
        beats: list[float] = []
        with pytest.raises(BusyError):
            # The launcher must not take a lock for storage that does not answer: it hears heartbeats meanwhile.
            drain(str(spool), deadline_s=time.monotonic() + 0.3, beat=lambda: beats.append(time.monotonic()))
        assert len(beats) > 1
        (told,) = recover(str(run))
        assert "another process is copying it" in told and str(spool.parent) in told
    assert recover(str(run)) == [] and steps_of(run) == [0]


@pytest.mark.torchrun
@pytest.mark.extended
def test_the_lock_of_a_spool_that_somebody_keeps(tmp_path, started) -> None:
    process = started(forked(TINY, "--steps", "200", "--step-ms", "5", ranks=1))
    run = tmp_path / "run"
    until((run / "ranks" / "00000" / "steps.jsonl").exists, process)
    (spool,) = Path(spool_root(str(run))).glob("00000-*")
    with held(spool):
        out, err = process.communicate(timeout=ENDS_WITHIN_S)
        assert (process.returncode, out) == (0, "took 200 steps\n"), err
        assert "(another process is copying it)" in err and f"wait in {spool.parent}" in err, err
        assert "Traceback" not in err and len(steps_of(run)) < 200
    assert drain_spools(spool.parent) == [] and steps_of(run) == list(range(200))


@needs_fuse
@pytest.mark.torchrun
@pytest.mark.extended
def test_a_run_directory_whose_storage_stops_to_answer(tmp_path, started) -> None:
    process = started(forked(TINY, "--steps", "400", "--step-ms", "5"))
    run = tmp_path / "run"
    until(lambda: steps_taken(run) > 20, process)
    root = spool_root(str(run))
    with frozen(run):
        out, err = process.communicate(timeout=ENDS_WITHIN_S)
        assert (process.returncode, out) == (0, "took 400 steps\n"), err
        assert f"{run} does not answer" in err and root in err, err
        assert "Traceback" not in err
    assert recover(str(run)) == []
    assert [steps_of(run, rank) for rank in (0, 1)] == [list(range(400))] * 2


@needs_fuse
@pytest.mark.extended
def test_a_run_directory_whose_storage_never_answers(tmp_path, started) -> None:
    (tmp_path / "run").mkdir()
    with frozen(tmp_path / "run"):
        process = started(["echo", "done"])
        out, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert (process.returncode, out) == (0, "done\n")
    assert err.count("\n") == 1 and "the job runs alone" in err and "does not answer" in err


@needs_fuse
@pytest.mark.torchrun
@pytest.mark.extended
def test_ranks_whose_run_directory_does_not_answer_when_they_begin(tmp_path, started) -> None:
    """It did when the launcher made it: only the ranks' claims hang, and are made good at the end."""
    run = tmp_path / "run"
    waiting = f"import os, sys, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)\n"
    script = tmp_path / "job.py"
    script.write_text(f"{waiting}sys.argv = ['x', '--steps', '50']\nexec(open({TINY!r}).read())\n")
    process = started(forked(script, ranks=1))
    until(lambda: list(run.glob("hosts/*/telemetry.jsonl")), process)
    with frozen(run):
        (tmp_path / "go").touch()
        assert process.stdout.readline() == "took 50 steps\n"
    _, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 0, err
    assert recover(str(run)) == [] and steps_of(run) == list(range(50))


@pytest.mark.torchrun
@pytest.mark.extended
@pytest.mark.parametrize("place", ["steps.jsonl", pytest.param("rank.json", marks=pytest.mark.slow)])
def test_a_pipe_in_the_place_of_a_file(tmp_path, started, place) -> None:
    """Opening it would wait for its reader."""
    process = started(forked(TINY, "--steps", "300", "--step-ms", "5", ranks=1))
    folder = tmp_path / "run" / "ranks" / "00000"
    until((folder / "rank.json").exists, process)
    (folder / place).unlink(missing_ok=True)
    os.mkfifo(folder / place)
    out, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert (process.returncode, out) == (0, "took 300 steps\n"), err
    assert "Traceback" not in err


@pytest.mark.torchrun
@pytest.mark.extended
def test_threads_that_fork_all_the_while(tmp_path) -> None:
    recorded = run_under(tmp_path, forked("forking.py", "--steps", "100", ranks=1))
    words = recorded.process.stdout.split()
    assert recorded.process.returncode == 0 and words[-2:] == ["forked", "60"], recorded.process.stderr
    assert len(recorded.steps(0)) == int(words[1])
    assert "ddpdoctor: what" not in recorded.process.stderr, recorded.process.stderr


@pytest.mark.torchrun
@pytest.mark.extended
@pytest.mark.parametrize("stuck", [pytest.param("_run", marks=pytest.mark.slow), "_copy"])
def test_a_thread_of_ours_that_never_gets_on(tmp_path, started, stuck) -> None:
    """At the beginning, and once it has claimed the rank's folder."""
    patched = f"""
        import sys, time
        import torch
        from _ddpdoctor.hook.recording import Writer
        Writer.{stuck} = lambda *arguments: time.sleep(10**6)
        sys.argv = ["single.py"]
        exec(open({str(JOBS / "single.py")!r}).read())
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(patched))
    process = started(forked(tmp_path / "job.py", ranks=0))
    out, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert (process.returncode, out) == (0, "single done\n"), err
    assert "did not accept in time" in err and "Traceback" not in err, err
    assert steps_of(tmp_path / "run"), "its launcher has copied what waited"


def test_work_is_waited_for_as_long_as_it_gets_on() -> None:
    def beating(beat: Callable[[], None]) -> str:
        for _ in range(25):
            time.sleep(0.06)
            beat()
        return "done" * 10**5

    def failing(beat: Callable[[], None]) -> None:
        raise BusyError(16, "planted")

    assert run_with_timeout(beating, 1.2) == "done" * 10**5
    with pytest.raises(StorageTimeoutError):
        run_with_timeout(lambda beat: time.sleep(60), 0.1)
    with pytest.raises(BusyError, match="planted"):
        run_with_timeout(failing, 10.0)


def test_work_is_not_done_without_a_limit_where_no_file_can_be_opened(monkeypatch) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    done: list[str] = []
    monkeypatch.setattr(os, "pipe", none_left)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        run_with_timeout(lambda beat: done.append("here"), 10.0)
    assert not done, "storage that does not answer would keep the launcher for ever"


@pytest.mark.torchrun
@pytest.mark.extended
def test_source_files_that_do_not_answer_cost_their_text_alone(tmp_path):
    patched = "import ddpdoctor.launch.session as s, time; s.note_sources = lambda *_: time.sleep(600)"
    python, flag, code, *rest = DDPDOCTOR_RUN
    by = [python, flag, f"{code.rpartition(';')[0]}; {patched}; main()", *rest]
    done = run_under(tmp_path, forked(TINY, "--steps", "6"), by=by).process
    assert done.returncode == 0, done.stderr
    assert "does not answer" not in done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["exit_code"] == 0
    assert any("no source text" in note for note in manifest["notes"])


@needs_fuse
def test_the_storage_of_yesterdays_run_takes_nothing_from_todays(tmp_path) -> None:
    """Its rank was killed with its launcher: what it left in memory is to be copied, by whoever runs next, to a server that is gone."""
    (tmp_path / "gone").mkdir()
    spool = left_behind(make_run(tmp_path / "gone" / "run"))
    (spool / LOCK_FILE).unlink()  # which this process holds
    age(spool.parent)
    with frozen(tmp_path / "gone"):
        recorded = run_under(tmp_path, ["true"])
        manifest = json.loads((recorded.run / "manifest.json").read_text())
    assert "does not answer" not in recorded.process.stderr
    assert manifest["exit_code"] == 0 and manifest["ended_ns"]
    assert spool.exists(), "nothing is lost"
    age(spool.parent)
    run_under(tmp_path, ["sleep", "1"], "--out", "later")
    assert (
        not spool.exists() and (tmp_path / "gone/run/ranks/00000/steps.jsonl").read_bytes() == b'{"step":0}\n'
    )
