"""What to try: settings that the fixes of a diagnosis name, and what each is expected to bring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.diagnose.facts_view import lookup

from .settings import SettingError, parsed, setting_of


@dataclass(frozen=True)
class Proposal:
    """A change to be measured."""

    settings: Mapping[str, Any]
    finding: str | None = None
    """Rule of the finding that suggests it; None where the user asks for it."""
    title: str = ""
    expected_share: float | None = None
    """Of the step time as it is: what the step takes then. None where nobody said."""
    expected_share_range: tuple[float, float] | None = None
    in_some_steps: bool = False
    """What it mends is in some steps only, so that the median step does not show it: the mean does."""
    least_steps: int = 0
    """Of a trial that is to hold what it mends a few times."""

    @property
    def words(self) -> str:
        """The settings as the command line takes them."""
        return " ".join(f"{name}={shown(value)}" for name, value in self.settings.items())


def shown(value: Any) -> str:
    """A value as ``--set`` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


_OF_SOME_STEPS = ("loader.persistent_workers", "loader.prefetch_factor")
"""What these change comes with an epoch's beginning, or with a batch that takes long."""
_OCCURRENCES, _MOST_STEPS = 6, 1000
"""Of what comes now and then, in one trial, as far as that is bounded."""


def of_settings(settings: Sequence[tuple[str, Any]]) -> list[Proposal]:
    """Each setting by itself, and where there are several, all of them together."""
    alone = [Proposal({name: value}, in_some_steps=name in _OF_SOME_STEPS) for name, value in settings]
    together = dict(settings)
    rare = set(together) <= set(_OF_SOME_STEPS)
    return [*alone, Proposal(together, in_some_steps=rare)] if len(together) > 1 else alone


def proposals(diagnosis: Diagnosis, *, bounds: bool = False) -> list[Proposal]:
    """By the findings' cost, the largest first; each set of settings once. With ``bounds``, also what imitates a job without
    the cause."""
    found: dict[str, Proposal] = {}
    for finding in diagnosis.findings:
        for title, texts in _offers(finding):
            try:
                settings = {name: parsed(name, text) for name, text in texts.items()}
            except SettingError:  # of a rule file of the user's own, or of another version
                continue
            if not bounds and any(setting_of(name).is_bound for name in settings):
                continue
            proposal = _expecting(diagnosis, finding, title, settings)
            found.setdefault(proposal.words, proposal)
    return list(found.values())


def _offers(finding: Finding) -> list[tuple[str, dict[str, str]]]:
    offers = [(fix.title, fix.settings) for fix in finding.fixes if fix.settings]
    return [*offers, *([("without the cause", finding.bound)] if finding.bound else [])]


def _expecting(diagnosis: Diagnosis, finding: Finding, title: str, settings: Mapping[str, Any]) -> Proposal:
    step_ms, cost_ms = diagnosis.steps.mean_ms, finding.costs_ms_per_step
    rare, cost = finding.persistence not in (None, "always"), _cost_of(diagnosis, finding)
    known = Proposal(
        settings, finding.rule, title, in_some_steps=rare, least_steps=_steps_for(cost) if rare else 0
    )
    if not step_ms or cost_ms is None or finding.caused_by is not None:
        return known
    ends = finding.costs_ms_per_step_range
    share_range = None if ends is None else (_left(step_ms, ends[1]), _left(step_ms, ends[0]))
    # Workers make batches beside the step, and no fewer of them.
    beside_ms = cost.get("beside_ms_per_step") if settings.get("loader.num_workers") else None
    if isinstance(beside_ms, float) and beside_ms < cost_ms:
        # What the machine has cores for, and nobody promises the whole of it.
        cost_ms, share_range = beside_ms, (_left(step_ms, beside_ms), 1.0)
    elif finding.at_most:
        share_range = (share_range[0] if share_range else _left(step_ms, cost_ms), 1.0)
    return replace(known, expected_share=_left(step_ms, cost_ms), expected_share_range=share_range)


def _cost_of(diagnosis: Diagnosis, finding: Finding) -> Mapping[str, Any]:
    """The facts of its price; none where it has none of its own."""
    facts = (entry.fact.rpartition(".") for entry in finding.evidence)
    priced = next((path for path, _, name in facts if name == "ms_per_step"), None)
    found = lookup(diagnosis.facts, priced) if priced is not None else None
    return found if isinstance(found, Mapping) else {}


def _steps_for(cost: Mapping[str, Any]) -> int:
    hit, seen = cost.get("steps_hit"), cost.get("steps_seen")
    return min(_MOST_STEPS, math.ceil(_OCCURRENCES * seen / hit)) if hit and seen else 0


def _left(step_ms: float, saved_ms: float) -> float:
    return max(0.0, 1 - saved_ms / step_ms)
