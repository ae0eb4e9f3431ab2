"""In which phase a stack is, as torch's own functions stand on it."""

from __future__ import annotations

import pytest

from ddpdoctor.hook.patching import UNCOUNTED_FILE
from ddpdoctor.hook.stalls.rank_status import phase_of

TORCH = "/venv/lib/python3.9/site-packages/torch"
USER = ["/job/train.py", 12, "main"]
OURS = [UNCOUNTED_FILE, 3, "wrapper"]


def frames(*places: str) -> list[list[object]]:
    """Of ``file:function``, innermost first, below torch; the user's line stands around them."""
    return [[f"{TORCH}/{place.partition(':')[0]}", 1, place.partition(":")[2]] for place in places] + [USER]


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ([USER], "other"),
        ([], "other"),
        (frames("utils/data/dataloader.py:_BaseDataLoaderIter.__next__"), "data"),
        ([USER, *frames("utils/data/dataloader.py:__next__")], "data"),
        (frames("nn/modules/linear.py:forward", "nn/modules/module.py:Module._call_impl"), "forward"),
        (frames("autograd/graph.py:_engine_run_backward", "autograd/__init__.py:backward"), "backward"),
        (frames("optim/sgd.py:SGD.step", "optim/optimizer.py:wrapper"), "optimizer"),
        (frames("distributed/distributed_c10d.py:barrier", "distributed/c10d_logger.py:wrapper"), "barrier"),
        ([OURS, *frames("distributed/distributed_c10d.py:all_reduce")], "collective"),
        ([OURS, USER], "wait"),
        (frames("distributed/distributed_c10d.py:init_process_group"), "rendezvous"),
        (frames("distributed/utils.py:_verify_param_shape_across_processes"), "collective"),
        (frames("serialization.py:_legacy_save", "serialization.py:save"), "save"),
        (frames("nn/modules/module.py:_call_impl", "_dynamo/convert_frame.py:_compile"), "compile"),
        ([["/usr/lib/python3.9/bdb.py", 1, "dispatch_line"], USER], "debugger"),
    ],
)
def test_the_innermost_function_that_tells(stack: list[list[object]], phase: str) -> None:
    assert phase_of(stack).value == phase
