"""What the kernel says of a process and of those it has started: who works, and who only waits."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ddpdoctor.telemetry.procfs import Meter

READY = "print('ready', flush=True); "
WAYS = {
    "asleep": "import threading; " + READY + "threading.Event().wait(60)",
    "polls": "import time; " + READY + "\nwhile True: time.sleep(0.05)",
    "writes": "import time; file = open('/dev/null', 'wb', buffering=0); "
    + READY
    + "\nwhile True: file.write(bytes(100_000)); time.sleep(0.2)",
    "takes memory": "import time; kept = []; "
    + READY
    + "\nwhile len(kept) < 600: kept.append(bytes(200_000).replace(b'\\0', b'x')); time.sleep(0.1)",
    "a child computes": "import subprocess, sys; "
    + READY
    + "subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "a child dozes": "import subprocess, sys; "
    + READY
    + "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])",
    "a child moves a little": 'import subprocess, sys; code = \'import time\\nwhile True: open("/proc/uptime").read(); '
    "time.sleep(0.2)'; " + READY + "subprocess.run([sys.executable, '-c', code])",
    "receives": "import socket, threading, time; one, other = socket.socketpair()\n"
    "def send():\n while True: other.send(bytes(1000)); time.sleep(0.2)\n"
    "threading.Thread(target=send, daemon=True).start(); " + READY + "\nwhile True: one.recv(4096)",
    "spins": READY + "\nwhile True: pass",
}


@pytest.fixture
def meters() -> Iterator[dict[str, Meter]]:
    processes = {
        way: subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for way, code in WAYS.items()
    }
    meters = {way: Meter(process.pid) for way, process in processes.items()}
    for process in processes.values():
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield meters
    for process in processes.values():
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
        process.wait()


@pytest.mark.extended
def test_who_works(meters: dict[str, Meter]) -> None:
    time.sleep(1.0)  # a child that has just been started does something in any case
    moved: dict[str, int] = dict.fromkeys(WAYS, 0)
    for _ in range(5):
        for way, meter in meters.items():
            meter.update(None)
            moved[way] += meter.moves
        time.sleep(1.0)
    working = {way for way, times in moved.items() if times >= 2}
    assert working == {"writes", "takes memory", "a child computes", "a child moves a little", "receives"}
    assert meters["spins"].cores > 0.05 and meters["asleep"].cores < 0.05
