"""The files of ranks as tests read and change them: lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]


def log_of(run: Path, rank: int, name: str = "steps.jsonl") -> Path:
    """Where a rank's file is."""
    return run / "ranks" / f"{rank:05d}" / name


def lines_of(file: Path) -> Lines:
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_of(run: Path, rank: int) -> Lines:
    """The lines of a rank's steps."""
    return [line for line in lines_of(log_of(run, rank)) if "step" in line]


def span_of(run: Path, rank: int) -> tuple[int, int]:
    """Begin and end of all that a rank recorded, in epoch ns."""
    steps = steps_of(run, rank)
    return steps[0]["t"][0], steps[-1]["t"][1]


def write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def thin(run: Path, ranks: Iterable[int], thinned: Callable[[int], bool]) -> None:
    """Leave the times alone of the steps whose numbers are ``thinned``, as a rank does in a long job."""
    for rank in ranks:
        lines = lines_of(log_of(run, rank))
        for line in lines:
            if "step" in line and thinned(line["step"]):
                for key in ("ev", "cpu", "runq", "marks"):
                    line.pop(key)
                line["thin"] = True
        write_lines(log_of(run, rank), lines)
