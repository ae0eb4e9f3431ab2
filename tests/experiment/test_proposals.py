"""What a diagnosis suggests to try, and what it expects."""

from __future__ import annotations

import msgspec
import pytest

from ddpdoctor.diagnose.diagnosis import Coverage, Diagnosis, Evidence, Finding, Fix, Job, Steps, Verdict
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.experiment import Proposal, proposals, proposals_for, with_expectation
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
    asked = proposals_for([("loader.persistent_workers", True), ("loader.num_workers", 4)])
    assert [each.in_some_steps for each in asked] == [True, False, False]


SLOW_DATA = finding(
    "dataloader/starved",
    40.0,
    {"loader.num_workers": "3", "loader.persistent_workers": "true"},
    costs_ms_per_step_range=[30.0, 50.0],
)
SMALL_BUCKETS = finding(
    "allreduce/small-buckets", 20.0, {"ddp.bucket_cap_mb": "25"}, costs_ms_per_step_range=[15.0, 25.0]
)


def asked_for(
    *settings: tuple[str, object],
    of: tuple[Finding, ...] = (SLOW_DATA, SMALL_BUCKETS),
    workers: int | None = None,
) -> list[Proposal]:
    facts = {"loader": {"num_workers": workers}}
    suggested = proposals(msgspec.structs.replace(diagnosis(*of), facts=facts), bounds=True)
    return [with_expectation(each, suggested) for each in proposals_for(list(settings))]


def test_a_change_that_somebody_asks_for_is_expected_to_bring_what_a_finding_promises_of_it():
    (same,) = asked_for(("loader.num_workers", 3))
    assert (same.finding, same.settings) == ("dataloader/starved", {"loader.num_workers": 3})
    assert same.expected_share == pytest.approx(0.6)
    assert same.expected_share_range == pytest.approx((0.5, 0.7))
    (fewer,) = asked_for(("loader.num_workers", 2))
    assert (fewer.finding, fewer.expected_share) == (None, None)
    (companion,) = asked_for(("loader.persistent_workers", True))
    assert companion.expected_share is None
    (other,) = asked_for(("ddp.bucket_cap_mb", 50.0))
    assert other.expected_share is None


def test_of_more_than_was_suggested_nobody_has_said_what_it_costs():
    (more,) = asked_for(("loader.num_workers", 8))
    assert more.expected_share == pytest.approx(0.6)
    assert more.expected_share_range == pytest.approx((0.5, 1.0))


def test_fewer_workers_than_suggested_bring_at_most_as_much_and_no_more_than_there_were_nothing():
    (fewer,) = asked_for(("loader.num_workers", 1), workers=0)
    assert (fewer.finding, fewer.expected_share) == ("dataloader/starved", pytest.approx(0.6))
    assert fewer.expected_share_range == pytest.approx((0.5, 1.0))
    (as_many,) = asked_for(("loader.num_workers", 2), workers=2)
    assert (as_many.finding, as_many.expected_share) == (None, None)


def test_changes_that_hold_several_suggestions_save_between_the_largest_and_the_sum():
    workers, buckets, together = asked_for(("loader.num_workers", 3), ("ddp.bucket_cap_mb", 25.0))
    assert [workers.expected_share, buckets.expected_share] == pytest.approx([0.6, 0.8])
    assert together.expected_share == pytest.approx(0.4)
    assert together.expected_share_range == pytest.approx((0.25, 0.7))
    twice = finding("a", 40.0, {"ddp.comm_hook": "fp16"})
    twice = msgspec.structs.replace(
        twice, fixes=[*twice.fixes, Fix(title="b", why="c", settings={"amp.autocast": "bf16"})]
    )
    *_, both = asked_for(("ddp.comm_hook", "fp16"), ("amp.autocast", "bf16"), of=(twice,))
    assert both.expected_share == pytest.approx(0.6)


def test_what_is_asked_for_is_measured_as_long_and_by_what_the_finding_needs():
    suggested = [Proposal({"loader.num_workers": 2}, "a", in_some_steps=True, least_steps=120)]
    found = with_expectation(Proposal({"loader.num_workers": 2, "torch.threads": 1}), suggested)
    assert (found.in_some_steps, found.least_steps, found.expected_share) == (True, 120, None)


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
