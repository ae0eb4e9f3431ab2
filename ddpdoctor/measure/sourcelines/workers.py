"""Work of the workers of a rank's training loader during batch preparation, and its source lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import sqrt

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.facts import Cost, LoaderFacts
from ddpdoctor.measure.places import CodeLine, Stack, Where
from ddpdoctor.measure.steplog import RankLog, WorkerLog

from .ranking import by_line, joined, ranked
from .table import CallStack, gil_owners_of

_FEWEST_SAMPLES = 5
"""Fewest samples of a reported line."""
_MAX_WORKER_LINES = 2
"""Most lines of workers listed before the line of the loop."""
_MOST_CALLERS = 4
"""Most callers of a worker's line."""


class _Tuning(msgspec.Struct, frozen=True):
    least_share: float = 0.1
    """Smallest reported share of a line in the preparation time."""
    mostly: float = 0.5
    """The library function that a line calls is reported if it takes more than this share of the time at the line."""
    slower: float = 1.5
    """A worker is slow if its batches take at least this multiple of the others' time."""
    sigmas: float = 5.0
    """They must also be longer by this many standard errors of the difference; it is high because many workers are compared."""
    starved: float = 0.1
    """Share of the preparation from which on a worker's waiting for a core counts."""
    fewest_batches: int = 5
    """Fewest batches of a compared worker, and of the others together."""


_TUNING = _Tuning()


class SlowWorker(msgspec.Struct, frozen=True):
    """A worker that prepares its batches more slowly than the others of its loader."""

    number: int
    batch_ms: float
    others_ms: float
    """Mean of the other workers."""


class WorkersWork(msgspec.Struct, frozen=True):
    """Work of the workers of one rank during batch preparation."""

    rank: int
    batch_ms: float
    """Mean."""
    busy_share: float
    """Share of the time in which a worker prepared batches, mean."""
    batch_bytes: float | None
    """Bytes of the tensors of a batch, mean; None if unknown."""
    cpu_share: float | None
    starved_share: float | None
    """``cpu_share``, ``starved_share``: shares of the preparation in which the thread had a CPU or waited for one; None if unknown."""
    slow: SlowWorker | None
    where: list[Where]
    """Lines with most of this time: of the slow worker, in excess of the others, or else of all workers."""

    @property
    def has_cores(self) -> bool:
        """Whether it is known that the workers hardly wait for a core."""
        return self.starved_share is not None and self.starved_share < _TUNING.starved

    @property
    def asleep_share(self) -> float | None:
        """Share in which the thread was off-CPU and not runnable: it waited for a file, a service or a timer."""
        if self.cpu_share is None or self.starved_share is None:
            return None
        return max(0.0, 1.0 - self.cpu_share - self.starved_share)


def work_of_workers(log: RankLog) -> WorkersWork | None:
    """Work of the workers of the loader that gave the most batches; None if it was not recorded."""
    chosen = [each for each in log.workers if each.loader == log.usual_loader]
    chosen = chosen or [each for each in log.workers if each.loader is None]
    chosen = [each for each in chosen if each.batches and each.preparing_ns]
    if not chosen:
        return None
    preparing_ns = sum(each.preparing_ns for each in chosen)
    batches = sum(each.batches for each in chosen)
    sizes = [each.bytes for each in chosen if each.bytes is not None]
    slow = _slow_worker(chosen)
    cpu = [each.cpu_ns for each in chosen if each.cpu_ns is not None]
    delay = [each.run_delay_ns for each in chosen if each.run_delay_ns is not None]
    is_known = len(cpu) == len(delay) == len(chosen)
    # cpu and delay include a little time between batches.
    whole_ns = max(preparing_ns, sum(cpu) + sum(delay))
    return WorkersWork(
        rank=log.rank,
        batch_ms=preparing_ns / 1e6 / batches,
        batch_bytes=sum(sizes) / batches if len(sizes) == len(chosen) else None,
        busy_share=min(1.0, preparing_ns / max(1, sum(each.span_ns for each in chosen))),
        cpu_share=sum(cpu) / whole_ns if is_known else None,
        starved_share=sum(delay) / whole_ns if is_known else None,
        slow=slow,
        where=_lines(log.rank, chosen, slow),
    )


def with_workers(facts: LoaderFacts, work: WorkersWork | None) -> LoaderFacts:
    """The facts of a loader with those of its workers."""
    if work is None:
        return facts
    awake = None if work.asleep_share is None else 1.0 - work.asleep_share
    slow = work.slow
    return replace(
        facts,
        computing_share=awake if facts.computing_share is None else facts.computing_share,
        workers_rank=work.rank,
        batch_ms=work.batch_ms,
        batch_bytes=work.batch_bytes,
        workers_busy_share=work.busy_share,
        workers_starved_share=work.starved_share,
        worker_where=work.where,
        slow_worker=None if slow is None else slow.number,
        slow_worker_ms=None if slow is None else slow.batch_ms,
        other_workers_ms=None if slow is None else slow.others_ms,
    )


def with_worker_lines(cost: Cost, work: WorkersWork | None) -> Cost:
    """The cost of waiting for data, with the workers' lines before the loop's own line, which only waits for them."""
    if work is None:
        return cost
    lines = work.where[:_MAX_WORKER_LINES]
    if cost.ranks is None and work.slow is None:
        lines = [replace(where, process="workers") for where in lines]
    return replace(cost, where=joined(lines, cost.where))


def _slow_worker(logs: Sequence[WorkerLog]) -> SlowWorker | None:
    """The worker with the longest batches, if they are significantly longer than those of the others."""
    of_each: defaultdict[int, list[WorkerLog]] = defaultdict(list)
    for log in logs:
        of_each[log.number].append(log)
    if len(of_each) < 2:
        return None
    means = {number: _mean_and_error(each)[0] for number, each in of_each.items()}
    number = max(means, key=lambda worker: means[worker])
    rest = [log for log in logs if log.number != number]
    (own_ms, own_error), (others_ms, others_error) = _mean_and_error(of_each[number]), _mean_and_error(rest)
    fewest = min(sum(log.batches for log in some) for some in (of_each[number], rest))
    least_ms = max(
        _TUNING.slower * others_ms, others_ms + _TUNING.sigmas * sqrt(own_error**2 + others_error**2)
    )
    if fewest < _TUNING.fewest_batches or own_ms < least_ms:
        return None
    return SlowWorker(number, own_ms, others_ms)


def _mean_and_error(logs: Sequence[WorkerLog]) -> tuple[float, float]:
    """(mean time of a batch, its standard error), ms."""
    count = sum(log.batches for log in logs)
    mean = sum(log.preparing_ns for log in logs) / 1e6 / count
    variance = max(0.0, sum(log.squares_ms2 for log in logs) / count - mean**2)
    return mean, sqrt(variance / count)


def _lines(rank: int, logs: Sequence[WorkerLog], slow: SlowWorker | None) -> list[Where]:
    """The lines with the most time, and the processes that ran them."""
    own = [log for log in logs if slow is None or log.number == slow.number]
    stacks, others = _by_stack(own), by_line(_by_stack([log for log in logs if log not in own]))
    net = {line: weight - others.get(line, 0.0) for line, weight in by_line(stacks).items()}
    whole = sum(weight for weight in net.values() if weight > 0)
    counts = by_line(_by_stack(own, counts=True))
    process = f"{'workers' if slow is None else f'worker {slow.number}'} of rank {rank}"
    found = []
    for where in ranked({line: net[line] for line, count in counts.items() if count >= _FEWEST_SAMPLES}):
        line = where.stack[0]
        if net[line] >= _TUNING.least_share * whole:
            heaviest = max((stack for stack in stacks if stack[0] == line), key=lambda stack: stacks[stack])
            found.append(
                replace(
                    where,
                    share=net[line] / whole,
                    samples=round(counts[line]),
                    callers=heaviest[1 : 1 + _MOST_CALLERS],
                    process=process,
                    inside=_library_line(line, own),
                )
            )
    return found


def _library_line(line: CodeLine, logs: Sequence[WorkerLog]) -> CodeLine | None:
    """The heaviest line of the library function that takes most of the time at this ``line``."""
    samples = [sample for log in logs for sample in log.samples if sample.user.stack[0] == line]
    functions: defaultdict[tuple[str, str], float] = defaultdict(float)
    lines: defaultdict[CodeLine, float] = defaultdict(float)
    for sample in samples:
        inner = sample.innermost.stack[0]
        if (inner.file, inner.function) != (line.file, line.function):
            functions[inner.file, inner.function] += sample.weight_ns
            lines[inner] += sample.weight_ns
    most = max(functions, key=lambda function: functions[function], default=("", ""))
    if functions.get(most, 0.0) <= _TUNING.mostly * sum(sample.weight_ns for sample in samples):
        return None
    return max((each for each in lines if (each.file, each.function) == most), key=lambda each: lines[each])


def _by_stack(logs: Sequence[WorkerLog], *, counts: bool = False) -> Mapping[Stack, float]:
    """ms per batch, or ``counts`` of samples, by the user's lines; {} without samples. A sample that shows a follower counts for the line
    that held the GIL, if that is known, see :mod:`.table`."""
    samples = [sample for log in logs for sample in log.samples]
    batches = max(1, sum(log.batches for log in logs))
    weights = np.array([1.0 if counts else each.weight_ns / 1e6 / batches for each in samples], float)
    stacks: dict[CallStack, int] = {}
    shown = np.array(
        [
            stacks.setdefault(CallStack(each.user.stack, each.innermost.stack[0]), len(stacks))
            for each in samples
        ],
        np.int64,
    )
    waited_ns = np.array([each.waited_ns for each in samples], np.int64)
    follows, owners = gil_owners_of(
        stacks, shown, waited_ns, np.ones(len(shown), bool), np.zeros(len(shown), bool)
    )
    at, following = (
        np.bincount(shown[chosen], weights[chosen], len(stacks)).astype(float)
        for chosen in (~follows, follows)
    )
    at += owners.take_from(following) + following
    found: defaultdict[Stack, float] = defaultdict(float)
    for stack, weight in zip(stacks, at.tolist(), strict=True):
        if weight:
            found[stack.lines] += weight
    return found
