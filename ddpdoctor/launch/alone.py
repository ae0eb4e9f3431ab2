"""Runs a job unrecorded if ddpdoctor fails before its start. Needs the standard library only.

The job's process must look as if the caller had started it directly. Open files, limits, priority, umask, working directory, session
and process group are inherited. This module restores the rest: what Python changed at its start (signals, LC_CTYPE), and environment
variables that contain a process id."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddpdoctor.plain import plain
from ddpdoctor.process import PR_GET_PDEATHSIG, die_with_parent
from ddpdoctor.telemetry import procfs

if TYPE_CHECKING:
    import ctypes


PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores them from its start: https://docs.python.org/3/library/signal.html#general-rules"""
_PASS_ON_IGNORED_SIGNALS = frozenset(
    ["sh", "bash", "dash", "ash", "busybox", "ksh", "mksh", "zsh", "systemd"]
)
"""Parents whose children inherit the signals that they ignore: shells, and systemd, whose services start with SIGPIPE ignored
(IgnoreSIGPIPE=). Other programs, such as those in Python and Rust, ignore SIGPIPE but give their children the default."""
_OWN_PROCESS_ID = ("LISTEN_PID", "SYSTEMD_EXEC_PID", "WATCHDOG_PID")
"""Variables in which systemd stores the id of the process that it started. libsystemd accepts the sockets only in that process:
sd_listen_fds(3)."""


def inherited_environment() -> dict[str, str]:
    """This process's environment as its caller set it."""
    environment = dict(os.environ)
    # In the C locale Python sets LC_CTYPE for itself and its children (PEP 538); /proc/self/environ keeps the caller's value.
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
    """Signals and prctl settings of this process as the caller set them."""

    blocked: frozenset[int]
    ignored: frozenset[int]
    death_signal: int
    """Signal that this process gets when its parent dies (PR_SET_PDEATHSIG); 0 for none."""
    adopts_orphans: bool
    """Whether orphaned descendants become children of this process (PR_SET_CHILD_SUBREAPER)."""

    def restore_signals(self) -> None:
        """Restore the caller's handling of signals, right before the command is executed."""
        for number in (*_IGNORED_BY_PYTHON, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN if number in self.ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def restore_in_child(self, libc: ctypes.CDLL, launcher_pid: int) -> None:
        """Restore the caller's signals and prctl settings in this process, which ``launcher_pid`` has just forked."""
        self.restore_signals()
        if self.adopts_orphans:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # If the launcher is killed by SIGKILL, the job gets SIGTERM, and torchrun then ends its ranks (they have other sessions).
        # The job's children do not inherit this setting, and a setuid command resets it.
        die_with_parent(self.death_signal or signal.SIGTERM, libc)
        if os.getppid() != launcher_pid:
            os.kill(os.getpid(), self.death_signal or signal.SIGTERM)


def inherited(libc: ctypes.CDLL | None) -> Inherited:
    """Signals and prctl settings inherited from the caller; only signals without ``libc``. Call before any signal is blocked or
    handled."""
    known = signal.valid_signals() - set(_IGNORED_BY_PYTHON)
    ignored = {number for number in known if signal.getsignal(number) is signal.SIG_IGN}
    return Inherited(
        blocked=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        ignored=frozenset(ignored | _ignored_by_parent()),
        death_signal=_prctl_value(libc, PR_GET_PDEATHSIG),
        adopts_orphans=bool(_prctl_value(libc, PR_GET_CHILD_SUBREAPER)),
    )


def _ignored_by_parent() -> set[int]:
    """The signals of ``_IGNORED_BY_PYTHON`` that the parent ignores, too, if its children inherit that."""
    parent = os.getppid()
    if procfs.status_field(parent, "Name") not in _PASS_ON_IGNORED_SIGNALS:
        return set()
    return procfs.signals_in(parent, "SigIgn") & set(_IGNORED_BY_PYTHON)


def _prctl_value(libc: ctypes.CDLL | None, option: int) -> int:
    if libc is None:
        return 0
    import ctypes

    value = ctypes.c_int(0)
    return value.value if libc.prctl(option, ctypes.byref(value), 0, 0, 0) == 0 else 0


def with_own_process_id(environment: Mapping[str, str], launcher_pid: int) -> dict[str, str]:
    """``environment`` with this process's id in the variables in which systemd stored ``launcher_pid``."""
    own_id = {
        name: str(os.getpid()) for name in _OWN_PROCESS_ID if environment.get(name) == str(launcher_pid)
    }
    return {**environment, **own_id}


class CommandNotStartedError(Exception):
    """The command did not start. ``exit_code`` is a shell's: 127 not found, 126 not executable."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UnpreparedError(Exception):
    """ddpdoctor failed before the job was started. The text says what failed and why."""


@contextmanager
def preparing(failed: str, passed: type[Exception] = UnpreparedError) -> Iterator[None]:
    """Context in which errors become an UnpreparedError with the text ``failed`` and the reason, except those of the class ``passed``."""
    try:
        yield
    except (UnpreparedError, CommandNotStartedError, passed):
        raise
    except Exception as error:
        raise UnpreparedError(f"{failed}: {error_text(error)}") from error


def error_text(error: Exception) -> str:
    """Text of an error, with its class name unless it is an OSError or UnpreparedError."""
    return str(error) if isinstance(error, (OSError, UnpreparedError)) else f"{type(error).__name__}: {error}"


def warn_unrecorded(error: Exception, warn: Callable[[str], None]) -> None:
    """Warn the user that the job runs unrecorded."""
    with suppress(Exception):
        warn(f"nothing is recorded and the job runs alone, because {error_text(error)}.")


def run_alone(command: Sequence[str], error: Exception) -> NoReturn:
    """Replace this process by ``command``; recording is impossible because of ``error``."""
    warn_unrecorded(UnpreparedError(f"ddpdoctor cannot be loaded: {error_text(error)}"), _print_warning)
    try:
        replace_this_process(command, os.environ)
    except CommandNotStartedError as failure:
        _print_warning(str(failure))
        sys.exit(failure.exit_code)


def _print_warning(sentence: str) -> None:
    with suppress(OSError, ValueError):  # stderr is closed
        print(f"ddpdoctor: {plain(sentence)}", file=sys.stderr, flush=True)


def replace_this_process(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by ``command``, with the caller's signals. Raises CommandNotStartedError."""
    with suppress(Exception):
        inherited(None).restore_signals()
    try:
        execute(list(command), dict(environment))
    except (OSError, ValueError) as error:
        raise not_started_error(command[0], error) from error


def execute(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by ``command``, searched on the PATH as by a shell. Raises OSError, ValueError."""
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        script = shutil.which(command[0], path=environment.get("PATH"))
        if error.errno != errno.ENOEXEC or script is None:
            raise
        # A script without "#!" line: shells and execvp(3) run it with sh.
        os.execve("/bin/sh", ["/bin/sh", script, *command[1:]], environment)


def not_started_error(program: str, error: Exception) -> CommandNotStartedError:
    """The user's error for ``error``, which was raised when ``program`` was to be executed, with a shell's exit code."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CommandNotStartedError(f"{program}: command not found.", 127)
    if isinstance(error, PermissionError):
        return CommandNotStartedError(f"{program}: found, but may not be executed.", 126)
    return CommandNotStartedError(f"{program}: cannot be started: {error}.", 126)
