"""What is said of a late rank, beside what its steps recorded: planted contradictions, and none where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.costs import confirmed_by_events
from ddpdoctor.measure.graph import OperatorShares
from ddpdoctor.measure.metrics import timeline
from ddpdoctor.measure.steplog import Activities
from ddpdoctor.measure.taxonomy import COMPONENTS, INDEX, Component, LateCause
from tests.measure.made import MS, graph_of, late_of, on, simple
from tests.measure.recorded import Job, record

WORLDS = (2, 3, 8)


def drawn(world, cycles=30, jitter=0.02, **components_ms):
    """[cycles, R, C] ns of forward, backward and what is added."""
    work = np.zeros((cycles, world, len(COMPONENTS)))
    for name, ms in {"forward": 5.0, "backward": 10.0, "optimizer": 1.0, **components_ms}.items():
        work[..., INDEX[name]] = np.asarray(ms, float) * MS
    return work * np.random.default_rng(1).lognormal(0.0, jitter, work.shape)


def said(world, ms, cycles=30, every=1):
    """[N, 1, R] ns that rank 0 is said to take longer."""
    return [on(0, world, ms, cycles, every) * MS]


@pytest.mark.parametrize("world", WORLDS)
def test_more_in_a_gap_is_no_longer_computation(world):
    found = confirmed_by_events(
        drawn(world, host=on(0, world, 12.0)[:, 0]), LateCause.COMPUTE, said(world, 12.0), [0]
    )
    assert found["late_ms"] == 12 and abs(found["drawn_ms"]) < 1, found
    assert found["drawn_as"] == LateCause.HOST


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_longer_phases_bear_it(world, where):
    base = {"forward": 5.0, "backward": 10.0}[where]
    found = confirmed_by_events(
        drawn(world, **{where: base + on(0, world, 12.0)[:, 0]}), LateCause.COMPUTE, said(world, 12.0), [0]
    )
    assert found["drawn_ms"] == pytest.approx(12, abs=1) and found["drawn_as"] is None


def test_a_rank_that_is_slower_in_phases_and_gaps_alike():
    """The larger part of it lies in the gap, and is the same computation, slower."""
    slow = 1 + 0.4 * np.eye(4)[0]
    work = drawn(4, forward=5 * slow, backward=10 * slow, optimizer=slow, host=40 * slow, jitter=0.0)
    found = confirmed_by_events(work, LateCause.COMPUTE, said(4, 22.0), [0])
    assert found["drawn_ms"] == pytest.approx(22, abs=0.1)


def test_only_the_steps_count_in_which_it_happens():
    now_and_then = on(0, 2, 50.0, 30, every=10)[:, 0]
    work = drawn(2, data=now_and_then)
    assert confirmed_by_events(work, LateCause.DATA, said(2, 50.0, every=10), [0])[
        "drawn_ms"
    ] == pytest.approx(50, abs=3)
    other_steps = drawn(2, data=np.roll(now_and_then, 5, axis=0))
    found = confirmed_by_events(other_steps, LateCause.DATA, said(2, 50.0, every=10), [0])
    assert found["drawn_ms"] == 0 and found["drawn_as"] is None, "no kind of work shows it"


def test_nothing_is_asked_where_no_phase_is_marked_or_nothing_is_known():
    unmarked = drawn(2, forward=0.0, backward=0.0, host=30.0 + on(0, 2, 12.0)[:, 0])
    assert confirmed_by_events(unmarked, LateCause.COMPUTE, said(2, 12.0), [0]) == {}
    assert confirmed_by_events(drawn(2), LateCause.UNKNOWN, said(2, 12.0), [0]) == {}
    assert confirmed_by_events(drawn(2), LateCause.DATA, said(2, 0.0), [0]) == {}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "component", ["data", "copy", "forward", "optimizer", "host", "collection", "checkpoint"]
)
@pytest.mark.parametrize("jitter", [0.02, 0.2])
def test_the_measure_itself_is_borne(world, component, jitter):
    base = {"forward": 5.0}.get(component, 0.0)
    late = late_of(simple(world, jitter=jitter, **{component: base + on(world - 1, world, 6.0)}))
    assert late
    for cause, cost in late.items():
        if cause != "total":
            assert cost.late_ms is not None and cost.drawn_ms >= 0.5 * cost.late_ms, (cause, cost)


def in_a_gap(rank, step):
    """Rank 0 does something of its own."""
    return {"host": 12.0 + step % 3} if rank == 0 else {}


def test_the_marks_of_logs_are_summed_by_themselves(tmp_path):
    run = record(tmp_path / "run", Job(world=3, steps=30, extra=in_a_gap))
    diagnosis = analyze(str(run), Options(cache=False, jobs=1))
    late = diagnosis.facts["late"]["host"]
    assert late["ranks"] == [0] and late["drawn_ms"] == pytest.approx(late["late_ms"], rel=0.1)
    assert "rank-imbalance/host-work" in {finding.rule for finding in diagnosis.findings}
    assert not any("contradict" in entry.why for entry in diagnosis.skipped)


def test_a_finding_that_the_chart_contradicts_is_withheld(tmp_path, monkeypatch):
    """All of the time in a gap is taken for computation of the phases, as a wrong measure would."""
    wrong = OperatorShares(
        1.0, {Component.LOSS: 0.0, Component.OUTSIDE: 0.0}, phases_marked=False, measured=True
    )
    shares = "ddpdoctor.measure.graph.primary.operator_shares"
    monkeypatch.setattr(shares, lambda logs, _: dict.fromkeys(range(len(logs)), wrong))
    run = record(tmp_path / "run", Job(world=3, steps=30, data=0.2, extra=in_a_gap))
    diagnosis = analyze(str(run), Options(cache=False, jobs=1))
    assert diagnosis.facts["late"]["compute"]["drawn_as"] == "host"
    assert "rank-imbalance/slow-compute" not in {finding.rule for finding in diagnosis.findings}
    why = {entry.rule: entry.why for entry in diagnosis.skipped}["rank-imbalance/slow-compute"]
    assert "they show most of it outside forward, backward and optimizer" in why and "rank 0" in why
    assert any("slow-compute was withheld" in note for note in diagnosis.notes)
    assert not diagnosis.healthy and diagnosis.verdict.headline.startswith("Cannot tell"), diagnosis.verdict
    rank_0 = [span.kind for span in diagnosis.timeline.spans if span.rank == 0]
    assert "host" not in rank_0, "the chart leaves the gap blank"


def test_the_step_that_is_drawn_is_typical_in_what_each_rank_does():
    """A step may be as long as usual because another rank was late for another reason."""
    cycles = 21
    late = np.zeros((cycles, 1, 2))
    late[:, 0, 0] = 12 + np.linspace(-2, 2, cycles)
    data = np.zeros((cycles, 1, 2))
    # The one step of exactly the median length: rank 0 is on time, and rank 1 waits for data instead.
    middle = cycles // 2
    data[middle, 0, 1], late[middle, 0, 0] = 12.0, 0.0
    graph = simple(2, cycles, host=late, data=data)
    lengths = graph.groups[0].duration
    assert np.abs(lengths - np.median(lengths)).argmin() == middle
    unmarked = SimpleNamespace(steps=[1], start_ns=0, activities=Activities(0, {}))
    drawn = timeline(graph, [unmarked, unmarked], [])
    assert drawn is not None and drawn.step != middle and abs(drawn.step - middle) <= 2


@pytest.mark.parametrize("world", [5, 8])
def test_two_ranks_that_are_late_at_once_cost_what_one_does(world):
    late = on(0, world, 20.0, 30) + on(1, world, 20.0, 30)
    job = simple(world, 30, host=late)
    awake = graph_of(*job.groups, cpu_ms=[16.0 + 18.0 * (rank < 2) for rank in range(world)])
    cost = late_of(awake)["host"]
    assert (cost.ranks, cost.late_ms, cost.drawn_ms) == ([0, 1], pytest.approx(20.0), pytest.approx(20.0))
    assert cost.ms_per_step == pytest.approx(20.0) and cost.awake_ms == pytest.approx(18.0)
