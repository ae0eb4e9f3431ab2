"""CPU time of everything that runs beside the training threads of a healthy job, and of noting a collective.

    python benchmarks/watching.py [--ranks 2] [--seconds 30]

A job of small steps is run as users run it. Printed is the CPU time per second of the job: of a rank's status thread (a thread beside the
training thread), while steps are taken and while one step lasts long; and of the processes beside the ranks: the launcher, the storage
process, which also samples the host, and the hang monitor. Also the time added to each collective that the training thread calls from
Python, in a step of which only the times are recorded. These calls follow each other: in a real step, with other data in the caches, a
call takes a few times as long.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ddpdoctor.rundir.host_files import HANG_MONITOR, STORAGE

ROOT = Path(__file__).resolve().parent.parent
STEP_S = 0.02
SETTLED_S = 55.0
"""From the first step to the first reading: records are then copied as rarely as in long runs."""
CALLS = 20_000
_TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the job and print what it cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of steps that are measured, and as long of one step"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        launch(Path(folder), options.ranks, options.seconds)


def launch(folder: Path, ranks: int, seconds: float) -> None:
    run = [
        sys.executable,
        "-m",
        "ddpdoctor",
        "run",
        "--out",
        str(folder / "run"),
        "--no-analysis",
        "--no-profile",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    job = [str(Path(__file__)), "--worker", "--seconds", str(seconds)]
    process = subprocess.Popen(
        [*run, "--hang-after", "100000", "--", *torchrun, *job],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (folder / "steps").exists() and process.poll() is None:
        time.sleep(0.1)
    time.sleep(SETTLED_S)
    ours = own_processes(process.pid)
    before = {pid: cpu_us(pid) for pid in ours}
    measured_s = seconds * 0.9
    time.sleep(measured_s)
    spent = {ours[pid]: (cpu_us(pid) - before[pid]) / measured_s for pid in ours}
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(errors)
    for name, us_per_s in spent.items():
        print(f"{name + ', while steps are taken':<52} {us_per_s:8.0f} us/s")
    whole = sum(spent.values())
    print(f"{f'all processes beside {ranks} ranks':<52} {whole:8.0f} us/s, {whole / 1e4:.2f} % of a core")


def own_processes(launcher: int) -> dict[int, str]:
    """The launcher and its children, without the job: process id -> name."""
    names = {launcher: "launcher"}
    waiting = [launcher]
    while waiting:
        pid = waiting.pop()
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if Path(f"/proc/{child}/cmdline").read_text().split("\0")[2] == "torch.distributed.run":
                continue
            handles = [str(handle.readlink()) for handle in Path(f"/proc/{child}/fd").iterdir()]
            locks = {HANG_MONITOR: "hang monitor", STORAGE: "storage process, with host samples"}
            held = (
                what for lock, what in locks.items() if any(each.endswith(f"/{lock}") for each in handles)
            )
            names[int(child)] = next(held, f"process {len(names)}")
            waiting.append(int(child))
    return names


def cpu_us(pid: int) -> float:
    """What a process has computed; in the kernel's ticks, of 10 ms mostly."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_US


def thread_us(name: str) -> float:
    """What a thread of this process has computed."""
    thread = next(each for each in threading.enumerate() if each.name == name)
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e3


def work(seconds: float) -> None:
    """One rank. Where whoever started it was killed, it ends by itself."""
    signal.alarm(round(4 * (SETTLED_S + seconds)) + 120)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step() -> None:
        parameter.sum().backward()
        optimizer.step()

    step()
    dist.barrier()
    Path("steps").touch()
    status_thread = "ddpdoctor-status"
    began_s, before_us = time.monotonic(), thread_us(status_thread)
    while time.monotonic() - began_s < SETTLED_S + seconds:
        time.sleep(STEP_S)
        step()
    stepping_us = (thread_us(status_thread) - before_us) / (time.monotonic() - began_s)
    before_us = thread_us(status_thread)
    time.sleep(seconds)
    standing_us = (thread_us(status_thread) - before_us) / seconds
    if dist.get_rank() == 0:
        print(f"{'status thread of a rank, while steps are taken':<52} {stepping_us:8.0f} us/s")
        print(f"{'status thread of a rank, while one step lasts':<52} {standing_us:8.0f} us/s")
        print(f"{'a collective called from Python, written down':<52} {a_call_us():8.2f} us")
    dist.barrier()
    dist.destroy_process_group()


def a_call_us() -> float:
    """What the wrapper adds to a call in a step of which only the times are recorded."""
    import torch
    from _ddpdoctor.hook.patches import collectives
    from _ddpdoctor.hook.recording import active

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    active.record(full=False)
    tensor = torch.ones(16)
    timed = collectives._wrapped(nothing, "all_reduce")

    def us_of(function: Any) -> float:
        began_ns = time.perf_counter_ns()
        for _ in range(CALLS):
            function(tensor)
        return (time.perf_counter_ns() - began_ns) / CALLS / 1e3

    return min(us_of(timed) for _ in range(5)) - min(us_of(nothing) for _ in range(5))


if __name__ == "__main__":
    main()
