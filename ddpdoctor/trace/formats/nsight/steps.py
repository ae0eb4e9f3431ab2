"""Infers steps from NVTX ranges that a script pushes: numbered ones (``iter 12``), else unnumbered ones around each step.

Used only if a trace has neither step annotations that :mod:`ddpdoctor.trace.classify` knows nor optimizer annotations,
which ``emit_nvtx`` adds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from ddpdoctor.trace import classify
from ddpdoctor.trace.columns import IntColumn

from .build import NvtxRanges

_NUMBERED = re.compile(
    r"(?P<what>.*?(?<![a-z])(?:step|iter|iteration|batch)s?[\s_#:=.(\[-]*)(?P<number>\d{1,9})[\])]?\s*$",
    re.IGNORECASE | re.DOTALL,
)
_WHOLE = re.compile(
    r"(?:\[pl\]\[(?:profile|module)\])?.{0,40}(?<![a-z])(?:run_training_batch|training_step|train_step|train_batch|train_iter(?:ation)?)$"
    r"|(?:step|iter|iteration|train_loop_body)$",
    re.IGNORECASE,
)
"""Names of ranges around a whole step, Lightning's among them."""
_NO_STEP = re.compile(r"micro|valid|val_|eval|test|optimizer|lr_|sched", re.IGNORECASE)
"""Names of ranges that are part of a step or outside of training steps."""
_MAX_NAME = 200
_MIN_STEPS = 2


class InferredSteps(msgspec.Struct, frozen=True):
    """Steps inferred from ranges; times as in the file."""

    number: Sequence[int]
    start: IntColumn
    end: IntColumn
    thread: IntColumn


def has_step_markers(ranges: NvtxRanges) -> bool:
    """Whether the ranges include known step or optimizer annotations."""
    return any(
        classify.step_number(name) is not None or classify.is_optimizer_step(name)
        for name in set(ranges.names)
    )


def infer_steps(ranges: NvtxRanges) -> InferredSteps | None:
    """Steps inferred from the names of ``ranges``; None if no name repeats as steps do."""
    numbered: dict[tuple[int, str], list[int]] = defaultdict(list)
    whole: dict[tuple[int, str], list[int]] = defaultdict(list)
    number_of: dict[int, int] = {}
    for row, (name, thread) in enumerate(zip(ranges.names, ranges.thread, strict=True)):
        if len(name) > _MAX_NAME or _NO_STEP.search(name):
            continue
        if match := _NUMBERED.match(name):
            number_of[row] = int(match["number"])
            numbered[thread, match["what"]].append(row)
        elif _WHOLE.match(name):
            whole[thread, name].append(row)
    counted = [
        rows
        for rows in (_by_start(rows, ranges) for rows in numbered.values())
        if _are_numbered_steps(rows, number_of, ranges)
    ]
    if counted:
        rows = max(counted, key=lambda rows: _length(rows, ranges))
        return _steps(rows, [number_of[row] for row in rows], ranges)
    unnumbered = [
        rows for rows in (_by_start(rows, ranges) for rows in whole.values()) if _are_disjoint(rows, ranges)
    ]
    if unnumbered:
        rows = max(unnumbered, key=lambda rows: _length(rows, ranges))
        return _steps(rows, list(range(len(rows))), ranges)
    return None


def _by_start(rows: Sequence[int], ranges: NvtxRanges) -> list[int]:
    return sorted(rows, key=ranges.start.__getitem__)


def _are_numbered_steps(rows: Sequence[int], number_of: dict[int, int], ranges: NvtxRanges) -> bool:
    """Whether the ranges are disjoint and their numbers increase."""
    numbers = [number_of[row] for row in rows]
    return _are_disjoint(rows, ranges) and all(a < b for a, b in pairwise(numbers))


def _are_disjoint(rows: Sequence[int], ranges: NvtxRanges) -> bool:
    disjoint = all(ranges.end[a] <= ranges.start[b] for a, b in pairwise(rows))
    return len(rows) >= _MIN_STEPS and disjoint


def _length(rows: Sequence[int], ranges: NvtxRanges) -> int:
    return sum(ranges.end[row] - ranges.start[row] for row in rows)


def _steps(rows: Sequence[int], numbers: Sequence[int], ranges: NvtxRanges) -> InferredSteps:
    start, end, thread = (
        np.array([values[row] for row in rows], np.int64)
        for values in (ranges.start, ranges.end, ranges.thread)
    )
    return InferredSteps(numbers, start, end, thread)
