"""A trace that is still being written when the job ends, and the flight recorder beside it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ddpdoctor.hook import guard
from ddpdoctor.hook.environment import HookOptions, job_environment, name_flight_entries
from ddpdoctor.hook.profiling import trace_file


@pytest.mark.parametrize("left", [False, True])
def test_what_fails_once_nobody_waits_any_more_is_not_told(monkeypatch, capsys, left):
    go_on, told = threading.Event(), []

    def save(job):
        go_on.wait(10)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(trace_file.TraceJob, "_save_trace", save)
    monkeypatch.setattr(trace_file, "_header", lambda session: {})
    monkeypatch.setattr(guard, "_reported", False)
    monkeypatch.setattr(guard, "errors", [])
    session = SimpleNamespace(document={"ended_ns": None}, rank=0)
    job = trace_file.TraceJob(session, None, 0, lambda *words: told.append(words), 0, number=1)
    job.start()
    if left:
        job.finish_until(time.monotonic())
        session.document["ended_ns"] = 1
        go_on.set()
    else:
        go_on.set()
        job.finish_until(time.monotonic() + 10)
    job._thread.join(10)
    assert bool(told) is not left
    assert ("could not be saved" in capsys.readouterr().err) is not left


NOTHING = '{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
NCCL = NOTHING.replace('"pg_status":{}', '"pg_status":{"0":{"last_enqueued_collective":"210"}}')
GLOO = NOTHING.replace('"pg_status":{}', '"pg_status":{"0":{"last_enqueued_collective":"7"}}')


@pytest.mark.parametrize(
    ("nccl", "other", "read"),
    [(NCCL, NOTHING, NCCL), (NOTHING, GLOO, GLOO), (NCCL, None, NCCL), (None, GLOO, GLOO), (None, None, None), (NOTHING, NOTHING, NOTHING)],
    ids=["NCCL", "Gloo where NCCL is built in", "torch 2.7", "torch for CPUs", "older", "not yet used"],
)  # fmt: skip
def test_the_recorder_of_the_backend_in_use_is_read(monkeypatch, nccl, other, read):
    """torch has one for NCCL and one for the other backends, and each can be read whatever the job uses."""
    c10d = torch._C._distributed_c10d
    for name, text in (("_dump_nccl_trace_json", nccl), ("_dump_fr_trace_json", other)):
        if text is None:
            monkeypatch.delattr(c10d, name, raising=False)
        else:
            monkeypatch.setattr(c10d, name, lambda text=text, **what: text.encode(), raising=False)
    for collectives in (True, False):
        found = trace_file.flight_recorder(collectives)
        assert found == (None if read is None else read.encode())


@pytest.mark.parametrize("on_cuda", [True, False])
def test_what_reads_nccls_collectives_leaves_captures_of_graphs_alone(monkeypatch, on_cuda):
    """torch queries the collectives' events, which invalidates a capture of another thread unless this thread is in relaxed mode."""
    modes = []
    runtime = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=lambda mode: modes.append(mode._obj.value))
    monkeypatch.setattr(trace_file.ctypes, "CDLL", lambda name: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_cuda)
    trace_file.flight_recorder(collectives=False)
    assert modes == []
    trace_file.flight_recorder()
    assert modes == ([2] if on_cuda else [])


OLDER, NEWER = SimpleNamespace(_dump_nccl_trace=1), SimpleNamespace(_dump_nccl_trace=1, _dump_fr_trace=1)


@pytest.mark.parametrize(
    ("given", "torch_c10d", "wanted"),
    [
        ({}, NEWER, ("2000", None)),
        ({"TORCH_FR_BUFFER_SIZE": ""}, NEWER, ("2000", None)),
        ({}, OLDER, ("2000", "2000")),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, OLDER, ("0", "0")),
        ({"TORCH_FR_BUFFER_SIZE": "10", "TORCH_NCCL_TRACE_BUFFER_SIZE": "20"}, OLDER, ("10", "20")),
        ({}, SimpleNamespace(), ("2000", None)),
    ],
)
def test_the_recorders_entries_under_the_names_that_torch_reads(given, torch_c10d, wanted):
    """torch 2.8 and newer warn of the older name."""
    set_to = job_environment("/run", "/spool", HookOptions(), given)
    name_flight_entries(set_to, torch_c10d)
    assert (set_to["TORCH_FR_BUFFER_SIZE"], set_to.get("TORCH_NCCL_TRACE_BUFFER_SIZE")) == wanted
