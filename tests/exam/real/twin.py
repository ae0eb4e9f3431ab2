"""Runs a program's twin in ranks that are forked from here, so that torch is imported once for all programs."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path


def run(job: Path, world: int, limit_s: float) -> None:
    """Times the program in ``job`` with and without its faults; ``twin.json`` is there afterwards."""
    # What the ranks would import, each by itself, is there when they are forked.
    import torch  # noqa: F401

    import tests.exam.real.scatter  # noqa: F401

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
