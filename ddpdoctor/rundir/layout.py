"""Names, schema identifiers and paths of the files in a run directory, and the run to which a directory or spool belongs.

A path does not identify a run: after it was deleted, another run may have the same path while records or ranks of the first still
exist.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from .files import folders_in, is_regular, listed, read_json, reading
from .owned import UntrustedFileError, folder, private_folder, read_file

RUN_SCHEMA = "ddpdoctor.run/1"
RANK_SCHEMA = "ddpdoctor.rank/2"
STEPS_SCHEMA = "ddpdoctor.steps/2"
MEMORY_SCHEMA = "ddpdoctor.memory/1"
TELEMETRY_SCHEMA = "ddpdoctor.telemetry/2"
MIN_PROGRAM_CORES, MAX_PROGRAMS = 0.1, 3
"""Programs other than the ranks and their workers that are recorded and reported: the largest few, above this CPU use."""

MANIFEST_FILE = "manifest.json"
RANK_FILE = "rank.json"
STEPS_FILE = "steps.jsonl"
SAMPLES_FILE = "samples.jsonl"
MEMORY_FILE = "memory.jsonl"
WORKERS_FILE = "workers.jsonl"
TRACE_FILE = "trace.json.gz"
MOST_CAPTURES = 20
"""Upper limit of the profiler windows of one recording that may be requested while the job runs."""
FLIGHT_FILE = "flight.json"
PROGRESS_FILE = "progress.json"
STANDING_FILE = "standing.json"
HANG_FLIGHT_FILE = "hang_flight.json"
FAULTS_FILE = "faults.txt"
ENDING_FILE = "ending.json"
CALLS_FILE = "calls.jsonl"
STALL_FILE = "stall.json"
ENDS_FILE = "ends.json"
ASKED_FILE = "asked.json"
TELEMETRY_FILE = "telemetry.jsonl"
DIAGNOSIS_FILE = "diagnosis.json"
REPORT_FILE = "report.html"

HANDOVER_FILE = "trace.handover"
CARRIED_FILE = "carried.json"
ASIDE = ".copied"
"""Suffix of a document that is being copied."""
DOCUMENTS = frozenset([RANK_FILE, FLIGHT_FILE, ENDING_FILE])
STOP_FILES = frozenset([PROGRESS_FILE, STANDING_FILE, HANG_FLIGHT_FILE, FAULTS_FILE])
"""Status files. They stay in the spool, where the launcher can read them even if the run directory's storage hangs."""
QUESTION_FILE = "question"
STACKS_QUESTION, STACKS_FILE = "stacks.question", "stacks.json"
CAPTURE_ORDER, CAPTURE_ANSWER = "capture.order", "capture.json"
QUESTIONS = frozenset([QUESTION_FILE, STACKS_QUESTION, STACKS_FILE, CAPTURE_ORDER, CAPTURE_ANSWER])
"""Requests to a rank (see :mod:`.requests`), and the answers that stay in the spool."""

_MANIFEST_HEAD = 1 << 12
"""Bytes at the beginning of the manifest that contain its schema."""
_MOST_REPEATS = 1_000_000
"""Upper limit of the recordings of one rank in a run: restarts, and further jobs of the same command."""
_MOST_PID_DIGITS = 9
_RANK_DIRECTORY = re.compile(r"^([0-9]{5,9})(?:\.([0-9]{1,6}))?$")


def is_run_directory(path: str) -> bool:
    """Whether ``path`` is a folder created by ``ddpdoctor run``, also if its launcher was killed early. Other tools' folders may
    also contain ``manifest.json`` or ``ranks``, so the content is checked."""
    with suppress(OSError, ValueError), reading(os.path.join(path, MANIFEST_FILE)) as manifest:
        if b"ddpdoctor" in manifest.read(_MANIFEST_HEAD):
            return True
    ranks = os.path.join(path, "ranks")
    try:
        names = folders_in(ranks)
    except (OSError, ValueError):
        return False
    recorded = (os.path.join(ranks, name) for name in names if parse_rank_directory(name))
    return any(is_regular(os.path.join(rank, file)) for rank in recorded for file in (RANK_FILE, STEPS_FILE))


class RunsBelow(NamedTuple):
    """The run directories that a folder is or contains."""

    runs: list[str]
    """Sorted."""
    errors: list[OSError]
    """Errors of folders that cannot be listed; they may contain more."""


def run_directories(path: str) -> RunsBelow:
    """Find the run directories at or below ``path``. Links to folders are not followed."""
    if is_run_directory(path):
        return RunsBelow([path], [])
    found: list[str] = []
    errors: list[OSError] = []
    for parent, folders, _ in os.walk(path, onerror=errors.append):
        runs = [name for name in folders if is_run_directory(os.path.join(parent, name))]
        found += [os.path.join(parent, name) for name in runs]
        folders[:] = [name for name in folders if name not in runs and not name.startswith(".")]
    return RunsBelow(sorted(found), errors)


class FilesBelow(NamedTuple):
    """The files in a folder and below it."""

    files: list[str]
    """Everything that is not a folder, sorted."""
    errors: list[OSError]
    """Errors of folders that cannot be listed."""


def files_below(path: str) -> FilesBelow:
    """Find the files in the folder ``path`` and below, except hidden ones. Links to folders are not followed."""
    found: list[str] = []
    errors: list[OSError] = []
    for parent, folders, names in os.walk(path, onerror=errors.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return FilesBelow(sorted(found), errors)


def closed_folders(errors: Sequence[OSError]) -> list[str]:
    """A sentence about folders that cannot be listed (see :class:`FilesBelow`), in a list; [] if there are none."""
    if not errors:
        return []
    reasons = [(error.strerror or str(error)).lower() for error in errors]
    if len(errors) == 1:
        return [f"The folder {errors[0].filename} cannot be read ({reasons[0]}): its contents are skipped."]
    named = listed([f"{error.filename} ({reason})" for error, reason in zip(errors, reasons)])
    return [f"{len(errors)} folders cannot be read, and their contents are skipped: {named}."]


def is_recorded_file(path: str) -> bool:
    """Whether ``path``, without links, is a recorded file of a run directory or in the same folders; its diagnosis and report are
    not."""
    parts = os.path.abspath(path).split(os.sep)
    for length in range(len(parts) - 1, 0, -1):
        if parts[length] in ("hosts", "ranks") or (
            length == len(parts) - 1 and parts[length] == MANIFEST_FILE
        ):
            run = os.sep.join(parts[:length]) or os.sep
            if is_run_directory(run):
                return True
    return False


def host_directory(run: str, host: str) -> str:
    """``RUN/hosts/<host>``, with a host name made safe for a path."""
    return os.path.join(run, "hosts", re.sub(r"[^A-Za-z0-9._-]", "_", host) or "_")


def claim_rank_directory(run: int, rank: int) -> str:
    """Create a new folder for this rank's recording in an open run directory, and return its name. Never uses an existing one.
    Raises OSError."""
    with suppress(FileExistsError):
        os.mkdir("ranks", dir_fd=run)
    with folder("ranks", run) as ranks:
        repeat = 0
        while repeat < _MOST_REPEATS:
            name = f"{rank:05d}" if repeat == 0 else f"{rank:05d}.{repeat}"
            try:
                os.mkdir(name, dir_fd=ranks)
                return name
            except FileExistsError:
                known = filter(None, map(parse_rank_directory, os.listdir(ranks)))
                repeat = max([repeat, *(number for each, number in known if each == rank)]) + 1
    raise OSError(f"rank {rank} has been recorded {_MOST_REPEATS} times already")


def capture_file(number: int) -> str:
    """Name of the trace of requested window ``number``, from 1."""
    return f"trace.{number}.json.gz"


def handover_file(number: int) -> str:
    """Name of the handover file of a window's trace; 0 is the first window, which is not requested."""
    return f"trace.{number}.handover" if number else HANDOVER_FILE


def parse_rank_directory(name: str) -> tuple[int, int] | None:
    """(rank, repeat) from the name of a folder below ``ranks/``; None if it has another form."""
    found = _RANK_DIRECTORY.match(name)
    return (int(found.group(1)), int(found.group(2) or 0)) if found else None


def parse_spool_name(path: str) -> tuple[int, int] | None:
    """(rank, process id in its own namespace) from the path of a spool, ``RANK[.REPEAT]-PID``; None if it has another form."""
    name, _, pid = os.path.basename(path).rpartition("-")
    rank = parse_rank_directory(name)
    return None if rank is None or not pid.isdecimal() or len(pid) > _MOST_PID_DIGITS else (rank[0], int(pid))


TARGET_FILE = "target"
_RANKS = "ranks"
_LONGEST = 1 << 14


@contextmanager
def opened_spool(spool: str) -> Iterator[int]:
    """Open a spool, which must be in a root of this user. Raises OSError, UntrustedFileError."""
    root, name = os.path.split(spool)
    with private_folder(root) as root_fd, private_folder(name, root_fd) as spool_fd:
        yield spool_fd


def target_of(spool: str) -> str:
    """The rank's folder in the run directory for which a spool was created; ``RUN/ranks`` if it has none yet. Raises OSError."""
    with opened_spool(spool) as spool_fd:
        return read_target(spool_fd)


def read_target(spool: int) -> str:
    """Like ``target_of``, for an open spool. Raises OSError, UntrustedFileError."""
    target = os.fsdecode(read_file(TARGET_FILE, spool)[:_LONGEST])
    ranks = target if is_unclaimed(target) else os.path.dirname(target)
    named = is_unclaimed(target) or parse_rank_directory(os.path.basename(target)) is not None
    if not (os.path.isabs(target) and os.path.basename(ranks) == _RANKS and named):
        raise UntrustedFileError(errno.EINVAL, "it names no rank's folder in a run directory", TARGET_FILE)
    return target


def is_unclaimed(target: str) -> bool:
    """Whether the rank has no folder in the run directory yet."""
    return os.path.basename(target) == _RANKS


def target_before_claim(run: str) -> str:
    """The target of a spool whose rank has no folder yet."""
    return os.path.join(os.path.abspath(run), _RANKS)


def run_of(target: str) -> str:
    """The run directory that contains a spool's target."""
    return os.path.dirname(target if is_unclaimed(target) else os.path.dirname(target))


RUN_ID = "run_id"
"""Name of the field in the manifest and in the records of launchers."""
_IN_ROOT = re.compile(r"^ddpdoctor-\d+-\d+-([0-9a-f]{16})(?:-\w{8})?$")

_known: dict[str, tuple[tuple[int, ...], str | None]] = {}
"""Cache by path of a manifest: identity of the file that was read, and the id in it."""


class OtherRunError(OSError):
    """The run directory now belongs to another run."""


def new_run_id() -> str:
    """A random id for a new run."""
    return os.urandom(8).hex()


def run_id(run: str) -> str | None:
    """The id in a run directory's manifest or, if that cannot be read, in a launcher's record."""
    manifest = read_json(os.path.join(run, MANIFEST_FILE), [])
    if manifest is not None:
        return _valid_id(manifest)
    for parent, _, names in os.walk(os.path.join(run, "hosts")):
        for name in sorted(names):
            if name.startswith("launch-") and name.endswith(".json"):
                found = _valid_id(read_json(os.path.join(parent, name), []) or {})
                if found is not None:
                    return found
    return None


def _valid_id(document: dict[str, Any]) -> str | None:
    found = document.get(RUN_ID)
    return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{16}", found) else None


def id_of_root(root: str) -> str | None:
    """The id of the run whose spools are in ``root``; None if that run has no id."""
    found = _IN_ROOT.match(os.path.basename(root))
    return found.group(1) if found else None


def refuse_other_run(run: str, known_id: str | None) -> None:
    """Raise OtherRunError if the run directory's manifest names another run than ``known_id``, or none.

    Cheap enough for every copy: the manifest is read again only if it has changed. A directory without one is accepted: its ranks
    ran on a host without a launcher.
    """
    if known_id is None:
        return
    path = os.path.join(run, MANIFEST_FILE)
    try:
        status = os.stat(path)
    except OSError:
        return
    version = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    known = _known.get(path)
    if known is None or known[0] != version:
        known = _known[path] = version, run_id(run)
    if known[1] != known_id:
        raise OtherRunError(f"{run} holds another run by now")
