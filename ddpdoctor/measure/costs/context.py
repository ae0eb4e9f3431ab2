"""The input of pricers: the results of all earlier stages."""

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
from ddpdoctor.measure.steplog import RankLog, Step, StepPattern, settled_steps, undisturbed
from ddpdoctor.measure.taxonomy import Components
from ddpdoctor.measure.window import Window
from ddpdoctor.rundir import EventKind

from .price import Pricing

Costs = dict[str, Cost]
"""Path of the fact → its cost."""


class RareSource(msgspec.Struct, frozen=True):
    """A recording, other than the primary graph, in which to look for pauses in few steps."""

    graph: Graph
    """Of the whole run."""
    lines: SourceLines
    kinds: dict[str, Components]
    """Causes of lateness that this graph shows → their components."""


class ReducerCosts(msgspec.Struct, frozen=True):
    """ns that reducing gradients takes on the thread that computes them."""

    synced_ns: tuple[float, ...] = ()
    """Per backward pass, by position of the rank; 0 where unknown. Empty: unknown on all ranks."""
    issue_ns: tuple[float, ...] = ()
    """Per bucket, of the ranks of which it is known."""


class Context(msgspec.Struct, frozen=True, dict=True):
    """A measured run, as pricers need it."""

    graph: Graph
    """The primary graph."""
    attribution: Attribution
    lines: SourceLines
    """Of the same recording as ``graph``."""
    mean_step_ms: float | None = None
    """Mean measured step as reported; of the step logs where there are any, even if ``graph`` is of a window."""
    profiler_ns: float = 0.0
    """ns that the profiler adds to each cycle of ``graph``, in which devices wait for their hosts."""
    logs: Sequence[RankLog] = ()
    patterns: Sequence[StepPattern] = ()
    """Of the steps of the run."""
    windows: Sequence[Window] = ()
    rare_sources: Sequence[RareSource] = ()
    throttled_ranks: Sequence[int] = ()
    """Rank numbers whose devices' clocks were lowered."""
    reducer: ReducerCosts = msgspec.field(default_factory=ReducerCosts)
    reductions: BucketFacts = BucketFacts()
    message: MessageCost = msgspec.field(default_factory=MessageCost)
    host_timed: bool = True
    """Whether ``graph`` is that of the step logs, in which a busy machine's disturbances of transfers show."""

    cores: Cores | None = None
    """Cores of the host with the fewest spare ones; None: unknown, and prices do not depend on it."""
    asleep: Mapping[int, float] = msgspec.field(default_factory=dict)
    """By rank, the part of preparing batches in which nothing computes, where known."""

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

    def per_recorded_save(self, cost: Cost) -> Cost:
        """The cost of checkpoints, scaled to their frequency in all steps recorded in full after the warm-up. Few steps have a
        checkpoint, and some of these are excluded, as the profiler or an evaluation disturbed them. ``share`` then refers to the mean
        step with that frequency."""
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

    def overlappable_transfer_ns(self, graph: Graph, gain_ns: float) -> float:
        """The part of ``gain_ns`` that overlapping transfers of ``graph`` with computation really saves: all of it on devices; on hosts,
        whose cores do both, as much as spare cores allow."""
        if self.cores is None or all(group.on_device for group in graph.groups):
            return gain_ns
        return self.pricing.overlappable_ns(gain_ns * self.cores.hidden_share)
