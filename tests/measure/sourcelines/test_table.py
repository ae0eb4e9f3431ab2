"""Samples are placed in steps and events all at once, as one would place each by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.sourcelines.counts import SampleCounts, count_samples, excess_samples
from ddpdoctor.measure.sourcelines.table import EVENTS, samples_of
from ddpdoctor.measure.steplog import Event, RankLog, Step
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir.reader import RankRecord
from ddpdoctor.rundir.stepevents import EventKind

MS = 1_000_000
STEP_NS, AFTER_COLLECTION_NS = 100 * MS, 2 * MS
KINDS = [*EventKind]
INSIDE = {
    *(kind for kinds in EVENTS.values() for kind in kinds),
    EventKind.COLLECTIVE,
    EventKind.BARRIER,
    EventKind.WAIT,
    EventKind.LOAD,
}
ASKED = [
    [Component.HOST],
    [Component.FORWARD],
    [Component.DATA, Component.EPOCH_START],
    [Component.COLLECTION],
    [Component.BACKWARD, Component.HOST],
]


def log_of(seed: int, samples: int = 400) -> RankLog:
    """Steps with gaps between them, events that overlap and leave their step, samples in all of it."""
    drawn = random.Random(seed)
    steps = tuple(
        Step(
            number,
            start := number * 2 * STEP_NS + 10**12,
            start + STEP_NS,
            tuple(
                Event(kind.value, drawn.randrange(-STEP_NS // 4, STEP_NS), drawn.randrange(STEP_NS // 3))
                for kind in drawn.choices(KINDS, k=drawn.randrange(8))
            ),
            (),
            None,
            None,
        )
        for number in range(20)
    )
    times = sorted(drawn.randrange(10**12 - STEP_NS, 10**12 + 41 * STEP_NS) for _ in range(samples))
    rows = [(at, 1, 1, drawn.choice((0, 0, 1_500_000, 7_000_000))) for at in times]
    return RankLog(0, RankRecord("", 0, {}), steps, samples=np.array(rows, np.int64).reshape(-1, 4))


def one_by_one(log: RankLog, components: list[Component]) -> list[int]:
    """Of which moments those are that are of this kind of work."""
    found = []
    for taken_ns, _, _, held_ns in log.samples.tolist():
        due_ns = taken_ns - (held_ns if 1_000_000 <= held_ns < 5_000_000 else 0)
        step = next((step for step in log.steps if step.start_ns <= due_ns < step.end_ns), None)
        if step is None:
            continue
        moment = due_ns - step.start_ns
        covering = {
            event.kind
            for event in step.events
            if event.start_ns
            <= moment
            < event.end_ns + (AFTER_COLLECTION_NS if event.kind == EventKind.COLLECTION else 0)
        }
        inside = covering & {kind.value for kind in INSIDE}
        wanted = {kind.value for component in components for kind in EVENTS.get(component, ())}
        in_forward = any(
            event.kind == EventKind.FORWARD and event.start_ns <= moment < event.end_ns
            for event in step.events
        )
        else_wanted = Component.FORWARD in components if in_forward else Component.HOST in components
        if inside & wanted if inside else else_wanted:
            found.append(due_ns)
    return found


@pytest.mark.parametrize("components", ASKED, ids=lambda asked: "+".join(asked))
def test_each_sample_is_of_the_work_at_its_moment(components):
    counts = 0
    for seed in range(20):
        log = log_of(seed)
        (rows,) = samples_of([log]).ranks
        expected = one_by_one(log, components)
        assert rows.time_ns[(rows.step >= 0) & rows.while_doing(components)].tolist() == expected
        counts += len(expected)
    assert counts > 10


def test_a_log_without_steps_or_samples():
    for log in (log_of(1, samples=0), RankLog(0, RankRecord("", 0, {}), samples=log_of(1).samples)):
        (rows,) = (samples := samples_of([log])).ranks
        assert not rows.in_steps(rows.steps_of(range(20))).any() and samples.stacks == []
    assert samples_of([]).ranks == []


def test_lines_of_two_numbers_that_show_the_same_are_counted_together():
    """Frames of torch's are not told apart, and a log may number a line twice."""
    log = log_of(1)
    where = {1: Where("train.py", 8, "main"), 2: Where("/site-packages/torch/a.py", 1, "f")}
    where |= {3: Where("/site-packages/torch/b.py", 2, "g"), 4: Where("train.py", 8, "main")}
    samples = log.samples.copy()
    samples[:, 1:3] = np.array([[1, 2], [1, 3], [4, 2], [4, 3]])[np.arange(len(samples)) % 4]
    samples[:, 3] = np.where(np.arange(len(samples)) % 3, 7 * MS, 3 * MS // 2)
    log = replace(log, samples=samples, sample_where=where)
    found = count_samples(samples_of([log]), [0], [Component.HOST], range(20), [1.0])
    assert found.at == {CodeLine("train.py", 8, "main"): found.samples} and found.samples > 20


def held_log(samples, burst_samples=(), burst_ns=0):
    """Ten steps without events, three of them before the samples; two lines of ``slow`` are called where ``main`` stands before line 57."""
    slow = [Where("train.py", line, "slow", callers=(CodeLine("train.py", 55, "main"),)) for line in (18, 19)]
    where = {0: slow[0], 1: slow[1], 2: Where("train.py", 57, "main")}
    steps = tuple(
        Step(n, 10**12 + (n - 3) * STEP_NS, 10**12 + (n - 2) * STEP_NS, (), (), None, None) for n in range(10)
    )
    rows, looks = (
        np.array([(10**12 + at, line, line, waited) for at, line, waited in some], np.int64).reshape(-1, 4)
        for some in (samples, burst_samples)
    )
    return RankLog(
        0,
        RankRecord("", 0, {}),
        steps,
        samples=rows,
        sample_where=where,
        burst_samples=looks,
        burst_ns=burst_ns,
    )


def by_line(samples, weights):
    return {stack[0].line: weight for stack, weight in samples.by_stack(weights).items()}


def test_a_sample_that_shows_what_followed_is_shared_by_the_lines_that_may_have_kept_the_lock():
    asked = [(n * MS, line, 6 * MS) for n, line in enumerate((0, 0, 0, 1), start=20)]
    samples = samples_of([held_log([*asked, *((n * MS, 2, 2 * MS) for n in range(30, 38))])])
    weights = samples.weights(0)
    assert by_line(samples, weights.seen) == {18: 3, 19: 1}
    assert by_line(samples, weights.before) == {18: 6, 19: 2}
    assert not weights.following.any() and weights.without_bursts.sum() == 12


def test_where_no_line_was_seen_to_keep_the_lock_a_sample_stays_at_the_line_that_followed():
    samples = samples_of([held_log([(n * MS, 2, 2 * MS) for n in range(30, 38)])])
    assert by_line(samples, samples.weights(0).following) == {57: 8}
    assert by_line(samples, samples.weights(0).without_bursts) == {57: 8}


def test_of_looks_that_go_on_waiting_the_first_stands_for_what_python_lets_it_wait():
    looks = [(20 * MS, 0, 6 * MS), (26 * MS, 0, 5 * MS), (50 * MS, 0, 6 * MS)]
    samples = samples_of([held_log([(n * MS, 2, 0) for n in range(100)], looks, burst_ns=50 * MS)])
    assert by_line(samples, samples.weights(0).burst) == {18: pytest.approx(2 * 5 * 100 / 50)}
    assert samples.weights(0).without_bursts.sum() == 100


def test_who_waited_beyond_the_end_of_a_step_is_of_that_step():
    (rows,) = samples_of([held_log([(STEP_NS + MS, 2, 2 * MS)])]).ranks
    assert rows.step.tolist() == [3]


def test_what_stands_out_does_so_of_the_counting_error_of_both():
    """Of others that were looked at for a quarter of the time, each sample counts for four, and its error too."""
    first, second, third = (CodeLine("train.py", number, "main") for number in (7, 8, 9))
    mine = SampleCounts({first: 83.0, second: 90.0, third: 80.0}, {}, {}, {}, 0, 0, 40.0, 1)
    theirs = SampleCounts(dict.fromkeys(mine.at, 12.0), {}, {}, {}, 0, 0, 10.0, 1)
    # Two standard deviations are 2 * sqrt(83 + 16 * 12) = 33.2 for the first.
    assert excess_samples(mine, theirs, 1) == {first: 35.0, second: 42.0}


def test_of_hundreds_of_samples_spread_over_hundreds_of_lines_none_is_probable():
    """The probabilities of so many samples are below the smallest floating-point number."""
    lines = [CodeLine("train.py", number, "main") for number in range(500)]
    mine = SampleCounts(dict.fromkeys(lines, 2.0), {}, {}, {}, 0, 0, 40.0, 1)
    theirs = SampleCounts({}, {}, {}, {}, 0, 0, 40.0, 1)
    assert excess_samples(mine, theirs, 1) == {}
