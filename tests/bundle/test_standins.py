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
    for name in ("create_time", "ppid", "cpu_affinity", "is_running"):
        assert getattr(ours, name)() == getattr(real, name)(), name
    for name, fields in {
        "cpu_times": ("user", "system"),
        "memory_info": ("rss",),
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
    sleeper.wait()
    assert not ours.is_running()
    with pytest.raises(standin.NoSuchProcess):
        standin.Process(sleeper.pid)
    assert issubclass(standin.NoSuchProcess, standin.Error)


def test_it_says_the_same_of_the_machine(standin):
    assert standin.cpu_count() == psutil.cpu_count()
    assert standin.boot_time() == psutil.boot_time()
    assert standin.virtual_memory().total == psutil.virtual_memory().total
    assert standin.virtual_memory().used == pytest.approx(psutil.virtual_memory().used, rel=0.2)
    for field in ("sin", "sout"):
        assert getattr(standin.swap_memory(), field) == getattr(psutil.swap_memory(), field)
    assert os.getpid() in standin.pids()
    assert standin.cpu_times()._fields == psutil.cpu_times()._fields
    assert standin.cpu_times().idle == pytest.approx(psutil.cpu_times().idle, rel=0.01)
