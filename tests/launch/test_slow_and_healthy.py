"""Slow but healthy jobs under ``--on-hang kill``: none is killed or said to hang; and planted hangs still are, as fast.

The rule behind all of them: silence of our own channel proves nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hook.recording import JOBS, TORCHRUN, forked

from .launched import descendants, spools_below
from .watched import (
    SLOW_JOB,
    SLOW_S,
    Watched,
    cold_file,
    fill,
    forked_job,
    frozen,
    hang_findings,
    helpers,
    hidden_call,
    slow_disk,
    slow_pipe,
    slow_server,
    small_storage,
    stalls,
    stopped,
    torchrun_job,
    unchangeable,
    watched,
)

SLOW, EXTENDED = pytest.mark.slow, pytest.mark.extended
STOPPING = str(JOBS / "stopping_ddp.py")
START_S = 45.0
"""Within which a job of three ranks has started on a busy machine."""
SHORT_STEPS = ("--steps", "400", "--step-s", "0.05")
SMALL_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && {then} && exec "$@"'


def in_small_shm(then: str = "true") -> tuple[str, ...]:
    return ("unshare", "--mount", "sh", "-c", SMALL_SHM.format(then=then), "sh")


Meanwhile = Callable[[Watched, contextlib.ExitStack], None]


@dataclass(frozen=True)
class Slow:
    """One slow and healthy job, and what happens to it meanwhile."""

    how: str = "no"
    options: tuple[str, ...] = ()
    ranks: int = 2
    limit_s: float = 3.0
    for_s: float = SLOW_S
    before: tuple[str, ...] = ()
    meanwhile: Meanwhile | None = None
    terminal: bool = False
    out: str = "run"
    command: tuple[str, ...] = ()
    forked: bool = False
    may_be_told: bool = False
    """It is not killed, but said to hang: rightly until somebody intervenes, or, of a rank that only computes, "or computes for long"."""

    @property
    def steps(self) -> str:
        return self.options[self.options.index("--steps") + 1] if "--steps" in self.options else "60"


def spool_removed(job: Watched, stack: contextlib.ExitStack) -> None:
    job.mark("trains")
    job.mark("trains", 1)
    spools = spools_below(job.folder)
    assert spools
    for root in {spool.parent for spool in spools}:
        shutil.rmtree(root)


def typed(text: str) -> Meanwhile:
    def types(job: Watched, stack: contextlib.ExitStack) -> None:
        if job.mark("slow"):
            time.sleep(SLOW_S)
            with contextlib.suppress(OSError):
                job.keyboard(text)

    return types


def typed_unseen(text: str) -> Meanwhile:
    """The kernel shows nobody else that the rank reads from the terminal."""

    def types(job: Watched, stack: contextlib.ExitStack) -> None:
        if pid := job.mark("slow"):
            stack.enter_context(hidden_call(pid))
        typed(text)(job, stack)

    return types


def on_slow_disk(job: Watched, stack: contextlib.ExitStack) -> None:
    stack.enter_context(slow_disk(job.mark("trains"), job.folder, 1 << 20))


GDB = ("gdb", "-nx", "-batch", "-iex", "set auto-solib-add off", "-ex", "shell sleep 18", "-p")
STRACE = ("strace", "-o", "/dev/null", "-p")


def debugged(tool: tuple[str, ...], told: bool) -> Meanwhile:
    def attaches(job: Watched, stack: contextlib.ExitStack) -> None:
        if not shutil.which(tool[0]):
            pytest.skip(f"needs {tool[0]}")
        pid = job.mark("slow")
        if told:
            job.wait(job.said_s)
        else:
            time.sleep(1.5)
        debugger = subprocess.Popen(
            [*tool, str(pid)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        stack.callback(debugger.wait)
        stack.callback(debugger.terminate)

    return attaches


def suspended(seconds: float, told: bool = False) -> Meanwhile:
    def stops(job: Watched, stack: contextlib.ExitStack) -> None:
        pid = job.mark("slow" if told else "trains")
        if told:
            job.wait(job.said_s)
        with contextlib.suppress(ProcessLookupError), stopped([pid]):
            time.sleep(seconds)

    return stops


def in_frozen_group(version: int, everybody: bool = False) -> Meanwhile:
    def freezes(job: Watched, stack: contextlib.ExitStack) -> None:
        pid = job.mark("trains")
        pids = [job.process.pid, *descendants(job.process.pid)] if everybody else [pid]
        with frozen(pids, version):
            time.sleep(15)

    return freezes


def helpers_starved(job: Watched, stack: contextlib.ExitStack) -> None:
    """Until the job is in the midst of a pause of half the limit."""
    job.mark("trains")
    found = helpers(job)
    assert found
    with stopped(found):
        job.mark("slow")
        time.sleep(1)


def launcher_starved(job: Watched, stack: contextlib.ExitStack) -> None:
    job.mark("trains")
    with stopped([job.process.pid, *helpers(job)]):
        time.sleep(12)


def machine_suspended(job: Watched, stack: contextlib.ExitStack) -> None:
    job.mark("slow")
    time.sleep(1)
    with stopped([job.process.pid, *descendants(job.process.pid)]):
        time.sleep(15)


def run_directory_full(job: Watched, stack: contextlib.ExitStack) -> None:
    job.mark("trains")
    fill(job.run.parent)


def run_directory_unchangeable(job: Watched, stack: contextlib.ExitStack) -> None:
    job.mark("trains")
    stack.enter_context(unchangeable(job.run))


def retried(how: str, *options: str) -> tuple[str, ...]:
    """Three ranks, of which one dies; then two, as a shell script does that has lost one."""
    first = torchrun_job("dies", 3, "--rank", "2", "--at", "15")
    return ("sh", "-c", f"{shlex.join(first)} || {shlex.join(torchrun_job(how, 2, *options))}")


def restarted(how: str, *options: str) -> tuple[str, ...]:
    words = torchrun_job(how, 2, *options)
    at = words.index("--standalone")
    return (*words[: at + 1], "--max-restarts", "1", *words[at + 1 :])


JOBS_THAT_GET_ON: dict[str, Slow] = {
    "spool removed": Slow(
        options=("--steps", "160", "--step-s", "0.05"), meanwhile=spool_removed, forked=True
    ),
    "spool removed, evaluation": Slow("evaluates", meanwhile=spool_removed, options=("--step-s", "0.1")),
    "spool full at start": Slow(
        options=SHORT_STEPS, before=in_small_shm("head -c 58M /dev/zero >/dev/shm/job")
    ),
    "spool nearly full after start": Slow("takes_most_shared_memory", SHORT_STEPS, before=in_small_shm()),
    "spool full after start": Slow("fills_shared_memory", SHORT_STEPS, before=in_small_shm()),
    "no file may grow": Slow("may_not_write_files", SHORT_STEPS),
    "no file can be opened": Slow("may_not_open_files", SHORT_STEPS),
    "checkpoint by write()": Slow("writes_a_checkpoint", ("--barrier",), forked=True),
    "checkpoint by write(), 3 ranks": Slow("writes_a_checkpoint", ranks=3),
    "shutil.copy from a slow disk": Slow("copies_a_file", ("--step-s", "0.1"), meanwhile=on_slow_disk),
    "copy from a slow pipe": Slow("copies_from_a_pipe", ("--barrier",)),
    "metric in Python": Slow("scores_in_python", ("--barrier",), may_be_told=True),
    "metric in numpy": Slow("scores_in_numpy"),
    "chain of calls in torch": Slow("one_long_chain_in_torch", ("--barrier",), may_be_told=True),
    "one call in numpy": Slow("one_long_call_in_numpy", may_be_told=True),
    "child computes": Slow("waits_for_a_child_that_computes", ("--barrier",), forked=True),
    "child downloads": Slow("waits_for_a_child_that_downloads"),
    "grandchild computes": Slow("waits_for_a_grandchild"),
    "download to memory": Slow("downloads_to_memory", ("--barrier",)),
    "download to a file": Slow("downloads_to_a_file"),
    "download in a thread": Slow("downloads_in_a_thread", ("--barrier",)),
    "torch.compile": Slow("compiles"),
    "evaluation": Slow("evaluates", ("--barrier",)),
    "breakpoint()": Slow("at_a_breakpoint", meanwhile=typed("c\n")),
    "breakpoint() in a terminal": Slow(
        "at_a_breakpoint", ("--barrier",), meanwhile=typed("c\n"), terminal=True
    ),
    "code.interact()": Slow("at_a_prompt", meanwhile=typed("\x04"), terminal=True),
    "input()": Slow("asks_the_user", meanwhile=typed("yes\n"), terminal=True),
    "input(), unseen": Slow("asks_the_user", ("--barrier",), meanwhile=typed_unseen("yes\n"), terminal=True),
    "stdin.readline()": Slow("reads_a_line", ("--barrier",), meanwhile=typed("yes\n")),
    "gdb, before it is told": Slow("quiet", meanwhile=debugged(GDB, False)),
    "strace, once it is told": Slow("quiet", meanwhile=debugged(STRACE, True), may_be_told=True),
    "SIGSTOP for 15 s": Slow(meanwhile=suspended(15)),
    "SIGSTOP, once it is told": Slow("quiet", meanwhile=suspended(15, True), for_s=8, may_be_told=True),
    "frozen rank, v1": Slow(meanwhile=in_frozen_group(1)),
    "frozen rank, v2": Slow(meanwhile=in_frozen_group(2)),
    "everything frozen": Slow(meanwhile=in_frozen_group(1, True), options=SHORT_STEPS),
    "helpers starved": Slow("quiet", ("--step-s", "0.5"), limit_s=8, for_s=4, meanwhile=helpers_starved),
    "launcher starved": Slow(options=SHORT_STEPS, meanwhile=launcher_starved),
    "machine suspended": Slow("quiet", limit_s=6, for_s=3, meanwhile=machine_suspended),
    "retry after a death": Slow(limit_s=60, command=retried("quiet", "--for-s", "38")),
    "retry that starts slowly": Slow(command=retried("builds_in_python", "--for-s", "40"), limit_s=6),
    "restart that starts slowly": Slow(command=restarted("second_build_in_python", "--for-s", "25")),
    "run directory full": Slow(options=SHORT_STEPS, out="place/run", meanwhile=run_directory_full),
    "run directory unchangeable": Slow(options=SHORT_STEPS, meanwhile=run_directory_unchangeable),
    "first batch from slow storage": Slow("first_batch"),
    "weights from slow storage": Slow("builds_reading", for_s=30),
    "weights, before it joins": Slow("starts_reading", for_s=30),
    "builds in Python, before it joins": Slow("starts_in_python", for_s=30),
}
ASKING = ("at_a_breakpoint", "at_a_prompt", "asks_the_user", "reads_a_line")
MARKS = {
    "spool removed": (),
    "checkpoint by write()": EXTENDED,
    "child computes": EXTENDED,
    "input(), unseen": EXTENDED,
}
"""Of those that are not left to the night."""


def surroundings(case: Slow, tmp: Path, stack: contextlib.ExitStack) -> dict[str, str]:
    """What the slow rank needs around it."""
    if case.before and (os.geteuid() != 0 or not shutil.which("unshare")):
        pytest.skip("needs root and unshare")
    found = {"SLOW_PIPE": stack.enter_context(slow_pipe(tmp / "pipe", case.for_s))}
    # Else torch 2.13 lets a second attempt read the first one's addresses, now and then, with us or without.
    found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if "download" in case.how:
        found["SLOW_URL"] = stack.enter_context(slow_server())
    if case.how == "copies_a_file":
        found["SLOW_COPY"] = str(cold_file(tmp / "weights.bin", int(case.for_s) << 20))
    if case.out != "run":
        stack.enter_context(small_storage((tmp / case.out).parent, "1m"))
    return found


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, SLOW)) for name in JOBS_THAT_GET_ON]
)
def test_slow_and_healthy(tmp_path: Path, name: str, no_spool_stays: None) -> None:
    case = JOBS_THAT_GET_ON[name]
    with contextlib.ExitStack() as stack:
        environment = surroundings(case, tmp_path, stack)
        job_options = ("--for-s", str(case.for_s), *case.options)
        command = list(case.command) or (forked_job if case.forked else torchrun_job)(
            case.how, case.ranks, *job_options
        )
        job = stack.enter_context(
            watched(tmp_path, command, case.limit_s, environment, case.before, case.out, case.terminal)
        )
        if case.meanwhile:
            case.meanwhile(job, stack)
        code = job.finish()
        took = f"took {case.steps} steps\n"
        assert code == 0, job.stderr
        assert "".join(job.out).endswith(took) if case.how in ASKING else "".join(job.out) == took
        if case.may_be_told:
            return
        assert job.said_s() is None, job.stderr
        assert not {stall["state"] for stall in stalls(job.run)} & {"lasts", "killed", "ended"}
        assert not hang_findings(job.run)
        if case.how in ("evaluates", "writes_a_checkpoint"):
            log = (job.run / "ranks" / "00000" / "steps.jsonl").read_text()
            assert re.findall(r'"evaluated": ?(\d+)', log) == (["30"] if case.how == "evaluates" else [])


@dataclass(frozen=True)
class Hang:
    """A planted hang, and how soon it must be said and ended, in seconds from its beginning."""

    command: tuple[str, ...]
    said_s: float = 30.0
    killed_s: float | None = 60.0
    forked: bool = False


def alone(how: str, ranks: int) -> tuple[str, ...]:
    """Ranks of a launcher that waits for all and looks after none."""
    words = shlex.join(["python", SLOW_JOB, "--how", how, "--rank", "1"])
    words = words.replace("python", shlex.quote(sys.executable), 1)
    each = f"RANK=$r LOCAL_RANK=$r WORLD_SIZE={ranks} MASTER_ADDR=127.0.0.1 MASTER_PORT=29534 {words} &"
    return ("sh", "-c", f"for r in $(seq 0 {ranks - 1}); do {each} done; wait; exit 3")


def planted(job: str, how: str, ranks: int = 2, *more: str) -> tuple[str, ...]:
    return (*TORCHRUN, str(ranks), job, "--how", how, "--for-s", "90", *more)


HANGS: dict[str, Hang] = {
    "asleep in a lock": Hang((STOPPING, "--how", "asleep_in_a_lock", "--for-s", "90"), forked=True),
    "one barrier too many": Hang(planted(STOPPING, "extra_barrier")),
    "a loop in Python": Hang(planted(STOPPING, "in_a_loop"), killed_s=None),
    "C code that holds the GIL": Hang(planted(STOPPING, "in_c_with_the_lock")),
    "C code that computes and holds the GIL": Hang(planted(STOPPING, "in_a_pattern"), killed_s=None),
    "different collectives": Hang(planted(SLOW_JOB, "receives", 3, "--rank", "1")),
    "dead, and nobody notices": Hang(alone("waits_for_a_key", 3), killed_s=None),
    "never joins": Hang(planted(STOPPING, "before_joining")),
}


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "name", [name if name == "asleep in a lock" else pytest.param(name, marks=SLOW) for name in HANGS]
)
def test_planted_hangs_are_still_killed(tmp_path: Path, name: str, no_spool_stays: None) -> None:
    case = HANGS[name]
    began_s = time.time()
    command = forked(*case.command) if case.forked else list(case.command)
    with watched(tmp_path, command, 3.0, {}) as job:
        if case.killed_s is None:
            job.wait(job.said_s, START_S + case.said_s)
        else:
            assert job.finish() != 0, job.stderr
        said_s, ended_s = job.said_s(), job.ended_s
        print(name, "begins", began_s, "said", said_s, "ended", ended_s)
    assert said_s is not None and said_s - began_s < START_S + case.said_s, job.stderr
    if case.killed_s is not None:
        assert ended_s - began_s < START_S + case.killed_s, job.stderr
        assert {stall["state"] for stall in stalls(job.run)} <= {"killed", "ended"}
