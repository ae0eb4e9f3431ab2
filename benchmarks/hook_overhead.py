"""What recording costs a training step: paired, in one process, hook on and off in turn.

    python benchmarks/hook_overhead.py [--ranks 1 2] [--targets-ms 5 20 100] [--seconds 20]

Two runs of a job differ by more than the hook costs, on any machine that does something else besides. So the
same job switches
all patches off and on in blocks of steps, and neighbouring blocks are compared. Printed are the step time
without the hook, the
median of the paired differences with its standard error (1.25 times that of the mean, for a median), and the
ratio of the two;
then the same of the CPU time that the whole process used, which other processes on the machine disturb less.
Sampling and writing are part of what is switched; the profiler window is not open. With ``--pin`` each rank, its helper
threads and Gloo's stay on a processor of their own, as a launcher that binds ranks has it: the scheduler's choices make up
much of the scatter.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK_STEPS = 10
SETTLE_STEPS = 400
MOST_SETTLE_S = 12.0


def main() -> None:
    """Run every combination and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--targets-ms", type=float, nargs="+", default=[5.0, 20.0, 100.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of measurement, for each combination")
    parser.add_argument(
        "--every-step", action="store_true", help="record every step in full, however short it is"
    )
    parser.add_argument("--pin", action="store_true", help="each rank on a processor of its own")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.targets_ms[0], options.seconds, options.every_step)
        return
    print(
        f"{'ranks':>5} {'step_ms':>8} {'wall_us':>9} {'+-':>7} {'wall_%':>7} {'+-':>6} "
        f"{'cpu_us':>8} {'+-':>6} {'cpu_%':>6} {'recorded':>9} {'pairs':>6}"
    )
    for ranks in options.ranks:
        for target in options.targets_ms:
            launch(ranks, target, options.seconds, options.every_step, options.pin)


def launch(ranks: int, target_ms: float, seconds: float, every_step: bool, pin: bool) -> None:
    """Start the ranks of one combination; rank 0 prints the result."""
    sys.path.insert(0, str(ROOT))
    from ddpdoctor.hook.environment import HookOptions, job_environment
    from ddpdoctor.launch.leftovers import drain_spools
    from ddpdoctor.rundir import make_spool_root

    with socket.socket() as found, tempfile.TemporaryDirectory() as run:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        spool = make_spool_root(run)
        common = job_environment(run, spool, HookOptions(profile_steps=None), os.environ)
        common.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1"
        )
        command = [
            sys.executable,
            __file__,
            "--worker",
            "0",
            "--targets-ms",
            str(target_ms),
            "--seconds",
            str(seconds),
        ]
        command += ["--every-step"] * every_step
        started = [
            subprocess.Popen(bound(rank) * pin + command, env={**common, "RANK": str(rank)})
            for rank in range(ranks)
        ]
        for process in started:
            process.wait()
        drain_spools(Path(spool))


def bound(rank: int) -> list[str]:
    """What starts a command on the processor of this rank."""
    processors = sorted(os.sched_getaffinity(0))
    return ["taskset", "--cpu-list", str(processors[rank % len(processors)])]


class Switch:
    """Turns the hook off and on inside a rank."""

    def __init__(self) -> None:
        self.patches = sys.modules["_ddpdoctor.hook.patching"].torch_patches
        self.session = sys.modules["_ddpdoctor.hook.recording"].active.session
        services = sys.modules["_ddpdoctor.hook.services"]._running[id(self.session)]
        self._threads = [(services.sampler, "_sample"), (self.session.writer, "_copy")]
        self._bodies = [getattr(owner, name) for owner, name in self._threads]

    def off(self) -> None:
        """No patch, and threads that do nothing when they wake."""
        self.patches.suspend()
        for owner, name in self._threads:
            setattr(owner, name, lambda *_, **__: None)

    def on(self) -> None:
        """Everything as it was; the step in progress begins now."""
        self.patches.resume()
        for (owner, name), body in zip(self._threads, self._bodies, strict=True):
            setattr(owner, name, body)
        recorder = self.session.recorder
        recorder.start_step(recorder.cut(time.perf_counter_ns()))


def work(target_ms: float, seconds: float, every_step: bool) -> None:
    """One rank: settle, then measure in pairs of blocks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    step = make_step(target_ms)
    switch = Switch()
    switch.session.recorder.always_full = every_step
    ends = time.perf_counter() + MOST_SETTLE_S
    for number in range(SETTLE_STEPS):
        step()
        if agreed(time.perf_counter() > ends) if number % 20 == 19 else False:
            break
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    ends = time.perf_counter() + seconds
    first_is_on = True
    while not agreed(time.perf_counter() > ends):
        blocks = {}
        for turned_on in (first_is_on, not first_is_on):
            switch.on() if turned_on else switch.off()
            blocks[turned_on] = block_ns(step)
        switch.on()
        first_is_on = not first_is_on
        pairs.append((blocks[False], blocks[True]))
    if dist.get_rank() == 0:
        report(dist.get_world_size(), pairs, switch.session.recorder.thinning.every)
    dist.barrier()
    sys.stdout.flush()
    del torch
    os._exit(0)


def block_ns(step: Any) -> tuple[float, float]:
    """Of the steps of one block, the first left out: the median wall time and the mean CPU time, ns."""
    step()
    cpu = time.process_time_ns()
    walls = []
    for _ in range(BLOCK_STEPS):
        begun = time.perf_counter_ns()
        step()
        walls.append(time.perf_counter_ns() - begun)
    return statistics.median(walls), (time.process_time_ns() - cpu) / BLOCK_STEPS


def agreed(mine: bool) -> bool:
    """Whether any rank says so."""
    import torch
    import torch.distributed as dist

    vote = torch.tensor([float(mine)])
    dist.all_reduce(vote)
    return bool(vote.item())


def make_step(target_ms: float) -> Any:
    """A training step of about this duration: data loader, forward, backward, a collective from Python,
    optimizer.
    """
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
            optimizer.step()
            dist.all_reduce(value.detach())

        return step

    batch = 8.0
    while batch < 8192:
        step = with_batch(round(batch))
        for _ in range(3):
            step()
        if agreed(block_ns(step)[0] >= target_ms * 1e6):
            break
        batch *= 1.25
    return step


def report(ranks: int, pairs: list[Any], every: int) -> None:
    """Print one line."""
    wall, wall_error = median_and_error([on[0] - off[0] for off, on in pairs])
    cpu, cpu_error = median_and_error([on[1] - off[1] for off, on in pairs])
    base = statistics.median(off[0] for off, _ in pairs)
    used = statistics.median(off[1] for off, _ in pairs)
    print(
        f"{ranks:5} {base / 1e6:8.2f} {wall / 1e3:9.1f} {wall_error / 1e3:7.1f} {100 * wall / base:7.2f} {100 * wall_error / base:6.2f} "
        f"{cpu / 1e3:8.1f} {cpu_error / 1e3:6.1f} {100 * cpu / used:6.2f} {'1/' + str(every):>9} {len(pairs):6}",
        flush=True,
    )


def median_and_error(values: list[float]) -> tuple[float, float]:
    """The median, and its standard error from the quartiles: their distance is 1.35 standard deviations."""
    quartiles = statistics.quantiles(values, n=4)
    return quartiles[1], 1.25 * (quartiles[2] - quartiles[0]) / 1.35 / len(values) ** 0.5


if __name__ == "__main__":
    main()
