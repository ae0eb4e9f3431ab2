"""Where a rank stands and what it does there, in the words of reports."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.measure.hangfacts import Standing
from ddpdoctor.measure.places import Where
from ddpdoctor.rundir.phases import phase_words
from ddpdoctor.rundir.stops import signal_name

from .activity import Activity, activity_of
from .evidence import RankEvidence, RunEvidence
from .frames import MOST_FRAMES, place_of


def activity(each: RankEvidence) -> Activity | None:
    """What a rank does, by all that is known of it."""
    found = activity_of(each.phase, each.stack, each.process, keeps_lock=each.keeps_lock)
    if each.joined or each.waits:
        return found
    says = "has not called init_process_group"
    return Activity("unjoined", f"{says}: it {found.says}" if found else says)


def last_at(each: RankEvidence) -> Where | None:
    """Where a rank is, or called the last collective that it is known to have issued."""
    if each.where is None and each.open_call is not None:
        return each.open_call.where
    if each.where is not None or each.recording is None:
        return each.where
    issued = sorted((*each.recording.operations, *each.recording.messages), key=lambda o: o.order)
    return next((place for o in reversed(issued) if (place := place_of(o.frames))), None)


def standing_of(each: RankEvidence, guilty: Iterable[int], run: RunEvidence) -> Standing:
    """Its row in the table of where each rank is."""
    does = activity(each) if run.stood(each) else None
    return Standing(
        rank=each.rank,
        host=each.host,
        guilty=each.rank in guilty,
        step=each.step,
        phase=phase_words(each.phase),
        collective=_last_collective(each),
        state=_state(each, does, each.rank in guilty, run.stood(each)),
        since_s=_stood_s(each, run),
        where=last_at(each) or (each.sampled if run.asked is not None and not run.hangs else None),
        stack=list(each.stack[:MOST_FRAMES]),
    )


def _stood_s(each: RankEvidence, run: RunEvidence) -> float | None:
    """For how long it stands in its step; None of a job that did not hang."""
    if not run.stood(each):
        return None
    looked_ns = run.looked_ns or each.seen_ns
    if looked_ns and each.step_since_ns and looked_ns > each.step_since_ns:
        return (looked_ns - each.step_since_ns) / 1e9
    return run.since_s or None


def _state(each: RankEvidence, does: Activity | None, guilty: bool, stood: bool) -> str | None:
    if does is not None and (guilty or not each.waits):
        return does.says
    if each.raised:
        return f"raised {each.raised[0].get('type') or 'an exception'}"
    if each.waits and stood:
        return "waits for other ranks"
    if each.signal is not None:
        return f"{_before_joining(each)}ended by {signal_name(each.signal)}"
    if not each.joined and each.is_gone and each.code is None:
        return f"{_before_joining(each)}ended"
    if each.is_gone and each.code is not None:
        return f"ended with exit code {each.code}"
    if each.in_order:
        return "has ended in order"
    recording = each.recording
    if recording is None:
        seen = each.stack or each.phase is not None or each.step is not None
        return None if seen else "left no dump"
    if any(o.pending for o in (*recording.operations, *recording.messages)):
        return "has collectives pending" if guilty else "waits for other ranks"
    return "has nothing pending"


def _before_joining(each: RankEvidence) -> str:
    """How far one had come that had not joined its process group."""
    if each.joined:
        return ""
    return f"{'waited in' if each.waits else 'had not called'} init_process_group, "


def _last_collective(each: RankEvidence) -> str | None:
    recording = each.recording
    if recording is not None and (recording.operations or recording.messages):
        last = max((*recording.operations[-1:], *recording.messages[-1:]), key=lambda each: each.order)
        return f"{last.name} number {last.sequence} of {last.group.words}"
    called = each.calls[-1] if each.calls else None
    return None if called is None or called.turn is None else f"{called.words}, number {called.turn}"
