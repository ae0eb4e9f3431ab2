"""Nobody of a job goes on once its run has ended: whatever started its ranks is ended before them, and what else the job started is not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.launch import leftovers
from ddpdoctor.launch.leftovers import Orphans
from ddpdoctor.rundir.liveness import started as is_alive
from ddpdoctor.telemetry import procfs
from tests.hook.recording import JOBS, TORCHRUN
from tests.waiting import until

from .launched import clean_environment, command_of, kill, running, steps_taken

AWAIT_S = 90
OF_RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
PROGRAM = """
import os, signal, subprocess, sys, time
told, number, deaf, starts = sys.argv[1:5]
def started(rank):
    more = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} if starts != "plain" else {}
    command = [sys.executable, *sys.argv[:1], told, str(rank), sys.argv[5], "no", "-"]
    return subprocess.Popen(command, env={**os.environ, **more}, start_new_session=True)
def asked(*_):
    note("SIGTERM")
    if deaf == "no":
        os._exit(143)
def note(what):
    with open(told, "a") as file:
        file.write(f"{what} {number} {os.getpid()}\\n")
signal.signal(signal.SIGTERM, asked)
ranks = [started(0), started(1)] if starts != "no" else []
note("started")
end_s = time.monotonic() + 60
while time.monotonic() < end_s:
    time.sleep(0.05)
    if starts == "again":
        ranks = [rank if rank.poll() is None else started(at) for at, rank in enumerate(ranks)]
"""
"""Notes its start and each SIGTERM; ends itself after a minute. May be deaf to the signal, and start two ranks, again whenever one ends."""


class Job:
    """Processes of a job of which the command is gone."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.told = tmp, tmp / "told"
        (tmp / "program.py").write_text(PROGRAM)
        self._own: list[subprocess.Popen[bytes]] = []

    def start(
        self, name: str, deaf: str = "no", starts: str = "no", of: str = "no", mark: str = "", **more: str
    ) -> int:
        """A process that notes its signals by ``name``; ``of``: whether the ranks that it starts are deaf."""
        arguments = [str(self.tmp / "program.py"), str(self.told), name, deaf, starts, of]
        environment = {**clean_environment(), "MARK": mark or str(self.tmp), **more}
        self._own.append(
            subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True)
        )
        until(lambda: f"started {name} " in self._lines() and (starts == "no" or self.ranks()))
        return self._own[-1].pid

    def _lines(self) -> str:
        return self.told.read_text() if self.told.exists() else ""

    def ranks(self) -> list[int]:
        """Ids of all ranks that were ever started, once there are two."""
        words = [line.split() for line in self._lines().splitlines()]
        found = [int(pid) for what, number, pid in words if what == "started" and number in "01"]
        return found if len(found) > 1 else []

    def signalled(self) -> list[str]:
        return [line.split()[1] for line in self._lines().splitlines() if line.startswith("SIGTERM")]

    def end(self) -> None:
        self.reap()
        for pid in [*self.ranks(), *(process.pid for process in self._own)]:
            if f"{self.tmp / 'program.py'}".encode() in command_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._own:
            process.wait(10)

    def reap(self) -> None:
        for process in self._own:
            process.poll()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path)
    try:
        yield found
    finally:
        found.end()


def of_job(tmp: Path, recorded: dict[int, int] | None = {}, grace_s: float = 20.0) -> Orphans:
    # The mark is the test's own: tests run side by side, and one must not end the processes of another.
    return Orphans("MARK", str(tmp), tmp / "no-spool", recorded, grace_s)


def test_a_launcher_is_told_first_and_what_else_the_job_started_stays(job: Job) -> None:
    launcher = job.start("launcher", starts="ranks")
    ranks = job.ranks()
    others = [
        job.start("daemon"),
        job.start("other-run", mark="another", **OF_RANK),
        job.start("shell", starts="plain"),  # whose two are no ranks: they have no number
    ]
    plain = [pid for pid in job.ranks() if pid not in ranks]
    rest = of_job(job.tmp).end()
    assert (rest.launchers, sorted(rest.ranks), rest.living) == ([launcher], sorted(ranks), [])
    assert job.signalled()[0] == "launcher" and sorted(job.signalled()[1:]) == ["0", "1"]
    assert rest.sentences()[0].startswith(
        "The command left launchers and ranks behind, which were ended: process "
    )
    assert all(map(is_alive, [*others, *plain]))


@pytest.mark.extended
def test_one_that_starts_its_ranks_again_and_hears_nothing(job: Job) -> None:
    """SIGKILL first for who starts, and its last ranks, which are deaf as well, after it."""
    launcher = job.start("launcher", deaf="yes", starts="again", of="yes")
    os.kill(job.ranks()[0], signal.SIGKILL)
    until(lambda: len(job.ranks()) == 3)
    begun_s = time.monotonic()
    rest = of_job(job.tmp, grace_s=1.0).end()
    assert time.monotonic() - begun_s < AWAIT_S and rest.launchers == [launcher] and rest.living == []
    assert not any(map(is_alive, [launcher, *job.ranks()]))
    assert len(job.ranks()) == 3, "none was started again while they were ended"


def test_ranks_that_have_lost_their_launcher_and_what_ranks_have_left(job: Job) -> None:
    """The number of a rank that has shown itself belongs to it, dead or alive: others that have it were started by it."""
    launcher = job.start("launcher", starts="ranks")
    ranks = job.ranks()
    os.kill(launcher, signal.SIGKILL)
    tracker = job.start("tracker", **{**OF_RANK, "RANK": "7"})
    rest = of_job(job.tmp, {ranks[0]: 0, ranks[1]: 1, 2**22 + 1: 7}).end()
    assert (rest.launchers, sorted(rest.ranks)) == ([], sorted(ranks))
    assert sorted(job.signalled()) == ["0", "1"] and is_alive(tracker)


def test_where_it_cannot_be_known_who_is_a_rank_nobody_is_ended(job: Job) -> None:
    stray = job.start("0", **OF_RANK)
    assert of_job(job.tmp, None).end().ranks == [] and is_alive(stray)
    assert of_job(job.tmp).end().ranks == [stray]


@pytest.mark.extended
def test_who_was_told_with_its_group_is_not_told_again(job: Job) -> None:
    launcher = job.start("launcher", deaf="yes", starts="ranks")
    rest = of_job(job.tmp, grace_s=1.0).end(signalled_group=launcher)
    assert rest.living == [] and "launcher" not in job.signalled()
    assert sorted(job.signalled()) == ["0", "1"], "a launcher that was killed leaves them to us"


@pytest.mark.extended
def test_a_process_that_takes_no_signal_keeps_nobody_from_being_ended(job: Job, monkeypatch) -> None:
    launcher = job.start("launcher", starts="ranks")
    os.kill(launcher, signal.SIGKILL)
    refused = job.ranks()[0]
    real_open = os.pidfd_open

    def opened(pid: int) -> int:
        if pid == refused:
            raise PermissionError
        return real_open(pid)

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr("ddpdoctor.launch.leftovers.os.pidfd_open", opened)
    monkeypatch.setattr(leftovers, "_KILLING_S", 0.5)
    with monkeypatch.context() as patched:
        patched.setattr("ddpdoctor.launch.leftovers.os.kill", refuse)
        rest = of_job(job.tmp, grace_s=0.5).end()
    assert rest.living == [refused] and not is_alive(job.ranks()[1])
    assert str(refused) in rest.sentences()[-1] and "could not be ended" in rest.sentences()[-1]


def test_a_number_that_another_process_has_by_now(job: Job, monkeypatch) -> None:
    """It was read as a rank's, and belongs to somebody else when the signal is due."""
    rank, innocent = job.start("0", **OF_RANK), job.start("innocent", mark="another")
    found = of_job(job.tmp)
    (process,) = found._remaining({rank: found._process(rank)})
    assert process.pid == rank
    for pid, began in ((innocent, process.started), (rank, process.started - 1)):
        found._send(type(process)(pid, began, process.parent, 0), signal.SIGKILL)
    found._send(type(process)(2**22 + 1, 1, 1, 0), signal.SIGKILL)
    assert is_alive(rank) and is_alive(innocent)
    monkeypatch.delattr(os, "pidfd_open")
    found._send(process, signal.SIGKILL)
    until(lambda: procfs.state_of(rank) in ("", "Z"))


def test_another_users_process_is_left_alone(job: Job, monkeypatch) -> None:
    job.start("0", **OF_RANK)
    monkeypatch.setattr("ddpdoctor.launch.leftovers.os.getuid", lambda: 54321)
    assert of_job(job.tmp).end().ranks == [] and job.signalled() == []


SCRIPT = f"""{" ".join([*TORCHRUN, "2"])} --max-restarts 3 {JOBS / "stopping_ddp.py"} "$@"
echo it goes on
"""


@contextlib.contextmanager
def by_script(tmp: Path, *options: str, job: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """A job that a shell script starts, of which nobody is left afterwards but by our fault."""
    (tmp / "el.sh").write_text(SCRIPT)
    with running(tmp, ["sh", "el.sh", *job], "--no-profile", *options) as process:
        try:
            yield process
        finally:
            process.kill()
            kill(left_of(tmp))


def left_of(tmp: Path) -> list[int]:
    """Who lives and has the mark of a job of a run below ``tmp``."""
    found = []
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if b"\0DDPDOCTOR_LAUNCHER=" in environment and os.fsencode(tmp) + b"/run\0" in environment:
                found.append(pid)
    return found


def nobody_is_left(tmp: Path, err: str) -> None:
    assert left_of(tmp) == []
    assert sorted(path.name for path in (tmp / "run" / "ranks").iterdir()) == ["00000", "00001"]
    assert "Traceback" not in "".join(line for line in err.splitlines() if line.startswith("ddpdoctor"))


@pytest.mark.torchrun
@pytest.mark.extended
def test_a_hang_below_a_shell_is_ended_for_good(tmp_path: Path) -> None:
    """torchrun would start the ranks anew, in the run that has ended."""
    stops = ("--how", "asleep_in_a_lock", "--for-s", "600")
    with by_script(tmp_path, "--hang-after", "3", "--on-hang", "kill", job=stops) as process:
        err = process.communicate(timeout=AWAIT_S)[1]
        assert process.returncode == -signal.SIGTERM
        assert "The command left launchers and ranks behind, which were ended: process " in err
        nobody_is_left(tmp_path, err)


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("everybody", [False, True], ids=["launcher", "group"])
def test_a_signal_to_the_launcher_of_a_shell(tmp_path: Path, everybody: bool) -> None:
    with by_script(tmp_path, job=("--steps", "100000")) as process:
        until(lambda: steps_taken(tmp_path / "run") > 20, process)
        (os.killpg if everybody else os.kill)(process.pid, signal.SIGTERM)
        err = process.communicate(timeout=AWAIT_S)[1]
        assert process.returncode == -signal.SIGTERM
        assert err.count("death signal") == 1, "torchrun was told once"
        nobody_is_left(tmp_path, err)
