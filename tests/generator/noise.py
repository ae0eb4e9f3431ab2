"""Random draws keyed by what they are for, never by the order in which they are asked for.

A simulation without one planted cause must see the same jitter everywhere else; a shared stream of random
numbers would shift all later draws. Every draw therefore names itself, for instance ``("forward", rank,
step)``.
"""

from __future__ import annotations

import hashlib

import numpy as np


class Noise:
    """Keyed random draws; the same seed and key always give the same values."""

    def __init__(self, seed: int, jitter: float) -> None:
        self.seed = seed
        self.jitter = jitter

    def draws(self, *key: object) -> np.random.Generator:
        """A generator of its own for ``key``. Asking for more values leaves the first as they were."""
        digest = hashlib.blake2b(repr((self.seed, *key)).encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))

    def factors(self, count: int, *key: object, scale: float = 1.0) -> list[float]:
        """``count`` lognormal factors with mean 1 and the configured jitter (times ``scale``) as sigma."""
        sigma = self.jitter * scale
        if sigma == 0.0:
            return [1.0] * count
        return np.exp(sigma * self.draws(*key).standard_normal(count) - sigma * sigma / 2).tolist()

    def factor(self, *key: object, scale: float = 1.0) -> float:
        """One lognormal factor with mean 1."""
        return self.factors(1, *key, scale=scale)[0]

    def uniform(self, *key: object) -> float:
        """One value in [0, 1)."""
        return float(self.draws(*key).random())
