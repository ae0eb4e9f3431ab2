"""The step log of one rank (:class:`RankLog`), and notes on missing records.

Values that follow from one log alone are derived here, such as the training loaders and the steps with evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints, place_in
from ddpdoctor.measure.places import Where
from ddpdoctor.rundir import SAMPLES_FILE, STEPS_FILE, TRACE_FILE, EventKind, Note, NoteCode, RankRecord
from ddpdoctor.rundir.liveness import is_running

from .activities import Activities, activities_of
from .records import EVALUATED, DeviceTimes, Step, WorkerLog
from .syncpoints import SyncPoint, has_ddp, sync_points_of

_MAX_STEPS_PER_BATCH = 3
"""A loader that gives batches in at least one of this many steps is a training loader. Two alternating training loaders both qualify; a
loader used for evaluation every few steps does not."""


def first(infos: Sequence[dict[str, Any]], key: str) -> Any:
    """The first value of ``key`` that is not None."""
    return next((info[key] for info in infos if info.get(key) is not None), None)


def usual_loader(steps: Sequence[Step]) -> int | None:
    """Id of the loader that gave the most batches."""
    batches = Counter(event.loader for step in steps for event in step.events if event.gives_batch)
    return batches.most_common(1)[0][0] if batches else None


_SHORT_LOG_SHARE = 0.9
"""Share of the longest log's steps below which a log is reported as short. Ranks killed one after the other differ by a few steps."""


def notes_on_records(
    logs: Sequence[RankLog], ended: bool, window: int | None = None, sampled: bool = False
) -> list[Note]:
    """Notes on the records of all ranks of a run. ``ended``: whether the job is known to be over. ``window``: number of the captured
    window that is analysed. ``sampled``: whether the run has hashes of the files in which its ranks were sampled."""
    own = [Note(sentence).of_rank(log.rank) for log in logs for sentence in _recorded_sentences(log)]
    return [
        *_no_steps_notes(logs),
        *_no_samples_notes(logs, sampled),
        *(_truncation_notes(logs) if ended else []),
        *_short_log_notes(logs),
        *own,
        *_lost_window_notes(logs, ended),
        *([] if window is not None else _capture_notes(logs)),
    ]


def _capture_notes(logs: Sequence[RankLog]) -> list[Note]:
    """Note on windows captured while the job ran, if no window was recorded at its start."""
    if not logs or any(log.record.trace is not None for log in logs):
        return []
    saved = sorted({number for log in logs for number in _saved_captures(log)})
    if not saved:
        return []
    which = f"Window {saved[0]} was" if len(saved) == 1 else f"Windows {', '.join(map(str, saved))} were"
    return [
        Note(
            f"{which} captured while the job ran and is not analyzed here; `--window {saved[-1]}` selects it."
        )
    ]


def _saved_captures(log: RankLog) -> list[int]:
    captures = log.record.info.get("captures") or []
    return [each.get("number", 0) for each in captures if each.get("state") == "saved"]


def _no_steps_notes(logs: Sequence[RankLog]) -> list[Note]:
    """Notes on ranks whose step log has no step. If no log has a step and no window was recorded, the job may not have reached its
    first step; then only unreadable files are reported."""
    seen = sum(bool(log.steps) for log in logs)
    known = [log.record.info.get("world_size") for log in logs]
    world = max((size for size in known if isinstance(size, int)), default=len(logs))
    looked_at = f"the steps of {seen or 'none'} of {max(world, len(logs))} ranks could be analyzed"
    recorded = seen or any(log.record.trace is not None or _window_state(log) == "saved" for log in logs)
    faults = [(log.rank, log.record.absence_note(STEPS_FILE, "step")) for log in logs if not log.steps]
    return [
        Note(f"{fault}: {looked_at}.", fault.code).of_rank(rank)
        for rank, fault in faults
        if recorded or fault.code == NoteCode.UNREADABLE
    ]


_FEWEST_SAMPLES = 20
"""Samples of another rank, about one second of sampling, from which a rank without any is reported."""
UNKNOWN_LINES = "at which source lines this rank spends its time is known from its recorded calls alone"


def _no_samples_notes(logs: Sequence[RankLog], sampled: bool) -> list[Note]:
    """Notes on ranks without samples if ranks with as many steps have samples, or if the run is known to have been ``sampled``."""
    others = [len(log.steps) for log in logs if len(log.samples) >= _FEWEST_SAMPLES]
    if not others and (not sampled or any(len(log.samples) for log in logs)):
        return []
    lacking = [log for log in logs if not len(log.samples) and len(log.steps) >= min(others, default=1)]
    return [
        Note(f"{log.record.absence_note(SAMPLES_FILE, 'sample of these steps')}: {UNKNOWN_LINES}.").of_rank(
            log.rank
        )
        for log in lacking
        if not any(UNKNOWN_LINES in note for note in log.notes)
    ]


def _truncation_notes(logs: Sequence[RankLog]) -> list[Note]:
    """Notes on files of an ended job that end within a line. Ranks write whole lines, so such a file was truncated."""
    return [
        Note(f"{log.record.path}/{name} ends in the middle of a line: what followed is lost.").of_rank(
            log.rank
        )
        for log in logs
        for name, kept in ((STEPS_FILE, log.steps), (SAMPLES_FILE, log.samples))
        if len(kept) and log.record.is_cut(name)
    ]


def _window_state(log: RankLog) -> str | None:
    """Last recorded state of the rank's profiler window."""
    return (log.record.info.get("window") or {}).get("state")


def _short_log_notes(logs: Sequence[RankLog]) -> list[Note]:
    """Notes on ranks that recorded far fewer steps than others."""
    most = max((len(log.steps) for log in logs), default=0)
    return [
        Note(
            f"Rank {log.rank} recorded {len(log.steps)} steps while others recorded {most}: "
            "only steps that all recorded are measured.",
            ranks=(log.rank,),
        )
        for log in logs
        if 0 < len(log.steps) < _SHORT_LOG_SHARE * most
    ]


def _recorded_sentences(log: RankLog) -> list[str]:
    """Notes and errors that the rank itself recorded."""
    info = log.record.info
    why = (info.get("window") or {}).get("why") if _window_state(log) in ("skipped", "failed") else None
    lost = None if _saved_captures(log) else why
    errors = (info.get("hook") or {}).get("errors") or []
    return [
        *(info.get("notes") or []),
        # The error that prevented the window is recorded in both places; report it once.
        *(error for error in errors if error != lost),
        *([f"not profiled ({lost})"] if lost else []),
    ]


def _lost_window_notes(logs: Sequence[RankLog], ended: bool) -> Iterator[Note]:
    """Notes on ranks that were killed, or are read, while their window was open, and on ranks whose saved window is missing."""
    for log in logs:
        state = _window_state(log)
        if state in ("open", "saving") and log.record.trace is None:
            doing = "was open" if state == "open" else "was being saved"
            sentence = (
                f"the profiler window {doing} when this was read: what it sees is not in this diagnosis."
            )
            if ended or is_running(log.record.info) is False:
                sentence = f"killed while the profiler window {doing}: what the window had recorded is lost."
            yield Note(sentence).of_rank(log.rank)
        elif state == "saved" and not log.record.has_window:
            path = f"{log.record.path}/{TRACE_FILE}"
            lost = f"{path} is missing: this rank's profiler window was saved, and is not read."
            yield Note(lost).of_rank(log.rank)


def no_samples() -> Ints:
    """An empty table of samples, [0, 4]."""
    return np.empty((0, 4), np.int64)


class RankLog(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The records of one rank's hook. Immutable; :meth:`shifted` returns a copy on another clock.

    Derived values, such as ``sync_points``, are computed at first use and cached.
    """

    rank: int
    record: RankRecord
    steps: Sequence[Step] = ()
    where: Mapping[int, Where] = msgspec.field(default_factory=dict)
    samples: Ints = msgspec.field(default_factory=no_samples)
    """[S, 4] epoch ns, user line, innermost line, ns that the sampling thread waited for the GIL (0 below
    :data:`ddpdoctor.rundir.HELD_NS`). Lines are ids into ``sample_where``."""
    sample_where: Mapping[int, Where] = msgspec.field(default_factory=dict)
    burst_samples: Ints = msgspec.field(default_factory=no_samples)
    """[C, 4] like ``samples``: the burst samples (taken in close succession) that waited for the GIL."""
    burst_ns: int = 0
    """Total length of the bursts, ns."""
    notes: Sequence[str] = ()
    device_times: Mapping[int, DeviceTimes] = msgspec.field(default_factory=dict)
    """By step number, for the steps whose CUDA events were recorded."""
    on_device_time: bool = False
    """Whether forward, backward and optimizer have device times, see :mod:`.devicetime`."""
    left_out: int = 0
    """Steps of the whole run that were recorded but not read, see :mod:`.read_limit`; the same on all ranks."""
    group_ends_ns: Sequence[int] = ()
    """When the rank destroyed a process group, or ended; wall clock, epoch ns."""
    follows_training: bool = False
    """Whether this is one training (:mod:`.trainings`) of a process and not its first."""
    later_trainings_end_ns: int | None = None
    """End of the process's later trainings, wall clock, epoch ns; None if there are none."""
    saved: int | None = None
    """The last step in which a checkpoint was saved, including steps not read and the one in which the rank ended; None if none was."""
    workers: Sequence[WorkerLog] = ()
    """Records of its data loader workers, on their own clock."""

    @property
    def host(self) -> str:
        """Host name."""
        return self.record.host

    @property
    def computes_on_device(self) -> bool:
        """Whether the rank computes on a device, according to its record."""
        return self.record.info.get("device") not in (None, "cpu")

    @property
    def start_ns(self) -> int:
        """Start of the first step, epoch ns; 0 if there is none."""
        return self.steps[0].start_ns if self.steps else 0

    @cached_property
    def sync_points(self) -> list[SyncPoint]:
        """The rank's synchronisations, in order of arrival."""
        return sync_points_of(self.steps, self.record.info)

    @cached_property
    def has_ddp(self) -> bool:
        """Whether DDP reduces the rank's gradients."""
        return has_ddp(self.steps, self.record.info)

    @cached_property
    def activities(self) -> Activities:
        """Activities of the training thread since :attr:`start_ns`."""
        return activities_of(self.steps, self.start_ns, self.loaders_with_workers, self.on_device_time)

    @cached_property
    def main_loaders(self) -> frozenset[int]:
        """Ids of the loaders that give batches in at least a third of the fully recorded steps. Other loaders are for evaluation."""
        used: Counter[int] = Counter()
        for step in self.steps:
            used.update({event.loader for event in step.events if event.gives_batch})
        most = sum(step.in_full for step in self.steps)
        return frozenset(loader for loader, times in used.items() if times * _MAX_STEPS_PER_BATCH >= most)

    @cached_property
    def evaluated(self) -> frozenset[int]:
        """Numbers of the steps with evaluation: a forward without gradients, batches from a loader not in ``main_loaders``, or models in
        evaluation mode."""
        main = self.main_loaders
        return frozenset(
            step.number
            for step in self.steps
            if EVALUATED in step.marks
            or any(
                event.kind == EventKind.EVALUATION
                or (event.kind == EventKind.DATA and main and event.loader not in main and event.gives_batch)
                for event in step.events
            )
        )

    @cached_property
    def main_loader_settings(self) -> dict[str, Any] | None:
        """Recorded settings of the loader that gave the most batches."""
        chosen = usual_loader(self.steps)
        every = enumerate(self.record.info.get("loaders") or [])
        found = (loader for place, loader in every if loader.get("id", place) == chosen)
        return next(({"id": chosen, **loader} for loader in found), None)

    @property
    def loaders_with_workers(self) -> set[int]:
        """Ids of the loaders with worker processes, from rank.json or, if that is lost, from the steps."""
        info = self.record.info
        if info.get("loaders") or "rank" in info:
            stated = enumerate(info.get("loaders") or [])
            return {int(of.get("id", place)) for place, of in stated if of.get("num_workers")}
        events = (event for step in self.steps for event in step.events)
        return {event.loader for event in events if event.kind == EventKind.DATA and event.batches_ready >= 0}

    def steps_at(self, moments: Ints) -> Ints:
        """[M] index of the step that contains each of the ``moments`` [M] (epoch ns); -1 if none does."""
        bounds = np.array([(step.start_ns, step.end_ns) for step in self.steps], np.int64).reshape(-1, 2)
        return place_in((bounds[:, 0], bounds[:, 1]), moments)

    def shifted(self, steps_ns: Ints, samples_ns: Ints | int) -> RankLog:
        """The log with steps moved by ``steps_ns`` [N] and samples by ``samples_ns`` [S]; itself if nothing moves."""
        samples, burst_samples = self.samples, self.burst_samples
        if np.any(samples_ns):
            samples = samples.copy()
            samples[:, 0] += samples_ns
            samples.flags.writeable = False
            burst_samples = self.burst_samples.copy()
            burst_samples[:, 0] += _shift_of(burst_samples[:, 0], self.samples[:, 0], samples_ns)
            burst_samples.flags.writeable = False
        steps = self.steps
        if steps_ns.any():
            steps = tuple(step.shifted(ns) for step, ns in zip(steps, steps_ns.tolist(), strict=True))
        if steps is self.steps and samples is self.samples:
            return self
        return replace(self, steps=steps, samples=samples, burst_samples=burst_samples)


def _shift_of(times: Ints, known: Ints, shifts: Ints | int) -> Ints | int:
    """Shift of each of ``times``: that of the last of the ``known`` times before it. ``known`` times move by ``shifts``."""
    if isinstance(shifts, int) or not len(known):
        return 0 if not isinstance(shifts, int) else shifts
    moved: Ints = shifts[np.maximum(np.searchsorted(known, times, side="right") - 1, 0)]
    return moved
