"""What pricers may ask: the frozen result of all stages before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from ddpdoctor.measure.attribution import Attribution
from ddpdoctor.measure.facts import BucketFacts, Cost, scaled
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.metrics import Cores, MessageCost
from ddpdoctor.measure.numerics import Array, Mask, persistence
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.steplog import RankLog, Step, settled_steps, undisturbed
from ddpdoctor.measure.taxonomy import Components
from ddpdoctor.measure.window import Window
from ddpdoctor.rundir import EventKind

from .price import Pricing

Costs = dict[str, Cost]
"""Path of the fact → what it costs."""


class RareSource(msgspec.Struct, frozen=True):
    """Where pauses that come in few steps are looked for, beside the graph that speaks."""

    graph: Graph
    """Of the whole run."""
    lines: SourceLines
    kinds: dict[str, Components]
    """Causes of lateness that this graph can tell → their components."""


class ReducerCosts(msgspec.Struct, frozen=True):
    """What reducing gradients costs the thread that computes them, by position of the rank; 0 where unknown, ns."""

    synced_ns: tuple[float, ...] = ()
    """Of one backward pass. Empty: of no rank known."""
    issue_ns: tuple[float, ...] = ()
    """Of one bucket, of the ranks of which it is known."""


class Context(msgspec.Struct, frozen=True, dict=True):
    """A measured run, ready to be priced."""

    graph: Graph
    """The one that speaks."""
    attribution: Attribution
    lines: SourceLines
    """Of the same recording as ``graph``."""
    mean_step_ms: float | None = None
    """Mean measured step as it is told; of the step logs where there are any, though a window may speak of causes."""
    logs: Sequence[RankLog] = ()
    windows: Sequence[Window] = ()
    rare_sources: Sequence[RareSource] = ()
    throttled_ranks: Sequence[int] = ()
    """Rank numbers whose devices' clocks were lowered."""
    reducer: ReducerCosts = msgspec.field(default_factory=ReducerCosts)
    reductions: BucketFacts = BucketFacts()
    message: MessageCost = msgspec.field(default_factory=MessageCost)
    speaks_of_hosts: bool = True
    """Whether ``graph`` is that of the step logs, in which a busy machine's disturbances of transfers show."""

    cores: Cores | None = None
    """What the host with the fewest to spare has of them; None: unknown, and prices do not depend on it."""
    asleep: Mapping[int, float] = msgspec.field(default_factory=dict)
    """By rank, the part of making batches in which nothing computes, as far as it is known."""

    @cached_property
    def pricing(self) -> Pricing:
        """Replays of ``graph`` as costs."""
        return Pricing(
            self.graph, self.lines, short=self.attribution.short, cores=self.cores, asleep=self.asleep
        )

    @cached_property
    def undisturbed(self) -> list[tuple[int, list[Step]]]:
        """See :func:`ddpdoctor.measure.steplog.undisturbed`."""
        return undisturbed(self.logs)

    @cached_property
    def drawn(self) -> Array:
        """[cycles, R, C] ns of each kind of work as it was recorded, group after group."""
        return np.concatenate(
            [
                group.with_overlap(group.work).sum(axis=1) if group.recorded is None else group.recorded
                for group in self.graph.groups
            ]
        )

    def as_often_as_saved(self, cost: Cost) -> Cost:
        """What checkpoints cost, spread over all steps recorded in full but those of the warm-up: few have one, and some of those are
        set aside, as the profiler or an evaluation disturbed them. ``share`` then refers to the mean step with as many."""
        if self.graph.source != "step-log" or not self.logs:
            return cost
        settled = settled_steps(self.logs)
        numbers = np.array(list(settled), np.int64)
        saved: Mask = np.array(
            [
                any(event.kind == EventKind.SAVE for step in steps for event in step.events)
                for steps in settled.values()
            ],
            bool,
        )
        measured = np.isin(numbers, self.pricing.steps)
        if not (saved & measured).any():
            return cost
        factor = float(saved.mean() / saved[measured].mean())
        mean_ms = self.pricing.mean_ns / 1e6
        step_ms = mean_ms + (factor - 1.0) * cost.ms_per_step
        saved_ms = factor * mean_ms * (1.0 - 1.0 / cost.speedup)
        return msgspec.structs.replace(
            scaled(cost, factor, step_ms, also=("own_ms", "typical_ms")),
            speedup=step_ms / max(step_ms - saved_ms, 1e-3),
            **persistence(numbers, saved).as_facts(),
        )

    def transfer_beside_ns(self, graph: Graph, gain_ns: float) -> float:
        """What of ``gain_ns`` is left where transfers of ``graph`` run beside the computation: on hosts, whose cores do both, as
        much as there are cores for; on devices all of it."""
        if self.cores is None or all(group.on_device for group in graph.groups):
            return gain_ns
        return self.pricing.beside_ns(gain_ns * self.cores.hidden_share)
