"""From a graph to the ranks that make the others wait, in seven steps: compare, set apart waiting for cores, judge, take net, spread,
level, tell.
Beside them, one rank that keeps the others waiting in windows too short to show why (:func:`unseen`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array, Mask
from ddpdoctor.measure.taxonomy import (
    COMPONENTS,
    COMPUTATION,
    INDEX,
    LATE_COMPONENTS,
    Component,
    LateCause,
    SyncKind,
)

from .attribution import Attribution, component
from .comparison import Comparison, compare, in_columns, net_of_all, net_within, spread
from .judging import Verdict, evidence_of, judge
from .levels import Levels, levels
from .starved import starved_of_cpu


class UnseenTuning(msgspec.Struct, frozen=True):
    """Lateness from which on a rank is late although no work of it explains that."""

    step_share: float = 0.05
    """Share of the step that it must keep the others waiting: what rules warn of."""
    mostly: float = 0.5
    """Part of all waiting that it must cause, and of its own that must be left unexplained: more than half has one cause."""


UNSEEN = UnseenTuning()


def unseen(graph: Graph, attribution: Attribution) -> list[Array] | None:
    """[N, K, R] ns per group: waiting for the one rank that causes most of it, in windows that do not show what it did before.

    None where the cycles begin with all ranks together, where no single rank causes half of all waiting, or where what the
    rank was seen to do longer explains half of what it causes.
    """
    if len(graph.ranks) < 2 or not _begins_unseen(graph):
        return None
    waits = [_caused_ns(group) for group in graph.groups]
    caused_ns = sum((wait.sum(axis=(0, 1)) for wait in waits), np.zeros(len(graph.ranks)))
    leader = int(caused_ns.argmax())
    step_ns = float(np.median(np.concatenate([group.duration for group in graph.groups])))
    least_ns = max(UNSEEN.step_share * step_ns * graph.cycles, UNSEEN.mostly * float(caused_ns.sum()))
    explained_ns = sum(float(excess[:, :, leader].sum()) for excess in attribution.excess)
    if caused_ns[leader] < least_ns or explained_ns >= UNSEEN.mostly * float(caused_ns[leader]):
        return None
    return [
        _left_unexplained(wait, excess, leader)
        for wait, excess in zip(waits, attribution.excess, strict=True)
    ]


def _begins_unseen(graph: Graph) -> bool:
    """Whether a cycle begins before a rank's own window does."""
    column = INDEX[Component.UNSEEN]
    return any(bool(group.work[..., column].any()) for group in graph.groups)


def _caused_ns(group: CycleGroup) -> Array:
    """[N, K, R] ns by which a rank was the last to arrive, ahead of the second last, without what that one computed meanwhile."""
    caused = np.zeros(group.arrival.shape)
    cycles = np.arange(len(group.steps))
    for k, sync in enumerate(group.syncs):
        if len(sync.members) < 2 or sync.kind == SyncKind.STEP_END or sync.root is not None:
            continue
        members = np.array(sync.members)
        arrival = group.arrival[:, k, members]
        order = np.argsort(arrival, axis=1, kind="stable")
        last, second = members[order[:, -1]], members[order[:, -2]]
        waited = group.arrival[cycles, k, last] - group.arrival[cycles, k, second]
        computed = (
            0.0
            if group.concurrent_compute_in_wait is None
            else group.concurrent_compute_in_wait[cycles, k, second]
        )
        caused[cycles, k, last] = np.clip(waited - computed, 0.0, None)
    return caused


def _left_unexplained(wait: Array, excess: Array, rank: int) -> Array:
    """[N, K, R] ns: the ``wait`` that one rank causes, but for what it was seen to do longer, which has its own price."""
    explained = excess[:, :, rank].sum(axis=(1, 2))[:, None]
    whole = wait[:, :, rank].sum(axis=1, keepdims=True)
    left = np.zeros_like(wait)
    left[:, :, rank] = wait[:, :, rank] * np.clip(1.0 - explained / np.maximum(whole, 1.0), 0.0, 1.0)
    return left


def attribute(graph: Graph, *, short: bool = False) -> Attribution:
    """Who does more of what than the others, by how much, in which cycles.

    ``short``: the graph is a window on devices, and all that is known of the job.
    """
    if not _ranks_meet(graph):
        nothing = [np.zeros_like(group.work) for group in graph.groups]
        return Attribution(excess=nothing, claimed=nothing, stragglers={}, short=short)
    compared = compare(graph)
    starved = starved_of_cpu(graph, compared)
    comparison = compared if starved is None else replace(compared, more=starved.rest)
    evidence = evidence_of(graph, comparison, short=short)
    verdicts = [judge(cause, comparison, evidence, graph.steps) for cause in LATE_COMPONENTS]
    shape = comparison.more.shape
    late = in_columns(
        shape, [(verdict.cause, verdict.late) for verdict in verdicts if verdict.late is not None]
    )
    turning = in_columns(
        shape, [(verdict.cause, verdict.turns.where) for verdict in verdicts if verdict.turns is not None]
    )
    counting = [
        verdict.cause for verdict in verdicts if verdict.late is not None or verdict.turns is not None
    ]
    net = net_within(comparison.more, counting)
    excess = net_of_all(net, comparison.more, late | turning)
    stragglers = {verdict.cause: list(verdict.stragglers) for verdict in verdicts if verdict.late is not None}
    uneven = None if LateCause.COMPUTE in stragglers else levels(graph)
    turns = _in_turn(verdicts, comparison, excess, turning)
    in_turn = turns if uneven is None else _with_uneven(turns, uneven)
    return Attribution(
        excess=spread(comparison.differences, excess, late),
        claimed=spread(comparison.differences, net, late),
        stragglers=stragglers,
        by_chance=tuple(verdict.cause for verdict in verdicts if verdict.by_chance),
        in_turn=in_turn.excess,
        causes_in_turn=in_turn.causes,
        rotates=any(verdict.turns.rotate for verdict in verdicts if verdict.turns is not None),
        stands_out_in=_stands_out_in(verdicts, in_turn),
        short=short,
        inputs_explain=None if uneven is None else uneven.explained,
        starved=[] if starved is None else spread(compared.differences, starved.waited, starved.waited > 0),
    )


def _ranks_meet(graph: Graph) -> bool:
    """Whether there are ranks that meet in measured cycles: others cannot be late for each other."""
    kinds = {sync.kind for group in graph.groups for sync in group.syncs}
    return len(graph.ranks) > 1 and bool(graph.groups) and SyncKind.STEP_END not in kinds


class _InTurn(msgspec.Struct, frozen=True):
    """What makes ranks late in turn."""

    excess: list[Array]
    """[N, K, R, C] ns per group; empty where there is none."""
    causes: tuple[LateCause, ...]
    stands_out_in: list[int]
    """Steps, where no more speaks for it than that these stand out of a short window."""


def _in_turn(verdicts: Sequence[Verdict], comparison: Comparison, excess: Array, turning: Mask) -> _InTurn:
    """What the verdicts say of ranks that are late in turn. ``excess`` and where it is ``turning``: [cycles, R, C]."""
    turns = {verdict.cause: verdict.turns for verdict in verdicts if verdict.turns is not None}
    if not turns:
        return _InTurn([], (), [])
    proven = any(turn.proven for turn in turns.values())
    hit = turning.any(axis=(1, 2))
    return _InTurn(
        spread(comparison.differences, excess, turning),
        tuple(turns),
        [] if proven else sorted(comparison.steps[hit].tolist()),
    )


def _with_uneven(in_turn: _InTurn, uneven: Levels) -> _InTurn:
    """With computation that differs at random, where that is more than the turns of computation."""
    if _longest_ns(uneven.removed, COMPONENTS) <= _longest_ns(in_turn.excess, COMPUTATION):
        return in_turn
    others = tuple(cause for cause in in_turn.causes if cause != LateCause.COMPUTE)
    if not others:
        return _InTurn(uneven.removed, (LateCause.COMPUTE,), [])
    computes = np.isin(COMPONENTS, COMPUTATION)
    excess = [
        np.where(computes, removed, turns)
        for removed, turns in zip(uneven.removed, in_turn.excess, strict=True)
    ]
    return _InTurn(excess, (*others, LateCause.COMPUTE), [])


def _longest_ns(amounts: Sequence[Array], components: Sequence[Component]) -> float:
    """The sum over the cycles of what the ranks with most of these components have."""
    return sum(float(amount.max(axis=2).sum()) for amount in component(amounts, components))


def _stands_out_in(verdicts: Sequence[Verdict], in_turn: _InTurn) -> dict[LateCause, list[int]]:
    """Steps, by kind of work, for which no more speaks than that they stand out of a short window."""
    steps = {verdict.cause: list(verdict.stands_out_in) for verdict in verdicts if verdict.stands_out_in}
    return steps | ({LateCause.TURNS: in_turn.stands_out_in} if in_turn.stands_out_in else {})
