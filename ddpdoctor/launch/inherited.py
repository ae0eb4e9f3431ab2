"""What the caller left to this process, and the job must find as if it had been started without us.

Open files, limits, priority, umask, working directory, session and process group pass through by themselves. What does
not is gathered here: what Python changed before our first line ran, and what is ours by its nature (a process id).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.parentdeath import PR_GET_PDEATHSIG, die_with_parent

if TYPE_CHECKING:
    import ctypes

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""From its start on, whatever they were before: https://docs.python.org/3/library/signal.html#general-rules"""
_HANDS_ON_WHAT_IT_IGNORES = frozenset(
    ["sh", "bash", "dash", "ash", "busybox", "ksh", "mksh", "zsh", "systemd"]
)
"""Shells, and the service manager whose services start with SIGPIPE ignored (IgnoreSIGPIPE=). Others, such as Python and
Rust, ignore SIGPIPE themselves and give their children the default."""
_OWN_PROCESS_ID = ("LISTEN_PID", "SYSTEMD_EXEC_PID", "WATCHDOG_PID")
"""systemd names the process that it started, and libsystemd takes its sockets in no other: sd_listen_fds(3)."""


def inherited_environment() -> dict[str, str]:
    """This process's environment as its caller made it."""
    environment = dict(os.environ)
    # In the locale C Python sets this for itself and all below it (PEP 538); what the caller gave stays where it was.
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environment
    environment.pop("LC_CTYPE", None)
    values = [entry.partition(b"=")[2] for entry in given if entry.startswith(b"LC_CTYPE=")]
    if values:
        environment["LC_CTYPE"] = os.fsdecode(values[0])
    return environment


@dataclass(frozen=True)
class Inherited:
    """Signals as the caller set them, and what it asked of the kernel about this process."""

    blocked: frozenset[int]
    ignored: frozenset[int]
    death_signal: int
    """That this process is to get when its parent dies; 0 for none."""
    adopts: bool
    """Whether orphans below this process become its children (PR_SET_CHILD_SUBREAPER)."""

    def restore_signals(self) -> None:
        """Give each signal the meaning that it had for the caller; for the last moment before the command's."""
        for number in (*_IGNORED_BY_PYTHON, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN if number in self.ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def hand_on(self, libc: ctypes.CDLL, launcher_pid: int) -> None:
        """Make this process, fresh from a fork by ``launcher_pid``, what the caller meant the job to be."""
        self.restore_signals()
        if self.adopts:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # A launcher killed by SIGKILL takes the job down in good order: torchrun ends its ranks on SIGTERM, and its
        # ranks have sessions of their own, where nobody else would find them. Not inherited by what the job forks,
        # and gone where the command is setuid.
        die_with_parent(self.death_signal or signal.SIGTERM, libc)
        if os.getppid() != launcher_pid:
            os.kill(os.getpid(), self.death_signal or signal.SIGTERM)


def inherited(libc: ctypes.CDLL | None) -> Inherited:
    """What this process has from its caller; without ``libc``, for one that stays the same process, signals only. Call before
    any signal is blocked or given another meaning."""
    known = signal.valid_signals() - set(_IGNORED_BY_PYTHON)
    ignored = {number for number in known if signal.getsignal(number) is signal.SIG_IGN}
    return Inherited(
        blocked=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        ignored=frozenset(ignored | _ignored_by_parent()),
        death_signal=_asked(libc, PR_GET_PDEATHSIG),
        adopts=bool(_asked(libc, PR_GET_CHILD_SUBREAPER)),
    )


def _ignored_by_parent() -> set[int]:
    """Of what Python ignores in any case: what a parent that hands such things on ignores too."""
    status = status_of(os.getppid())
    if status.get("Name") not in _HANDS_ON_WHAT_IT_IGNORES:
        return set()
    return signals_of(status, "SigIgn") & set(_IGNORED_BY_PYTHON)


def _asked(libc: ctypes.CDLL | None, question: int) -> int:
    if libc is None:
        return 0
    import ctypes

    answer = ctypes.c_int(0)
    return answer.value if libc.prctl(question, ctypes.byref(answer), 0, 0, 0) == 0 else 0


def status_of(pid: int) -> dict[str, str]:
    """The fields of ``/proc/PID/status``; none where it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def signals_of(status: Mapping[str, str], field: str) -> set[int]:
    """Numbers of the signals in a mask of ``/proc/PID/status``."""
    mask = int(status.get(field, "0"), 16)
    return {bit + 1 for bit in range(mask.bit_length()) if mask >> bit & 1}


def as_own(environment: Mapping[str, str], launcher_pid: int) -> dict[str, str]:
    """``environment`` for this process, which stands where its caller started ``launcher_pid``."""
    mine = {name: str(os.getpid()) for name in _OWN_PROCESS_ID if environment.get(name) == str(launcher_pid)}
    return {**environment, **mine}
