"""Every public trace, row by row against an independent decoder with exact decimals."""

import gzip
import zlib

import pytest

from ddpdoctor.trace import load_trace
from tests.trace.trace_files import SHARED, expected_rows, is_cut, rows_of

FILES = [
    "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "hta/mtia_inference_trace/mtia_inference_rank_0.json.gz",
    "hta/nccl_parser_config/nccl_data.json.gz",
    "hta/two_of_128_sampled/sampled_rank-0.json.gz",
    "kineto/resnet50_workers_4/worker0.pt.trace.json.gz",
    "tracelens/mi300_ddp_resnet18/train_resnet18.json.gz",
    "odd/derived_compact_one_line.json.gz",
    "odd/derived_list_toplevel.json.gz",
    "odd/derived_NaN_value.json.gz",
]
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")


@pytest.mark.extended
@pytest.mark.parametrize("file", FILES)
def test_rows(file):
    trace = load_trace(str(SHARED / file))
    text = gzip.decompress((SHARED / file).read_bytes())
    assert rows_of(trace) == expected_rows(text)
    assert trace.meta.clock == "epoch" and not is_cut(trace)
    for column in (trace.name, trace.category, trace.lane):
        assert column.min() >= 0
    assert trace.name.max() < len(trace.names) and trace.lane.max() < trace.size


def test_truncated_file_keeps_all_that_is_whole():
    path = SHARED / "odd/derived_truncated.json.gz"
    text = zlib.decompressobj(wbits=31).decompress(path.read_bytes())
    whole = text[: text.rindex(b"\n  },") + 4] + b"]}"
    trace = load_trace(str(path))
    assert is_cut(trace) and rows_of(trace) == expected_rows(whole)


def test_facts_of_known_files():
    amd = load_trace(str(SHARED / "tracelens/mi300_resnet_act_checkpoint/resnet_act_checkpoint.json.gz"))
    assert amd.meta.world_size == 8 and (amd.shapes >= 0).any()
    assert amd.meta.process_groups[0]["pg_desc"] == "default_pg" and amd.meta.devices[0]["name"].startswith(
        "AMD"
    )
    assert set(amd.device[amd.category_mask("kernel")].tolist()) == {2}
    nccl = load_trace(str(SHARED / "hta/nccl_parser_config/nccl_data.json.gz"))
    assert nccl.start_ns.min() > 1711964646000000000
    table = nccl.collectives
    kernels = [i for i, e in enumerate(table.event.tolist()) if nccl.name_of(e).startswith("nccl")]
    assert {nccl.names[table.operation[i]] for i in kernels} == {"allreduce", "broadcast"}
    assert {int(table.group_size[i]) for i in kernels} == {2} and (table.in_elements[kernels] > 0).all()
    assert (table.sequence == -1).all(), "this file has no Seq"
    vm = load_trace(str(SHARED / "hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz"))
    assert vm.meta.backend == "gloo" and vm.meta.host == "twshared16453.15.atn5.facebook.com"
