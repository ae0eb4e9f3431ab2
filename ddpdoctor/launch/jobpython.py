"""The job's Python interpreter, which may differ from ddpdoctor's: which one a command starts, and what it can record."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.hook.environment import HookOptions, job_environment
from ddpdoctor.readable import is_readable

_LAUNCHERS = ("torchrun", "python", "python3")
"""Programs that most jobs begin with, tried in this order if no command is given."""
_ANSWER = "DDPDOCTOR-ANSWER "
_MOST_WORDS = 300
_FIRST_LINE_BYTES = 512
_MOST_BYTES = 1 << 20
_END_S = 2.0
_DEADLINE_S = 120.0
"""Importing torch from a cold network file system takes a minute."""
_QUESTION = f"""
import json, sys
answer = {{"python": sys.version.split()[0], "executable": sys.executable, "hook": "_ddpdoctor" in sys.modules}}
try:
    import torch
    answer["torch"] = str(torch.__version__)
    answer["cuda"] = torch.version.cuda or torch.version.hip
    answer["devices"] = torch.cuda.device_count()
    import torch.distributed as distributed
    answer["distributed"] = distributed.is_available()
    answer["backends"] = [
        name for name in ("nccl", "gloo", "ucc", "mpi")
        if answer["distributed"] and getattr(distributed, "is_%s_available" % name, bool)()
    ]
    import torch.profiler
    answer["profiler"] = sorted(str(each).split(".")[-1] for each in torch.profiler.supported_activities())
except Exception as error:
    answer["error"] = "%s: %s" % (type(error).__name__, error)
print("\\n{_ANSWER}" + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Interpreter:
    """The Python interpreter that a job most likely runs."""

    path: str
    sure: bool
    """Whether the command names it; else it is the first one found."""


def interpreter_of(command: Sequence[str]) -> Interpreter:
    """The Python that ``command`` starts; without a command that of torchrun, else the first on the PATH, else ddpdoctor's own.

    Raises DdpDoctorError if the command cannot be started.
    """
    if not command:
        found = next((path for name in _LAUNCHERS if (path := shutil.which(name))), None)
        return Interpreter(sys.executable, False) if found is None else _interpreter(found)
    path = shutil.which(command[0])
    if path is None:
        there = bool(command[0]) and Path(command[0]).exists()
        raise DdpDoctorError(
            f"{command[0]}: not executable: start it with python."
            if there
            else f"{command[0] or 'the empty command'}: no such command here."
        )
    if not Path(path).is_file():
        raise DdpDoctorError(f"{command[0]}: no program: not a regular file.")
    return _interpreter(path)


def _interpreter(path: str) -> Interpreter:
    """The interpreter in a script's first line; for any other program the Python on the PATH."""
    if Path(path).name.startswith("python"):
        return Interpreter(str(Path(path).absolute()), True)
    with Path(path).open("rb") as file:
        first = file.readline(_FIRST_LINE_BYTES)
    words = os.fsdecode(first[2:]).split() if first.startswith(b"#!") and b"\0" not in first else []
    if words and Path(words[0]).name == "env":
        words = [shutil.which(word) or word for word in words[1:] if not word.startswith("-")]
    if words and Path(words[0]).name.startswith("python"):
        return Interpreter(words[0], True)
    return Interpreter(shutil.which("python") or shutil.which("python3") or sys.executable, False)


def probe_interpreter(interpreter: str) -> dict[str, Any]:
    """Start the interpreter in the environment of a job and query it: ``python``, ``executable``, ``hook`` (whether the recorder was
    loaded); with torch also ``torch``, ``cuda``, ``devices``, ``distributed``, ``backends``, ``profiler``. ``error`` says what failed.
    Takes as long as an import of torch.
    """
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-") as folder:
        environment = job_environment(
            folder, folder, HookOptions(profile_steps=None, hang_after_s=0), os.environ
        )
        try:
            said = _said([interpreter, "-c", _QUESTION], environment, folder)
        except TimeoutError:
            return {"error": f"it did not answer within {_DEADLINE_S:.0f} s"}
        except (OSError, ValueError) as error:
            return {"error": (getattr(error, "strerror", None) or str(error)).lower()}
    before, found, answer = said.rpartition(_ANSWER)
    try:
        return (
            msgspec.to_builtins(msgspec.json.decode(answer.splitlines()[0], type=_Answer))
            if found
            else _failed(before or said)
        )
    except (msgspec.DecodeError, RecursionError, IndexError):
        return {"error": "its answer makes no sense"}


def _failed(said: str) -> dict[str, Any]:
    lines = said.strip().splitlines() or ["nothing said"]
    return {"error": f"it ended without an answer: {lines[-1][:_MOST_WORDS]}"}


def _said(command: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
    """Output of a program up to its answer. Its child processes are ended. Raises OSError, ValueError, and TimeoutError after
    ``_DEADLINE_S``."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    said, until_s = bytearray(), time.monotonic() + _DEADLINE_S
    answer = _ANSWER.encode()
    try:
        while len(said) < _MOST_BYTES and b"\n" not in said.partition(answer)[2]:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not is_readable(process.stdout.fileno(), left_s):
                raise TimeoutError
            more = os.read(process.stdout.fileno(), 1 << 16)
            if not more:
                break
            said += more
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
    return said.decode("utf-8", "replace")


class _Answer(msgspec.Struct, omit_defaults=True):
    python: str
    executable: str = ""
    hook: bool = False
    torch: str | None = None
    cuda: str | None = None
    devices: int = 0
    distributed: bool = False
    backends: list[str] = []
    profiler: list[str] = []
    error: str | None = None
