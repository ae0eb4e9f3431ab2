"""A trace that this machine's torch.profiler has just written."""

import gzip
import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddpdoctor.trace import classify, load_trace
from tests.trace.trace_files import expected_rows, rows_of

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
pytestmark = [needs_torch, pytest.mark.torchrun]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Three steps of a small model after one to warm up; the file, and the wall clock around it in ns."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)
    path = str(tmp_path_factory.mktemp("torch") / "rank5.json.gz")
    options = {
        "schedule": torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1),
        "on_trace_ready": lambda profiler: profiler.export_chrome_trace(path),
        "record_shapes": True,
        "with_stack": True,
    }
    before_ns = time.time_ns()
    with torch.profiler.profile(**options) as profiler:
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()
            profiler.step()
    after_ns = time.time_ns()
    return path, before_ns, after_ns


def test_rows_and_clock(recorded):
    path, before_ns, after_ns = recorded
    trace = load_trace(path)
    assert rows_of(trace) == expected_rows(gzip.decompress(Path(path).read_bytes()))
    operators = trace.category_mask("cpu_op")
    assert trace.meta.clock == "epoch" and (trace.meta.rank, trace.meta.rank_from) == (5, "file name")
    slack_ns = 1_000_000
    assert before_ns - slack_ns <= trace.start_ns[operators].min()
    assert trace.end_ns[operators].max() <= after_ns + slack_ns


def test_names_shapes_and_stacks(recorded):
    trace = load_trace(recorded[0])
    names = [trace.name_of(i) for i in range(trace.size)]
    assert {classify.step_number(n) for n in names} >= {1, 2, 3}
    assert sum(classify.is_optimizer_step(n) for n in names) == 3
    assert sum(n.startswith("enumerate(DataLoader)") for n in names) >= 3
    assert trace.category_mask("python_function").any()
    linear = names.index("aten::addmm")
    assert json.loads(trace.names[trace.shapes[linear]])[1] == [4, 8]
