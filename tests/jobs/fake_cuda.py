"""A DDP job on a device that is not there: CUDA events without CUDA, on a stream that runs behind its host.

    torchrun --nproc-per-node 2 fake_cuda.py --marks FILE [--slow always|seldom|never] [--capture N]

The model and the collectives are real, on the CPU, and take next to no time. What a device would do is told to a stream
that keeps its own time: forward, backward and optimizer are queued on it, the reduction of the gradients ends on it when
the last rank's has come to it. Events pass when the stream has come to them, never later than that is asked for. The last
rank's forward takes three times as long on its device, always or in one step of eight. FILE.<rank> tells what the events
should say: per step the ns at which each mark passed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FORWARD_MS, BACKWARD_MS, OPTIMIZER_MS, TRANSFER_MS = 9.0, 15.0, 3.0, 1.5
"""Far more than the host needs, on a busy machine too."""


class Stream:
    """Work in order; times are epoch ns."""

    def __init__(self) -> None:
        self.free_at = 0
        self.capturing = False

    def work(self, ms: float) -> None:
        self.free_at = self.now() + int(ms * 1e6)

    def now(self) -> int:
        """When it comes to what is queued now."""
        return max(self.free_at, time.time_ns())


stream = Stream()
log: list[int] = []


class Event:
    """torch.cuda.Event, of this stream. One that waits is an error: ddpdoctor never does."""

    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        Event.made += 1
        self.at = 0

    def record(self) -> None:
        assert not stream.capturing, "an event in a graph"
        self.at = stream.now()
        log.append(self.at)

    def query(self) -> bool:
        assert self.at and not stream.capturing
        return time.time_ns() >= self.at

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "read before it has passed"
        # A device's clock is not its host's: 50 ppm fast.
        return (other.at - self.at) / 1e6 * 1.00005


def counters(device: int) -> dict[str, object]:
    """The allocator's, of a device that has to be named: each thread has its own current one."""
    assert device == 0
    allocated, reserved = {"current": 10 << 30, "peak": 30 << 30}, {"current": 36 << 30, "peak": 40 << 30}
    return {
        "allocated_bytes": {"all": allocated},
        "reserved_bytes": {"all": reserved},
        "num_alloc_retries": 2,
    }


def install() -> None:
    torch.version.cuda = "12.8"
    torch.cuda.nccl.version = lambda: (2, 26, 2)
    torch.cuda.Event = Event
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: stream.capturing
    torch.cuda.memory_stats_as_nested_dict = counters
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=80 << 30)


class OnDevice(torch.autograd.Function):
    """Takes the device's time, in the forward and in the backward."""

    @staticmethod
    def forward(context, value, ms):
        stream.work(ms)
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        stream.work(BACKWARD_MS)
        return gradient, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, values, ms):
        return OnDevice.apply(self.layer(values), ms)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", required=True)
    parser.add_argument("--slow", choices=["always", "seldom", "never"], default="never")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--capture", type=int, default=-1, help="the step that is captured in a graph")
    options = parser.parse_args()
    install()
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    store = dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    now = [0]

    def wait() -> None:
        """The device waits for the others' devices."""
        store.set(f"{now[0]}.{rank}", str(stream.now()))
        ends = [int(store.get(f"{now[0]}.{other}")) for other in range(last + 1)]
        stream.free_at = max(ends) + int(TRANSFER_MS * 1e6)

    # As DDP queues its own waiting: once the last gradient is there, to be done at the backward's end.
    engine = torch.autograd.Variable._execution_engine
    model.module.layer.weight.register_post_accumulate_grad_hook(lambda _: engine.queue_callback(wait))
    for step in range(options.steps):
        now[0] = step
        stream.capturing = step == options.capture
        slow = rank == last and (options.slow == "always" or (options.slow == "seldom" and step % 8 == 7))
        loss = model(torch.randn(4, 8), FORWARD_MS * (3 if slow else 1)).square().mean()
        loss.backward()
        stream.work(OPTIMIZER_MS)
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:  # as one that prints the loss now and then
            time.sleep(max(0, stream.free_at - time.time_ns()) / 1e9)
    time.sleep(max(0, stream.free_at - time.time_ns()) / 1e9)
    Path(f"{options.marks}.{rank}").write_text(json.dumps({"passed": log, "made": Event.made}))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
