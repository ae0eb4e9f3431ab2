"""Terminal and Markdown."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
import samples
from rich.console import Console

from ddpdoctor.diagnose.diagnosis import Evidence, SkippedRule
from ddpdoctor.diagnose.rule_texts import ms
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.summary import Speaker
from ddpdoctor.measure.taxonomy import PARTS, Part
from ddpdoctor.report.finding_view import evidence_value, place
from ddpdoctor.report.html import render_html
from ddpdoctor.report.job_view import project_root
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.summary import cost_sentence, subtitle
from ddpdoctor.report.terminal import print_terminal

replace = msgspec.structs.replace
ESCAPE = "\x1b"


def shown(diagnosis, colour=False, width=80, **options):
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    print_terminal(diagnosis, console, **options)
    return stream.getvalue()


@pytest.mark.parametrize("name", sorted(samples.ALL))
@pytest.mark.parametrize("colour", [True, False])
def test_the_report_fits_eighty_columns(name, colour):
    text = re.sub(r"\x1b\[[\d;]*m", "", shown(samples.ALL[name](), colour, verbose=True))
    assert text.strip() and max(len(line) for line in text.splitlines()) <= 80


def test_the_report_has_finding_line_explanation_and_fix():
    text = shown(samples.unhealthy())
    assert text.startswith("Rank 1 waits 46 ms per step for data; all others wait for it\n")
    row = next(line for line in text.splitlines() if line.startswith("dataloader/one-rank-late"))
    assert row.split() == ["dataloader/one-rank-late", "rank", "1", "44.8", "7.1×", "train.py:57"]
    assert (
        "num_workers=4" in text
        and "Trade-off:" in text
        and "Note: No GPU was found" in text.replace("\n", " ")
    )
    assert "2 checks found nothing; 1 lacked data (`-v` says why)." in text


def test_the_first_screen_says_who_where_and_what_to_change():
    """24 lines of 80 columns."""
    first = shown(samples.unhealthy()).splitlines()[:24]
    assert "Who: rank 1, at train.py:57 in main" in first
    assert "Fix: Load in worker processes" in first
    assert first[0].startswith("Rank 1 waits 46 ms") and any(line.startswith("Cost:") for line in first)
    assert not any(line.startswith("Who:") for line in shown(samples.healthy()).splitlines())


def test_findings_without_costs_and_lines_have_no_columns_for_them():
    stopped = msgspec.structs.replace(
        samples.unhealthy().findings[0],
        costs_ms_per_step=None,
        costs_ms_per_step_range=None,
        share=None,
        speedup_if_fixed=None,
        speedup_if_fixed_range=None,
        where=[],
        evidence=[
            Evidence("hang.not_reached.sequence", 44791, "", "Number"),
            Evidence("gpu.kernels", 44791, "", "Kernels"),
        ],
    )
    diagnosis = msgspec.structs.replace(samples.unhealthy(), findings=[stopped])
    text = shown(diagnosis, verbose=True)
    assert next(line for line in text.splitlines() if line.startswith("finding ")).split() == [
        "finding",
        "who",
    ]
    assert "| finding | who |\n| --- | --- |\n" in render_markdown(diagnosis)
    assert "Number: 44791" in text and "Kernels: 44,791" in text


def test_what_does_not_apply_is_counted_apart_and_reasons_are_listed_once():
    reasons = [("a/b", "no GPU", True), ("c/d", "the job runs on CPUs", False), ("e/f", "no GPU", True)]
    skipped = [SkippedRule(rule, rule, why, applies) for rule, why, applies in reasons]
    diagnosis = msgspec.structs.replace(samples.unhealthy(), skipped=skipped)
    text = shown(diagnosis, verbose=True)
    assert "2 checks found nothing; 1 does not apply; 2 lacked data." in text
    assert "\n  no GPU (2 checks): a/b, e/f\n" in text
    assert "\n  does not apply: the job runs on CPUs (1 check): c/d\n" in text
    page = render_html(diagnosis)
    assert "2 checks lacked data</summary>" in page and "1 check does not apply</summary>" in page
    assert "1 does not apply; 2 lacked data." in render_markdown(diagnosis)


def test_a_healthy_job_is_shown_with_its_step_time():
    text = shown(samples.healthy())
    assert text.startswith("Healthy:") and "Fix" not in text and "finding  " not in text


def test_an_empty_diagnosis_is_a_single_line():
    assert shown(samples.minimal()) == "Nothing found\n"


def test_quiet_is_the_verdict_alone():
    assert shown(samples.unhealthy(), quiet=True).splitlines() == [
        "Rank 1 waits 46 ms per step for data; all others wait for it"
    ]


def test_verbose_shows_evidence_and_why_rules_were_skipped():
    text = shown(samples.unhealthy(), verbose=True)
    assert " ".join(samples.unhealthy().findings[0].fixes[0].why.split())[:30] in text
    assert "Batches that stood ready: not recorded" in text
    assert "no GPU telemetry was recorded (1 check): compute/throttled" in text


def test_colours_only_if_supported(monkeypatch):
    assert ESCAPE not in shown(samples.unhealthy())
    assert ESCAPE in shown(samples.unhealthy(), colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    print_terminal(samples.unhealthy(), Console(file=stream, force_terminal=True, width=80))
    assert not re.search(r"\x1b\[[\d;]*3\dm", stream.getvalue())


def test_names_are_neither_escape_sequences_nor_markup():
    evil = "\x1b[2J\x07[red]x[/red][/nonsense]"
    unhealthy = samples.unhealthy()
    finding = msgspec.structs.replace(unhealthy.findings[0], title=evil, rule=evil, explanation=evil)
    text = shown(msgspec.structs.replace(unhealthy, findings=[finding], notes=[evil]))
    assert ESCAPE not in text and "\x07" not in text and "[red]x[/red][/nonsense]" in text


def test_markdown_is_short_and_complete():
    text = render_markdown(samples.unhealthy())
    assert text.startswith("## Rank 1 waits 46 ms per step for data")
    assert (
        "all others wait for it (critical) | rank 1 | 44.8 ms per step (87 %) | 7.1× | `train.py:57` |"
        in text
    )
    assert "```python\nloader = DataLoader(" in text
    assert len(text.splitlines()) < 60


def test_markdown_escapes_foreign_text():
    text = render_markdown(samples.hostile())
    outside_code = re.sub(r"```.*?```|(`+).*?\1", "", text, flags=re.DOTALL)
    assert "<img" not in outside_code and "</script>" not in outside_code
    assert all(line.count(" | ") <= 6 for line in text.splitlines() if line.startswith("|"))


def test_markdown_of_a_healthy_and_of_an_empty_job():
    assert "|" not in render_markdown(samples.healthy())
    assert render_markdown(samples.minimal()).startswith("## Nothing found")


def test_no_id_path_or_line_is_ever_broken():
    long = "a_module_with_a_rather_long_name_for_the_table.py"
    where = Where(file=f"/srv/projects/training/{long}", line=1234, function="main")
    first = msgspec.structs.replace(
        samples.unhealthy().findings[0],
        rule="rank-imbalance/garbage-collection",
        ranks=[0, 2, 4, 6, 8],
        where=[where],
    )
    unhealthy = msgspec.structs.replace(
        samples.unhealthy(), findings=[first], notes=["/data/" + "x" * 90 + "/rank0.json is cut."]
    )
    for width in (40, 80):
        text = shown(unhealthy, width=width, verbose=True)
        for whole in (
            first.rule,
            f"{long}:1234",
            f"/srv/projects/training/{long}:1234",
            "x" * 90 + "/rank0.json",
        ):
            assert any(whole in line for line in text.splitlines()), (width, whole)


def test_the_way_to_a_line_ends_at_the_worker_that_ran_it():
    way = (CodeLine("/home/me/data.py", 40, "Images.__getitem__"),)
    ran = {"callers": way, "process": "worker 3 of rank 1", "samples": 12}
    line = Where("/home/me/data.py", 86, "augment", **ran)
    assert place(line).call_path == "data.py:86 augment ← data.py:40 Images.__getitem__ ← worker 3 of rank 1"
    within = msgspec.structs.replace(line, inside=CodeLine("/x/functional.py", 465, "resize"))
    assert place(within).call_path.startswith("functional.py:465 resize ← data.py:86 augment ← ")
    assert place(within).samples == "12 samples, mostly in functional.py:465 resize"


def test_code_in_the_root_folder_has_a_report():
    job = msgspec.structs.replace(samples.healthy().job, command=["python", "/train.py", "/app/config.py"])
    assert project_root(msgspec.structs.replace(samples.healthy(), job=job)) is None


def test_further_callers_of_a_line_are_counted():
    unhealthy = samples.unhealthy()
    first = unhealthy.findings[0]
    where = msgspec.structs.replace(first.where[0], more_callers=2)
    finding = msgspec.structs.replace(first, where=[where])
    diagnosis = msgspec.structs.replace(unhealthy, findings=[finding])
    way = "start.py:9 <module> and 2 more places"
    assert f"train.py:57 main ← {way}" in shown(diagnosis)
    assert f"← {way}" in render_markdown(diagnosis)
    assert "and 2 more places" in re.sub(r"\s+", " ", render_html(diagnosis))
    assert "more place" not in shown(unhealthy)


def test_each_letter_of_the_bar_has_one_legend_entry():
    shares = {part: 1 / len(PARTS) for part in PARTS}
    few = {Part.COMPUTE: 0.99, Part.HOST: 0.004, Part.DATA_WAIT: 0.006}
    for breakdown in (shares, few):
        lines = shown(msgspec.structs.replace(samples.healthy(), breakdown=breakdown)).splitlines()
        at = next(n for n, line in enumerate(lines) if len(line) > 70 and " " not in line)
        legend = []
        for line in lines[at + 1 : lines.index("", at)]:
            legend += [entry[0] for entry in line.split("   ")]
        assert set(lines[at]) <= set(legend) and len(set(legend)) == len(legend)


def test_without_a_line_the_table_shows_the_annotation():
    named = Evidence("late.host.operation", "# running sparse arch", "", "What runs there")
    found = msgspec.structs.replace(samples.unhealthy().findings[0], where=[], evidence=[named])
    row = next(
        line
        for line in shown(msgspec.structs.replace(samples.unhealthy(), findings=[found])).splitlines()
        if line.startswith(found.rule)
    )
    assert row.rstrip().endswith("# running sparse arch")


@pytest.mark.parametrize(
    ("asked", "says"), [("2", "1 rank (the command asks for 2) · "), ("1", "1 rank · "), ("x", "1 rank · ")]
)
def test_fewer_ranks_than_the_command_asks_for_are_told(asked, says):
    """``accelerate launch --num_processes 2 --cpu`` starts one."""
    one = samples.minimal()
    command = ["accelerate", "launch", "--num_processes", asked, "--cpu", "train.py"]
    job = msgspec.structs.replace(one.job, world_size=1, ranks_seen=[0], hosts=["a"], command=command)
    assert subtitle(msgspec.structs.replace(one, job=job)).startswith(says)


def test_all_ranks_label_if_not_all_were_recorded():
    found = msgspec.structs.replace(samples.unhealthy().findings[0], ranks=None)
    for seen, world, who in (
        (2, 2, "all ranks"),
        (2, 128, "both recorded"),
        (5, 128, "all 5 recorded"),
        (1, 300, "rank 0"),
        (1, 1, "rank 0"),
    ):
        job = msgspec.structs.replace(samples.unhealthy().job, world_size=world, ranks_seen=list(range(seen)))
        assert who in shown(msgspec.structs.replace(samples.unhealthy(), findings=[found], job=job))


def test_transfer_may_be_waiting_if_not_all_ranks_were_recorded():
    for world, told in ((2, "n communication 3.0 %"), (8, "n communication or waiting 3.0 %")):
        job = msgspec.structs.replace(samples.unhealthy().job, world_size=world)
        assert told in shown(msgspec.structs.replace(samples.unhealthy(), job=job))


def test_results_of_other_libraries_are_announced():
    with_hta = msgspec.structs.replace(
        samples.unhealthy(), hta={"overlap": [{"rank": 0}], "idle_time": [], "notes": ["No data."]}
    )
    text = " ".join(shown(with_hta).split())
    assert "HolisticTraceAnalysis results in the report (`--html F`)" in text and "No data." in text
    assert "HolisticTraceAnalysis" not in shown(samples.unhealthy())


def test_mean_and_median_are_shown_where_they_differ():
    steps = replace(samples.unhealthy().steps, median_ms=40.0, mean_ms=50.0, p95_ms=None)
    assert "step 50.0 ms mean, 40.0 ms median" in shown(replace(samples.unhealthy(), steps=steps))
    alike = shown(replace(samples.unhealthy(), steps=replace(steps, mean_ms=40.01)))
    assert "step 40.0 ms median" in alike and "mean," not in alike
    assert "one step of 40.0 ms" in shown(replace(samples.unhealthy(), steps=replace(steps, measured=1)))


def test_the_table_says_what_its_arrow_means_and_how_to_see_more():
    unhealthy = samples.unhealthy()
    first, *_ = unhealthy.findings
    effect = replace(first, rule="gpu/low-utilisation", caused_by=first.rule)
    text = shown(replace(unhealthy, findings=[first, effect]))
    said = " ".join(text.split())
    assert (
        "↳: overlaps with dataloader/one-rank-late; fix that first" in said
        and "`-v` explains every finding" in said
    )
    assert "↳" not in shown(replace(unhealthy, findings=[first]), verbose=True)


def test_effects_stand_below_their_cause_and_theirs_below_them():
    unhealthy = samples.unhealthy()
    causes = {"a/one": None, "a/two": None, "b/of-one": "a/one", "b/of-that": "b/of-one", "c/of-one": "a/one"}
    first = unhealthy.findings[0]
    findings = [replace(first, rule=rule, caused_by=cause) for rule, cause in causes.items()]
    text = shown(replace(unhealthy, findings=findings), verbose=True)
    rows = [
        line.removeprefix("↳ ").split()[0] for line in text.splitlines() if "/" in line.split("  ")[0][:6]
    ]
    assert rows[:5] == ["a/one", "b/of-one", "b/of-that", "c/of-one", "a/two"]


def test_the_parts_of_a_run_add_up():
    run = {
        "wall_s": 10.7,
        "start_s": 4.08,
        "preparation_s": 2.37,
        "warm_up_s": 0.199,
        "steps_s": 2.55,
        "end_s": 1.4,
    }
    facts = {**samples.unhealthy().facts, "run": {**run, "goodput": 0.25, "steps": 100}}
    text = " ".join(shown(replace(samples.unhealthy(), facts=facts)).split())
    formula = "100 steps of usual length / wall time"
    assert f"+ end 1.40 s + other 0.101 s; goodput 25 % ({formula})" in text


@pytest.mark.parametrize(
    ("more", "formula"),
    [
        (
            {"attempts": [{"steps": 60}, {"steps": 50}]},
            "110 steps of usual length / wall time",
        ),
        (
            {"attempts": [{"steps": 60}, {"steps": 50}], "restarts": {"repeated_steps": 10}},
            "100 steps of usual length / wall time",
        ),
        ({"steps": None}, "steps of usual length / wall time"),
    ],
)
def test_the_goodput_says_of_which_steps_it_is(more, formula):
    facts = {"run": {"wall_s": 11.0, "steps_s": 11.0, "goodput": 0.25, "steps": 50, **more}}
    text = " ".join(shown(replace(samples.unhealthy(), facts=facts)).split())
    assert f"goodput 25 % ({formula})" in text


def test_costs_in_different_units_have_one_in_every_cell():
    first, *_ = samples.unhealthy().findings
    in_total = replace(first, rule="run/pause", costs_ms_per_step=None, costs_s=18.2)
    text = shown(replace(samples.unhealthy(), findings=[first, in_total]))
    assert "44.8 ms/step" in text and "18.2 s/run" in text and "ms/step" not in text.split("44.8 ms/step")[0]
    page = render_markdown(replace(samples.unhealthy(), findings=[first, in_total]))
    assert "| finding | who | cost |" in page and "44.8 ms per step" in page and "18.2 s in total" in page


def test_the_order_of_costs_is_explained_if_it_is_not_theirs():
    first, *_ = samples.unhealthy().findings
    found = [
        replace(first, rule="a/b", share=0.05, costs_ms_per_step=3.0, persistence="periodic"),
        replace(first, rule="c/d", share=0.1, costs_ms_per_step=6.0, at_most=True),
    ]
    text = " ".join(shown(replace(samples.unhealthy(), findings=found)).split())
    assert "order: by cost; uncertain and one-time costs rank lower" in text
    stopped = replace(first, rule="hang/e", share=None, costs_ms_per_step=None)
    for others in (found[::-1], [stopped, found[0]]):
        assert "order:" not in shown(replace(samples.unhealthy(), findings=others))


def test_each_rank_is_named_with_its_own_line():
    lines = [
        Where(file="/w/a.py", line=1, function="f", process="rank 0"),
        Where(file="/w/b.py", line=2, function="g", process="rank 1"),
    ]
    first, *_ = samples.unhealthy().findings
    found = replace(samples.unhealthy(), findings=[replace(first, ranks=[0, 1], where=lines)])
    text = shown(found)
    assert "Who: rank 0 at a.py:1 in f; rank 1 at b.py:2 in g" in text
    assert "rank 0: a.py:1 f" in text and "rank 1: b.py:2 g" in text
    assert "</code> on rank 0; <code" in render_html(found)
    alone = replace(found, findings=[replace(first, ranks=[0, 1], where=lines[:1])])
    assert "Who: ranks 0, 1, at a.py:1 in f" in shown(alone)


def test_the_only_rank_recorded_is_named_as_such():
    unhealthy = samples.unhealthy()
    job = replace(unhealthy.job, world_size=2, ranks_seen=[1])
    first, *_ = unhealthy.findings
    found = replace(
        unhealthy, job=job, findings=[replace(first, ranks=None)], facts={"job": {"ranks_seen": 1}}
    )
    assert "Who: rank 1 (the only rank recorded)" in shown(found)
    assert "rank 1 (the only rank recorded)" in render_html(found)
    assert "only rank" not in shown(replace(found, job=replace(job, world_size=1)))


def test_an_estimate_and_a_bound_are_marked_and_explained():
    unhealthy = samples.unhealthy()
    first, *_ = unhealthy.findings
    both = [
        replace(first, rule="gpu/no-tensor-cores", estimated=True),
        replace(first, rule="gpu/launch-bound", at_most=True),
    ]
    text = shown(replace(unhealthy, findings=[first, *both]))
    assert (
        "≈ 44.8" in text
        and "≤ 44.8" in text
        and "≈: estimate under an assumption; `-v` states it" in " ".join(text.split())
        and "≤: upper bound" in text
    )
    assert "about 44.8 ms" in render_markdown(replace(unhealthy, findings=both))


def test_a_large_estimated_speedup_is_told_once():
    unhealthy = samples.unhealthy()
    first = replace(unhealthy.findings[0], estimated=True, speedup_if_fixed=14.0, speedup_if_fixed_range=None)
    assert "a speed-up of over 10×." in " ".join(shown(replace(unhealthy, findings=[first])).split())
    first = replace(first, speedup_if_fixed=2.0)
    assert "a speed-up of about 2.00×." in " ".join(shown(replace(unhealthy, findings=[first])).split())


@pytest.mark.parametrize("total_s", [1.5, 18.2, 192.0, 7300.0])
def test_the_cost_of_a_run_is_not_repeated_below_a_headline_with_it(total_s):
    unhealthy, total = samples.unhealthy(), ms(1000 * total_s)
    once = replace(unhealthy.findings[0], costs_ms_per_step=None, costs_s=total_s, share_of_run=0.3)
    told = []
    for headline in (f"Rank 1 pauses for {total}: 30 % of the run", f"Rank 1 pauses after 3{total}"):
        verdict = replace(unhealthy.verdict, headline=headline)
        told.append(cost_sentence(replace(unhealthy, verdict=verdict, findings=[once])))
    assert told[0] == "" and told[1].endswith("of this run, 30 % of its wall time.")


def test_a_share_of_the_profiled_steps_says_so():
    unhealthy = samples.unhealthy()
    first, *_ = unhealthy.findings
    found = replace(
        unhealthy,
        findings=[replace(first, share=0.5, costs_ms_per_step=40.0)],
        speaker=Speaker("window", ""),
        steps=replace(unhealthy.steps, mean_ms=51.2),
    )
    assert "50 % of the 80.0 ms that a step takes in the profiler window" in " ".join(shown(found).split())
    same = replace(found, steps=replace(found.steps, mean_ms=80.5))
    assert "50 % of the step time" in " ".join(shown(same).split())


def test_a_reduction_per_parameter_is_explained_on_the_first_screen():
    for count, says in ((404.0, True), (4.0, False)):
        facts = {"communication": {"operations_per_step": {"allreduce": count}}}
        text = " ".join(shown(replace(samples.unhealthy(), facts=facts)).split())
        assert ("each adds latency; with the buckets of DDP there would be few" in text) == says


def test_a_unit_is_not_repeated():
    row = Evidence("communication.collectives_per_step", 404.0, "per step", "Collectives per step")
    assert evidence_value(row) == "404"
    assert evidence_value(replace(row, means="Barriers", value=1.0)) == "1 per step"
