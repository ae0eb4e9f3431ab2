"""Memory of the ranks, in one line and as a table."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding, RankMemory
from ddpdoctor.report import words
from ddpdoctor.report.job_view import Table
from ddpdoctor.report.summary import main_finding

ROWS = 32
"""Most rows of the table; all ranks are in the report's data."""
_AMOUNTS = {
    "process": "process_bytes",
    "child processes": "workers_bytes",
    "tensors on the device": "allocated_peak_bytes",
    "reserved on the device": "reserved_peak_bytes",
    "device total": "device_total_bytes",
}
"""The table's columns: head, and field of :class:`RankMemory`."""
_GROWTH_RULES = ("memory/growing", "memory/workers-growing", "memory/device-growing")
"""Rules about growing memory, whose findings have no cost in time."""
_PHASES = ("forward", "backward", "optimizer", "evaluation")


def memory_line(diagnosis: Diagnosis) -> str:
    """Largest amounts over the ranks and the memory never used, in one line; "" if nothing is known."""
    known = [rank.memory for rank in diagnosis.ranks if rank.memory is not None]
    process, workers = _largest(m.process_bytes for m in known), _largest(m.workers_bytes for m in known)
    tensors = _largest(m.allocated_peak_bytes for m in known)
    reserved = _largest(m.reserved_peak_bytes for m in known)
    total = _largest(m.device_total_bytes for m in known)
    pieces = []
    if reserved is not None:
        whole = "" if total is None else f" of {words.size(total)}"
        took = "" if tensors is None else f", {words.size(tensors)} of it tensors"
        pieces.append(f"device {words.size(reserved)} reserved{whole}{took}")
    if process is not None:
        more = "" if workers is None else f", child processes {words.size(workers)}"
        pieces.append(f"host: process {words.size(process)}{more}")
    if not pieces:
        return ""
    free = words.number_fact(diagnosis, "memory.headroom_bytes")
    if free is not None:
        pieces.append(f"never used: {words.size(free)} per rank")
    return f"peak memory of the fullest rank: {'; '.join(pieces)}"


def growing_memory(diagnosis: Diagnosis) -> list[Finding]:
    """Findings about growing memory, whose titles are printed separately because the table has no cost for them. Without the main
    finding, and without those that the headline states."""
    main = main_finding(diagnosis)
    return [
        finding
        for finding in diagnosis.findings
        if finding.rule in _GROWTH_RULES
        and finding is not main
        and finding.title not in diagnosis.verdict.headline
    ]


def memory_table(diagnosis: Diagnosis) -> Table | None:
    """One row per rank, at most :data:`ROWS`; columns without any value are omitted. None if nothing is known."""
    known = [(rank.rank, rank.memory) for rank in diagnosis.ranks if rank.memory is not None]
    columns = {head: [getattr(memory, name) for _, memory in known] for head, name in _AMOUNTS.items()}
    for phase in _PHASES:
        columns[f"tensors in {phase}"] = [memory.phase_peak_bytes.get(phase) for _, memory in known]
    growth = [memory.grows_bytes_per_hour for _, memory in known]
    shown = {head: values for head, values in columns.items() if any(value is not None for value in values)}
    if not shown:
        return None
    has_growth = any(value is not None for value in growth)
    order = sorted(range(len(known)), key=lambda place: -_weight(known[place][1]))[:ROWS]
    rows = [
        [
            str(known[place][0]),
            *(words.size(values[place]) for values in shown.values()),
            *([_per_hour(growth[place])] if has_growth else []),
        ]
        for place in sorted(order)
    ]
    left = len(known) - len(rows)
    title = "Memory" if not left else f"Memory of the {len(rows)} fullest ranks, of {len(known)}"
    return Table(title, ["rank", *shown, *(["process grows"] if has_growth else [])], rows)


def _per_hour(value: float | None) -> str:
    return words.ABSENT if value is None else f"{words.size(value)} per hour"


def _weight(memory: RankMemory) -> float:
    return memory.reserved_peak_bytes or memory.process_bytes or 0.0


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
