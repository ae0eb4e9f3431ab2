"""Selects the traces of one recording of one job, one trace per rank, and of each what its host recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.columns import RUNTIME_CALLS, RankTrace

_MAX_GAP_NS = 600 * 10**9
"""Traces further apart are different recordings: clocks of hosts, and windows of ranks, differ by less."""

Span = tuple[int, int]
"""Begin and end, ns."""


def select_job(traces: list[RankTrace], chosen: int | None = None) -> tuple[list[RankTrace], list[str]]:
    """Those of ``traces`` that can be one recording of one job, sorted by rank, and notes on the others.

    Of several recordings of one job, selects the largest or the ``chosen`` one (1: the largest). Raises
    :class:`UnusableInput` if the traces are of different jobs and none is chosen.
    """
    notes: list[str] = []
    groups = sorted(_jobs(traces), key=_completeness, reverse=True)
    if chosen is None and _are_different_jobs(groups):
        raise UnusableInput(
            f"The files come from different jobs: {_listed(groups)}. Choose one with --job N, or name its files."
        )
    if chosen is not None and not 1 <= chosen <= len(groups):
        raise UnusableInput(f"There is no job {chosen}; the files are of {_listed(groups)}.")
    kept = groups[(chosen or 1) - 1]
    others = [t for group in groups if group is not kept for t in group]
    if others:
        notes.append(_skipped_note(kept, others))
    numbered = _numbered(kept, notes)
    unique = _one_per_rank(numbered, notes)
    return sorted(unique, key=lambda t: -1 if t.meta.rank is None else t.meta.rank), notes


def _jobs(traces: list[RankTrace]) -> list[list[RankTrace]]:
    """Groups of traces with the same world size, backend and clock, close in time."""
    kinds: dict[tuple[int | None, str | None, str], list[RankTrace]] = defaultdict(list)
    for trace in traces:
        kinds[trace.meta.world_size, trace.meta.backend, trace.meta.clock].append(trace)
    groups = []
    for (_, _, clock), members in kinds.items():
        groups.extend([members] if clock == "relative" else _cluster_by_time(members))
    return groups


def _cluster_by_time(traces: Iterable[RankTrace]) -> list[list[RankTrace]]:
    groups: list[list[RankTrace]] = []
    end_ns = 0
    for trace in sorted(traces, key=lambda trace: trace.span_ns):
        start, end = trace.span_ns
        if not groups or start > end_ns + _MAX_GAP_NS:
            groups.append([])
            end_ns = end
        groups[-1].append(trace)
        end_ns = max(end_ns, end)
    return groups


def _are_different_jobs(groups: list[list[RankTrace]]) -> bool:
    """Whether the groups differ in world size or backend; an unknown one matches any."""
    sizes = {group[0].meta.world_size for group in groups} - {None}
    backends = {group[0].meta.backend for group in groups} - {None}
    return len(sizes) > 1 or len(backends) > 1


def _listed(groups: list[list[RankTrace]]) -> str:
    described = []
    for number, group in enumerate(groups, 1):
        meta = group[0].meta
        size = "unknown size" if meta.world_size is None else f"{meta.world_size} rank(s)"
        over = f" over {meta.backend}" if meta.backend else ""
        described.append(f"({number}) {size}{over}, {len(group)} file(s) such as {meta.source}")
    return "; ".join(described)


def _completeness(group: list[RankTrace]) -> tuple[int, int, int]:
    ranks = {t.meta.rank if t.meta.rank is not None else t.meta.source for t in group}
    return len(ranks), sum(t.size for t in group), max(t.span_ns[1] for t in group)


def _skipped_note(kept: list[RankTrace], others: list[RankTrace]) -> str:
    first = others[0].meta.source
    return (
        "The files come from more than one job or recording (they differ in world size or backend, "
        f"or lie far apart in time): "
        f"the {len(kept)} that belong together are used, {len(others)} left out, such as {first}. "
        "To analyse those, name their files or choose with --job N."
    )


def _numbered(traces: list[RankTrace], notes: list[str]) -> list[RankTrace]:
    """Traces that each have a rank: numbered in order of file names if no rank is known, else those without are skipped."""
    nameless = [t for t in traces if t.meta.rank is None]
    if not nameless or len(traces) == 1:
        return traces
    if len(nameless) == len(traces):
        files = {t.meta.source.partition("#process-")[0] for t in traces}
        order = "the processes in the file" if len(files) == 1 else "the file names"
        notes.append(f"No trace names its rank: ranks are numbered in the order of {order}.")
        ordered = sorted(traces, key=lambda t: t.meta.source)
        return [replace(t, meta=replace(t.meta, rank=i)) for i, t in enumerate(ordered)]
    notes.append(
        f"{len(nameless)} file(s) do not name their rank and were skipped, such as {nameless[0].meta.source}."
    )
    return [t for t in traces if t.meta.rank is not None]


def _one_per_rank(traces: list[RankTrace], notes: list[str]) -> list[RankTrace]:
    """Keeps of several traces of a rank the one that overlaps most other ranks; ties: the latest, then the largest."""
    by_rank: dict[int | None, list[RankTrace]] = defaultdict(list)
    for trace in traces:
        by_rank[trace.meta.rank].append(trace)
    if len(by_rank) == len(traces):
        return traces
    spans = {rank: [t.span_ns for t in ts] for rank, ts in by_rank.items()}
    chosen = []
    for rank, candidates in by_rank.items():
        if len(candidates) == 1:
            chosen.extend(candidates)
            continue
        others = [there for other, there in spans.items() if other != rank]
        best = max(candidates, key=lambda t: (_overlapping_ranks(t.span_ns, others), t.span_ns[1], t.size))
        chosen.append(best)
        notes.append(
            f"Rank {rank} has {len(candidates)} traces: {best.meta.source} is used, "
            f"the latest{' that the ranks have in common' if others else ''}."
        )
    return chosen


def _overlapping_ranks(own: Span, others: list[list[Span]]) -> int:
    return sum(any(start <= own[1] and end >= own[0] for start, end in spans) for spans in others)


_HOST = ("cpu_op", "python_function", "user_annotation")
"""Categories of what a profiler records on the host itself; it records launches with the device's events."""
_MOST = 0.5
"""Share of the events."""


def within_host_recording(trace: RankTrace) -> RankTrace:
    """``trace`` without the device events that the host launched after the recording of the host had ended, and without its calls since.

    A profiler may record launches and kernels for longer than operators, for dozens of steps: these events are of no step of the window.
    Their names tell: most are those of events that an operator launched before. A CUDA graph or an extension launches without operators.
    Unchanged if no operator and no Python function is recorded, such as in a trace of kernels, or if nothing was launched since.
    """
    if not trace.category_mask("cpu_op", "python_function").any():
        return trace
    over_ns = int(trace.end_ns[trace.category_mask(*_HOST)].max())
    calls = trace.category_mask(*RUNTIME_CALLS) & (trace.start_ns > over_ns)
    later = np.isin(trace.correlation, trace.correlation[calls & (trace.correlation >= 0)]) & ~calls
    if not later.any():
        return trace
    launched = np.isin(
        trace.correlation, trace.correlation[(trace.external_id > 0) & (trace.correlation >= 0)]
    )
    of_operators = np.isin(trace.name[later], trace.name[launched & ~later])
    return trace.among(~(calls | later)) if of_operators.mean() >= _MOST else trace
