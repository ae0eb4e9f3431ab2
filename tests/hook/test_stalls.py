"""A rank that says where it stands: what it takes for that from the job, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.hook.environment import HookOptions, job_environment
from ddpdoctor.launch.leftovers import drain_spools
from ddpdoctor.rundir.spool import make_spool_root
from tests.python import NEEDS_STACKS

from .recording import forked, plain_environment

pytestmark = pytest.mark.torchrun
STEPS = """
import faulthandler, os, signal, sys, time
import torch
parameter = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
def step():
    parameter.sum().backward()
    optimizer.step()
step(); step()
"""


def run_script(tmp: Path, script: str, before: str = "") -> tuple[subprocess.CompletedProcess[str], Path]:
    """A job of one process; its folder in the run directory."""
    run = tmp / "run"
    run.mkdir()
    spool = make_spool_root(str(run))
    options = HookOptions(profile_steps=None, hang_after_s=3.0)
    (tmp / "job.py").write_text(before + STEPS + script)
    process = subprocess.run(
        forked(tmp / "job.py", ranks=0),
        env=job_environment(str(run), spool, options, plain_environment()),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp,
        check=False,
    )
    drain_spools(Path(spool), run=run)
    return process, run / "ranks" / "00000"


def document(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def test_a_forked_child_ends(tmp_path) -> None:
    """The timer's thread is not in it, and faulthandler's own end would wait for that."""
    script = """
time.sleep(1.5)
pid = os.fork()
if pid == 0:
    sys.exit(3)
ends = time.monotonic() + 20
while time.monotonic() < ends and not (found := os.waitpid(pid, os.WNOHANG))[0]:
    time.sleep(0.05)
print(os.waitstatus_to_exitcode(found[1]) if found[0] else "hangs")
os.kill(pid, signal.SIGKILL) if not found[0] else None
"""
    process, folder = run_script(tmp_path, script)
    assert (process.returncode, process.stdout) == (0, "3\n"), process.stderr
    assert document(folder, "ending.json")["how"] == "in_order"


def test_the_signal_is_given_back_harmless(tmp_path) -> None:
    """While the rank is recorded faulthandler answers it, with the stack of the main thread alone; afterwards, in forked children, and in
    the last moments of the process it is ignored: its default would end the process."""
    script = """
import threading
number = signal.SIGRTMAX - 9
threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
def asked():
    os.kill(os.getpid(), number)
    time.sleep(0.05)
ends, written = time.monotonic() + 20, ""
while "in asked" not in written and time.monotonic() < ends:
    asked()
    files = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
    written = "".join(open(file).read() for file in files if os.path.realpath(file).endswith("/faults.txt"))
print(written.count("Stack ("), written.count("Thread 0x"))
if os.fork() == 0:
    asked()
    os._exit(0)
print(os.wait()[1])
import atexit
class Last:
    def __del__(self):
        import os
        os.kill(os.getpid(), 64 - 9)
signal.last = Last()
"""
    process, folder = run_script(tmp_path, script)
    assert process.returncode == 0, (process.returncode, process.stderr)
    stacks, rest = process.stdout.split("\n", 1)
    assert int(stacks.split()[0]) >= 1 and stacks.split()[1] == "0" and rest == "0\n"
    assert not (folder / "faults.txt").exists()


@pytest.mark.parametrize(
    "before",
    [
        "signal.signal(number, lambda *_: print('mine', flush=True))",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [number])",
    ],
)
def test_a_signal_that_the_job_uses_is_not_taken(tmp_path, before) -> None:
    setting = f"import signal\nnumber = signal.SIGRTMAX - 9\n{before}\n"
    script = (
        "time.sleep(1.2); os.kill(os.getpid(), number); time.sleep(0.1); print(number in signal.sigpending())"
    )
    process, folder = run_script(tmp_path, script, setting)
    assert process.returncode == 0, process.stderr
    assert process.stdout == ("mine\nFalse\n" if "lambda" in before else "True\n")
    assert not (folder / "faults.txt").exists()


def test_a_signal_that_the_job_takes_later_is_no_longer_told(tmp_path) -> None:
    script = """
import glob, struct
(page,) = glob.glob(os.environ["DDPDOCTOR_SPOOL"] + "/*/heartbeat")
def told(wanted):
    ends = time.monotonic() + 20
    while (number := struct.unpack("<9q", open(page, "rb").read(72))[8]) != wanted and time.monotonic() < ends:
        time.sleep(0.05)
    return number == wanted
print(told(signal.SIGRTMAX - 9))
signal.signal(signal.SIGRTMAX - 9, lambda *_: None)
print(told(0))
"""
    process, _ = run_script(tmp_path, script)
    assert (process.returncode, process.stdout) == (0, "True\nTrue\n"), process.stderr


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("time.sleep(1); print(faulthandler.is_enabled(), flush=True); faulthandler.enable()", "False\n"),
        ("time.sleep(1); print(faulthandler.disable(), flush=True)", "False\n"),
    ],
)
def test_the_jobs_own_handler(tmp_path, script: str, told: str) -> None:
    process, folder = run_script(tmp_path, f"{script}\nimport ctypes; ctypes.string_at(0)")
    assert (process.returncode, process.stdout) == (-11, told)
    assert ("Segmentation fault" in process.stderr) is ("enable()" in script)
    assert not (folder / "faults.txt").exists()


@pytest.mark.extended
def test_a_handler_of_the_jobs_is_not_replaced(tmp_path) -> None:
    before = "import signal\nheard = []\nsignal.signal(signal.SIGBUS, lambda number, frame: heard.append(number))\n"
    script = "time.sleep(1); os.kill(os.getpid(), signal.SIGBUS); print(heard == [signal.SIGBUS])"
    process, _ = run_script(tmp_path, script, before)
    assert (process.returncode, process.stdout) == (0, "True\n"), process.stderr


@NEEDS_STACKS
def test_where_a_long_step_is(tmp_path) -> None:
    """What it said last is kept of one that is killed in it."""
    script = """
def loading_forever():
    time.sleep(3.5)
    os.kill(os.getpid(), signal.SIGKILL)
loading_forever()
"""
    process, folder = run_script(tmp_path, script)
    assert process.returncode == -9
    progress = document(folder, "progress.json")
    assert (progress["step"], progress["phase"], progress["world_size"]) == (2, "other", 1)
    assert progress["syscall"].split()[0].isdecimal()
    assert [function for _, _, function in progress["user"]][:1] == ["loading_forever"] or progress["frames"]
    assert not (folder / "ending.json").exists()


def test_a_prompts_errors_end_nobody(tmp_path) -> None:
    """An error that was caught is none, whatever ``sys`` remembers of it."""
    script = """
def inner():
    raise ValueError("caught")
try:
    inner()
except ValueError as error:
    sys.last_value = error
"""
    process, folder = run_script(tmp_path, f"sys.ps1 = '> '\n{script}")
    assert process.returncode == 0
    assert document(folder, "ending.json")["how"] == "in_order"


@pytest.mark.extended
def test_a_question_by_another_launcher_is_answered_whatever_its_number(tmp_path) -> None:
    """One that takes over from another knows nothing of what that one has asked."""
    script = """
import glob, json
(spool,) = glob.glob(os.environ["DDPDOCTOR_SPOOL"] + "/00000-*")
for number in (9, 3):
    with open(spool + "/question", "w") as file:
        file.write(str(number))
    ends_s, answered = time.monotonic() + 20, None
    while answered != number and time.monotonic() < ends_s:
        time.sleep(0.1)
        if os.path.exists(spool + "/standing.json"):
            answered = json.load(open(spool + "/standing.json"))["request"]
    print(answered)
"""
    process, _ = run_script(tmp_path, script)
    assert process.stdout.split() == ["9", "3"], process.stderr
