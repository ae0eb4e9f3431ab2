"""Hand-made dependency graphs: what each rank does between synchronisations goes in, the times follow."""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.costs import Context, costs_under, late_work, price_all
from ddpdoctor.measure.graph import CycleGroup, Graph, RankSteps, Sync
from ddpdoctor.measure.replay import replay_all
from ddpdoctor.measure.taxonomy import COMPONENTS, INDEX, SyncKind

MS = 1e6
"""ns"""


class NoLines:
    """A job whose source lines nobody knows."""

    def work(self, components, positions, steps, fallback_steps=None):
        return []

    def syncs(self, kinds):
        return []

    def operation(self, components, positions):
        return None

    def operators(self, components):
        return []

    def gap(self, components, positions, steps):
        return None

    def common_share(self, components, steps):
        return None


def gain_ns(graph, *changes):
    """Mean cycle time saved by the changes, ns; never negative."""
    return max(0.0, graph.mean_cycle_ns - float(replay_all(graph, changes).mean())) if graph.groups else 0.0


def work_array(cycles, syncs, ranks, **components_ms):
    """[N, K, R, C] ns; each component is a scalar or an array that broadcasts to [N, K, R]."""
    work = np.zeros((cycles, syncs, ranks, len(COMPONENTS)))
    for name, ms in components_ms.items():
        work[..., INDEX[name]] = np.asarray(ms, float) * MS
    return work


def cycles_of(syncs, work, transfer_ms=1.0, lag_ms=0.0, steps=None):
    """A group whose cycles follow each other, with every rank going on ``lag_ms`` after the common end.

    A broadcast holds each rank until the root is there, too. Lags must have a median of zero.
    """
    cycles, count, world, _ = work.shape
    transfer = np.broadcast_to(np.asarray(transfer_ms, float) * MS, (cycles, count))
    lag = np.broadcast_to(np.asarray(lag_ms, float) * MS, (cycles, count, world))
    begin = np.full((cycles, world), np.nan)
    arrival, end = np.full((2, cycles, count, world), np.nan)
    ready = np.zeros(world)
    for n in range(cycles):
        begin[n] = ready
        for k, sync in enumerate(syncs):
            members = list(sync.members)
            at = ready[members] + work[n, k, members].sum(axis=-1)
            together = at.max() if sync.root is None else np.maximum(at, at[members.index(sync.root)])
            arrival[n, k, members] = at
            end[n, k, members] = together + transfer[n, k] + lag[n, k, members]
            ready[members] = end[n, k, members]
    numbers = np.arange(cycles) if steps is None else np.asarray(steps)
    return CycleGroup(tuple(syncs), numbers, begin, arrival, end, work, np.full((cycles, count), np.nan))


def graph_of(*groups, ranks=None, samples=None, run_delay_ms=None, cpu_ms=None, elements=None):
    """A graph of these groups; the keywords but ``ranks`` give each rank's value, the same in every step or one for each."""
    world = groups[0].arrival.shape[2]
    steps = np.arange(sum(len(group.steps) for group in groups))

    def in_steps(values, rank, unit=1.0):
        return np.full(len(steps), np.nan if values is None else np.asarray(values[rank], float) * unit)

    nothing = in_steps(None, 0)
    per_rank = [
        RankSteps(
            steps,
            nothing,
            nothing,
            samples=in_steps(samples, r),
            run_delay=in_steps(run_delay_ms, r, MS),
            micro_batches=nothing,
            cpu=in_steps(cpu_ms, r, MS),
            elements=in_steps(elements, r),
            batch=nothing,
        )
        for r in range(world)
    ]
    return Graph("step-log", tuple(ranks or range(world)), list(groups), per_rank)


def reductions(world, count=1):
    """``count`` reductions of gradients by all ranks."""
    return [Sync(SyncKind.GRADIENTS, "DDP gradients", tuple(range(world))) for _ in range(count)]


_JITTERED = 13
"""Components with scatter: those that there were when the tests' seeds were chosen."""


def simple(world, cycles=40, transfer_ms=2.0, seed=0, jitter=0.0, **components_ms):
    """One reduction a step after 10 ms of backward, 5 ms of forward and what ``components_ms`` adds or replaces.

    ``jitter`` is the sigma of a lognormal factor on every rank's components.
    """
    work = work_array(cycles, 1, world, **{"forward": 5.0, "backward": 10.0, **components_ms})
    if jitter:
        drawn = np.random.default_rng(seed).lognormal(0.0, jitter, (*work.shape[:-1], _JITTERED))
        work[..., :_JITTERED] *= drawn
    return graph_of(cycles_of(reductions(world), work, transfer_ms))


def on(rank, world, ms, cycles=1, every=None):
    """[N, 1, R] ms on one rank, in each cycle or every so many."""
    values = np.zeros((cycles, 1, world))
    values[:: every or 1, 0, rank] = ms
    return values


def late_of(graph):
    """Facts under ``late`` as {cause: cost}, causes that were not found left out."""
    return costs_under("late", late_work(Context(graph, attribute(graph), NoLines())))


def shared_of(graph, patterns=()):
    """Facts under ``shared``, likewise."""
    context = Context(graph, attribute(graph), NoLines(), patterns=patterns)
    return costs_under("shared", price_all(context))
