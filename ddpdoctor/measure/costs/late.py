"""What some ranks do longer than the others, so that those wait: each cause with its part of what all of them cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.attribution import Attribution, component, unseen
from ddpdoctor.measure.facts import Cost
from ddpdoctor.measure.numerics import Array, Value, fair_shares
from ddpdoctor.measure.phases import word_of
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.replay import without_work
from ddpdoctor.measure.sourcelines import joined
from ddpdoctor.measure.taxonomy import LATE_COMPONENTS, Components, LateCause

from .awake import awake_longer_ms
from .borne import borne_by_marks
from .checkpoints import as_often_as_saved
from .computelate import cause_of_computing_longer
from .context import Context, Costs
from .merge import grown
from .onephase import only_phase
from .shared import different_work


class _Tuning(msgspec.Struct, frozen=True):
    least_share: float = 0.001
    """A rank whose excess saves less than this share of the step is no straggler: a replay's own error is as large."""
    same_segments: float = 0.5
    """Part of two causes' time that must fall into the same segments of the cycle, for one to hide behind the other."""
    shows: float = 0.5
    """Part of what is lost each time by which a step is longer for it at least: hosts that run ahead of their devices catch up."""
    stragglers: float = 0.25
    """Part of the largest straggler's excess from which on a rank is named beside it."""


_TUNING = _Tuning()
_IN_MS = (
    "ms_per_step",
    "low_ms_per_step",
    "high_ms_per_step",
    "alone_ms_per_step",
    "remaining_ms_per_step",
    "waiting_ms_per_step",
    "going_on_ms_per_step",
    "beside_ms_per_step",
)
"""Fields of a cost that are means over steps."""


class _Removal(msgspec.Struct, frozen=True):
    """What of the ranks' work goes with one cause."""

    work: list[Array]
    """[N, K, R] ns per group."""
    components: Components
    of_each: bool = False
    """Whether each rank does other work of that kind, at lines of its own."""


def late_work(context: Context) -> Costs:
    """``late.*`` of what ranks were seen to do longer, and ``late.total``: {} where nobody is late."""
    removals = _removals(context)
    pricing = context.pricing
    parts = fair_shares(
        {cause: removal.work for cause, removal in removals.items()},
        lambda work: float(pricing.gains_ns([without_work(work)]).mean()),
    )
    in_cycles = {
        cause: _cost(context, cause, removal, parts[cause])
        for cause, removal in removals.items()
        if parts[cause].part_ns / pricing.mean_ns >= _TUNING.least_share
    }
    if not in_cycles:
        return {}
    costs = {
        cause: _over_all_steps(cost, context) if cost.stands_out_in else cost
        for cause, cost in in_cycles.items()
    }
    everything = [sum(works) for works in zip(*(removal.work for removal in removals.values()), strict=True)]
    part = sum(cost.ms_per_step for cost in costs.values()) / sum(c.ms_per_step for c in in_cycles.values())
    total = _shrunk(pricing.cost([without_work(everything)], everything), part, pricing.mean_ns / 1e6)
    computing = costs.pop(LateCause.COMPUTE, None)
    if computing is not None:
        when = _when_late(context, LateCause.COMPUTE, removals[LateCause.COMPUTE])
        cause = cause_of_computing_longer(
            computing, context.graph, pricing.steps_hit(when), context.throttled_ranks
        )
        costs[cause] = computing
    saving = costs.get(LateCause.CHECKPOINT)
    if saving is not None:
        often = costs[LateCause.CHECKPOINT] = as_often_as_saved(context, saving)
        more_ms = often.ms_per_step - saving.ms_per_step
        if more_ms:
            total = grown(total, often, total.ms_per_step + more_ms, pricing.mean_ns / 1e6 + more_ms)
    costs[LateCause.TOTAL] = total
    return {f"late.{cause}": cost for cause, cost in costs.items()}


def _removals(context: Context) -> dict[LateCause, _Removal]:
    """By cause, what goes with it; causes with which nothing does are left out."""
    attribution = context.attribution
    excess = attribution.claimed if _hide_each_other(attribution) else attribution.excess
    removals = {
        cause: _Removal(component(excess, components), components)
        for cause, components in LATE_COMPONENTS.items()
    }
    removals = {
        cause: removal for cause, removal in removals.items() if any(work.any() for work in removal.work)
    }
    before_window = unseen(context.graph, attribution)
    if before_window is not None:
        seen = removals.get(LateCause.UNKNOWN)
        whole = [a + b for a, b in zip(seen.work, before_window, strict=True)] if seen else before_window
        removals[LateCause.UNKNOWN] = _Removal(whole, LATE_COMPONENTS[LateCause.UNKNOWN])
    apart = different_work(context)
    if apart is not None:
        host = removals.get(LateCause.HOST)
        whole = [a + b for a, b in zip(host.work, apart, strict=True)] if host else apart
        removals[LateCause.HOST] = _Removal(whole, LATE_COMPONENTS[LateCause.HOST], of_each=True)
    if attribution.in_turn:
        together = [amount.sum(axis=-1) for amount in attribution.in_turn]
        components = tuple(c for kind in attribution.causes_in_turn for c in LATE_COMPONENTS[kind])
        removals[LateCause.TURNS] = _Removal(together, components)
    return removals


def _cost(context: Context, cause: LateCause, removal: _Removal, part: Value) -> Cost:
    attribution, in_turn = context.attribution, cause == LateCause.TURNS
    told: dict[str, Any] = {}
    if in_turn:
        told["period_steps"] = len(context.graph.ranks) if attribution.rotates else None
        told["kinds"] = list(attribution.causes_in_turn)
    positions = None if in_turn else _stragglers(removal.work, len(context.graph.ranks))
    phase = only_phase(context.graph, positions) if cause == LateCause.COMPUTE and positions else None
    if phase is not None:
        told["phase"], told["lines_of"] = word_of(phase), (phase,)
    if cause in attribution.stands_out_in or cause != LateCause.DATA:
        told["stands_out_in"] = attribution.stands_out_in.get(cause, [])
    if positions and not removal.of_each:
        told |= borne_by_marks(context.drawn, cause, removal.work, positions)
        if cause == LateCause.HOST:
            told["awake_ms"] = awake_longer_ms(context.graph, removal.work, positions)
    if removal.of_each and positions:
        told["where"] = _lines_of_each(context, removal, positions)
    return context.pricing.cost(
        [without_work(removal.work)],
        _when_late(context, cause, removal),
        removal.components,
        positions,
        part=part,
        **told,
    )


def _over_all_steps(cost: Cost, context: Context) -> Cost:
    """What single steps of a short window cost, spread over all that it recorded: in those without a cycle, as nothing is known of
    the step before, nobody was held up either where no rank took longer than usual by half of what was lost each time."""
    graph, measured_ms = context.graph, context.pricing.mean_ns / 1e6
    lost_ns = (cost.occurrence_ms or 0.0) * 1e6
    lengths = [dict(zip(of.steps.tolist(), (of.end - of.start).tolist(), strict=True)) for of in graph.steps]
    of_all = set.intersection(*(set(of_rank) for of_rank in lengths))
    longest = {step: max(of_rank[step] for of_rank in lengths) for step in of_all}
    known = set(context.pricing.steps.tolist())
    usual = [ns for step, ns in longest.items() if step in known]
    if not usual:
        return cost
    most_ns = float(np.median(usual)) + _TUNING.shows * lost_ns
    quiet = sum(ns <= most_ns for step, ns in longest.items() if step not in known)
    spread = _shrunk(cost, graph.cycles / (graph.cycles + quiet), measured_ms)
    return msgspec.structs.replace(spread, steps_seen=cost.steps_seen + quiet)


def _shrunk(cost: Cost, part: float, measured_ms: float) -> Cost:
    """What costs only this part of it, in a step of this length."""
    shrunk = {name: ms * part for name in _IN_MS if (ms := getattr(cost, name)) is not None}
    saved_ms = shrunk["ms_per_step"]
    return msgspec.structs.replace(
        cost, **shrunk, share=saved_ms / measured_ms, speedup=measured_ms / max(measured_ms - saved_ms, 1e-3)
    )


def _lines_of_each(context: Context, removal: _Removal, positions: Sequence[int]) -> list[Where]:
    """Where each of these ranks does its own work, the one with most of it first."""
    weight = sum((of_group.sum(axis=(0, 1)) for of_group in removal.work), np.zeros(len(context.graph.ranks)))
    lines: list[Where] = []
    for position in sorted(positions, key=lambda position: -weight[position]):
        lines = joined(lines, context.lines.work(removal.components, [position], context.pricing.steps)[:1])
    return lines


def _stragglers(work: Sequence[Array], world: int) -> list[int]:
    weight = sum((of_group.sum(axis=(0, 1)) for of_group in work), np.zeros(world))
    return sorted(np.flatnonzero(weight >= _TUNING.stragglers * weight.max()).tolist())


def _when_late(context: Context, cause: LateCause, removal: _Removal) -> list[Array]:
    """[N, K, R or 1] ns that tell in which cycles a rank is late."""
    groups = context.graph.groups
    if cause == LateCause.TURNS:
        return [np.clip(work.max(axis=2, keepdims=True), 0, None) for work in removal.work]
    if cause == LateCause.DATA and all(group.on_device for group in groups):
        # What a rank would wait if others did not hold it up, too, makes it late only where it does wait.
        waits = component([group.work for group in groups], removal.components)
        return [
            np.minimum(work, np.clip(wait, 0, None)) for work, wait in zip(removal.work, waits, strict=True)
        ]
    return removal.work


def _hide_each_other(attribution: Attribution) -> bool:
    """Whether two ranks are late for two causes between the same synchronisations: each is then early by the other's cause, and what
    it makes up for must not hide its own. (With one in between, that is what costs the time.)"""
    where: dict[LateCause, tuple[int, Array]] = {}
    for cause, positions in attribution.stragglers.items():
        claimed = component(attribution.claimed, LATE_COMPONENTS[cause])
        per_segment = np.concatenate([of_group[:, :, positions[0]].sum(axis=0) for of_group in claimed])
        if per_segment.any():
            where[cause] = positions[0], per_segment / per_segment.sum()
    return any(
        one != other and float(np.minimum(here, there).sum()) > _TUNING.same_segments
        for (one, here), (other, there) in combinations(where.values(), 2)
    )
