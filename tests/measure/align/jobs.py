"""Windows of a job's collectives from physics, without traces: order, lateness, spread ends, clocks, cuts and losses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np

from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import Collectives, Window

EPOCH_NS = 1_759_308_646_000_000_000
MS = 1_000_000


@dataclass(frozen=True)
class Kind:
    """A collective of every step."""

    operation: str = "allreduce"
    length_ms: float = 1.0
    group: str = "0"
    work_ms: float = 1.5
    """Before it."""
    bytes: float = float("nan")
    members: tuple[int, ...] = ()
    """Ranks; empty: all."""
    stream: int = 20


SPREAD = (
    Kind("alltoall", 20.0, work_ms=8.0),
    Kind("allreduce", 0.05, work_ms=0.3),
    Kind("allreduce", 3.0, work_ms=0.02),
    Kind("allreduce", 3.0, work_ms=0.02),
    Kind("alltoall", 6.0, work_ms=4.0),
)


@dataclass(frozen=True)
class Job:
    """What the ranks do, and how it is recorded."""

    ranks: int = 4
    steps: int = 12
    kinds: tuple[Kind, ...] = SPREAD
    spread: float = 0.0
    """Ends of a collective differ by up to so much of its length, by rank and by kind."""
    scatter_ms: float = 0.015
    lateness_ms: float = 1.0
    """Mean of how much later each rank comes, drawn for each collective."""
    lost: float = 0.0
    cut: tuple[int, ...] = ()
    """Collectives that each rank's window misses at the beginning; a negative number: at the end."""
    leaves: dict[int, int] = field(default_factory=dict)
    """Rank → the collective from which on it has none, though its window goes on."""
    offsets_ms: tuple[float, ...] = ()
    """Of the ranks' clocks, each on a host of its own; empty: one host."""
    drifts_ppm: tuple[float, ...] = ()
    marked: bool = True
    numbered: bool = False
    renumbered: int = 1 << 30
    """Numbers begin anew after so many collectives."""
    seed: int = 0


@dataclass(frozen=True)
class Recorded:
    """A rank's window, and which collective of the job each of its rows is."""

    window: Window
    true: np.ndarray


def recorded(job: Job) -> list[Recorded]:
    """The windows of all ranks, by rank."""
    random = np.random.default_rng(job.seed)
    count = job.steps * len(job.kinds)
    kinds = [job.kinds[n % len(job.kinds)] for n in range(count)]
    part = np.array([[not kind.members or r in kind.members for r in range(job.ranks)] for kind in kinds])
    late = random.exponential(job.lateness_ms, (count, job.ranks)) * random.lognormal(0, 0.3, job.ranks)
    work = np.array([kind.work_ms for kind in kinds]) * random.lognormal(0, 0.05, count)
    length = np.array([kind.length_ms for kind in kinds]) * random.lognormal(0, 0.05, count)
    habit = random.uniform(0, job.spread, (len(job.kinds), job.ranks))
    start, end = np.full((2, count, job.ranks), np.nan)
    free = np.zeros(job.ranks)
    for n in range(count):
        own = part[n]
        start[n, own] = free[own] + work[n] + late[n, own]
        shares = habit[n % len(job.kinds), own] * random.uniform(0.8, 1.0, own.sum())
        woken = np.abs(random.normal(0, job.scatter_ms, own.sum()))
        end[n, own] = start[n, own].max() + length[n] * (1 - shares) + woken
        free[own] = end[n, own]
    return [_of_rank(job, kinds, r, start[:, r], end[:, r], random) for r in range(job.ranks)]


def _of_rank(job, kinds, rank, start_ms, end_ms, random) -> Recorded:
    clock = (job.offsets_ms[rank] if job.offsets_ms else 0.0, job.drifts_ppm[rank] if job.drifts_ppm else 0.0)

    def local(ms):
        return (EPOCH_NS + (np.asarray(ms) * (1 + clock[1] * 1e-6) + clock[0]) * MS).astype(np.int64)

    own = np.flatnonzero(~np.isnan(start_ms))
    whole_span = (float(start_ms[own[0]]) - 0.5, float(end_ms[own[-1]]) + 0.5)
    steps = []
    if job.marked:
        edges = [float(start_ms[own[own // len(job.kinds) == n]].min()) - 0.01 for n in range(job.steps)]
        edges.append(whole_span[1])
        bounds = [local(edge) for edge in edges]
        steps = [(n + 3, int(bounds[n]), int(bounds[n + 1])) for n in range(job.steps)]
    cut = job.cut[rank] if job.cut else 0
    span = whole_span
    if cut > 0:
        span, own = (float(start_ms[own[cut]]) - 0.001, whole_span[1]), own[cut:]
    elif cut < 0:
        span, own = (whole_span[0], float(end_ms[own[cut - 1]]) + 0.001), own[:cut]
    steps = [step for step in steps if step[1] >= local(span[0]) - MS and step[2] <= local(span[1]) + MS]
    own = own[own < job.leaves.get(rank, len(kinds))]
    own = own[random.random(len(own)) >= job.lost]
    started = local(start_ms[own])
    collectives = Collectives(
        start=started,
        end=local(end_ms[own]),
        issued=started - 1000,
        launch_known=np.ones(len(own), bool),
        operation=[kinds[n].operation for n in own],
        group=[kinds[n].group for n in own],
        group_size=np.full(len(own), -1, np.int64),
        stream=np.array([kinds[n].stream for n in own], np.int64),
        sequence=own % job.renumbered if job.numbered else np.full(len(own), -1, np.int64),
        bytes=np.array([kinds[n].bytes for n in own]),
        kind=[SyncKind.GRADIENTS] * len(own),
        point_to_point=np.zeros(len(own), bool),
        ready=started,
    )
    window = Window(
        trace=SimpleNamespace(meta=SimpleNamespace(process_groups=())),
        rank=rank,
        host=f"host {rank}" if job.offsets_ms else "host",
        on_device=True,
        steps=steps,
        span=(int(local(span[0])), int(local(span[1]))),
        collectives=collectives,
    )
    return Recorded(window, own)


def told(ranks, matched):
    """(Lines that join unlike collectives, pairs that should have been made and were not, of how many)."""
    wrong, made = 0, set()
    for line in matched.rows:
        names = {int(ranks[p].true[row]) for p, row in enumerate(line) if row >= 0}
        wrong += len(names) > 1
        made |= {(p, int(ranks[p].true[row])) for p, row in enumerate(line) if row >= 0}
    seen = np.bincount(np.concatenate([of.true for of in ranks]))
    should = {(p, int(n)) for p, of in enumerate(ranks) for n in of.true if seen[n] > 1}
    return wrong, len(should - made), len(should)


def without_groups(job: Job) -> Job:
    """As in a trace without metadata."""
    return replace(job, kinds=tuple(replace(kind, group="") for kind in job.kinds))
