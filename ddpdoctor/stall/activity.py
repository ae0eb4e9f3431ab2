"""The activity of a stopped rank, and its row in the table of positions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.runfacts import Standing, StopFacts
from ddpdoctor.rundir.stepevents import Phase, phase_words
from ddpdoctor.rundir.stops import signal_name

from .evidence import RankEvidence, RunEvidence
from .recording import MOST_FRAMES, Operation, Recording, place_of


class Activity(msgspec.Struct, frozen=True):
    """Activity of a rank: a name for rules, and a phrase that continues ``rank 3 ...``."""

    name: str
    says: str


_BY_PHASE = {
    Phase.DATA: Activity("loader", "waits for its DataLoader"),
    Phase.EVALUATION: Activity("evaluation", "evaluates"),
    Phase.SAVE: Activity("checkpoint", "writes a checkpoint"),
    Phase.LOAD: Activity("checkpoint", "reads a checkpoint"),
    Phase.BARRIER: Activity("barrier", "is in a barrier"),
    Phase.RENDEZVOUS: Activity("rendezvous", "waits for a process group to be created"),
    Phase.COMPILE: Activity("compile", "compiles with torch.compile"),
    Phase.DEBUGGER: Activity("debugger", "is in a debugger"),
}
_LOCK = Activity("lock", "waits for a lock or for another thread")
_SLEEP = Activity("sleep", "sleeps")
_STORAGE = Activity("storage", "waits for storage")
_NETWORK = Activity("network", "waits for the network")
_PIPE = Activity("process", "waits for another process")
_LOOP = Activity("loop", "keeps computing")
_NATIVE = Activity("native", "is in native code that holds Python's lock (the GIL)")
_STOPPED = Activity("stopped", "is stopped by a signal (SIGSTOP)")
_TRACED = Activity("debugger", "is stopped by a debugger")

_WAITS_IN = (
    (re.compile(r"nanosleep"), _SLEEP),
    (
        re.compile(
            r"nfs|rpc_wait|fuse|cifs|smb|lustre|gpfs|ceph|io_schedule|folio_wait|wait_on_page|ext4|xfs_|btrfs|jbd2|blk_"
        ),
        _STORAGE,
    ),
    (re.compile(r"^(?:pipe_|anon_pipe|wait_for_partner|fifo_open|do_wait|kernel_wait|wait4)"), _PIPE),
    (re.compile(r"sk_wait|tcp_|inet_|unix_stream|wait_woken|skb_"), _NETWORK),
)
"""Kernel functions in which a thread waits, from ``/proc/<pid>/wchan``."""
_FILES = (
    (
        re.compile(
            r"[/\\](?:socket|ssl|http[/\\]client|selectors|asyncio[/\\]\w+)\.py$|urllib3?|requests|botocore|aiohttp|grpc"
        ),
        _NETWORK,
    ),
    (re.compile(r"[/\\](?:threading|queue|concurrent[/\\]futures[/\\]\w+)\.py$"), _LOCK),
    (re.compile(r"[/\\](?:subprocess|multiprocessing[/\\]\w+)\.py$"), _PIPE),
)
"""Activity by the file of the innermost function."""
_FUTEX = re.compile(r"futex")
_READS = re.compile(r"^(?:0|1|2|17|18|19|20|74|75|257|267) ")
"""System calls on files: read, write, open, pread, pwrite, readv, writev, fsync, fdatasync, openat, readlinkat (x86-64)."""


def _observed_activity(each: RankEvidence) -> Activity | None:
    process = each.process
    state, waits_in = str(process.get("state") or ""), str(process.get("wchan") or "")
    if state.startswith(("T", "t")):
        return _TRACED if process.get("tracer") else _STOPPED
    known = Phase(each.phase) if each.phase in set(Phase) else None
    if known in _BY_PHASE and known is not Phase.EVALUATION:
        return _BY_PHASE[known]
    if state.startswith("D"):
        return _STORAGE
    if each.holds_gil:
        return _NATIVE
    waiting = _wait_activity(each.stack, waits_in, str(process.get("syscall") or ""))
    if waiting is not None:
        return waiting
    if known is Phase.EVALUATION:
        return _BY_PHASE[known]
    return _LOOP if each.computes or (state.startswith("R") and known in (None, Phase.OTHER)) else None


def _wait_activity(stack: Sequence[CodeLine], waits_in: str, syscall: str) -> Activity | None:
    innermost = stack[0] if stack else None
    if innermost is not None:
        named = next((does for files, does in _FILES if files.search(innermost.file)), None)
        if named is not None:
            return named
    found = next((does for names, does in _WAITS_IN if names.search(waits_in)), None)
    if found is not None:
        return found
    if _READS.match(syscall) and not _FUTEX.search(waits_in):
        return _STORAGE
    return _LOCK if _FUTEX.search(waits_in) else None


def activity(each: RankEvidence) -> Activity | None:
    """The activity of a rank, from /proc, its phase and its stack; None if unknown."""
    found = _observed_activity(each)
    if each.joined or each.waits:
        return found
    says = "has not called init_process_group"
    return Activity(
        "unjoined" if found is not _LOOP else found.name, f"{says}: it {found.says}" if found else says
    )


def last_line(each: RankEvidence) -> Where | None:
    """The rank's position, or else the line of its last known collective."""
    if each.where is None and each.open_call is not None:
        return each.open_call.where
    if each.where is not None or each.recording is None:
        return each.where
    issued = sorted((*each.recording.operations, *each.recording.messages), key=lambda o: o.order)
    return next((place for o in reversed(issued) if (place := place_of(o.frames))), None)


def standing_of(
    each: RankEvidence, guilty: Iterable[int], run: RunEvidence, stop: StopFacts | None = None
) -> Standing:
    """The rank's row in the table of positions. ``stop``: the first cause in the report."""
    does = activity(each) if run.existed_in_hang(each) else None
    return Standing(
        rank=each.rank,
        host=each.host,
        guilty=each.rank in guilty,
        step=each.step,
        phase=phase_words(each.phase),
        collective=_collective(each, stop),
        state=_state(each, does, each.rank in guilty, run.existed_in_hang(each)),
        since_s=_time_in_step_s(each, run),
        where=last_line(each) or (each.sampled if run.end_request is not None and not run.hangs else None),
        stack=list(each.stack[:MOST_FRAMES]),
    )


def _time_in_step_s(each: RankEvidence, run: RunEvidence) -> float | None:
    """Seconds spent in its current step; None if the job did not hang."""
    if not run.existed_in_hang(each):
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
        return f"{_joining_text(each)}ended by {signal_name(each.signal)}"
    if not each.joined and each.is_gone and each.code is None:
        return f"{_joining_text(each)}ended"
    if each.is_gone and each.code is not None:
        return f"ended with exit code {each.code}"
    if each.in_order:
        return "has ended in order"
    recording = each.recording
    if recording is None:
        seen = each.stack or each.phase is not None or each.step is not None
        return None if seen else "left no dump"
    if recording.pending:
        return "has unfinished collectives" if guilty else "waits for other ranks"
    return "has nothing pending" if recording.is_listed else None


def _joining_text(each: RankEvidence) -> str:
    """Progress of a rank that had not joined its process group; "" for other ranks."""
    if each.joined:
        return ""
    return f"{'waited in' if each.waits else 'had not called'} init_process_group, "


def _collective(each: RankEvidence, stop: StopFacts | None) -> str | None:
    """The collective in which it waits, or else its first unfinished one, or else its last one."""
    recording = each.recording
    if recording is not None:
        pending = recording.pending
        if pending:
            ours = (o for o in pending if stop and each.rank in stop.waiting_ranks and _matches(o, stop))
            return _operation_text(next(ours, pending[0]))
        issued = max(
            (*recording.operations[-1:], *recording.messages[-1:]), key=lambda o: o.order, default=None
        )
        if issued is not None:
            return f"{_operation_text(issued)}, finished"
    called = each.calls[-1] if each.calls else None
    if called is not None and called.turn is not None:
        return f"{called.words}, call {called.turn}"
    return None if recording is None else _last_sequence_text(recording, stop)


def _matches(operation: Operation, stop: StopFacts) -> bool:
    return (operation.name, operation.sequence, operation.group.words) == (
        stop.collective,
        stop.sequence,
        stop.group,
    )


def _last_sequence_text(recording: Recording, stop: StopFacts | None) -> str | None:
    """The rank's last sequence number in the group of ``stop``, for a recording that has only numbers."""
    counts = {group.words: count for group, count in recording.enqueued.items()}
    count = counts.get(stop.group) if stop and stop.group else None
    if not count or not stop:
        return None
    return f"sequence number {count} of {stop.group}{', finished' if recording.is_listed else ''}"


def _operation_text(operation: Operation) -> str:
    """An operation with its group, and its sequence number or the other rank."""
    pair, members = operation.pair, operation.group.members
    if pair is None:
        return f"{operation.name} with sequence number {operation.sequence} of {operation.group.words}"
    if members is None or max(pair) >= len(members):
        return f"{operation.name} of {operation.group.words}"
    if operation.name.startswith("send"):
        return f"send to rank {members[pair[1]]}"
    return f"receive from rank {members[pair[0]]}"
