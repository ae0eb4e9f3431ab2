"""Runs the job as a child process, which inherits the launcher's streams and gets every signal exactly once.

All forwardable signals are blocked in the launcher and received one by one with ``sigtimedwait``: no handler runs, and threads are
never interrupted.

^C, ``timeout``, a scheduler or a service manager signal every process of a group, so the job gets the signal directly. A supervisor that
knows only the launcher's process id relies on the launcher to forward the signal. A signal must not reach the job twice: torchrun stops
its cleanup on a second SIGTERM. Therefore a second process of the launcher's group blocks all signals; a signal that is pending there
(``/proc/PID/status``) was sent to the whole group. To a job that has a group of its own, the launcher forwards what the
terminal sends to end it.

The job is forked here instead of by ``subprocess``, which reports exit code 0 if SIGCHLD is ignored, and resets signals that the caller
ignored.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from ddpdoctor.launch.alone import (
    UnpreparedError,
    execute,
    inherited,
    not_started_error,
    preparing,
    with_own_process_id,
)
from ddpdoctor.launch.helper import close_inherited_files
from ddpdoctor.launch.leftovers import GRACE_S
from ddpdoctor.process import die_with_parent
from ddpdoctor.telemetry.procfs import signals_in

_SI_KERNEL = 0x80
_PENDING_S = 0.02
_ENDING_S = 0.5


class GroupSignalDetector:
    """A process in the launcher's group that blocks all signals. Start it before any thread, with ``signals`` blocked."""

    def __init__(self, signals: Iterable[int], libc: ctypes.CDLL) -> None:
        self._libc = libc
        self._signals = set(signals)
        self._seen: set[int] = set()
        self._pid = self._start()

    def was_sent_to_group(self, number: int, origin: int) -> bool:
        """Whether signal ``number``, received here with siginfo code ``origin``, went to the whole group.

        If the process could not be started, only signals from the terminal are recognised, by their origin.
        """
        if number in self._seen:
            self._seen.discard(number)
            return True
        deadline_s = time.monotonic() + _PENDING_S
        while number not in _pending(self._pid):
            if time.monotonic() > deadline_s:
                return origin == _SI_KERNEL
            time.sleep(0.002)
        self._replace(number)
        return True

    def _replace(self, number: int) -> None:
        """Start a new process, because a pending signal stays pending. The old one is ended last, so that no signal is missed."""
        old, self._pid = self._pid, self._start()
        before, after = _pending(old), _pending(self._pid)
        self._seen |= (before & self._signals) - after - {number}
        _end(old)

    def close(self) -> None:
        """End the process."""
        _end(self._pid)
        self._pid = 0

    def _start(self) -> int:
        launcher_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            _wait_until_killed(self._libc, launcher_pid)
        return max(pid, 0)


def _pending(pid: int) -> set[int]:
    """Numbers of the pending signals of process ``pid``."""
    return signals_in(pid, "ShdPnd") | signals_in(pid, "SigPnd")


def _end(pid: int) -> None:
    """Kill child process ``pid`` and wait up to ``_ENDING_S`` for its end."""
    if not pid:
        return
    deadline_s = time.monotonic() + _ENDING_S
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline_s:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id has not been reused
            time.sleep(0.001)


def _wait_until_killed(libc: ctypes.CDLL, launcher_pid: int) -> None:
    """Sleep until this process is killed or the launcher is gone."""
    try:
        die_with_parent(signal.SIGKILL, libc)
        close_inherited_files([])
        while os.getppid() == launcher_pid:
            time.sleep(3600)
    finally:
        os._exit(0)


_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
_CAUSED_BY_OWN_OUTPUT = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTIN, signal.SIGTTOU)
_NOT_FORWARDED = frozenset(
    (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGWINCH, *_FAULTS, *_CAUSED_BY_OWN_OUTPUT)
)
"""Signals that are not forwarded: they cannot be blocked, concern the launcher itself, or often go to the whole group (SIGWINCH)."""
_FORWARDED = signal.valid_signals() - _NOT_FORWARDED
_ENDING = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM))
_END_REQUESTS = _ENDING | {signal.SIGXCPU}
"""Signals with which users and schedulers ask a job to end."""
_BEFORE_EXEC = -1
"""Used instead of an errno if the error occurred before the command was executed."""
_DEATH_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: by exit code ``code`` or by ``signal``. The other field is None."""

    code: int | None
    signal: int | None

    def exit_this_process(self) -> NoReturn:
        """End this process the same way, so that its parent gets the job's exit status."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                if stream is not None:  # None if the caller had closed it
                    stream.flush()
        if self.signal is not None:
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            if self.signal in signal.valid_signals() - {signal.SIGKILL}:
                signal.signal(self.signal, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [self.signal])
            os.kill(os.getpid(), self.signal)
            time.sleep(_DEATH_TIMEOUT_S)
            # Reached by the first process of a container, which its own signals do not end. It returns a shell's exit code.
            os._exit(128 + self.signal)
        os._exit(self.code or 0)


_LIMITS = frozenset((errno.E2BIG, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE))
"""Errors of exec that the additional environment variables may cause."""


class Child:
    """A running command. Create it in the main thread, before any other thread starts: the kernel signals the job when the *thread* that
    forked it ends (PR_SET_PDEATHSIG).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_end_request: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Start ``command``. ``on_end_request`` is called with the number of each signal that asks the job to end, after it was
        forwarded. Raises CommandNotStartedError, or UnpreparedError if ddpdoctor failed before that; the signals are then restored."""
        self._on_end_request = on_end_request
        self.is_end_requested = self.was_group_signalled = False
        """Whether the job is to end, by a signal that the caller had not ignored or by ``end``; and whether the last such signal went to
        the whole process group."""
        with preparing("what the caller left to it cannot be read"):
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._caller = inherited(self._libc)
        self._group_signals: GroupSignalDetector | None = None
        self._is_stop_requested = False
        self._is_ending_job = False
        self._kill_at_s: float | None = None
        """When SIGKILL follows SIGTERM, monotonic seconds."""
        try:
            with preparing("no process can be started for it"):
                # If SIGCHLD is ignored, the kernel discards the job's exit code.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_BLOCK, [*_FORWARDED, signal.SIGCHLD])
                self._group_signals = GroupSignalDetector(_FORWARDED, self._libc)
                self.pid = self._start(list(command), dict(environment))
        except BaseException:
            self._restore_signals()
            raise

    def _restore_signals(self) -> None:
        if self._group_signals is not None:
            self._group_signals.close()
        ignored = signal.SIGCHLD in self._caller.ignored
        signal.signal(signal.SIGCHLD, signal.SIG_IGN if ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._caller.blocked)

    def _start(self, command: list[str], environment: dict[str, str]) -> int:
        """Fork and execute ``command``. Returns its process id. Raises CommandNotStartedError, UnpreparedError, OSError if it does not
        run."""
        launcher_pid = os.getpid()
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(reader)
            raise
        finally:
            if os.getpid() == launcher_pid:
                os.close(writer)
        if pid == 0:
            self._execute_in_child(command, environment, launcher_pid, writer)
        # The pipe ends when the command begins. Only one read, so that nothing can fail here after that.
        message = os.read(reader, select.PIPE_BUF)
        os.close(reader)
        if message:
            os.waitpid(pid, 0)
            raise _start_error(command[0], message.decode(errors="replace"))
        return pid

    def _execute_in_child(
        self, command: list[str], environment: dict[str, str], launcher_pid: int, writer: int
    ) -> NoReturn:
        """Execute the command in the forked process. An error is written to ``writer``."""
        number = _BEFORE_EXEC
        try:
            self._caller.restore_in_child(self._libc, launcher_pid)
            own = with_own_process_id(environment, launcher_pid)
            number = 0
            execute(command, own)
        except BaseException as error:
            number = number or getattr(error, "errno", None) or 0
            os.write(writer, f"{number} {error}".encode(errors="replace")[: select.PIPE_BUF])
        finally:
            os._exit(127)

    def wait(self) -> ExitStatus:
        """Forward signals until the command has ended."""
        while (status := self._reap()) is None:
            self._stop_with_job()
            if self._is_ending_job:
                self._continue_ending()
            received = signal.sigtimedwait([*_FORWARDED, signal.SIGCHLD], 1.0)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._forward(received)
        code = os.waitstatus_to_exitcode(status)
        return ExitStatus(code, None) if code >= 0 else ExitStatus(None, -code)

    def end(self) -> None:
        """Make ``wait`` end the job as a scheduler does: SIGTERM, and SIGKILL after ``GRACE_S``. May be called from any thread."""
        self.is_end_requested = self._is_ending_job = True

    def _continue_ending(self) -> None:
        now_s = time.monotonic()
        first, self._kill_at_s = self._kill_at_s is None, self._kill_at_s or now_s + GRACE_S
        if first or now_s >= self._kill_at_s:
            self._send(signal.SIGTERM if first else signal.SIGKILL)

    def _send(self, number: int) -> None:
        with suppress(OSError):  # not permitted if the job runs as another user (sudo)
            os.kill(self.pid, number)  # not reaped yet, so the id has not been reused

    def _reap(self) -> int | None:
        """The job's wait status if it has ended, else None.

        Other children are reaped, too: killed helper processes, and orphans if this is a container's first process.
        """
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == self.pid:
                return found[1]
        return None

    def _forward(self, received: signal.struct_siginfo) -> None:
        number = received.si_signo
        by_group = self._group_signals is not None and self._group_signals.was_sent_to_group(
            number, received.si_code
        )
        if not by_group or self._has_missed(received):
            self._send(number)
        if number in _END_REQUESTS:
            if number not in self._caller.ignored:
                self.is_end_requested, self.was_group_signalled = True, by_group
            self._on_end_request(number)
        if number in (signal.SIGTSTP, signal.SIGCONT):
            self._is_stop_requested = number == signal.SIGTSTP

    def _has_missed(self, received: signal.struct_siginfo) -> bool:
        """Whether the terminal sent a request to end to this process's group, and the job has a group of its own in the same session, as
        under GNU ``timeout``. In a session of its own, the job is to live on. A stop (^Z) is not sent: nothing would continue the job."""
        if received.si_code != _SI_KERNEL or received.si_signo not in _ENDING - self._caller.ignored:
            return False
        with suppress(OSError):
            return os.getpgid(self.pid) != os.getpgrp() and os.getsid(self.pid) == os.getsid(0)
        return False

    def _stop_with_job(self) -> None:
        """After SIGTSTP, stop this process if the job has stopped."""
        if self._is_stop_requested and os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG):
            self._is_stop_requested = False
            os.kill(os.getpid(), signal.SIGSTOP)

    def close(self) -> bool:
        """Restore the signals of this process, except that those that end it stay blocked. Returns whether one of these was received
        after the job's end.
        """
        if self._group_signals is not None:
            self._group_signals.close()
        signal.sigtimedwait([signal.SIGCHLD], 0)
        is_end_requested = False
        while (received := signal.sigtimedwait(_FORWARDED, 0)) is not None:
            is_end_requested |= received.si_signo in _ENDING - self._caller.ignored
        signal.pthread_sigmask(signal.SIG_SETMASK, self._caller.blocked | _ENDING)
        return is_end_requested


def _start_error(program: str, message: str) -> Exception:
    """The exception for the error that the forked process wrote."""
    number, _, words = message.partition(" ")
    if int(number) == _BEFORE_EXEC:
        return UnpreparedError(f"the way to it failed: {words}")
    error = OSError(int(number), os.strerror(int(number))) if int(number) else ValueError(words)
    if int(number) in _LIMITS:
        return UnpreparedError(f"it cannot be started with what a recording adds to its environment: {error}")
    return not_started_error(program, error)
