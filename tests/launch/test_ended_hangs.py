"""Jobs that hang and are then ended by a person or a scheduler: the first line says that they hung, where, and by what they ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from tests.hook.recording import JOBS, forked
from tests.python import NEEDS_STACKS
from tests.waiting import until

from .launched import descendants, kill, pids_of, running
from .test_hangs import AFTER
from .watched import stalls

pytestmark = [pytest.mark.torchrun, NEEDS_STACKS]
EXTENDED = pytest.mark.extended
STOPPING = str(JOBS / "stopping_ddp.py")
HANGS = {
    "both join another group": (
        ("--how", "second_group", "--rank", "-1", "--steps", "20"),
        "hang/rendezvous",
        "ranks 0 and 1 wait for a process group to be created at stopping_ddp.py:",
    ),
    "one joins another group": (
        ("--how", "second_group", "--steps", "20"),
        "hang/not-reached",
        "rank 1 sleeps at stopping_ddp.py:",
    ),
    "a collective of one rank": (
        ("--how", "extra_barrier"),
        "hang/different-collectives",
        "rank 1 calls barrier at stopping_ddp.py:",
    ),
    "a lock": (
        ("--how", "asleep_in_a_lock"),
        "hang/not-reached",
        "rank 1 waits for a lock or for another thread at stopping_ddp.py:",
    ),
    "no input": (
        ("--how", "no_input"),
        "hang/not-reached",
        "rank 1 waits for its DataLoader at stopping_ddp.py:",
    ),
}


def to_all(process: subprocess.Popen[str], number: signal.Signals) -> None:
    os.killpg(process.pid, number)


def ctrl_c_twice(process: subprocess.Popen[str], run: Path) -> None:
    to_all(process, signal.SIGINT)
    time.sleep(0.5)
    if process.poll() is None:
        to_all(process, signal.SIGINT)


def int_and_kill(process: subprocess.Popen[str], run: Path) -> None:
    everybody = [process.pid, *descendants(process.pid)]
    os.kill(process.pid, signal.SIGINT)
    time.sleep(3)
    kill(everybody)


def term_and_kill(process: subprocess.Popen[str], run: Path) -> None:
    """As a scheduler and a pod do: to all, and after a grace period once more."""
    everybody = [process.pid, *descendants(process.pid)]
    for pid in everybody:
        os.kill(pid, signal.SIGTERM)
    time.sleep(3)
    kill(everybody)


def ranks_alone(process: subprocess.Popen[str], run: Path) -> None:
    """As ``pkill -INT -f train.py`` and then ``pkill -9`` do: the launcher gets no signal."""
    for number in (signal.SIGINT, signal.SIGKILL):
        for pid in pids_of(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(3 if number == signal.SIGINT else 0)


@pytest.mark.parametrize(
    ("end", "by"),
    [
        pytest.param(ctrl_c_twice, "SIGINT", marks=EXTENDED),
        pytest.param(int_and_kill, "SIGINT", marks=EXTENDED),
        pytest.param(term_and_kill, "SIGTERM", marks=EXTENDED),
        (ranks_alone, r"SIG(?:KILL|INT)"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
@pytest.mark.parametrize(
    "hang", [name if number == 0 else pytest.param(name, marks=EXTENDED) for number, name in enumerate(HANGS)]
)
def test_a_hang_that_is_ended_by_hand(tmp_path: Path, hang: str, end, by: str) -> None:
    options, rule, where = HANGS[hang]
    run = tmp_path / "run"
    with running(tmp_path, forked(STOPPING, *options, "--for-s", "600"), *AFTER) as process:
        until(lambda: [each for each in stalls(run) if each["state"] == "lasts"], process)
        time.sleep(1)
        end(process, run)
        process.communicate(timeout=60)
    diagnosis = analyze(str(run))
    headline = diagnosis.verdict.headline
    assert diagnosis.verdict.rule == rule, headline
    assert re.match(rf"The job hung for .* s until {by} ended it; last seen: {re.escape(where)}", headline), (
        headline
    )


@EXTENDED
@pytest.mark.parametrize("end", [int_and_kill, term_and_kill, ranks_alone], ids=lambda each: each.__name__)
def test_a_job_that_makes_steps_did_not_hang(tmp_path: Path, end) -> None:
    run = tmp_path / "run"
    with running(tmp_path, forked(STOPPING, "--how", "no", "--steps", "100000"), *AFTER) as process:
        until(lambda: (run / "ranks" / "00001" / "steps.jsonl").exists(), process)
        time.sleep(5)
        end(process, run)
        process.communicate(timeout=60)
    diagnosis = analyze(str(run))
    assert diagnosis.facts["hang"]["state"] != "hangs" and "hung" not in diagnosis.verdict.headline
