"""Controls torch's profiler by its low-level functions, on the training thread: open, end of collection, close.

Collection ends at the end of a step; the profiler is closed at the end of a later one. Gloo's threads write the end of each
collective into the profiler's memory, which closing frees. If a collective is still in flight, or its thread merely lacks a CPU at
that moment, they write to freed memory (torch 2.13: two ranks that close the profiler right after an asynchronous ``all_reduce``
crash within 150 attempts if freed memory is unmapped, MALLOC_MMAP_THRESHOLD_=8192). NCCL has no such threads.

On a GPU, end of collection only stops the recording of operators. Kernels are recorded until the profiler is closed, and each adds
to the time that closing takes. (On one H200, closing after 1 s, or 130,000 kernels, blocked the training thread for 1.6 s.)
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from ..job import job_torch, process_groups

SETTLE_NS = 1_000_000_000
"""Minimum ns between the end of collection and the closing of the profiler, so that Gloo's threads finish the collectives in
flight. 50 ms were too short on a busy machine."""


_DETACHES_SAFELY = (12, 6)
"""First CUDA version in which CUPTI can be detached safely."""


def open_profiler() -> Any:
    """Start torch's profiler on this thread. Returns the recorded activities."""
    from torch._C._profiler import _ExperimentalConfig

    torch = job_torch()
    autograd = torch.autograd
    activities = {autograd.ProfilerActivity.CPU}
    if torch.cuda.is_initialized() and torch.cuda.is_available():
        activities.add(autograd.ProfilerActivity.CUDA)
        _configure_detaching(torch)
    config = autograd.ProfilerConfig(
        autograd.ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig()
    )
    autograd._prepare_profiler(config, activities)
    autograd._enable_profiler(config, activities)
    return activities


def _configure_detaching(torch: Any) -> None:
    """Configure Kineto to detach CUPTI after the window, which restores the cost of launches. On one H200, a step of 13.2 ms with
    620 kernels otherwise took 14.8 ms for the rest of the job. Not done with CUDA graphs, nor before CUDA 12.6, where re-attaching
    CUPTI crashes a job that uses them (pytorch/pytorch pull requests 112507 and 146604). The job's own values of these variables
    are kept."""
    version = tuple(int(part) for part in str(torch.version.cuda or "0.0").split(".")[:2])
    graphs = getattr(torch.cuda, "graphs", None)
    captured = "torch._inductor.cudagraph_trees" in sys.modules or (
        getattr(getattr(graphs, "graph", None), "default_capture_stream", None) is not None
    )
    if version < _DETACHES_SAFELY or captured:
        _set_variable("DISABLE_CUPTI_LAZY_REINIT", "1")
        _set_variable("TEARDOWN_CUPTI", "0")
    else:
        _set_variable("TEARDOWN_CUPTI", "1")


_set_by_hook: dict[str, str] = {}
"""Variables set for an earlier window. They may change, because the job may have captured graphs since."""


def _set_variable(variable: str, value: str) -> None:
    if os.environ.get(variable) in (None, _set_by_hook.get(variable)):
        os.environ[variable] = _set_by_hook[variable] = value


def backend_may_write() -> bool:
    """Whether threads of a process group's backend may still write to the profiler's memory after the end of collection."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    if distributed.is_initialized():
        configs = [str(group["backend"]) for group in process_groups().get("process_groups", ())]
        # One backend, or one per device: "cpu:gloo,cuda:nccl".
        backends = {each.rpartition(":")[2] for config in configs for each in config.split(",")}
        if not backends <= {"nccl"} or distributed.get_debug_level() == distributed.DebugLevel.DETAIL:
            return True  # in debug mode, each group checks its collectives through a Gloo group
    # The threads of a destroyed group run as long as the group is referenced.
    return _has_thread("pt_gloo_runloop")


def _has_thread(name: str) -> bool:
    """Whether this process has a thread with this name (torch 2.6 and newer name Gloo's)."""
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().strip() == name:
                    return True
        except OSError:
            continue  # the thread has ended
    return False


def end_collection() -> None:
    """Stop recording operators on this thread; the profiler stays open."""
    # Not _toggle_collection_dynamic, which prints a warning to stderr.
    job_torch().autograd._enable_record_function(False)


def close_profiler(opener: int) -> Any:
    """Stop torch's profiler, on the thread that started it. Returns its result; None if it is not on or this is another thread."""
    if threading.get_ident() != opener:
        return None
    torch = job_torch()
    torch.autograd._enable_record_function(True)
    return torch.autograd._disable_profiler() if torch.autograd._profiler_enabled() else None


def profiler_is_on() -> bool:
    """Whether any torch profiler is on, on this thread."""
    return bool(job_torch().autograd._profiler_enabled())


def node_number() -> int:
    """The sequence number of the next node of this thread's autograd graph; 0 if unknown."""
    get = getattr(job_torch()._C._autograd, "_get_sequence_nr", None)
    return 0 if get is None else int(get())
