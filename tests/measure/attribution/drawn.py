"""Windows whose ranks differ by chance alone, or by one that is late as well: how often a rank is named.

``python -m tests.measure.attribution.drawn`` prints both as tables.
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np

from ddpdoctor.measure.attribution import attribute
from tests.measure.made import simple

USUAL_MS = {"data": 1.0, "copy": 0.3, "forward": 5.0, "backward": 10.0, "optimizer": 1.0, "host": 0.5}
"""A step of 20 ms, with its transfer. Forward and backward scatter together, as they share a clock."""
CYCLES = (2, 3, 4, 5, 6, 8, 10, 20, 50, 200)
WORLDS = (2, 4, 8, 16)
SCATTERS = (0.02, 0.04, 0.06, 0.1)
"""Standard deviation of each kind of work, as part of it."""
LATE_MS = 2.0
"""A tenth of the step."""
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
    """Half of the variance changes slowly: a tenth of it is left after ten cycles."""
    drift = random.standard_normal(shape)
    for n in range(1, shape[0]):
        drift[n] = _KEPT * drift[n - 1] + np.sqrt(1 - _KEPT**2) * drift[n]
    return np.sqrt(0.5) * (drift + random.standard_normal(shape))


NOISES = (normal, heavy, drifting)


def window(noise, cycles, world, scatter, seed, late=None):
    """A graph. ``late`` is the component in which the last rank takes a tenth of the step longer."""
    random = np.random.default_rng((seed, cycles, world))
    factors = {name: noise(random, (cycles, 1, world)) for name in USUAL_MS}
    factors["backward"] = factors["forward"]
    work = {name: ms * np.clip(1.0 + scatter * factors[name], 0.1, None) for name, ms in USUAL_MS.items()}
    if late is not None:
        work[late][..., -1] += LATE_MS
    return simple(world, cycles, **work)


def named(noise, cycles, world, scatter, seed, late=None, *, short=False, seen=False):
    """Positions of the ranks that are called stragglers with any kind of work; with ``seen`` also of those that are only told to
    stand out of a short window."""
    found = attribute(window(noise, cycles, world, scatter, seed, late), short=short)
    told = [ranks for kind, ranks in found.stragglers.items() if seen or kind not in found.stands_out_in]
    return {rank for ranks in told for rank in ranks}


def by_chance(noise, cycles, world, windows, **how):
    """Share of windows of ranks alike in which one is named; all scatters alike often."""
    return np.mean(
        [
            bool(named(noise, cycles, world, SCATTERS[seed % len(SCATTERS)], seed, **how))
            for seed in range(windows)
        ]
    )


def power(noise, cycles, world, scatter, windows, late="backward", *, short=False):
    """Share of windows in which just the late rank is named."""
    return np.mean(
        [
            named(noise, cycles, world, scatter, seed, late, short=short) == {world - 1}
            for seed in range(windows)
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=200, help="for each number [200]")
    parser.add_argument(
        "--short", action="store_true", help="as windows on devices, all that is known of a job"
    )
    chosen = parser.parse_args()
    print("Named by chance, % of windows")
    print(f"{'noise':10}{'cycles':>7}" + "".join(f"{f'{world} ranks':>10}" for world in WORLDS))
    for noise, cycles in product(NOISES, CYCLES):
        shares = [by_chance(noise, cycles, world, chosen.windows, short=chosen.short) for world in WORLDS]
        print(
            f"{noise.__name__:10}{cycles:7}" + "".join(f"{100 * share:10.1f}" for share in shares), flush=True
        )
    print("\nA rank that is late by a tenth of the step is named, % of windows")
    print(f"{'noise':10}{'scatter':>8}{'cycles':>7}" + "".join(f"{f'{world} ranks':>10}" for world in WORLDS))
    for noise, scatter, cycles in product(NOISES, SCATTERS[:3], (5, 8, 10, 20)):
        shares = [
            power(noise, cycles, world, scatter, chosen.windows, short=chosen.short) for world in WORLDS
        ]
        row = "".join(f"{100 * share:10.1f}" for share in shares)
        print(f"{noise.__name__:10}{scatter:8}{cycles:7}{row}", flush=True)


if __name__ == "__main__":
    main()
