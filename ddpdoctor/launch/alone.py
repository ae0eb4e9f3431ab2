"""A job without us: what fails of ours before it starts costs the recording, never the job.

Nothing here needs more than Python itself.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from ddpdoctor.launch.inherited import inherited
from ddpdoctor.plain import plain


class CommandNotStartedError(Exception):
    """The command did not start. ``exit_code`` is a shell's: 127 not found, 126 not executable."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UnpreparedError(Exception):
    """Something of ours failed before the job was started; the text says what, and why."""


@contextmanager
def preparing(failed: str, but: type[Exception] = UnpreparedError) -> Iterator[None]:
    """Whatever goes wrong within is an UnpreparedError that says ``failed``, except for errors of the class ``but``."""
    try:
        yield
    except (UnpreparedError, CommandNotStartedError, but):
        raise
    except Exception as error:
        raise UnpreparedError(f"{failed}: {words_of(error)}") from error


def words_of(error: Exception) -> str:
    """What went wrong; of an error that nobody expected, with its name."""
    return str(error) if isinstance(error, (OSError, UnpreparedError)) else f"{type(error).__name__}: {error}"


def say_alone(error: Exception, warn: Callable[[str], None]) -> None:
    """The one line for the user."""
    with suppress(Exception):
        warn(f"nothing is recorded and the job runs alone, because {words_of(error)}.")


def run_alone(command: Sequence[str], error: Exception) -> NoReturn:
    """Become ``command``, because ``error`` keeps us from even trying to record it."""
    say_alone(UnpreparedError(f"ddpdoctor cannot be loaded: {words_of(error)}"), _say)
    try:
        replace_this_process(command, os.environ)
    except CommandNotStartedError as not_started:
        _say(str(not_started))
        sys.exit(not_started.exit_code)


def _say(sentence: str) -> None:
    try:
        print(f"ddpdoctor: {plain(sentence)}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass  # nobody reads it


def replace_this_process(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become ``command``, as if we had never been there. Raises CommandNotStartedError."""
    with suppress(Exception):
        inherited(None).restore_signals()
    try:
        execute(list(command), dict(environment))
    except (OSError, ValueError) as error:
        raise not_started(command[0], error) from error


def execute(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Become ``command`` as a shell would find it. Raises OSError, ValueError."""
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        script = shutil.which(command[0], path=environment.get("PATH"))
        if error.errno != errno.ENOEXEC or script is None:
            raise
        # A script without "#!" line: shells and execvp(3) give it to sh.
        os.execve("/bin/sh", ["/bin/sh", script, *command[1:]], environment)


def not_started(program: str, error: Exception) -> CommandNotStartedError:
    """``error``, with which ``program`` could not be executed, in words and as a shell's exit code."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CommandNotStartedError(f"{program}: command not found.", 127)
    if isinstance(error, PermissionError):
        return CommandNotStartedError(f"{program}: found, but may not be executed.", 126)
    return CommandNotStartedError(f"{program}: cannot be started: {error}.", 126)
