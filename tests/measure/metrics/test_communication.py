"""Communication as facts: which recording tells waiting, transfer, and how much of it is hidden."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from ddpdoctor.measure.metrics import communication_facts
from tests.measure.made import on, simple
from tests.measure.traced import windows_of


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """Of two ranks, with an operator each and no collectives: those are in the graphs."""
    folder = tmp_path_factory.mktemp("traces")
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 5.0}
    for rank in range(2):
        text = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": [event]}
        (folder / f"rank{rank}.json").write_text(json.dumps(text))
    return windows_of(folder)


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
    assert facts.refused == "the ends lie too far apart"
