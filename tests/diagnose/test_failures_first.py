"""That a job failed is its verdict, whatever the measured numbers are worth."""

from __future__ import annotations

from msgspec.structs import replace

from ddpdoctor.diagnose.diagnosis import Coverage, Verdict
from ddpdoctor.diagnose.verdict import verdict
from tests.diagnose.ruled import rule, run


def test_numbers_that_contradict_each_other_hide_no_failure() -> None:
    """A few steps took most of the time: a pause before the failure is enough for that."""
    for stops in (True, False):
        outcome = run(rule("hang/died", when="steps.mean_ms > 0.0", severity="critical", stops=stops))
        unsure = replace(outcome, contradictions=["a few steps take most of the time"])
        healthy, sentence = verdict(unsure, coverage=Coverage(50, 2))
        told = sentence == Verdict("hang/died", "a headline")
        assert not healthy and told is stops, sentence
