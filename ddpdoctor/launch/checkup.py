"""``ddpdoctor doctor``: checks what can be recorded on this machine with the job's Python. The job's interpreter may differ from
ddpdoctor's, so this module finds the one that a command starts, and queries it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.hook.environment import HookOptions, job_environment
from ddpdoctor.launch.directory import RUNS_FOLDER
from ddpdoctor.process import is_readable
from ddpdoctor.telemetry.host import Cgroup, HostSampler
from ddpdoctor.telemetry.nvml import NvmlSampler

_LAUNCHERS = ("torchrun", "python", "python3")
"""Programs that start most jobs, tried in this order if no command is given."""
_ANSWER = "DDPDOCTOR-ANSWER "
_MAX_ERROR_CHARACTERS = 300
_FIRST_LINE_BYTES = 512
_MAX_OUTPUT_BYTES = 1 << 20
_KILL_TIMEOUT_S = 2.0
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
    """Whether the command names it; otherwise it is the first one found."""


def interpreter_of(command: Sequence[str]) -> Interpreter:
    """The Python that ``command`` starts. Without a command: that of torchrun, else the first on the PATH, else ddpdoctor's own.

    Raises DdpDoctorError if the command cannot be started.
    """
    if not command:
        found = next((path for name in _LAUNCHERS if (path := shutil.which(name))), None)
        return Interpreter(sys.executable, False) if found is None else _interpreter(found)
    path = shutil.which(command[0])
    if path is None:
        exists = bool(command[0]) and Path(command[0]).exists()
        raise DdpDoctorError(
            f"{command[0]}: not executable: start it with python."
            if exists
            else f"{command[0] or 'the empty command'}: no such command here."
        )
    if not Path(path).is_file():
        raise DdpDoctorError(f"{command[0]}: no program: not a regular file.")
    return _interpreter(path)


def _interpreter(path: str) -> Interpreter:
    """The interpreter in a script's first line; the Python on the PATH for any other program."""
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
    """Start the interpreter in the environment of a job and query it. Takes as long as importing torch.

    Keys: ``python``, ``executable``, ``hook`` (whether the recorder was loaded); with torch also ``torch``, ``cuda``, ``devices``,
    ``distributed``, ``backends``, ``profiler``. ``error`` says what failed.
    """
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-") as folder:
        environment = job_environment(
            folder, folder, HookOptions(profile_steps=None, hang_after_s=0), os.environ
        )
        try:
            output = _output_of([interpreter, "-c", _QUESTION], environment, folder)
        except TimeoutError:
            return {"error": f"it did not answer within {_DEADLINE_S:.0f} s"}
        except (OSError, ValueError) as error:
            return {"error": (getattr(error, "strerror", None) or str(error)).lower()}
    before, found, answer = output.rpartition(_ANSWER)
    try:
        if not found:
            lines = (before or output).strip().splitlines() or ["nothing said"]
            return {"error": f"it ended without an answer: {lines[-1][:_MAX_ERROR_CHARACTERS]}"}
        known: dict[str, Any] = msgspec.to_builtins(msgspec.json.decode(answer.splitlines()[0], type=_Answer))
        return known
    except (msgspec.DecodeError, RecursionError, IndexError):
        return {"error": "its answer makes no sense"}


def _output_of(command: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
    """Output of a program up to its answer. The program and its child processes are then killed. Raises OSError, ValueError, and
    TimeoutError after ``_DEADLINE_S``."""
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
    output, deadline_s = bytearray(), time.monotonic() + _DEADLINE_S
    answer = _ANSWER.encode()
    try:
        while len(output) < _MAX_OUTPUT_BYTES and b"\n" not in output.partition(answer)[2]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not is_readable(process.stdout.fileno(), left_s):
                raise TimeoutError
            more = os.read(process.stdout.fileno(), 1 << 16)
            if not more:
                break
            output += more
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_TIMEOUT_S)
    return output.decode("utf-8", "replace")


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


_OLDEST_PYTHON, _OLDEST_TORCH = (3, 9), (2, 1)
_GB = 1e9
_INFINIBAND = Path("/sys/class/infiniband")
_MIN_SHM_BYTES = 1_000_000_000
"""A container has 64 MB by default; the batches of a few dataloader workers take hundreds of MB."""
_MIN_DISK_BYTES = 2_000_000_000
"""A rank's trace may take 256 MB."""
_SLOW_CLOCK_NS = 500.0
"""A slower clock is read by a system call. A step reads the clock about ten times."""
_ROUNDS, _READINGS = 20, 100
"""The fastest round is reported: slower ones may have shared the core."""
_NETWORK_STORAGE = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "fuse"),
    *("ceph", "beegfs", "9p", "virtiofs", "wekafs"),
)


class CheckState(StrEnum):
    """Result of a check."""

    OK = "ok"
    NOTE = "note"
    """Recording works but something is missing, or the job itself may be slower or fail."""
    NO = "no"
    """Nothing can be recorded."""


@dataclass(frozen=True)
class Check:
    """One check and its result."""

    name: str
    state: CheckState
    words: str


_Result = tuple[CheckState, str]
"""State and text."""


def checks_for(command: Sequence[str]) -> list[Check]:
    """All checks for the job that ``command`` starts; without a command, for the Python that jobs on this machine most likely use.

    Raises DdpDoctorError if the command cannot be started. Writes only to a temporary folder.
    """
    interpreter = interpreter_of(command)
    answer = probe_interpreter(interpreter.path)
    host = HostSampler().facts
    checks: tuple[tuple[str, Callable[[], _Result]], ...] = (
        ("Job's Python", lambda: _python(answer, interpreter, command)),
        ("PyTorch", lambda: _torch(answer, command)),
        ("GPUs", lambda: _gpus(answer)),
        ("Cores", lambda: _cores(host)),
        ("Memory", lambda: _memory(host)),
        ("Shared memory", _shared_memory),
        ("Clock", _clock),
        ("Processes", _processes),
        ("Run directory", _run_directory),
        ("Network", _network),
    )
    return [_run_check(name, check) for name, check in checks]


def _run_check(name: str, check: Callable[[], _Result]) -> Check:
    try:
        state, words = check()
    except (OSError, ValueError, TypeError, psutil.Error) as error:
        state, words = CheckState.NOTE, f"could not be checked: {error}"
    return Check(name, state, words)


def _python(answer: dict[str, Any], interpreter: Interpreter, command: Sequence[str]) -> _Result:
    if "python" not in answer:
        return CheckState.NO, f"{interpreter.path}: {answer.get('error', 'no answer')}"
    found = f"{answer['python']}, {answer.get('executable') or interpreter.path}"
    if _version_numbers(answer["python"]) < _OLDEST_PYTHON:
        return CheckState.NO, f"{found}: recording needs {_dotted(_OLDEST_PYTHON)} or newer"
    if not answer.get("hook"):
        return CheckState.NO, f"{found}: does not load the recorder (is it started with -S, -E or -I?)"
    if command and not interpreter.sure:
        asked = f"{command[0]} does not say which Python it starts; this one was asked"
        return CheckState.NOTE, f"{found}: {asked}"
    return CheckState.OK, f"{found}; the recorder loads"


def _torch(answer: dict[str, Any], command: Sequence[str]) -> _Result:
    version = answer.get("torch")
    if version is None:
        hint = "" if command else ": name the job's command after --"
        return CheckState.NO, f"not found ({answer.get('error', 'no answer')}){hint}"
    if not answer.get("distributed"):
        return CheckState.NO, f"{version} without torch.distributed: ranks cannot be distinguished"
    backends = answer.get("backends") or []
    words = f"{version}, {'CUDA or ROCm ' + answer['cuda'] if answer.get('cuda') else 'for CPUs'}, backends {', '.join(backends)}"
    if _version_numbers(version) < _OLDEST_TORCH:
        return CheckState.NO, f"{words}: recording needs {_dotted(_OLDEST_TORCH)} or newer"
    if answer.get("devices") and "CUDA" not in (answer.get("profiler") or []):
        return CheckState.NOTE, f"{words}; its profiler cannot see GPUs (no CUPTI): no kernels in the window"
    return CheckState.OK, words


def _gpus(answer: dict[str, Any]) -> _Result:
    sampler = NvmlSampler()
    names = [str(gpu.get("name") or "GPU") for gpu in sampler.static]
    seen = answer.get("devices") or 0
    if names:
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        lacks = f"; {sampler.notes[0].text}" if sampler.notes else ""
        if not seen:
            return CheckState.NOTE, f"{kinds}, but the job's PyTorch sees none"
        state = CheckState.NOTE if lacks else CheckState.OK
        return state, f"{kinds}, {seen} for the job; clocks, power and links by NVML{lacks}"
    if seen:
        lacks = "no clocks, power, throttling or links are recorded"
        return CheckState.NOTE, f"{seen} for the job, but no NVML: {lacks}"
    return CheckState.NOTE, "none: a job here runs on CPUs"


def _cores(host: dict[str, Any]) -> _Result:
    usable = host.get("cpu_count_usable") or os.cpu_count() or 1
    limit = Cgroup().cpu_limit_cores()
    words = f"{usable} of {host.get('cpu_count_logical') or usable} usable"
    if limit is not None and limit < usable:
        held = f"held to {limit:g} by a container's limit: keep ranks x threads below that"
        return CheckState.NOTE, f"{words}, {held}"
    load = os.getloadavg()[0]
    if load > usable / 2:
        compete = "other programs compete for them, which would show in every step"
        return CheckState.NOTE, f"{words}; load average {load:.1f}: {compete}"
    return CheckState.OK, f"{words}, no limit of a container"


def _memory(host: dict[str, Any]) -> _Result:
    memory = psutil.virtual_memory()
    limit = host.get("cgroup_memory_limit_bytes")
    words = f"{memory.available / _GB:.1f} GB free of {memory.total / _GB:.1f} GB"
    if limit is not None and limit < memory.total:
        return CheckState.OK, f"{words}, held to {limit / _GB:.1f} GB by a container's limit"
    return CheckState.OK, words


def _shared_memory() -> _Result:
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):
        return CheckState.NOTE, f"{place} is not writable: records wait in the temporary folder, on disk"
    usage = shutil.disk_usage(place)
    words = f"{place}: {usage.free / _GB:.2f} GB free of {usage.total / _GB:.2f} GB"
    if usage.free < _MIN_SHM_BYTES:
        return CheckState.NOTE, f"{words}; loader workers may be killed for lack of it (docker: --shm-size)"
    return CheckState.OK, words


def _clock() -> _Result:
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        source = "source unknown"
    each_ns = min(_ns_per_reading() for _ in range(_ROUNDS))
    words = f"{source}, {each_ns:.0f} ns a reading"
    if each_ns > _SLOW_CLOCK_NS:
        return CheckState.NOTE, f"{words}: slow, so recording a step costs more here"
    return CheckState.OK, words


def _ns_per_reading() -> float:
    start = time.perf_counter_ns()
    for _ in range(_READINGS):
        time.monotonic_ns()
    return (time.perf_counter_ns() - start) / _READINGS


def _processes() -> _Result:
    files = {"wchan": "what a process waits in", "syscall": "its system call", "io": "its I/O"}
    lacking = [name for file, name in files.items() if not _readable(Path("/proc/self") / file)]
    if not Path("/proc/self/stat").exists():
        return CheckState.NOTE, "/proc is missing: of a job that hangs, only stacks can be recorded"
    if lacking:
        return CheckState.NOTE, f"of a job that hangs, {', '.join(lacking)} cannot be read"
    return CheckState.OK, "their state can be read if a job hangs"


def _run_directory() -> _Result:
    place = Path(RUNS_FOLDER) if Path(RUNS_FOLDER).is_dir() else Path.cwd()
    shown = f"./{RUNS_FOLDER}"
    if not os.access(place, os.W_OK | os.X_OK):
        return CheckState.NO, f"{shown} cannot be written: give `run` another place with --out"
    free, kind = shutil.disk_usage(place).free, _file_system(place.resolve())
    words = f"{shown}: {free / _GB:.0f} GB free, {kind}"
    if free < _MIN_DISK_BYTES:
        return CheckState.NOTE, f"{words}; a rank's trace takes up to 0.26 GB (--max-trace-mb)"
    if kind.startswith(_NETWORK_STORAGE):
        return CheckState.OK, f"{words}: shared storage, which ranks never wait for"
    return CheckState.OK, words


def _network() -> _Result:
    links = [
        # The kernel reports 0 or -1 for virtual links, which have no speed.
        f"{name} {link.speed / 1e3:g} Gb/s" if link.speed > 0 else name
        for name, link in sorted(psutil.net_if_stats().items())
        if link.isup and name != "lo" and not name.startswith(("veth", "docker", "br-"))
    ]
    rdma = sorted(f"{port.parent.parent.name}:{port.name}" for port in _INFINIBAND.glob("*/ports/*"))
    words = f"{', '.join(links) or 'no interface is up'}; {'RDMA ' + ', '.join(rdma) if rdma else 'no RDMA'}"
    return CheckState.OK, words


def _file_system(place: Path) -> str:
    """File system type of the mount that contains ``place``."""
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "file system unknown"


def _readable(file: Path) -> bool:
    try:
        file.read_bytes()
    except OSError:
        return False
    return True


def _version_numbers(version: str) -> tuple[int, ...]:
    """(2, 13) for ``2.13.0+cpu``; (0, 0) if ``version`` is malformed."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (0, 0)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
