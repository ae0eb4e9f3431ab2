"""Costs of DDP's gradient buckets: the savings of fewer, larger, or earlier buckets.

Each message takes ``latency + bytes / rate``, and messages are reduced one after the other. With *B* equal buckets that
become ready evenly over a backward pass of length *L*, bucket *i* starts at the later of its readiness ``L (i
+ 1) / B`` and the end of the bucket before; the time after *L* is exposed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.attribution import component
from ddpdoctor.measure.facts import BucketFacts, Cost, saving
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.metrics import MessageCost
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import COMPUTATION, SharedCause, SyncKind

from .price import Context, Costs, range_of_share
from .shared import exposed_transfers, usual_transfer


class _Tuning(msgspec.Struct, frozen=True):
    usual_latency_ns: float = 50_000.0
    """Approximate latency of a reduction of few bytes between hosts: nccl-tests shows 20 to 100 us."""
    slowest_bytes_per_ns: float = 0.5
    """Rate of the slowest link assumed for a small message: 4 Gbit/s, half of what Gloo achieves on 10 GbE."""
    small_bytes: int = 1 << 20
    """Messages below this are latency-bound rather than bandwidth-bound (msprof-analyze's "small packets")."""
    caps_bytes: tuple[int, ...] = tuple(2**i * 1024 * 1024 for i in range(9))
    """Bucket sizes that are compared: 1 MiB, DDP's first bucket, to 256 MiB, by factors of two."""
    keeps_best: float = 1.02
    """Exposed times within this factor of the shortest one count as equal: timings of one setting differ by as much."""
    no_difference: float = 0.01
    """Differences below this share of the backward pass do not count either."""
    least_difference_ns: float = 10_000.0
    """The same for a very short pass: the time of one kernel launch."""
    late_start: float = 0.9
    """Part of the backward pass from which the first bucket starts late: in the last tenth, it can overlap with nearly none of it."""
    backward_share: float = 0.6
    """Share of the backward pass in a step's computation: each matrix product of the forward pass has two in the backward pass; the rest is
    loss and optimizer."""
    fewer_by: float = 2.0
    """Multiple of the best number of buckets from which there are too many."""
    model_share: float = 0.2
    """Relative error of the model (standard deviation), which assumes equal buckets, an even backward pass, and one line through the
    times of messages of a few sizes."""


_TUNING = _Tuning()


class Reduction(msgspec.Struct, frozen=True):
    """One reduction of all gradients, in ``count`` buckets."""

    count: float
    total_bytes: float
    backward_ns: float
    latency_ns: float
    bytes_per_ns: float
    per_step: float = 1.0
    """Reductions per step."""

    def exposed_ns(self, count: int) -> float:
        """ns of transfer after the end of the backward pass, with ``count`` equal buckets."""
        message_ns = self.latency_ns + self.total_bytes / count / self.bytes_per_ns
        return exposed_after_backward_ns(np.full(count, message_ns), self.backward_ns)

    def exposed_ms(self, count: int) -> float:
        """The same in ms per step."""
        return self.exposed_ns(count) / 1e6 * self.per_step

    def buckets(self, cap_bytes: float) -> int:
        """Number of buckets of at most ``cap_bytes``."""
        return max(1, int(np.ceil(self.total_bytes / cap_bytes)))

    def favoured_cap(self) -> float:
        """The largest bucket size, in bytes, whose exposed time exceeds the shortest one by no more than 2 % plus 1 % of the backward pass:
        fewer messages are preferred if the time is the same."""
        costs = {cap: self.exposed_ns(self.buckets(cap)) for cap in _TUNING.caps_bytes}
        no_difference_ns = max(_TUNING.least_difference_ns, _TUNING.no_difference * self.backward_ns)
        most_ns = _TUNING.keeps_best * min(costs.values()) + no_difference_ns
        return float(max(cap for cap, cost in costs.items() if cost <= most_ns))


def transfer_costs(context: Context) -> Costs:
    """``shared.*`` of exposed transfers; for gradients also ``shared.small_buckets`` and ``shared.no_overlap``."""
    exposed = exposed_transfers(context)
    costs = exposed | _bucket_savings_of(context, exposed.get(SharedCause.COMMUNICATION))
    return {f"shared.{cause}": cost for cause, cost in costs.items() if cost is not None}


def favoured_cap_bytes(context: Context, costs: Costs) -> float | None:
    """The best bucket size for this latency and bandwidth; None if these or the exposed transfer are unknown."""
    reduction = _reduction(_with_backward(context), context.message)
    exposed = costs.get(f"shared.{SharedCause.COMMUNICATION}")
    return reduction.favoured_cap() if reduction is not None and exposed is not None else None


def _bucket_savings_of(context: Context, communication: Cost | None) -> dict[SharedCause, Cost | None]:
    """Savings of other buckets; ``communication`` is the cost of the gradients' exposed transfer."""
    facts = _with_backward(context)
    if _reduction(facts, context.message) is None:
        return {SharedCause.NO_OVERLAP: _with_overlap(context, facts, communication)}
    return bucket_savings(
        facts,
        context.message,
        communication,
        context.mean_ns / 1e6,
        issue_ns=float(np.median(context.reducer.issue_ns or (0.0,))),
        disturbed_ms=disturbed_ns(context.graph) / 1e6 if context.host_timed else 0.0,
        overlappable=lambda ms: context.overlappable_transfer_ns(ms * 1e6) / 1e6,
        host_timed=context.host_timed,
    )


def _with_backward(context: Context) -> BucketFacts:
    """The facts on reductions, with a likely length of the backward pass if it was not recorded."""
    facts = context.reductions
    return (
        facts if facts.backward_ms is not None else replace(facts, backward_ms=_likely_backward_ms(context))
    )


def _likely_backward_ms(context: Context) -> float:
    """Length of a backward pass that was not recorded: its usual share of the step's computation."""
    computed = [component([group.work], COMPUTATION)[0].sum(axis=1) for group in context.graph.groups]
    overlapped = [
        component([group.hidden], COMPUTATION)[0].sum(axis=1)
        for group in context.graph.groups
        if group.hidden is not None
    ]
    whole_ns = sum(float(np.median(np.concatenate(of_kind))) for of_kind in (computed, overlapped) if of_kind)
    return _TUNING.backward_share * whole_ns / 1e6 / (context.reductions.syncs_per_step or 1.0)


def _with_overlap(context: Context, facts: BucketFacts, communication: Cost | None) -> Cost | None:
    """Saving of overlap with the backward pass if message sizes are unknown: the same messages, each sent when its part of the pass is
    complete."""
    if communication is None or not facts.per_sync or not _starts_late(facts):
        return None
    group = max(context.graph.groups, key=lambda of_kind: len(of_kind.steps))
    mean_ns = usual_transfer(group).mean(axis=0)[[s.kind == SyncKind.GRADIENTS for s in group.syncs]]
    messages_ns = mean_ns[-max(1, round(facts.per_sync)) :]
    if len(messages_ns) < 2:
        return None
    left_ms = (
        exposed_after_backward_ns(messages_ns, (facts.backward_ms or 0.0) * 1e6)
        / 1e6
        * (facts.syncs_per_step or 1.0)
    )
    hidden_ms = communication.ms_per_step - left_ms
    saved_ms = context.overlappable_transfer_ns(hidden_ms * 1e6) / 1e6
    return _saving(saved_ms, context.mean_ns / 1e6, communication, bounded=saved_ms < hidden_ms)


def _starts_late(facts: BucketFacts) -> bool:
    return (facts.first_ready_share or 0.0) > _TUNING.late_start


def bucket_savings(
    facts: BucketFacts,
    message: MessageCost,
    communication: Cost | None,
    mean_ms: float,
    *,
    issue_ns: float = 0.0,
    disturbed_ms: float = 0.0,
    overlappable: Callable[[float], float] = float,
    host_timed: bool = False,
) -> dict[SharedCause, Cost | None]:
    """The part of the exposed ``communication`` that other buckets would save.

    ``mean_ms`` is the mean step. ``host_timed``: the exposed transfer was timed on hosts, see :func:`_with_exposed_latency`. ``issue_ns``
    is the time that issuing a bucket takes on the thread that computes the gradients, if known: fewer buckets save it as well, even if
    their transfer is hidden. ``disturbed_ms`` is exposed transfer beyond the usual (see :func:`disturbed_ns`): it is proportional to the
    time of messages, and is saved with them. ``overlappable`` returns the part of a saving, ms, that spare cores allow.
    """
    reduction = _reduction(facts, message)
    if reduction is None or communication is None or not mean_ms:
        return {}
    exposed_ms = communication.ms_per_step
    if host_timed:
        reduction = _with_exposed_latency(reduction, exposed_ms)
    best_count = reduction.buckets(reduction.favoured_cap())
    fewer = (reduction.count - best_count) * reduction.per_step / 1e6
    # The saved latency is at most the difference between the exposed time now and with the best buckets.
    best_ms = min(reduction.exposed_ms(best_count), exposed_ms)
    small_ms = min(max(0.0, fewer * reduction.latency_ns), max(0.0, exposed_ms - best_ms))
    small_ms *= 1.0 + disturbed_ms / max(exposed_ms, 1e-6)
    # The part of the issue time that is proportional to the bytes is not saved.
    each_ns = reduction.latency_ns + reduction.total_bytes / reduction.count / reduction.bytes_per_ns
    small_ms += max(0.0, fewer * issue_ns * reduction.latency_ns / max(each_ns, 1.0))
    too_many = reduction.count > _TUNING.fewer_by * best_count
    # A bucket holds whole parameters, so the largest parameter limits the number of buckets.
    most_count = max(1, int(reduction.total_bytes / (facts.largest_parameter_bytes or 1.0)))
    spread_count = min(int(max(reduction.count, best_count)), most_count)
    hidden_ms = exposed_ms - reduction.exposed_ms(spread_count)
    spread_ms = overlappable(hidden_ms)
    savings: dict[SharedCause, Cost | None] = {}
    if too_many:
        savings[SharedCause.SMALL_BUCKETS] = _saving(small_ms, mean_ms, communication)
    if _starts_late(facts) and spread_count > 1:
        is_bounded = spread_ms < hidden_ms
        savings[SharedCause.NO_OVERLAP] = _saving(spread_ms, mean_ms, communication, bounded=is_bounded)
    return savings


def _reduction(facts: BucketFacts, message: MessageCost) -> Reduction | None:
    """The reduction that the facts describe; None if latency or size of the messages are unknown."""
    if message.latency_us is None or not facts.per_sync or not facts.total_bytes:
        return None
    latency_ns, bytes_per_ns = message.latency_us * 1e3, message.bytes_per_ns
    if bytes_per_ns is None:
        latency_ns, bytes_per_ns = _latency_and_rate_of_one_size(
            facts.total_bytes / facts.per_sync, latency_ns
        )
    return Reduction(
        count=facts.per_sync,
        total_bytes=facts.total_bytes,
        backward_ns=(facts.backward_ms or 0.0) * 1e6,
        latency_ns=latency_ns,
        bytes_per_ns=bytes_per_ns,
        per_step=facts.syncs_per_step or 1.0,
    )


def _with_exposed_latency(reduction: Reduction, exposed_ms: float) -> Reduction:
    """The reduction with the latency per message that follows from the exposed transfer, if messages are small and it is larger.

    A backend on the CPU sends one message after the other, and its threads wait for a core before each: the median message of a profiler
    window does not contain that wait. It is proportional to the number of messages."""
    if reduction.total_bytes / reduction.count >= _TUNING.small_bytes:
        return reduction
    each_ns = exposed_ms * 1e6 / reduction.per_step - reduction.total_bytes / reduction.bytes_per_ns
    return replace(reduction, latency_ns=max(reduction.latency_ns, each_ns / reduction.count))


def _latency_and_rate_of_one_size(message_bytes: float, whole_ns: float) -> tuple[float, float]:
    """(latency ns, bytes per ns) if all messages have about one size, so that no line can be fitted.

    For a small message, half of its time counts as latency, or more if even a slow link would need less time for the bytes. For a large
    message, the usual latency of a reduction is assumed.
    """
    if message_bytes < _TUNING.small_bytes:
        bytes_per_ns = max(2 * message_bytes / max(whole_ns, 1.0), _TUNING.slowest_bytes_per_ns)
        return max(0.0, whole_ns - message_bytes / bytes_per_ns), bytes_per_ns
    bytes_per_ns = message_bytes / whole_ns
    return max(_TUNING.usual_latency_ns, whole_ns - message_bytes / bytes_per_ns), bytes_per_ns


def disturbed_ns(graph: Graph) -> float:
    """ns per step of the gradients' exposed transfer beyond its usual length: on a busy machine each message may wait for a
    CPU."""
    beyond = [
        (group.transfer * [s.kind == SyncKind.GRADIENTS for s in group.syncs] - usual_transfer(group)).sum(
            axis=1
        )
        for group in graph.groups
    ]
    return float(np.concatenate(beyond).mean()) if beyond else 0.0


def exposed_after_backward_ns(messages_ns: Array, backward_ns: float) -> float:
    """ns of messages [B] after the end of a backward pass, if they become ready evenly during it and are sent one after the other."""
    count, end = len(messages_ns), 0.0
    for i, message_ns in enumerate(messages_ns.tolist()):
        end = max(end, backward_ns * (i + 1) / count) + message_ns
    return end - backward_ns


def _saving(ms: float, mean_ms: float, like: Cost, *, bounded: bool = False) -> Cost | None:
    """A cost of ``ms``, part of the cost ``like`` of the exposed transfer. Its range includes that of ``like`` and the error of the
    message model. ``bounded``: cores limit the saving, so its range begins at 0."""
    if ms <= 0:
        return None
    ends = range_of_share(like, ms, _TUNING.model_share)
    return Cost(
        **saving(ms, mean_ms),
        low_ms_per_step=0.0 if ends and bounded else ends.get("low_ms_per_step"),
        high_ms_per_step=ends.get("high_ms_per_step"),
        steps_hit=like.steps_seen,
        steps_seen=like.steps_seen,
        first_step=like.first_step,
        last_step=like.last_step,
        where=like.where,
    )
