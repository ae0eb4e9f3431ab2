"""Which of a rank's loaders feeds the training loop, what the rank says of it, and in which steps another one is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddpdoctor.rundir import EventKind

from .step import EVALUATED, Step

_ONE_IN = 3
"""A loader that gives batches in one of so many steps trains: two that take turns do, and one that evaluates every few steps
does not."""


def first(infos: Sequence[dict[str, Any]], key: str) -> Any:
    """The first value that is not None."""
    return next((info[key] for info in infos if info.get(key) is not None), None)


def usual_loader(steps: Sequence[Step]) -> int | None:
    """Id of the loader that gave most batches."""
    batches = Counter(event.loader for step in steps for event in step.events if event.gives_batch)
    return batches.most_common(1)[0][0] if batches else None


def training_loaders(steps: Sequence[Step]) -> frozenset[int]:
    """Ids of the loaders that give batches in at least a third of the steps."""
    used: Counter[int] = Counter()
    for step in steps:
        used.update({event.loader for event in step.events if event.gives_batch})
    return frozenset(loader for loader, times in used.items() if times * _ONE_IN >= len(steps))


def evaluates(step: Step, main: Collection[int]) -> bool:
    """Whether the job evaluates in this step, whose ``main`` loaders train."""
    if EVALUATED in step.marks:
        return True
    for event in step.events:
        if event.kind == EventKind.EVALUATION:
            return True
        if event.kind == EventKind.DATA and main and event.loader not in main and event.gives_batch:
            return True
    return False


def settings_of(info: Mapping[str, Any], chosen: int | None) -> dict[str, Any] | None:
    """What the rank says of one of its loaders."""
    for place, loader in enumerate(info.get("loaders") or []):
        if loader.get("id", place) == chosen:
            return {"id": chosen, **loader}
    return None


def loaders_with_workers(info: Mapping[str, Any]) -> set[int]:
    """Ids of the loaders that have worker processes."""
    return {
        int(loader.get("id", place))
        for place, loader in enumerate(info.get("loaders") or [])
        if loader.get("num_workers")
    }
