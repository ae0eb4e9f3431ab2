"""The engine: costs, skips, crashes, order, overrides."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.diagnose.diagnosis import Coverage
from ddpdoctor.diagnose.rule import Rule
from ddpdoctor.diagnose.verdict import verdict
from tests.diagnose.ruled import FACTS, rule, run


def test_a_finding_carries_cost_ranks_line_and_evidence() -> None:
    (finding,) = run(
        rule(
            "a/b",
            costs="late.data",
            where="loader.where",
            title="{{ cost.ranks|ranks }}{{ where|at }}",
            evidence=[
                {"fact": "cost.ms_per_step"},
                {"fact": "loader.wait_ms"},
                {"fact": "loader.num_workers"},
            ],
        )
    ).findings
    assert (finding.severity, finding.ranks, finding.costs_ms_per_step, finding.share) == (
        "warning",
        [1],
        10.0,
        0.1,
    )
    assert finding.speedup_if_fixed == pytest.approx(100 / 90)
    assert finding.title == "rank 1 at train.py:5 in main"
    assert finding.where[0].line == 5
    assert finding.coverage == Coverage(steps=50, ranks=2)
    # What was not measured is left out; what is 0 is not.
    assert [(line.fact, line.value, line.unit) for line in finding.evidence] == [
        ("late.data.ms_per_step", 10.0, "ms per step"),
        ("loader.num_workers", 0, ""),
    ]
    assert finding.evidence[0].means


def test_a_price_says_how_sure_it_is() -> None:
    ends = {"low_ms_per_step": 8.0, "high_ms_per_step": 20.0}
    facts = {"steps": {"mean_ms": 100.0}, "late": {"data": {"ms_per_step": 10.0, **ends}}}
    (sure,) = run(rule("a/b", costs="late.data"), facts=facts).findings
    assert sure.costs_ms_per_step_range == [8.0, 20.0] and not sure.at_most
    assert sure.speedup_if_fixed_range == pytest.approx([100 / 92, 100 / 80])
    (unsure,) = run(rule("a/b", costs="late.data")).findings
    assert unsure.costs_ms_per_step_range is None and unsure.speedup_if_fixed_range is None


def test_a_bound_is_told_as_one() -> None:
    most = run(
        rule("a/b", costs="late.data", upper_bound=True),
        rule("a/c", costs="late.data", severity_most="warning"),
        rule("a/d", costs="late.data"),
    )
    assert {f.rule: f.at_most for f in most.findings} == {"a/b": True, "a/c": True, "a/d": False}


@pytest.mark.parametrize(
    ("beside_ms", "severity"), [(None, "critical"), (25.0, "critical"), (3.0, "warning")]
)
def test_what_the_machine_has_no_cores_for_is_not_critical(beside_ms: float | None, severity: str) -> None:
    data = {"ms_per_step": 30.0, "beside_ms_per_step": beside_ms}
    facts = {"steps": {"mean_ms": 100.0}, "shared": {"data": data}}
    (finding,) = run(rule("a/b", costs="shared.data"), facts=facts).findings
    assert finding.severity == severity


def test_the_greatest_of_several_costs_counts() -> None:
    (finding,) = run(rule("a/b", costs=["late.data", "shared.data", "late.copy"])).findings
    assert (finding.costs_ms_per_step, finding.severity) == (30.0, "critical")


def test_a_cost_that_is_not_reported_does_not_hide_the_rule_s_smaller_costs() -> None:
    smaller = rule("a/b", costs=["shared.data", "late.data"], when="cost.ranks != null")
    assert [finding.costs_ms_per_step for finding in run(smaller).findings] == [10.0]
    too_small = run(smaller, thresholds={"all": {"least_share": 0.2}})
    assert [entry.rule for entry in too_small.checked] == ["a/b"]


@pytest.mark.parametrize(
    ("fields", "severity"),
    [
        ({"costs": "shared.data"}, "critical"),
        ({"costs": "shared.data", "severity_most": "warning"}, "warning"),
        ({"costs": "late.data"}, "warning"),
        ({"costs": "shared.data", "informs_when": "cost.share > 0.2"}, "info"),
        ({"costs": "shared.data", "informs_when": "cost.share > 0.4"}, "critical"),
        ({"costs_ms": "2.0"}, "info"),
        ({"severity": "critical"}, "critical"),
        ({}, "info"),
    ],
)
def test_severity_follows_from_the_cost_unless_stated(fields: dict[str, Any], severity: str) -> None:
    (finding,) = run(rule("a/b", **fields)).findings
    assert finding.severity == severity


@pytest.mark.parametrize(("wall_s", "first"), [(None, "a/every"), (60.0, "a/every"), (6000.0, "a/once")])
def test_what_happens_once_ranks_by_its_share_of_a_long_run_and_last_in_a_short_one(
    wall_s: float | None, first: str
) -> None:
    run_facts = {"wall_s": wall_s, "steps": 100}
    facts = {"steps": {"mean_ms": 100.0}, "run": run_facts, "shared": {"data": {"ms_per_step": 10.0}}}
    once = rule("a/once", severity="warning", costs_s="1.0 * run.steps * 20.0")
    found = run(once, rule("a/every", costs="shared.data"), facts=facts).findings
    assert found[0].rule == first
    by_rule = {finding.rule: finding for finding in found}
    assert by_rule["a/every"].costs_s == 1.0 and by_rule["a/once"].costs_s == 2000.0
    assert by_rule["a/once"].happens_once and not by_rule["a/every"].happens_once
    assert by_rule["a/once"].speedup_if_fixed is None
    assert by_rule["a/once"].share_of_run == (None if wall_s is None else min(2000.0 / wall_s, 1.0))


@pytest.mark.parametrize("field", ["costs_s", "costs_ms"])
@pytest.mark.parametrize(
    ("cost", "given"),
    [("1.0 / 0.0", "inf"), ("double('NaN')", "nan"), ("'5'", "5"), ("true", "True"), ("[1.0]", "[1.0]")],
)
def test_a_cost_that_is_no_amount_fails_the_rule(field: str, cost: str, given: str) -> None:
    outcome = run(rule("a/one", severity="warning", **{field: cost}))
    assert outcome.errors == [f"a/one: the rule failed: `{field}` gives {given}, not a finite number"]


def test_a_negative_cost_of_the_run_is_none() -> None:
    outcome = run(rule("a/one", severity="warning", costs_s="-5.0"))
    assert outcome.findings[0].costs_s == 0.0 and not outcome.errors


def test_what_recurs_outside_of_ordinary_steps_ranks_by_its_share_of_the_run() -> None:
    facts = {
        "steps": {"mean_ms": 100.0},
        "run": {"wall_s": 60.0, "steps": 100},
        "shared": {"data": {"ms_per_step": 10.0}},
    }
    often = rule("a/often", severity="warning", costs_s="20.0", recurs=True)
    found = run(often, rule("a/every", costs="shared.data"), facts=facts).findings
    assert [finding.rule for finding in found] == ["a/often", "a/every"]
    assert not found[0].happens_once and found[0].costs_ms_per_step is None


def test_a_rule_says_with_an_event_in_which_steps_its_cost_falls() -> None:
    event = {"total_s": 2.0, "longer": [10, 90], "persistence": "periodic"}
    facts = {"steps": {"mean_ms": 100.0}, "run": {"steps": 100, "periodic": event}}
    (finding,) = run(rule("a/b", event="run.periodic", costs_ms="20.0"), facts=facts).findings
    assert (finding.persistence, finding.steps) == ("periodic", [10, 90])


def test_tiny_steps_warn_of_nothing_small() -> None:
    facts = {"steps": {"mean_ms": 1.0}, "shared": {"data": {"ms_per_step": 0.6}}}
    (finding,) = run(rule("a/b", costs="shared.data"), facts=facts).findings
    assert finding.severity == "info"


def test_a_cost_below_the_floor_counts_as_nothing_found() -> None:
    outcome = run(rule("a/b", costs_ms="0.5"))
    assert not outcome.findings
    assert [entry.rule for entry in outcome.checked] == ["a/b"]


def test_a_cost_that_is_not_there_is_nothing_found_only_where_somebody_looked() -> None:
    looked = rule("a/looked", costs="late.copy", cost_needs=["loader.num_workers"])
    blind = rule("a/blind", costs="late.copy", cost_needs=["gpu.busy_share"])
    outcome = run(looked, blind)
    assert [entry.rule for entry in outcome.checked] == ["a/looked"]
    assert [(entry.rule, entry.why) for entry in outcome.skipped] == [
        ("a/blind", "not measured: GPU kernels, from a profiler window")
    ]


def test_a_measured_cost_counts_even_where_the_rest_is_missing() -> None:
    assert run(rule("a/b", costs="late.data", cost_needs=["gpu.busy_share"])).findings


def test_needs_and_conditions_skip_with_the_reason() -> None:
    needs = rule("a/needs", needs=["host.cores"])
    applies = rule("a/applies", applies=[{"when": "job.ranks_seen > 2.0", "otherwise": "two ranks only"}])
    lacks = rule(
        "a/lacks", applies=[{"when": "job.ranks_seen > 2.0", "otherwise": "one recorded", "lacks_data": True}]
    )
    assert [(entry.why, entry.applies) for entry in run(needs, applies, lacks).skipped] == [
        ("not measured: host load", True),
        ("two ranks only", False),
        ("one recorded", True),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"when": "host.cores > 1.0"},
        {"when": "1.0"},
        {"when": "nothing.like.it"},
        {"explain": "{{ nothing }}"},
        {"title": "{{ host.cores + 1 }}"},
    ],
    ids=["null in arithmetic", "not a condition", "unknown name", "unknown variable", "null in a text"],
)
def test_a_rule_that_crashes_is_reported_and_the_others_run_on(fields: dict[str, Any]) -> None:
    outcome = run(rule("a/broken", **fields), rule("a/whole", costs="late.data"))
    assert [finding.rule for finding in outcome.findings] == ["a/whole"]
    (skipped,) = outcome.skipped
    assert skipped.rule == "a/broken"
    assert skipped.why.startswith("the rule failed: ")
    assert len(outcome.errors) == 1


def test_a_broken_fix_does_not_hide_the_finding() -> None:
    fixes = [{"title": "{{ nothing }}", "why": "x"}, {"title": "right", "why": "x"}]
    outcome = run(rule("a/b", fixes=fixes))
    assert [fix.title for fix in outcome.findings[0].fixes] == ["right"]
    assert outcome.errors[0].startswith("a/b: fix 1 is skipped")


def test_a_template_cannot_reach_python() -> None:
    outcome = run(rule("a/b", explain="{{ cost.__class__.__mro__ }}", costs="late.data"))
    assert not outcome.findings
    assert "unsafe" in outcome.errors[0]


def test_findings_stand_by_cost_and_effects_below() -> None:
    outcome = run(
        rule("a/effect", costs="shared.data", effect_of=["a/cause"]),
        rule("a/small", costs_ms="5.0"),
        rule("a/cause", costs="late.data"),
        rule("a/note"),
    )
    assert [(finding.rule, finding.caused_by) for finding in outcome.findings] == [
        ("a/cause", None),
        ("a/small", None),
        ("a/note", None),
        ("a/effect", "a/cause"),
    ]


@pytest.mark.parametrize("bound", [{"severity_most": "info"}, {"informs_when": "job.ranks_seen == 2.0"}])
def test_what_may_only_inform_stands_below_what_warns(bound: dict[str, str]) -> None:
    outcome = run(rule("a/noise", costs="late.data", **bound), rule("a/small", costs_ms="8.0"))
    assert [(f.rule, f.severity) for f in outcome.findings] == [("a/small", "warning"), ("a/noise", "info")]


def test_what_follows_from_an_information_does_not_warn() -> None:
    outcome = run(
        rule("a/noise", costs="late.data", severity_most="info"),
        rule("a/small", costs_ms="15.0", effect_of=["a/noise"]),
    )
    assert [(f.rule, f.severity, f.caused_by) for f in outcome.findings] == [
        ("a/noise", "info", None),
        ("a/small", "info", "a/noise"),
    ]


def test_what_follows_from_something_cheap_that_might_have_been_an_information_still_warns() -> None:
    outcome = run(
        rule("a/cheap", costs_ms="4.5", informs_when="job.ranks_seen == 99.0"),
        rule("a/small", costs_ms="8.0", effect_of=["a/cheap"]),
    )
    assert [(f.rule, f.severity, f.caused_by) for f in outcome.findings] == [
        ("a/cheap", "info", None),
        ("a/small", "warning", "a/cheap"),
    ]


def test_single_steps_of_a_short_window_explain_no_warning() -> None:
    facts = FACTS | {"late": {"data": {"ms_per_step": 10.0, "ranks": [1], "stands_out_in": [7]}}}
    small = rule("a/small", costs_ms="15.0", effect_of=["a/once"])
    outcome = run(rule("a/once", costs="late.data"), small, facts=facts)
    assert [(f.rule, f.severity, f.caused_by) for f in outcome.findings] == [
        ("a/small", "warning", None),
        ("a/once", "info", None),
    ]


def test_a_condition_decides_whether_a_cause_explains_the_effect() -> None:
    half = {"rule": "a/cause", "when": "cause.ms_per_step >= 0.5 * cost.ms_per_step"}
    outcome = run(rule("a/effect", costs="shared.data", effect_of=[half]), rule("a/cause", costs="late.data"))
    assert [finding.caused_by for finding in outcome.findings] == [None, None]


def test_the_condition_of_an_effect_reads_the_thresholds_of_its_rule() -> None:
    at_least = {"rule": "a/cause", "when": "cause.ms_per_step >= t.least_ms"}
    for least_ms, cause in ((1.0, "a/cause"), (1000.0, None)):
        thresholds = {"least_ms": {"value": least_ms, "source": "chosen for this test"}}
        effect = rule("a/effect", costs="shared.data", effect_of=[at_least], thresholds=thresholds)
        outcome = run(effect, rule("a/cause", costs="late.data"))
        assert {each.rule: each.caused_by for each in outcome.findings}["a/effect"] == cause
        assert not outcome.errors


def test_rules_that_blame_each_other_do_not_both_vanish() -> None:
    outcome = run(
        rule("a/one", costs="shared.data", effect_of=["a/two"]),
        rule("a/two", costs="late.data", effect_of=["a/one"]),
    )
    assert sum(finding.caused_by is None for finding in outcome.findings) == 1


def test_any_finding_explains_what_names_a_star_but_notes_do_not() -> None:
    star = rule("a/star", severity="warning", effect_of=["*"])
    assert run(star, rule("a/note", costs_ms="2.0")).findings[0].caused_by is None
    noted = run(rule("a/star", severity="info", effect_of=["*"]), rule("a/note", costs_ms="2.0"))
    assert {each.rule: each.caused_by for each in noted.findings} == {"a/note": None, "a/star": "a/note"}
    assert run(star, rule("a/cause", costs="late.data")).findings[1].caused_by == "a/cause"


@pytest.mark.parametrize(
    ("of_effect", "of_cause"), [("shared.data", "late.data"), ("late.data", "shared.data")]
)
def test_what_any_finding_explains_names_the_root(of_effect: str, of_cause: str) -> None:
    star = rule("a/star", severity="critical", effect_of=["*"])
    effect = rule("a/effect", costs=of_effect, effect_of=["a/cause"])
    outcome = run(star, effect, rule("a/cause", costs=of_cause))
    assert {finding.rule: finding.caused_by for finding in outcome.findings} == {
        "a/cause": None,
        "a/effect": "a/cause",
        "a/star": "a/cause",
    }


def test_what_has_no_price_ranks_where_its_severity_begins() -> None:
    outcome = run(rule("a/broken-gpu", severity="critical"), rule("a/data", costs="late.data"))
    assert [finding.rule for finding in outcome.findings] == ["a/broken-gpu", "a/data"]


def test_thresholds_can_be_overridden_for_one_rule_and_for_all() -> None:
    own = {"limit": {"value": 5.0, "source": "test", "unit": "ms"}}
    tested = rule("a/b", costs="late.data", when="cost.ms_per_step > t.limit", thresholds=own)
    assert run(tested).findings
    assert not run(tested, thresholds={"a/b": {"limit": 50.0}}).findings
    assert not run(tested, thresholds={"all": {"least_share": 0.5}}).findings
    assert run(tested, thresholds={"all": {"critical_share": 0.1}}).findings[0].severity == "critical"


@pytest.mark.parametrize("name", ["a/b", "a/*"])
def test_suppressed_rules_are_told_and_not_called_skipped(name: str) -> None:
    outcome = run(rule("a/b", costs="late.data"), rule("c/d"), suppressed=[name])
    assert [finding.rule for finding in outcome.findings] == ["c/d"]
    assert outcome.suppressed == ["a/b"] and not outcome.skipped


LATE_RANKS = {
    "ranks": "arrivals.late_ranks",
    "when": "size(arrivals.late_ranks) > 0",
    "only_unexplained": True,
}


PAUSE = {"event": "run.pause", "ranks": "run.pause.ranks"}


@pytest.mark.parametrize(
    ("fields", "late_steps", "ranks"),
    [
        ({"costs": "late.data"}, 40, [2]),
        ({"costs_ms": "5.0", "ranks": "gpu.shared_ranks"}, 40, [2]),
        ({"severity": "info", "ranks": "gpu.shared_ranks"}, 1, [1, 2]),
        ({"costs_ms": "5.0", **PAUSE}, 30, [1, 2]),
        ({"costs_s": "5.0", **PAUSE}, 30, [1, 2]),
        ({"costs_s": "5.0", **PAUSE}, 1, [2]),
    ],
)
def test_only_a_cost_in_ordinary_steps_explains_why_a_rank_is_late_in_most(
    fields: dict[str, Any], late_steps: int, ranks: list[int]
) -> None:
    """Each of the other findings names rank 1."""
    named = {"gpu": {"shared_ranks": [1]}, "run": {"pause": {"total_s": 5.0, "ranks": [1]}}}
    arrivals = {"late_ranks": [1, 2], "late_steps": {"1": late_steps, "2": 40}, "steps_seen": 40}
    facts = FACTS | named | {"arrivals": arrivals}
    outcome = run(rule("a/late", **LATE_RANKS), rule("a/other", **fields), facts=facts)
    found = {finding.rule: finding.ranks for finding in outcome.findings}
    assert found == {"a/late": ranks, "a/other": [1]}


@pytest.mark.parametrize(("line", "told"), [(9, [[9], [5, 9]]), (5, [[5], [5]])])
def test_a_setting_s_line_may_stand_before_those_of_the_cost(line: int, told: list[list[int]]) -> None:
    loop = {"file": "train.py", "line": line, "function": "main", "share": 1.0}
    facts = FACTS | {"late": {"data": {"ms_per_step": 10.0, "ranks": [1], "where": [loop]}}}
    lines = []
    for leads in (False, True):
        setting = rule("a/b", costs="late.data", where="loader.where", where_leads=leads)
        lines.append([where.line for where in run(setting, facts=facts).findings[0].where])
    assert lines == told


def test_the_verdict_is_the_first_warning() -> None:
    outcome = run(
        rule("a/note", severity="info", headline="no"),
        rule("a/b", costs="late.data", headline="{{ cost.ms_per_step|ms }}"),
    )
    healthy, sentence = verdict(outcome, coverage=Coverage(50, 2))
    assert (healthy, sentence.rule, sentence.headline) == (False, "a/b", "10 ms")


def test_nothing_measured_is_not_healthy() -> None:
    healthy, sentence = verdict(run(rule("a/b", costs="late.data"), facts={}), coverage=Coverage(0, 2))
    assert not healthy
    assert sentence.rule is None
    assert sentence.headline.startswith("Cannot tell")


LACKS = {"costs": "shared.data", "needs": ["job.device"]}


@pytest.mark.parametrize(
    ("others", "share", "open_"),
    [
        ([], 0.30, True),
        ([rule("a/elsewhere", when="false")], 0.04, False),  # too little to warn of
        ([rule("a/checked", costs="shared.data", when="false")], 0.30, False),
        ([rule("a/elsewhere", costs="late.data", when="false")], 0.30, True),
        ([rule("a/note", severity="info", headline="no")], 0.30, True),
    ],
)
def test_what_no_rule_could_look_at_is_not_healthy(others: list[Rule], share: float, open_: bool) -> None:
    """A job was called healthy whose host work took most of the step, because the rule for it lacked the name of the device."""
    facts = FACTS | {"shared": {"data": {"ms_per_step": 100 * share}}}
    outcome = run(rule("a/lacks", **LACKS), *others, facts=facts)
    healthy, sentence = verdict(outcome, coverage=Coverage(50, 2))
    assert (healthy, sentence.rule) == (not open_, None)
    told = "30 ms of a 100 ms step on average may be a problem, but a/lacks lacked data (not measured: the device type)."
    assert (sentence.headline == f"Cannot tell: {told}") == open_, sentence.headline


def test_what_a_rule_that_failed_would_have_told_is_open() -> None:
    outcome = run(rule("a/fails", costs="shared.data", when="1 / 0 == 1"), facts=FACTS)
    assert verdict(outcome, coverage=Coverage(50, 2))[1].headline.startswith(
        "Cannot tell: 30 ms of a 100 ms step"
    )


def test_what_does_not_apply_to_a_job_leaves_nothing_open() -> None:
    applies = [{"when": "false", "otherwise": "the job runs on CPUs"}]
    outcome = run(rule("a/b", costs="shared.data", applies=applies), rule("a/c", when="false"), facts=FACTS)
    assert verdict(outcome, coverage=Coverage(50, 2))[0]


@pytest.mark.parametrize("steps", [1, 20])
def test_ranks_that_do_not_match_are_not_healthy(steps: int) -> None:
    outcome = run(rule("a/b", costs="late.data"), facts=FACTS | {"late": {}})
    healthy, sentence = verdict(outcome, coverage=Coverage(steps, 2), matched=False)
    assert (healthy, sentence.rule) == (False, None)
    assert "Cannot tell: the collectives of 2 ranks could not be matched" in sentence.headline
    for coverage, matched in ((Coverage(1, 2), True), (Coverage(1, 1), False)):
        assert verdict(outcome, coverage=coverage, matched=matched)[0]


def outstanding(*steps: int) -> dict[str, Any]:
    late = {
        "ms_per_step": 30.0,
        "ranks": [1],
        "persistence": "random",
        "steps_hit": len(steps),
        "steps_seen": 7,
    }
    return FACTS | {"late": {"data": {**late, "stands_out_in": list(steps)}}}


@pytest.mark.parametrize(("steps", "severity"), [((3,), "info"), ((3, 5), "warning"), ((), "critical")])
def test_single_steps_of_a_short_window_are_never_critical(steps: tuple[int, ...], severity: str) -> None:
    finding = run(rule("a/late", costs="late.data"), facts=outstanding(*steps)).findings[0]
    assert finding.severity == severity
    assert ("Seen in 7 steps only." in finding.explanation) is bool(steps)
    assert [fix.title for fix in finding.fixes] == (["record more"] if steps else [])


def test_a_price_that_is_close_says_so_and_what_it_is_either_way() -> None:
    late = {**FACTS["late"]["data"], "waiting_ms_per_step": 15.0, "going_on_ms_per_step": 5.0}
    facts = FACTS | {"late": {"data": late}}
    assert (
        run(rule("a/late", costs="late.data"), facts=facts)
        .findings[0]
        .explanation.endswith("Either 15 ms or 5 ms.")
    )
    assert "Either" not in run(rule("a/late", costs="late.data")).findings[0].explanation


def test_one_late_step_stands_below_what_warns() -> None:
    facts = outstanding(3) | {"shared": {"data": {"ms_per_step": 6.0}}}
    found = run(rule("a/late", costs="late.data"), rule("a/shared", costs="shared.data"), facts=facts)
    assert [finding.rule for finding in found.findings] == ["a/shared", "a/late"]


def test_one_late_step_is_in_the_verdict_of_a_job_that_is_healthy_otherwise() -> None:
    healthy, said = verdict(
        run(rule("a/late", costs="late.data"), facts=outstanding(3)), coverage=Coverage(7, 2)
    )
    assert healthy and said.rule is None and said.headline.endswith("but this happened once: a headline")


def test_what_only_informs_here_is_noted_beside_that_nothing_warns() -> None:
    noted = run(rule("a/quiet", severity="warning", informs_when="job.ranks_seen == 2.0"))
    healthy, said = verdict(noted, coverage=Coverage(50, 2))
    assert healthy and said.headline.endswith("but note: a headline")
