"""The benchmarks of ``make bench`` run and print a table. No other test checks the names that they use of modules of the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("hook_calls", ("--steps", "40"), "beside the training thread"),
        ("hook_overhead", ("--ranks", "1", "--targets-ms", "20", "--seconds", "1"), "times_us"),
        ("watching", ("--ranks", "1", "--seconds", "1"), "us"),
        ("growth", ("--axis", "ranks of logs", "steps", "--most", "8", "--repetitions", "1"), "slope"),
        ("growth", ("--axis", "rank folders", "--most", "1000", "--repetitions", "1"), "slope"),
    ],
)
def test_a_benchmark_runs(name: str, arguments: tuple[str, ...], says: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=BENCHMARKS.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert says in done.stdout
