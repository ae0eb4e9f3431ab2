"""Runs a program's twin in forked ranks, so that torch is imported once for all programs, and computes the cost of a fault and its
uncertainty from rounds with and without the fault."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, median, stdev


def run(job: Path, world: int, limit_s: float) -> None:
    """Time the program in ``job`` with and without its faults, and write ``twin.json``."""
    # Imported before the fork, so that the ranks need not import it.
    import torch  # noqa: F401

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(job, rank, world)) for rank in range(world)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(limit_s)
    failed = [each for each in ranks if each.exitcode != 0]
    for each in ranks:
        if each.is_alive():
            each.kill()
    if failed:
        raise RuntimeError(f"the twin in {job} failed, see output.txt there")


def _rank(job: Path, rank: int, world: int) -> None:
    import torch

    os.chdir(job)
    sys.path.insert(0, str(job))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ["TWIN_STORE"] = f"file://{job.resolve()}/store"
    with (job / "output.txt").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    runpy.run_path("twin.py", run_name="__main__")


MAX_INTERVAL_SHARE = 0.1
"""Maximum width of the 90 % interval of a price, as a share of the step. A wider one is too uncertain to compare a price with."""
MEDIAN_ERROR_FACTOR = 1.25
"""Standard error of a median relative to that of the mean. Half the range would grow with the number of rounds."""
_NORMAL = NormalDist().inv_cdf(0.95)


def block_ms(values: Sequence[float], steady: bool) -> float:
    """Mean of a block's step times; without the longest and shortest eighth if every step has the fault."""
    cut = len(values) // 8 if steady else 0
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def differences_ms(dear: Sequence[float], cheap: Sequence[float]) -> list[float]:
    """Differences between the rounds of two variants."""
    return [a - b for a, b in zip(dear, cheap, strict=True)]


def error_ms(saved: Sequence[float]) -> float:
    """Standard error of the median of ``saved``."""
    return MEDIAN_ERROR_FACTOR * stdev(saved) / len(saved) ** 0.5


def is_sure(saved: Sequence[float], step_ms: float) -> bool:
    """Whether the 90 % interval of the median of ``saved`` is no wider than a tenth of the step."""
    freedom = len(saved) - 1
    # Quantile of Student's t distribution, by the first terms of its expansion around the normal quantile.
    quantile = _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    return 2 * quantile * error_ms(saved) <= MAX_INTERVAL_SHARE * step_ms


def all_sure(blocks: Mapping[str, Sequence[Sequence[float]]], steady: bool) -> bool:
    """Whether the price of each fault is sure. ``blocks``: step times of each round by variant, as in ``twin.json``."""
    means = {name: [block_ms(block, steady) for block in rounds] for name, rounds in blocks.items()}
    return all(
        is_sure(differences_ms(means["all"], means[name]), median(means["all"]))
        for name in means
        if name.startswith("without ")
    )
