"""Infers steps from NVTX ranges that a script pushes: numbered ones (``iter 12``), else unnumbered ones around each step.

Used only if a trace has neither step annotations that :mod:`ddpdoctor.trace.classify` knows nor optimizer annotations,
which ``emit_nvtx`` adds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ddpdoctor.trace import classify

from .build import NvtxRange

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


_Row = tuple[int, NvtxRange]
"""(number of the step, its range)."""


def has_step_markers(ranges: Sequence[NvtxRange]) -> bool:
    """Whether the ranges include known step or optimizer annotations."""
    return any(
        classify.step_number(name) is not None or classify.is_optimizer_step(name)
        for name in {one.name for one in ranges}
    )


def infer_steps(ranges: Sequence[NvtxRange]) -> list[_Row]:
    """Steps inferred from the names of ``ranges``; [] if no name repeats as steps do."""
    numbered: dict[tuple[int, str], list[_Row]] = defaultdict(list)
    whole: dict[tuple[int, str], list[_Row]] = defaultdict(list)
    for one in ranges:
        if len(one.name) > _MAX_NAME or _NO_STEP.search(one.name):
            continue
        if match := _NUMBERED.match(one.name):
            numbered[one.thread, match["what"]].append((int(match["number"]), one))
        elif _WHOLE.match(one.name):
            whole[one.thread, one.name].append((0, one))
    counted = [rows for rows in _following(numbered) if all(a < b for (a, _), (b, _) in pairwise(rows))]
    unnumbered = [[(place, one) for place, (_, one) in enumerate(rows)] for rows in _following(whole)]
    return max(
        counted or unnumbered, key=lambda rows: sum(one.end - one.start for _, one in rows), default=[]
    )


def _following(ranges: Mapping[tuple[int, str], list[_Row]]) -> Iterator[list[_Row]]:
    """Yields the ranges of each name and thread, sorted by start, if there are at least ``_MIN_STEPS`` and they are disjoint."""
    for rows in ranges.values():
        rows.sort(key=lambda row: row[1].start)
        if len(rows) >= _MIN_STEPS and all(a.end <= b.start for (_, a), (_, b) in pairwise(rows)):
            yield rows
