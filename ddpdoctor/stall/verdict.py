"""Derives the facts of the family ``hang`` and the position of each rank from the evidence on a stopped job."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from ddpdoctor.measure.places import Where
from ddpdoctor.measure.runfacts import HangFacts, StopFacts
from ddpdoctor.rundir import listed, ranks_in_words, tensors_in_words
from ddpdoctor.rundir.ends import POLITE
from ddpdoctor.rundir.stepevents import Phase
from ddpdoctor.rundir.stops import signal_name

from .activity import activity, last_line, standing_of
from .causes import ends_of, exit_text, with_device_errors, with_hang_until_timeout
from .conclusions import conclusions, controller_sentences, doubtful_ends, end_of_hang, ended_well
from .disagreement import disagreement, disagreement_in_hang, ran_out, with_positions
from .dumps import Dumps, StopVerdict
from .evidence import EndRequest, RankEvidence, RunEvidence, first_step
from .groups import Difference, Mismatch, Table, expected_ranks, first_differences, tables_of
from .recording import Operation, Recording, distinct_places, place_of
from .waiting import BlockingRanks, Root, RootReason, Stuck, find_blocking_ranks

_MOST_EVIDENCE = 12
"""Most sentences of evidence in a finding."""


def of_dumps(dumps: Dumps) -> StopVerdict:
    """The verdict on dumps without a run directory."""
    recordings = {each.rank: each for each in dumps.recordings}
    all_ranks = expected_ranks(dumps.recordings)
    ranks = {rank: RankEvidence(rank, recording=recordings.get(rank)) for rank in all_ranks}
    notes = list(dumps.notes)
    if without := [rank for rank in all_ranks if rank not in recordings]:
        notes.append(f"There is no readable flight recorder dump of {ranks_in_words(without)}.")
    return _stop_verdict(RunEvidence(ranks, hangs=True), notes, only_dumps=True)


def of_run(run: RunEvidence) -> StopVerdict:
    """The verdict on a recorded run."""
    return replace(_run_verdict(run), job=run.job)


def _run_verdict(run: RunEvidence) -> StopVerdict:
    if run.hangs and ended_well(run):
        # It hung at the last poll and then continued.
        run = replace(run, hangs=False, still_hangs=False, since_s=None)
    if not run.hangs:
        run = with_hang_until_timeout(run)
    failed = any(each.raised or each.signal or each.code for each in run.ranks.values())
    if not run.hangs and not failed and not run.job.failed and run.end_request is None:
        return StopVerdict(HangFacts(looked=True), [], doubtful_ends(run))
    if run.end_request is None and not run.hangs and not run.job.succeeded:
        run = replace(run, end_request=_signal_to_torchrun(run))
    found = _stop_verdict(run, [])
    if found.facts.state is None and run.end_request is None:
        return replace(found, notes=[*found.notes, *doubtful_ends(run)])
    if found.facts.state is not None or run.end_request is None:
        return found
    standing = [standing_of(each, (), run) for _, each in sorted(run.ranks.items())]
    noted = run.end_request.at_ns is not None
    by = "" if run.end_request.signal is None else signal_name(run.end_request.signal)
    return replace(found, standing=standing, ended_by=by, requested=noted)


def _signal_to_torchrun(run: RunEvidence) -> EndRequest | None:
    """The signal that ended torchrun itself, which passes it on to all ranks and exits with code 1."""
    ends = {None if each.raised else each.signal for each in run.ranks.values()}
    return EndRequest(min(number for number in ends if number)) if ends and ends <= POLITE else None


def _stop_verdict(run: RunEvidence, notes: list[str], only_dumps: bool = False) -> StopVerdict:
    recordings = {rank: each.recording for rank, each in run.ranks.items() if each.recording is not None}
    tables = tables_of(list(recordings.values()), list(run.ranks))
    found = find_blocking_ranks(tables, recordings)
    too_few = _too_few_dumps(found.roots, recordings, run) if only_dumps else None
    ends = ends_of(run, conclusions(run))
    causes, effects = dict(ends.causes), ends.effects
    if causes and causes.keys() <= {"died", "raised"} and (different := disagreement(run)) is not None:
        causes = {"different": different}
    elif causes:
        causes = {name: _with_waiting(cause, found, run) for name, cause in causes.items()}
        causes = {name: with_positions(cause, run) for name, cause in causes.items()}
    elif run.hangs:
        causes = _hang_causes(run, tables, found, recordings, notes, too_few, only_dumps)
    elif run.job.failed and run.end_request is None and (different := disagreement(run)) is not None:
        causes = {"different": different}
    elif run.job.failed and run.end_request is None:
        how = exit_text(run.job.code, run.job.signal)
        causes = {"unexplained": StopFacts(message=how, step=run.step, evidence=controller_sentences(run))}
    causes = with_device_errors(causes, run)
    guilty = {rank for cause in causes.values() for rank in cause.ranks or ()}
    facts = HangFacts(
        looked=True,
        only_dumps=True if only_dumps else None,
        undecided=None if causes else too_few,
        state=("hangs" if run.hangs else "failed") if causes else None,
        lasts=None if only_dumps else run.still_hangs,
        until=end_of_hang(run) if causes and run.hangs else None,
        since_s=run.since_s,
        step=run.step,
        exit_code=run.exit_code or None,
        hidden=True if causes and run.job.succeeded else None,
        effects=effects,
        **causes,
    )
    main = next(iter(causes.values()), None)
    seen = [
        each for _, each in sorted(run.ranks.items()) if causes or (too_few is not None and each.recording)
    ]
    standing = [standing_of(each, guilty, run, main) for each in seen]
    if too_few is not None and not causes:
        notes += _waiting_sentences(found.missed, {each.collective for each in standing})
    return StopVerdict(facts, standing, notes)


def _too_few_dumps(
    roots: Sequence[Root], recordings: Mapping[int, Recording], run: RunEvidence
) -> str | None:
    """Reason, as part of a sentence, for reporting no rank: only ranks without a dump are candidates, and fewer than half of the ranks have
    dumps. None if there is no such reason."""
    unseen = roots and all(root.why is RootReason.NO_RECORDING for root in roots)
    if not unseen or len(recordings) * 2 >= len(run.ranks):
        return None
    return f"only {len(recordings)} of {len(run.ranks)} ranks left a flight recorder dump"


def _with_waiting(cause: StopFacts, found: BlockingRanks, run: RunEvidence) -> StopFacts:
    """``cause`` with the collective at which the others wait for its ranks."""
    stuck = next((s for s in found.missed if set(s.absent) & set(cause.ranks or ())), None)
    return cause if stuck is None else replace(cause, **_stuck_fields(stuck, run))


def _hang_causes(
    run: RunEvidence,
    tables: Sequence[Table],
    found: BlockingRanks,
    recordings: Mapping[int, Recording],
    notes: list[str],
    too_few: str | None,
    only_dumps: bool,
) -> dict[str, StopFacts]:
    """The cause of a hang in which no rank died or raised."""
    alive = [each for each in run.ranks.values() if run.existed_in_hang(each)]
    if alive and (all(each.phase == Phase.RENDEZVOUS for each in alive) or _is_group_recreated(alive)):
        stop = _stop_facts(run, [], alive, "wait for a process group to be created")
        return {"rendezvous": replace(stop, collective=_joining_function(alive))}
    mismatch = next(iter(first_differences(tables)), None)
    called = disagreement_in_hang(mismatch, run, whole=len(recordings) == len(run.ranks))
    if called is not None:
        return {"different": called}
    if mismatch is not None:
        return _mismatch_facts(mismatch, run)
    if too_few is not None:
        return {}
    if found.roots:
        return _root_facts(found.roots, run, only_dumps)
    if not only_dumps:
        return _wait_facts(run, found)
    if found.all_waiting:
        return {"together": _facts_if_all_wait(found.all_waiting[0], run)}
    if any(recording.pending for recording in recordings.values()):
        notes.append(
            "Operations are unfinished in these dumps, but they do not show for which rank others wait."
        )
    return {}


def _mismatch_facts(found: Mismatch, run: RunEvidence) -> dict[str, StopFacts]:
    odd = [run.ranks[rank] for rank in found.odd]
    one = found.by_rank[found.odd[0]]
    rank = found.others[0] if found.others else found.odd[-1]
    other = found.by_rank[rank]
    stop = StopFacts(
        ranks=list(found.odd),
        waiting_ranks=list(found.others),
        group=found.group.words,
        collective=other.name,
        sequence=found.sequence,
        tensors=_tensors(other),
        unlike=_operation_text(one),
        kind=found.difference.value,
        since=_time_text(found.since_ns),
        since_s=run.since_s,
        step=first_step(odd),
        where=distinct_places([_called_at(each, found.by_rank[each.rank]) for each in odd]),
        waits_at=distinct_places(
            [_called_at(run.ranks[each], found.by_rank[each]) for each in found.others or (rank,)]
        ),
        evidence=[_issue_sentence(number, operation) for number, operation in sorted(found.by_rank.items())][
            :_MOST_EVIDENCE
        ],
    )
    if found.difference is not Difference.ORDER and ran_out(found.odd, found.by_rank, run):
        return {"uneven": stop}
    return {"different": stop}


def _issue_sentence(rank: int, operation: Operation) -> str:
    place = place_of(operation.frames)
    at = f" at {place.file}:{place.line}" if place else ""
    return f"Rank {rank} issued {_operation_text(operation)}, sequence number {operation.sequence} of the group{at}."


def _root_facts(roots: Sequence[Root], run: RunEvidence, only_dumps: bool) -> dict[str, StopFacts]:
    """The fact for ranks that did not reach the collective, by their activity."""
    ranks = [run.ranks[root.rank] for root in roots]
    stuck = min((root.stuck for root in roots if root.stuck), key=lambda s: s.since_ns or 0, default=None)
    activities = [activity(each) for each in ranks]
    named = next((each for each in activities if each is not None), None)
    barrier = next((each for each in ranks if each.phase == Phase.BARRIER), None)
    unseen = all(root.why is RootReason.NO_RECORDING for root in roots)
    busy = named is not None or any(each.waits is False for each in ranks)
    stop = StopFacts(
        ranks=[root.rank for root in roots],
        arrival_unknown=True if unseen and not busy else None,
        kind=roots[0].why.value,
        doing=named.name if named else "device" if all(root.unfinished for root in roots) else None,
        says=named.says if named else None,
        since_s=run.since_s,
        step=first_step(ranks),
        where=distinct_places([last_line(each) for each in ranks]),
        **(_stuck_fields(stuck, run) if stuck else _message_fields(roots, run)),
    )
    seen = [*_root_sentences(roots, run), *(_other_member_sentences(stop, stuck, run) if only_dumps else [])]
    stop = replace(stop, evidence=seen[:_MOST_EVIDENCE])
    absent = {root.rank for root in roots}
    others = [each for rank, each in run.ranks.items() if rank not in absent]
    if any(each.exhausted or each.closed_before for each in ranks) and not (
        others and all(each.exhausted for each in others)
    ):
        return {"uneven": stop}
    if barrier is not None and stop.collective not in (None, "barrier", "all_reduce_barrier"):
        return {"different": replace(stop, kind=Difference.EXTRA.value, unlike="barrier")}
    return {"not_reached": stop}


def _root_sentences(roots: Sequence[Root], run: RunEvidence) -> list[str]:
    """Sentences that show why ranks are roots. Ranks with the same text share a sentence."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for root in roots:
        for parts in _root_phrases(root, run.ranks[root.rank].recording):
            ranks.setdefault(parts, []).append(root.rank)
    sentences = [f"{before}{ranks_in_words(each)}{after}" for (before, after), each in ranks.items()]
    by_lag: dict[int, list[Root]] = {}
    for root in roots:
        if root.unfinished:
            by_lag.setdefault(len(root.unfinished), []).append(root)
    return [*(text[0].upper() + text[1:] for text in sentences), *map(_lag_sentence, by_lag.values())]


def _root_phrases(root: Root, recording: Recording | None) -> list[tuple[str, str]]:
    """Sentences that show why a rank is a root, each as (text before the rank, text after it)."""
    phrases = []
    if root.stuck is not None and root.why in (
        RootReason.NOT_ISSUED,
        RootReason.STOPPED_EARLY,
        RootReason.CIRCLE,
    ):
        last, group = _last_sequence(root.stuck, recording), root.stuck.group.words
        phrases.append(
            (f"no collective of {group} is recorded on ", ".")
            if last is None
            else ("", f" last issued sequence number {last} of {group}.")
        )
    if root.why is RootReason.STOPPED_EARLY:
        phrases.append(("", " stopped issuing while ranks that wait for the same collective went on."))
    if root.why is RootReason.CIRCLE:
        phrases.append(("each rank for which others wait is waiting itself, also ", "."))
    if root.why is RootReason.NO_MESSAGE:
        phrases.append(
            ("other ranks have sends or receives pending whose other part was not issued by ", ".")
        )
    if not root.unfinished and recording is not None and recording.operations and not recording.pending:
        phrases.append(
            (
                "everything that ",
                " issued is finished: the process stopped issuing, not the device executing.",
            )
        )
    return phrases


def _lag_sentence(roots: Sequence[Root]) -> str:
    """Sentence on ranks that all lag behind the others by the same number of collectives."""
    first, many = roots[0].unfinished[0], len(roots[0].unfinished)
    tensors = _tensors(first)
    what = f"{first.name} of {tensors_in_words(tensors)}" if tensors else first.name
    have = "each have" if len(roots) > 1 else "has"
    who = ranks_in_words([root.rank for root in roots])
    return (
        f"{who[0].upper()}{who[1:]} {have} {many} unfinished {'collective' if many == 1 else 'collectives'} that other ranks have "
        f"finished (the first on rank {roots[0].rank}: {what}, sequence number {first.sequence} of "
        f"{first.group.words}). Two causes are possible: {'their devices' if len(roots) > 1 else 'its device'} stopped executing, or the "
        "work is done and PyTorch's NCCL watchdog, the thread that marks it as done, is stuck."
    )


def _waiting_sentences(missed: Sequence[Stuck], stand_in: Collection[str | None]) -> Iterator[str]:
    """Sentences on the collectives in which ranks wait if too few ranks left a dump to report the missing ones."""
    for stuck in missed:
        what = f"{stuck.operation.name} with sequence number {stuck.sequence} of {stuck.group.words}"
        if what in stand_in:
            waiting, verb = ranks_in_words(stuck.waiting), "waits" if len(stuck.waiting) == 1 else "wait"
            yield (
                f"{waiting[0].upper()}{waiting[1:]} {verb} in {what}; whether {ranks_in_words(stuck.absent)} arrived is unknown."
            )
    yield "Collect the dumps of all ranks: with fewer than half of them, no rank can be named."


def _other_member_sentences(stop: StopFacts, stuck: Stuck | None, run: RunEvidence) -> list[str]:
    """Sentences on the collective's other members without a dump, and on ranks that wait elsewhere."""
    unseen = sorted(set(stuck.unknown if stuck else ()) - set(stop.ranks or ()))
    sentences = []
    if unseen:
        they = "it" if len(unseen) == 1 else "they"
        sentences.append(
            f"Whether {ranks_in_words(unseen)} arrived is unknown: {they} left no dump of that time."
        )
    known = {*(stop.ranks or ()), *stop.waiting_ranks}
    others = sorted(r for r, e in run.ranks.items() if r not in known and e.recording and e.recording.pending)
    if others:
        verb = "waits" if len(others) == 1 else "wait"
        text = ranks_in_words(others)
        sentences.append(f"{text[0].upper()}{text[1:]} {verb} elsewhere (see the table).")
    return sentences


def _last_sequence(stuck: Stuck, recording: Recording | None) -> int | None:
    """Sequence number of the last collective that a rank issued in the group; None if it recorded none."""
    if recording is None:
        return None
    issued = [o.sequence for o in recording.operations if o.group == stuck.group]
    return max(issued, default=recording.enqueued.get(stuck.group))


def _wait_facts(run: RunEvidence, found: BlockingRanks) -> dict[str, StopFacts]:
    """The cause without usable flight recorders, from the ranks that wait for others and those that do something else."""
    alive = [each for each in run.ranks.values() if run.existed_in_hang(each)]
    busy = [each for each in alive if each.waits is False]
    waiting = [each for each in alive if each.waits]
    ended = [each for each in alive if each.closed_before]
    joining = bool(waiting) and all(each.phase == Phase.RENDEZVOUS for each in waiting)
    if ended and waiting and not joining:
        return {"uneven": _stop_facts(run, ended, waiting, "has left its training loop")}
    if busy and (waiting or found.all_waiting):
        named = next((a for a in map(activity, busy) if a is not None), None)
        stop = _stop_facts(run, busy, waiting, named.says if named else None, named.name if named else None)
        if joining or not all(each.joined for each in busy):
            stop = replace(stop, collective=_joining_function(waiting))
        return {"uneven" if any(each.exhausted for each in busy) else "not_reached": stop}
    places = {(each.phase, each.where.file, each.where.line) for each in waiting if each.where}
    barriers = [each for each in waiting if each.phase == Phase.BARRIER]
    if barriers and len(barriers) < len(waiting) and len(places) > 1:
        others = [each for each in waiting if each.phase != Phase.BARRIER]
        stop = _stop_facts(run, barriers, others, "is in a barrier", "barrier")
        return {"different": replace(stop, kind=Difference.EXTRA.value, unlike="barrier")}
    if found.all_waiting:
        return {"together": _facts_if_all_wait(found.all_waiting[0], run)}
    stop = _stop_facts(run, [], alive, None)
    activities = {a.name: a for a in map(activity, alive) if a is not None}
    if busy and len(activities) == 1:
        ((name, does),) = activities.items()
        stop = replace(stop, doing=name, says=does.says)
    return {"unexplained": stop}


_DDP_CONSTRUCTOR_CALLS = frozenset(("_verify_param_shape_across_processes", "_sync_module_states"))
"""Functions in which DistributedDataParallel's constructor waits; it is the first to use a new process group."""


def _is_group_recreated(alive: Sequence[RankEvidence]) -> bool:
    """Whether a process group is created again in the same store: ranks that had trained before are in init_process_group, and all others
    have left it and wrap their model."""
    called = [{line.function for line in each.stack} for each in alive]
    joining = ["init_process_group" in functions for functions in called]
    beyond = all(
        joins or functions & _DDP_CONSTRUCTOR_CALLS for joins, functions in zip(joining, called, strict=True)
    )
    return any(joining) and beyond and all(each.step for each in alive)


def _joining_function(waiting: Sequence[RankEvidence]) -> str:
    """The function that creates the process group for which ranks wait."""
    called = {line.function for each in waiting for line in each.stack}
    return "new_group" if "new_group" in called else "init_process_group"


def _stop_facts(
    run: RunEvidence,
    guilty: Sequence[RankEvidence],
    waiting: Sequence[RankEvidence],
    says: str | None,
    doing: str | None = None,
) -> StopFacts:
    return StopFacts(
        ranks=sorted(each.rank for each in guilty) or None,
        waiting_ranks=sorted(each.rank for each in waiting),
        doing=doing,
        says=says,
        since_s=run.since_s,
        step=first_step(guilty or waiting),
        where=distinct_places([each.where for each in guilty or waiting]),
        waits_at=distinct_places([each.where for each in waiting]) if guilty else [],
    )


def _facts_if_all_wait(stuck: Stuck, run: RunEvidence) -> StopFacts:
    fields = _stuck_fields(stuck, run)
    places = fields.pop("waits_at")
    return StopFacts(
        ranks=None,
        since_s=run.since_s,
        step=first_step([run.ranks[rank] for rank in stuck.waiting]),
        where=places,
        **fields,
    )


def _stuck_fields(stuck: Stuck, run: RunEvidence) -> dict[str, Any]:
    operation = stuck.operation
    waiting = [run.ranks[rank] for rank in stuck.waiting if rank in run.ranks]
    return {
        "waiting_ranks": list(stuck.waiting),
        "group": stuck.group.words,
        "collective": operation.name,
        "sequence": stuck.sequence,
        "tensors": _tensors(operation),
        "since": _time_text(stuck.since_ns),
        "waits_at": distinct_places([_called_at(each, operation) for each in waiting]),
    }


def _message_fields(roots: Sequence[Root], run: RunEvidence) -> dict[str, Any]:
    """Fields of the facts on ranks whose messages others wait for, or whose devices lag."""
    partners = sorted({root.partner for root in roots if root.partner is not None})
    first = next((root.unfinished[0] for root in roots if root.unfinished), None)
    fields: dict[str, Any] = {"waiting_ranks": partners}
    for partner in partners[:1]:
        recording = run.ranks[partner].recording
        first = next((m for m in (recording.messages if recording else ()) if m.pending), first)
    if first is not None:
        fields |= {
            "group": first.group.words,
            "collective": first.name,
            "sequence": first.sequence,
            "tensors": _tensors(first),
        }
    return fields


def _called_at(each: RankEvidence, operation: Operation) -> Where | None:
    return place_of(operation.frames) or each.where


def _time_text(at_ns: int | None) -> str | None:
    """A time as text, to the second."""
    if not at_ns:
        return None
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _operation_text(operation: Operation) -> str:
    tensors = _tensors(operation)
    return f"{operation.name} of {tensors}" if tensors else operation.name


def _tensors(operation: Operation) -> str | None:
    sizes = listed(["x".join(map(str, size)) or "a number" for size in operation.inputs])
    if not sizes:
        return None
    dtypes = " ".join(dict.fromkeys(operation.input_dtypes))
    return f"{sizes}{' ' if dtypes else ''}{dtypes}"
