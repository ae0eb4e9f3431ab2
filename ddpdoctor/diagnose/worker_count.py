"""Recommends a number of dataloader workers."""

from __future__ import annotations

import math

_ASLEEP_SHARE = 0.1
"""A worker that computes for less than this share of its time is not limited by the number of cores."""
WAITS_SHARE, _BUSY = 0.5, 0.8
"""If workers wait (for I/O) for more than the first share of their time, additional workers cost little: recommend enough that each is
busy for the second share of the time, so a slow batch does not delay training."""


def workers(
    now: int | None,
    wait_ms: float,
    mean_ms: float,
    after_ms: float,
    cores: float | None,
    computing: float | None = None,
) -> int:
    """Recommended number of dataloader workers per rank.

    Preparing a batch takes ``wait_ms`` in the training process (``now`` is 0), or ``now`` x ``mean_ms`` if ``now`` workers
    together prepare one per step. Training needs one every ``after_ms``. At most 16, and at most as many as ``cores`` (idle
    per rank, None if unknown) allow if each computes for the share ``computing`` (0 to 1, None if unknown) of its time; but
    always more than ``now``.
    """
    batch_ms = now * mean_ms if now else wait_ms
    waits = computing is not None and computing < WAITS_SHARE
    pace_ms = max(after_ms, 0.05 * mean_ms) * (_BUSY if waits else 1.0)
    # At least two: with one worker, each slow batch delays training.
    needed = max(math.ceil(batch_ms / pace_ms), 2)
    asleep = computing is not None and computing < _ASLEEP_SHARE
    most = 16 if cores is None or asleep else min(16, int(cores / (computing or 1.0)))
    return max(min(needed, most), (now or 0) + 1)
