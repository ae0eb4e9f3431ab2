"""Runs one trial: the job for some steps, recorded in a separate folder, which is removed afterwards. The processes run in a separate
session, with limits on time and memory, and are ended with all their children.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from ddpdoctor.hook.environment import RUN, TRIAL
from ddpdoctor.measure.numerics import Array
from ddpdoctor.process import die_with_parent
from ddpdoctor.rundir import STEPS_FILE
from ddpdoctor.rundir.draining import discard
from ddpdoctor.rundir.host_files import remove_root
from ddpdoctor.rundir.reader import RankRecord, RunDirectory
from ddpdoctor.rundir.spool import roots_of, spools_in
from ddpdoctor.rundir.stepevents import LineField
from ddpdoctor.telemetry.host import Cgroup

from .scratch import copy_folder, scratch_folder
from .settings import ENVIRONMENT

_END_S = 20.0
"""Time between SIGTERM and SIGKILL when a trial is ended."""
_LOOK_S = 0.1
_POLLS_PER_CHECK = 5
"""Number of polls per check of memory."""
_LEAST_LEFT, _OF_BEGINNING = 0.03, 0.25
"""Share of the total memory, and share of the memory that was free at the trial's begin. If less than both is free, the trial is ended
before the kernel kills a process, which might not be one of the trial's."""


class _Room(NamedTuple):
    left: int
    whole: int


class Watch:
    """Checks that memory and shared memory are not exhausted by a trial with many workers."""

    def __init__(self) -> None:
        self._least = {
            name: min(_LEAST_LEFT * room.whole, _OF_BEGINNING * room.left) for name, room in _rooms()
        }

    def reason_to_end(self) -> str:
        """Why the trial must end; empty if enough memory is left."""
        for name, room in _rooms():
            if room.left < self._least.get(name, 0):
                return f"it left only {room.left / 1e6:.0f} MB of {name}, and was ended"
        return ""


@cache
def _cgroup() -> Cgroup:
    return Cgroup()


def _rooms() -> Iterator[tuple[str, _Room]]:
    memory = psutil.virtual_memory()
    left, whole = memory.available, memory.total
    group = _cgroup()
    free, limit = group.free_memory_bytes(), group.memory_limit_bytes()
    if free is not None and isinstance(limit, int):  # a container or a Slurm job may have less memory
        left, whole = min(left, free), min(whole, limit)
    yield "memory", _Room(left, whole)
    with contextlib.suppress(OSError):
        shared = os.statvfs("/dev/shm")
        yield "/dev/shm", _Room(shared.f_bavail * shared.f_frsize, shared.f_blocks * shared.f_frsize)


def run_to_end(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, log: Path, run: Path, limit_s: float
) -> tuple[int | None, str]:
    """Run a command that records into ``run``, with its output in ``log``. Returns (exit code, why there is none). Its child processes are
    ended and its spools removed. Raises OSError if it cannot be started."""
    libc, watch = ctypes.CDLL(None), Watch()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM, libc),  # if this process is killed
        )
    try:
        return _wait(process, limit_s, watch)
    finally:
        _end(process, run)


def _wait(process: subprocess.Popen[bytes], limit_s: float, watch: Watch) -> tuple[int | None, str]:
    deadline_s, looks = time.monotonic() + limit_s, 0
    while process.poll() is None:
        if time.monotonic() > deadline_s:
            return None, f"it had not ended after {limit_s:.0f} s"
        looks += 1
        if looks % _POLLS_PER_CHECK == 0 and (reason_to_end := watch.reason_to_end()):
            return None, reason_to_end
        time.sleep(_LOOK_S)
    return process.returncode, ""


def _end(process: subprocess.Popen[bytes], run: Path) -> None:
    """End the command and its children, including ranks and their workers, which have other sessions."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    left = list(_recorded_into(run))
    for each in left:
        with contextlib.suppress(psutil.Error):
            each.kill()
    # SIGKILL does not end a process that is blocked on storage.
    psutil.wait_procs(left, timeout=_END_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_S)
    for root in roots_of(str(run)):
        for spool in spools_in(root):
            with contextlib.suppress(OSError):
                discard(spool)
        remove_root(root)


def _recorded_into(run: Path) -> Iterator[psutil.Process]:
    """Processes whose environment names this run directory, which is of one trial only."""
    marker = f"{RUN}={run}".encode()
    for each in psutil.process_iter():
        with contextlib.suppress(OSError):
            if marker in Path(f"/proc/{each.pid}/environ").read_bytes().split(b"\0"):
                yield each


WARM_UP_SHARE, LEAST_WARM_UP = 0.25, 5
"""Share and minimum number of a trial's first steps that are excluded as warm-up. Steps whose batches were prepared during the warm-up are
excluded, too."""
LEAST_STEPS = 12
"""Fewest steps of a trial: seven after the warm-up."""
DEFAULT_PREFETCH = 2
"""torch's default ``prefetch_factor`` with workers."""
MOST_QUEUED = 128
"""Limit of the prepared batches that the length of a trial accounts for. Trials would take too long with more."""
_LOG_BYTES = 64 << 10
_LEAST_ROOM = 256 << 10
"""Free bytes in the trials' file system below which a recording counts as incomplete."""
_SIGNAL = re.compile(r"Signal \d+ \((SIG[A-Z]+)\) received by PID")
"""torchrun's message about a rank that was ended by a signal."""
_ERROR = re.compile(r"^\s*(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Killed)\b.*)$")


_WORKER_ERROR = re.compile(r"Caught \w+ in DataLoader worker process")
"""torch's message about an error in a dataloader worker, which precedes the error itself."""


def own_command() -> list[str]:
    """Command line that starts this ddpdoctor. ``-P``: modules in the working directory are not imported."""
    root = Path(__file__).resolve().parent.parent.parent
    code = f"import sys; sys.path.insert(0, {str(root)!r}); from ddpdoctor.cli import main; main()"
    return [sys.executable, "-P", "-c", code]


@dataclass(frozen=True)
class Command:
    """The job's command line and environment."""

    words: Sequence[str]
    environment: Mapping[str, str]
    copy: bool = False
    """Whether each trial runs in a copy of the working directory, so that files written to relative paths are removed with it."""


@dataclass(frozen=True)
class Budget:
    """Time limit of all trials together."""

    total_s: float
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.total_s - (time.monotonic() - self.began_s)


@dataclass(frozen=True)
class Trial:
    """Result of one run of the job for some steps."""

    step_ms: Array
    """[steps] ms without the warm-up, median over the ranks. Empty if the trial failed."""
    changes: dict[str, dict[str, Any]]
    """State of each setting, on the rank that applied it least (``_least_applied``)."""
    parameters: dict[str, Any] | None
    losses: list[float | None]
    took_s: float
    why: str = ""
    """Why the trial failed; empty if it did not."""
    loaders: tuple[tuple[int, int], ...] = ()
    """(num_workers, prefetch_factor) of the job's loaders."""
    ended_after: int | None = None
    """Number of steps if the job ended by itself before the trial's last step, else None."""
    left_out: str = ""
    """Sentences on files that the copy of the working directory lacks, and on links that lead out of it."""

    @property
    def refused(self) -> str:
        """Reasons why settings were not applied; empty if all were."""
        reasons = [
            f"{name}: {change.get('why') or 'nothing that it belongs to was built'}"
            for name, change in self.changes.items()
            if change.get("state") != "applied"
        ]
        return "; ".join(reasons)


def run_trial(command: Command, settings: Mapping[str, Any], steps: int, limit_s: float) -> Trial:
    """Run the job with these settings for ``steps`` steps, at most ``limit_s``. All its processes are ended, ddpdoctor's files removed."""
    in_rank = {name: value for name, value in settings.items() if not _is_variable(name)}
    variables = {name.partition(".")[2]: str(settings[name]) for name in settings if _is_variable(name)}
    with_variables = replace(command, environment={**command.environment, **variables})
    asked = {"set": in_rank, "steps": steps}
    (trial,) = _run_recorded(
        with_variables, asked, limit_s, lambda run, why: [_read(run, why, steps, settings)]
    )
    return trial


def run_blocks(
    command: Command, blocks: Sequence[Mapping[str, Any]], steps: int, limit_s: float
) -> list[Trial]:
    """Run the job once, with other loader settings in each block of ``steps`` steps. Returns one trial per block. If the job does not get
    through all of them, the last trial is that of the block in which it ended, and says why. Raises :class:`BlocksError` if the job
    does not allow a change of its loaders."""
    asked = {
        "set": {},
        "steps": steps * len(blocks),
        "blocks": [{"set": dict(each), "steps": steps} for each in blocks],
    }
    return _run_recorded(command, asked, limit_s, lambda run, why: _read_blocks(run, why, steps, blocks))


class BlocksError(Exception):
    """The job does not allow trials in blocks of one run."""


def _run_recorded(
    command: Command, asked: Mapping[str, Any], limit_s: float, read: Callable[[Path, str], list[Trial]]
) -> list[Trial]:
    """Run the job and return ``read(run directory, why it failed)``. The reason is empty if it did not fail."""
    began_s = time.monotonic()
    try:
        with scratch_folder() as folder:
            why, left_out = _run(command, asked, limit_s, folder)
            no_room = _no_room(folder)
            trials, took_s = read(folder / "run", why), time.monotonic() - began_s
            return [
                replace(each, left_out=left_out, took_s=took_s, why=each.why and each.why + no_room)
                for each in trials
            ]
    except OSError as error:
        why = f"it cannot be recorded: {error.strerror or error} (TMPDIR names another place)"
        return [Trial(np.empty(0), {}, None, [], time.monotonic() - began_s, why)]


def _run(command: Command, asked: Mapping[str, Any], limit_s: float, folder: Path) -> tuple[str, str]:
    """Run the job. Returns (why it failed, sentences on the copy of the working directory); each may be empty."""
    environment = {**command.environment, TRIAL: json.dumps(asked)}
    cwd, left_out = Path.cwd(), ""
    if command.copy:
        cwd = folder / "copy"
        environment["PWD"] = str(cwd)
        try:
            left_out = copy_folder(Path.cwd(), cwd, folder)
        except OSError as error:
            return f"the working directory cannot be copied: {error.strerror or error}", ""
    own_words = [*own_command(), "run", "--no-analysis", "--no-profile", "--no-telemetry", "-q"]
    words = [*own_words, "--out", str(folder / "run"), "--", *command.words]
    code, why = run_to_end(words, environment, cwd, folder / "output", folder / "run", limit_s)
    if code is not None and code != 0:
        why = _failure_text(folder / "output", code)
    return why, left_out


def _no_room(folder: Path) -> str:
    """A clause to add to the reason of a failure if the disk is full, else ""."""
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize > _LEAST_ROOM:
        return ""
    return f"; no space is left in {folder.parent}, where trials are recorded (TMPDIR names another place)"


def _is_variable(name: str) -> bool:
    """Whether a setting is an environment variable of the job."""
    return name.startswith(f"{ENVIRONMENT}.")


def _failure_text(log: Path, code: int) -> str:
    """How the job ended, with the first error in the last ``_LOG_BYTES`` of its output."""
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - _LOG_BYTES))
        lines = source.read().decode("utf-8", "replace").splitlines()
    errors = [found.group(1) for line in lines if (found := _ERROR.match(line))]
    own = [error for error in errors if "ChildFailedError" not in error]
    own = [error for error in own if not _WORKER_ERROR.search(error)] or own
    ended = f"it ended with signal {-code}" if code < 0 else f"it ended with exit code {code}"
    if not own and (signals := _SIGNAL.findall("\n".join(lines))):
        hint = ", as the kernel does when memory runs out" if signals[0] == "SIGKILL" else ""
        return f"a rank was ended by {signals[0]}{hint}"
    return f"{ended}: {own[0][:300]}" if own else ended


def _read_ranks(run: Path) -> tuple[list[RankRecord], list[dict[str, Any]]]:
    """The recorded ranks, and the ``trial`` documents of those that have one."""
    recorded = RunDirectory.open(str(run)) if run.is_dir() else None
    ranks = list(recorded.ranks) if recorded is not None else []
    return ranks, [trial for rank in ranks if isinstance(trial := rank.info.get("trial"), dict)]


def _read_blocks(run: Path, why: str, steps: int, blocks: Sequence[Mapping[str, Any]]) -> list[Trial]:
    ranks, documents = _read_ranks(run)
    by_rank = [each.get("blocks") for each in documents]
    if not by_rank or not all(isinstance(each, list) and len(each) == len(blocks) for each in by_rank):
        return [_failed(why or "no rank was recorded")]
    of_step, found = _by_step(ranks), list[Trial]()
    for number, settings in enumerate(blocks):
        change = _least_applied([each[number] for each in by_rank if isinstance(each, list)])
        if change.get("state") == "refused":
            raise BlocksError(str(change.get("why")))
        times = [of_step[step] for step in range(number * steps, (number + 1) * steps) if step in of_step]
        if len(times) < steps - 1 or (settings and change.get("state") != "applied"):
            return [*found, _unfinished(documents, steps * len(blocks), why)]
        queued = settings.get("loader.num_workers", 0) * settings.get(
            "loader.prefetch_factor", DEFAULT_PREFETCH
        )
        changes = {name: {"state": "applied"} for name in settings}
        found.append(Trial(_after_warm_up(times, min(queued, MOST_QUEUED)), changes, None, [], 0.0))
    return found


def _unfinished(documents: Sequence[Mapping[str, Any]], steps: int, why: str) -> Trial:
    """The block in which a job ended that was asked for ``steps`` steps. Raises :class:`BlocksError` if it took all these steps."""
    if why and not all(
        each.get("ended") for each in documents
    ):  # else the launcher may report that its ranks have exited
        return _failed(why)
    done = max(int(each.get("steps") or 0) for each in documents)
    if done >= steps:
        raise BlocksError("no loader took the settings of one of the blocks")
    return replace(_failed(f"it came to its own end after {done} steps"), ended_after=done)


def _failed(why: str) -> Trial:
    return Trial(np.empty(0), {}, None, [], 0.0, why)


def _read(run: Path, why: str, steps: int, settings: Mapping[str, Any]) -> Trial:
    ranks, documents = _read_ranks(run)
    changes = {
        name: _least_applied([each.get("changes", {}).get(name, {}) for each in documents])
        for name in settings
        if not _is_variable(name)
    }
    loaders = tuple(sorted({pair for rank in ranks for pair in _loaders(rank.info)}))
    queued = max((workers * ahead for workers, ahead in loaders), default=0)
    step_ms = step_times(ranks, min(queued, MOST_QUEUED))
    done = max((int(each.get("steps") or 0) for each in documents), default=0)
    if not ranks and not why:
        why = "no rank was recorded"
    elif documents and all(each.get("ended") for each in documents):
        why = ""  # a launcher may report that its ranks have exited
    elif why and any(each.get("ended") for each in documents):
        fewest = min(int(each.get("steps") or 0) for each in documents)
        why += f" (a rank took only {fewest} of {steps} steps: fewer --steps measure what all ranks take)"
    if not why and not len(step_ms):
        why = f"the job ended after {done} steps, which are too few to measure"
    first = documents[0] if documents else {}
    return Trial(
        np.empty(0) if why else step_ms,
        changes,
        first.get("parameters") if first.get("ended") else None,
        list(first.get("losses") or []),
        0.0,
        why,
        loaders,
        done if documents and not why and done < steps else None,
    )


def _loaders(info: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    listed = info.get("loaders")
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict):
            workers, ahead = each.get("num_workers"), each.get("prefetch_factor")
            if isinstance(workers, int) and workers > 0:
                yield workers, ahead if isinstance(ahead, int) and ahead > 0 else DEFAULT_PREFETCH


def _least_applied(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    order = ("refused", "not seen", "applied")
    known = [dict(each) for each in found if each.get("state") in order]
    return min(known, key=lambda each: order.index(each["state"]), default={})


def step_times(ranks: Sequence[RankRecord], queued: int = 0) -> Array:
    """[steps] ms from end to end of consecutive steps after the warm-up, median over the ranks. ``queued``: number of batches that may be
    prepared when the warm-up ends; at least as many steps are excluded."""
    of_step = _by_step(ranks)
    return _after_warm_up([of_step[number] for number in sorted(of_step)], queued)


def _after_warm_up(times: Sequence[float], queued: int) -> Array:
    return np.array(times[max(LEAST_WARM_UP, queued, round(WARM_UP_SHARE * len(times))) :])


def _by_step(ranks: Sequence[RankRecord]) -> dict[int, float]:
    of_step: dict[int, list[float]] = defaultdict(list)
    for rank in ranks:
        before: tuple[int, int] | None = None
        for step, end in _ends(rank):
            if before is not None and before[0] + 1 == step:
                of_step[step].append((end - before[1]) / 1e6)
            before = step, end
    return {number: float(np.median(times)) for number, times in of_step.items()}


def _ends(rank: RankRecord) -> Iterator[tuple[int, int]]:
    """(Step, epoch ns of its end) of each step in a rank's log."""
    try:
        for line in rank.lines(STEPS_FILE):
            with contextlib.suppress(ValueError, TypeError, IndexError, KeyError, AttributeError):
                entry = json.loads(line)
                if LineField.STEP.value in entry:
                    yield int(entry[LineField.STEP.value]), int(entry[LineField.TIME_NS.value][1])
    except OSError:
        return
