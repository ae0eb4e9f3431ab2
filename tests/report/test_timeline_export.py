"""The Chrome trace of known tables, and the rules of its format."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import polars as pl
import pytest

from ddpdoctor.diagnose.diagnosis import Coverage, Finding
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.measure.export import COLLECTIVES, EVENTS, STEPS
from ddpdoctor.report.timeline_export import (
    chrome_trace,
    cut_steps,
    fitting_steps,
    write_tables,
    write_timeline,
)

EPOCH = 1_795_000_000_000_000_000
MS = 1_000_000
HOSTILE = "</script>\"'\u2028 name"


def tables(steps=3, ranks=2):
    """Steps of 10 ms: 6 ms of computation; rank 0 arrives at 6 ms, rank 1 at 8 ms, both end at 9 ms."""
    rows = {"steps": [], "collectives": [], "events": []}
    for rank in range(ranks):
        for step in range(steps):
            at = EPOCH + step * 10 * MS
            arrival = at + (6 + 2 * (rank == ranks - 1)) * MS
            # Neighbouring steps overlap by a few ns, as a hook's stamps do.
            rows["steps"].append(
                (rank, "step-log", step, at, at + 10 * MS + 40, "profiled" if step == 1 else "")
            )
            last = at + 8 * MS
            rows["collectives"].append(
                (
                    rank,
                    "step-log",
                    step,
                    "gradients",
                    HOSTILE,
                    "0",
                    arrival,
                    last,
                    at + 9 * MS,
                    last - arrival,
                    MS,
                    1e6,
                )
            )
            rows["events"].append((rank, "step-log", step, "compute", "forward", at, 3 * MS))
            rows["events"].append(
                (rank, "step-log", step, "compute", "backward", at + 3 * MS, arrival - at - 3 * MS)
            )
    schemas = {"steps": STEPS, "collectives": COLLECTIVES, "events": EVENTS}
    return {name: pl.DataFrame(rows[name], schema=schemas[name], orient="row") for name in rows}


def finding(**changes):
    values = {
        "rule": "x/y",
        "severity": "critical",
        "title": HOSTILE,
        "coverage": Coverage(3, 2),
        "ranks": [1],
    }
    return Finding(**values | changes)


def check_format(trace):
    """Required keys, finite times, durations of more than 0, and tracks on which nothing overlaps."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    ends, named = defaultdict(float), set()
    owner = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int) and event["pid"] > 0
        assert isinstance(event["tid"], int) and event["tid"] > 0
        assert owner.setdefault(event["tid"], event["pid"]) == event["pid"]
        track = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert event["args"].keys() == {"sort_index"} if "sort" in event["name"] else {"name"}
            named.add(track) if event["name"] == "thread_name" else None
            continue
        assert track in named, "a name stands before the slices of its track"
        assert event["ts"] >= 0 and event["dur"] > 0 and isinstance(event["cat"], str)
        assert event["ts"] >= ends[track] - 1e-3
        ends[track] = event["ts"] + event["dur"]
    return trace["traceEvents"]


def slices(events, pid, category):
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["cat"] == category]


def test_waiting_and_transfer_are_separate_slices():
    events = check_format(chrome_trace(tables(), [], {0: "node1"}))
    waits, transfers = (slices(events, 1, f"comm_{kind}") for kind in ("wait", "transfer"))
    assert [(e["ts"], e["dur"]) for e in waits] == [(6000.0, 2000.0), (16000.0, 2000.0), (26000.0, 2000.0)]
    assert [(e["ts"], e["dur"]) for e in transfers] == [
        (8000.0, 1000.0),
        (18000.0, 1000.0),
        (28000.0, 1000.0),
    ]
    assert slices(events, 2, "comm_wait") == [], "the last rank waits for nobody"
    assert len(slices(events, 2, "comm_transfer")) == 3
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0 on node1", "rank 1"}
    assert [e["args"] for e in slices(events, 1, "step")] == [{}, {"marks": "profiled"}, {}]


def test_unmatched_collectives_are_marked():
    found = tables(1, 1)
    nothing = [pl.lit(None, pl.Int64).alias(name) for name in ("last_arrival_ns", "wait_ns", "transfer_ns")]
    found["collectives"] = found["collectives"].with_columns(nothing)
    events = check_format(chrome_trace(found, [], {}))
    (only,) = slices(events, 1, "communication")
    assert only["name"].endswith("not matched") and only["dur"] == 1000.0


def test_work_that_overlaps_takes_a_second_track():
    found = tables(1, 1)
    events = found["events"].with_columns(pl.lit(EPOCH).alias("start_ns"))
    found["events"] = events
    labels = [
        e["args"]["name"] for e in check_format(chrome_trace(found, [], {})) if e["name"] == "thread_name"
    ]
    assert labels == ["step", "compute", "compute 2", "communication"]


def test_host_log_and_device_events_have_separate_tracks():
    found = tables(1, 1)
    device = found["events"].with_columns(pl.lit("trace").alias("source"))
    found["events"] = pl.concat([found["events"], device])
    labels = [
        e["args"]["name"] for e in check_format(chrome_trace(found, [], {})) if e["name"] == "thread_name"
    ]
    assert labels == ["step", "host log", "compute", "communication"]


def test_findings_are_a_process_over_their_steps():
    events = check_format(chrome_trace(tables(), [finding(steps=[1, 2]), finding(steps=[70, 80])], {}))
    (only,) = slices(events, 3, "finding")
    assert (only["ts"], only["dur"]) == (10_000.0, pytest.approx(20_000.0, abs=0.1))
    assert only["args"]["ranks"] == "rank 1" and only["name"] == HOSTILE
    place = next(e for e in events if e["pid"] == 3 and e["name"] == "process_sort_index")
    assert place["args"]["sort_index"] == 0


def test_times_keep_their_nanoseconds():
    found = tables(1, 1)
    found["events"] = found["events"].with_columns(pl.col("start_ns") + 7)
    trace = chrome_trace(found, [], {})
    (first, _) = [e for e in trace["traceEvents"] if e.get("cat") in ("forward", "backward")]
    assert int(trace["otherData"]["origin_epoch_ns"]) + round(first["ts"] * 1e3) == EPOCH + 7


def test_nothing_recorded_gives_an_empty_trace():
    empty = {name: table.clear() for name, table in tables().items()}
    assert chrome_trace(empty, [finding()], {})["traceEvents"] == []


def test_cutting_keeps_events_of_the_chosen_steps():
    cut = cut_steps(tables(10), 4, 5)
    assert cut["steps"]["step"].unique().to_list() == [4, 5]
    assert cut["collectives"]["step"].unique().to_list() == [4, 5]
    assert len(cut["events"]) == 2 * 2 * 2 + 2, "and the first event of step 6, which begins within 40 ns"
    assert all(len(table) == 0 for table in cut_steps(tables(3), 50, 60).values())


def test_long_runs_are_cut_to_neighbouring_steps_from_the_middle():
    assert fitting_steps(tables(100)) is None
    first, last = fitting_steps(tables(100), max_slices=100)
    assert 40 < first < last < 60
    cut = cut_steps(tables(100), first, last)
    assert sum(map(len, cut.values())) <= 100


def test_files_are_whole_and_compressed_by_name(tmp_path):
    write_timeline(tables(), [finding()], {}, tmp_path / "t.json")
    write_timeline(tables(), [finding()], {}, tmp_path / "t.json.gz")
    plain = json.loads((tmp_path / "t.json").read_bytes())
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())) == plain
    check_format(plain)
    files = write_tables(tables(), tmp_path / "deep" / "er", "parquet")
    assert [file.name for file in files] == ["steps.parquet", "collectives.parquet", "events.parquet"]
    assert pl.read_parquet(files[1]).equals(tables()["collectives"])
    (tmp_path / "file").write_text("")
    with pytest.raises(DdpDoctorError, match="is a file: name another folder"):
        write_tables(tables(), tmp_path / "file", "parquet")


def test_lateness_is_drawn_up_to_the_arrival():
    trace = chrome_trace(tables(ranks=4), [], {})
    late = [event for event in trace["traceEvents"] if event.get("cat") == "late"]
    assert {event["pid"] for event in late} == {4}, "the last rank's process"
    assert [(event["ts"], event["dur"]) for event in late] == [(6e3 + 1e4 * step, 2e3) for step in range(3)]
    assert late[0]["args"] == {"late_ms": 2.0, "step": 0}


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_progress_of_writing_a_timeline(tmp_path, monkeypatch, name):
    monkeypatch.setattr("ddpdoctor.report.timeline_export._CHUNK_BYTES", 1 << 12)
    told = []
    write_timeline(tables(steps=40, ranks=4), [], {}, tmp_path / name, told.append)
    assert len(told) >= 4 and told == sorted(told) and told[0] == 0 and 0.7 < told[-1] < 1
    data = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)["traceEvents"]
    assert events == chrome_trace(tables(steps=40, ranks=4), [], {})["traceEvents"]
