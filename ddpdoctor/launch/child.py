"""The job as a child process: its streams are ours untouched, and every signal reaches it exactly once.

All forwardable signals are blocked in the launcher and taken one by one with ``sigtimedwait``, so that no
handler of ours ever runs, and the threads started later (telemetry) are never interrupted.

The job is forked here and not by ``subprocess``: that takes an ignored SIGCHLD for an exit code of 0, and gives the job
default signals where the caller had ignored them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ddpdoctor.launch.inherited import as_own, inherited
from ddpdoctor.launch.witness import GroupWitness

_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
_OF_OUR_WRITING = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTIN, signal.SIGTTOU)
_KEPT = frozenset(
    (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGWINCH, *_FAULTS, *_OF_OUR_WRITING)
)
"""What cannot be blocked, tells of the launcher itself, or comes in floods from a terminal to the whole group (WINCH)."""
_FORWARDED = signal.valid_signals() - _KEPT
_ENDING = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM))
_ASKING = _ENDING | {signal.SIGXCPU}
"""By which people and schedulers ask a job to end."""
_DYING_S = 1.0
_GRACE_S = 45.0
"""More than torchrun gives its ranks before it kills them (30 s)."""


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: by itself with ``code``, or by ``signal``; the other one is None."""

    code: int | None
    signal: int | None

    def take(self) -> NoReturn:
        """End this process the same way: whoever waits for it sees the job's own end."""
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:  # as it is where the caller had closed it
                    stream.flush()
            except (OSError, ValueError):
                pass
        if self.signal is not None:
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            if self.signal in signal.valid_signals() - {signal.SIGKILL}:
                signal.signal(self.signal, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [self.signal])
            os.kill(os.getpid(), self.signal)
            time.sleep(_DYING_S)
            # Reached by the first process of a container, whom its own signals cannot end: a shell says this.
            os._exit(128 + self.signal)
        os._exit(self.code or 0)


class CommandNotStartedError(Exception):
    """The command did not start. ``exit_code`` is a shell's: 127 not found, 126 not executable."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Ending:
    """The end of a job that was asked for here."""

    def __init__(self) -> None:
        self._kill_at_s: float | None = None

    def go_on(self, pid: int) -> None:
        """Signal the process ``pid``, which was not waited for yet, if it is time to."""
        now_s = time.monotonic()
        first, self._kill_at_s = self._kill_at_s is None, self._kill_at_s or now_s + _GRACE_S
        if first or now_s >= self._kill_at_s:
            try:
                os.kill(pid, signal.SIGTERM if first else signal.SIGKILL)
            except OSError:
                pass  # a job that became another user, by sudo, takes no signal from this one


class NoProcessError(OSError):
    """The system allows no further process (``ulimit -u``, a container's limit)."""


class Child:
    """A running command.

    To be made, waited for and closed by the main thread, before any other thread is started: the kernel ends the job
    when the *thread* that forked it ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        asked: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Start ``command``; ``asked`` is called with the number of each signal that asks it to end, once that was passed on. Raises
        CommandNotStartedError, NoProcessError."""
        self._asked = asked
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._caller = inherited(self._libc)
        # Where it is ignored, the kernel throws the job's exit code away.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [*_FORWARDED, signal.SIGCHLD])
        self._witness = GroupWitness(_FORWARDED)
        self._asked_to_stop = False
        self._ending: _Ending | None = None
        try:
            self.pid = self._start(list(command), dict(environment))
        except NoProcessError:
            self.close()
            raise
        except (OSError, ValueError) as error:
            self.close()
            raise _not_started(command[0], error) from error

    def _start(self, command: list[str], environment: dict[str, str]) -> int:
        """Fork and execute ``command``; its process id. Raises OSError, ValueError."""
        launcher_pid = os.getpid()
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reader)
            raise NoProcessError(*error.args) from error
        finally:
            if os.getpid() == launcher_pid:
                os.close(writer)
        if pid == 0:
            try:
                self._caller.hand_on(self._libc, launcher_pid)
                _execute(command, as_own(environment, launcher_pid))
            except BaseException as error:
                os.write(writer, f"{getattr(error, 'errno', None) or 0} {error}".encode(errors="replace"))
            finally:
                os._exit(127)
        with os.fdopen(reader, "rb") as failure:  # ends where the command begins
            number, _, words = failure.read().decode(errors="replace").partition(" ")
        if number:
            os.waitpid(pid, 0)
            raise OSError(int(number), os.strerror(int(number))) if int(number) else ValueError(words)
        return pid

    def wait(self) -> ExitStatus:
        """Pass signals on until the command has ended."""
        while (status := self._reap()) is None:
            self._stop_along()
            if self._ending is not None:
                self._ending.go_on(self.pid)
            received = signal.sigtimedwait([*_FORWARDED, signal.SIGCHLD], 1.0)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._pass_on(received)
        code = os.waitstatus_to_exitcode(status)
        return ExitStatus(code, None) if code >= 0 else ExitStatus(None, -code)

    def end(self) -> None:
        """Have the job be ended, by ``wait``, as a scheduler would: SIGTERM, and SIGKILL where it goes on. For any thread."""
        self._ending = self._ending or _Ending()

    def _reap(self) -> int | None:
        """The job's wait status, once it has ended.

        Other children go as well: a container's first process is given the orphans of all others, and a former
        witness need not be waited for.
        """
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == self.pid:
                return found[1]
        return None

    def _pass_on(self, received: signal.struct_siginfo) -> None:
        number = received.si_signo
        if not self._witness.saw(number, received.si_code):
            try:
                os.kill(self.pid, number)  # not waited for yet, so the id is still its own
            except OSError:
                pass  # a job that became another user, by sudo, takes no signal from this one
        if number in _ASKING:
            self._asked(number)
        if number in (signal.SIGTSTP, signal.SIGCONT):
            self._asked_to_stop = number == signal.SIGTSTP

    def _stop_along(self) -> None:
        """Stop where the job was told to and has: not where it ignores that, nor where nobody could continue us."""
        if self._asked_to_stop and os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG):
            self._asked_to_stop = False
            os.kill(os.getpid(), signal.SIGSTOP)

    def close(self) -> bool:
        """Give the signals back their former meaning in this process, but for those that end it: they wait until somebody
        unblocks them. True where one of these came after the job's end.
        """
        self._witness.close()
        signal.sigtimedwait([signal.SIGCHLD], 0)
        asked_to_end = False
        while (received := signal.sigtimedwait(_FORWARDED, 0)) is not None:
            asked_to_end |= received.si_signo in _ENDING - self._caller.ignored
        signal.pthread_sigmask(signal.SIG_SETMASK, self._caller.blocked | _ENDING)
        return asked_to_end


def replace_this_process(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become ``command``, where no process can be had for it. Raises CommandNotStartedError."""
    caller = inherited(ctypes.CDLL(None, use_errno=True))
    caller.restore_signals()
    try:
        _execute(list(command), dict(environment))
    except (OSError, ValueError) as error:
        raise _not_started(command[0], error) from error


def _execute(command: list[str], environment: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        script = shutil.which(command[0], path=environment.get("PATH"))
        if error.errno != errno.ENOEXEC or script is None:
            raise
        # A script without "#!" line: shells and execvp(3) give it to sh.
        os.execve("/bin/sh", ["/bin/sh", script, *command[1:]], environment)


def _not_started(program: str, error: Exception) -> CommandNotStartedError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CommandNotStartedError(f"{program}: command not found.", 127)
    if isinstance(error, PermissionError):
        return CommandNotStartedError(f"{program}: found, but may not be executed.", 126)
    return CommandNotStartedError(f"{program}: cannot be started: {error}.", 126)
