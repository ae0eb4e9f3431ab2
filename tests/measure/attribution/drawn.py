"""Windows whose ranks differ by chance alone, or by one that is late as well: how often a rank is named. Late is one in each cycle by a
tenth of the step, or for longer in a few of many, where a busy machine disturbs all.

``python -m tests.measure.attribution.drawn`` prints tables of both.
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np

from ddpdoctor.measure.attribution import attribute
from tests.measure.made import late_of, simple

USUAL_MS = {"data": 1.0, "copy": 0.3, "forward": 5.0, "backward": 10.0, "optimizer": 1.0, "host": 0.5}
"""A step of 20 ms, with its transfer. Forward and backward scatter together, as they share a clock."""
CYCLES = (2, 3, 4, 5, 6, 8, 10, 20, 50, 200)
WORLDS = (2, 4, 8, 16)
SCATTERS = (0.02, 0.04, 0.06, 0.1)
"""Standard deviation of each kind of work, as part of it."""
LATE_MS = 2.0
"""A tenth of the step."""
STRUCK = (0.03, 0.1, 0.3)
"""Part of its cycles in which a busy machine disturbs a rank, each rank by itself."""
_QUIET = 0.03
"""Standard deviation of each kind of work beside these disturbances, as part of it."""
_DISTURBED_MS = 8.0
"""Mean of what they take beyond half of that: from a fifth of the step on, with an exponential tail."""
PAUSE_MS = 30.0
"""A pause of the late rank's own, one and a half steps."""
_TAIL = 3
"""Degrees of freedom of noise with a heavy tail."""
_KEPT = 0.8
"""Of a drift, from each cycle to the next."""


def normal(random, shape):
    return random.standard_normal(shape)


def heavy(random, shape):
    """Student's, with the quartiles of a normal distribution."""
    return random.standard_t(_TAIL, shape) * 0.674 / 0.765


def drifting(random, shape):
    """Half of the variance changes slowly, as :func:`wandering`."""
    return np.sqrt(0.5) * (wandering(random, shape) + random.standard_normal(shape))


def wandering(random, shape):
    """All of the variance changes slowly (an autoregressive process): a tenth of a deviation is left after ten cycles."""
    drift = random.standard_normal(shape)
    for n in range(1, shape[0]):
        drift[n] = _KEPT * drift[n - 1] + np.sqrt(1 - _KEPT**2) * drift[n]
    return drift


NOISES = (normal, heavy, drifting, wandering)


def window(noise, cycles, world, scatter, seed, late=None):
    """A graph. ``late`` is the component in which the last rank takes a tenth of the step longer."""
    random = np.random.default_rng((seed, cycles, world))
    factors = {name: noise(random, (cycles, 1, world)) for name in USUAL_MS}
    factors["backward"] = factors["forward"]
    work = {name: ms * np.clip(1.0 + scatter * factors[name], 0.1, None) for name, ms in USUAL_MS.items()}
    if late is not None:
        work[late][..., -1] += LATE_MS
    return simple(world, cycles, **work)


def busy(cycles, world, struck, seed, pauses=0, kind="host"):
    """A graph of ranks that a machine disturbs at this rate, wherever in its step a rank is. The last one also pauses in so many
    cycles, always in this ``kind`` of work."""
    random = np.random.default_rng((seed, cycles, world))
    shape = cycles, 1, world
    lost = np.where(
        random.random(shape) < struck, _DISTURBED_MS / 2 + random.exponential(_DISTURBED_MS, shape), 0.0
    )
    usual = np.array([*USUAL_MS.values()])
    place = random.choice(len(usual), shape, p=usual / usual.sum())
    work = {
        name: ms * (1.0 + _QUIET * random.standard_normal(shape)) + lost * (place == at)
        for at, (name, ms) in enumerate(USUAL_MS.items())
    }
    work[kind][random.choice(cycles, pauses, replace=False), 0, -1] += PAUSE_MS
    return simple(world, cycles, **work)


def named(graph, *, short=False, seen=False):
    """Positions of the ranks that are called stragglers with any kind of work; with ``seen`` also of those that are only told to
    stand out of a short window."""
    found = attribute(graph, short=short)
    told = [ranks for kind, ranks in found.stragglers.items() if seen or kind not in found.stands_out_in]
    return {rank for ranks in told for rank in ranks}


def by_chance(noise, cycles, world, windows, **how):
    """Share of windows of ranks alike in which one is named; all scatters alike often."""
    return np.mean(
        [
            bool(named(window(noise, cycles, world, SCATTERS[seed % len(SCATTERS)], seed), **how))
            for seed in range(windows)
        ]
    )


def costliest(noise, cycles, world, windows):
    """For each window of ranks alike, the share of the step that the costliest kind of lateness costs; 0 if no rank is named."""
    costs = [
        late_of(window(noise, cycles, world, SCATTERS[seed % len(SCATTERS)], seed)) for seed in range(windows)
    ]
    return [max((cost.share for cost in found.values() if cost.ranks), default=0.0) for found in costs]


def power(noise, cycles, world, scatter, windows, late="backward", *, short=False):
    """Share of windows in which just the late rank is named."""
    return np.mean(
        [
            named(window(noise, cycles, world, scatter, seed, late), short=short) == {world - 1}
            for seed in range(windows)
        ]
    )


def by_a_machine(cycles, world, struck, windows):
    """Share of windows of ranks alike on a busy machine in which one is named."""
    return np.mean([bool(named(busy(cycles, world, struck, seed))) for seed in range(windows)])


def power_of_pauses(cycles, world, struck, pauses, kind, windows):
    """Share of windows in which just the rank that pauses is named."""
    return np.mean(
        [named(busy(cycles, world, struck, seed, pauses, kind)) == {world - 1} for seed in range(windows)]
    )


def row(shares):
    return "".join(f"{100 * share:10.1f}" for share in shares)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=200, help="for each number [200]")
    parser.add_argument(
        "--short", action="store_true", help="as windows on devices, all that is known of a job"
    )
    chosen = parser.parse_args()
    windows, short = chosen.windows, chosen.short
    ranks = "".join(f"{f'{world} ranks':>10}" for world in WORLDS)
    print(f"Named by chance, % of windows\n{'noise':10}{'cycles':>7}{ranks}")
    for noise, cycles in product(NOISES, CYCLES):
        shares = row(by_chance(noise, cycles, world, windows, short=short) for world in WORLDS)
        print(f"{noise.__name__:10}{cycles:7}{shares}", flush=True)
    print(f"\nNamed by chance on a busy machine, % of windows\n{'struck':10}{'cycles':>7}{ranks}")
    for struck, cycles in product(STRUCK, CYCLES):
        shares = row(by_a_machine(cycles, world, struck, windows) for world in WORLDS)
        print(f"{struck:<10}{cycles:7}{shares}", flush=True)
    print("\nA rank that is late by a tenth of the step is named, % of windows")
    print(f"{'noise':10}{'scatter':>8}{'cycles':>7}{ranks}")
    for noise, scatter, cycles in product(NOISES, SCATTERS[:3], (5, 8, 10, 20)):
        shares = row(power(noise, cycles, world, scatter, windows, short=short) for world in WORLDS)
        print(f"{noise.__name__:10}{scatter:8}{cycles:7}{shares}", flush=True)
    print("\nA rank that pauses in some of 60 cycles is named, % of windows")
    print(f"{'work':10}{'struck':>8}{'pauses':>7}{ranks}")
    for kind, struck, pauses in product(("host", "backward"), (0.0, *STRUCK[:2]), (3, 5, 8, 20)):
        shares = row(power_of_pauses(60, world, struck, pauses, kind, windows) for world in WORLDS)
        print(f"{kind:10}{struck:8}{pauses:7}{shares}", flush=True)


if __name__ == "__main__":
    main()
