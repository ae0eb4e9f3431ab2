"""Applies the rules to a measured job and builds the diagnosis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from ddpdoctor import __version__
from ddpdoctor.diagnose import facts_view, words
from ddpdoctor.diagnose.diagnosis import (
    Coverage,
    Diagnosis,
    Finding,
    Job,
    Standing,
    Steps,
    Verdict,
    without_numpy,
)
from ddpdoctor.diagnose.engine import diagnose
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.trials import TRIALS_FILE, read_trials
from ddpdoctor.diagnose.verdict import verdict, waterfall, withheld, without_contradictions
from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.facts import Facts
from ddpdoctor.measure.runfacts import HangFacts
from ddpdoctor.measure.summary import Drawn
from ddpdoctor.rundir import Note, RunDirectory
from ddpdoctor.stages import Stage

from .inputs import Options, merge_notes


class MeasuredJob(msgspec.Struct, frozen=True):
    """The measurements of a job. ``facts`` are for rules; fields from ``standing`` on are data that only reports show."""

    source: list[str]
    facts: Facts
    coverage: Coverage
    set_aside: dict[str, int]
    """Number of steps excluded from measurement, by reason."""
    notes: list[Note]
    job: Job
    truncated: str | None = None
    """Clause on truncated traces if all measured traces are truncated; None otherwise."""
    termination: str | None = None
    """Sentence, without full stop, on how the job was ended from outside; None if it was not."""
    standing: list[Standing] = msgspec.field(default_factory=list)
    drawn: Drawn = msgspec.field(default_factory=Drawn)
    hta: dict[str, Any] | None = None


_NO_LATE_RANK = "Cannot tell: no training steps were recorded, and nothing shows a rank that others wait for."
_NONE_IN_DUMPS = "Cannot tell: the flight recorder dumps show no rank that others wait for."


def _undecided(hang: HangFacts) -> str:
    """The verdict on a job without recorded steps and without a known hang."""
    if hang.undecided is not None:
        return f"Cannot tell for which rank the others wait: {hang.undecided}."
    return _NONE_IN_DUMPS if hang.only_dumps else _NO_LATE_RANK


def build_diagnosis(measured: MeasuredJob, options: Options) -> Diagnosis:
    """The diagnosis of ``measured`` by the rules of ``options``."""
    options.progress(Stage.RULES, None)
    facts = measured.facts
    rules = options.loaded_rules or load_rules(options.rules)
    tree = facts_view.tree(facts)
    outcome = without_contradictions(
        diagnose(
            facts,
            rules,
            coverage=measured.coverage,
            thresholds=options.thresholds,
            suppressed=options.suppressed,
        ),
        tree,
    )
    is_unsure = measured.truncated is not None and not outcome.stopping
    if is_unsure:
        outcome = withheld(outcome, outcome.findings, str(measured.truncated))
    found = facts.communication
    matched = found.ranks_meet is not False or not (found.matched or found.unmatched)
    healthy, sentence = verdict(
        outcome,
        coverage=measured.coverage,
        matched=matched,
        marked=facts.steps.marked is not False,
        stopped=_undecided(facts.hang) if facts.hang.looked and facts.hang.state is None else None,
    )
    if is_unsure:
        healthy, sentence = False, Verdict(None, f"Cannot tell: {measured.truncated}.")
    if measured.termination is not None:
        headline = words.inside_sentence(sentence.headline)
        before = f"In the steps before that: {headline}" if facts.steps.seen else "No step was recorded."
        sentence = Verdict(sentence.rule, f"{measured.termination}. {before}")
    of_steps = {name: value for name, value in asdict(facts.steps).items() if name in Steps.__struct_fields__}
    drawn = {name: value for name, value in asdict(measured.drawn).items() if name != "window"}
    noted = [note.text for note in merge_notes(measured.notes)]
    chosen = []
    if outcome.suppressed:
        by = options.suppressed_by or "the caller"
        chosen.append(_rules_note(f"suppressed by {by}", outcome.suppressed))
    if rules.replaced:
        others = "another" if len(rules.replaced) == 1 else "others"
        chosen.append(_rules_note(f"of ddpdoctor's own replaced by {others} of the same id", rules.replaced))
    diagnosis = Diagnosis(
        tool_version=__version__,
        created_ns=time.time_ns(),
        source=measured.source,
        healthy=healthy,
        verdict=sentence,
        job=measured.job,
        steps=Steps(
            count=facts.steps.seen, set_aside=measured.set_aside, window=measured.drawn.window, **of_steps
        ),
        breakdown=facts.breakdown,
        findings=_headline_first(outcome.findings, sentence.rule),
        notes=list(dict.fromkeys([*chosen, *noted, *outcome.errors])),
        checked=outcome.checked,
        skipped=outcome.skipped,
        standing=measured.standing,
        waterfall=waterfall(facts.steps.mean_ms, outcome),
        **drawn,
        facts=tree,
        hta=measured.hta,
    )
    return without_numpy(diagnosis)


def _headline_first(findings: Sequence[Finding], rule: str | None) -> list[Finding]:
    """``findings`` by cost, with those of the verdict's ``rule`` first, unless they are effects of another one."""
    return sorted(findings, key=lambda finding: finding.rule != rule or finding.caused_by is not None)


def _rules_note(what: str, rules: Sequence[str]) -> str:
    return f"{words.count(len(rules), 'rule')} {what}: {', '.join(rules)}."


def with_trials(diagnosis: Diagnosis, runs: Sequence[RunDirectory]) -> Diagnosis:
    """The diagnosis with the trial results of the first of ``runs``. An unreadable file becomes a note."""
    try:
        return replace(diagnosis, tried=read_trials(Path(runs[0].path) / TRIALS_FILE)) if runs else diagnosis
    except FileNotFoundError:
        return diagnosis
    except (UnusableInput, OSError) as error:
        return replace(diagnosis, notes=[*diagnosis.notes, f"Trials are not shown: {error}"])
