"""The job as a child process: its streams are ours untouched, and every signal reaches it exactly once.

All forwardable signals are blocked in the launcher and taken one by one with ``sigtimedwait``, so that no
handler of ours ever runs, and the threads started later (telemetry) are never interrupted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ddpdoctor.launch.witness import PR_SET_PDEATHSIG, GroupWitness

_FORWARDED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGXCPU, signal.SIGURG, signal.SIGCONT, signal.SIGTSTP),
)


_DYING_S = 1.0


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
            if self.signal not in (signal.SIGKILL, signal.SIGSTOP):
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


class Child:
    """A running command.

    To be made, waited for and closed by the main thread, before any other thread is started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start ``command``. Raises CommandNotStartedError."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*_FORWARDED, signal.SIGCHLD])
        self._witness = GroupWitness(_FORWARDED)
        try:
            self._process = self._start(list(command), dict(environment))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.close()
            raise _not_started(command[0], error) from error
        self.pid = self._process.pid

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        prepare = self._in_child(os.getpid())
        try:
            return subprocess.Popen(command, env=environment, close_fds=False, preexec_fn=prepare)
        except OSError as error:
            script = shutil.which(command[0], path=environment.get("PATH"))
            if error.errno != errno.ENOEXEC or script is None:
                raise
            # A script without "#!" line: shells and execvp(3) give it to sh.
            shell = ["/bin/sh", script, *command[1:]]
            return subprocess.Popen(shell, env=environment, close_fds=False, preexec_fn=prepare)

    def _in_child(self, launcher_pid: int) -> Callable[[], None]:
        mask, libc = self._mask, ctypes.CDLL(None, use_errno=True)

        def prepare() -> None:
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # A launcher killed by SIGKILL takes the job down in good order: torchrun ends its ranks on
            # SIGTERM, and its ranks have sessions of their own, where nobody else would find them.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != launcher_pid:
                os.kill(os.getpid(), signal.SIGTERM)

        return prepare

    def wait(self) -> ExitStatus:
        """Pass signals on until the command has ended."""
        while (code := self._process.poll()) is None:
            received = signal.sigtimedwait([*_FORWARDED, signal.SIGCHLD], 1.0)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._pass_on(received)
        return ExitStatus(code, None) if code >= 0 else ExitStatus(None, -code)

    def _pass_on(self, received: signal.struct_siginfo) -> None:
        number = received.si_signo
        if not self._witness.saw(number, received.si_code):
            # Not send_signal(), which would poll; the child cannot have been waited for here, so the id is
            # still its own.
            os.kill(self._process.pid, number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def close(self) -> bool:
        """Give the signals back their former meaning in this process; True where one that ends a process came
        after the job's end.
        """
        self._witness.close()
        signal.sigtimedwait([signal.SIGCHLD], 0)
        asked_to_end = False
        while (received := signal.sigtimedwait(_FORWARDED, 0)) is not None:
            asked_to_end |= received.si_signo in (
                signal.SIGHUP,
                signal.SIGINT,
                signal.SIGQUIT,
                signal.SIGTERM,
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        return asked_to_end


def _not_started(program: str, error: Exception) -> CommandNotStartedError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CommandNotStartedError(f"{program}: command not found.", 127)
    if isinstance(error, PermissionError):
        return CommandNotStartedError(f"{program}: found, but may not be executed.", 126)
    return CommandNotStartedError(f"{program}: cannot be started: {error}.", 126)
