"""The signal at which faulthandler writes a rank's stack: who is sent it, and that it harms nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.launch.rankwatch import WatchedRank
from ddpdoctor.rundir.heartbeat import Beat
from ddpdoctor.telemetry import procfs
from tests.waiting import until

NUMBER = signal.SIGRTMAX - 9
LISTENS = "faulthandler.register(signal.SIGRTMAX - 9, file=open(sys.argv[1], 'w'), all_threads=False)"
SPINS = "print('ready', flush=True)\nwhile True: pass"
IN_C = (
    "import ctypes\nlibc = ctypes.PyDLL(None)\nprint('ready', flush=True)\n{}; print('cut short', flush=True)"
)


@pytest.fixture
def started(tmp_path) -> Iterator[object]:
    """Starts a program, and gives it as a rank that has shown no Python for 100 s."""
    processes = []

    def start(script: str, listens: str = LISTENS) -> WatchedRank:
        code = f"import faulthandler, signal, sys, time\n{listens}\n{script}"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "faults.txt")], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        rank = WatchedRank(str(tmp_path), 0, process.pid, here_pid=process.pid)
        rank.beat = Beat(1, 1, 5, 1, 0, 0, 0, 0, int(NUMBER))
        rank.state, rank.handle = procfs.state_of(process.pid), os.pidfd_open(process.pid)
        rank._polled_s = 100.0
        return rank

    yield start
    for process in processes:
        process.kill()
        process.wait()


def is_asked(rank: WatchedRank, after_s: float = 99.0) -> bool:
    file = Path(rank.spool) / "faults.txt"
    rank.ask_stack(after_s)
    if rank._is_asked_for_stack:
        until(lambda: "Stack (most recent call first):" in file.read_text(), within_s=10)
    assert procfs.state_of(rank.here_pid) not in ("", "Z")
    return rank._is_asked_for_stack


def test_one_that_runs_no_python_is_asked_for_stack_once(started) -> None:
    rank = started(SPINS)
    assert not is_asked(rank, 101.0) and is_asked(rank)
    size = (Path(rank.spool) / "faults.txt").stat().st_size
    rank.ask_stack(1.0)
    assert (Path(rank.spool) / "faults.txt").stat().st_size == size


def test_a_deadlock_in_c_goes_on(started) -> None:
    rank = started(
        IN_C.format("mutex = bytes(64); libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)")
    )
    until(lambda: procfs.state_of(rank.here_pid) == "S", within_s=10)
    assert is_asked(rank)
    assert procfs.state_of(rank.here_pid) == "S"


@pytest.mark.parametrize("call", ["libc.sleep(60)", "libc.poll(None, 0, 60_000)"])
def test_what_a_signal_would_cut_short_is_left_alone(started, call) -> None:
    rank = started(IN_C.format(call))
    until(lambda: procfs.state_of(rank.here_pid) == "S", within_s=10)
    assert not is_asked(rank)


def test_one_that_has_no_handler_or_has_ended_its_recording_is_left_alone(started) -> None:
    assert not is_asked(started(SPINS, "pass")), "the signal would end it"
    rank = started(SPINS)
    rank.beat = rank.beat._replace(ended=rank.beat.steps + 1)
    assert not is_asked(rank)


def test_one_that_is_stopped_is_left_alone(started) -> None:
    rank = started(SPINS)
    os.kill(rank.here_pid, signal.SIGSTOP)
    until(lambda: procfs.state_of(rank.here_pid) == "T", within_s=10)
    rank.state = "T"
    assert not is_asked(rank)
