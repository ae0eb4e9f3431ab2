"""Files that each drawn program has: the switch of its faults, its clock, its neighbour process, its start by spawn, and its twin."""

from __future__ import annotations

SWITCH = '''\
"""How much of each planned extra there is, by key; nothing where it is off or another rank's."""
import contextlib
import functools
import json
import mmap
import os
import pathlib
import random
import time

plan = json.loads(pathlib.Path(__file__).with_name("plan.json").read_text())
off = set()
calls = {}
given = {}
chance = random.Random(os.environ.get("RANK"))


def amount(key):
    extra = plan["extras"].get(key)
    rank = int(os.environ.get("RANK", 0))
    if extra is None or key in off or (extra["ranks"] is not None and rank not in extra["ranks"]):
        return 0
    calls[key] = calls.get(key, -1) + 1
    every = extra["every"]
    if "by_step" in extra:
        step = calls[key] // extra["calls"]
        given[key] = extra["by_step"][step] if step < len(extra["by_step"]) else 0
        return given[key]
    if extra.get("when") == "by chance":
        due = chance.random() * every < 1
    elif extra.get("when") == "in turn":
        due = calls[key] % int(os.environ["WORLD_SIZE"]) == rank
    else:
        due = calls[key] % every == every - 1
    return extra["amount"] if due else 0


@functools.cache
def planted_s():
    """Seconds by step, in memory that outlives this process: a write would let go of the GIL, where samples are taken."""
    with open(f"planted-{os.environ['RANK']}", "w+b") as file:
        file.truncate(8 * plan["steps"])
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")


@contextlib.contextmanager
def noted(key):
    """Writes down how long what is planted in there takes in this step, where there is any."""
    begun = time.perf_counter()
    yield
    if given.pop(key, 0):
        planted_s()[calls[key] // plan["extras"][key]["calls"]] += time.perf_counter() - begun
'''

TIMES = '''\
"""Wall time of each step, in ms."""
import time


class Times:
    def __init__(self):
        self.last, self.ms = time.perf_counter(), []

    def tick(self):
        now = time.perf_counter()
        self.ms.append(1000 * (now - self.last))
        self.last = now
'''

NEIGHBOUR = '''\
"""Another process on a rank's core, busy for a part of the time."""
import os
import subprocess
import sys
import time

PERIOD_S = 0.01
running = []


def move_in(part, core):
    os.sched_setaffinity(0, {core % os.cpu_count()})
    while running:
        running.pop().kill()
    if part:
        beside(part)


def beside(part):
    running.append(subprocess.Popen([sys.executable, __file__, str(part), str(os.getpid())]))


if __name__ == "__main__":
    part, landlord = float(sys.argv[1]), int(sys.argv[2])
    while os.getppid() == landlord:
        until = time.perf_counter() + part * PERIOD_S
        while time.perf_counter() < until:
            pass
        time.sleep((1 - part) * PERIOD_S)
'''

START = '''\
"""Starts as many ranks as are asked for by spawn."""
import os
import pathlib
import sys
import tempfile

import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world, store):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    from switch import plan
    from train import main

    main(plan["steps"])
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (ranks, pathlib.Path(folder) / "store"), nprocs=ranks)
'''

TWIN = '''\
"""Times the program with its extras on and off in turn, all in one start; the first blocks say how much is how long."""
import json
import os
import pathlib
import time

import torch
import torch.distributed as dist

dist.init_process_group(
    "gloo", os.environ["TWIN_STORE"], rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
)
import switch  # noqa: E402
import train  # noqa: E402

from tests.exam.real.twin import all_sure  # noqa: E402

HERE = pathlib.Path(__file__).parent
PLAN = switch.plan
KEYS = list(PLAN["extras"])
WARM, LEAST = 4, 8


def mean(values):
    return sum(values) / len(values)


def middle(values):
    return sorted(values)[len(values) // 2]


def block(steps):
    switch.calls.clear()
    ms = train.main(steps)[WARM:]
    return ms


def agreed(value):
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def per_ms(work, count):
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        work(count)
        best = min(best, 1000 * (time.perf_counter() - start))
    return count / best


def loop(count):
    total = 0
    for i in range(count):
        total += (i * 7) % 13


def dumps(count):
    for i in range(count):
        json.dumps({"step": i, "values": [0.25, 0.5]})


def products(count):
    w = torch.eye(160)
    for _ in range(count):
        w = w @ w


def reductions(count):
    for _ in range(count):
        dist.all_reduce(torch.zeros(4))


def collect(count):
    import gc
    gc.collect()


UNITS = {
    "loop": (loop, 20000), "dumps": (dumps, 500), "products": (products, 20), "reductions": (reductions, 10),
}

switch.off.update(KEYS + ["uneven", "resync"])
base = agreed(middle(block(WARM + 14)))
switch.off.clear()
for extra in PLAN["extras"].values():
    wanted = extra["share"] / (1 - extra["share"]) * base
    extra["wanted_ms"] = wanted
    unit = extra["unit"]
    if unit == "fixed":
        pass
    elif unit == "part":
        extra["amount"] = extra["share"]
    elif unit == "collect":
        once = agreed(1 / per_ms(collect, 1))
        extra["every"] = max(1, round(once / wanted))
    elif unit == "samples":
        extra["amount"] = max(1, round(extra["batch"] * wanted / base))
    elif unit == "sleep":
        if extra["workers"]:
            wanted = (wanted + base) * extra["workers"]
        extra["amount"] = round(wanted * extra["every"] / extra["calls"] / 1000, 6)
    elif unit == "bytes":
        extra["amount"] = int(wanted * extra["every"] * 4e5)
    else:
        rate = agreed(per_ms(*UNITS[unit]))
        extra["amount"] = max(1, round(wanted * extra["every"] * rate / extra["calls"]))
total = base + sum(extra["wanted_ms"] for extra in PLAN["extras"].values())
PLAN["steps"] = max(51, round(1000 * PLAN["seconds"] / total / 3) * 3)
dist.barrier()
if dist.get_rank() == 0:
    (HERE / "plan.json").write_text(json.dumps(PLAN))

variants = {"all": set()}
for key in KEYS:
    variants["without " + key] = {key}
if len(KEYS) > 1:
    variants["none"] = set(KEYS)
longest = max((extra["every"] for extra in PLAN["extras"].values()), default=1)
steps = LEAST if longest == 1 else 2 * longest
each_ms = len(variants) * (WARM + steps) * total
least, most = PLAN["rounds"]
rounds = min(most, max(least, round(1000 * PLAN["timed_s"] / each_ms)))
if rounds and longest == 1:
    steps = max(steps, round(1000 * PLAN["timed_s"] / (len(variants) * rounds * total)) - WARM)
blocks = {name: [] for name in variants}


def one_round():
    for name, off in variants.items():
        switch.off.clear()
        switch.off.update(off)
        count = WARM + steps
        count += -count % 3
        blocks[name].append(block(count)[:steps])


begun = time.monotonic()
for _ in range(rounds):
    one_round()
while agreed(rounds and not all_sure(blocks, PLAN["steady"]) and time.monotonic() - begun < PLAN["unsure_s"]):
    one_round()
if dist.get_rank() == 0:
    (HERE / "twin.json").write_text(json.dumps({"base_ms": base, "steps": steps, "blocks": blocks}))
dist.barrier()
os._exit(0)
'''
