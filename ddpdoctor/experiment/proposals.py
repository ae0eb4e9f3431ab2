"""Proposals of settings to try, from the fixes in a diagnosis, with their expected step times."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.diagnose.facts_view import lookup

from .settings import SettingError, parse_value, setting_of


@dataclass(frozen=True)
class Proposal:
    """A change to measure."""

    settings: Mapping[str, Any]
    finding: str | None = None
    """Rule of the finding that suggests it; None if only the user asked for it."""
    title: str = ""
    expected_share: float | None = None
    """Expected step time as a share of the present one; None if unknown."""
    expected_share_range: tuple[float, float] | None = None
    in_some_steps: bool = False
    """Whether it affects some steps only, so that the effect is visible in the mean but not in the median."""
    least_steps: int = 0
    """Fewest steps of a trial in which the effect occurs a few times."""
    present_value: float | None = None
    """The run's value of the first setting, if that is one of ``_SATURATING``."""

    @property
    def words(self) -> str:
        """The settings in the syntax of the command line."""
        return " ".join(f"{name}={shown(value)}" for name, value in self.settings.items())


def shown(value: Any) -> str:
    """A value in the syntax of ``--set``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


_SPORADIC = ("loader.persistent_workers", "loader.prefetch_factor")
"""Settings whose effect occurs only at the beginning of an epoch, or with a slow batch."""
_OCCURRENCES, _MOST_STEPS = 6, 1000
"""Number of occurrences of a sporadic effect in a trial, and limit of a trial's steps."""


def proposals_for(settings: Sequence[tuple[str, Any]]) -> list[Proposal]:
    """One proposal per setting and, if there are several, one with all of them."""
    alone = [Proposal({name: value}, in_some_steps=name in _SPORADIC) for name, value in settings]
    together = dict(settings)
    rare = set(together) <= set(_SPORADIC)
    return [*alone, Proposal(together, in_some_steps=rare)] if len(together) > 1 else alone


def with_expectation(asked: Proposal, suggested: Sequence[Proposal]) -> Proposal:
    """``asked``, a change requested by the user, with the expected step time of the suggestions that it contains.

    It contains a suggestion if it sets the suggestion's first setting to the same value or, for settings in ``_SATURATING``, to more
    than the run had: a value below the suggested one gives a part of the expected saving, a larger value the same saving.
    """
    contained = [each for each in suggested if _contains(asked.settings, each)]
    if not contained:
        return asked
    by_finding: dict[str | None, Proposal] = {}
    for each in contained:
        if each.expected_share is not None:  # other fixes of the same finding do not add to the saving
            by_finding.setdefault(each.finding, each)
    expected = list(by_finding.values())
    first = (expected or contained)[0]
    share, share_range = _joint_expectation(expected)
    as_suggested = all(
        asked.settings.get(name, value) == value
        for each in contained
        for name, value in each.settings.items()
    )
    if share is not None and not as_suggested:
        share_range = ((share_range or (share, share))[0], 1.0)  # the effect of another value is unknown
    return replace(
        asked,
        finding=first.finding,
        title=first.title,
        expected_share=share,
        expected_share_range=share_range,
        in_some_steps=asked.in_some_steps or any(each.in_some_steps for each in contained),
        least_steps=max(each.least_steps for each in contained),
    )


_SATURATING = ("loader.num_workers", "loader.prefetch_factor")
"""Settings for which a larger value than suggested saves no more time: batches are then ready in time already."""


def _contains(settings: Mapping[str, Any], suggestion: Proposal) -> bool:
    name, value = next(iter(suggestion.settings.items()))
    if name not in settings:
        return False
    if name not in _SATURATING:
        return bool(settings[name] == value)
    return bool(
        settings[name] >= value
        if suggestion.present_value is None
        else settings[name] > suggestion.present_value
    )


def _joint_expectation(expected: Sequence[Proposal]) -> tuple[float | None, tuple[float, float] | None]:
    """(Expected share of the step time, its range) with all these causes removed. Savings may overlap: the joint saving is between the
    largest one and their sum."""
    shares = [each.expected_share for each in expected if each.expected_share is not None]
    if len(expected) < 2:
        return (shares[0], expected[0].expected_share_range) if shares else (None, None)
    ranges = [
        each.expected_share_range or (share, share) for each, share in zip(expected, shares, strict=True)
    ]
    least = max(0.0, 1 - sum(1 - low for low, _ in ranges))
    return max(0.0, 1 - sum(1 - share for share in shares)), (least, min(high for _, high in ranges))


def proposals(diagnosis: Diagnosis, *, bounds: bool = False) -> list[Proposal]:
    """Proposals in order of the findings, without duplicates. ``bounds``: include settings that only measure an upper bound of a saving."""
    found: dict[str, Proposal] = {}
    for finding in diagnosis.findings:
        offers = [(fix.title, fix.settings) for fix in finding.fixes if fix.settings]
        for title, texts in [*offers, *([("without the cause", finding.bound)] if finding.bound else [])]:
            try:
                settings = {name: parse_value(name, text) for name, text in texts.items()}
            except SettingError:  # the rule file is the user's own, or of another version
                continue
            if not bounds and any(setting_of(name).is_bound for name in settings):
                continue
            proposal = _proposal(diagnosis, finding, title, settings)
            found.setdefault(proposal.words, proposal)
    return list(found.values())


def _proposal(diagnosis: Diagnosis, finding: Finding, title: str, settings: Mapping[str, Any]) -> Proposal:
    step_ms, cost_ms = diagnosis.steps.mean_ms, finding.costs_ms_per_step
    rare, cost = finding.persistence not in (None, "always"), _cost_of(diagnosis, finding)
    known = Proposal(
        settings,
        finding.rule,
        title,
        in_some_steps=rare,
        least_steps=_steps_for(cost) if rare else 0,
        present_value=_present_value(diagnosis, next(iter(settings))),
    )
    if not step_ms or cost_ms is None or finding.caused_by is not None:
        return known
    ends = finding.costs_ms_per_step_range
    share_range = (
        None if ends is None else (_remaining_share(step_ms, ends[1]), _remaining_share(step_ms, ends[0]))
    )
    # Workers prepare batches in parallel to the step, but the work per batch remains.
    parallel_ms = cost.get("beside_ms_per_step") if settings.get("loader.num_workers") else None
    if isinstance(parallel_ms, float) and parallel_ms < cost_ms:
        # The saving is an upper bound, limited by the machine's cores.
        cost_ms, share_range = parallel_ms, (_remaining_share(step_ms, parallel_ms), 1.0)
    elif finding.at_most:
        share_range = (share_range[0] if share_range else _remaining_share(step_ms, cost_ms), 1.0)
    return replace(known, expected_share=_remaining_share(step_ms, cost_ms), expected_share_range=share_range)


def _present_value(diagnosis: Diagnosis, name: str) -> float | None:
    present_value = lookup(diagnosis.facts, name) if name in _SATURATING else None
    return float(present_value) if isinstance(present_value, int | float) else None


def _cost_of(diagnosis: Diagnosis, finding: Finding) -> Mapping[str, Any]:
    """The cost facts of a finding; empty if it has none."""
    facts = (entry.fact.rpartition(".") for entry in finding.evidence)
    priced = next((path for path, _, name in facts if name == "ms_per_step"), None)
    found = lookup(diagnosis.facts, priced) if priced is not None else None
    return found if isinstance(found, Mapping) else {}


def _steps_for(cost: Mapping[str, Any]) -> int:
    hit, seen = cost.get("steps_hit"), cost.get("steps_seen")
    return min(_MOST_STEPS, math.ceil(_OCCURRENCES * seen / hit)) if hit and seen else 0


def _remaining_share(step_ms: float, saved_ms: float) -> float:
    return max(0.0, 1 - saved_ms / step_ms)


_WORKERS = (1, 2, 4, 8, 16)
_LEAST_WORKERS = 4
"""Number of workers up to which all variants are tried, even on few cores: workers that wait for storage need no core."""
_PREFETCH = (2, 4)
_BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)


def tuning(kind: str, ranks_here: int) -> list[Proposal]:
    """The variants of ``--tune loader`` or ``--tune ddp``, with at most two workers per core of a rank's share of this host's cores."""
    if kind == "ddp":
        return [Proposal({"ddp.bucket_cap_mb": size}) for size in _BUCKETS_MB]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(_LEAST_WORKERS, 2 * cores // max(ranks_here, 1))
    return [
        Proposal(
            {
                "loader.num_workers": workers,
                "loader.prefetch_factor": prefetch,
                "loader.persistent_workers": True,
            }
        )
        for workers in _WORKERS
        if workers <= most
        for prefetch in _PREFETCH
    ]
