"""Ranks of which the kernel shows nothing at the moment: for lack of descriptors, or because it does not permit it."""

from __future__ import annotations

import contextlib
import os
import pty
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.launch.rankwatch import Activity, HostWatchedRanks, WatchedRank
from ddpdoctor.rundir.heartbeat import Heartbeat
from ddpdoctor.rundir.liveness import started
from ddpdoctor.rundir.spool import Spool, make_spool_root
from ddpdoctor.telemetry import procfs
from tests.hook.recording import REPOSITORY
from tests.waiting import until

from .launched import make_run, written_by
from .watched import hidden_call

pytestmark = [
    pytest.mark.usefixtures("no_spool_stays"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture
def host(tmp_path):
    """The ranks of a run, and what starts one of them and gives its process."""
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    processes = []

    def start(number: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "600"])
        processes.append(process)
        spool = Spool(root, number, str(run))
        Heartbeat(spool)
        spool.close()
        renamed = Path(spool.directory).with_name(f"{number:05d}-{process.pid}")
        os.rename(spool.directory, renamed)
        written_by(renamed, process.pid, started=started(process.pid))
        return process

    yield HostWatchedRanks(root), start
    for process in processes:
        process.kill()
        process.wait()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_rank_lives_though_nothing_can_be_opened_to_see_it(host, has_pidfd: bool) -> None:
    ranks, start = host
    process = start(0)
    ranks.update()
    (rank,) = ranks.known.values()
    if not has_pidfd:
        rank.close()
    with no_descriptor_left():
        rank.update()
        opened_now = WatchedRank(rank.spool, 1, rank.pid)
        opened_now.open()
        assert rank.alive and opened_now.alive and rank.activity is Activity.UNKNOWN
    process.kill()
    process.wait()
    rank.update()
    assert not rank.alive


def test_ranks_that_have_ended_keep_no_descriptor(host) -> None:
    ranks, start = host
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        process = start(number)
        ranks.update()
        process.kill()
        process.wait()
    ranks.update()
    ranks.update()
    assert [rank.alive for rank in ranks.known.values()] == [False] * 3
    assert len(os.listdir("/proc/self/fd")) == descriptors


LOOKS = """
import sys
asked = []
sys.addaudithook(lambda event, args: asked.append(args) if event == "open" and str(args[0]).endswith("/syscall") else None)
from ddpdoctor.telemetry import procfs
for _ in range(3):
    assert not procfs.waits_for_input(int(sys.argv[1]))
    assert procfs.process_document(int(sys.argv[1]))["state"] == "S"
print(len(asked))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_a_system_call_that_may_not_be_seen_is_asked_for_once(host) -> None:
    """Where only ancestors may trace a process, the kernel logs each attempt. Here it is a capability that is missing."""
    _, start = host
    process = start(0)
    without = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    looks = subprocess.run(
        [*without, sys.executable, "-c", LOOKS, str(process.pid)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert looks.stdout == "1\n", looks.stderr


@contextlib.contextmanager
def at_a_terminal(program: str) -> Iterator[int]:
    """The id of a process that runs ``program`` with a terminal as its standard input."""
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stdin=slave, stdout=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


def test_a_prompt_whose_system_call_the_kernel_does_not_show() -> None:
    with at_a_terminal("input()") as prompt, at_a_terminal("import time; time.sleep(60)") as asleep:
        until(lambda: procfs.waits_for_input(prompt))
        until(lambda: procfs.sleeps(asleep))
        reads = procfs.text_of(f"/proc/{prompt}/syscall")
        with hidden_call(prompt), hidden_call(asleep):
            assert procfs.text_of(f"/proc/{prompt}/syscall") == ""
            # As the rank itself reports it, which counts if it is known.
            assert procfs.waits_for_input(prompt, reads)
            assert not procfs.waits_for_input(prompt, "45 0x5 0x7f00")
            assert procfs.process_document(prompt, reads)["syscall"] == reads.strip()
            # Of a rank that has not joined, only the kernel's function and the terminal are known.
            assert procfs.waits_for_input(prompt) and not procfs.waits_for_input(asleep)
