"""What stands in for psutil in a bundle says what psutil says, of this machine and of processes on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import ddpdoctor.bundle
from tests.waiting import until


@pytest.fixture(scope="module")
def standin():
    place = Path(ddpdoctor.bundle.__file__).parent / "standins" / "psutil.py"
    spec = importlib.util.spec_from_file_location("psutil_standin", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_it_says_the_same_of_a_process(standin, sleeper):
    real, ours = psutil.Process(sleeper.pid), standin.Process(sleeper.pid)
    for name in ("create_time", "ppid", "num_threads", "cpu_affinity", "is_running"):
        assert getattr(ours, name)() == getattr(real, name)(), name
    for name, fields in {
        "cpu_times": ("user", "system"),
        "memory_info": ("rss",),
        "io_counters": ("read_bytes", "write_bytes"),
        "num_ctx_switches": ("voluntary", "involuntary"),
    }.items():
        with ours.oneshot():
            found = getattr(ours, name)()
        assert [getattr(found, field) for field in fields] == [
            getattr(getattr(real, name)(), field) for field in fields
        ], name
    assert standin.Process().pid == os.getpid()


def test_it_knows_a_process_that_has_ended(standin, sleeper):
    ours = standin.Process(sleeper.pid)
    sleeper.kill()
    until(lambda: ours.status() == standin.STATUS_ZOMBIE == psutil.STATUS_ZOMBIE, within_s=20)
    sleeper.wait()
    assert not ours.is_running()
    with pytest.raises(standin.NoSuchProcess):
        standin.Process(sleeper.pid)
    assert issubclass(standin.NoSuchProcess, standin.Error)


def test_it_says_the_same_of_the_machine(standin):
    assert standin.cpu_count() == psutil.cpu_count()
    assert standin.cpu_count(logical=False) in (psutil.cpu_count(logical=False), None)
    assert standin.boot_time() == psutil.boot_time()
    assert standin.virtual_memory().total == psutil.virtual_memory().total
    assert standin.virtual_memory().used == pytest.approx(psutil.virtual_memory().used, rel=0.2)
    for field in ("total", "used", "sin", "sout"):
        assert getattr(standin.swap_memory(), field) == getattr(psutil.swap_memory(), field)
    assert os.getpid() in standin.pids()
    real = psutil.cpu_times(percpu=True)
    assert len(standin.cpu_times(percpu=True)) == len(real)
    assert standin.cpu_times(percpu=True)[0]._fields == real[0]._fields
    assert standin.cpu_times().idle == pytest.approx(psutil.cpu_times().idle, rel=0.01)


def test_it_says_the_same_of_disks_and_networks(standin):
    real, ours = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}, standin.disk_io_counters()
    assert ours.keys() == real.keys()
    for name, disk in ours.items():
        assert disk.read_bytes == pytest.approx(real[name].read_bytes, rel=0.05, abs=1 << 24)
        assert disk.busy_time == pytest.approx(real[name].busy_time, rel=0.05, abs=1000)
    networks = psutil.net_io_counters(pernic=True, nowrap=False)
    assert standin.net_io_counters().keys() == networks.keys()
    for name, link in standin.net_if_stats().items():
        assert link.isup == psutil.net_if_stats()[name].isup
        assert link.speed == max(0, psutil.net_if_stats()[name].speed)
