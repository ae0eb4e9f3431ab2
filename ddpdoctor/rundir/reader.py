"""Reads a run directory: finds its ranks, and chooses the recording of each that is analysed."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, BinaryIO, Callable

from . import layout
from .attempts import Attempt, attempts_of, starts_of
from .compaction import STEP_LINES, last_step, stream_end_of, stream_shift
from .files import folders_in, is_regular, parsed, read_json, reading, reason_of, unreadable
from .notes import Note, NoteCode
from .segments import uncopied_bytes
from .typed import MANIFEST, RANK, fitting

_LINK = "a link, and links in a run directory are not followed"
_UNKNOWN_OF_JOB = "how the job was started, and how it ended, is not known"
_UNKNOWN_OF_RANK = "how this rank is set up is not known"
_UNKNOWN_OF_HOST = "telemetry, and how ranks' processes ended, is not known"
_UNSEEN_ON_HOST = "what its processors, memory and GPUs did is not known"
_TRACES = f"{layout.TRACE_FILE.partition('.')[0]}."
"""Beginning of the names of profiler windows, including those in a digest."""
_LONGEST_HEAD = 1 << 16
_LONGEST_LINE = 4 << 20
"""Upper limit of a line: more than a step of 256 events, each a backward over a thousand buckets."""
_MOST_PIECES = 64
"""Upper limit of the pieces of a longer line that are skipped."""


@dataclass(frozen=True)
class RankRecord:
    """One recording of one rank."""

    path: str
    rank: int
    info: dict[str, Any]
    """The content of rank.json. If it is missing, at most the host, if all other ranks have the same one."""
    repeat: int = 0
    """Number of this recording among those of the same rank."""
    spool: str | None = None
    """Path of the spool with records of this rank that were not copied yet; None if there is none."""

    @property
    def host(self) -> str:
        """Host name; "" if unknown."""
        return str(self.info.get("host") or "")

    @property
    def attempt(self) -> int:
        """Restart count of the elastic launcher, from 0."""
        return int(self.info.get("attempt") or 0)

    @property
    def attempt_key(self) -> tuple[str, int, int]:
        """(Job id, restart count, world size): the same in all recordings of one attempt."""
        return str(self.info.get("job_id") or ""), self.attempt, int(self.info.get("world_size") or 0)

    @property
    def process(self) -> tuple[Any, ...]:
        """Identity of the recording process, as far as known. In containers, the processes of two starts of a job may have the same
        ids."""
        run = os.path.dirname(os.path.dirname(self.path))
        return (run, *map(self.info.get, ("host", "boot", "pid_namespace", "pid")))

    @property
    def trace(self) -> str | None:
        """Path of the trace of the profiler window; None if there is none."""
        return self._file(layout.TRACE_FILE)

    def capture(self, number: int) -> str | None:
        """Path of the trace of requested window ``number``, from 1; None if there is none."""
        return self._file(layout.capture_file(number))

    def lines(self, name: str) -> Iterator[bytes]:
        """Yield the complete lines of a line file, including those still in the spool. A line that is too long is replaced by an
        empty line. Raises OSError."""
        path, cut, done = os.path.join(self.path, name), b"", 0
        if self.spool is None or os.path.lexists(path):
            with reading(path) as source:
                shift = stream_shift(source.fileno())
                while line := source.readline(_LONGEST_LINE):
                    if line.endswith(b"\n"):
                        yield line
                    elif len(line) == _LONGEST_LINE:
                        yield _skip_line(source)
                    else:
                        cut = line
                done = source.tell() + shift
        rest = b"" if self.spool is None else uncopied_bytes(self.spool, name, done)
        yield from (line for line in (cut + rest).splitlines(keepends=True) if line.endswith(b"\n"))

    def absence_note(self, name: str, what: str) -> Note:
        """A note on why the line file ``name`` contains no ``what``, without a period."""
        path = os.path.join(self.path, name)
        try:
            empty = next(self.lines(name), None) is None and not os.path.getsize(path)
        except FileNotFoundError:
            return Note(f"{path} is missing")
        except OSError as error:
            return Note(f"{path} cannot be read ({reason_of(error)})", NoteCode.UNREADABLE)
        return Note(f"{path} is empty" if empty else f"{path} holds no {what}")

    def is_cut(self, name: str) -> bool:
        """Whether the line file ``name`` ends within a line, and the spool does not continue it."""
        try:
            with reading(os.path.join(self.path, name)) as source:
                return source.seek(-1, os.SEEK_END) >= 0 and source.read() != b"\n" and self.spool is None
        except OSError:
            return False

    @property
    def has_window(self) -> bool:
        """Whether there is any file with the name of a profiler window or of its digest."""
        try:
            return any(name.startswith(_TRACES) for name in os.listdir(self.path))
        except OSError:
            return False

    def _file(self, name: str) -> str | None:
        path = os.path.join(self.path, name)
        return path if is_regular(path) else None

    @property
    def recorded_bytes(self) -> int:
        """Bytes of the step log before thinning, by which recordings of the same rank are compared."""
        copied, rest = self._log_end()
        return copied + len(rest)

    @cached_property
    def steps(self) -> int:
        """Number of steps that the rank has taken in this recording, from the end of its step log; 0 if none is there."""
        if found := STEP_LINES.findall(self._log_end()[1]):
            return int(found[-1]) + 1
        try:
            with reading(os.path.join(self.path, layout.STEPS_FILE)) as source:
                last = last_step(source.fileno())
        except OSError:
            return 0
        return 0 if last is None else last + 1

    def _log_end(self) -> tuple[int, bytes]:
        """Bytes of the step log that were copied, before thinning, and its rest, which is only in the spool."""
        copied = stream_end_of(os.path.join(self.path, layout.STEPS_FILE))
        return copied, b"" if self.spool is None else uncopied_bytes(self.spool, layout.STEPS_FILE, copied)


def _skip_line(source: BinaryIO) -> bytes:
    """Skip the rest of a line. Returns an empty line, which decoders count as broken. If the line does not end, as in a file of
    holes, the rest of the file is skipped, too."""
    for _ in range(_MOST_PIECES):
        line = source.readline(_LONGEST_LINE)
        if not line or line.endswith(b"\n"):
            return b"\n"
    source.seek(0, os.SEEK_END)
    return b"\n"


class UnknownAttemptError(ValueError):
    """The run has no attempt with this number."""

    def __init__(self, number: int, count: int) -> None:
        has = "no attempt of known identity" if count == 0 else f"{count} attempt{'s' if count > 1 else ''}"
        super().__init__(f"there is no attempt {number}: the run has {has}")


@dataclass(frozen=True)
class RunDirectory:
    """A recorded run. ``ranks`` holds one recording per rank: of the requested attempt, or of the one with the most steps."""

    path: str
    manifest: dict[str, Any]
    ranks: list[RankRecord]
    telemetry: dict[str, str]
    """Path of telemetry.jsonl by host."""
    notes: list[Note] = field(default_factory=list)
    recordings: list[RankRecord] = field(default_factory=list)
    """All recordings, of all attempts."""

    @classmethod
    def open(cls, path: str, attempt: int | None = None) -> RunDirectory:
        """Read the manifest and the ranks' descriptions. Missing or broken parts become ``notes``. ``attempt``: number, from 1, of
        the attempt to read. Raises UnknownAttemptError if there is no such attempt."""
        return cls.open_all([path], attempt)[0]

    @classmethod
    def open_all(cls, paths: Sequence[str], attempt: int | None = None) -> list[RunDirectory]:
        """Like :meth:`open`, for the run directories of a job's hosts or starts (:func:`.starts_of`), in order. All use the same
        attempt if the directories are of one job and no two of them hold the same rank of an attempt."""
        starts = starts_of([cls._read(path) for path in paths])
        opened = [run for start in starts for run in start]
        described = [[record for record in run.recordings if record.info] for run in opened]
        jobs = {record.attempt_key[0] for records in described for record in records}
        recorded_ranks = [
            key for records in described for key in {(each.attempt_key, each.rank) for each in records}
        ]
        all_recordings = [record for run in opened for record in run.recordings]
        of_one_job = len(starts) > 1 or (len(jobs) == 1 and len(set(recorded_ranks)) == len(recorded_ranks))
        for run in opened:
            run._choose(attempt, all_recordings if of_one_job else run.recordings)
        return opened

    @classmethod
    def _read(cls, path: str) -> RunDirectory:
        from .draining import spools_of

        notes: list[Note] = []
        manifest = read_manifest(path, notes)
        spools = {os.path.basename(target): spool for spool, target in spools_of(path)}
        records = _read_ranks(os.path.join(path, "ranks"), spools, notes)
        return cls(path, manifest, [], {}, notes, records)

    def _choose(self, attempt: int | None, of_job: list[RankRecord]) -> None:
        notes, chosen = self.notes, _choose(self.recordings, of_job, attempt, self.notes)
        _separate_equal_hostnames(chosen, notes)
        hosts = {record.host for record in chosen if record.info}
        for record in chosen:
            steps = os.path.join(record.path, layout.STEPS_FILE)
            _note_schema(steps, _head_of(steps).get("schema"), layout.STEPS_SCHEMA, notes)
            if len(hosts) == 1 and not record.info:
                record.info["host"] = next(iter(hosts))
            notes += _unread_windows(record)
        self.ranks.extend(chosen)
        self.telemetry.update(_telemetry(self.path, self.manifest, notes))


def read_manifest(run: str, notes: list[Note]) -> dict[str, Any]:
    """Read the manifest of ``run``, without invalid fields; {} if it is missing or broken. Problems are added to ``notes``."""
    file = os.path.join(run, layout.MANIFEST_FILE)
    return _read(file, MANIFEST, MANIFEST, layout.RUN_SCHEMA, _UNKNOWN_OF_JOB, notes) or {}


def read_rank(folder: str, notes: list[Note]) -> dict[str, Any] | None:
    """Read rank.json in a rank's folder, without invalid fields; None if it is missing or broken. Problems are added to ``notes``."""
    return _read(
        os.path.join(folder, layout.RANK_FILE), RANK, ("rank",), layout.RANK_SCHEMA, _UNKNOWN_OF_RANK, notes
    )


def _unread_windows(record: RankRecord) -> list[Note]:
    """Notes about a rank's profiler windows that exist and are not read."""
    try:
        with os.scandir(record.path) as entries:
            odd = [
                (entry.path, _LINK if entry.is_symlink() else "no regular file")
                for entry in entries
                if entry.name.startswith(_TRACES) and not entry.is_file(follow_symlinks=False)
            ]
    except OSError:
        return []  # its files may still be readable
    return [
        Note(f"{path} is {what}: this rank's profiler window is not read.").of_rank(record.rank)
        for path, what in sorted(odd)
    ]


def _read_ranks(ranks: str, spools: dict[str, str], notes: list[Note]) -> list[RankRecord]:
    records = []
    try:
        folders = set(folders_in(ranks))
        names = sorted(os.listdir(ranks))
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(unreadable(ranks, error, "what the ranks recorded is not read"))
        return []
    for name in names:
        parsed = layout.parse_rank_directory(name)
        if parsed is None:
            continue
        rank, repeat = parsed
        path, spool = os.path.join(ranks, name), spools.get(name)
        if os.path.islink(path):
            notes.append(Note(f"{path} is {_LINK}: what this rank recorded is not read.").of_rank(rank))
            continue
        if name not in folders:
            notes.append(Note(f"{path} is not a folder: what this rank recorded is lost.").of_rank(rank))
            continue
        if (refused := _lookup_error(path, layout.RANK_FILE)) is not None:
            notes.append(unreadable(path, refused, "what this rank recorded is not read").of_rank(rank))
            continue
        records.append(RankRecord(path, rank, _read_info(path, rank, spool, notes), repeat, spool))
    return _without_second_folders(records)


def _without_second_folders(records: list[RankRecord]) -> list[RankRecord]:
    """``records`` with one of each recording. It has a second folder if its memory was removed before the rank had read the name of the
    first one; the longer one is kept, with the number of the first."""
    found: dict[tuple[Any, ...], RankRecord] = {}
    for record in records:
        started_ns = record.info.get("started_ns")
        known = isinstance(started_ns, int) and (record.attempt_key, str(record.process), started_ns)
        key = (record.rank, known or record.path)
        first = found.setdefault(key, record)
        if record.recorded_bytes > first.recorded_bytes:
            found[key] = replace(record, repeat=first.repeat)
    return list(found.values())


def _read_info(path: str, rank: int, spool: str | None, notes: list[Note]) -> dict[str, Any]:
    waiting = None if spool is None else read_rank(spool, [])
    if waiting is not None:
        return waiting
    faults: list[Note] = []
    info = read_rank(path, faults)
    notes += faults if info is not None else [fault.of_rank(rank) for fault in faults]
    return info or {}


def _read(
    path: str,
    fields: Mapping[str, Callable[[Any], bool]],
    any_of: Collection[str],
    schema: str,
    lost: str,
    notes: list[Note],
) -> dict[str, Any] | None:
    """Read the object in ``path``, without invalid fields. Problems, including another version, are added to ``notes``. None, with
    a note, if there is none, it is of another kind, or it names no schema and has none of the fields ``any_of``."""
    document = read_json(path, notes, lost)
    if document is None:
        return None
    found = document.get("schema")
    if found is None:
        foreign, why = not any(name in document for name in any_of), "it names no schema"
    else:
        foreign = str(found).rpartition("/")[0] != schema.rpartition("/")[0]
        why = f"its schema is {str(found)[:60]}"
    if foreign:
        notes.append(Note(f"{path} is not the document that ddpdoctor writes there ({why}): {lost}."))
        return None
    _note_schema(path, found, schema, notes)
    return fitting(document, fields, path, notes)


def _note_schema(path: str, found: Any, known: str, notes: list[Note]) -> None:
    if found is not None and found != known:
        notes.append(
            Note(
                f"{path} has the schema {str(found)[:60]}, this version reads {known}: what is said of it may be wrong."
            )
        )


def _head_of(path: str) -> dict[str, Any]:
    """The first line of a JSON-lines file; {} if it is not an object. The reader of the whole file reports problems."""
    try:
        with reading(path) as source:
            head, _ = parsed(source.readline(_LONGEST_HEAD))
    except (OSError, ValueError):
        return {}
    return head if isinstance(head, dict) else {}


def _separate_equal_hostnames(records: list[RankRecord], notes: list[Note]) -> None:
    """Make the ranks' host names differ if several machines have the same name, such as ``localhost``: each machine has its own
    clock."""
    machines: dict[str, dict[str, int]] = {}
    for record in records:
        if boot := record.info.get("boot"):
            known = machines.setdefault(record.host, {})
            known.setdefault(boot, len(known))
    for record in records:
        name, boot = record.host, record.info.get("boot")
        if boot and (place := machines[name][boot]):
            record.info["host"] = f"{name}-{place + 1}"
    shared = [name for name, boots in machines.items() if len(boots) > 1]
    notes += [
        Note(f"{len(machines[name])} machines are named {name}: numbers distinguish them.") for name in shared
    ]


def _longest(attempts: list[Attempt]) -> int:
    """Place of the attempt with the most steps; of equal ones, of that with the longest log."""
    if len(attempts) == 1:
        return 0
    sizes = [(each.steps, each.recorded_bytes, each.started_ns or 0) for each in attempts]
    return sizes.index(max(sizes))


def _choose(
    records: list[RankRecord], of_job: list[RankRecord], number: int | None, notes: list[Note]
) -> list[RankRecord]:
    """Choose one recording per rank from a run directory's ``records``: those of attempt ``number`` (from 1) of the recordings
    ``of_job``, or of the attempt with the most steps. Adds a note about the choice."""
    attempts = attempts_of(of_job)
    if number is not None and not 1 <= number <= len(attempts):
        raise UnknownAttemptError(number, len(attempts))
    if attempts:
        place = _longest(attempts) + 1 if number is None else number
        counted = {record.path for attempt in attempts for record in attempt.ranks}
        paths = {record.path for record in attempts[place - 1].ranks}
    else:
        counted = paths = {record.path for record in records if record.repeat == records[0].repeat}
    if len(attempts) > 1:
        why = "" if number is not None else ", the one with the most steps"
        notes.append(
            Note(
                f"The steps of recorded attempt {place} of {len(attempts)} are measured{why}; `--attempt N` chooses another one."
            )
        )
    if left_out := sum(record.path not in counted for record in records):
        notes.append(
            Note(
                f"{left_out} other recording{'s' if left_out > 1 else ''} of the same ranks skipped: the longest are analyzed."
            )
        )
    return sorted((record for record in records if record.path in paths), key=lambda record: record.rank)


def _lookup_error(folder: str, name: str) -> OSError | None:
    """The error when looking up a file in a folder; None if it exists or is missing."""
    try:
        os.lstat(os.path.join(folder, name))
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _telemetry(run: str, manifest: Mapping[str, Any], notes: list[Note]) -> dict[str, str]:
    """Path of telemetry.jsonl by the name of the host's folder. A file missing although the launcher sampled its host becomes a
    note."""
    hosts, found = os.path.join(run, "hosts"), {}
    own = os.path.basename(layout.host_directory(run, str(manifest.get("host") or "")))
    sampled = bool((manifest.get("options") or {}).get("telemetry") and manifest.get("ended_ns"))
    try:
        names = folders_in(hosts)
    except FileNotFoundError:
        names = []
    except OSError as error:
        notes.append(unreadable(hosts, error, _UNKNOWN_OF_HOST))
        return {}
    for host in names:
        folder = os.path.join(hosts, host)
        path = os.path.join(folder, layout.TELEMETRY_FILE)
        if (failure := _lookup_error(folder, layout.TELEMETRY_FILE)) is not None:
            notes.append(unreadable(folder, failure, _UNKNOWN_OF_HOST))
        elif os.path.lexists(path):
            found[host] = path
        elif sampled and host == own:
            notes.append(Note(f"{path} is missing: {_UNSEEN_ON_HOST}."))
    if sampled and own not in names:
        folder = os.path.join(hosts, own)
        fault = _LINK if os.path.islink(folder) else "not a folder" if os.path.lexists(folder) else "missing"
        notes.append(Note(f"{folder} is {fault}: {_UNKNOWN_OF_HOST}."))
    return found
