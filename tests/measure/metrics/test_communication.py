"""Communication as facts: which recording tells waiting, transfer, and how much of it is hidden."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure.graph import CycleGroup, Sync
from ddpdoctor.measure.metrics import communication_facts, rank_breakdown, timeline
from ddpdoctor.measure.taxonomy import PARTS, SyncKind
from tests.measure.made import MS, cycles_of, graph_of, on, reductions, simple, work_array


def shown(matched, **arguments):
    """A graph that says how many of its collectives were matched."""
    return replace(simple(2, **arguments), matched=matched)


def test_the_logs_tell_how_long_ranks_wait_and_the_window_all_transfer(windows):
    run = shown(40, transfer_ms=2.0, data=on(1, 2, 6.0))
    window = replace(shown(4, transfer_ms=5.0), source="trace")
    facts = communication_facts(run, window, [], windows, 80.0)
    assert (facts.wait_ms, facts.transfer_ms) == (pytest.approx(3.0), pytest.approx(2.0))
    assert (facts.total_transfer_ms, facts.matched, facts.latency_us) == (pytest.approx(5.0), 40, 80.0)


def test_a_window_of_less_transfer_than_the_run_exposes_does_not_tell_what_is_hidden(windows):
    run, window = shown(40, transfer_ms=5.0), replace(shown(4, transfer_ms=2.0), source="trace")
    facts = communication_facts(run, window, [], windows, None)
    assert (facts.transfer_ms, facts.total_transfer_ms) == (pytest.approx(5.0), None)


def test_where_nothing_was_matched_neither_is_known(windows):
    graph = replace(shown(0), refused="the ends lie too far apart")
    facts = communication_facts(graph, graph, [], windows, None)
    assert (facts.wait_ms, facts.transfer_ms, facts.total_transfer_ms) == (None, None, None)


def computing_beside():
    """Rank 0 computes for 3 of the 4 ms in which it waits, and both do for 1 of the 2 ms of transfer."""
    group = cycles_of(reductions(2), work_array(3, 1, 2, forward=np.array([[6.0, 10.0]])), transfer_ms=2.0)
    beside = np.broadcast_to(np.array([4.0, 1.0]) * MS, (3, 1, 2))
    waiting = np.broadcast_to(np.array([3.0, 0.0]) * MS, (3, 1, 2))
    return replace(group, concurrent_compute=beside, concurrent_compute_in_wait=waiting, on_device=True), (
        0.5,
        1.0,
        2.0,
    )


def groups_at_once():
    """Of two process groups: the second, from 6 to 8 ms, while the first runs from 4 to 9."""
    syncs = [Sync(SyncKind.GRADIENTS, "allreduce", (0, 1), group=name) for name in "ab"]
    at = np.full((1, 1, 2), MS)
    arrival, end = np.concatenate([4 * at, 6 * at], axis=1), np.concatenate([9 * at, 8 * at], axis=1)
    work = work_array(1, 2, 2, forward=np.array([[4.0, 4.0], [0.0, 0.0]])[None])
    sizes = np.full((1, 2), np.nan)
    return CycleGroup(tuple(syncs), np.array([0]), np.zeros((1, 2)), arrival, end, work, sizes), (
        0.0,
        5.0,
        5.0,
    )


def late_for_a_broadcast():
    """Rank 0, the root, is there after 10 ms, rank 1 after 12 and rank 2, for which nobody waits, after 30."""
    syncs = [Sync(SyncKind.BROADCAST, "broadcast", (0, 1, 2), root=0), *reductions(3)]
    work = work_array(3, 2, 3, forward=np.array([[10.0, 12.0, 30.0], [20.0, 18.0, 0.0]])[None])
    return cycles_of(syncs, work, transfer_ms=np.array([[3.0, 0.0]])), (0.0, 3.0, 3.0)


@pytest.mark.parametrize("job", [computing_beside, groups_at_once, late_for_a_broadcast])
@pytest.mark.parametrize("source", ["trace", "step-log"])
def test_wait_and_transfer_are_those_of_the_breakdown(job, source, windows):
    group, (wait_ms, transfer_ms, total_ms) = job()
    graph = replace(graph_of(group), matched=4, source=source)
    hosts = windows * 2
    facts = communication_facts(graph, graph if source == "trace" else None, hosts, hosts, None)
    parts = dict(zip(PARTS, rank_breakdown(graph).mean(axis=0) / MS, strict=True))
    assert (facts.wait_ms, facts.transfer_ms) == (pytest.approx(wait_ms), pytest.approx(transfer_ms))
    assert (parts["comm_wait"], parts["comm_transfer"]) == (facts.wait_ms, facts.transfer_ms)
    assert facts.total_transfer_ms == pytest.approx(total_ms)


def test_of_many_ranks_the_first_the_last_and_the_latest_are_drawn(windows):
    drawn = timeline(replace(simple(40, host=on(30, 40, 6.0)), source="trace"), [], windows * 40)
    assert sorted({span.rank for span in drawn.spans}) == [*range(13), 30, 38, 39]
    assert drawn.note == "16 of 40 ranks shown: first, last and latest."


def test_a_broadcast_is_drawn_as_transfer_once_its_root_is_there(windows):
    group, _ = late_for_a_broadcast()
    drawn = timeline(replace(graph_of(group), source="trace"), [], windows * 2).spans
    assert {(span.kind, span.start_ms, span.duration_ms) for span in drawn if span.rank == 1} == {
        ("comm_transfer", 12.0, 3.0)
    }
