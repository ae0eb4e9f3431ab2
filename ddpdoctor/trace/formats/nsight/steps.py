"""Steps by ranges that a script pushes itself: numbered ones (``iter 12``), else one that encloses each step.

What PyTorch's profiler and step annotations are called is known everywhere (:mod:`ddpdoctor.trace.classify`), and optimizers
annotate their steps under ``emit_nvtx``; only where neither is there, ranges of other names are looked at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ddpdoctor.trace import classify

from .build import Mark

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
"""Ranges of a part of a step, or beside them."""
_LONGEST_NAME = 200
_FEWEST = 2


_Row = tuple[int, Mark]
"""The number of a step, and its range."""


def are_marked(marks: Sequence[Mark]) -> bool:
    """Whether the annotations say themselves what a step is."""
    return any(
        classify.step_number(name) is not None or classify.is_optimizer_step(name)
        for name in {mark.name for mark in marks}
    )


def steps_of(marks: Sequence[Mark]) -> list[_Row]:
    """The steps that the names of ``marks`` suggest; [] where none are alike."""
    numbered: dict[tuple[int, str], list[_Row]] = defaultdict(list)
    whole: dict[tuple[int, str], list[_Row]] = defaultdict(list)
    for mark in marks:
        if len(mark.name) > _LONGEST_NAME or _NO_STEP.search(mark.name):
            continue
        if match := _NUMBERED.match(mark.name):
            numbered[mark.thread, match["what"]].append((int(match["number"]), mark))
        elif _WHOLE.match(mark.name):
            whole[mark.thread, mark.name].append((0, mark))
    counted = [rows for rows in _following(numbered) if all(a < b for (a, _), (b, _) in pairwise(rows))]
    alike = [[(place, mark) for place, (_, mark) in enumerate(rows)] for rows in _following(whole)]
    return max(counted or alike, key=lambda rows: sum(mark.end - mark.start for _, mark in rows), default=[])


def _following(ranges: Mapping[tuple[int, str], list[_Row]]) -> Iterator[list[_Row]]:
    """Those of one name and thread, in order of time, where they are several and one follows the other."""
    for rows in ranges.values():
        rows.sort(key=lambda row: row[1].start)
        if len(rows) >= _FEWEST and all(a.end <= b.start for (_, a), (_, b) in pairwise(rows)):
            yield rows
