"""The loader that feeds the training loop: its settings, and how long ranks wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ddpdoctor.measure.facts import LoaderFacts
from ddpdoctor.measure.steplog import WARM_UP_STEPS, RankLog
from ddpdoctor.measure.window import Window
from ddpdoctor.rundir import EventKind
from ddpdoctor.trace import classify

from .userlines import users_line


def loader_facts(
    logs: Sequence[RankLog], windows: Sequence[Window], asleep: Mapping[int, float]
) -> LoaderFacts:
    """From the step logs, with their :func:`asleep_shares`; from the windows where there are none."""
    return _stated(logs, asleep) if logs else _shown(windows)


def _stated(logs: Sequence[RankLog], asleep: Mapping[int, float]) -> LoaderFacts:
    """Settings as the first rank with a loader states them, waits as all ranks recorded them."""
    by_rank = {log.rank: wait_ms for log in logs if (wait_ms := _wait_ms(log)) is not None}
    waits_ms = list(by_rank.values())
    median_ms, longest_ms = float(np.median(waits_ms)) if waits_ms else None, max(waits_ms, default=None)
    stated = ((log, log.main_loader_settings) for log in logs)
    rank = next(((log, settings) for log, settings in stated if settings is not None), None)
    if rank is None:
        return LoaderFacts(wait_ms=median_ms, longest_wait_ms=longest_ms)
    log, settings = rank
    slowest = max(logs, key=lambda log: by_rank.get(log.rank, 0.0))
    return LoaderFacts(
        num_workers=settings.get("num_workers"),
        prefetch_factor=settings.get("prefetch_factor"),
        pin_memory=settings.get("pin_memory"),
        persistent_workers=settings.get("persistent_workers"),
        batch_size=settings.get("batch_size"),
        drop_last=settings.get("drop_last"),
        sampler=settings.get("sampler"),
        dataset=settings.get("dataset"),
        where=users_line(log, settings.get("where")),
        wait_ms=median_ms,
        longest_wait_ms=longest_ms,
        ready_batches=_ready_batches(logs),
        computing_share=1 - asleep[slowest.rank] if slowest.rank in asleep else None,
    )


def _wait_ms(log: RankLog) -> float | None:
    """Mean time in ``next`` per step after the warm-up; None where no batch was asked for."""
    waits_ns = [
        [event.duration_ns for event in step.events if event.kind == EventKind.DATA and not event.exhausted]
        for step in log.steps[WARM_UP_STEPS:]
    ]
    return float(np.mean([sum(of_step) for of_step in waits_ns])) / 1e6 if any(waits_ns) else None


def asleep_shares(logs: Sequence[RankLog]) -> dict[int, float]:
    """By rank, the part of the time in ``next`` in which its process neither computed nor waited for a core, of the batches of
    which that was recorded. Ranks of which none was are left out."""
    shares = {}
    for log in logs:
        told = [
            event
            for step in log.steps[WARM_UP_STEPS:]
            for event in step.events
            if event.gives_batch and event.asleep_ns >= 0
        ]
        whole_ns = sum(event.duration_ns for event in told)
        if whole_ns:
            shares[log.rank] = min(sum(event.asleep_ns for event in told) / whole_ns, 1.0)
    return shares


def _ready_batches(logs: Sequence[RankLog]) -> float | None:
    """Mean number of batches that stood ready when one was asked for, on the rank with the fewest, where the loader tells: while
    others wait for that rank, theirs make batches in advance."""
    each = [
        [
            event.batches_ready
            for step in log.steps
            for event in step.events
            if event.kind == EventKind.DATA and event.batches_ready >= 0
        ]
        for log in logs
    ]
    return min((float(np.mean(of_rank)) for of_rank in each if of_rank), default=None)


def _shown(windows: Sequence[Window]) -> LoaderFacts:
    """What traces say of the loader: whether it makes batches in the training process itself, and the waits."""
    in_process = any(classify.IN_PROCESS in name for window in windows for name in window.trace.names)
    waits_ms = []
    for window in windows:
        batches = classify.next_batches(window.trace)
        if batches.any() and window.steps:
            waits_ms.append(float(window.trace.duration_ns[batches].sum()) / 1e6 / len(window.steps))
    return LoaderFacts(
        num_workers=0 if in_process else None,
        wait_ms=float(np.median(waits_ms)) if waits_ms else None,
        longest_wait_ms=max(waits_ms, default=None),
    )
