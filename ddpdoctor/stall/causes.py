"""Ranks that died or raised: whose it was first, and what elsewhere only follows from it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ddpdoctor.measure.hangfacts import StopFacts
from ddpdoctor.measure.places import Where
from ddpdoctor.rundir.stops import signal_name

from .asked import POLITE
from .evidence import RankEvidence, RunEvidence
from .frames import distinct_places, lines_of, place_of

_EFFECT = re.compile(
    r"connection (?:reset|closed|refused|was aborted)|closed by (?:remote )?peer|broken pipe|timed? ?out|socket|remote process exited"
    r"|recvValue failed|failed to recv|store->|tcpstore|nccl communicator was aborted|DistNetworkError|DistStoreError|heartbeat",
    re.IGNORECASE,
)
"""What ranks say of others that are gone, or do not answer."""
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
_MOST_MESSAGE, _MOST_EFFECT = 300, 120
"""Letters of an exception's text that a report shows, of a cause and of an effect."""
_SOURCE = re.compile(r"\[/[^\]]*\] ?")
"""Where in torch's own source an error was made."""


_TOGETHER_NS = 100_000_000
"""A signal to a whole process group reaches ranks and launcher together, and each of them notes it when it next runs."""


class Ends(msgspec.Struct, frozen=True):
    """Causes by the name of their fact, and what followed."""

    causes: dict[str, StopFacts]
    effects: list[str]


def ends_of(run: RunEvidence) -> Ends:
    """Deaths and exceptions that are causes."""
    effects: list[str] = []
    causes: dict[str, StopFacts] = {}
    dead = _deaths(run)
    raised = [each for each in _exceptions(run) if not _was_asked_before(run, each.raised_ns)]
    own = [each for each in raised if not _is_effect(each)]
    first = [each for each in own if _in_time(run, each.raised_ns)]
    if dead:
        causes["died"] = _death(dead, run)
    by_fact: dict[str, list[RankEvidence]] = {}
    for each in first:
        by_fact.setdefault(_fact_of(each), []).append(each)
    for fact, ranks in by_fact.items():
        if not dead or fact in ("worker", "device") or _before(ranks, dead):
            causes[fact] = _exception(ranks)
    if "died" in causes and by_fact and all(_before(ranks, dead) for ranks in by_fact.values()):
        del causes["died"]
        effects += [f"Rank {each.rank} was then ended." for each in dead]
    named = {rank for cause in causes.values() for rank in cause.ranks or ()}
    gone = [each for each in run.ranks.values() if each.in_order and not each.raised and each.signal is None]
    if not causes and raised and gone and all(_left_early(each, raised) for each in gone):
        causes["uneven"] = _left(gone, raised)
        named = {each.rank for each in gone}
    elif not causes and not run.hangs and raised:
        causes["raised"] = _exception(raised, kind="connection")
        named = {each.rank for each in raised}
    effects += [_then(each) for each in raised if each.rank not in named]
    return Ends(causes, effects)


def _left_early(each: RankEvidence, raised: Sequence[RankEvidence]) -> bool:
    """Whether it ended in order in an earlier step than those that then lost it."""
    return each.step is not None and all(other.step is None or other.step >= each.step for other in raised)


def _left(gone: Sequence[RankEvidence], raised: Sequence[RankEvidence]) -> StopFacts:
    """Ranks that were through with their work while the others went on."""
    return StopFacts(
        ranks=sorted(each.rank for each in gone),
        waiting_ranks=sorted(each.rank for each in raised),
        kind="left",
        says="ended in order",
        step=min((each.step for each in gone if each.step is not None), default=None),
        where=distinct_places([each.where for each in gone]),
        waits_at=distinct_places([_raised_at(each) for each in raised]),
    )


def _in_time(run: RunEvidence, at_ns: int | None) -> bool:
    """Whether it came before the standstill was noticed, and before somebody ended the job: what comes after is an effect."""
    if _was_asked_before(run, at_ns):
        return False
    return not run.hangs or run.detected_ns is None or at_ns is None or at_ns <= run.detected_ns


def _was_asked_before(run: RunEvidence, at_ns: int | None) -> bool:
    asked_ns = run.asked.at_ns if run.asked is not None else None
    return asked_ns is not None and at_ns is not None and at_ns > asked_ns - _TOGETHER_NS


def _deaths(run: RunEvidence) -> list[RankEvidence]:
    """Ranks whose processes ended by something that is neither an exception nor the end of the job, the first ones."""
    gone = [each for each in run.ranks.values() if each.is_gone and not each.raised]
    asked = run.asked.signal if run.asked is not None else None
    # Nobody asks by SIGKILL: a rank that ends by it was killed, by the kernel for lack of memory perhaps.
    polite = POLITE | ({asked} if asked and asked != signal.SIGKILL else set())
    by_force = [each for each in gone if each.signal is not None and each.signal not in polite]
    by_code = [each for each in gone if each.code and each.code - 128 not in polite]
    found = [each for each in (*by_force, *by_code) if _in_time(run, each.gone_ns)]
    if found or len(gone) == len(run.ranks):
        return found
    politely = [each for each in gone if each.signal in POLITE and _in_time(run, each.gone_ns)]
    return politely if run.hangs else []


def _death(dead: Sequence[RankEvidence], run: RunEvidence) -> StopFacts:
    first = min(dead, key=lambda each: each.gone_ns or 0)
    memory = first.signal == signal.SIGKILL and (first.oom_kills > 0 or run.oom_kills > 0)
    evidence = []
    if memory:
        evidence.append("The kernel counted a process killed for lack of memory in the job's control group.")
    segfault = "Fatal Python error" in first.faults
    if segfault:
        evidence.append(f"faulthandler wrote: {_fatal_line(first.faults)}.")
    return StopFacts(
        ranks=sorted(each.rank for each in dead),
        kind="memory" if memory else "signal" if first.signal is not None else "code",
        message=signal_name(first.signal) if first.signal is not None else f"exit code {first.code}",
        step=first.step,
        where=distinct_places([each.where for each in dead]),
        evidence=evidence,
    )


def _fatal_line(faults: str) -> str:
    return shortened(faults[faults.rfind("Fatal Python error") :].split("\n", 1)[0], _MOST_MESSAGE)


def _exceptions(run: RunEvidence) -> list[RankEvidence]:
    found = [each for each in run.ranks.values() if each.raised]
    return sorted(found, key=lambda each: (each.raised_ns is None, each.raised_ns or 0))


def shortened(text: str, most: int) -> str:
    """``text`` as far as whole words of it have room in ``most`` letters."""
    text = text.strip()
    if len(text) <= most:
        return text
    head = text[:most]
    return f"{head.rpartition(' ')[0] or head} ..."


def _text(raised: Mapping[str, Any]) -> str:
    message = " ".join(str(raised.get("message") or "").split())
    if message.endswith(".") and not message.endswith(".."):
        message = message[:-1]  # sentences that quote it have a point of their own
    return f"{raised.get('type') or 'an exception'}{': ' if message else ''}{message}"


def _whole_text(each: RankEvidence) -> str:
    return " ".join(_text(raised) for raised in each.raised)


def _is_effect(each: RankEvidence) -> bool:
    return bool(_EFFECT.search(_whole_text(each))) and _fact_of(each) == "raised"


def _fact_of(each: RankEvidence) -> str:
    """Which fact tells of the exception."""
    text = _whole_text(each)
    named = (("worker", _WORKER), ("unused_parameter", _UNUSED), ("device", _DEVICE))
    return next((fact for fact, pattern in named if pattern.search(text)), "raised")


def _before(raised: Sequence[RankEvidence], dead: Sequence[RankEvidence]) -> bool:
    """Whether the exceptions came before the deaths."""
    first = min((each.raised_ns for each in raised if each.raised_ns is not None), default=None)
    died = min((each.gone_ns for each in dead if each.gone_ns is not None), default=None)
    return first is not None and died is not None and first < died


def _exception(ranks: Sequence[RankEvidence], kind: str | None = None) -> StopFacts:
    first = ranks[0]
    root = first.raised[0]
    return StopFacts(
        ranks=sorted(each.rank for each in ranks),
        kind=kind or str(root.get("type") or "exception").rpartition(".")[2],
        message=shortened(_text(root), _MOST_MESSAGE),
        step=first.step,
        where=distinct_places([_raised_at(each) for each in ranks]),
        evidence=[
            f"It came from {shortened(_text(other), _MOST_MESSAGE)}."
            for other in first.raised[1:3]
            if _text(other)
        ],
    )


def _raised_at(each: RankEvidence) -> Where | None:
    return place_of(lines_of(each.raised[0].get("frames"))) or each.where


def _then(each: RankEvidence) -> str:
    why = "an effect: it lost the others" if _is_effect(each) else "later than the cause"
    text = _SOURCE.sub("", _text(each.raised[0]))
    return f"Rank {each.rank} then raised {shortened(text, _MOST_EFFECT)} ({why})."
