"""The data of the page, before any markup."""

from __future__ import annotations

import msgspec
import pytest
import samples

from ddpdoctor.diagnose.diagnosis import (
    BandwidthPoint,
    RankSummary,
    Series,
    Span,
    TelemetrySeries,
    Timeline,
    WaterfallBar,
)
from ddpdoctor.report.charts.bars import ROWS, breakdown, waterfall
from ddpdoctor.report.charts.lines import LINES, POINTS
from ddpdoctor.report.charts.scale import Tick, index_ticks, nice_ticks, thin
from ddpdoctor.report.charts.series import notable_ranks, telemetry
from ddpdoctor.report.charts.timeline import SPANS
from ddpdoctor.report.html import page
from ddpdoctor.report.summary import steps_measured

replace = msgspec.structs.replace


def test_the_cost_is_that_of_the_verdicts_finding():
    view = page(samples.unhealthy())
    assert view.cost_sentence == (
        "Cost: 44.8 ms per step, 87 % of the step time (52 min per training hour); "
        "without it, steps would run 7.1× as fast."
    )
    assert view.subtitle == "2 ranks · 1 host · cpu · gloo · torch 2.13.0"
    assert ("step time (median)", "51.2 ms") in view.numbers


def test_a_trace_gives_no_cost_per_hour():
    unhealthy = samples.unhealthy()
    steps = replace(unhealthy.steps, source="trace")
    findings = [replace(finding, persistence="random") for finding in unhealthy.findings]
    assert page(replace(unhealthy, steps=steps, findings=findings)).cost_sentence.startswith(
        "Cost: 44.8 ms per step over the recorded steps, 87 % of the step time; without"
    )


def test_a_cost_in_some_steps_is_an_average():
    findings = [replace(finding, persistence="periodic") for finding in samples.unhealthy().findings]
    assert page(replace(samples.unhealthy(), findings=findings)).cost_sentence.startswith(
        "Cost: 44.8 ms per step on average, 87 % of the step time (52 min per training hour); without"
    )


def test_without_a_verdict_no_finding_gives_the_cost():
    unhealthy = samples.unhealthy()
    unsure = replace(unhealthy, verdict=replace(unhealthy.verdict, rule=None, headline="Cannot tell: ..."))
    assert page(unsure).cost_sentence.startswith("A step takes 51.2 ms (median); ")


def test_a_healthy_page_has_the_step_time():
    assert (
        page(samples.healthy()).cost_sentence
        == "A step takes 98.8 ms (median); 93 % of its critical path is compute."
    )


def test_findings_keep_order_and_effects_point_to_their_cause():
    first, second = page(samples.unhealthy()).findings
    assert (first.severity, first.ranks, first.cost, first.speedup) == (
        "critical",
        "rank 1",
        "44.8 ms",
        "7.1×",
    )
    assert first.places[0].short == "train.py:57"
    assert ("Batches that stood ready", "not recorded") in [(row.means, row.value) for row in first.evidence]
    assert second.cause == (first.title[0][0], first.anchor)
    assert second.ranks == "all ranks"


def test_only_https_addresses_are_links():
    fix = page(samples.unhealthy()).findings[0].fixes[0]
    assert fix.links == [
        (
            "https://docs.pytorch.org/docs/stable/data.html",
            ["docs.pytorch.org/", "docs/", "stable/", "data.html"],
        )
    ]
    assert fix.sources == ["javascript:alert(1)"]


def test_unknown_values_are_omitted_not_zero():
    view = page(samples.minimal())
    assert view.numbers == view.findings == view.waterfall == view.telemetry == view.facts == []
    assert view.cost_sentence == ""
    for chart in (
        view.breakdown,
        view.step_times,
        view.lateness,
        view.timeline,
        view.bandwidth,
        view.rank_table,
    ):
        assert chart is None


def test_a_finding_without_a_cost_is_not_priced():
    unhealthy = samples.unhealthy()
    bare = replace(unhealthy.findings[0], costs_ms_per_step=None, share=None, speedup_if_fixed=None)
    view = page(replace(unhealthy, findings=[bare]))
    assert view.cost_sentence == ""
    assert (view.findings[0].cost, view.findings[0].share, view.findings[0].speedup) == (
        "not quantified",
        "",
        "",
    )


def test_waterfall_goes_down_from_the_measured_time():
    rows = waterfall(samples.unhealthy())
    assert [row.kind for row in rows] == ["measured", "saving", "saving", "goal"]
    assert rows[1].x + rows[1].width == pytest.approx(100)
    assert rows[2].x + rows[2].width == pytest.approx(rows[1].x, abs=0.02)
    assert rows[3].value == "5.40 ms"


def test_the_bar_of_a_bound_is_no_price():
    bars = [
        WaterfallBar("measured", 100.0),
        WaterfallBar("x", -30.0, "a/b", at_most=True),
        WaterfallBar("rest", 70.0),
    ]
    row = waterfall(replace(samples.unhealthy(), waterfall=bars))[1]
    assert (row.kind, row.value) == ("bound", "≤ 30.0 ms")


def test_a_bar_has_a_whisker_if_its_interval_is_known():
    bars = [
        WaterfallBar("measured", 100.0),
        WaterfallBar("x", -30.0, "a/b", [20.0, 45.0]),
        WaterfallBar("y", -10.0, "a/c"),
    ]
    rows = waterfall(replace(samples.unhealthy(), waterfall=bars))
    assert [row.whisker for row in rows] == [[], [55.0, 80.0], [], []]


def test_a_cost_has_an_interval_and_an_upper_bound_has_none():
    unhealthy = samples.unhealthy()
    sure = replace(
        unhealthy.findings[0], costs_ms_per_step_range=[38.2, 51.4], speedup_if_fixed_range=[3.1, 9.0]
    )
    told = page(replace(unhealthy, findings=[sure])).cost_sentence
    assert (
        "44.8 ms per step (90 % interval: 38.2 to 51.4 ms)" in told and "7.1× (3.1 to 9.0×) as fast" in told
    )
    most = page(replace(unhealthy, findings=[replace(sure, at_most=True)])).cost_sentence
    assert (
        "At most 44.8 ms per step, 87 % of the step time, could be saved" in most
        and "a speed-up of at most 7.1×" in most
    )
    assert " to " not in most and "min per hour" not in most


def test_a_speedup_above_ten_is_capped():
    unhealthy = samples.unhealthy()
    huge = replace(unhealthy.findings[0], speedup_if_fixed=120.0, share=0.99)
    told = page(replace(unhealthy, findings=[huge]))
    assert "over 10× as fast" in told.cost_sentence and "(59 min per training hour)" in told.cost_sentence
    most = page(replace(unhealthy, findings=[replace(huge, at_most=True)]))
    assert "×" not in most.cost_sentence and most.findings[0].speedup == ""


def test_a_trace_of_one_step_says_so():
    unhealthy = samples.unhealthy()
    once = replace(
        unhealthy, steps=replace(unhealthy.steps, source="trace", measured=1, count=1, set_aside={})
    )
    assert page(once).cost_sentence.startswith(
        "Cost: 44.8 ms in the one recorded step, 87 % of the step time; without"
    )


def test_excluded_steps_are_shown_with_reasons():
    aside = {"thinned": 870, "warm-up": 3, "evaluation": 0}
    steps = replace(samples.unhealthy().steps, count=1200, measured=327, set_aside=aside)
    assert (
        steps_measured(steps)
        == "327 of 1,200 steps measured (excluded: 870 recorded briefly to limit overhead, 3 warm-up)"
    )


def test_built_objects_are_shown_with_line_and_without_id():
    built = {
        "ddp": [{"id": 0, "where": "train.py:31", "bucket_cap_mb": 25.0}],
        "loaders": [{"id": 0, "where": 4}],
    }
    unhealthy = samples.unhealthy()
    groups = page(replace(unhealthy, job=replace(unhealthy.job, settings=built))).job
    rows = {group.title: dict(group.rows) for group in groups}
    assert rows["ddp"] == {"line": "train.py:31", "bucket_cap_mb": "25"}
    assert "id" not in rows.get("loaders", {}) and "where" not in rows.get("loaders", {})


def test_a_waterfall_without_a_last_total_gets_the_remaining_time():
    diagnosis = replace(
        samples.unhealthy(), waterfall=[WaterfallBar("measured", 10.0), WaterfallBar("x", 4.0, "a/b")]
    )
    assert [(row.kind, row.value) for row in waterfall(diagnosis)][-1] == ("goal", "6.00 ms")


def test_breakdown_segments_add_up_to_the_bar():
    chart = breakdown(samples.unhealthy())
    for row in chart.rows:
        assert sum(segment.width for segment in row.segments) == pytest.approx(100, abs=0.1)
    assert "checkpoint" not in chart.parts
    assert chart.rows[0].cells[chart.parts.index("comm_wait")] == "44.1 ms"
    assert chart.rows[1].cells[chart.parts.index("comm_wait")] == ""


def test_breakdown_falls_back_to_the_critical_path():
    chart = breakdown(replace(samples.unhealthy(), ranks=[RankSummary(rank=0)]))
    assert [(row.label, row.total) for row in chart.rows] == [("critical path", "100 %")]


def test_many_ranks_are_averaged_but_culprits_keep_their_bar():
    chart = breakdown(samples.large())
    assert [row.label for row in chart.rows][:2] == ["rank 137", "rank 300"]
    assert chart.rows[-1].label == "510 others"
    assert len(chart.rows) <= ROWS and chart.notes


def test_notable_ranks_start_with_the_culprits():
    assert notable_ranks(samples.unhealthy()) == [1]
    assert notable_ranks(samples.large())[:2] == [137, 300]


def test_many_lines_become_median_band_and_culprits():
    chart = page(samples.large()).step_times
    assert [line.name for line in chart.lines] == ["median", "rank 137", "rank 300"]
    assert chart.band and chart.band_label == "from the lowest to the highest of 512 ranks"
    assert chart.lines[0].path.count("L") < POINTS


def test_few_lines_are_drawn_separately():
    chart = page(samples.healthy()).step_times
    assert [line.name for line in chart.lines] == [f"rank {rank}" for rank in range(4)]
    assert chart.band is None and len(chart.lines) <= LINES


def test_a_gap_in_the_values_is_a_gap_in_the_line():
    series = Series(steps=[0, 1, 2, 3], ranks=[0], step_ms=[[1.0, None, float("nan"), 2.0]])
    chart = page(replace(samples.minimal(), series=series)).step_times
    assert chart.lines[0].path.count("M") == 2
    assert "L" not in chart.lines[0].path


@pytest.mark.parametrize(
    ("points", "stride", "says"), [(400, 10, "20 steps"), (200, 10, "10 steps"), (200, 1, "")]
)
def test_number_of_steps_per_point(points, stride, says):
    series = Series(steps=list(range(0, points * stride, stride)), ranks=[0], step_ms=[[50.0] * points])
    notes = page(replace(samples.minimal(), series=series)).step_times.notes
    assert notes == ([f"Each point is the mean of {says}."] if says else [])


def test_one_huge_step_does_not_flatten_the_others():
    values = [50.0] * 99 + [5000.0]
    series = Series(steps=list(range(100)), ranks=[0], step_ms=[values])
    chart = page(replace(samples.minimal(), series=series)).step_times
    assert chart.above == [100.0] and chart.above_label == "1 point above the chart, up to 5.00 s"
    assert chart.y_ticks[-1].label == "80 ms"


def test_the_whole_run_is_one_bar_to_scale():
    view = page(samples.unhealthy())
    chart = view.whole_run
    assert [part.label for part in chart.segments] == [
        "start 9.00 s (22 %)",
        "preparation 4.00 s (10 %)",
        "steps 6.99 s (17 %)",
        "extra time of every 10th step 1.00 s (2.5 %)",
        "pauses 8.00 s (20 %): steps 50 and 100, train.py:61",
        "end 11.0 s (28 %)",
    ]
    widths = [part.width for part in chart.segments]
    assert sum(widths) == pytest.approx(100.0, abs=0.1)
    assert [part.x for part in chart.segments[1:]] == pytest.approx(
        [sum(widths[: n + 1]) for n in range(len(widths) - 1)], abs=0.1
    )
    assert [(tick.at, tick.label) for tick in chart.ticks][:2] == [(0.0, "0 s"), (25.0, "10 s")]
    assert chart.goodput.startswith("Goodput 15 %: ")
    assert page(samples.healthy()).whole_run is None
    run = view.run.replace(" (imports, rendezvous)", "").replace(" (model, data)", "")
    for part in run.removeprefix("Run: 40.0 s = ").split("; ")[0].split(" + "):
        assert any(label.startswith(part) for label in (each.label for each in chart.segments)), part


def test_step_times_mark_what_the_account_of_the_run_names():
    marks = {mark.kind: mark for mark in page(samples.unhealthy()).step_times.marks}
    assert {kind: mark.label for kind, mark in marks.items()} == {
        "pause": "steps 50 and 100: 8.00 s longer together (train.py:61)",
        "periodic": "every 10th step: 1.00 s longer together",
        "change": "from step 60 on: 51.0 ms → 62.0 ms",
    }
    first, last = (round(1000 * (step - 10) / 117) for step in (50, 100))
    assert marks["pause"].path == f"M{first} 1000L{first} 0M{last} 1000L{last} 0"
    assert marks["change"].path.count("M") == 1 and marks["periodic"].path.count("M") == 3


def test_parts_that_exceed_the_wall_time_stay_within_the_bar():
    run = samples.RUN | {"start_s": 39.0, "end_s": 1e300, "pauses_s": -3.0}
    segments = page(replace(samples.minimal(), facts={"run": run})).whole_run.segments
    assert sum(part.width for part in segments) == pytest.approx(100.0, abs=0.1)


def test_growth_is_a_line_from_the_first_to_the_last_step():
    series = Series(steps=[0, 1, 2], ranks=[0], step_ms=[[50.0, 75.0, 100.0]])
    grows = {"steps": [0, 2], "total_s": 1.0, "before_ms": 50.0, "after_ms": 100.0}
    chart = page(replace(samples.minimal(), series=series, facts={"run": {"growth": grows}})).step_times
    assert chart.marks[0].label == "growing: 50.0 ms → 100 ms"
    assert chart.lines[0].path == "M0 537h2L500 306L1000 74" and chart.marks[0].path == "M0 537L1000 74"


@pytest.mark.parametrize(
    "run",
    [
        {"pause": {"steps": []}},
        {"pause": {"steps": ["a"], "total_s": 1.0}},
        {"pause": {"steps": [10**30], "total_s": 1.0}},
        {"growth": 5},
        [],
        "run",
    ],
)
def test_what_is_no_account_of_a_run_marks_nothing(run):
    view = page(replace(samples.unhealthy(), facts={"run": run}))
    assert view.whole_run is None and view.step_times.marks == []


def test_a_period_of_many_steps_is_one_line():
    series = Series(steps=list(range(1000)), ranks=[0], step_ms=[[50.0] * 1000])
    period = {"steps": list(range(5, 1000, 5)), "total_s": 1.0, "every": 5}
    chart = page(replace(samples.minimal(), series=series, facts={"run": {"periodic": period}})).step_times
    assert chart.marks[0].path == "M5 1000L996 1000"


def test_lateness_shows_the_late_rank_and_leaves_the_others_empty():
    chart = page(samples.unhealthy()).lateness
    assert [row.label for row in chart.rows] == ["0", "1"]
    assert any(chart.paths) and all("M0 0H" not in path for path in chart.paths)
    assert "rank 1 is the latest, by 43.9 ms" in chart.description
    assert chart.missing == "" and chart.notes == [], "nothing is aggregated"


def test_without_late_ranks_there_is_a_sentence_and_no_map():
    chart = page(samples.healthy()).lateness
    assert chart.rows == []
    assert chart.description == "All 4 ranks are on time: none is later than 2 ms, over 200 points in time."


def test_lateness_of_many_ranks_is_aggregated_by_host_sized_groups():
    chart = page(samples.large()).lateness
    assert chart.rows[0].title.startswith("rank 0–15:")
    assert len(chart.rows) == 32 and chart.notes


def test_timeline_places_lanes_and_limits_bars():
    chart = page(samples.unhealthy()).timeline
    assert [rank.label for rank in chart.ranks] == ["rank 0", "rank 1"]
    assert [lane.label for lane in chart.ranks[0].lanes] == ["host", "compute", "communication"]
    wait = next(bar for bar in chart.bars if bar.kind == "comm_wait")
    assert wait.width == pytest.approx(100 * 45 / 51, abs=0.01)
    big = page(samples.large()).timeline
    assert len(big.bars) <= SPANS and len(big.ranks) == 12
    assert len(big.notes) == 1 and big.notes[0].startswith("12 of 512 ranks are drawn")


def test_timeline_merges_close_spans():
    spans = [Span(0, "compute", "compute", f"k{index}", index * 0.001, 0.0009) for index in range(50_000)]
    chart = page(replace(samples.minimal(), timeline=Timeline(step=1, spans=spans))).timeline
    assert len(chart.bars) < 100


def test_timeline_without_length_is_not_drawn():
    spans = [Span(0, "compute", "compute", "k", 1.0, 0.0)]
    assert page(replace(samples.minimal(), timeline=Timeline(step=1, spans=spans))).timeline is None


def test_bytes_that_are_always_zero_are_not_drawn():
    series = [
        TelemetrySeries(source="node rank 0", field=field, unit="bytes", t_s=[0, 1, 2], values=values)
        for field, values in (("children_memory_bytes", [0, 0, None]), ("process_memory_bytes", [0, 5, 5]))
    ]
    assert [chart.title for chart in telemetry(replace(samples.minimal(), telemetry=series))] == [
        "Process memory"
    ]


def test_telemetry_omits_quantities_without_values():
    empty = TelemetrySeries(source="h", field="power", unit="W", t_s=[0, 1], values=[None, None])
    charts = telemetry(replace(samples.unhealthy(), telemetry=[*samples.unhealthy().telemetry, empty]))
    assert [chart.title for chart in charts] == ["CPU", "Memory used"]


def test_bandwidth_of_one_size_is_one_point():
    point = BandwidthPoint(operation="allreduce", bytes=8, count=3, transfer_ms=0.5, bus_gb_per_s=0.001)
    chart = page(replace(samples.minimal(), bandwidth=[point])).bandwidth
    assert len(chart.operations[0].dots) == 1 and len(chart.table) == 1


def test_round_ticks():
    assert nice_ticks(55) == [0, 20, 40] and nice_ticks(10) == [0, 5, 10]
    assert nice_ticks(0) == [0.0] and nice_ticks(float("nan")) == [0.0]
    assert nice_ticks(3 * 1024, 3, 1024) == [0, 1024, 2048, 3072]
    assert [tick.label for tick in index_ticks(list(range(10, 128)))] == ["10", "50", "100"]
    assert [tick.label for tick in index_ticks([4, 5, 6])] == ["4", "5", "6"], "there is no step 4.5"
    far = [*range(20), *range(2**52, 2**52 + 20)], list(range(10**12, 10**12 + 40))
    assert all(1 <= len(index_ticks(steps)) <= 12 for steps in far)
    assert index_ticks([7]) == [Tick(0.0, "7")]


def test_thinning_keeps_gaps_and_peaks():
    assert thin([1, 9, None, None, 3, 4], 3, max) == [9, None, 4]


def test_hta_results_become_tables():
    hta = {
        "temporal_breakdown": [{"rank": 0, "idle_time": 3.5}, {"rank": 1, "extra": "x"}],
        "overlap": {"0": 0.5},
        "version": "0.5",
    }
    tables = page(replace(samples.unhealthy(), hta=hta)).hta
    assert tables[0].head == ["rank", "idle time", "extra"]
    assert tables[0].rows == [["0", "3.50", ""], ["1", "", "x"]]
    assert tables[1].rows == [("0", "0.500")] and tables[2].rows == [("", "0.5")]


def test_reproduce_quotes_the_command():
    lines = page(
        replace(samples.unhealthy(), job=replace(samples.unhealthy().job, command=["python", "a b.py"]))
    ).reproduce
    assert lines[0] == "ddpdoctor run -- python 'a b.py'"


def test_reproduce_names_every_source():
    files = [f"rank{rank}.json" for rank in range(8)]
    assert page(replace(samples.unhealthy(), source=files)).reproduce[-1] == (
        f"ddpdoctor analyze {' '.join(files)} --html report.html"
    )


def test_an_effect_has_no_own_cost_and_one_step_no_persistence():
    unhealthy = samples.unhealthy()
    effect = replace(unhealthy.findings[1], costs_ms_per_step=None, caused_by=unhealthy.findings[0].rule)
    once = replace(unhealthy.findings[0], coverage=replace(unhealthy.findings[0].coverage, steps=1))
    first, second = page(replace(unhealthy, findings=[once, effect])).findings
    assert second.cost == "no cost of its own"
    assert "When" not in dict(first.facts)


def test_one_step_has_neither_median_nor_percentile():
    unhealthy = samples.unhealthy()
    view = page(replace(unhealthy, steps=replace(unhealthy.steps, measured=1)))
    assert [name for name, _ in view.numbers] == ["step time", "samples per second", "steps measured"]


def test_of_many_ranks_only_those_that_delay_others_have_bars():
    large = samples.ALL["large"]()
    worst = max(rank.caused_wait_ms or 0.0 for rank in large.ranks)
    by_name = {f"rank {rank.rank}": rank for rank in large.ranks}
    culprits = {f"rank {rank}" for finding in large.findings for rank in finding.ranks or []}
    for row in breakdown(large).rows[:-1]:
        assert row.label in culprits or by_name[row.label].caused_wait_ms >= 0.1 * worst


def test_the_verdicts_own_finding_is_never_folded():
    unhealthy = samples.unhealthy()
    causes = [replace(finding, caused_by="host/cpu-starved") for finding in unhealthy.findings[:2]]
    first, second = page(replace(unhealthy, findings=causes)).findings
    assert first.rule == unhealthy.verdict.rule
    assert (first.folded, second.folded) == (False, True)


def test_a_single_message_size_is_a_sentence_not_a_chart():
    point = BandwidthPoint(operation="allreduce", bytes=2.0**20, count=4, transfer_ms=1.0, bus_gb_per_s=1.0)
    view = page(replace(samples.unhealthy(), bandwidth=[point]))
    assert view.bandwidth.sentences == ["allreduce, 1 MiB: 1.00 GB/s, 1.00 ms (median of 4)"]
    assert page(samples.unhealthy()).bandwidth.sentences == []


def test_a_recording_without_marks_of_steps_promises_no_faster_step():
    unhealthy = samples.unhealthy()
    facts = {**unhealthy.facts, "steps": {"marked": False}}
    findings = [replace(unhealthy.findings[0], speedup_if_fixed=None)]
    assert page(replace(unhealthy, facts=facts, findings=findings)).cost_sentence.startswith(
        "Cost: 44.8 ms in the recording, which marks no steps, 87 % of its time"
    )
