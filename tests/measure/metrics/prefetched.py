"""Simulated data loaders whose workers prefetch: how long ``next`` takes, and how often ``dataloader/starved`` reports a wait for data.

``python -m tests.measure.metrics.prefetched`` prints the rates for several thresholds of ``loader.fetch_share``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from ddpdoctor.measure.metrics import fetch_share

COMPUTE_MS = 20.0
"""Of a step, between two requests."""
HEALTHY, STARVED = 0.01, 0.05
"""A loop waits for at most, or at least, this share of its steps for batches that are not ready."""
_SCATTER = 0.03
"""Standard deviation of a step's computation, as part of it."""
_WARM_UP = 3
_HICCUP_MS = 4.0, 8.0
"""Of what a hiccup of the machine takes: the least, and the mean of the rest, which has an exponential tail."""
THRESHOLDS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)


@dataclass(frozen=True)
class Seen:
    """What is measured of a job: means over its steps."""

    step_ms: float
    cost_ms: float
    """Saved per step if each ``next`` took no time."""
    waits_ms: float
    """The same if each only took as long as fetching a batch that is ready."""
    ready: float
    """Batches ready at a request, on the rank with the fewest."""
    busy: float
    """Share of the time in which workers prepare batches."""
    fetch_share: float
    """As the fact."""

    @property
    def unclear(self) -> bool:
        """Whether only ``fetch_share`` tells if the loop waits: batches are ready, and workers are idle at times."""
        return self.ready >= 1.0 and self.busy < 0.85


def _constant(random, shape):
    return np.ones(shape)


def _gamma(random, shape):
    return random.gamma(4.0, 0.25, shape)


def _lognormal(random, shape):
    return random.lognormal(-(1.5**2) / 2, 1.5, shape)


def _pareto(random, shape):
    return (1.0 + random.pareto(1.5, shape)) / 3.0


EVEN = (_constant, _gamma, _lognormal, _pareto)
"""Times of batches with a mean of 1; the last two have heavy tails."""


def _slow_every(random, shape, workers, queue_ms):
    """One of so many batches in order is slow: a file, a shard, or the batches of one worker."""
    every = int(random.choice([workers, 2 * workers, 3 * workers, 4 * workers + 1, 16, 32]))
    return queue_ms * random.uniform(0.5, 3.0) * (np.arange(shape[1]) % every == every - 1)


def _slow_sometimes(random, shape, workers, queue_ms):
    slow = random.random(shape) < random.choice([0.02, 0.05, 0.1, 0.2])
    return queue_ms * random.uniform(0.5, 3.0) * slow


SLOW = (_slow_every, _slow_sometimes)
"""What single batches take in addition, as a multiple of the time in which the loop empties the queue."""
KINDS = (*EVEN, *SLOW)


def drawn(kind, seed):
    """A job at random: 1 to 8 ranks with 2 to 8 workers that prefetch 2 or 4 batches each and could deliver 1.4 to 10 times as many as the
    loop takes; fetching takes 0.2 to 4 ms; the machine stops each process for 12 ms in none to 30 % of 20 ms."""
    random = np.random.default_rng((KINDS.index(kind), seed))
    workers, prefetch = int(random.choice([2, 4, 8])), int(random.choice([2, 4]))
    ranks, steps = int(random.choice([1, 2, 4, 8])), int(random.choice([20, 60, 150]))
    rate = random.choice([0.0, 0.03, 0.1, 0.3]) / 20.0
    shape = ranks, steps + _WARM_UP + workers * prefetch
    usual_ms = COMPUTE_MS * workers * random.uniform(0.1, 0.7)
    if kind in EVEN:
        batches = usual_ms * kind(random, shape)
    else:
        slow_ms = kind(random, shape, workers, COMPUTE_MS * workers * prefetch)
        batches = usual_ms / 2 * random.gamma(20.0, 0.05, shape) + slow_ms
    shape = ranks, steps + _WARM_UP
    fetch = random.choice([0.2, 0.5, 1.0, 2.0, 4.0]) * random.lognormal(
        0.0, random.choice([0.2, 0.5, 0.8]), shape
    )
    compute = COMPUTE_MS * (1.0 + _SCATTER * random.standard_normal(shape))
    return run(*(ms + _hiccups(random, rate, ms) for ms in (batches, fetch, compute)), workers, prefetch)


def _hiccups(random, rate, ms):
    """ms by which work that takes ``ms`` is longer, with ``rate`` hiccups per ms."""
    count = random.poisson(rate * ms)
    return _HICCUP_MS[0] * count + random.gamma(np.maximum(count, 1), _HICCUP_MS[1]) * (count > 0)


def run(batches, fetch, compute, workers, prefetch):
    """Ranks that meet at the end of each step, each with a loader as torch's: batches go to the workers in turn, the next one when one has
    been taken, and are taken in order. All [ranks, ...] ms."""
    ranks, steps = fetch.shape
    queue = workers * prefetch
    free, done = np.zeros((ranks, workers)), np.zeros(batches.shape)

    def dispatch(batch, now):
        worker = batch % workers
        free[:, worker] = done[:, batch] = np.maximum(now, free[:, worker]) + batches[:, batch]

    for batch in range(queue):
        dispatch(batch, 0.0)
    now, ends = done[:, 0].max(), []
    waits, ready = np.zeros((ranks, steps)), np.zeros((ranks, steps))
    for step in range(steps):
        ready[:, step] = (done[:, step : step + queue] <= now).sum(axis=1)
        waits[:, step] = np.maximum(done[:, step] - now, 0.0)
        taken = now + waits[:, step] + fetch[:, step]
        dispatch(step + queue, taken)
        now = (taken + compute[:, step]).max()
        ends.append(now)
    waits, fetch, compute, ready = (of[:, _WARM_UP:] for of in (waits, fetch, compute, ready))
    step_ms = (ends[-1] - ends[_WARM_UP - 1]) / (steps - _WARM_UP)
    preparing = batches[:, _WARM_UP:steps].sum(axis=1) / (workers * (ends[-1] - ends[_WARM_UP - 1]))
    seen = (
        step_ms,
        step_ms - compute.max(axis=0).mean(),
        step_ms - (fetch + compute).max(axis=0).mean(),
        ready.mean(axis=1).min(),
        preparing[(waits + fetch).sum(axis=1).argmax()],
        min(fetch_share(of_rank) for of_rank in waits + fetch),
    )
    return Seen(*(float(each) for each in seen))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000, help="of each kind [1000]")
    jobs = [drawn(kind, seed) for kind in KINDS for seed in range(parser.parse_args().jobs)]
    unclear = [job for job in jobs if job.unclear]
    print("Threshold                               " + "".join(f"{each:7}" for each in THRESHOLDS))
    for least in (0.02, 0.05):
        healthy = [job for job in jobs if job.waits_ms <= HEALTHY * job.step_ms]
        found = [job.fetch_share for job in healthy if job.unclear and job.cost_ms >= least * job.step_ms]
        _print(f"healthy, cost of {least:.0%} or more", found, len(healthy))
    for low, high in ((STARVED, 0.1), (0.1, 0.2), (0.2, 1.0)):
        for name, most_ms in (("", np.inf), (", cheap to fetch", 0.05 * COMPUTE_MS)):
            waiting = [
                job.fetch_share
                for job in unclear
                if low <= job.waits_ms / job.step_ms < high and job.cost_ms - job.waits_ms <= most_ms
            ]
            _print(f"waits {low:.0%} to {high:.0%}{name}", waiting, len(waiting))


def _print(name, shares, total):
    found = [100 * np.sum(np.array(shares) < threshold) / total for threshold in THRESHOLDS]
    print(f"{name:34}{total:6}" + "".join(f"{each:7.1f}" for each in found), flush=True)


if __name__ == "__main__":
    main()
