"""DDP's buckets: what fewer, larger, or earlier ones would save.

Messages cost ``latency + bytes / rate`` each and are reduced one after the other. With *B* equal buckets that
become ready evenly over a backward pass of length *L*, bucket *i* starts at the later of its readiness ``L (i
+ 1) / B`` and the end of the one before; what ends after *L* is exposed.
"""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.facts import Cost
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.metrics import Reductions
from ddpdoctor.measure.taxonomy import SyncKind

from .pricing import usual_transfer

DEFAULT_CAP_BYTES = 25 * 1024 * 1024
"""DistributedDataParallel's bucket_cap_mb=25 (torch/nn/parallel/distributed.py)."""
_USUAL_LATENCY_NS = 50_000.0
"""Of a reduction of few bytes between hosts, about: nccl-tests shows 20 to 100 us."""
_SLOWEST_BYTES_PER_NS = 0.5
_SMALL_BYTES = 1 << 20
"""Messages below this are latency-bound rather than bandwidth-bound (msprof-analyze's "small packets")."""
_CAPS = tuple(2**i * 1024 * 1024 for i in range(9))
_KEEPS_BEST = 1.02
_NO_DIFFERENCE = 0.01
_LATE_START = 0.9
"""A first bucket that starts in the last tenth of the backward pass leaves nothing beside which it could
run."""


def disturbed_ns(graph: Graph) -> float:
    """ns per step of the gradients' exposed transfer beyond what it usually is: on a busy machine each message may wait for
    a CPU."""
    beyond = [
        (group.transfer * [s.kind == SyncKind.GRADIENTS for s in group.syncs] - usual_transfer(group)).sum(
            axis=1
        )
        for group in graph.groups
    ]
    return float(np.concatenate(beyond).mean()) if beyond else 0.0


def exposed_ns(count: int, total_bytes: float, backward_ns: float, latency_ns: float, rate: float) -> float:
    """ns of reduction after the end of a backward pass, with ``count`` equal buckets. ``rate`` in bytes per
    ns."""
    each = latency_ns + total_bytes / count / rate
    end = 0.0
    for i in range(count):
        end = max(end, backward_ns * (i + 1) / count) + each
    return end - backward_ns


def favoured_cap(total_bytes: float, backward_ns: float, latency_ns: float, rate: float) -> float:
    """The largest bucket size, in bytes, that is within 2 % of the least exposed time, or 1 % of the backward pass: fewer
    messages where it makes no difference."""
    costs = {
        cap: exposed_ns(max(1, int(np.ceil(total_bytes / cap))), total_bytes, backward_ns, latency_ns, rate)
        for cap in _CAPS
    }
    least, least_ns = min(costs.values()), max(10_000.0, _NO_DIFFERENCE * backward_ns)
    return float(max(cap for cap, cost in costs.items() if cost <= _KEEPS_BEST * least + least_ns))


def bucket_costs(
    facts: Reductions,
    latency_us: float | None,
    rate: float | None,
    communication: Cost | None,
    mean_ms: float,
    issue_ns: float = 0.0,
    disturbed_ms: float = 0.0,
) -> tuple[Cost | None, Cost | None, float | None]:
    """(small buckets, no overlap, favoured cap in bytes): what of the exposed communication the favoured
    bucket size would save.

    ``issue_ns`` is what issuing a bucket costs the thread that computes the gradients, where it is known (see
    :mod:`.reducer`): fewer buckets save it as well, hidden or not. ``disturbed_ms`` is exposed transfer beyond the usual (see
    :func:`disturbed_ns`): what disturbs messages meets them in proportion to the time they take, so that it goes as they go.
    None where the window did not show what a message costs.
    """
    if (
        latency_us is None
        or communication is None
        or not facts.per_sync
        or not facts.total_bytes
        or not mean_ms
    ):
        return None, None, None
    syncs = facts.syncs_per_step or 1.0
    count, size = facts.per_sync, facts.total_bytes
    latency_ns, each_rate = latency_us * 1e3, rate
    if each_rate is None:
        # One size only: the line cannot be fitted. Of a small message's time half is taken for latency, all
        # of it where the bytes
        # would pass in no time on a slow link; of a large one's, what NCCL takes for any message.
        message = size / count
        each_rate = (
            max(2 * message / max(latency_ns, 1.0), _SLOWEST_BYTES_PER_NS)
            if message < _SMALL_BYTES
            else message / latency_ns
        )
        latency_ns = max(
            _USUAL_LATENCY_NS if message >= _SMALL_BYTES else 0.0, latency_ns - message / each_rate
        )
    backward_ns = (facts.backward_ms or 0.0) * 1e6
    cap = favoured_cap(size, backward_ns, latency_ns, each_rate)
    best_count = max(1, int(np.ceil(size / cap)))
    exposed = communication.ms_per_step
    best = exposed_ns(best_count, size, backward_ns, latency_ns, each_rate) / 1e6 * syncs
    fewer = max(0.0, (count - best_count) * latency_ns / 1e6 * syncs)
    small = min(fewer, max(0.0, exposed - min(best, exposed)))
    small *= 1.0 + disturbed_ms / max(exposed, 1e-6)
    # Issuing wakes the thread that sends; of that, too, the part that goes with the bytes stays.
    fixed_share = latency_ns / max(latency_ns + size / count / each_rate, 1.0)
    small += max(0.0, (count - best_count) * issue_ns * fixed_share / 1e6 * syncs)
    late_start = (facts.first_ready_share or 0.0) > _LATE_START
    # A bucket holds whole parameters: gradients that are mostly one parameter's cannot be spread.
    spread_count = min(
        int(max(count, best_count)), max(1, int(size / (facts.largest_parameter_bytes or 1.0)))
    )
    spread = exposed_ns(spread_count, size, backward_ns, latency_ns, each_rate) / 1e6 * syncs
    return (
        _saving(small, mean_ms, communication) if count > 2 * best_count else None,
        _saving(max(0.0, exposed - spread), mean_ms, communication)
        if late_start and spread_count > 1
        else None,
        cap,
    )


def _saving(ms: float, mean_ms: float, like: Cost) -> Cost | None:
    if ms <= 0:
        return None
    return Cost(
        ms_per_step=ms,
        share=ms / mean_ms,
        speedup=mean_ms / max(mean_ms - ms, 1e-6),
        steps_hit=like.steps_seen,
        steps_seen=like.steps_seen,
        first_step=like.first_step,
        last_step=like.last_step,
        where=like.where,
    )
