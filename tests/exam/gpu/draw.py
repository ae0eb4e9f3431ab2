"""Draws a simulated job with its faults from a seed, and computes the cost of each fault."""

from __future__ import annotations

import dataclasses
import random

from tests.exam.planted import Case, Fault

from .simulate import Planned, Rank, Recorded, Setup, run, step_us

HEALTHY_SHARE, TWO_SHARE = 0.2, 0.2
SHORT_HEALTHY_SHARE, SHORT_STEPS = 0.5, (2, 4)
"""Short windows: share of healthy jobs, and range of the number of steps. No job has two faults."""
MIN_SHARE, MAX_SHARE = 0.08, 0.45
CHEAP_SHARE = 0.04
EXPOSED_SHARE = 0.05
"""Minimum share of the step of exposed transfer for which a communication-bound finding is tolerated in a job without a fault. The
transfer of DDP's last bucket is always exposed, and only less or faster transfer helps."""
WARM = 3
SLOW_COMPUTE, UNEVEN = "rank-imbalance/slow-compute", "rank-imbalance/uneven-work"
HOST, RARE, LATE = "rank-imbalance/host-work", "rank-imbalance/intermittent", "allreduce/late-rank"
UNEXPLAINED = "rank-imbalance/unexplained-lateness"
PYTHON, SYNC = "host/python-work", "sync/device-sync"
ONE_RANK = (
    "slow-kernels",
    "extra-forward",
    "extra-after",
    "late-data",
    "host-stall",
    "throttled",
    "uneven",
    "rare-stall",
)
ALL_RANKS = ("no-overlap", "small-buckets", "syncs", "python-all", "late-data-all", "long-copy")
LINES = {
    "late-data": ("data.py", 21),
    "late-data-all": ("data.py", 21),
    "host-stall": ("metrics.py", 14),
    "rare-stall": ("snapshots.py", 9),
    "extra-after": ("metrics.py", 28),
    "syncs": ("checks.py", 30),
    "python-all": ("reporting.py", 17),
}
"""Source lines of the faults, visible if stacks are recorded."""


def rules_of(kind: str, recorded: Recorded, *, short: bool = False) -> tuple[str, ...]:
    """Rules that are right for the fault by their pages, given what the traces can show. A short window need not show the cause."""
    if short and kind in ONE_RANK:
        return (*rules_of(kind, recorded), UNEXPLAINED)
    seen = recorded.operators
    without_operators = () if seen else (LATE,)
    return {
        "slow-kernels": (SLOW_COMPUTE,),
        "throttled": (SLOW_COMPUTE, "rank-imbalance/throttled-gpu"),
        "extra-forward": (SLOW_COMPUTE,),
        "extra-after": (SLOW_COMPUTE, HOST),
        "uneven": (UNEVEN,) if recorded.shapes and seen else (UNEVEN, SLOW_COMPUTE),
        "late-data": ("dataloader/one-rank-late",) if seen else (HOST, LATE, "dataloader/one-rank-late"),
        "late-data-all": ("dataloader/starved",)
        if seen
        else (PYTHON, "gpu/launch-bound", "gpu/host-bound", "dataloader/starved"),
        "host-stall": (HOST, *without_operators),
        "rare-stall": (RARE, HOST, *without_operators),
        "python-all": (PYTHON,)
        if seen or recorded.runtime
        else (PYTHON, "gpu/launch-bound", "gpu/host-bound"),
        "syncs": (SYNC,) if recorded.runtime else (PYTHON, SYNC, "gpu/launch-bound", "gpu/host-bound"),
        "long-copy": ("dataloader/slow-copy",),
        "no-overlap": ("allreduce/not-overlapped",),
        "small-buckets": ("allreduce/small-buckets",),
        "slow-link": ("allreduce/slow-link",),
    }[kind]


def setup_of(seed: int, *, short: bool = False) -> Setup:
    """The job of ``seed`` with its faults. ``short``: with a window of few steps."""
    draw = random.Random(f"exam gpu {'short ' if short else ''}{seed}")
    hosts = draw.choice((1, 1, 2, 2, 3, 4))
    each = draw.choice((1, 2, 2, 4) if hosts > 1 else (2, 2, 3, 4, 8))
    host_of = tuple(host for host in range(hosts) for _ in range(each))
    world = len(host_of)
    if world == 1:
        host_of, world = (0, 0), 2
    layers = draw.randint(6, 12)
    pace = draw.uniform(150, 1200)
    layers_us = tuple(pace * draw.uniform(0.6, 1.4) for _ in range(layers))
    backward_us = 2.06 * sum(layers_us)
    buckets = draw.randint(3, min(6, layers))
    weights = [draw.uniform(0.5, 1.5) for _ in range(layers)]
    weights[0] *= 0.25
    layer_bytes = tuple(int(40e6 * weight / sum(weights)) for weight in weights)
    bucket_of = tuple(sorted(min(buckets - 1, layer * buckets // layers) for layer in range(layers)))
    bucket_of = (0, *(max(1, bucket) for bucket in bucket_of[1:]))
    hierarchical = hosts >= 2 and each >= 2 and draw.random() < 0.5
    steps_seen = draw.randint(3, 20) if draw.random() < 0.5 else draw.randint(5, 12)
    if world >= 8:
        steps_seen = min(steps_seen, 8)
    if short:
        steps_seen = draw.randint(*SHORT_STEPS)
    setup = Setup(
        seed=seed,
        host_of=host_of,
        layers_us=layers_us,
        layer_bytes=layer_bytes,
        bucket_of=bucket_of,
        bytes_per_us=40e6 / (draw.uniform(0.15, 0.45) * backward_us),
        latency_us=draw.uniform(15, 60),
        hierarchical=hierarchical,
        launch_us=draw.uniform(5, 12),
        data_us=draw.uniform(40, 150),
        end_spread=draw.choice((0.0, 0.01, 0.05, 0.15)),
        kernel_noise=draw.choice((0.002, 0.01, 0.03)),
        host_noise=draw.choice((0.05, 0.2, 0.5)),
        reads_loss=draw.random() < 0.85,
        steps=WARM + steps_seen + 3,
        offset_us=tuple(
            draw.choice((0.0, draw.uniform(-5e3, 5e3), draw.uniform(-3e6, 3e6))) + 1e7 for _ in range(hosts)
        ),
        drift_ppm=tuple(draw.choice((0.0, draw.uniform(-30, 30))) for _ in range(hosts)),
        recorded=_recorded(draw, world, steps_seen, short),
        short=short,
    )
    return dataclasses.replace(setup, faults=_faults(draw, setup, steps_seen))


def _recorded(draw: random.Random, world: int, steps_seen: int, short: bool) -> Recorded:
    level = draw.choice(("stacks", "stacks", "operators", "operators", "runtime", "kernels"))
    window = draw.choice(("whole", "whole", "cut") if short else ("whole", "whole", "staggered", "cut"))
    late = [draw.randint(0, 2) if window == "staggered" else 0 for _ in range(world)]
    metadata = draw.random() < 0.6
    return Recorded(
        operators=level in ("stacks", "operators"),
        stacks=level == "stacks",
        runtime=level != "kernels",
        shapes=draw.random() < 0.6,
        nccl_metadata=metadata,
        sequence_numbers=metadata and draw.random() < 0.5,
        step_annotations=level != "kernels" and draw.random() < 0.8,
        lost_share=0.01 if draw.random() < 0.1 else 0.0,
        first_step=tuple(WARM + after for after in late),
        last_step=tuple(WARM + steps_seen - 1 + after for after in late),
        cut=tuple(draw.uniform(0, 0.9) if window == "cut" else 0.0 for _ in range(world)),
    )


def _faults(draw: random.Random, setup: Setup, steps_seen: int) -> tuple[Planned, ...]:
    healthy = SHORT_HEALTHY_SHARE if setup.short else HEALTHY_SHARE
    chance = draw.random()
    if chance < healthy:
        return ()
    base_us = step_us(run(setup, ()), WARM, WARM + steps_seen - 1)
    pool = [*ONE_RANK, *ONE_RANK, *ALL_RANKS]
    if setup.hierarchical:
        pool += ["slow-link"] * 6
    if setup.short or chance > HEALTHY_SHARE + TWO_SHARE:
        return (_fault(draw, setup, draw.choice(pool), base_us, steps_seen),)
    one = draw.choice([kind for kind in ONE_RANK if kind not in ("rare-stall", "extra-after")])
    other = draw.choice(
        [kind for kind in (*ONE_RANK[:-1], "late-data-all", "python-all") if not _same_finding(kind, one)]
    )
    return tuple(_fault(draw, setup, kind, base_us, steps_seen) for kind in (one, other))


def _same_finding(kind: str, other: str) -> bool:
    """Whether one finding of one rule would be right for both faults."""
    stretched = ("slow-kernels", "throttled", "uneven", "extra-forward", "extra-after")
    outside = ("extra-after", "host-stall", "python-all", "late-data", "late-data-all")
    return any(kind in group and other in group for group in (stretched, outside))


def _fault(draw: random.Random, setup: Setup, kind: str, base_us: float, steps_seen: int) -> Planned:
    share = draw.uniform(MIN_SHARE, MAX_SHARE)
    us = share / (1 - share) * base_us
    ranks: tuple[int, ...] | None = (draw.randrange(setup.world),) if kind in ONE_RANK else None
    backward_us = 2.06 * sum(setup.layers_us)
    if kind == "rare-stall":
        every = draw.randint(min(5, steps_seen), max(5, min(10, steps_seen)))
        return Planned(kind, ranks, us * every, every, (WARM + steps_seen // 2) % every)
    if kind == "syncs":
        us = max(5.0, us / 4 - 20.0)
    if kind == "small-buckets":
        transfer = sum(setup.layer_bytes) / setup.bytes_per_us
        us = min(120.0, (backward_us + us - transfer) / setup.latency_us)
    if kind == "slow-link":
        host = draw.choice(sorted(set(setup.host_of)))
        ranks = setup.on_host(host)
        us = max(1.0, (backward_us + us) / (sum(setup.layer_bytes) / setup.bytes_per_us) - 1)
    return Planned(kind, ranks, us)


def case_of(setup: Setup) -> tuple[Case, list[Rank]]:
    """(Ground truth of ``setup``, from simulations with all faults and without each; the ranks of the simulation with all faults)."""
    ranks = run(setup)
    first = max(setup.recorded.first_step)
    last = min(setup.recorded.last_step)

    def timed_us(*faults: Planned) -> float:
        return step_us(run(setup, faults), first, last)

    with_all, several = step_us(ranks, first, last), len(setup.faults) > 1
    none = timed_us() if several else None
    faults, doubts = [], []
    for one in setup.faults:
        rest = tuple(other for other in setup.faults if other is not one)
        price = (with_all - timed_us(*rest)) / 1000
        alone = None if none is None else (timed_us(one) - none) / 1000
        lines = (LINES[one.kind],) if setup.recorded.stacks and one.kind in LINES else ()
        once = sum(one.hits(rank, step) for rank in one.ranks or () for step in range(first, last + 1)) == 1
        rules = rules_of(one.kind, setup.recorded, short=setup.short)
        seen_once = one.kind == "rare-stall" and once
        faults.append(Fault(one.kind, rules, one.ranks, price, lines, seen_once, alone))
        if price * 1000 < CHEAP_SHARE * with_all:
            doubts.append(f"cheap: {one.kind} costs {price:.3f} of {with_all / 1000:.2f} ms")
    exposed_us = with_all - step_us(
        run(dataclasses.replace(setup, bytes_per_us=1e12, latency_us=0.0)), first, last
    )
    tolerated = _tolerated(setup, exposed_us / with_all)
    shape = {
        "world": setup.world,
        "hosts": len(set(setup.host_of)),
        "hierarchical": setup.hierarchical,
        "reads_loss": setup.reads_loss,
        "steps": last - first + 1,
        "noise": [setup.kernel_noise, setup.host_noise],
        "recorded": dataclasses.asdict(setup.recorded),
        "faults": [dataclasses.asdict(fault) for fault in setup.faults],
        "bare_transfer": round(exposed_us / with_all, 3),
    }
    steps_are_known = setup.recorded.step_annotations or setup.recorded.operators
    step_ms = with_all / 1000
    joint = None if none is None else (with_all - none) / 1000
    planted = (tuple(faults), tolerated, shape, tuple(doubts), steps_are_known, joint)
    return Case(setup.seed, "short" if setup.short else "generated", step_ms, *planted), ranks


def _tolerated(setup: Setup, exposed_share: float) -> tuple[str, ...]:
    """Rules that apply to the job regardless of its faults: exposed transfer, and the device sync when it reads the loss."""
    kinds = {fault.kind for fault in setup.faults}
    rules = (SYNC,) if setup.reads_loss else ()
    if exposed_share >= EXPOSED_SHARE:
        rules += ("allreduce/communication-bound",)
    if kinds & {"no-overlap", "small-buckets", "slow-link"}:
        rules += ("allreduce/communication-bound", "allreduce/not-overlapped", "allreduce/slow-transfer")
    return rules
