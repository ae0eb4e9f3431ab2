"""Notes on what is missing in the records of a run's ranks: steps, samples, the profiler window, the ends of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpdoctor.rundir import SAMPLES_FILE, STEPS_FILE, TRACE_FILE, Note, NoteCode

from .log import UNKNOWN_LINES, RankLog

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
    """Errors that the rank itself recorded."""
    info = log.record.info
    why = (info.get("window") or {}).get("why") if _window_state(log) in ("skipped", "failed") else None
    lost = None if _saved_captures(log) else why
    errors = (info.get("hook") or {}).get("errors") or []
    return [
        # The error that prevented the window is recorded in both places; report it once.
        *(error for error in errors if error != lost),
        *([f"not profiled ({lost})"] if lost else []),
    ]


def _lost_window_notes(logs: Sequence[RankLog], ended: bool) -> Iterator[Note]:
    """Notes on ranks that were killed, or are read, while their window was open, and on ranks whose saved window is missing."""
    from ddpdoctor.rundir.liveness import is_running

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
