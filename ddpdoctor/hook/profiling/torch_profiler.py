"""torch's profiler by its low-level functions, on the training thread: open, end of collection, close.

Collection ends at the end of a step, the profiler is closed at the end of a later one. Gloo's threads note the end of each
collective in the profiler's memory, which closing it frees: with one still in flight, or its thread merely without a CPU at
that moment, they write to freed memory (torch 2.13: two ranks that close the profiler right after an asynchronous
``all_reduce`` die within 150 tries where freed memory is unmapped, MALLOC_MMAP_THRESHOLD_=8192). NCCL has no such threads.

On a GPU only the recording of operators ends with the collection; kernels are recorded until the profiler is closed, and each
costs time then. (On one H200 a second of them, 130,000 events, made closing it take 1.6 s, in which the training thread stood.)
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from ..job import job_torch, process_groups

SETTLE_NS = 1_000_000_000
"""Between the end of collection and the closing of the profiler, at least, for Gloo's threads to come to an end with the
collectives that they had begun. 50 ms were too short on a busy machine.
"""


_DETACHES_SAFELY = (12, 6)
"""Version of CUDA."""


def open_profiler() -> Any:
    """Start torch's profiler on this thread. Returns the activities that it records."""
    from torch._C._profiler import _ExperimentalConfig

    torch = job_torch()
    autograd = torch.autograd
    activities = {autograd.ProfilerActivity.CPU}
    if torch.cuda.is_initialized() and torch.cuda.is_available():
        activities.add(autograd.ProfilerActivity.CUDA)
        _choose_detaching(torch)
    config = autograd.ProfilerConfig(
        autograd.ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig()
    )
    autograd._prepare_profiler(config, activities)
    autograd._enable_profiler(config, activities)
    return activities


def _choose_detaching(torch: Any) -> None:
    """Have Kineto detach CUPTI after the window, so that launches cost no more than before it: on one H200, a step of 13.2 ms with 620
    kernels took 14.8 ms for the rest of the job otherwise. Not with CUDA graphs, nor before CUDA 12.6, where attaching it again crashes a
    job that has them (pytorch/pytorch pull requests 112507 and 146604). The job's own settings of these variables stay."""
    version = tuple(int(part) for part in str(torch.version.cuda or "0.0").split(".")[:2])
    graphs = getattr(torch.cuda, "graphs", None)
    captured = "torch._inductor.cudagraph_trees" in sys.modules or (
        getattr(getattr(graphs, "graph", None), "default_capture_stream", None) is not None
    )
    if version < _DETACHES_SAFELY or captured:
        _choose("DISABLE_CUPTI_LAZY_REINIT", "1")
        _choose("TEARDOWN_CUPTI", "0")
    else:
        _choose("TEARDOWN_CUPTI", "1")


_chosen: dict[str, str] = {}
"""Variables that were set for an earlier window: the job may have captured graphs since."""


def _choose(variable: str, value: str) -> None:
    if os.environ.get(variable) in (None, _chosen.get(variable)):
        os.environ[variable] = _chosen[variable] = value


def others_may_write() -> bool:
    """Whether threads of a process group's backend may still write to the profiler's memory after the end of collection."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    if distributed.is_initialized():
        configs = [str(group["backend"]) for group in process_groups().get("process_groups", ())]
        # One backend, or one per device: "cpu:gloo,cuda:nccl".
        backends = {each.rpartition(":")[2] for config in configs for each in config.split(",")}
        if not backends <= {"nccl"} or distributed.get_debug_level() == distributed.DebugLevel.DETAIL:
            return True  # in debug mode, each group compares its collectives through a group of Gloo's
    # The threads of a group that was destroyed live as long as something refers to it.
    return _has_thread("pt_gloo_runloop")


def _has_thread(name: str) -> bool:
    """Whether this process has a thread of this name (torch 2.6 and newer name Gloo's)."""
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().strip() == name:
                    return True
        except OSError:
            continue  # it has ended meanwhile
    return False


def end_collection() -> None:
    """Stop recording operators in the profiler of this thread, which stays open."""
    # There is also _toggle_collection_dynamic, which warns on the standard error output.
    job_torch().autograd._enable_record_function(False)


def close_profiler(opener: int) -> Any:
    """Stop torch's profiler if it is on, on the thread that started it; its result, or None."""
    if threading.get_ident() != opener:
        return None
    torch = job_torch()
    torch.autograd._enable_record_function(True)
    return torch.autograd._disable_profiler() if torch.autograd._profiler_enabled() else None


def profiler_is_on() -> bool:
    """Whether any profiler of torch is on, on this thread."""
    return bool(job_torch().autograd._profiler_enabled())


def node_number() -> int:
    """The number of the next node of this thread's autograd graph, 0 where unknown."""
    get = getattr(job_torch()._C._autograd, "_get_sequence_nr", None)
    return 0 if get is None else int(get())
