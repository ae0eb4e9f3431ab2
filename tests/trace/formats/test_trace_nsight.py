"""Exports of Nsight Systems: what they hold in columns, of which rank and clock, in each schema; the real ones, too."""

from __future__ import annotations

import io
import sqlite3
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import RankTrace, find_traces, load_trace, load_traces
from ddpdoctor.trace.archive import read_archive, write_archive
from ddpdoctor.trace.formats import Candidate, parts_of
from tests.trace.nsight_export import INIT, LEAD_NS, NEW, OLD, SESSION_NS, export
from tests.trace.trace_files import BASE_NS, SHARED, document, event, kernel, write

REAL = SHARED.parent / "nsys"
MS = 1_000_000


def step_events(steps=4, name="step {}", first=7):
    """Steps of 1 ms: a range, an operator with sizes, its launch and kernel, a copy, NCCL's reduction and a wait."""
    made = []
    for i in range(steps):
        ts, number = 1000.0 + i * 1000, 10 * i
        if name:
            made.append(event(name.format(first + i), ts, 950.0, "user_annotation"))
        made.append(event("aten::mm", ts + 10, 40.0, **{"Input Dims": [[8, 4], [4, 2]]}))
        made.append(event("cudaLaunchKernel", ts + 20, 5.0, "cuda_runtime", correlation=number + 1))
        made.append(kernel("void gemm<float>(int)", ts + 30, 100.0, correlation=number + 1))
        made.append(event("cudaMemcpyAsync", ts + 60, 5.0, "cuda_runtime", correlation=number + 2))
        copy = {"device": 0, "stream": 7, "correlation": number + 2, "bytes": 4096}
        made.append(event("Memcpy HtoD (Pageable -> Device)", ts + 140, 20.0, "gpu_memcpy", 0, 7, **copy))
        made.append(
            event("cudaLaunchKernelExC", ts + 200, 5.0, "cuda_runtime", tid=9, correlation=number + 3)
        )
        reduced = {
            "Collective name": "allreduce",
            "Process Group Name": "0",
            "Group size": 2,
            "dtype": "Float",
        }
        reduced |= {"In msg nelems": 1000, "Out msg nelems": 1000}
        made.append(
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", ts + 300, 200.0, 13, number + 3, **reduced)
        )
        made.append(event("cudaStreamSynchronize", ts + 510, 400.0, "cuda_runtime", correlation=number + 4))
    return made


def trace_of(folder, rank=0, content=None, **top) -> RankTrace:
    """A trace of torch's profiler, read."""
    return load_trace(write(folder / f"t{rank}.json", document(content or step_events(), rank, **top)))


def rows(trace, *categories):
    """Name, start and length of the events of these categories."""
    at = np.flatnonzero(trace.category_mask(*categories))
    return [(trace.name_of(i), int(trace.start_ns[i]), int(trace.duration_ns[i])) for i in at]


@pytest.fixture
def torchs(tmp_path):
    return trace_of(tmp_path)


@pytest.mark.parametrize("schema", [NEW, OLD])
def test_events_become_the_same_columns(torchs, tmp_path, schema):
    trace = load_trace(export(tmp_path / "rank0.sqlite", [torchs], schema, environment={"RANK": "0"}))
    for categories in (("kernel",), ("gpu_memcpy",), ("cpu_op",), ("cuda_runtime",)):
        assert rows(trace, *categories) == rows(torchs, *categories)
    assert rows(trace, "user_annotation") == rows(torchs, "user_annotation")
    assert (trace.meta.rank, trace.meta.clock, trace.meta.backend) == (0, "epoch", "nccl")
    device = trace.category_mask("kernel", "gpu_memcpy")
    expected = torchs.category_mask("kernel", "gpu_memcpy")
    for column in ("stream", "device", "correlation", "bytes"):
        assert getattr(trace, column)[device].tolist()[:8] == getattr(torchs, column)[expected].tolist()[
            :8
        ] or (column == "bytes")
    assert Counter(trace.bytes[trace.category_mask("gpu_memcpy")].tolist()) == {4096: 4}
    operators = trace.category_mask("cpu_op")
    assert {trace.names[i] for i in trace.shapes[operators].tolist()} == {"[[8,4],[4,2]]"}


def test_columns_are_such_as_can_be_kept(torchs, tmp_path):
    trace = load_trace(export(tmp_path / "rank0.sqlite", [torchs]))
    kept = io.BytesIO()
    write_archive(kept, trace)
    kept.seek(0)
    again = read_archive(kept, "kept.columns")
    assert again.names == trace.names and (again.start_ns == trace.start_ns).all()


def test_nccl_tells_communicators_and_sizes(torchs, tmp_path):
    trace = load_trace(export(tmp_path / "a.sqlite", [torchs]))
    table = trace.collectives
    assert [trace.name_of(int(row)).startswith("ncclDevKernel_AllReduce") for row in table.event] == [
        True
    ] * 4
    assert {trace.names[i] for i in table.operation} == {"allreduce"}
    assert {(trace.names[d], int(n)) for d, n in zip(table.dtype, table.in_elements, strict=True)} == {
        ("byte", 4000)
    }
    assert len({int(group) for group in table.group}) == 1 and set(table.group_size.tolist()) == {2}
    assert (trace.meta.rank, trace.meta.world_size, trace.meta.rank_from) == (0, 2, "distributedInfo")
    without = load_trace(export(tmp_path / "b.sqlite", [torchs], payloads=False))
    assert len(without.collectives.event) == 0 and without.meta.world_size is None


def test_a_group_of_one_call_is_known_and_one_of_several_is_not(torchs, tmp_path):
    path = export(tmp_path / "a.sqlite", [torchs])
    with sqlite3.connect(path) as db:
        calls = db.execute(
            "SELECT e.rowid, e.start, e.end, e.globalTid, e.binaryData FROM NVTX_EVENTS e JOIN StringIds s ON s.id = textId "
            "WHERE s.value = 'ncclAllReduce' ORDER BY e.start"
        ).fetchall()
        ids = {"ncclGroupStart": 9001, "ncclGroupEnd": 9002}
        db.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(number, name) for name, number in ids.items()]
        )
        reduce = db.execute("SELECT id FROM StringIds WHERE value = 'ncclAllReduce'").fetchone()[0]
        insert = "INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, textId, domainId, binaryData) VALUES (?, ?, 59, ?, ?, 1, ?)"
        for (row, start, end, thread, data), inside in zip(calls[:2], (1, 2), strict=True):
            db.execute("DELETE FROM NVTX_EVENTS WHERE rowid = ?", (row,))
            db.execute(insert, (start - 900, start - 890, thread, ids["ncclGroupStart"], None))
            for i in range(inside):
                db.execute(insert, (start - 800 + 100 * i, start - 750 + 100 * i, thread, reduce, data))
            db.execute(insert, (start, end, thread, ids["ncclGroupEnd"], None))
    db.close()
    trace = load_trace(path)
    kernels = np.flatnonzero(trace.category_mask("kernel") & trace.name_mask(lambda n: n.startswith("nccl")))
    assert [int(row) in trace.collectives.event for row in kernels] == [True, False, True, True]


def test_times_count_from_1970_on_the_clock_of_the_host(torchs, tmp_path):
    start = int(torchs.start_ns[0])
    path = export(tmp_path / "a.sqlite", [torchs])
    assert load_trace(path).start_ns[0] == start
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT min(start) FROM NVTX_EVENTS").fetchone()[0] <= SESSION_NS + LEAD_NS
        db.execute("DELETE FROM TARGET_INFO_SESSION_START_TIME")
    db.close()
    assert load_trace(path).meta.clock == "relative"
    with sqlite3.connect(path) as db:  # nsys export --ts-normalize true
        moved = start - LEAD_NS - SESSION_NS
        for table in (
            "CUPTI_ACTIVITY_KIND_KERNEL",
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            "NVTX_EVENTS",
            "CUPTI_ACTIVITY_KIND_MEMCPY",
        ):
            db.execute(f"UPDATE {table} SET start = start + {moved}, end = end + {moved}")
        db.execute(f"INSERT INTO TARGET_INFO_SESSION_START_TIME (utcEpochNs) VALUES ({BASE_NS})")
    db.close()
    again = load_trace(path)
    assert again.meta.clock == "epoch" and again.start_ns[0] == start


@pytest.mark.parametrize(
    ("environment", "rank", "world"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 5, 8),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, 3, 4),
        ({"SLURM_PROCID": "12", "SLURM_NTASKS": "16"}, 12, 16),
        ({"RANK": "x", "SLURM_PROCID": "-1"}, None, None),
    ],
)
def test_the_launchers_variables_tell_the_rank(torchs, tmp_path, environment, rank, world):
    meta = load_trace(export(tmp_path / "a.sqlite", [torchs], environment=environment, payloads=False)).meta
    assert (meta.rank, meta.world_size) == (rank, world)


def test_the_files_name_tells_it_where_nothing_else_does(torchs, tmp_path):
    path = export(tmp_path / "report_rank3.sqlite", [torchs], payloads=False)
    assert (load_trace(path).meta.rank, load_trace(path).meta.rank_from) == (3, "file name")
    assert load_trace(path, rank=6).meta.rank == 6


@pytest.mark.parametrize(
    ("command", "ranks", "world"),
    [
        ("torchrun --nproc_per_node=2 train.py", [0, 1], 2),
        ("torchrun --nnodes=4 --node_rank=2 --nproc-per-node 2 train.py", [4, 5], 8),
        ("python -m torch.distributed.run --nnodes 2 --node-rank 1 train.py", [2, 3], 4),
        ("torchrun --nnodes=2 --rdzv_endpoint=host:1 train.py", [None, None], 4),
        ("torchrun --nnodes=1:4 --rdzv_endpoint=host:1 train.py", [None, None], None),
        ("bash train.sh", [None, None], None),
    ],
)
def test_ranks_of_a_file_are_numbered_as_torchrun_does(tmp_path, command, ranks, world):
    traces = [trace_of(tmp_path, rank) for rank in (0, 1)]
    path = export(tmp_path / "report.sqlite", traces, command=command, payloads=False)
    files = find_traces([path]).files
    assert files == (f"{path}#process-0", f"{path}#process-1")
    loaded = [load_trace(file) for file in files]
    assert [trace.meta.rank for trace in loaded] == ranks
    assert {trace.meta.world_size for trace in loaded} == {world}
    assert [trace.meta.rank for trace in load_traces(files, jobs=1).traces] == (
        ranks if ranks[0] is not None else [0, 1]
    )
    with pytest.raises(UnusableInput, match=r"holds 2 ranks: name one of them, such as .*#process-0"):
        load_trace(path)
    with pytest.raises(UnusableInput, match="holds 2 rank"):
        load_trace(f"{path}#process-7")


def test_processes_that_are_no_ranks_are_left_out(tmp_path):
    """A launcher has no kernels; a process that computes on a device and never communicates is none of the job's."""
    other = [e for e in step_events() if not e["name"].startswith("nccl")]
    traces = [trace_of(tmp_path, 0), trace_of(tmp_path, 1), trace_of(tmp_path, 2, other)]
    path = export(tmp_path / "report.sqlite", traces)
    assert len(find_traces([path]).files) == 2
    alone = export(
        tmp_path / "one.sqlite", [traces[2], trace_of(tmp_path, 3, [event("aten::add", 1000.0, 5.0)])]
    )
    assert find_traces([alone]).files == (alone,)


def test_a_communicator_of_some_ranks_does_not_number_them(torchs, tmp_path):
    path = export(tmp_path / "report.sqlite", [torchs, trace_of(tmp_path, 1)], command="bash x.sh")
    with sqlite3.connect(path) as db:
        for row, data in db.execute(
            "SELECT rowid, binaryData FROM NVTX_EVENTS WHERE binaryData IS NOT NULL"
        ).fetchall():
            if struct.unpack_from("<I", data, 8)[0] == INIT:
                small = data[:40] + struct.pack("<I", 1) + data[44:]
                db.execute("UPDATE NVTX_EVENTS SET binaryData = ? WHERE rowid = ?", (small, row))
    db.close()
    assert [load_trace(file).meta.rank for file in find_traces([path]).files] == [None, None]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("step {}", [7, 8, 9, 10]),  # known everywhere
        ("iter_{}", [7, 8, 9, 10]),
        ("Training batch: {}", [7, 8, 9, 10]),
        ("epoch 3 iteration [{}]", [7, 8, 9, 10]),
        ("[pl][profile]run_training_batch", [0, 1, 2, 3]),
        ("train_step", [0, 1, 2, 3]),
        ("validation batch {}", []),
        ("micro_batch {}", []),
        ("optimizer step", []),
    ],
)
def test_steps_by_the_scripts_own_ranges(tmp_path, name, numbers):
    trace = load_trace(export(tmp_path / "rank0.sqlite", [trace_of(tmp_path, 0, step_events(name=name))]))
    told = [n for n, *_ in rows(trace, "user_annotation") if n.startswith(("ProfilerStep#", "step "))]
    marks = [int(name.replace("#", " ").rpartition(" ")[2]) for name in told]
    assert marks == numbers
    assert any("no NVTX range marks the steps" in note for note in trace.meta.notes) == (not numbers)


def test_numbers_that_start_over_are_no_steps(tmp_path):
    content = [*step_events(name="batch {}"), event("batch 7", 9000.0, 900.0, "user_annotation")]
    trace = load_trace(export(tmp_path / "rank0.sqlite", [trace_of(tmp_path, 0, content)]))
    assert not any(name.startswith("ProfilerStep#") for name in trace.names)


def test_graphs_that_were_recorded_as_wholes_are_computation(torchs, tmp_path):
    path = export(tmp_path / "rank0.sqlite", [torchs])
    with sqlite3.connect(path) as db:
        pid = db.execute("SELECT globalPid FROM PROCESSES").fetchone()[0]
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT, deviceId INT, streamId INT, correlationId INT, "
            "globalPid INT, graphId INT)"
        )
        begin = SESSION_NS + LEAD_NS + 5 * MS
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, 0, 7, 900, ?, 12)",
            (begin, begin + MS, pid),
        )
    db.close()
    trace = load_trace(path)
    assert ("CUDA graph 12", int(torchs.start_ns[0]) + 5 * MS, MS) in rows(trace, "kernel")
    assert any("--cuda-graph-trace=node" in note for note in trace.meta.notes)


def test_a_process_that_communicates_is_one_whichever_name_its_rows_have(tmp_path):
    traces = [trace_of(tmp_path, rank) for rank in (0, 1)]
    path = export(tmp_path / "report.sqlite", traces)
    with sqlite3.connect(path) as db:
        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        db.execute(f"ALTER TABLE {table} RENAME TO made")
        db.execute(f"CREATE TABLE {table} AS SELECT * FROM made")
        db.execute("DROP TABLE made")
        db.execute(
            f"UPDATE {table} SET demangledName = NULL WHERE globalPid = (SELECT max(globalPid) FROM {table})"
        )
    db.close()
    assert len(find_traces([path]).files) == 2


def test_calls_of_the_operating_system_are_kept(torchs, tmp_path):
    path = export(tmp_path / "rank0.sqlite", [torchs])
    with sqlite3.connect(path) as db:
        thread = db.execute("SELECT globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchone()[0]
        db.execute("CREATE TABLE OSRT_API (start INT, end INT, nameId INT, globalTid INT, returnValue INT)")
        db.execute("INSERT INTO StringIds VALUES (5000, 'pthread_cond_wait')")
        db.execute(
            "INSERT INTO OSRT_API VALUES (?, ?, 5000, ?, 0)",
            (SESSION_NS + LEAD_NS, SESSION_NS + LEAD_NS + 10, thread),
        )
    db.close()
    assert [name for name, *_ in rows(load_trace(path), "os_runtime")] == ["pthread_cond_wait"]


def test_a_folder_of_reports_beside_their_exports(torchs, tmp_path):
    folder = tmp_path / "reports"
    folder.mkdir()
    paths = [export(folder / f"rank{rank}.sqlite", [trace_of(tmp_path, rank)]) for rank in (0, 1)]
    for path in paths:
        Path(path).with_suffix(".nsys-rep").write_bytes(b"QUADD")
    with sqlite3.connect(folder / "mlflow.db") as db:
        db.execute("CREATE TABLE runs (id INT)")
    db.close()
    assert find_traces([str(folder)]).files == tuple(paths)


@pytest.mark.skipif(not REAL.exists(), reason="the real exports are not here")
def test_a_real_export_of_two_processes():
    path = str(REAL / "mfu_2gpu_before.sqlite")
    loaded = load_traces(find_traces([path]).files, jobs=1)
    assert [trace.meta.rank for trace in loaded.traces] == [0, 1]
    first = loaded.traces[0]
    assert (first.meta.world_size, first.meta.backend, first.meta.host, first.meta.clock) == (
        2,
        "nccl",
        "modal",
        "epoch",
    )
    with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as db:
        wanted = dict(
            db.execute(
                "SELECT globalPid, count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL GROUP BY globalPid ORDER BY deviceId"
            )
        )
    db.close()
    assert [int(t.category_mask("kernel").sum()) for t in loaded.traces] == list(wanted.values())
    assert (
        Counter(n for n, *_ in rows(first, "kernel") if n.startswith("ncclDevKernel_SendRecv")).total() == 33
    )
    names = {name for name, *_ in rows(first, "cpu_op")}
    assert {"aten::copy_", "c10d::alltoall_base_", "record_param_comms"} <= names
    assert not any(", op_id" in name or ", seq" in name for name in first.names)
    calls = {name for name, *_ in rows(first, "cuda_runtime", "cuda_driver")}
    assert calls >= {"cudaLaunchKernel", "cuLaunchKernelEx", "cudaStreamSynchronize"}
    assert {name for name, *_ in rows(first, "gpu_memcpy")} == {
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
    }


@pytest.mark.skipif(not REAL.exists(), reason="the real exports are not here")
def test_a_real_export_without_collectives():
    loaded = load_traces(find_traces([str(REAL / "h100_2gpu_1s.sqlite")]).files, jobs=1)
    assert [trace.meta.rank for trace in loaded.traces] == [0, 1], "in the order of their devices"
    assert any("numbered" in note for note in loaded.notes)
    assert {trace.size for trace in loaded.traces} == {13473}
    assert [set(trace.device[trace.category_mask("kernel")].tolist()) for trace in loaded.traces] == [
        {0},
        {1},
    ]


def test_how_far_an_export_is_shows_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("ddpdoctor.trace.formats.nsight.database._BATCH_ROWS", 50)
    both = [trace_of(tmp_path, rank, step_events(60)) for rank in range(2)]
    file = export(tmp_path / "both.sqlite", both)
    told = []
    load_traces(parts_of(Candidate(file)), jobs=1, progress=told.append)
    assert told == sorted(told) and len(set(told)) > 10 and told[-1] == pytest.approx(1)
    assert any(0.05 < part < 0.45 for part in told) and any(0.55 < part < 0.95 for part in told)
