"""The flame graphs of a report: whose samples they are, and what is wider than elsewhere."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.flames import flames
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.sourcelines import samples_of
from ddpdoctor.measure.steplog import RankLog, Step
from ddpdoctor.measure.summary import RankSummary
from ddpdoctor.report.charts.flames import flames as charts
from ddpdoctor.rundir.reader import RankRecord
from tests.measure.made import MS, on, simple

MAIN, LOAD, LOG = Where("train.py", 90, "main"), Where("train.py", 57, "load"), Where("train.py", 61, "log")
CYCLES, STEP_MS = 40, 20


def log_of(rank, slow=(), every_ms=1):
    """Samples each ms: half of a step in ``load``; in ``slow`` steps the other half in ``log``."""
    length_ns = STEP_MS * 1_000_000
    steps = tuple(
        Step(number, number * length_ns, (number + 1) * length_ns, (), (), 0, 0) for number in range(CYCLES)
    )
    where = {0: MAIN, 1: LOAD.called_from(MAIN.stack), 2: LOG.called_from(MAIN.stack)}
    rows = [
        (
            int((number * STEP_MS + ms + 0.5) * MS),
            1 if ms < STEP_MS / 2 else 2 if number in slow else 0,
            -1,
            0,
        )
        for number in range(CYCLES)
        for ms in range(0, STEP_MS, every_ms)
    ]
    samples = np.array(rows, np.int64).reshape(-1, 4)
    return RankLog(rank, RankRecord("", rank, {}), steps, samples=samples, sample_where=where)


def summaries(*late_ms):
    return [RankSummary(rank=rank, late_ms=ms) for rank, ms in enumerate(late_ms)]


def found(graph, slow, world=2, late=5.0):
    logs = [log_of(rank, slow if rank == 0 else ()) for rank in range(world)]
    return flames(graph, samples_of(logs), summaries(late, *[0.0] * (world - 1)))


def test_the_late_steps_of_the_slowest_rank_beside_its_other_ones_and_a_usual_rank():
    slow = set(range(0, CYCLES, 4))
    graph = simple(3, CYCLES, host=on(0, 3, 5.0, CYCLES, every=4))
    late, other, usual = found(graph, slow, world=3)
    assert (late.rank, late.which, late.steps) == (0, "late steps", 10)
    assert (other.rank, other.which, other.steps) == (0, "other steps", 30)
    assert (usual.which, usual.steps) == ("all steps", CYCLES) and usual.rank in (1, 2)
    assert late.against == "rank 0, other steps" and late.mean_ms == STEP_MS
    by_line = {late.places[frame.place].function: frame for frame in late.frames}
    assert by_line["main"].ms == STEP_MS and by_line["main"].depth == 0
    assert by_line["log"].ms == pytest.approx(10) and by_line["log"].beyond_ms == pytest.approx(10)
    assert by_line["load"].ms == pytest.approx(10) and by_line["load"].beyond_ms == pytest.approx(0)
    assert all(frame.beyond_ms is None for frame in (*other.frames, *usual.frames))


def test_late_in_every_step_it_is_compared_with_the_usual_rank():
    graph = simple(2, CYCLES, host=on(0, 2, 5.0))
    slow, usual = found(graph, set(range(CYCLES)))
    assert (slow.rank, slow.which, slow.against) == (0, "all steps", "rank 1, all steps")
    assert usual.rank == 1 and usual.against is None


def test_frames_lie_within_their_callers_and_beside_each_other():
    (late, *_) = found(simple(2, CYCLES, host=on(0, 2, 5.0)), set(range(CYCLES)))
    rows = {}
    for frame in late.frames:
        rows.setdefault(frame.depth, []).append((frame.start_ms, frame.start_ms + frame.ms))
    for spans in rows.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(ordered))
    for depth in range(1, len(rows)):
        for start, end in rows[depth]:
            assert any(a - 1e-3 <= start and end <= b + 1e-3 for a, b in rows[depth - 1])


def test_few_samples_and_one_rank_draw_no_more_than_there_is():
    few = [log_of(rank, every_ms=STEP_MS * 100) for rank in range(2)]
    graph = simple(2, CYCLES)
    assert flames(graph, samples_of([log_of(0, every_ms=5), few[1]]), summaries(1.0, 0.0))
    silent = [RankLog(rank, RankRecord("", rank, {}), few[0].steps) for rank in range(2)]
    assert flames(graph, samples_of(silent), summaries(1.0, 0.0)) == []
    assert len(flames(simple(1, CYCLES), samples_of([log_of(0)]), summaries(0.0))) == 1


def test_the_innermost_line_stands_below_the_users():
    log = log_of(0)
    samples = log.samples.copy()
    samples[:, 2] = 3
    where = {**log.sample_where, 3: Where("/venv/site-packages/torch/x.py", 8, "_run")}
    found = samples_of([RankLog(0, log.record, log.steps, samples=samples, sample_where=where)])
    deepest = max((stack.with_innermost for stack in found.stacks), key=len)
    assert [line.function for line in deepest] == ["_run", "load", "main"]
    assert all(type(line) is CodeLine for line in deepest)


def test_of_a_recorded_run_they_reach_the_report():
    diagnosis = analyze("fixtures/slow-data-one-rank", Options(cache=False, jobs=1))
    assert diagnosis.flames[0].rank == 1, "the late one"
    chart = charts(diagnosis)[0]
    assert chart.compared and "1" in chart.title
    widest = max((bar for bar in chart.bars if bar.heat), key=lambda bar: bar.width)
    assert "more than rank 0" in widest.title
