"""Whoever starts ``ddpdoctor run``: the job finds what it would have found without us, and ends as it would have."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.launch.alone import PR_SET_CHILD_SUBREAPER
from ddpdoctor.process import PR_SET_PDEATHSIG

from .launched import DDPDOCTOR_RUN, clean_environment

UNDER_US = [*DDPDOCTOR_RUN, "--no-telemetry", "--out", "run", "--"]
STOPPABLE = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
OURS = (
    b"DDPDOCTOR_",
    b"PYTHONPATH=",
    b"KINETO_LOG_LEVEL=",
    b"TORCH_FR_BUFFER_SIZE=",
    b"TORCH_NCCL_TRACE_BUFFER_SIZE=",
)

PROBE = r"""
(grep -E '^(Umask|Uid|Gid|Groups|SigBlk|SigIgn|SigCgt|Cap|NoNewPrivs|Seccomp:|Cpus_allowed)' /proc/$$/status) >status
(cd /proc/$$/fdinfo; for n in *; do echo "$n $(readlink ../fd/$n) $(grep flags $n)"; done) >descriptors
(cat /proc/$$/environ) >environ
(cat /proc/$$/limits /proc/$$/timerslack_ns /proc/$$/oom_score_adj; cut -d' ' -f7,18,19 /proc/$$/stat; pwd -P) >rest
(for a; do echo "$a"; done) >arguments
exit 3
"""
"""A shell, because Python changes what it finds. Each dump comes from a subshell of its own: what it opens there is not
found."""
ASKS = """
import ctypes
libc, death, adopts = ctypes.CDLL(None), ctypes.c_int(), ctypes.c_int()
libc.prctl(2, ctypes.byref(death)); libc.prctl(37, ctypes.byref(adopts))
print(death.value, adopts.value)
"""


def ignore(*numbers: int) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def block(*numbers: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def close(*streams: int) -> None:
    for stream in streams:
        os.close(stream)


def prctl(*arguments: int) -> None:
    ctypes.CDLL(None).prctl(*arguments, 0, 0, 0)


def bound() -> None:
    """Limits, priority, file mode: what passes through by itself, and must go on doing so."""
    os.umask(0o077)
    os.nice(3)
    for kind, most in (
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 1 << 20),
    ):
        resource.setrlimit(kind, (most, most))


def found(
    folder: Path,
    command: Sequence[str | bytes],
    caller: Callable[[], Any],
    environment: Mapping[Any, Any] | None,
) -> dict[str, Any]:
    """What the probe tells, and its exit code."""
    folder.mkdir()
    reader, writer = os.pipe()
    before = {signal.SIGPIPE: signal.SIG_DFL, signal.SIGXFSZ: signal.SIG_DFL}

    def prepare() -> None:
        for number, meaning in before.items():
            signal.signal(number, meaning)
        caller()

    process = subprocess.Popen(
        command, cwd=folder, env=clean_environment() if environment is None else environment, preexec_fn=prepare,
        restore_signals=False, pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(reader), os.close(writer)
    told: dict[str, Any] = {"code": process.wait(60)}
    for name in ("status", "descriptors", "environ", "rest", "arguments"):
        lines = (folder / name).read_bytes().split(b"\0" if name == "environ" else b"\n")
        told[name] = [line for line in lines if line and not line.startswith(OURS)]
    told["rest"] = [line for line in told["rest"] if line != str(folder).encode()]
    told["descriptors"] = [line.partition(b":[")[0] for line in told["descriptors"]]
    told["environ"] = sorted(told["environ"])
    return told


PATH = {"PATH": os.environ["PATH"]}
EXTENDED = pytest.mark.extended


@pytest.mark.parametrize(
    ("caller", "environment"),
    [
        pytest.param(lambda: ignore(*STOPPABLE - {signal.SIGPIPE, signal.SIGXFSZ}), PATH, id="ignores all"),
        pytest.param(lambda: block(*STOPPABLE), None, id="blocks all"),
        pytest.param(lambda: close(0), None, id="no stdin", marks=EXTENDED),
        pytest.param(lambda: close(1), None, id="no stdout", marks=EXTENDED),
        pytest.param(lambda: close(0, 1, 2), None, id="no streams"),
        pytest.param(os.setsid, {}, id="no terminal, no environment"),
        pytest.param(bound, {**PATH, "LANG": "C"}, id="bounds, LANG=C"),
        pytest.param(bool, {**PATH, "LC_CTYPE": "C"}, id="LC_CTYPE=C", marks=EXTENDED),
        pytest.param(bool, {**PATH, b"N\xff": b"\xfe\x80", "LC_ALL": "C.UTF-8"}, id="bytes"),
    ],
)
def test_the_job_finds_what_its_caller_left(tmp_path, caller, environment) -> None:
    job = ["/bin/sh", "-c", PROBE, "probe", "a", b"\xff\xfe", "\u00fc"]
    plain = found(tmp_path / "plain", job, caller, environment)
    under = found(tmp_path / "under", [*UNDER_US, *job], caller, environment)
    assert plain["code"] == 3 and len(plain["status"]) > 10
    assert under == plain
    manifest = json.loads((tmp_path / "under" / "run" / "manifest.json").read_text())
    assert (manifest["exit_code"], manifest["signal"]) == (3, None)


def run(
    tmp_path: Path, *command: str, by: Sequence[str] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """``command`` under us, started by the command ``by``."""
    return subprocess.run(
        [*by, *UNDER_US, *command], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True,
        timeout=60, check=False, **options,
    )  # fmt: skip


def test_what_a_shell_ignores_reaches_the_job(tmp_path) -> None:
    """Python ignores SIGPIPE whatever its caller says, so that it must be asked of the caller."""
    show, shell = ["grep", "SigIgn", "/proc/self/status"], ["sh", "-c", "trap '' PIPE; \"$@\"; true", "sh"]

    def caller() -> None:
        """These are ignored if the tests run in the background, and a shell cannot change that."""
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)

    plain = subprocess.run([*shell, *show], capture_output=True, text=True, preexec_fn=caller)
    assert plain.stdout.endswith("1000\n")
    assert run(tmp_path, *show, by=shell, preexec_fn=caller).stdout == plain.stdout


def test_what_the_caller_asked_of_the_kernel_holds_for_the_job(tmp_path) -> None:
    job = [sys.executable, "-c", ASKS]

    def caller() -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    assert run(tmp_path, *job, preexec_fn=caller).stdout == f"{signal.SIGKILL:d} 1\n"


def test_sockets_from_systemd_are_the_jobs(tmp_path) -> None:
    started_by = ["sh", "-c", 'LISTEN_FDS=1 LISTEN_PID=$$ exec "$@"', "sh"]
    first, second = run(tmp_path, "sh", "-c", "echo $LISTEN_PID; echo $$", by=started_by).stdout.split()
    assert first == second


@pytest.fixture
def start(tmp_path):
    """Start a command under us, in a process group of its own; wait for its first word."""
    started = []

    def begin(*command: str, by: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*by, *UNDER_US, *command], cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, **{"process_group": 0, **options},
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


COUNTER = """
import signal, sys
numbers = [int(number) for number in sys.argv[1:]]
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("ready", flush=True)
for _ in numbers:
    print(signal.sigtimedwait(numbers, 30).si_signo, flush=True)
"""


@pytest.mark.parametrize("sent_to", ["launcher", "group"])
def test_signals_of_all_kinds_reach_the_job_once(start, sent_to: str) -> None:
    numbers = [
        signal.SIGABRT,
        signal.SIGPROF,
        signal.SIGIO,
        signal.SIGPWR,
        signal.SIGRTMIN + 3,
    ]
    process = start(sys.executable, "-c", COUNTER, *(f"{number:d}" for number in (*numbers, signal.SIGTERM)))
    for number in (*numbers, signal.SIGTERM):
        (os.killpg if sent_to == "group" else os.kill)(process.pid, number)
        assert int(process.stdout.readline()) == number
    assert process.wait(30) == 0 and process.stdout.read() == ""


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    "why", ["ignored", *(pytest.param(why, marks=EXTENDED) for why in ("blocked", "orphaned"))]
)
def test_a_stop_that_the_job_does_not_follow_does_not_stop_the_launcher(start, why: str) -> None:
    """Else nobody would ever continue it: a shell without job control, a session of its own."""
    caller = {"ignored": lambda: ignore(signal.SIGTSTP), "blocked": lambda: block(signal.SIGTSTP)}.get(why)
    own = {"start_new_session": True, "process_group": None} if why == "orphaned" else {}
    job = "import signal; signal.signal(10, lambda *_: exit(4)); print('ready', flush=True); signal.pause()"
    process = start(sys.executable, "-c", job, preexec_fn=caller, **own)
    os.kill(process.pid, signal.SIGTSTP)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(30) == 4


def test_a_request_to_end_that_the_caller_ignores_ends_nothing(start) -> None:
    """As under nohup: the terminal's end is nothing to the job."""
    process = start("sh", "-c", "echo ready; read line; exit 4", preexec_fn=lambda: ignore(signal.SIGHUP),
                    stdin=subprocess.PIPE)  # fmt: skip
    os.killpg(process.pid, signal.SIGHUP)
    process.stdin.write("on\n")
    process.stdin.flush()
    assert process.wait(30) == 4


@pytest.mark.extended
def test_in_the_background_of_a_terminal_both_stop_and_go_on(tmp_path) -> None:
    """The job reads from a terminal that is not its own yet: SIGTTIN for the whole group."""
    leader, follower = pty.openpty()
    shell = f"""
import fcntl, os, signal, subprocess, sys, termios
os.setsid(); fcntl.ioctl({follower}, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = subprocess.Popen(sys.argv[1:], stdin={follower}, process_group=0, stderr=subprocess.DEVNULL,
                       preexec_fn=lambda: signal.signal(signal.SIGTTOU, signal.SIG_DFL))
status = os.waitpid(job.pid, os.WUNTRACED)[1]
print(os.WIFSTOPPED(status) and os.WSTOPSIG(status), flush=True)
os.tcsetpgrp({follower}, job.pid)
os.killpg(job.pid, signal.SIGCONT)
print(os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1]))
"""
    try:
        process = subprocess.Popen([sys.executable, "-c", shell, *UNDER_US, "sh", "-c", "read word; exit $word"],
                                   cwd=tmp_path, env=clean_environment(), pass_fds=[follower],
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        os.write(leader, b"6\n")
        assert process.communicate(timeout=60)[0] == f"{signal.SIGTTIN:d}\n6\n"
    finally:
        os.close(leader), os.close(follower)


@pytest.mark.parametrize(
    ("wrapper", "code"),
    [(["timeout", "60"], 7), (["setsid"], 3)],
    ids=["in its own group", "in its own session"],
)
def test_an_interrupt_typed_at_the_terminal_reaches_a_job_that_has_its_own_group(
    tmp_path, wrapper: list[str], code: int
) -> None:
    """The terminal sends it to the launcher's group alone. Who gives the job a session of its own wants it to live on."""
    leader, follower = pty.openpty()
    shell = f"""
import fcntl, os, subprocess, sys, termios
os.setsid(); fcntl.ioctl({follower}, termios.TIOCSCTTY, 0)
job = subprocess.Popen(sys.argv[1:], stdin={follower}, process_group=0, stderr=subprocess.DEVNULL)
os.tcsetpgrp({follower}, job.pid)
print(job.wait())
"""
    job = ["sh", "-c", "trap 'exit 7' INT; echo ready; for i in 1 2 3 4 5 6 7 8; do sleep 0.25; done; exit 3"]
    try:
        process = subprocess.Popen([sys.executable, "-c", shell, *UNDER_US, *wrapper, *job],
                                   cwd=tmp_path, env=clean_environment(), pass_fds=[follower],
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        os.write(leader, b"\x03")
        assert process.communicate(timeout=60)[0] == f"{code}\n"
    finally:
        os.close(leader), os.close(follower)


@pytest.mark.extended
def test_a_job_that_became_another_user_takes_no_signal_and_costs_no_traceback(start, tmp_path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start a job as somebody whom it may not signal")
    process = start(*as_user(54322), "sh", "-c", "echo ready; sleep 1; exit 5", by=as_user(54321, "+setuid"))
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(30) == 5


def as_user(uid: int, *capabilities: str) -> list[str]:
    """A command that runs another one as a user who may read this repository, wherever it lies."""
    kept = ",".join(["+dac_override", "+dac_read_search", *capabilities])
    return ["setpriv", "--reuid", str(uid), "--inh-caps", kept, "--ambient-caps", kept]


NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """A command that makes another one the first process of a PID namespace."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no PID namespaces here")
    return NAMESPACE


@pytest.mark.extended
@pytest.mark.parametrize(
    ("job", "code"),
    [("exit 5", 5), ("kill -9 $$", 137), ("kill -TERM $$", 143)],
    ids=["exit", "kill", "term"],
)
def test_the_end_of_a_job_in_a_container(tmp_path, namespace, job: str, code: int) -> None:
    assert run(tmp_path, "sh", "-c", job, by=namespace).returncode == code


@pytest.mark.extended
def test_orphans_in_a_container_leave_no_zombies(tmp_path, namespace) -> None:
    job = "(sleep 0.1 &); (sleep 0.2 &); sleep 0.8; cat /proc/[0-9]*/stat"
    done = run(tmp_path, "sh", "-c", job, by=namespace)
    states = [line.rpartition(")")[2].split()[0] for line in done.stdout.splitlines()]
    assert len(states) >= 3 and "Z" not in states, done.stdout


@pytest.mark.extended
def test_where_there_can_be_no_other_process_the_job_takes_ours(tmp_path) -> None:
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)); os.execvp(sys.argv[1], sys.argv[1:])"
    by = [sys.executable, "-c", limit]
    if os.getuid() == 0:  # who is not limited
        by = [*as_user(54321), *by]
    done = run(tmp_path, "sh", "-c", "echo $PPID; exit 6", by=by)
    assert (done.returncode, done.stdout) == (6, f"{os.getpid()}\n"), done.stderr
    assert done.stderr.count("\n") == 1 and "nothing is recorded" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_working_directory_that_was_deleted(tmp_path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [
        *DDPDOCTOR_RUN,
        "--out",
        str(tmp_path / "run"),
        "--",
        sys.executable,
        "-c",
        "raise SystemExit(6)",
    ]
    done = subprocess.run(command, cwd=gone, env=clean_environment(), preexec_fn=gone.rmdir, capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 6 and "Traceback" not in done.stderr
    assert (tmp_path / "run" / "manifest.json").exists()
