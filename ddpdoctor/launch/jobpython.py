"""The job's own Python, which need not be ours: which one a command starts, and what it can record."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.hook.environment import HookOptions, job_environment

_LAUNCHERS = ("torchrun", "python", "python3")
"""What most jobs begin with, tried in this order where no command is given."""
_ANSWER = "DDPDOCTOR-ANSWER "
_MOST_WORDS = 300
_FIRST_LINE_BYTES = 512
_DEADLINE_S = 120.0
"""Importing torch from a cold network file system takes a minute."""
_QUESTION = f"""
import json, sys
told = {{"python": sys.version.split()[0], "executable": sys.executable, "hook": "_ddpdoctor" in sys.modules}}
try:
    import torch
    told["torch"] = str(torch.__version__)
    told["cuda"] = torch.version.cuda or torch.version.hip
    told["devices"] = torch.cuda.device_count()
    import torch.distributed as distributed
    told["distributed"] = distributed.is_available()
    told["backends"] = [
        name for name in ("nccl", "gloo", "ucc", "mpi")
        if told["distributed"] and getattr(distributed, "is_%s_available" % name, bool)()
    ]
    import torch.profiler
    told["profiler"] = sorted(str(each).split(".")[-1] for each in torch.profiler.supported_activities())
except Exception as error:
    told["error"] = "%s: %s" % (type(error).__name__, error)
print("\\n{_ANSWER}" + json.dumps(told))
"""


def interpreter_of(command: Sequence[str]) -> str:
    """The Python that ``command`` starts; without a command, that of torchrun, else the first on the path, else our own.

    Raises DdpDoctorError where the command is not there.
    """
    if not command:
        found = next((path for name in _LAUNCHERS if (path := shutil.which(name))), None)
        return sys.executable if found is None else _interpreter(found)
    path = shutil.which(command[0])
    if path is None:
        raise DdpDoctorError(f"{command[0]}: no such command here.")
    return _interpreter(path)


def _interpreter(path: str) -> str:
    """Of a script, what its first line names; of anything else that is no Python, the one on the path."""
    if Path(path).name.startswith("python"):
        return path
    with Path(path).open("rb") as file:
        first = file.readline(_FIRST_LINE_BYTES)
    words = os.fsdecode(first[2:]).split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [shutil.which(word) or word for word in words[1:] if not word.startswith("-")]
    if words and Path(words[0]).name.startswith("python"):
        return words[0]
    return shutil.which("python") or shutil.which("python3") or sys.executable


def asked(interpreter: str) -> dict[str, Any]:
    """What it says of itself under the environment in which ``run`` starts a job: ``python``, ``executable``, ``hook`` (whether the
    recorder came in), and where torch is there ``torch``, ``cuda``, ``devices``, ``distributed``, ``backends``, ``profiler``.
    ``error`` says what failed. Takes as long as an import of torch.
    """
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-") as folder:
        environment = job_environment(
            folder, folder, HookOptions(profile_steps=None, hang_after_s=0), os.environ
        )
        try:
            ended = subprocess.run(
                [interpreter, "-c", _QUESTION],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"it did not answer within {_DEADLINE_S:.0f} s"}
        except OSError as error:
            return {"error": (error.strerror or str(error)).lower()}
    answer = ended.stdout.decode("utf-8", "replace").rpartition(_ANSWER)[2]
    try:
        told = json.loads(answer)
    except ValueError:
        told = None
    if isinstance(told, dict):
        return told
    lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    return {
        "error": f"it ended with code {ended.returncode}: {(lines or ['nothing said'])[-1][:_MOST_WORDS]}"
    }
