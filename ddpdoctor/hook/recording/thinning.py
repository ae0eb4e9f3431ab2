"""Records fewer steps in full when they are so short that recording each would cost too much."""

from __future__ import annotations

from typing import Optional

MOST_SHARE = 0.007
"""Of the step's time: above it, half as many steps are recorded in full."""
LEAST_SHARE = 0.003
"""Below it, twice as many."""
EARLY_STEPS, MANY_STEPS, LONG_STEPS = 512, 2048, 8192
"""After them both are smaller, by the factors below: there is enough for a diagnosis by then, and a long job pays for longer. Of
8192 steps of 20 ms five to eight hundred were recorded in full; a stall in one step of a hundred is among them five times."""
_FACTORS = ((LONG_STEPS, 32), (MANY_STEPS, 8), (EARLY_STEPS, 2))
"""Of steps of 20 ms, 270 to 340 us in full, one in 16 to 32 is recorded in full after many steps, and one in 64 in the long run."""
MOST_THINNED = 64
"""One block in so many at least: of ten thousand steps there are still some twenty blocks in full."""
BLOCK_STEPS = 8
"""Neighbouring steps that are recorded together: a step is measured from the end of the one before."""
_WEIGHT = 1 / 2
"""Of the newest block, in the averages."""
_LEAST_RISE_NS = 4000.0
_MOST_RISE = 0.1
"""By one reading the estimate of the cost rises by this share of itself at most, or by so many ns where that is more."""
_SETTLE_STEPS = 32
"""Steps between two changes, and before the first: the first steps of a job are unlike the rest."""


class Thinning:
    """One block of steps in ``every`` is recorded in full: a power of two, so that ranks which thin differently share steps."""

    def __init__(self) -> None:
        self.every = 1
        self.step_ns = 0.0
        """What a step takes, averaged over the last blocks, ns."""
        self._cost_ns = 20_000.0
        self._next_change = _SETTLE_STEPS

    @property
    def cost_us(self) -> float:
        """What recording one step in full costs the training thread, estimated, microseconds."""
        return round(self._cost_ns / 1000, 1)

    def next_block(self, step: int, cost_ns: Optional[int], step_ns: int) -> bool:
        """Whether the block that begins with ``step`` is to be recorded in full.

        Of the last block, ``cost_ns`` is what recording a step of it in full cost, None where there was none, and ``step_ns``
        what a step of it took.
        """
        if cost_ns is not None:
            # The clock runs on while another process has the core: a long reading moves the average only a little.
            most = max(_LEAST_RISE_NS, _MOST_RISE * self._cost_ns)
            self._cost_ns += min((cost_ns - self._cost_ns) * _WEIGHT, most)
        self.step_ns += (step_ns - self.step_ns) * _WEIGHT
        if step >= self._next_change:
            factor = next((factor for least, factor in _FACTORS if step >= least), 1)
            share = factor * self._cost_ns / max(self.step_ns, 1.0) / self.every
            if share > MOST_SHARE and self.every < MOST_THINNED:
                self.every *= 2
                self._next_change = step + _SETTLE_STEPS
            elif share < LEAST_SHARE and self.every > 1:
                self.every //= 2
                self._next_change = step + _SETTLE_STEPS
        return step // BLOCK_STEPS % self.every == 0

    def until_full(self, step: int) -> int:
        """How many steps come before the next block in full, counted from ``step``; 0 within such a block."""
        cycle = BLOCK_STEPS * self.every
        into = step % cycle
        return 0 if into < BLOCK_STEPS else cycle - into
