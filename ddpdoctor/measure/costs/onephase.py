"""Whether a rank that computes longer does so in one phase of the step only.

A rank that is slower at the same work, by its clocks, its cores or a neighbour, is so in the forward pass, in the backward pass and
in the optimizer alike. Work that the others do not have lies in one place. Time alone tells no more than that: kernels that are
slower in one phase only look like more of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.numerics import Array, median_error, scatter_of
from ddpdoctor.measure.taxonomy import INDEX, PHASES, Component


class _Tuning(msgspec.Struct, frozen=True):
    least: float = 0.25
    """Part of the excess by which a rank that is slower altogether would be longer in the other phases: of less they cannot
    tell."""
    part: float = 0.25
    """Of what that would be, the most by which they may be longer: half-way between none and half of it."""
    sigmas: float = 2.0
    """Standard errors that are added to what they are longer: in one of forty cases chance hides more."""


_TUNING = _Tuning()


def only_phase(graph: Graph, positions: Sequence[int]) -> Component | None:
    """The phase in which alone these ranks compute longer; None where others are longer too, or cannot tell."""
    others = [position for position in range(len(graph.ranks)) if position not in positions]
    if not others or not positions:
        return None
    work = np.concatenate(
        [group.work[..., [INDEX[phase] for phase in PHASES]].sum(axis=1) for group in graph.groups]
    )
    usual = np.median(work[:, others], axis=1)
    more = work[:, list(positions)].mean(axis=1) - usual
    longest = int(np.median(more, axis=0).argmax())
    rest = [place for place in range(len(PHASES)) if place != longest]
    excess, typical = float(np.median(more[:, longest])), float(np.median(usual[:, longest]))
    if excess <= 0 or typical <= 0:
        return None
    slower = excess / typical * float(np.median(usual[:, rest].sum(axis=1)))
    told = slower >= _TUNING.least * excess
    return PHASES[longest] if told and _most(more[:, rest].sum(axis=1)) <= _TUNING.part * slower else None


def _most(values: Array) -> float:
    """The most that the usual one of these may be."""
    middle = float(np.median(values))
    error = float(median_error(scatter_of(values - middle), len(values)))
    return middle + _TUNING.sigmas * error
