"""Finds ranks that are late because of CPU contention, by the scheduler's times per step, for any kind of work.

Wall time of a training thread = running + runnable without a core (run delay) + blocked. On a busy machine every thread waits for cores,
in proportion to its running time. The *expected run delay* of a rank is its running time times the others' run delay per running time. A
rank is starved if it waits longer than that. CPU contention slows all work of the rank in proportion. So it can explain the excess in the
phases, and the excess in other work up to the same proportion. If the wait is longer than this, and is most of the rank's whole excess, it
explains more of the host work: all but the time for which the rank runs longer than the others, which may be work of its own.
"""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np

from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.numerics import Array, Mask, above_zero
from ddpdoctor.measure.taxonomy import INDEX, LATE_COMPONENTS, NO_WORK, PHASES, LateCause

from .comparison import Comparison, others_median, values_in_steps
from .lateness import LATENESS, is_persistent

_PHASES = [INDEX[phase] for phase in PHASES]
_NO_WORK = [INDEX[kind] for kind in NO_WORK]
_HOST = [INDEX[kind] for kind in LATE_COMPONENTS[LateCause.HOST]]


class _Tuning(msgspec.Struct, frozen=True):
    explains: float = 0.5
    """Minimum part of a rank's excess that its wait beyond the expected run delay explains."""
    fewest: int = 5
    """Minimum number of cycles with known scheduling: the number of blocks of the test."""
    significance: float = 0.05
    """Significance level of the wait in these cycles. The rank's lateness is tested in all cycles, at a lower level."""


_TUNING = _Tuning()


class Starved(msgspec.Struct, frozen=True):
    """Excess of ranks divided by whether CPU contention explains it, [cycles, R, C] ns."""

    waited: Array
    """The part of each cycle's excess that is a wait beyond the expected run delay."""
    rest: Array
    """The excess that this wait does not explain, on average over the cycles."""


def starved_of_cpu(graph: Graph, comparison: Comparison) -> Starved | None:
    """None if no rank waits significantly longer than its expected run delay in most cycles, or if the scheduler's times are unknown."""
    if comparison.on_device:
        return None
    delay = values_in_steps(graph.steps, [of_rank.run_delay for of_rank in graph.steps], comparison.steps)
    ran = values_in_steps(graph.steps, [of_rank.cpu for of_rank in graph.steps], comparison.steps)
    known = np.asarray((~np.isnan(delay) & (ran > 0)).all(axis=1))
    if known.sum() < _TUNING.fewest:
        return None
    scheduled = _Scheduled(known, delay[known], ran[known])
    excess = _explainable_excess(comparison, scheduled)
    whole = excess.sum(axis=2)
    late = _are_starved(scheduled, whole, comparison.step_ns)
    if not late.any():
        return None
    positive = np.clip(whole, 0, None)
    waited = np.clip(scheduled.excess_delay_by_order, 0, None) + scheduled.extra_running
    taken = scheduled.in_all_cycles(np.minimum(waited, positive[known]), positive)
    mean = (scheduled.excess_delay + scheduled.extra_running).mean(axis=0)
    explained = np.clip(mean / np.maximum(whole[known].mean(axis=0), 1.0), 0.0, 1.0) * late
    by_component = np.clip(excess, 0, None)
    share = np.where(late, taken, 0.0) / np.maximum(by_component.sum(axis=2), 1.0)
    return Starved(
        waited=by_component * share[:, :, None], rest=comparison.excess - explained[:, None] * excess
    )


class _Scheduled(msgspec.Struct, frozen=True, dict=True):
    """The scheduler's times of the training threads, ns."""

    known: Mask
    """[cycles] whether they were read on all ranks."""
    delay: Array
    """[known, R] runnable, waiting for a core (run delay)."""
    ran: Array
    """[known, R]"""

    @cached_property
    def excess_delay(self) -> Array:
        """[known, R] the wait beyond the run delay expected from the other ranks in the same cycle."""
        excess_delay: Array = self.delay - self.ran * others_median(self.delay / self.ran)
        return excess_delay

    @property
    def excess_delay_by_order(self) -> Array:
        """[known, R] the wait beyond the run delay expected from the other ranks, with cycles in order of wait per running time.

        The longest waits of the others are compared with the rank's longest, because disturbances come at different times on each rank.
        """
        rate = self.delay / self.ran
        order = np.argsort(np.argsort(rate, axis=0, kind="stable"), axis=0, kind="stable")
        usual = np.take_along_axis(np.sort(others_median(rate), axis=0), order, axis=0)
        excess_delay: Array = self.delay - self.ran * usual
        return excess_delay

    @property
    def extra_running(self) -> Array:
        """[known, R] the running time beyond the median of the other ranks: a thread that shares a core finds its caches empty."""
        extra_running: Array = np.clip(self.ran - others_median(self.ran), 0, None)
        return extra_running

    def in_all_cycles(self, values: Array, excess: Array) -> Array:
        """[cycles, R] ``values`` [known, R]; in cycles without scheduler times, the same part of the ``excess`` [cycles, R]."""
        of_excess = excess[self.known].mean(axis=0)
        part = np.where(of_excess > 0, values.mean(axis=0) / np.maximum(of_excess, 1.0), 0.0)
        whole: Array = excess * np.clip(part, 0.0, 1.0)
        whole[self.known] = values
        return whole


def _are_starved(scheduled: _Scheduled, whole: Array, step_ns: float) -> Mask:
    """[R] whether the excess ``whole`` [cycles, R] occurs in most cycles and is significantly due to waiting for cores."""
    excess_delay = scheduled.excess_delay
    waits = scheduled.in_all_cycles(excess_delay, whole)
    usual = np.zeros(whole.shape)
    usual[scheduled.known] = scheduled.delay
    late: Mask = is_persistent(waits, usual, step_ns, 1.0) & above_zero(
        excess_delay, _TUNING.significance, scheduled.delay
    )
    least = np.maximum(LATENESS.persistent_share * step_ns, LATENESS.persistent_part * whole.mean(axis=0))
    late &= np.median(whole, axis=0) > least
    mean = excess_delay.mean(axis=0)
    late &= mean >= scheduled.extra_running.mean(axis=0)
    late &= mean >= _TUNING.explains * whole[scheduled.known].mean(axis=0)
    return late


def _explainable_excess(comparison: Comparison, scheduled: _Scheduled) -> Array:
    """[cycles, R, C] the excess that CPU contention can explain: all in the phases, each kind of other work up to the same proportion, and
    more of the host work if the rank's wait is long enough."""
    mean, more = comparison.work.mean(axis=0), comparison.excess.mean(axis=0)
    usual = np.clip(mean - more, 0, None)
    slower = more[:, _PHASES].sum(axis=1) / np.maximum(usual[:, _PHASES].sum(axis=1), 1.0)
    explained = np.minimum(more, np.clip(slower, 0, None)[:, None] * usual)
    explained[:, _PHASES] = more[:, _PHASES]
    explained[:, _NO_WORK] = 0.0
    waits = scheduled.excess_delay.mean(axis=0)
    beyond = np.clip(more - explained, 0, None)[:, _HOST]
    not_own_work = beyond.sum(axis=1) - scheduled.extra_running.mean(axis=0)
    added = np.clip(np.minimum(waits - explained.sum(axis=1), not_own_work), 0, None)
    added *= waits >= _TUNING.explains * np.delete(more, _NO_WORK, axis=1).sum(axis=1)
    explained[:, _HOST] += beyond * (added / np.maximum(beyond.sum(axis=1), 1.0))[:, None]
    part = np.where(more > explained, explained / np.maximum(more, 1.0), 1.0)
    part[:, _NO_WORK] = 0.0
    explainable: Array = comparison.excess * part
    return explainable
