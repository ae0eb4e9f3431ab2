"""HTA on our columns, against HTA on its own, and against our numbers where the definitions are the same."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import logging
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.measure.hta import hta_results, hta_trace
from ddpdoctor.measure.numerics import complement, intersect, subtract, total, union
from ddpdoctor.measure.window import event_union, read_window
from ddpdoctor.report.job_view import hta_tables
from ddpdoctor.trace import classify, find_traces, load_traces
from tests.generator import SMALL, Config, cpu_job, generate

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "traces"
MADE = {
    "made": Config(**SMALL, world_size=2, steps=3),
    "made on CPUs": cpu_job(**SMALL, world_size=1, steps=2),
}
KEPT = tempfile.TemporaryDirectory(prefix="hta")
"""HTA reads the files by itself, too."""
SETS = [
    "made",
    "torchrec/resnet18",
    "torchrec/sst_sleep_pl_dense_after_backward_2",
    "torchrec/sst_long_a2a_optimizer_4",
    "torchrec/sst_long_a2a_optimizer_2__run0",
    "param/dlrm_8rank",
    "hta/two_of_128_sampled",
    "hta/nccl_parser_config",
    "tracelens/mi300_resnet_act_checkpoint",
    "tracelens/mi300_ddp_resnet18",
]
"""In one process, which keeps what it has loaded."""
ANALYSES = ["temporal_breakdown", "overlap", "idle_time", "queue_length", "kernel_launches"]


def needs_hta(test):
    """For ``make test-all``: HTA takes seconds to be imported."""
    missing = pytest.mark.skipif(importlib.util.find_spec("hta") is None, reason="HTA is not installed")
    return pytest.mark.extended(pytest.mark.hta(missing(test)))


@functools.cache
def load(name):
    if name in MADE:
        folder = str(Path(KEPT.name) / name)
        generate(MADE[name], folder)
        return load_traces(list(find_traces([folder]).files), jobs=1).traces
    if not (TRACES / name).exists():
        pytest.skip("the public traces are not here")
    return load_traces(list(find_traces([str(TRACES / name)]).files), jobs=1).traces


@functools.cache
def results_of(name):
    return hta_results(load(name))


def by_rank(records, *fields):
    return {record["rank"]: tuple(record[field] for field in fields) for record in records}


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hta", None)
    monkeypatch.setitem(sys.modules, "hta.common.trace", None)
    with pytest.raises(DdpDoctorError, match=r"pip install '\.\[hta\]' in a checkout of ddpdoctor\.$"):
        hta_results([])


@needs_hta
@pytest.mark.parametrize("name", SETS)
def test_our_overlap_and_idle_time_are_those_of_hta(name):
    traces = load(name)
    results = results_of(name)
    times = by_rank(results["temporal_breakdown"], "kernel_time_us", "idle_time_us", "compute_time_us")
    overlap = by_rank(results["overlap"], "overlap_percent")
    assert len(times) == len(traces)
    for trace in traces:
        window, rank = read_window(trace), trace.meta.rank or 0
        kernels = event_union(
            trace,
            trace.category_mask("kernel")
            & ~np.isin(trace.name, trace.name_ids(classify.is_communication_kernel)),
        )
        comm = union(window.collectives.start, window.collectives.end)
        parts = [window.compute, window.sets["copy"], comm]
        busy = union(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
        idle_ns = total(complement(busy, *window.span))
        span_us, idle_us, compute_us = times[rank]
        assert (window.span[1] - window.span[0]) / 1e3 == pytest.approx(span_us, abs=0.01)
        assert total(kernels) / 1e3 == pytest.approx(compute_us, abs=0.01)
        # Gaps are taken with float64 ends of epoch times in ns, which are 256 ns apart.
        assert idle_ns / 1e3 == pytest.approx(idle_us, rel=3e-4, abs=3)
        # Our computation holds memsets and copies within the device, which HTA counts as memory.
        inside = event_union(
            trace,
            trace.category_mask("gpu_memset")
            | (
                trace.category_mask("gpu_memcpy")
                & trace.name_mask(lambda n: classify.memcpy_kind(n) == "DtoD")
            ),
        )
        assert total(subtract(window.compute, kernels)) == total(subtract(inside, kernels))
        assert (rank in overlap) == (len(window.collectives) > 0)
        if rank in overlap:
            hidden = 100 * total(intersect(comm, kernels)) / total(comm)
            assert hidden == pytest.approx(overlap[rank][0], abs=0.0051)


def hta_by_itself(traces, *, keep_all):
    """(kernel time, idle, compute, overlap) by rank, from files that HTA reads."""
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis
    from hta.analyzers.communication_analysis import CommunicationAnalysis
    from hta.common.trace import Trace

    with contextlib.redirect_stdout(io.StringIO()):
        loaded = Trace(trace_files={trace.meta.rank or 0: trace.meta.source for trace in traces})
        if keep_all:
            loaded._filter_irrelevant_gpu_kernels = lambda *_: None
        loaded.load_traces(include_last_profiler_step=True, use_multiprocessing=False)
        times = BreakdownAnalysis.get_temporal_breakdown(loaded, visualize=False)
        overlap = CommunicationAnalysis.get_comm_comp_overlap(loaded, visualize=False)
    columns = ["kernel_time(us)", "idle_time(us)", "compute_time(us)"]
    joined = times.merge(overlap, on="rank")
    return {
        int(row["rank"]): [row[c] for c in [*columns, "comp_comm_overlap_pctg"]]
        for _, row in joined.iterrows()
    }


@needs_hta
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SETS)
def test_our_columns_give_hta_what_its_own_reader_does(name, monkeypatch):
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    traces = load(name)
    results = results_of(name)
    ours = by_rank(results["temporal_breakdown"], "kernel_time_us", "idle_time_us", "compute_time_us")
    overlap = by_rank(results["overlap"], "overlap_percent")
    own = hta_by_itself(traces, keep_all=True)
    assert own.keys() == ours.keys()
    for rank, (*times_us, overlap_percent) in own.items():
        assert times_us == pytest.approx(ours[rank], abs=0.01)
        if rank in overlap:
            assert overlap_percent == pytest.approx(overlap[rank][0], abs=0.011)


@needs_hta
@pytest.mark.filterwarnings("ignore")
def test_what_hta_leaves_out_by_default_is_work_launched_outside_of_the_file():
    traces = load("torchrec/sst_long_a2a_optimizer_4")
    whole, filtered = (hta_by_itself(traces, keep_all=keep)[0] for keep in (True, False))
    assert whole[0] == filtered[0]
    assert whole[2] - filtered[2] > 40_000, "50 ms of kernels whose launch the file does not hold"


@needs_hta
def test_results_are_plain_data_in_the_shape_the_report_shows():
    results = results_of("torchrec/resnet18")
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert all(record["rank"] in (0, 1) for name in ANALYSES for record in results[name])
    assert all(len(results[name]) >= 2 for name in ANALYSES)
    assert results["notes"] == []
    launches = results["kernel_launches"][0]
    assert launches["launches"] == 225 and launches["call_median_us"] == pytest.approx(12, abs=1)
    queue = results["queue_length"][0]
    assert queue["changes"] == 426 and queue["most_operations"] >= 1
    titles = {table.title: table for table in hta_tables(results)}
    assert titles["temporal breakdown"].head[:2] == ["rank", "kernel time us"]
    assert len(titles["idle time"].rows) == len(results["idle_time"])


@needs_hta
def test_ranks_without_data_become_notes_and_the_others_stay():
    (trace, other) = load("made")
    (alone,) = load("made on CPUs")
    nothing = replace(alone, meta=replace(alone.meta, rank=34))
    # Without correlations no device event has a launch, but its times are as good as before.
    odd = replace(other, meta=replace(other.meta, rank=5), correlation=np.full(other.size, -1))
    results = hta_results([trace, nothing, odd])
    assert set(by_rank(results["temporal_breakdown"], "rank")) == {0, 5}
    assert set(by_rank(results["kernel_launches"], "rank")) == {0}
    notes = " ".join(results["notes"])
    assert f"rank {nothing.meta.rank}: the trace has no device events" in notes
    assert "Kernel launches, rank 5" in notes


@needs_hta
def test_a_failing_analysis_is_a_note(monkeypatch):
    from hta.analyzers.trace_counters import TraceCounters

    def fail(*args, **kwargs):
        raise AssertionError("lengths differ")

    monkeypatch.setattr(TraceCounters, "get_queue_length_summary", fail)
    results = hta_results(load("made"))
    assert results["queue_length"] == [] and len(results["overlap"]) == 2
    assert results["notes"] == ["Queue length, ranks 0, 1: HTA failed with AssertionError: lengths differ."]


@needs_hta
def test_traces_of_the_same_rank_do_not_replace_each_other():
    (trace, _) = load("made")
    results = hta_results([trace, trace])
    assert [record["rank"] for record in results["overlap"]] == [0, 1]
    assert "shown as rank 1" in results["notes"][0]


@needs_hta
def test_hta_neither_prints_nor_takes_over_the_logging(capsys):
    root = logging.getLogger()
    before = list(root.handlers), root.level
    traces = load("made")
    container = hta_trace({trace.meta.rank: trace for trace in traces})
    hta_results(traces)
    assert (list(root.handlers), root.level) == before
    assert capsys.readouterr() == ("", "")
    assert container.get_ranks() == [0, 1]
