"""Which of a rank's loaders feeds the training loop, and what the rank says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ddpdoctor.rundir import EventKind

from .log import RankLog


def first(infos: Sequence[dict[str, Any]], key: str) -> Any:
    """The first value that is not None."""
    return next((info[key] for info in infos if info.get(key) is not None), None)


def main_loader(log: RankLog) -> int | None:
    """Id of the loader that gave most batches on this rank."""
    used = Counter(
        event.loader
        for step in log.steps
        for event in step.events
        if event.kind == EventKind.DATA and not event.exhausted
    )
    return used.most_common(1)[0][0] if used else None


def main_loader_settings(log: RankLog) -> dict[str, Any] | None:
    """What the rank says of the loader that gave most batches."""
    chosen = main_loader(log)
    for place, loader in enumerate(log.record.info.get("loaders") or []):
        if loader.get("id", place) == chosen:
            return {"id": chosen, **loader}
    return None


def loaders_with_workers(log: RankLog) -> set[int]:
    """Ids of the rank's loaders that have worker processes."""
    return {
        int(loader.get("id", place))
        for place, loader in enumerate(log.record.info.get("loaders") or [])
        if loader.get("num_workers")
    }
