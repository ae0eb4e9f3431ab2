"""Readings of this machine and of a process, compared with those of psutil."""

from __future__ import annotations

import os

import psutil
import pytest

from ddpdoctor.rundir.liveness import boot_time_s, started
from ddpdoctor.telemetry.host import HostSampler, swapped_bytes
from ddpdoctor.telemetry.procfs import TICKS_PER_S, parent_of, pids
from ddpdoctor.telemetry.sampler import ProcessTreeSampler


def test_the_machine():
    sampler, memory, swap = HostSampler(), psutil.virtual_memory(), psutil.swap_memory()
    assert sampler.facts["cpu_count_logical"] == psutil.cpu_count()
    assert sampler.facts["cpu_count_usable"] == len(psutil.Process().cpu_affinity())
    assert sampler.facts["memory_total_bytes"] == memory.total
    assert sampler.sample()["memory_used_bytes"] == pytest.approx(memory.total - memory.available, rel=0.2)
    if os.path.exists("/proc/vmstat"):
        assert swapped_bytes() == (swap.sin, swap.sout)
    assert boot_time_s() == psutil.boot_time()
    assert os.getpid() in pids()


def test_a_process():
    process = psutil.Process()
    assert parent_of(process.pid) == process.ppid()
    assert boot_time_s() + started(process.pid) / TICKS_PER_S == pytest.approx(process.create_time(), abs=1)
    rank = ProcessTreeSampler(lambda: {0: process.pid}).sample()["0"]
    assert rank["process_rss_bytes"] == pytest.approx(process.memory_info().rss, rel=0.1)
