"""The JSON lines of NCCL Inspector: collectives with their times, numbers and sizes, of one rank a file."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import find_traces, load_trace
from tests.measure.traced import measured

US0 = 1_752_867_229_000_000
WORLD = 4
STEP_US, TRANSFER_US, LATE_US = 20_000, 4_000, 3_000
BYTES = 1 << 24


def line(
    rank,
    number,
    start_us,
    end_us,
    *,
    coll="AllReduce",
    size=BYTES,
    ranks=WORLD,
    group="0x7f8c496ae9f661",
    verbose=True,
):
    """As the plugin's README shows it, times of two channels."""
    told = {
        "coll": coll,
        "coll_sn": number,
        "coll_msg_size_bytes": size,
        "coll_exec_time_us": end_us - start_us,
    }
    told |= {"coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 277.2, "coll_busbw_gbs": 485.1}
    if verbose:
        channels = [(start_us, end_us - 1), (start_us + 2, end_us)]
        kernels = [
            {"channel_id": i, "kernel_start_ts": begin, "kernel_stop_ts": end, "kernel_record_ts": end}
            for i, (begin, end) in enumerate(channels)
        ]
        told["event_trace_ts"] = {
            "coll_start_ts": start_us - 120,
            "coll_stop_ts": start_us - 115,
            "kernel_events": kernels,
        }
    metadata = {
        "inspector_output_format_version": "v4.0",
        "dump_timestamp_us": end_us,
        "hostname": "node1",
        "pid": 90 + rank,
    }
    return {
        "header": {"id": group, "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": metadata,
        "coll_perf": told,
    }


def lines_of(rank, late=2, count=40):
    """A collective each 20 ms, to which one rank comes 3 ms after the others."""
    for number in range(count):
        end_us = US0 + number * STEP_US
        begin_us = end_us - TRANSFER_US - (0 if rank == late else LATE_US)
        yield line(rank, number, begin_us, end_us + rank)


def write(folder, rank, lines, name="node1-pid{}.log"):
    path = folder / name.format(90 + rank)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(path)


def test_collectives_become_kernels_of_their_communicator(tmp_path):
    lines = [
        *lines_of(1, count=3),
        line(0, 9, US0 + 70_000, US0 + 71_000, coll="ReduceScatter", ranks=2, group="0xe62d"),
    ]
    trace = load_trace(write(tmp_path, 1, lines))
    assert (trace.meta.rank, trace.meta.world_size, trace.meta.host, trace.meta.backend) == (
        1,
        WORLD,
        "node1",
        "nccl",
    )
    assert [trace.name_of(row) for row in range(4)] == ["ncclDevKernel_AllReduce"] * 3 + [
        "ncclDevKernel_ReduceScatter"
    ]
    assert trace.start_ns[0] == (US0 - TRANSFER_US - LATE_US) * 1000 and trace.duration_ns[0] == 7_001_000
    table = trace.collectives
    assert table.sequence.tolist() == [0, 1, 2, 9] and table.group_size.tolist() == [4, 4, 4, 2]
    assert [trace.names[i] for i in table.group] == ["0x7f8c496ae9f661"] * 3 + ["0xe62d"]
    assert table.in_elements.tolist() == [BYTES] * 3 + [2 * BYTES], (
        "of a reduce-scatter it tells one rank's part"
    )


def test_who_came_late_and_how_fast_it_went(tmp_path):
    for rank in range(WORLD):
        write(tmp_path, rank, lines_of(rank))
    diagnosis = analyze(str(tmp_path), Options(cache=False, jobs=1))
    assert diagnosis.job.ranks_seen == [0, 1, 2, 3]
    assert [f.ranks for f in diagnosis.findings if f.rule == "allreduce/late-rank"] == [[2]]
    measurement = measured(tmp_path)
    caused = {each.rank: each.caused_wait_ms for each in measurement.ranks}
    assert max(caused, key=caused.get) == 2
    facts = measurement.facts.communication
    assert facts.wait_ms > 0 and facts.transfer_ms == pytest.approx(TRANSFER_US / 1000, rel=0.05)


def test_without_times_it_says_which_variable_is_missing(tmp_path):
    lines = [line(0, i, US0 + i, US0 + i + 5, verbose=False) for i in range(3)]
    path = write(tmp_path, 0, lines)
    with pytest.raises(
        UnusableInput, match=r"NCCL Inspector without the times of its 3 collectives.*DUMP_VERBOSE=1"
    ):
        load_trace(path)


def test_odd_lines_cost_themselves(tmp_path):
    good = list(lines_of(0, count=4))
    odd = [
        {"header": {}},
        {**good[0], "coll_perf": {"coll": 7}},
        line(0, 5, US0 + 9, US0),
        line(0, 6, -5, 2**70),
    ]
    path = tmp_path / "a.log"
    text = (
        "".join(json.dumps(one) + "\n" for one in [*good, *odd])
        + "\n{nonsense\n"
        + "x" * (3 << 20)
        + "\n"
        + json.dumps(good[0])[:90]
    )
    path.write_text(text)
    trace = load_trace(str(path))
    assert trace.size == 4
    assert [note.removeprefix(f"{path}: ") for note in trace.meta.notes] == [
        "5 line(s) that NCCL Inspector does not write so were left out.",
        "1 collective(s) without times were left out.",
    ]


def test_a_folder_of_its_files_is_found(tmp_path):
    path = write(tmp_path, 0, lines_of(0, count=2))
    (tmp_path / "train.log").write_text('{"loss": 1.0, "coll_perf": 3}\nstep 1\n')
    (tmp_path / "other.log").write_text("step 1\n")
    assert path in find_traces([str(tmp_path)]).files
    assert str(tmp_path / "other.log") not in find_traces([str(tmp_path)]).files
