"""Which steps speak for the job: warm-up, evaluation and what the profiler disturbed are set aside."""

from __future__ import annotations

from collections import Counter

import pytest

from ddpdoctor.measure.steplog import Event, RankLog, Step, select_steps
from ddpdoctor.rundir.reader import RankRecord

MS = 1_000_000


def log(lengths_ms, *, rank=0, marks=None, events=None, first=0):
    """One rank's steps of these lengths; ``marks`` and ``events`` by step number."""
    steps, now = [], 0
    for number, length in enumerate(lengths_ms, first):
        end = now + round(length * MS)
        found = (events or {}).get(number, [data()])
        steps.append(Step(number, now, end, tuple(found), tuple((marks or {}).get(number, ())), 0, 0))
        now = end
    return RankLog(rank, RankRecord("", rank, {}), tuple(steps))


def choose_steps(logs):
    """Numbers of the steps to measure, and how many were set aside, by reason."""
    chosen, reasons = select_steps(logs)
    return chosen, dict(Counter(reasons.values()))


def data(loader=0, end=False):
    return Event("data", 0, 1, loader=loader, exhausted=end)


def test_the_first_three_steps_are_warm_up():
    chosen, aside = choose_steps([log([10] * 30)])
    assert chosen == set(range(3, 30)) and aside == {"warm-up": 3}


def test_a_long_warm_up_is_followed_until_it_settles():
    chosen, aside = choose_steps([log([500, 300, 90, 80, 70, 60] + [10] * 40)])
    assert min(chosen) == 6 and aside == {"warm-up": 6}


def test_warm_up_on_one_rank_is_warm_up():
    chosen, _ = choose_steps([log([10] * 30), log([10] * 3 + [99] * 2 + [10] * 25, rank=1)])
    assert min(chosen) == 5


def test_a_job_that_gets_slower_has_not_warmed_up_for_long():
    chosen, _ = choose_steps([log([10] * 10 + [40] * 30)])
    assert chosen == set(range(3, 40))


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_few_steps_are_not_all_warm_up(steps):
    chosen, _ = choose_steps([log([30] + [10] * (steps - 1))])
    assert chosen


def test_a_job_that_died_in_its_second_step_shows_its_start_up_only():
    assert choose_steps([log([30])]) == (set(), {"warm-up": 1})


def test_one_step_from_the_middle_of_a_job_is_measured():
    assert choose_steps([log([30], first=7)]) == ({7}, {})


def test_what_the_profiler_disturbs():
    marks = {
        10: ["profiler_open", "profiled"],
        11: ["profiled"],
        12: ["profiled"],
        13: ["profiler_close"],
        16: ["profiler_save"],
    }
    chosen, aside = choose_steps([log([10] * 30, marks=marks), log([10] * 30, rank=1)])
    assert not chosen & {10, 13, 16} and not chosen & {11, 12}
    assert {14, 18, 29} & chosen >= {18, 29}, "steps after it speak"
    assert aside["disturbed by the profiler"] >= 3


def test_the_profiled_steps_speak_where_there_is_little_else():
    marks = {
        3: ["profiler_open", "profiled"],
        **{n: ["profiled"] for n in range(4, 9)},
        9: ["profiler_close"],
    }
    chosen, _ = choose_steps([log([10] * 10, marks=marks)])
    assert chosen >= set(range(5, 9)) and not chosen & {3, 9}


def test_a_profiler_of_the_user_s_own_counts_as_disturbance():
    chosen, _ = choose_steps([log([10] * 30, marks={n: ["user_profiler"] for n in range(10, 14)})])
    assert not chosen & set(range(10, 14))


def test_evaluation_is_set_aside():
    events = {
        10: [data(), Event("eval", 0, 1, count=4)],
        15: [data(), data(loader=1), data(loader=1)],
        20: [data(), data(loader=1, end=True)],
    }
    chosen, aside = choose_steps([log([10] * 30, events=events)])
    assert not chosen & {10, 15} and 20 in chosen, "the end of a loader gives no batch"
    assert aside["evaluation"] == 2


def test_two_loaders_used_alike_both_train():
    events = {n: [data(loader=n % 2)] for n in range(30)}
    chosen, aside = choose_steps([log([10] * 30, events=events)])
    assert chosen == set(range(3, 30)) and "evaluation" not in aside


def test_steps_missing_on_a_rank():
    logs = [log([10] * 30), log([10] * 22, rank=1), log([10] * 25, rank=2, first=5)]
    chosen, aside = choose_steps(logs)
    assert chosen <= set(range(5, 22)) and aside["missing on a rank"] == 13


def test_nothing_recorded():
    assert choose_steps([]) == (set(), {})
    assert choose_steps([log([]), log([], rank=1)]) == (set(), {})
