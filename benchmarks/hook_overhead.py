"""What recording costs a training step: in one process, off and on in turn.

    python benchmarks/hook_overhead.py [--ranks 1 2] [--targets-ms 5 20] [--seconds 20]

Two runs of a job differ by more than the hook costs, on any machine that does something else besides. So the same job goes on in
blocks of steps of three kinds, in rounds of one each, in an order drawn anew: all patches off; steps of which only the times are kept,
as most are once a job has run for a minute; and steps recorded in full. Steps scatter by more than the hook costs, too, and with long
tails. So of each kind the midmean is taken, the mean of its middle half, in each of some groups of neighbouring rounds; printed are the
means over the groups, with their standard errors.

The threads beside the training thread work all along, as in a long run after its first minute, and the copier lock is held
as under ``ddpdoctor run``. What they cost comes last, of an undisturbed stretch: their CPU time, which the system counts exactly, in us a
second. It is added whole, though other cores may do that work, to what an average step takes beyond the step without the hook: that is
the sum, in us and as a share. Not in it are the processes beside the job, and the profiler window, which is not open.
With ``--asleep`` most of the step is a sleep, as of a host that waits for its device, after which 2 MB are copied, so that the hook's
code and data are as cold as after a step that computes. Such steps scatter ten times less, and what the hook takes comes on top of them in
full. With ``--pin`` each rank, its helper threads and Gloo's stay on a processor of their own, as a launcher that binds ranks has it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK_STEPS = 3
"""Timed in each block, after one that is not: the machine's pace changes within seconds, so what is compared must lie close together."""
GROUPS = 20
DISPLACING_BYTES = 2 << 20
"""With what is written, more than the caches of a core hold that it does not share."""
THREADS_S = 15.0
"""How long the threads beside the training thread are watched."""
SETTLE_STEPS = 400
MOST_SETTLE_S = 12.0


def main() -> None:
    """Run every combination and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--targets-ms", type=float, nargs="+", default=[5.0, 20.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of measurement, for each combination")
    parser.add_argument("--pin", action="store_true", help="each rank on a processor of its own")
    parser.add_argument("--asleep", action="store_true", help="the step waits instead of computing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.targets_ms[0], options.seconds, options.asleep)
        return
    print(
        f"{'ranks':>5} {'step_ms':>8} {'times_us':>9} {'+-':>6} {'full_us':>8} {'+-':>6} {'full':>5} {'threads_us/s':>12} "
        f"{'sum_us':>8} {'+-':>6} {'sum_%':>7} {'+-':>5} {'rounds':>6}"
    )
    for ranks in options.ranks:
        for target in options.targets_ms:
            words = [__file__, "--worker", "--targets-ms", str(target), "--seconds", str(options.seconds)]
            launch(ranks, words + ["--asleep"] * options.asleep, options.pin)


def launch(ranks: int, words: list[str], pin: bool = False) -> None:
    """Start ranks with the hook, each as Python with these ``words``, and wait for them; rank 0 prints the result."""
    sys.path.insert(0, str(ROOT))
    from ddpdoctor.hook.environment import HookOptions, job_environment
    from ddpdoctor.launch.leftovers import drain_spools
    from ddpdoctor.rundir.host_files import HostLock
    from ddpdoctor.rundir.spool import make_spool_root

    with socket.socket() as found, tempfile.TemporaryDirectory() as run:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        spool = make_spool_root(run)
        lock = HostLock(spool)
        lock.take()
        common = job_environment(run, spool, HookOptions(profile_steps=None), os.environ)
        common.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1"
        )
        started = [
            subprocess.Popen(
                [*(bound(rank) if pin else []), sys.executable, *words], env={**common, "RANK": str(rank)}
            )
            for rank in range(ranks)
        ]
        for process in started:
            process.wait()
        lock.release()
        drain_spools(Path(spool))


def bound(rank: int) -> list[str]:
    """What starts a command on the processor of this rank."""
    processors = sorted(os.sched_getaffinity(0))
    return ["taskset", "--cpu-list", str(processors[rank % len(processors)])]


OFF, TIMES, FULL = range(3)
"""Kinds of blocks: nothing is recorded, only the steps' times, everything."""


class Switch:
    """Turns the hook off and on inside a rank."""

    def __init__(self) -> None:
        self.patches = sys.modules["_ddpdoctor.hook.patching"].torch_patches
        recording = sys.modules["_ddpdoctor.hook.recording"]
        self.active, self.session = recording.active, recording.active.session
        self._sampler = self.session.services.sampler
        self._thinning = self.session.recorder.thinning
        self._next_block, self._thinning.next_block = self._thinning.next_block, self._forced
        self._until_full, self._thinning.until_full = self._thinning.until_full, self._forced_until_full
        self._kind = FULL

    def _forced(self, *about: Any) -> bool:
        self._next_block(*about)
        return self._kind == FULL

    def _forced_until_full(self, step: int) -> int:
        return 0 if self._kind == FULL else 1 << 30

    def to(self, kind: int) -> None:
        """The next steps are of this kind; the one in progress begins now."""
        self._kind = kind
        if kind == OFF:
            self.patches.suspend()
            return
        self.patches.resume()
        recorder = self.session.recorder
        recorder._full_block = kind == FULL
        self.active.record(kind == FULL)
        recorder.start_step(recorder.cut(time.perf_counter_ns()))

    def as_in_a_long_run(self, every: int) -> None:
        """From now on one step in ``every`` is recorded in full, and all else is as after the first minute."""
        self._thinning.every = every
        self._thinning._next_change = sys.maxsize
        self._thinning.next_block, self._thinning.until_full = self._next_block, self._until_full
        self._sampler._early_until = 0.0


def long_run_every(full_us: float, step_ns: float) -> int:
    """One step in how many is recorded in full, of a job that runs for long."""
    thinning = type(sys.modules["_ddpdoctor.hook.recording"].active.recorder.thinning)()
    for step in range(0, 20_000, 8):
        thinning.next_block(step, round(full_us * 1000), round(step_ns))
    return int(thinning.every)


def work(target_ms: float, seconds: float, asleep: bool) -> None:
    """One rank: settle, then measure in rounds of blocks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    step = sleeping_step(target_ms) if asleep else make_step(target_ms)
    switch = Switch()
    ends = time.perf_counter() + MOST_SETTLE_S
    for number in range(SETTLE_STEPS):
        step()
        if agreed(time.perf_counter() > ends) if number % 20 == 19 else False:
            break
    rounds: list[list[list[int]]] = []
    ends = time.perf_counter() + seconds
    order = random.Random(0)
    """The same on all ranks."""
    while not agreed(time.perf_counter() > ends):
        blocks: list[list[int]] = [[], [], []]
        for kind in order.sample((OFF, TIMES, FULL), 3):
            switch.to(kind)
            blocks[kind] = steps_ns(step)
        switch.to(FULL)
        rounds.append(blocks)
    base_ns = midmean([time_ns for blocks in rounds for time_ns in blocks[OFF]])
    every = long_run_every(switch.session.recorder.thinning.cost_us, base_ns)
    switch.as_in_a_long_run(every)
    begun, before_ns, ends = time.perf_counter(), threads_ns(), time.perf_counter() + THREADS_S
    while not agreed(time.perf_counter() > ends):
        step()
    beside = (threads_ns() - before_ns) / 1e3 / (time.perf_counter() - begun)
    if dist.get_rank() == 0:
        report(dist.get_world_size(), rounds, base_ns, every, beside)
    dist.barrier()
    sys.stdout.flush()
    del torch
    os._exit(0)


def steps_ns(step: Any) -> list[int]:
    """What each step of one block takes, the first left out."""
    step()
    ends = [time.perf_counter_ns()]
    for _ in range(BLOCK_STEPS):
        step()
        ends.append(time.perf_counter_ns())
    return [end - begin for begin, end in itertools.pairwise(ends)]


def threads_ns() -> int:
    """CPU time of the hook's threads so far."""
    ours = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("ddpdoctor-")]
    return sum(int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) for number in ours)


def agreed(mine: bool) -> bool:
    """Whether any rank says so."""
    import torch
    import torch.distributed as dist

    vote = torch.tensor([float(mine)])
    dist.all_reduce(vote)
    return bool(vote.item())


def sleeping_step(target_ms: float) -> Any:
    """A small training step that waits until it is of about this duration."""
    import torch

    step = make_step(0.0)
    pause_s = max(0.0, target_ms / 1e3 - midmean([each for _ in range(20) for each in steps_ns(step)]) / 1e9)
    source, target = (torch.zeros(DISPLACING_BYTES, dtype=torch.uint8) for _ in range(2))

    def wait() -> None:
        time.sleep(pause_s)
        target.copy_(source)

    return make_step(0.0, wait)


def make_step(target_ms: float, wait: Any = lambda: None) -> Any:
    """A training step of about this duration: data loader, forward, backward, ``wait``, a collective from Python, optimizer."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    layers, width = (12, 128) if target_ms < 30 else (24, 256)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*parts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def with_batch(batch: int) -> Any:
        dataset = TensorDataset(torch.randn(batch * 8, width))
        loader = DataLoader(dataset, batch_size=batch)

        def batches() -> Any:
            while True:
                yield from loader

        source = batches()

        def step() -> None:
            (data,) = next(source)
            optimizer.zero_grad()
            value = model(data).square().mean()
            value.backward()
            wait()
            optimizer.step()
            dist.all_reduce(value.detach())

        return step

    batch = 8.0
    while batch < 8192:
        step = with_batch(round(batch))
        for _ in range(3):
            step()
        if agreed(midmean(steps_ns(step)) >= target_ms * 1e6):
            break
        batch *= 1.25
    return step


def report(ranks: int, rounds: list[list[list[int]]], base_ns: float, every: int, beside: float) -> None:
    """Print one line. One step in ``every`` is recorded in full in a long run; ``beside`` is the threads' CPU time, us a second."""
    size = max(1, len(rounds) // GROUPS)
    groups = [rounds[first : first + size] for first in range(0, len(rounds) - size + 1, size)]
    times, full = ([beyond_us(group, kind) for group in groups] for kind in (TIMES, FULL))
    mean = [one * (1 - 1 / every) + other / every for one, other in zip(times, full, strict=True)]
    (thin_us, thin_error), (full_us, full_error), (mean_us, mean_error) = map(
        mean_and_error, (times, full, mean)
    )
    sum_us, base_us = mean_us + beside * base_ns / 1e9, base_ns / 1e3
    print(
        f"{ranks:5} {base_us / 1e3:8.2f} {thin_us:9.1f} {thin_error:6.1f} {full_us:8.1f} {full_error:6.1f} "
        f"{f'1/{every}':>5} {beside:12.1f} {sum_us:8.1f} {mean_error:6.1f} {100 * sum_us / base_us:7.2f} "
        f"{100 * mean_error / base_us:5.2f} {len(rounds):6}",
        flush=True,
    )


def beyond_us(rounds: list[list[list[int]]], kind: int) -> float:
    """What a step of this kind takes beyond one without the hook."""
    with_hook, without = (
        midmean([time_ns for blocks in rounds for time_ns in blocks[each]]) for each in (kind, OFF)
    )
    return (with_hook - without) / 1e3


def midmean(values: list[int]) -> float:
    """The mean of the middle half."""
    quarter = len(values) // 4
    return statistics.fmean(sorted(values)[quarter : len(values) - quarter])


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), error


if __name__ == "__main__":
    main()
