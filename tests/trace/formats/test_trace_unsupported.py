"""Recordings of other programs are refused in one sentence, which names the program and what to do."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import find_traces, load_trace, load_traces
from tests.trace.trace_files import document, event, events, write

PERFETTO = b"\n\x0a\x08\x01\x12\x06trace\x00"
REFUSED = [
    (
        "report.nsys-rep",
        b"QUADD",
        r"Nsight Systems.*nsys export --type sqlite --include-blobs true .*report\.nsys-rep",
    ),
    ("report.qdrep", b"QUADD", "Nsight Systems.*nsys export --type sqlite"),
    ("report.qdstrm", b"", "Nsight Systems.*QdstrmImporter"),
    ("results.pftrace", PERFETTO, "a trace of Perfetto: run its traceconv json"),
    ("rocprof.perfetto-trace", PERFETTO, "a trace of Perfetto"),
    ("kernel.ncu-rep", b"NVR", "Nsight Compute.*Nsight Systems or torch.profiler"),
    ("host.xplane.pb", b"\n", "XLA or TensorFlow"),
]


@pytest.mark.parametrize(("name", "content", "says"), REFUSED)
def test_each_is_refused_by_its_name(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnusableInput, match=rf"^{path} .*{says}") as refusal:
        load_trace(str(path))
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")
    assert find_traces([str(tmp_path)]).files == (str(path),), (
        "a folder of such files is no folder without traces"
    )


def test_a_database_of_rocprof_is_told_by_its_tables(tmp_path):
    path = tmp_path / "1234_results.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE rocpd_kernel_dispatch (id INTEGER PRIMARY KEY, start BIGINT, end BIGINT)")
    db.close()
    with pytest.raises(UnusableInput, match=r"ROCm's rocprofv3: record the steps with torch\.profiler"):
        load_trace(str(path))


def test_lines_of_nccl_inspector_are_told_by_what_they_hold(tmp_path):
    """As the plugin's README shows them."""
    told = {
        "coll": "AllReduce",
        "coll_sn": 1407,
        "coll_msg_size_bytes": 17179869184,
        "coll_exec_time_us": 61974,
    }
    metadata = {"inspector_output_format_version": "v4.0", "hostname": "node1", "pid": 1639453}
    header = {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1}
    line = json.dumps({"header": header, "metadata": metadata, "coll_perf": told})
    path = write(tmp_path / "node1-pid1639453.log", f"{line}\n{line}\n")
    with pytest.raises(UnusableInput, match="NCCL Inspector, which shows how long collectives took but not"):
        load_trace(path)


def test_they_cost_nothing_where_they_lie_beside_traces(tmp_path):
    trace = write(tmp_path / "rank0.json", document(events(5)))
    (tmp_path / "rank0.nsys-rep").write_bytes(b"QUADD")
    loaded = load_traces(find_traces([str(tmp_path)]).files, jobs=1)
    assert [one.meta.source for one in loaded.traces] == [trace]
    assert [Path(file).name for file, _ in loaded.failed] == ["rank0.nsys-rep"]


def test_ascends_timeline_is_refused_and_not_taken_for_a_job_on_cpus(tmp_path):
    npu = {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "Ascend Hardware"}}
    work = {"ph": "X", "name": "MatMulV2", "pid": 2, "tid": 7, "ts": "1712000000000001.250", "dur": 7.5}
    work["args"] = {"Task Type": "AI_CORE", "Physic Stream Id": 7, "Task Id": 3}
    path = write(tmp_path / "trace_view.json", [npu, event("aten::mm", "1712000000000000.125", 3.5), work])
    with pytest.raises(UnusableInput, match=r"a timeline of Ascend's torch_npu\.profiler"):
        load_trace(path)
