"""What a diagnosis suggests to try, and what it expects."""

from __future__ import annotations

import msgspec
import pytest

from ddpdoctor.diagnose.diagnosis import Coverage, Diagnosis, Evidence, Finding, Fix, Job, Steps, Verdict
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.experiment import of_settings, proposals
from ddpdoctor.experiment.settings import setting_of


def finding(rule: str, cost_ms: float | None, settings: dict[str, str], **more) -> Finding:
    fixes = [Fix(title="do it", why="because", settings=settings)]
    return Finding(
        rule=rule,
        severity="warning",
        title=rule,
        coverage=Coverage(10, 2),
        costs_ms_per_step=cost_ms,
        fixes=fixes,
        **more,
    )


def diagnosis(*findings: Finding) -> Diagnosis:
    return Diagnosis(
        healthy=False,
        verdict=Verdict("a", "a"),
        job=Job(),
        steps=Steps(mean_ms=100.0),
        findings=list(findings),
    )


def test_expectations_are_shares_of_the_step():
    (one,) = proposals(
        diagnosis(
            finding(
                "dataloader/starved", 40.0, {"loader.num_workers": "4"}, costs_ms_per_step_range=[30.0, 50.0]
            )
        )
    )
    assert one.settings == {"loader.num_workers": 4}
    assert one.expected_share == pytest.approx(0.6)
    assert one.expected_share_range == pytest.approx((0.5, 0.7))


def test_a_ceiling_may_bring_nothing():
    (one,) = proposals(diagnosis(finding("a", 40.0, {"ddp.comm_hook": "fp16"}, at_most=True)))
    assert one.expected_share_range == pytest.approx((0.6, 1.0))


def test_workers_are_expected_to_bring_what_the_cores_allow():
    priced = [Evidence("shared.data.ms_per_step", 40.0, "ms", "")]
    found = diagnosis(
        finding("dataloader/starved", 40.0, {"loader.num_workers": "4"}, evidence=priced),
        finding("sync/checkpoint", 40.0, {"loader.prefetch_factor": "4"}, evidence=priced),
    )
    tight = msgspec.structs.replace(found, facts={"shared": {"data": {"beside_ms_per_step": 10.0}}})
    assert [each.expected_share for each in proposals(tight)] == pytest.approx([0.9, 0.6])
    assert proposals(tight)[0].expected_share_range == pytest.approx((0.9, 1.0))
    assert [each.expected_share for each in proposals(found)] == pytest.approx([0.6, 0.6])


def test_what_comes_now_and_then_is_measured_in_trials_that_hold_it_and_by_their_mean():
    priced = [Evidence("shared.data_epoch_start.ms_per_step", 40.0, "ms", "")]
    settings = {"loader.persistent_workers": "true"}
    rare = finding("dataloader/worker-restart", 40.0, settings, evidence=priced, persistence="periodic")
    facts = {"shared": {"data_epoch_start": {"steps_hit": 5, "steps_seen": 100}}}
    (one,) = proposals(msgspec.structs.replace(diagnosis(rare), facts=facts))
    assert (one.in_some_steps, one.least_steps) == (True, 120)
    (always,) = proposals(diagnosis(finding("a", 40.0, settings, persistence="always")))
    assert (always.in_some_steps, always.least_steps) == (False, 0)
    asked = of_settings([("loader.persistent_workers", True), ("loader.num_workers", 4)])
    assert [each.in_some_steps for each in asked] == [True, False, False]


def test_the_same_change_is_tried_once_and_bounds_only_if_asked():
    found = [
        finding("a", 40.0, {"loader.num_workers": "4"}, bound={"loader.instant": "true"}),
        finding("b", 20.0, {"loader.num_workers": "4"}),
        finding("c", None, {"no.such": "thing"}),
    ]
    assert [each.finding for each in proposals(diagnosis(*found))] == ["a"]
    assert [each.words for each in proposals(diagnosis(*found), bounds=True)] == [
        "loader.num_workers=4",
        "loader.instant=true",
    ]


def test_every_rule_names_settings_that_there_are():
    loaded = load_rules([])
    names = {name for rule in loaded.rules.values() for fix in rule.fixes for name in fix.settings}
    bounds = {name for rule in loaded.rules.values() for name in rule.bound}
    assert len(names) > 8
    assert not any(setting_of(name).is_bound for name in names)
    assert bounds and all(setting_of(name).is_bound for name in bounds)
