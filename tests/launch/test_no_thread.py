"""Processes beside the launcher where no further thread is allowed (``ulimit -u``, a cgroup's ``pids.max``)."""

import os
import threading
import time
from contextlib import suppress

import pytest

from ddpdoctor.launch.helper import HelperProcess
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.launch.storage_process import StorageProcess
from ddpdoctor.process import is_readable


@pytest.fixture
def no_thread(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_a_process_that_cannot_be_listened_to_works_on_and_is_ended(no_thread):
    beside = HelperProcess("test", lambda orders, writer: is_readable(orders, 60))
    beside.start()
    beside.listen(lambda said: None, 1.0)
    beside.end()
    with suppress(ChildProcessError):
        assert os.waitpid(beside._pid, 0)[0] == beside._pid, "it has ended, or is about to"


def test_a_look_at_the_orders_does_not_wait_for_one():
    orders, launcher = os.pipe()
    began_s = time.monotonic()
    assert not is_readable(orders, 0)
    assert time.monotonic() - began_s < 1.0
    os.close(launcher)
    assert is_readable(orders, 0), "the launcher has gone"
    os.close(orders)


def test_the_storage_process_carries_on_without_telemetry(no_thread, tmp_path):
    answers, writer = os.pipe()
    began = []
    storage_process = StorageProcess(tmp_path, tmp_path, "", RunOptions(), 0, writer)
    assert storage_process._run_with_heartbeats(lambda: began.append(1)) and not began
    assert b"No telemetry: can't start new thread" in os.read(answers, 1000)
    os.close(answers)
    os.close(writer)
