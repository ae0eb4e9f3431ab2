"""Every layout and generation of Kineto's JSON gives the same columns."""

import bz2
import json
import sys

import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import classify, load_trace
from ddpdoctor.trace.sources import Source
from tests.trace.trace_files import (
    BASE_NS,
    document,
    event,
    events,
    expected_rows,
    is_cut,
    kernel,
    rows_of,
    write,
)

CONTENT = events(40)


def kineto_text(content):
    """As ``output_json.cpp`` lays it out: four blanks, the arguments on lines of their own."""
    parts = [
        json.dumps(e).replace('"args": {', '"args": {\n      ').replace("}}", "\n    }\n  }") for e in content
    ]
    head = (
        '\n{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},\n'
    )
    tail = f'\n  ],\n  "traceName": "a.json", "baseTimeNanoseconds": {BASE_NS}\n}}\n'
    return head + '  "traceEvents": [\n  ' + ",\n  ".join(parts) + tail


LAYOUTS = {
    "pretty": json.dumps(document(CONTENT), indent=2),
    "compact": json.dumps(document(CONTENT), separators=(",", ":")),
    "kineto": kineto_text(CONTENT),
    "events first": json.dumps(
        {"traceEvents": CONTENT, **{k: v for k, v in document([]).items() if k != "traceEvents"}}
    ),
    "crlf": json.dumps(document(CONTENT), indent=1).replace("\n", "\r\n"),
    "byte order mark": "\ufeff" + json.dumps(document(CONTENT)),
    "long tail": json.dumps(
        document(CONTENT) | {"INFO": [{"a": "}, {"}] * 300, "x": [[1], [{"ph": "X"}, {"b": 2}]]}
    ),
    "trailing comma": json.dumps(document(CONTENT), indent=2).replace(
        '\n  ],\n  "traceName"', ',\n  ],\n  "traceName"'
    ),
}


@pytest.mark.parametrize("piece_bytes", [97, 1000, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, monkeypatch, layout, piece_bytes):
    monkeypatch.setattr(Source.pieces, "__defaults__", (piece_bytes,))
    monkeypatch.setattr("ddpdoctor.trace.sources._READ_BYTES", piece_bytes)
    trace = load_trace(write(tmp_path / "a.json.gz", LAYOUTS[layout]))
    assert rows_of(trace) == expected_rows(LAYOUTS["pretty"])
    assert (trace.meta.rank, trace.meta.rank_from, trace.meta.world_size) == (0, "distributedInfo", 2)
    assert trace.start_ns.min() > BASE_NS and trace.meta.clock == "epoch" and not is_cut(trace)


def test_array_format_with_and_without_its_end(tmp_path):
    for text in (json.dumps(CONTENT), json.dumps(CONTENT)[:-1], json.dumps(CONTENT, indent=1)[:-2] + ",\n"):
        trace = load_trace(write(tmp_path / "rank-3.json", text))
        assert rows_of(trace) == expected_rows(json.dumps(CONTENT))
        assert (trace.meta.rank, trace.meta.rank_from, trace.meta.clock) == (3, "file name", "relative")
        assert not is_cut(trace)


def test_columns_of_each_kind_of_event(tmp_path):
    trace = load_trace(write(tmp_path / "a.json", document(CONTENT)))
    assert trace.categories == ["cpu_op", "cuda_runtime", "kernel"]
    on_device = trace.category_mask("kernel")
    assert set(trace.stream[on_device].tolist()) == {7} and set(trace.device[on_device].tolist()) == {0}
    assert set(trace.stream[~on_device].tolist()) == set(trace.bytes[~on_device].tolist()) == {-1}
    assert sorted(trace.bytes[on_device].tolist()) == list(range(40))
    launched = trace.category_mask("cuda_runtime")
    assert set(trace.correlation[launched].tolist()) == set(trace.correlation[on_device].tolist())
    assert (trace.external_id[on_device] == -1).all() and (trace.external_id[launched] > 0).all()
    shapes = {trace.names[i] for i in trace.shapes[trace.category_mask("cpu_op")].tolist()}
    assert shapes == {"[[0,2],[]]", "[[1,2],[]]", "[[2,2],[]]"} and (trace.shapes[on_device] == -1).all()
    assert set(trace.lane[on_device].tolist()).isdisjoint(trace.lane[~on_device].tolist())
    order = list(zip(trace.start_ns.tolist(), (-trace.duration_ns).tolist(), strict=True))
    assert order == sorted(order)


def test_a_parent_stands_before_its_children_in_spite_of_equal_starts(tmp_path):
    content = [event("child", 5, 1), event("grandchild", 5, 0), event("parent", 5, 9), event("twin", 5, 1)]
    trace = load_trace(write(tmp_path / "a.json", document(content)))
    assert [trace.name_of(i) for i in range(4)] == ["parent", "child", "twin", "grandchild"]


def test_old_schema(tmp_path):
    content = [
        event(
            "aten::mm",
            1_606_911_006_433_250,
            10,
            "Operator",
            tid="3340",
            **{"External id": 2, "Input dims": [[1]]},
        ),
        event("ProfilerStep#3", 1_606_911_006_433_240, 90, "Operator", tid="3340"),
        event(
            "cudaLaunchKernel",
            1_606_911_006_433_255,
            2,
            "Runtime",
            tid=3340,
            correlation=9,
            **{"external id": 2},
        ),
        event(
            "void k()",
            1_606_911_006_433_260,
            4,
            "Kernel",
            0,
            "stream 20",
            correlation=9,
            **{"external id": 2},
        ),
        event(
            "Memcpy HtoD (Pageable -> Device)", 1_606_911_006_433_270, 4, "Memcpy", 1, "stream 21", bytes=8
        ),
        event(
            "Memset (Device)",
            1_606_911_006_433_280,
            4,
            "Memset",
            1,
            "stream 21",
            bytes=8,
            stream=21,
            device=1,
        ),
    ]
    trace = load_trace(write(tmp_path / "a.json", content))
    kinds = {trace.name_of(i): trace.categories[trace.category[i]] for i in range(trace.size)}
    assert list(kinds.values()) == [
        "user_annotation",
        "cpu_op",
        "cuda_runtime",
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
    ]
    assert trace.stream.tolist() == [-1, -1, -1, 20, 21, 21]
    assert trace.device.tolist() == [-1, -1, -1, 0, 1, 1]
    assert trace.external_id.tolist() == [-1, 2, 2, 2, -1, -1]
    assert trace.names[trace.shapes[1]] == "[[1]]"
    assert trace.meta.clock == "epoch" and trace.start_ns[0] == 1_606_911_006_433_240_000
    assert len({trace.lane[i] for i in (0, 1, 2)}) == 1, "3340 and '3340' are one thread"


def test_other_accelerators(tmp_path):
    """ROCm and XPU write other runtime calls and categories, and the same columns."""
    content = [
        event("hipLaunchKernel", 100, 4, "cuda_runtime", correlation=8),
        kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 110, 5, correlation=8, device=3),
        event("urEnqueueKernelLaunch", 200, 4, "xpu_runtime", correlation=9),
        event("zeCommandListAppendLaunchKernel", 201, 2, "xpu_driver", correlation=9),
        event(
            "gemm_kernel", 210, 5, "kernel", 1, "4", device=1, stream="4", correlation=9, **{"ze event": 5}
        ),
        event("Memcpy M2D", 220, 5, "gpu_memcpy", 1, 4, device=1, stream=4, bytes=64),
    ]
    trace = load_trace(write(tmp_path / "a.json", document(content)))
    assert trace.stream.tolist() == [-1, 7, -1, -1, 4, 4]
    assert trace.device.tolist() == [-1, 3, -1, -1, 1, 1]
    assert trace.correlation.tolist() == [8, 8, 9, 9, 9, -1]
    assert classify.device_work(trace).tolist() == [False, True, False, False, True, True]
    assert classify.communication_kernels(trace).tolist() == [False, True, False, False, False, False]


def test_collectives(tmp_path):
    nccl = {
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
        "Group size": 8, "Process Group Name": "0", "Process Group Description": "default_pg", "Seq": 41,
        "Is asynchronized op": True, "External id": 12,
    }  # fmt: skip
    send = {"Collective name": "send", "Src Rank": -1, "Dst Rank": 5, "dtype": "Half"}
    content = [
        kernel("ncclDevKernel_SendRecv(x)", 300, 5, **send),
        event("aten::add", 100),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 200, 5, **nccl),
    ]
    trace = load_trace(write(tmp_path / "a.json", document(content)))
    table = trace.collectives
    assert [trace.name_of(i)[:16] for i in table.event.tolist()] == ["ncclDevKernel_Al", "ncclDevKernel_Se"]
    assert [trace.names[i] for i in table.operation.tolist()] == ["allreduce", "send"]
    assert trace.names[table.group[0]] == "0"
    assert trace.names[table.dtype[0]] == "Float"
    assert table.group.tolist()[1] == -1
    numbers = (
        table.group_size,
        table.sequence,
        table.in_elements,
        table.out_elements,
    )
    assert [n.tolist() for n in numbers] == [[8, -1], [41, -1], [1000, -1], [1000, -1]]


def test_not_quite_json(tmp_path):
    text = json.dumps(document(CONTENT), indent=1)
    broken = text.replace('"bytes": 5\n', '"bytes": NaN\n', 1).replace(
        '"bytes": 6\n', '"bytes": -Infinity\n', 1
    )
    broken = broken.replace("aten::op3", r"C:\Users\x\op3", 1).replace("aten::op4", "tab\there\nand break", 1)
    data = broken.encode().replace(b"aten::op5", b"\xff\xfe", 1)
    trace = load_trace(write(tmp_path / "a.json", data))
    assert trace.size == 120
    assert r"C:\Users\x\op3" in trace.names and "tab here and break" in trace.names
    assert any("repaired" in note for note in trace.meta.notes)


def test_one_bad_event_costs_only_itself(tmp_path):
    text = json.dumps(document(CONTENT), indent=1).replace('"aten::op3"', '"aten::op3" oops', 1)
    trace = load_trace(write(tmp_path / "a.json", text))
    assert trace.size == 119
    assert any("1 malformed event" in note for note in trace.meta.notes)


def test_wrong_types_cost_one_value(tmp_path):
    odd = kernel(stream="0x3", correlation="77", bytes=None, device="0")
    odd.update(pid={"a": 1}, name=5)
    content = [
        *CONTENT,
        odd,
        event(ts=None),
        event(ts="12.5"),
        event(ts=float(10**30)),
        event(dur=-4.0, ts=1.0),
    ]
    trace = load_trace(write(tmp_path / "a.json", document(content)))
    assert trace.size == 120 + 3
    row = trace.names.index("5")
    at = trace.name.tolist().index(row)
    assert (trace.stream[at], trace.correlation[at], trace.bytes[at], trace.device[at]) == (3, 77, -1, 0)
    assert trace.duration_ns.min() >= 0
    assert any("2 event(s) without a usable time" in note for note in trace.meta.notes)


def test_external_id_that_only_repeats_the_correlation_is_absent(tmp_path):
    content = [kernel(correlation=9, **{"External id": 9}), kernel(correlation=8, **{"External id": 2})]
    trace = load_trace(write(tmp_path / "a.json", document(content)))
    assert sorted(trace.external_id.tolist()) == [-1, 2]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:8c\nsize 1\n", "git lfs pull"),
        (json.dumps(document([])), "its list of events is empty"),
        ("[]", "its list of events is empty"),
        ('{"a": 1}', 'no list "traceEvents"'),
        (bz2.compress(b"{}"), "does not begin like JSON"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"\x28\xb5\x2f\xfd1234", "zstd"),
        ("null", "does not begin like JSON"),
    ],
)
def test_unusable_files_get_one_sentence(tmp_path, content, says):
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(UnusableInput) as raised:
        load_trace(path)
    assert says in str(raised.value) and path in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UnusableInput, match="no such file"):
        load_trace(str(tmp_path / "none.json"))
    with pytest.raises(UnusableInput, match="is a directory"):
        load_trace(str(tmp_path))


def test_the_caller_may_know_the_rank_better(tmp_path):
    meta = load_trace(write(tmp_path / "a.json", document(CONTENT)), rank=6).meta
    assert (meta.rank, meta.rank_from) == (6, "run directory")


def test_zstd(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.ZstdCompressor().compress(LAYOUTS["pretty"].encode())
    half = zstandard.ZstdCompressor().compress(LAYOUTS["pretty"][:3000].encode())
    rest = zstandard.ZstdCompressor().compress(LAYOUTS["pretty"][3000:].encode())
    for data in (packed, half + rest):
        trace = load_trace(write(tmp_path / "a.json.zst", data))
        assert rows_of(trace) == expected_rows(LAYOUTS["pretty"]) and not is_cut(trace)
    cut = load_trace(write(tmp_path / "cut.json.zst", half))
    assert is_cut(cut) and 0 < cut.size < trace.size


def test_zstd_without_its_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnusableInput, match="install the package `zstandard`"):
        load_trace(write(tmp_path / "a.json.zst", b"\x28\xb5\x2f\xfd rest"))
