"""Ranks that died or raised: the first is the cause, later ones are effects; also errors of devices."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ddpdoctor.measure.places import Where
from ddpdoctor.measure.runfacts import StopFacts
from ddpdoctor.rundir import ranks_in_words
from ddpdoctor.rundir.ends import Conclusion
from ddpdoctor.rundir.stops import signal_name

from .evidence import RankEvidence, RunEvidence, first_step
from .recording import distinct_places, lines_of, place_of

_LOST_CONNECTION = re.compile(
    r"connection (?:reset|closed|refused|was aborted)|closed by (?:remote )?peer|broken pipe|timed? ?out|socket|remote process exited"
    r"|recvValue failed|failed to recv|store->|tcpstore|nccl communicator was aborted|DistNetworkError|DistStoreError|heartbeat",
    re.IGNORECASE,
)
"""Messages of ranks that lost the connection to others."""
_LEAST_WATCHDOG_NS = 10_000_000_000
"""Shortest wait before an abort by NCCL's watchdog, whose timeouts are minutes."""
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_WORKER = re.compile(
    r"DataLoader worker.*(?:killed by signal|exited unexpectedly)|shared memory \(shm\)", re.IGNORECASE
)
_UNUSED = re.compile(
    r"Expected to have finished reduction in the prior iteration|parameters that were not used in producing loss",
    re.IGNORECASE,
)
_DEVICE = re.compile(
    r"CUDA error|cudaError|HIP error|hipError|device-side assert|uncorrectable (?:ECC|NVLink)|illegal memory access"
    r"|unspecified launch failure|CUBLAS_STATUS_EXECUTION|CUDNN_STATUS_EXECUTION|unhandled cuda error",
    re.IGNORECASE,
)
_PROGRAM_ERROR = re.compile(
    r"device-side assert|illegal memory access|illegal address|illegal instruction|misaligned address|invalid program counter"
    r"|invalid address space|cudaErrorAssert",
    re.IGNORECASE,
)
_HARDWARE_ERROR = re.compile(
    r"uncorrectable (?:ECC|NVLink)|GPU is lost|device is lost|hardware stack error|contained memory error",
    re.IGNORECASE,
)
"""Device errors whose text shows what failed: a kernel of the program, or the hardware. An invalid access may have another cause."""
_MOST_MESSAGE, _MOST_EFFECT = 300, 120
"""Characters of an exception's text in a report, for a cause and for an effect."""
_MOST_LISTED = 8
"""Most ranks listed as ended before."""
_OUT_OF_MEMORY = "OutOfMemoryError"
_SIZE = r"([\d.]+ (?:[KMGT]i?B|bytes))"
_TRIED_TO_ALLOCATE = re.compile(
    rf"Tried to allocate {_SIZE}\. GPU \d+ has a total capac\w+ of {_SIZE} of which {_SIZE} is free"
)
_OWN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_OTHERS_USE = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_BY_TORCH = re.compile(
    rf"memory {_SIZE} is allocated by PyTorch.*? {_SIZE} is reserved by PyTorch but unallocated"
)
"""Parts of torch's out-of-memory message."""
_ADVICE = re.compile(
    r" ?(?:Search for `\w+' in \S+ for more information\.?|(?:CUDA|HIP|GPU) kernel errors might be asynchronously reported.*)"
)
"""Text that torch adds to each device error."""
_SOURCE = re.compile(r"\[/[^\]]*\] ?")
"""Place in torch's own source in an error message."""


_TOGETHER_NS = 100_000_000
"""Longest delay between the records of ranks and launcher on a signal sent to the whole process group."""


class Ends(msgspec.Struct, frozen=True):
    """Causes by the name of their fact, and effects as sentences."""

    causes: dict[str, StopFacts]
    effects: list[str]


def ends_of(run: RunEvidence, concluded: Mapping[int, Conclusion]) -> Ends:
    """Classifies deaths and exceptions as causes and effects. ``concluded``: the conclusion on each rank's end."""
    effects: list[str] = []
    causes: dict[str, StopFacts] = {}
    dead = _deaths(run, concluded)
    raised = [
        each for each in run.ranks.values() if each.raised and not was_asked_before(run, each.raised_ns)
    ]
    raised.sort(key=lambda each: (each.raised_ns is None, each.raised_ns or 0))
    own = [each for each in raised if not lost_others(each)]
    first = [each for each in own if _precedes_stop(run, each.raised_ns)]
    if dead:
        causes["died"] = _death(dead, run)
    by_fact: dict[str, list[RankEvidence]] = {}
    for each in first:
        by_fact.setdefault(_fact_of(each), []).append(each)
    for fact, ranks in by_fact.items():
        if not dead or fact in ("worker", "device") or _came_before(ranks, dead):
            causes[fact] = _with_fault(_exception(ranks)) if fact == "device" else _exception(ranks)
    if "died" in causes and by_fact and all(_came_before(ranks, dead) for ranks in by_fact.values()):
        del causes["died"]
        effects += [f"Rank {each.rank} was then ended." for each in dead]
    named = {rank for cause in causes.values() for rank in cause.ranks or ()}
    gone = [each for each in run.ranks.values() if each.in_order and not each.raised and each.signal is None]
    # Each of them ended in an earlier step than the ranks that lost it.
    early = all(
        each.step is not None and all(other.step is None or other.step >= each.step for other in raised)
        for each in gone
    )
    if not causes and raised and gone and early:
        causes["uneven"] = _early_exit(gone, raised)
        named = {each.rank for each in gone}
    elif not causes and not run.hangs and raised and (without_end := _ranks_without_end(run)):
        causes["died"] = _death(without_end, run)
    elif not causes and not run.hangs and raised:
        causes["raised"] = (
            _unequal_collectives(raised, gone) if gone else _exception(raised, kind="connection")
        )
        named = {each.rank for each in raised}
    elif not causes and (unexplained := _unexplained_ends(run, concluded)):
        causes["died"] = _death(unexplained, run)
    effects += [_effect_sentence(each, run) for each in raised if each.rank not in named]
    return Ends(causes, effects)


def with_hang_until_timeout(run: RunEvidence) -> RunEvidence:
    """``run``, as a hang if the first failure is the timeout of a collective that a busy rank had not called. The timeout may be
    shorter than the hang monitor's, or the job was restarted and continued."""
    first, at_ns = _first_timed_out(run)
    if first is None:
        return run
    there = [
        each
        for each in run.ranks.values()
        if each is not first and not each.raised and (each.gone_ns is None or each.gone_ns > at_ns)
    ]
    missing = [each for each in there if _was_missing(each, first, at_ns)]
    since_ns = min((ns for each in missing if (ns := each.step_since_ns) and ns < at_ns), default=None)
    if since_ns is None:
        return run
    ranks = run.ranks | {each.rank: msgspec.structs.replace(each, waits=False) for each in missing}
    since_s = (at_ns - since_ns) / 1e9
    return msgspec.structs.replace(run, ranks=ranks, hangs=True, detected_ns=at_ns, since_s=since_s)


def _first_timed_out(run: RunEvidence) -> tuple[RankEvidence | None, int]:
    """The rank whose collective timed out first, and when (epoch ns); None if something else failed first. Gloo raises; NCCL's watchdog
    ends the process with SIGABRT. So does a failed kernel, which leaves an Xid on the device."""
    raised = [each for each in run.ranks.values() if each.raised and each.raised_ns is not None]
    first = min(raised, key=lambda each: each.raised_ns or 0, default=None)
    if first is not None:
        timed_out = first.waits and lost_others(first) and _TIMED_OUT.search(_whole_text(first))
        return (first, first.raised_ns or 0) if timed_out else (None, 0)
    dead = [each for each in run.ranks.values() if each.signal is not None and each.gone_ns is not None]
    first = min(dead, key=lambda each: each.gone_ns or 0, default=None)
    by_nccl = run.backend != "gloo"  # gloo aborts when it receives unexpected data
    if (
        first is None
        or first.gone_ns is None
        or not (by_nccl and first.waits and first.signal == signal.SIGABRT)
    ):
        return None, 0
    waited_ns = first.gone_ns - (first.step_since_ns or first.gone_ns)
    if waited_ns < _LEAST_WATCHDOG_NS or first.rank in run.devices or _xids_at_end(first, run):
        return None, 0
    return first, first.gone_ns - 1


def _was_missing(each: RankEvidence, other: RankEvidence, at_ns: int) -> bool:
    """Whether a rank had not called the collective in which ``other`` timed out, and was busy or in an unknown state (as when it holds the
    GIL). If its calls have no numbers, its status must be from before ``at_ns``: a rank that catches its own error does something else
    afterwards."""
    call = other.open_call
    if call is not None and call.turn is not None:
        turns = [own.turn for own in each.calls if own.group == call.group and own.turn is not None]
        if turns:
            unknown = each.waits is None and each.open_call is None
            return max(turns) < call.turn and (each.waits is False or unknown)
    return each.waits is False and each.seen_ns is not None and each.seen_ns <= at_ns


def _unexplained_ends(run: RunEvidence, concluded: Mapping[int, Conclusion]) -> list[RankEvidence]:
    """In a failed job, ranks with an unexplained end, if others ended differently. If all ended alike, a controller may have ended them."""
    unknown = [run.ranks[rank] for rank, each in concluded.items() if each is Conclusion.UNKNOWN]
    bad = [each for each in unknown if each.code or each.signal]
    return bad if run.job.failed and run.end_request is None and len(bad) < len(run.ranks) else []


def _ranks_without_end(run: RunEvidence) -> list[RankEvidence]:
    """Ranks of a finished job without any record of their end (not closed, no exception, no exit code), to which others lost connection."""
    silent = [
        each for each in run.ranks.values() if each.step is not None and not (each.in_order or each.raised)
    ]
    return [each for each in silent if each.code is None and each.signal is None] if run.job.complete else []


def _unequal_collectives(raised: Sequence[RankEvidence], gone: Sequence[RankEvidence]) -> StopFacts:
    """The cause if ranks lost others that had finished in the same step: they call more collectives than those did."""
    said = [
        f"Rank {each.rank} had ended in order, in step {each.step}: up to then it called fewer collectives."
        for each in gone
    ]
    found = _exception(raised)
    return msgspec.structs.replace(found, evidence=[*found.evidence, *said[:_MOST_LISTED]])


def _early_exit(gone: Sequence[RankEvidence], raised: Sequence[RankEvidence]) -> StopFacts:
    """The cause if some ranks finished while the others continued."""
    codes = [each.code for each in gone if not each.left]
    return StopFacts(
        ranks=sorted(each.rank for each in gone),
        waiting_ranks=sorted(each.rank for each in raised),
        kind="left",
        says="exited before the others (exit code 0)" if 0 in codes else "ended in order before the others",
        step=first_step(gone),
        where=distinct_places([each.where for each in gone]),
        waits_at=distinct_places([_raised_at(each) for each in raised]),
    )


def _precedes_stop(run: RunEvidence, at_ns: int | None) -> bool:
    """Whether it came before the hang was detected and before the job was asked to end. Anything later is an effect."""
    if was_asked_before(run, at_ns):
        return False
    return not run.hangs or run.detected_ns is None or at_ns is None or at_ns <= run.detected_ns


def was_asked_before(run: RunEvidence, at_ns: int | None) -> bool:
    """Whether the job was asked to end before that time."""
    asked_ns = run.end_request.at_ns if run.end_request is not None else None
    return asked_ns is not None and at_ns is not None and at_ns > asked_ns - _TOGETHER_NS


def _deaths(run: RunEvidence, concluded: Mapping[int, Conclusion]) -> list[RankEvidence]:
    """The first ranks whose processes failed without an exception."""
    failed = [run.ranks[rank] for rank, each in concluded.items() if each is Conclusion.FAILED]
    return [each for each in failed if not each.raised and _precedes_stop(run, each.gone_ns)]


def _death(dead: Sequence[RankEvidence], run: RunEvidence) -> StopFacts:
    first = min(dead, key=lambda each: each.gone_ns or 0)
    memory = first.signal == signal.SIGKILL and (first.oom_kills > 0 or run.oom_kills > 0)
    evidence = []
    if memory:
        evidence.append("The kernel counted a process killed for lack of memory in the job's control group.")
    if "Fatal Python error" in first.faults:
        last = first.faults[first.faults.rfind("Fatal Python error") :].split("\n", 1)[0]
        evidence.append(f"faulthandler wrote: {shortened(last, _MOST_MESSAGE)}.")
    if first.left and first.code:
        evidence.append(f"Python was left in order: the program itself chose exit code {first.code}.")
    elif first.in_order and first.code != 0:
        evidence.append("It had ended its process group before.")
    return StopFacts(
        ranks=sorted(each.rank for each in dead),
        kind="memory" if memory else "code" if first.code is not None else "signal",
        message=exit_text(first.code, first.signal),
        step=first.step,
        where=distinct_places([each.where for each in dead]),
        evidence=evidence,
    )


def exit_text(code: int | None, number: int | None) -> str | None:
    """How a process ended, from its exit code or signal number; None if neither is known."""
    if number is not None:
        return signal_name(number)
    return None if code is None else f"exit code {code}"


def shortened(text: str, most: int) -> str:
    """``text`` cut after a whole word, to at most ``most`` characters and " ..."."""
    text = text.strip()
    if len(text) <= most:
        return text
    head = text[:most]
    return f"{head.rpartition(' ')[0] or head} ..."


def _text(raised: Mapping[str, Any]) -> str:
    message = _ADVICE.sub("", " ".join(str(raised.get("message") or "").split()))
    if message.endswith(".") and not message.endswith(".."):
        message = message[:-1]  # the quoting sentence ends with a period
    return f"{raised.get('type') or 'an exception'}{': ' if message else ''}{message}"


def _whole_text(each: RankEvidence) -> str:
    return " ".join(_text(raised) for raised in each.raised)


def lost_others(each: RankEvidence) -> bool:
    """Whether its exception shows that it lost the connection to other ranks."""
    return bool(_LOST_CONNECTION.search(_whole_text(each))) and _fact_of(each) == "raised"


def _fact_of(each: RankEvidence) -> str:
    """Name of the fact for its exception."""
    text = _whole_text(each)
    named = (("worker", _WORKER), ("unused_parameter", _UNUSED), ("device", _DEVICE))
    return next((fact for fact, pattern in named if pattern.search(text)), "raised")


def _came_before(raised: Sequence[RankEvidence], dead: Sequence[RankEvidence]) -> bool:
    """Whether the exceptions came before the deaths."""
    first = min((each.raised_ns for each in raised if each.raised_ns is not None), default=None)
    died = min((each.gone_ns for each in dead if each.gone_ns is not None), default=None)
    return first is not None and died is not None and first < died


def _exception(ranks: Sequence[RankEvidence], kind: str | None = None) -> StopFacts:
    first = ranks[0]
    root = first.raised[0]
    kind = kind or str(root.get("type") or "exception").rpartition(".")[2]
    text, memory, doing = _text(root), list[str](), None
    if kind == _OUT_OF_MEMORY and (tried := _TRIED_TO_ALLOCATE.search(text)) is not None:
        doing = "oversized" if _bytes(tried[1]) > _bytes(tried[2]) else None
        text, memory = text[: tried.end()], _memory_sentences(text)
        if doing:
            memory.insert(
                0,
                "That is more than the whole device has: the size at that line is the cause, not what is held besides.",
            )
    came_from = [
        f"It came from {shortened(_text(other), _MOST_MESSAGE)}."
        for other in first.raised[1:3]
        if _text(other)
    ]
    return StopFacts(
        ranks=sorted(each.rank for each in ranks),
        kind=kind,
        doing=doing,
        message=shortened(text, _MOST_MESSAGE),
        step=first.step,
        where=distinct_places([_raised_at(each) for each in ranks]),
        evidence=memory + came_from,
    )


def _memory_sentences(text: str) -> list[str]:
    """Sentences on the use of the device's memory, from torch's message."""
    found = []
    if (own := _OWN_USE.search(text)) is not None:
        by_torch = _BY_TORCH.search(text)
        parts = f", of which tensors took {by_torch[1]} and torch's cache {by_torch[2]}" if by_torch else ""
        found.append(f"The process itself held {own[1]}{parts}.")
    if others := _OTHERS_USE.findall(text):
        sizes = sorted(others, key=_bytes, reverse=True)
        many = len(sizes) > 1
        held = (
            f"{len(sizes)} other processes held memory of this device, the largest {sizes[0]}"
            if many
            else f"Another process held {sizes[0]} of this device"
        )
        found.append(f"{held}.")
    return found


def _bytes(size: str) -> float:
    """A size in torch's format, in bytes."""
    number, unit = size.split()
    return float(number) * 1024.0 ** (" KMGT".find(unit[0]) if unit != "bytes" else 0)


def _with_fault(found: StopFacts) -> StopFacts:
    """The device error, with the part that failed if its text shows it."""
    text = found.message or ""
    program, hardware = _PROGRAM_ERROR.search(text), _HARDWARE_ERROR.search(text)
    return msgspec.structs.replace(found, fault="program" if program else "hardware" if hardware else None)


def _raised_at(each: RankEvidence) -> Where | None:
    return place_of(lines_of(each.raised[0].get("frames"))) or each.where


def _effect_sentence(each: RankEvidence, run: RunEvidence) -> str:
    others = [rank for rank in run.ranks if rank != each.rank]
    other = f"rank {others[0]}" if len(others) == 1 else "another rank"
    text = _SOURCE.sub("", _text(each.raised[0]))
    if not lost_others(each):
        why = "after the cause"
    elif _TIMED_OUT.search(_whole_text(each)):
        why = f"a consequence: its wait for {other} timed out"
    else:
        why = f"a consequence: it lost its connection to {other}"
    return f'Rank {each.rank} then raised "{shortened(text, _MOST_EFFECT)}" ({why}).'


_XID_BEFORE_NS, _XID_AFTER_NS = 10_000_000_000, 3_000_000_000
"""A process ends within seconds of the Xid of its kernel; Xids are read once a second (``--telemetry-interval``)."""
_XIDS = {
    "Xid 13": "an invalid instruction or access of a kernel",
    "Xid 31": "an access to memory that is not there",
    "Xid 43": "an error of the program, such as a device-side assertion",
}
"""Descriptions from NVIDIA's catalog (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html)."""
_DEVICE_EXPLAINABLE = frozenset(("died", "device", "not_reached", "together", "unexplained"))
"""Causes that a device error may explain. A rank's own exception needs no explanation, unless it reports a failed device."""


def with_device_errors(causes: dict[str, StopFacts], run: RunEvidence) -> dict[str, StopFacts]:
    """``causes`` with the errors that NVML counted. A single cause becomes a device error if the devices of all of its ranks (or any
    device, if it has no ranks) had errors, or if its ranks aborted when their devices had errors of programs."""
    if not causes:
        return causes
    (name, first), *rest = causes.items()
    explains = not rest and (name in _DEVICE_EXPLAINABLE or first.kind == "connection")
    named = set(first.ranks or run.devices)
    if explains and named and named <= set(run.devices):
        return {"device": _hardware_error(name, first, named, run)}
    if run.devices:
        return {
            **causes,
            name: msgspec.structs.replace(first, evidence=[*first.evidence, *_nvml_sentences(run.devices)]),
        }
    of_programs = {rank: xids for rank in first.ranks or () if (xids := _xids_at_end(run.ranks[rank], run))}
    aborts = name == "died" and first.message == signal_name(signal.SIGABRT)
    if not explains or not aborts or len(of_programs) < len(first.ranks or ()):
        return causes
    why = (
        "torch ends a process with SIGABRT if it meets the error of a failed kernel while it frees a tensor or watches NCCL; it has then "
        "written the error to the rank's output."
    )
    codes = dict.fromkeys(each for rank in sorted(of_programs) for each in of_programs[rank])
    means = "; ".join(_XIDS[code] for code in codes if code in _XIDS)
    on_device = f"{', '.join(codes)} on its device{f' ({means})' if means else ''}"
    return {
        "device": msgspec.structs.replace(
            first,
            fault="program",
            message=f"{first.message}, and {on_device}",
            evidence=[*first.evidence, *_nvml_sentences(of_programs), why],
        )
    }


def _xids_at_end(each: RankEvidence, run: RunEvidence) -> list[str]:
    """Xids of programs on a rank's device at the time its process ended. Xids at other times are probably of other processes."""
    if each.gone_ns is None:
        return []
    first_ns, last_ns = each.gone_ns - _XID_BEFORE_NS, each.gone_ns + _XID_AFTER_NS
    return [text for at_ns, text in run.programs.get(each.rank, ()) if first_ns <= at_ns <= last_ns]


def _hardware_error(name: str, first: StopFacts, named: Collection[int], run: RunEvidence) -> StopFacts:
    errors = [error for rank in sorted(named) for error in run.devices[rank]]
    message = first.message if name == "device" else ", ".join(dict.fromkeys(errors))
    counted = (
        _nvml_sentences({rank: run.devices[rank] for rank in named})
        if name == "device" or len(named) > 1
        else []
    )
    fault = first.fault or "hardware"
    return msgspec.structs.replace(
        first, ranks=sorted(named), fault=fault, message=message, evidence=[*first.evidence, *counted]
    )


def _nvml_sentences(errors: Mapping[int, Sequence[str]]) -> list[str]:
    """Sentences on the errors that NVML counted; ranks with the same errors share a sentence."""
    ranks: dict[str, list[int]] = {}
    for rank, each in sorted(errors.items()):
        ranks.setdefault(", ".join(each), []).append(rank)
    return [
        f"NVML counted on the device{'s' if len(each) > 1 else ''} of {ranks_in_words(each)}: {text}."
        for text, each in ranks.items()
    ]
