"""Comparisons of diagnoses with known step times."""

from __future__ import annotations

import io
import json

import msgspec
import numpy as np
import pytest
import samples
from rich.console import Console

from ddpdoctor.diagnose.diagnosis import CheckedRule, Coverage, Finding, Job, Series, SkippedRule, Steps
from ddpdoctor.report.compare import MIN_STEPS, Comparison, compare
from ddpdoctor.report.json_output import formatted
from ddpdoctor.report.runs_output import grids, print_comparison, render_comparison

RULES = ("dataloader/starved", "allreduce/late-rank", "gpu/launch-bound")


def diagnosis(
    step_ms=50.0, *, points=200, noise=0.05, seed=1, world=2, device="cuda", batch=32.0, fired=(), skipped=()
):
    rng = np.random.default_rng(seed)
    times = [list(step_ms * (1 + noise * rng.standard_normal(points))) for _ in range(world)]
    return msgspec.structs.replace(
        samples.minimal(),
        job=Job(world_size=world, device=device, device_names=["H100"], settings={"threads": {"torch": 4}}),
        steps=Steps(count=points, measured=points, mean_ms=step_ms, median_ms=step_ms),
        series=Series(steps=list(range(points)), ranks=list(range(world)), step_ms=times, late_ms=times),
        breakdown={"compute": 0.75, "comm_transfer": 0.25},
        facts={"steps": {"batch_size": batch, "micro_batches": 1.0}, "loader": {}},
        findings=list(fired),
        checked=[CheckedRule(r, r) for r in RULES if r not in skipped and r not in {f.rule for f in fired}],
        skipped=[SkippedRule(r, r, "no data") for r in skipped],
    )


def finding(rule, cost, *, severity="warning", ranks=None):
    return Finding(
        rule=rule,
        severity=severity,
        title=rule,
        costs_ms_per_step=cost,
        ranks=ranks,
        coverage=Coverage(200, 2),
    )


def test_ten_thousand_findings_are_matched():
    """By rule and ranks in any order, the others by rule."""
    old = [finding("a/b", 1.0, ranks=[n]) for n in range(10_000)]
    rows = compare(diagnosis(fired=old), diagnosis(fired=[*reversed(old[:-1]), finding("a/b", 1.0)])).findings
    assert len(rows) == 10_000
    assert [row.before_ranks for row in rows if row.before_ranks != row.after_ranks] == [[9_999]]


def test_step_times_of_zero_give_no_ratio():
    nothing = msgspec.structs.replace(diagnosis(), steps=Steps(median_ms=0.0))
    nothing = msgspec.structs.replace(
        nothing, series=Series(steps=[0, 1, 2], ranks=[0], step_ms=[[0.0, -1.0, 0.0]])
    )
    assert (
        compare(nothing, diagnosis()).judgement == compare(diagnosis(), nothing).judgement == "too few steps"
    )


def test_control_characters_are_escaped_in_json():
    odd = msgspec.structs.replace(diagnosis(), source=["a\u202eb\x9bc\x7f\udcff"])
    data = formatted(compare(odd, odd)).decode()
    assert "a\\u202eb\\u009bc\\u007f" in data and json.loads(data)["before"]["source"] == [
        "a\u202eb\x9bc\x7f\\udcff"
    ]


@pytest.mark.parametrize(
    ("factor", "judgement"),
    [(0.8, "faster"), (1.0, "no clear difference"), (1.001, "no clear difference"), (1.1, "slower")],
)
def test_the_judgement_follows_the_interval(factor, judgement):
    result = compare(diagnosis(50, seed=1), diagnosis(50 * factor, seed=2))
    assert result.judgement == judgement
    assert result.ratio.low < result.ratio.estimate < result.ratio.high
    assert result.ratio.estimate == pytest.approx(factor, rel=0.02)
    assert result.ratio.low <= factor <= result.ratio.high
    assert result == compare(diagnosis(50, seed=1), diagnosis(50 * factor, seed=2)), "seeded"


def test_the_interval_has_its_nominal_coverage():
    hits = 0
    for seed in range(60):
        ratio = compare(
            diagnosis(50, points=120, noise=0.2, seed=seed),
            diagnosis(60, points=120, noise=0.2, seed=1000 + seed),
        ).ratio
        hits += ratio.low <= 1.2 <= ratio.high
    assert 52 <= hits <= 60


def test_autocorrelated_steps_widen_the_interval():
    steady = diagnosis(50, points=400, noise=0.1, seed=3)
    series = steady.series
    series = msgspec.structs.replace(series, step_ms=[sorted(times) for times in series.step_ms])
    drifting = msgspec.structs.replace(steady, series=series)
    narrow, wide = compare(steady, steady).ratio, compare(drifting, drifting).ratio
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_warm_up_steps_are_excluded():
    old = diagnosis(50, points=20, noise=0.01)
    for times in old.series.step_ms:
        times[:12] = [5000.0] * 12
    slow = msgspec.structs.replace(old, steps=msgspec.structs.replace(old.steps, set_aside={"warm-up": 12}))
    assert compare(old, old).before.median_ms > 1000
    assert compare(slow, slow).before.median_ms == pytest.approx(50, rel=0.05)
    assert compare(slow, slow).before.points == 8


def test_missing_steps_of_a_rank_do_not_count_as_zero():
    old = diagnosis(50, noise=0)
    old.series.step_ms[0][:] = [None] * 200
    assert compare(old, old).before.median_ms == pytest.approx(50)


def test_few_steps_give_no_interval_and_no_verdict():
    few = diagnosis(50, points=MIN_STEPS - 1)
    result = compare(few, diagnosis(90))
    assert (result.judgement, result.ratio.low, result.regression_percent()) == ("too few steps", None, None)
    assert "Too few steps" in result.verdict and "89.7 ms after" in result.verdict
    nothing = compare(samples.minimal(), samples.minimal())
    assert (nothing.ratio, nothing.judgement, nothing.before.median_ms) == (None, "too few steps", None)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (diagnosis(30, world=4), "world size: 2 before, 4 after"),
        (diagnosis(30, batch=64.0), "batch size: 32 before, 64 after"),
        (diagnosis(30, device="cpu"), "device: cuda before, cpu after"),
    ],
)
def test_jobs_of_different_sizes_get_no_verdict(other, what):
    result = compare(diagnosis(50), other)
    assert result.judgement == "not comparable" and what in result.verdict
    assert "better" not in result.verdict.replace("neither is judged better", "")
    assert result.regression_percent() is None
    assert result.before.median_ms == pytest.approx(50, rel=0.02) and result.after.median_ms == pytest.approx(
        30, rel=0.02
    )


def test_a_few_steps_of_fewer_micro_batches_are_compared_and_told():
    """accelerate synchronises where an epoch ends."""
    before, after = diagnosis(180, batch=4.0), diagnosis(140, batch=4.0)
    before.facts["steps"]["micro_batches"], after.facts["steps"]["micro_batches"] = 4.0, 3.9412
    result = compare(before, after)
    assert result.judgement == "faster" and not result.differences
    assert any("4 micro-batches before and 3.9412 after" in note for note in result.notes)
    after.facts["steps"]["micro_batches"] = 3.5
    assert compare(before, after).judgement == "not comparable"
    before.facts["steps"]["micro_batches"] = 3.5
    assert compare(before, after).judgement == "faster"


def test_batch_size_includes_accumulation_and_ignores_a_short_last_batch():
    accumulated = diagnosis(50, batch=16.0)
    accumulated.facts["steps"]["micro_batches"] = 2.0
    assert compare(diagnosis(50), accumulated).differences == []
    assert compare(diagnosis(50), diagnosis(50, batch=31.9)).differences == []


def test_a_size_known_on_one_side_only_is_a_note():
    result = compare(diagnosis(50), diagnosis(40, batch=None))
    assert result.judgement == "faster"
    assert any("batch size was recorded on one side only" in note for note in result.notes)


def test_ranks_missing_on_one_side_are_a_note():
    def of(*ranks, step_ms=50):
        found = diagnosis(step_ms)
        return msgspec.structs.replace(found, job=msgspec.structs.replace(found.job, ranks_seen=list(ranks)))

    (note,) = compare(of(0, 1), of(0)).notes
    assert note == "2 ranks recorded before and 1 after: ranks without a recording are not compared."
    assert compare(of(0, 1), of(0, 1)).notes == compare(of(0, 1), of()).notes == []


def test_a_different_model_is_a_note():
    def of(parameters_bytes, step_ms=50, **more):
        found = diagnosis(step_ms, **more)
        found.facts["ddp"] = {"parameters_bytes": parameters_bytes}
        return found

    result = compare(of(4 << 20), of(16 << 20, 90))
    assert result.judgement == "slower"
    assert any("4 MiB of parameters before, 16 MiB after" in note for note in result.notes)
    assert not any("models" in note for note in compare(of(4 << 20), of(4 << 20)).notes)
    assert not any("models" in note for note in compare(of(4 << 20), diagnosis(50)).notes)


def test_statuses_of_findings():
    before = diagnosis(
        fired=[
            finding("dataloader/starved", 20),
            finding("allreduce/late-rank", 5, ranks=[1]),
            finding("x/same", 3),
        ],
        skipped=("gpu/launch-bound",),
    )
    after = diagnosis(
        fired=[
            finding("allreduce/late-rank", 5, ranks=[0]),
            finding("x/same", 3.1),
            finding("gpu/launch-bound", 8),
        ]
    )
    rows = {row.rule: row for row in compare(before, after).findings}
    assert {rule: row.status for rule, row in rows.items()} == {
        "dataloader/starved": "resolved",
        "allreduce/late-rank": "changed",
        "x/same": "unchanged",
        "gpu/launch-bound": "not checked before",
    }
    assert next(iter(rows)) == "dataloader/starved", "costliest first"
    assert (rows["dataloader/starved"].before_ms_per_step, rows["dataloader/starved"].after_ms_per_step) == (
        20,
        None,
    )
    gone = diagnosis(skipped=("dataloader/starved",))
    assert compare(before, gone).findings[0].status == "not checked after", (
        "a rule that cannot look resolves nothing"
    )


def test_the_breakdown_is_in_milliseconds_per_step():
    rows = {row.part: row for row in compare(diagnosis(50), diagnosis(40)).breakdown}
    assert rows["compute"].before_ms == pytest.approx(37.5) and rows["compute"].after_ms == pytest.approx(30)
    assert set(rows) == {"compute", "comm_transfer"}


def with_run(made, **more):
    return msgspec.structs.replace(made, facts={**made.facts, "run": samples.RUN | more})


def test_the_whole_runs_are_compared_by_their_parts():
    shorter = {"wall_s": 34.0, "pauses_s": None, "warm_up_s": 2.0, "goodput": 0.18}
    result = compare(with_run(diagnosis()), with_run(diagnosis(), **shorter))
    rows = {row.part: (row.before_s, row.after_s) for row in result.run}
    assert rows["pauses"] == (8.0, 0.0) and rows["warm_up"] == (0.0, 2.0) and rows["end"] == (11.0, 11.0)
    table = {row[0]: row[1:] for row in grids(result)[1].rows}
    assert table["goodput"] == ["15 %", "18 %", ""]
    assert table["wall time"] == ["40.0 s", "34.0 s", "-6.00 s"]
    assert table["pauses"] == ["8.00 s", "0 ms", "-8.00 s"]


def test_a_run_that_was_restarted_says_so():
    result = compare(diagnosis(), with_run(diagnosis(), restarts={"count": 2}))
    told = [note for note in result.notes if "restarted" in note]
    assert told == ["The job after was restarted 2 times: the steps of one attempt are compared."]


def test_a_run_accounted_for_on_one_side_only_is_not_compared():
    result = compare(with_run(diagnosis()), diagnosis())
    assert result.run == [] and result.before.goodput == 0.15 and result.after.goodput is None
    assert "The whole run" not in [grid.title for grid in grids(result)]


def test_differing_settings_are_listed_without_variables_of_each_run():
    old, new = samples.unhealthy(), samples.unhealthy()
    names = [
        "MASTER_PORT",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_STEP_ID",
        "RANK",
        "PMIX_RANK",
    ]
    of_one_start = dict.fromkeys(names, "1")
    job = msgspec.structs.replace(
        new.job,
        versions={**new.job.versions, "torch": "2.99"},
        environment={"NCCL_ALGO": "Ring", **of_one_start},
    )
    changes = {
        c.what: (c.before, c.after) for c in compare(old, msgspec.structs.replace(new, job=job)).changes
    }
    assert changes["version of torch"] == (old.job.versions["torch"], "2.99")
    assert changes["NCCL_ALGO"] == ("not recorded", "Ring")
    assert not of_one_start.keys() & changes.keys()
    assert compare(old, old).changes == []


def test_json_can_be_read_back_and_the_terminal_fits():
    result = compare(diagnosis(50, fired=[finding("dataloader/starved", 20)]), diagnosis(40))
    assert msgspec.json.decode(formatted(result), type=Comparison) == result
    assert json.loads(formatted(result))["schema"] == "ddpdoctor.comparison/1"
    console = Console(file=io.StringIO(), width=80)
    print_comparison(result, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "dataloader/starved" in text and "resolved" in text


def test_hostile_names_stay_text():
    result = compare(samples.hostile(), samples.hostile())
    page = render_comparison(result)
    assert "<img" not in page and "<script" not in page and "http-equiv" in page
    console = Console(file=io.StringIO(), width=100)
    print_comparison(result, console)
    assert "\x1b" not in console.file.getvalue()
    assert next(grid.title for grid in grids(result)) == "Steps"


def test_findings_of_incomparable_jobs_are_not_resolved():
    before = diagnosis(50, fired=[finding("dataloader/starved", 20)])
    after = diagnosis(50, world=8, fired=[finding("allreduce/late-rank", 5, ranks=[0])])
    result = compare(before, after)
    assert result.judgement == "not comparable"
    assert {row.rule: row.status for row in result.findings} == {
        "dataloader/starved": "before only",
        "allreduce/late-rank": "after only",
    }


def test_a_cost_within_the_interval_of_the_other_is_unchanged():
    def sure(cost, ends):
        return msgspec.structs.replace(finding("r/slow", cost), costs_ms_per_step_range=ends)

    before = diagnosis(50, fired=[sure(10.0, [7.0, 13.0])])
    near = diagnosis(50, fired=[sure(12.0, [9.0, 15.0])])
    far = diagnosis(50, fired=[sure(16.0, [14.0, 18.0])])
    assert [row.status for row in compare(before, near).findings] == ["unchanged"]
    assert [row.status for row in compare(before, far).findings] == ["changed"]


def test_estimated_and_actual_saving_of_a_resolved_finding():
    priced = msgspec.structs.replace(finding(RULES[0], 10.0), costs_ms_per_step_range=[8.0, 12.0])
    notes = compare(diagnosis(50, fired=[priced]), diagnosis(39)).notes
    assert any(
        "10.0 ms (8 to 12 ms) per step; the mean step is now" in note and "shorter" in note for note in notes
    )
    two = [priced, finding(RULES[1], 5.0)]
    assert not any("priced" in note for note in compare(diagnosis(50, fired=two), diagnosis(39)).notes)


def test_notes_of_both_sides_are_shown():
    def noting(*notes):
        return msgspec.structs.replace(diagnosis(), notes=list(notes))

    told = compare(noting("Rank 0 is cut.", "No GPU."), noting("No GPU.", "Rank 1 is cut."))
    assert told.notes == ["Before and after: No GPU.", "Before: Rank 0 is cut.", "After: Rank 1 is cut."]
    shown = io.StringIO()
    print_comparison(told, Console(file=shown, width=100))
    assert "Note: After: Rank 1 is cut." in shown.getvalue()
    many = compare(noting(), noting(*map(str, range(5)))).notes
    assert many[2:] == ["After: 2", "After: 2 more notes, which `ddpdoctor analyze -v` shows."]


def test_operators_that_only_one_recording_has_seen_make_no_difference():
    """Operators outside of the phases are computation with a profiler window, and host work without."""
    seen, unseen = (
        msgspec.structs.replace(
            diagnosis(50),
            breakdown=parts,
            facts={"steps": {"batch_size": 32.0, "operators_seen": operators_seen}},
        )
        for parts, operators_seen in (
            ({"compute": 0.8, "host": 0.2}, True),
            ({"compute": 0.3, "host": 0.7}, False),
        )
    )
    comparison = compare(unseen, seen)
    (row,) = comparison.breakdown
    assert (row.part, row.before_ms, row.after_ms) == ("compute_and_host_work", 50.0, 50.0)
    assert any("recorded only after" in note for note in comparison.notes)
    assert len(compare(seen, seen).breakdown) == 2
