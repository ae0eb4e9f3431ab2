"""Runs with known step times: level shifts, and whether the newest run is slower."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest
import samples
from rich.console import Console
from test_compare import diagnosis

from ddpdoctor.report.history import Unread, history
from ddpdoctor.report.json_output import formatted
from ddpdoctor.report.runs_output import (
    chart_of,
    grid_of,
    print_history,
    render_history,
)

DAY_NS = 86_400 * 10**9


def run(day, step_ms, world=2, commit=None):
    made = diagnosis(step_ms, points=60, seed=day, world=world)
    job = msgspec.structs.replace(
        made.job,
        started_ns=day * DAY_NS,
        command=["torchrun", "/home/alice/train.py"],
        environment={} if commit is None else {"GITHUB_SHA": commit},
    )
    return f"runs/{day}", msgspec.structs.replace(made, job=job)


def dated(diagnosis, started_ns, **of_job):
    job = msgspec.structs.replace(diagnosis.job, started_ns=started_ns, **of_job)
    return msgspec.structs.replace(diagnosis, job=job)


def nightly(levels, scatter=0.02, seed=0):
    """Runs with scatter between runs, as on real machines."""
    drawn = np.random.default_rng(seed)
    return [
        run(day, level * (1 + scatter * drawn.standard_normal()), commit=f"{day:040x}")
        for day, level in enumerate(levels, 1)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_a_change_of_ten_per_cent_is_found_at_its_run(seed):
    (job,) = history(nightly([50.0] * 9 + [55.0] * 8, seed=seed), last=5).jobs
    (change,) = job.changes
    assert abs(change.first - 9) <= 1 and change.chance < 0.01
    assert change.ratio == pytest.approx(1.1, abs=0.03)
    assert change.commit == job.runs[change.first].commit and change.source == job.runs[change.first].source


def test_two_changes_are_found():
    (job,) = history(nightly([50.0] * 8 + [60.0] * 8 + [45.0] * 8), last=5).jobs
    assert [change.first for change in job.changes] == [8, 16]


@pytest.mark.extended
def test_the_false_positive_rate_of_changes_is_five_per_cent():
    series = [history(nightly([50.0] * 16, seed=seed), last=5).jobs[0].changes for seed in range(40)]
    assert sum(map(bool, series)) <= 5


def test_few_runs_give_no_change():
    assert history(nightly([50.0] * 3 + [80.0] * 3), last=5).jobs[0].changes == []


def test_jobs_are_separate_and_runs_are_ordered_by_time():
    told = history([run(3, 50.0), run(1, 50.0), run(2, 30.0, world=4)], last=5)
    assert [job.job for job in told.jobs] == [
        "train.py, 2 ranks, batch 32, H100",
        "train.py, 4 ranks, batch 32, H100",
    ]
    assert [each.started for each in told.jobs[0].runs] == [
        "1970-01-02T00:00:00+00:00",
        "1970-01-04T00:00:00+00:00",
    ]


def test_the_newest_run_is_slower_only_if_slower_than_each_compared_run():
    slower = history(nightly([50.0] * 6 + [60.0]), last=5)
    assert slower.jobs[0].slower and slower.regression_percent() == pytest.approx(20, abs=5)
    assert history(nightly([50.0] * 7), last=5).regression_percent() == 0.0
    assert history(nightly([50.0, 62.0] + [50.0] * 3 + [60.0]), last=5).regression_percent() == 0.0, (
        "it was so before"
    )
    assert history(nightly([50.0, 62.0] + [50.0] * 3 + [60.0]), last=3).regression_percent() > 10
    assert history([run(1, 50.0)], last=5).regression_percent() is None


def test_a_run_with_several_reports_counts_once():
    """Otherwise the newest run would be compared with itself."""
    runs = nightly([50.0] * 6 + [60.0])
    again = [(f"{source}/report.html", found) for source, found in runs]
    told = history([each for pair in zip(runs, again, strict=True) for each in pair], last=5)
    assert told == history(runs, last=5)
    assert told.jobs[0].slower


@pytest.mark.parametrize(("state", "word"), [("hangs", "hung"), ("failed", "failed")])
def test_a_newest_run_that_did_not_complete_does_not_pass(state, word):
    *before, (source, newest) = nightly([50.0] * 6 + [40.0])
    stopped = msgspec.structs.replace(newest, facts={**newest.facts, "hang": {"state": state}})
    told = history([*before, (source, stopped)], last=5)
    (job,) = told.jobs
    assert job.why_undecided == f"the newest run, {source}, {word}" and told.regression_percent() == 0.0
    shown = Console(file=io.StringIO(), width=80)
    print_history(told, shown)
    said = " ".join(shown.file.getvalue().split())
    assert f"The newest run, {source}, {word}. The newest run does not count as passed." in said
    assert "not clearly slower" not in said
    assert history([(source, stopped), *[(name, run) for name, run in before]], last=5).jobs[0].why_undecided
    assert history([(source, stopped)], last=5).jobs[0].why_undecided is None, (
        "there is nothing to compare it with"
    )
    later = dated(newest, 10**18)
    assert history([*before, (source, stopped), ("later", later)], last=5).jobs[0].why_undecided is None


def test_the_history_is_in_all_outputs():
    told = history(nightly([50.0] * 9 + [55.0] * 8), last=5, notes=["left out: runs/x: empty"])
    text = io.StringIO()
    print_history(told, Console(file=text, width=80))
    assert "from here" in text.getvalue() and "Note: left out" in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert msgspec.json.decode(formatted(told))["schema"] == "ddpdoctor.history/1"
    page = render_history(told)
    assert "Content-Security-Policy" in page and "from here" in page and "<script" not in page
    assert 'class="line m-change"' in page and "from run 10 on" in page


def test_runs_are_drawn_from_three_on():
    (job,) = history(nightly([50.0, 60.0]), last=5).jobs
    assert chart_of(job) is None
    (job,) = history(nightly([50.0, 60.0, 55.0]), last=5).jobs
    chart = chart_of(job)
    assert chart.marks == [] and len(chart.lines) == 1


def test_wall_time_and_goodput_are_kept_and_shown_where_known():
    source, made = run(1, 50.0)
    accounted = msgspec.structs.replace(made, facts={**made.facts, "run": samples.RUN})
    (job,) = history([(source, accounted), run(2, 50.0)], last=5).jobs
    assert [(each.wall_s, each.goodput) for each in job.runs] == [(40.0, 0.15), (None, None)]
    grid = grid_of(job)
    assert grid.head[3:5] == ["wall time", "goodput"]
    assert [row[3:5] for row in grid.rows] == [["40.0 s", "15 %"], ["–", "–"]]
    (job,) = history([run(2, 50.0)], last=5).jobs
    assert "goodput" not in grid_of(job).head


def test_restarts_are_shown_where_a_run_had_any():
    source, made = run(1, 50.0)
    restarted = msgspec.structs.replace(made, facts={**made.facts, "run": {"restarts": {"count": 2}}})
    (job,) = history([(source, restarted), run(2, 50.0)], last=5).jobs
    grid = grid_of(job)
    column = grid.head.index("restarts")
    assert [row[column] for row in grid.rows] == ["2", "0"]
    assert "restarts" not in grid_of(history([run(2, 50.0)], last=5).jobs[0]).head


@pytest.mark.parametrize(("newest_ms", "word"), [(60.0, "slower"), (50.0, "not clearly slower")])
def test_the_sentence_on_the_newest_run(newest_ms, word):
    text = io.StringIO()
    print_history(history(nightly([50.0] * 6 + [newest_ms]), last=5), Console(file=text, width=200))
    assert f"The newest run is {word} than those before it" in text.getvalue()


def test_texts_of_a_report_are_escaped():
    assert "<img src=x" not in render_history(history([("<img src=x>", samples.hostile())], last=5))


def test_a_newest_run_without_step_time_stays_the_newest_of_its_job():
    *before, (source, newest) = nightly([50.0] * 7)
    newest = msgspec.structs.replace(
        newest,
        steps=msgspec.structs.replace(newest.steps, median_ms=None),
        series=msgspec.structs.replace(newest.series, step_ms=[], steps=[], late_ms=[]),
        facts={},
        job=msgspec.structs.replace(newest.job, device=None, device_names=[]),
    )
    told = history([*before, (source, newest)], last=5)
    (job,) = told.jobs
    assert job.runs[-1].median_ms is None and job.why_undecided
    assert (job.newest_percent, told.regression_percent()) == (None, None)
    shown = Console(file=io.StringIO(), width=80)
    print_history(told, shown)
    assert "newest run, runs/7, has no step time" in " ".join(shown.file.getvalue().split())
    other = run(9, 40.0, world=4)
    assert [len(job.runs) for job in history([*before, other, (source, newest)], last=5).jobs] == [7, 1]


def test_a_newest_run_that_is_still_running_gets_no_verdict():
    *before, (source, newest) = nightly([50.0] * 6 + [80.0])
    running = dated(newest, newest.job.started_ns, end="running")
    told = history([*before, (source, running)], last=5)
    (job,) = told.jobs
    assert job.why_undecided == f"the newest run, {source}, is still running"
    assert not job.slower and told.regression_percent() is None
    over = dated(newest, newest.job.started_ns, end="cut off")
    (job,) = history([*before, (source, over)], last=5).jobs
    assert job.slower and job.why_undecided == f"the newest run, {source}, was cut off"


@pytest.mark.parametrize("step_ms", [50.0, 80.0])
def test_a_run_dated_in_the_future_is_noted_and_not_compared(step_ms):
    now_ns = 7 * DAY_NS
    future = dated(run(9, step_ms)[1], now_ns + 3 * DAY_NS)
    told = history([("later", future), *nightly([50.0] * 6 + [60.0])], last=5, now_ns=now_ns)
    (job,) = told.jobs
    assert job.runs[-1].source == "runs/7" and job.slower, "it does not hide a regression"
    assert job.why_undecided == (
        "a run that may be newer and of this job cannot be compared: later is dated 1970-01-11, which is in the future"
    )
    assert told.notes == [
        "later is dated 1970-01-11, which is in the future: a clock was wrong. The run is not compared."
    ]
    soon = dated(run(9, step_ms)[1], now_ns + DAY_NS // 48)
    (job,) = history([("soon", soon), *nightly([50.0] * 7)], last=5, now_ns=now_ns).jobs
    assert job.runs[-1].source == "soon" and job.why_undecided is None
    other = dated(run(9, step_ms, world=4)[1], now_ns + 3 * DAY_NS)
    told = history([("later", other), *nightly([50.0] * 7)], last=5, now_ns=now_ns)
    assert all(job.why_undecided is None for job in told.jobs), "it is of another job"
    (job,) = history([("later", future), ("latest", dated(future, 20 * DAY_NS))], last=5, now_ns=now_ns).jobs
    assert job.runs[-1].source == "latest", "of runs that are all dated so the last one is the newest"


def test_a_newer_unreadable_run_does_not_pass_for_jobs_it_may_be_of():
    runs = [*nightly([50.0] * 5), run(8, 50.0, world=4), run(9, 50.0, world=4)]

    def undecided(command, started_ns):
        unread = [Unread("bad", command, started_ns, "bad: no rank recorded a step")]
        return [job.why_undecided for job in history(runs, 5, (), unread, now_ns=20 * DAY_NS).jobs]

    train, other = ["torchrun", "/home/bob/train.py"], ["torchrun", "eval.py"]
    why = "a run that may be newer and of this job cannot be compared: bad: no rank recorded a step"
    assert undecided(train, 10 * DAY_NS) == [why, why]
    assert undecided(train, 7 * DAY_NS) == [why, None], "the other job has a newer run"
    assert undecided(other, 10 * DAY_NS) == [None, None]
    assert undecided([], 10 * DAY_NS) == [why, why], "it may be of any job"
    assert undecided([], 7 * DAY_NS) == [None, None], (
        "and would block a job that nobody runs any more for good"
    )
    assert undecided([], None) == [why, why]
    assert undecided(train, 30 * DAY_NS) == [why, why], "its clock was wrong"


def test_a_newer_run_of_an_unknown_job_does_not_pass():
    *before, (source, newest) = nightly([50.0] * 7)
    job = msgspec.structs.replace(
        newest.job, end="ended", settings={}, world_size=None, device=None, device_names=[]
    )
    cut = msgspec.structs.replace(newest, job=job, facts={}, notes=["rank.json cannot be read"])
    told = history([*before, (source, cut)], last=5)
    undecided = {job.job: job.why_undecided for job in told.jobs}
    assert undecided["train.py, 2 ranks, batch 32, H100"] == (
        "a run that may be newer and of this job cannot be compared: runs/7 does not identify its job"
    )
    assert told.notes == ["runs/7: rank.json cannot be read"]
    whole = dated(newest, 8 * DAY_NS, end="ended")
    told = history([*before, (source, cut), ("runs/8", whole)], last=5)
    assert all(job.why_undecided is None for job in told.jobs), "a newer run was judged since"


NO_TIME = "a run that may be newer and of this job cannot be compared: {} has no start time"


def test_the_newest_of_runs_without_a_time_is_unknown():
    """Reports of profiler traces have no start time."""
    one, two = (dated(run(day, 50.0)[1], None) for day in (1, 2))
    (job,) = history([("one", one)], last=5).jobs
    assert job.why_undecided is None, "it is the only one"
    (job,) = history([("one", one), ("two", two)], last=5).jobs
    assert job.why_undecided == NO_TIME.format("two") and job.newest_percent is None
    (job,) = history([*nightly([50.0] * 3), ("one", one)], last=5).jobs
    assert job.why_undecided == NO_TIME.format("one")
    unnamed = dated(run(1, 50.0)[1], None, command=[])
    told = history([*nightly([50.0] * 3), ("one", unnamed)], last=5)
    assert "one does not identify its job" in str(told.jobs[-1].why_undecided), "it may be of any script"
    other = dated(run(1, 50.0, world=4)[1], None)
    told = history([*nightly([50.0] * 3), ("one", other)], last=5)
    assert all(job.why_undecided is None for job in told.jobs), "it is of another job"


def test_a_newer_run_without_step_logs_does_not_pass_for_its_script():
    """Its traces give step times, but no batch size."""
    *before, (source, newest) = nightly([50.0] * 7)
    steps = msgspec.structs.replace(newest.steps, source="trace")
    job = msgspec.structs.replace(newest.job, end="ended", settings={"ddp": {"bucket_cap_mb": 25}})
    lost = msgspec.structs.replace(newest, job=job, steps=steps, facts={})
    undecided = {job.job: job.why_undecided for job in history([*before, (source, lost)], last=5).jobs}
    assert undecided["train.py, 2 ranks, batch 32, H100"] == (
        "a run that may be newer and of this job cannot be compared: runs/7 does not identify its job"
    )
    without = msgspec.structs.replace(lost, steps=newest.steps)
    told = history([*before, (source, without)], last=5)
    assert all(job.why_undecided is None for job in told.jobs), "it has no batch size: it is another job"


def test_a_newer_run_of_an_unknown_script_does_not_pass_for_any_job():
    *before, (source, newest) = nightly([50.0] * 7)
    job = msgspec.structs.replace(newest.job, end="ended", command=[])
    unknown = msgspec.structs.replace(newest, job=job)
    undecided = {job.job: job.why_undecided for job in history([*before, (source, unknown)], last=5).jobs}
    assert undecided["train.py, 2 ranks, batch 32, H100"] == (
        "a run that may be newer and of this job cannot be compared: runs/7 does not identify its job"
    )
    later = ("runs/8", dated(newest, 8 * DAY_NS, end="ended", settings={"ddp": {"bucket_cap_mb": 25}}))
    told = history([*before, (source, unknown), later], last=5)
    assert all(job.why_undecided is None for job in told.jobs), "a newer run was judged since"
