"""What to try: settings that the fixes of a diagnosis name, and what each is expected to bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    @property
    def words(self) -> str:
        """The settings as the command line takes them."""
        return " ".join(f"{name}={shown(value)}" for name, value in self.settings.items())


def shown(value: Any) -> str:
    """A value as ``--set`` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def of_settings(settings: Sequence[tuple[str, Any]]) -> list[Proposal]:
    """Each setting by itself, and where there are several, all of them together."""
    alone = [Proposal({name: value}) for name, value in settings]
    together = dict(settings)
    return [*alone, Proposal(together)] if len(together) > 1 else alone


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
    if not step_ms or cost_ms is None or finding.caused_by is not None:
        return Proposal(settings, finding.rule, title)
    ends = finding.costs_ms_per_step_range
    share_range = None if ends is None else (_left(step_ms, ends[1]), _left(step_ms, ends[0]))
    beside_ms = _beside_ms(diagnosis, finding, settings)
    if beside_ms is not None and beside_ms < cost_ms:
        # What the machine has cores for, and nobody promises the whole of it.
        cost_ms, share_range = beside_ms, (_left(step_ms, beside_ms), 1.0)
    elif finding.at_most:
        share_range = (share_range[0] if share_range else _left(step_ms, cost_ms), 1.0)
    return Proposal(settings, finding.rule, title, _left(step_ms, cost_ms), share_range)


def _beside_ms(diagnosis: Diagnosis, finding: Finding, settings: Mapping[str, Any]) -> float | None:
    """What workers save, who make batches beside the step and no fewer of them; None where that is another change, or unknown."""
    if not settings.get("loader.num_workers"):
        return None
    for entry in finding.evidence:
        group, _, name = entry.fact.rpartition(".")
        if name == "ms_per_step":
            found = lookup(diagnosis.facts, f"{group}.beside_ms_per_step")
            return found if isinstance(found, float) else None
    return None


def _left(step_ms: float, saved_ms: float) -> float:
    return max(0.0, 1 - saved_ms / step_ms)
