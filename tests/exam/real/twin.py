"""Runs a program's twin in ranks that are forked from here, so that torch is imported once for all programs; and what a fault costs by the
rounds in which a program ran with and without it, and how surely that is known."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, median, stdev


def run(job: Path, world: int, limit_s: float) -> None:
    """Times the program in ``job`` with and without its faults; ``twin.json`` is there afterwards."""
    # What the ranks would import, each by itself, is there when they are forked.
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


MOST_WIDTH = 0.1
"""Part of the step that the 90 % interval of a price may be wide: a wider one is no truth to compare a price with."""
MEDIANS_ERROR = 1.25
"""A median's standard error, in those of the mean: the half range grew with the rounds, though the price gets surer."""
_NORMAL = NormalDist().inv_cdf(0.95)


def block_ms(values: Sequence[float], steady: bool) -> float:
    """Mean of a block's steps, the longest and shortest eighth left out where every step has the fault."""
    cut = len(values) // 8 if steady else 0
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def saved_ms(dear: Sequence[float], cheap: Sequence[float]) -> list[float]:
    """What each round of one variant took longer than the same round of another."""
    return [a - b for a, b in zip(dear, cheap, strict=True)]


def error_ms(saved: Sequence[float]) -> float:
    """Standard error of the median of ``saved``."""
    return MEDIANS_ERROR * stdev(saved) / len(saved) ** 0.5


def is_sure(saved: Sequence[float], step_ms: float) -> bool:
    """Whether the 90 % interval of the median of ``saved`` is no wider than a tenth of the step."""
    freedom = len(saved) - 1
    # Student's quantile by the first terms of its expansion at the normal one.
    quantile = _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    return 2 * quantile * error_ms(saved) <= MOST_WIDTH * step_ms


def all_sure(blocks: Mapping[str, Sequence[Sequence[float]]], steady: bool) -> bool:
    """Whether that holds of each fault; ``blocks`` are the steps of each round of each variant, as ``twin.json`` has them."""
    means = {name: [block_ms(block, steady) for block in rounds] for name, rounds in blocks.items()}
    return all(
        is_sure(saved_ms(means["all"], means[name]), median(means["all"]))
        for name in means
        if name.startswith("without ")
    )
