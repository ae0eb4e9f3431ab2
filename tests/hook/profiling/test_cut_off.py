"""A window that is cut off says by what."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from ddpdoctor.hook.profiling import window
from ddpdoctor.rundir.stepevents import Mark

torch_profiler = sys.modules[window.open_profiler.__module__]


@pytest.fixture
def opened(monkeypatch):
    """A window whose collection has ended, and its part of rank.json."""
    monkeypatch.setattr(window, "windows", [])
    monkeypatch.setenv("DDPDOCTOR_PROFILE_STEPS", "10:15")
    recorder = SimpleNamespace(always_full=True, marks=[], step=74)
    writer = SimpleNamespace(document_changed=threading.Event())
    session = SimpleNamespace(document={}, recorder=recorder, writer=writer)
    made = window.Window(session)
    made._open, made._opener, made._ended = True, threading.get_ident(), 1
    made._state.update(state="open", steps=[10, 15])
    return made, session.document["window"]


def test_an_interrupt_while_the_profiler_is_closed(opened, monkeypatch) -> None:
    """Ctrl-C comes back from torch with the profiler closed, and its result gone."""

    def interrupted(opener):
        raise KeyboardInterrupt

    made, state = opened
    monkeypatch.setattr(window, "close_profiler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made._close()
    monkeypatch.setattr(window, "close_profiler", lambda opener: None)
    made.finish(time.monotonic())
    assert state["state"] == "failed" and state["steps"] == [10, 15]
    assert state["why"] == "the job was interrupted, as by Ctrl-C, while the profiler was being closed"


def test_a_profiler_that_was_closed_by_somebody_else(opened, monkeypatch) -> None:
    made, state = opened
    monkeypatch.setattr(window, "close_profiler", lambda opener: None)
    made._close()
    assert state["why"] == "the profiler was taken over, or closed, by something else"


@pytest.mark.parametrize("backends", [["nccl"], ["nccl", "cpu:gloo,cuda:nccl"]])
def test_on_a_device_the_profiler_is_closed_once_the_windows_work_is_done(
    opened, monkeypatch, backends
) -> None:
    """Kernels go on being recorded until then. Where Gloo may still write, the window stays open for as long as on CPUs."""
    made, state = opened
    closed = []
    monkeypatch.setattr(window, "end_collection", lambda: None)
    monkeypatch.setattr(window, "close_profiler", closed.append)
    groups = {"process_groups": [{"backend": each} for each in backends]}
    monkeypatch.setattr(torch_profiler, "process_groups", lambda: groups)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    session, made._ended, made._stop, made._activities = made._session, 0, 15, {"CPU", "CUDA"}
    passed = [14]
    session.devices = SimpleNamespace(has_finished=lambda step: passed[-1] > step)
    for step in (15, 16, 17):
        made.at_step(step)
        assert not closed
    assert session.recorder.marks == [Mark.SAVING, Mark.SAVING]
    passed.append(15)
    made.at_step(18)
    assert bool(closed) == (backends == ["nccl"])
    if not closed:
        made._ended -= 2 * torch_profiler.SETTLE_NS
        made.at_step(19)
    assert len(closed) == 1 and state["steps"] == [10, 15]


def test_at_the_jobs_end_the_profiler_is_closed_once_the_device_has_finished(opened, monkeypatch) -> None:
    """torch does not synchronise: what the device has not begun by then is in no trace."""
    made, state = opened
    closed = []
    monkeypatch.setattr(window, "end_collection", lambda: None)
    monkeypatch.setattr(window, "backend_may_write", lambda: False)
    monkeypatch.setattr(window, "close_profiler", closed.append)
    done = [False, False, True]
    made._ended, made._activities = 0, {"CPU", "CUDA"}
    made._session.devices = SimpleNamespace(has_finished=lambda step: step == 73 and done.pop(0))
    made.finish(time.monotonic())
    assert len(closed) == 1 and not done and state["steps"] == [10, 74]


def test_gloo_may_write_where_the_process_groups_do_not_name_it(monkeypatch) -> None:
    """Debug mode compares NCCL's collectives through Gloo; and a group that is destroyed has threads while it is referred to."""
    distributed = pytest.importorskip("torch.distributed")
    groups = {"process_groups": [{"backend": "nccl"}]}
    monkeypatch.setattr(torch_profiler, "process_groups", lambda: groups)
    monkeypatch.setattr(torch_profiler, "_has_thread", lambda name: False)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert not torch_profiler.backend_may_write()
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.get_debug_level", lambda: distributed.DebugLevel.DETAIL)
        assert torch_profiler.backend_may_write()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    assert not torch_profiler.backend_may_write()
    monkeypatch.setattr(torch_profiler, "_has_thread", lambda name: name == "pt_gloo_runloop")
    assert torch_profiler.backend_may_write()


DESTROYED = """
import torch, torch.distributed as dist
from ddpdoctor.hook.profiling.torch_profiler import backend_may_write
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
assert backend_may_write()
"""


def test_threads_of_a_group_that_is_destroyed_are_seen() -> None:
    torch = pytest.importorskip("torch")
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 6):
        pytest.skip("Gloo's threads have no names")
    subprocess.run([sys.executable, "-c", DESTROYED], check=True, timeout=120)


@pytest.mark.parametrize(
    ("cuda", "captured", "own", "detaches"),
    [
        ("13.0", False, None, "1"),
        ("12.6", False, None, "1"),
        ("12.4", False, None, "0"),
        ("13.0", True, None, "0"),
        ("13.0", False, "0", "0"),
        ("12.4", False, "1", "1"),
    ],
)
def test_cupti_is_detached_after_the_window_where_that_is_safe(
    monkeypatch, cuda, captured, own, detaches
) -> None:
    monkeypatch.setenv("TEARDOWN_CUPTI", own or "")
    if own is None:
        monkeypatch.delenv("TEARDOWN_CUPTI")
    monkeypatch.setattr(torch_profiler, "_set_by_hook", {})
    monkeypatch.setenv("DISABLE_CUPTI_LAZY_REINIT", "1")
    monkeypatch.delenv("DISABLE_CUPTI_LAZY_REINIT")
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    graph = SimpleNamespace(default_capture_stream=object() if captured else None)
    torch = SimpleNamespace(
        version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(graphs=SimpleNamespace(graph=graph))
    )
    torch_profiler._configure_detaching(torch)
    assert os.environ["TEARDOWN_CUPTI"] == detaches
    assert ("DISABLE_CUPTI_LAZY_REINIT" in os.environ) == (captured or cuda == "12.4")
    graph.default_capture_stream = object()
    torch_profiler._configure_detaching(torch)
    assert os.environ["TEARDOWN_CUPTI"] == (own or "0"), "graphs were captured since the first window"
