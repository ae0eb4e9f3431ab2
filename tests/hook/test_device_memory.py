"""torch's counters of a device's memory, on a device that is not there: what is written, how often, and that nothing of it can
harm the job."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from ddpdoctor.hook import guard
from ddpdoctor.hook.stalls.status_thread import SAMPLES_PER_INTERVAL, DeviceMemory
from ddpdoctor.measure.memory import memory_of
from ddpdoctor.measure.steplog import read_rank_log
from ddpdoctor.rundir import MEMORY_FILE
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.rundir.stepevents import Phase
from tests.python import NEEDS_STACKS

from .recording import HookOptions, forked, run_recorded

torch = pytest.importorskip("torch")


@pytest.mark.torchrun
@NEEDS_STACKS
def test_a_rank_writes_what_its_tensors_take_in_which_phase(tmp_path):
    command = forked("fake_cuda.py", "--marks", str(tmp_path / "m"), "--steps", "150")
    job = run_recorded(tmp_path, command, HookOptions(profile_steps=None))
    assert job.process.returncode == 0, job.process.stderr
    for rank in (0, 1):
        assert job.info(rank)["hook"]["errors"] == [] and job.info(rank)["nccl"] == "2.26.2"
        head, *looks = map(json.loads, (job.folder(rank) / MEMORY_FILE).read_text().splitlines())
        assert head == {"schema": "ddpdoctor.memory/1", "device": "cuda:0", "total_bytes": 80 << 30}
        assert 2 <= len(looks) <= 20
        gaps = [later["t_ns"] - look["t_ns"] for look, later in pairwise(looks)]
        assert len(gaps) < 2 or any(abs(gap - 1e9) > 1e8 for gap in gaps), "at regular times"
        steps = {step["step"]: step["t"] for step in job.steps(rank)}
        for look in looks:
            assert look["phase"] in {phase.value for phase in Phase}
            assert look["allocated_bytes"] == 10 << 30 and look["reserved_peak_bytes"] == 40 << 30
            if look["step"] == len(steps):
                continue  # the job ends: no step follows
            begin_ns, end_ns = steps[look["step"]]
            assert begin_ns - 5e8 < look["t_ns"] < end_ns + 5e8
    logs = [read_rank_log(record) for record in RunDirectory.open(str(job.run)).ranks]
    facts = memory_of(logs, {}).facts
    assert (facts.allocated_peak_bytes, facts.reserved_peak_bytes) == (30 << 30, 40 << 30)
    assert facts.allocation_retries == 2


@pytest.fixture(autouse=True)
def fresh():
    guard.reset()
    yield
    guard.reset()


class Spool:
    def __init__(self):
        self.lines = []

    def write(self, stream, data):
        assert stream == MEMORY_FILE
        self.lines += data.decode().splitlines()
        return True


@pytest.fixture
def looking(monkeypatch):
    """A recording on device 3, whose thread is in a forward pass."""
    counted = {"current": 1, "peak": 2}
    counters = {"allocated_bytes": {"all": counted}, "reserved_bytes": {"all": counted}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {3: counters}[device])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=9))
    devices, recorder = SimpleNamespace(device=3), SimpleNamespace(step=5)
    session = SimpleNamespace(devices=devices, recorder=recorder, spool=Spool())
    return session, DeviceMemory(session, SimpleNamespace(phase=lambda: Phase.FORWARD))


def test_looks_become_rarer(looking):
    session, memory = looking
    for _ in range(7 * SAMPLES_PER_INTERVAL):
        memory.look()
    assert len(session.spool.lines) == 1 + 3 * SAMPLES_PER_INTERVAL
    assert json.loads(session.spool.lines[-1])["phase"] == "forward"


def test_a_job_that_has_not_used_its_device_is_left_alone(looking, monkeypatch):
    session, memory = looking
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: pytest.fail("asked"))
    session.devices.device = None
    memory.look()
    session.devices = None
    memory.look()
    assert session.spool.lines == []


def test_an_allocator_without_counters_is_asked_no_more(looking, monkeypatch, capsys):
    session, memory = looking
    asked = []

    def refuse(device):
        asked.append(device)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuse)
    for _ in range(10):
        memory.look()
    assert len(asked) == 3 and session.spool.lines == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_real_device_has_these_counters():
    """Unseen so far."""
    kept = torch.ones(1 << 20, device="cuda")
    spool = Spool()
    devices, recorder = SimpleNamespace(device=torch.cuda.current_device()), SimpleNamespace(step=0)
    session = SimpleNamespace(devices=devices, recorder=recorder, spool=spool)
    DeviceMemory(session, SimpleNamespace(phase=lambda: None)).look()
    head, look = map(json.loads, spool.lines)
    assert head["total_bytes"] > 1 << 30
    assert kept.nbytes <= look["allocated_bytes"] <= look["reserved_bytes"] <= look["reserved_peak_bytes"]
