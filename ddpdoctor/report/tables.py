"""Tables of ranks (step times, memory, state in a hung job), of attempts and of trainings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding, Standing
from ddpdoctor.measure.places import function_name
from ddpdoctor.measure.runfacts import AttemptFacts, TrainingFacts
from ddpdoctor.report import words
from ddpdoctor.report.finding_view import place
from ddpdoctor.report.job_view import Table
from ddpdoctor.report.summary import main_finding

ROWS = 32
"""Maximum number of ranks in the tables of step times and memory; the report's data has all."""
_MEMORY_COLUMNS = {
    "process": "process_bytes",
    "child processes": "workers_bytes",
    "tensors on the device": "allocated_peak_bytes",
    "reserved on the device": "reserved_peak_bytes",
    "device total": "device_total_bytes",
}
"""Columns of the memory table: head, and field of :class:`RankMemory`."""
_GROWTH_RULES = ("memory/growing", "memory/workers-growing", "memory/device-growing")
"""Rules about growing memory, whose findings have no cost in time."""
_PHASES = ("forward", "backward", "optimizer", "evaluation")


def rank_table(diagnosis: Diagnosis) -> Table | None:
    """Step time and lateness by rank; None without ranks."""
    if not diagnosis.ranks:
        return None
    head = ["rank", "host", "device", "step", "late by", "delays others by"]
    slowest_first = sorted(diagnosis.ranks, key=lambda rank: -(rank.caused_wait_ms or 0.0))[:ROWS]
    rows = [
        [
            str(rank.rank),
            rank.host or words.ABSENT,
            rank.device or words.ABSENT,
            words.milliseconds(rank.step_ms),
            words.milliseconds(rank.late_ms),
            words.milliseconds(rank.caused_wait_ms),
        ]
        for rank in sorted(slowest_first, key=lambda rank: rank.rank)
    ]
    omitted = len(diagnosis.ranks) - len(rows)
    title = (
        "Ranks" if not omitted else f"The {len(rows)} of {len(diagnosis.ranks)} ranks that delay others most"
    )
    return Table(title, head, rows)


def memory_line(diagnosis: Diagnosis) -> str:
    """One line with the peaks of memory, each on the rank that used most, and the memory free at the peak; "" if nothing is known."""
    known = [rank.memory for rank in diagnosis.ranks if rank.memory is not None]
    process, workers = _largest(m.process_bytes for m in known), _largest(m.workers_bytes for m in known)
    tensors = _largest(m.allocated_peak_bytes for m in known)
    reserved = _largest(m.reserved_peak_bytes for m in known)
    total = _largest(m.device_total_bytes for m in known)
    of_most = " on the rank that used the most" if len(known) > 1 else ""
    each = " per rank" if len(known) > 1 else ""
    free = words.number_fact(diagnosis, "memory.headroom_bytes")
    # The headroom is that of the devices, or of the host for a job on CPUs.
    of_device = " of device memory" if reserved is None and diagnosis.job.device not in (None, "cpu") else ""
    unused = "" if free is None else f"; {words.size(free)}{of_device}{each} free at the peak"
    pieces = []
    if reserved is not None:
        whole = "" if total is None else f" of {words.size(total)}"
        took = "" if tensors is None else f", up to {words.size(tensors)} of it by tensors"
        pieces.append(f"peak device memory: {words.size(reserved)}{whole} reserved{of_most}{took}{unused}")
    if process is not None:
        more = "" if workers is None else f", up to {words.size(workers)} more in child processes"
        at_least = "" if pieces else unused
        pieces.append(f"peak host memory: {words.size(process)}{of_most}{more}{at_least}")
    return "; ".join(pieces)


def growing_memory(diagnosis: Diagnosis) -> list[Finding]:
    """Findings about growing memory, except the main finding and those in the headline. They have no cost in the table, so their
    titles are printed separately."""
    main = main_finding(diagnosis)
    return [
        finding
        for finding in diagnosis.findings
        if finding.rule in _GROWTH_RULES
        and finding is not main
        and finding.title not in diagnosis.verdict.headline
    ]


def memory_table(diagnosis: Diagnosis) -> Table | None:
    """One row per rank, at most :data:`ROWS`, without empty columns. None if nothing is known."""
    known = [(rank.rank, rank.memory) for rank in diagnosis.ranks if rank.memory is not None]
    columns = {head: [getattr(memory, name) for _, memory in known] for head, name in _MEMORY_COLUMNS.items()}
    for phase in _PHASES:
        columns[f"tensors in {phase}"] = [memory.phase_peak_bytes.get(phase) for _, memory in known]
    columns = {head: values for head, values in columns.items() if any(value is not None for value in values)}
    if not columns:
        return None
    weights = [memory.reserved_peak_bytes or memory.process_bytes or 0.0 for _, memory in known]
    fullest = sorted(sorted(range(len(known)), key=lambda place: -weights[place])[:ROWS])
    rows = [
        [str(known[place][0]), *(words.size(values[place]) for values in columns.values())]
        for place in fullest
    ]
    growth = [known[place][1].grows_bytes_per_hour for place in fullest]
    head = ["rank", *columns]
    if any(memory.grows_bytes_per_hour is not None for _, memory in known):
        head.append("process grows")
        for row, value in zip(rows, growth, strict=True):
            row.append(words.ABSENT if value is None else f"{words.size(value)} per hour")
    omitted = len(known) - len(rows)
    title = "Memory" if not omitted else f"Memory of the {len(rows)} ranks that use most, of {len(known)}"
    return Table(title, head, rows)


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


_MAX_ROWS = 32
"""Maximum number of rows: the first and the last ones."""

_Facts = TypeVar("_Facts", AttemptFacts, TrainingFacts)


def attempts_table(diagnosis: Diagnosis) -> Table | None:
    """One row per attempt, with a mark on the measured one; None for a single attempt or invalid facts."""
    shown, title = _table_entries(diagnosis, "attempts", AttemptFacts)
    if not shown:
        return None
    rows = [
        [
            f"{'→ ' if each.is_measured else ''}{each.number}",
            f"{words.seconds(each.started_s)} to {words.seconds(each.ended_s)}",
            words.ABSENT if each.world_size is None else str(each.world_size),
            words.count(each.steps, "step")
            if each.first_step is None
            else _steps(each.first_step, each.steps),
            words.milliseconds(each.step_ms),
            words.ABSENT
            if each.checkpoint_step is None
            else f"after {words.count(each.checkpoint_step + 1, 'step')}"
            if each.first_step is None
            else f"step {each.first_step + each.checkpoint_step:,}",
            (each.ended or "unknown") + (f" at {place(each.where[0]).short}" if each.where else ""),
            _first_finding(diagnosis, each),
        ]
        for each in shown
    ]
    columns = [
        "attempt",
        "since launch",
        "ranks",
        "steps",
        "median step",
        "last checkpoint",
        "how it ended",
        "finding",
    ]
    return Table(title, columns, rows)


def trainings_table(diagnosis: Diagnosis) -> Table | None:
    """One row per training, with a mark on the measured one; None for a single training or invalid facts."""
    shown, title = _table_entries(diagnosis, "trainings", TrainingFacts)
    if not shown:
        return None
    rows = [
        [
            f"{'→ ' if each.is_measured else ''}{each.number}",
            ", ".join(each.models) or words.ABSENT,
            words.size(each.parameters_bytes),
            _steps(each.first_step, each.steps),
            words.seconds(each.total_s),
            words.milliseconds(each.step_ms),
            _first_finding(diagnosis, each),
        ]
        for each in shown
    ]
    columns = ["training", "model", "parameters", "steps", "time", "median step", "finding"]
    return Table(title, columns, rows)


def _steps(first: int, count: int) -> str:
    return f"{first:,} – {first + count - 1:,}" if count else "none"


def _first_finding(diagnosis: Diagnosis, each: AttemptFacts | TrainingFacts) -> str:
    """The first finding on its steps, not on how it ended."""
    if each.is_measured:
        rules = (finding.rule for finding in diagnosis.findings)
        return next((rule for rule in rules if not rule.startswith(("hang/", "run/restarts"))), "none")
    return "not diagnosed" if each.finding is None else each.finding or "none"


def _table_entries(diagnosis: Diagnosis, name: str, kind: type[_Facts]) -> tuple[list[_Facts], str]:
    """(Entries of the fact ``run.<name>``, title). Of many entries the first and the last; [] for a single one."""
    run: Any = diagnosis.facts.get("run")
    try:
        entries: list[_Facts] = msgspec.convert(run[name], list[kind])  # type: ignore[valid-type]
    except (msgspec.ValidationError, TypeError, KeyError):
        return [], ""
    omitted = max(len(entries) - _MAX_ROWS, 0)
    title = f"{name.capitalize()} (→ measured)" + (
        f", {omitted} more in the report's data" if omitted else ""
    )
    if len(entries) < 2:
        return [], title
    return (entries if not omitted else entries[: _MAX_ROWS // 2] + entries[-_MAX_ROWS // 2 :]), title


HUNG_ROWS = 64
"""Maximum number of ranks in the table of a hung job; the report's data has all."""
FRAMES = 500
"""Maximum number of frames shown of a stack."""
SHORT_ROWS = 12
"""Maximum number of ranks in the short table."""


class Stack(msgspec.Struct, frozen=True):
    """The stack of a rank's training thread, innermost frame first."""

    title: str
    lines: list[str]


def hang_table(diagnosis: Diagnosis, max_ranks: int = HUNG_ROWS) -> Table | None:
    """One row per rank, ranks at fault first, without empty columns. None if the job did not hang."""
    if not diagnosis.standing:
        return None
    shown = _guilty_first(diagnosis.standing, max_ranks)
    columns = [
        ("rank", [f"{'→ ' if each.guilty else ''}{each.rank}" for each in shown]),
        ("host", [each.host or words.ABSENT for each in shown]),
        ("step in progress", [words.ABSENT if each.step is None else str(each.step) for each in shown]),
        ("in", [each.phase or words.ABSENT for each in shown]),
        ("state", [each.state or words.ABSENT for each in shown]),
        ("for", [words.seconds(each.since_s) for each in shown]),
        (_collective_head(shown), [each.collective or words.ABSENT for each in shown]),
        ("line", [place(each.where).short if each.where else words.ABSENT for each in shown]),
    ]
    has_several_hosts = len({each.host for each in shown}) > 1
    filled = [
        (name, cells)
        for name, cells in columns
        if set(cells) != {words.ABSENT} and (name != "host" or has_several_hosts)
    ]
    omitted = len(diagnosis.standing) - len(shown)
    hang = diagnosis.facts.get("hang")
    still_hangs = hang.get("lasts") if isinstance(hang, dict) else None
    title = "Where each rank is" if still_hangs else "Where each rank was last seen"
    if isinstance(hang, dict) and hang.get("only_dumps"):
        title = "State of each rank according to its flight recorder dump"
    notes = ["→: named above, listed first"] if any(each.guilty for each in shown) else []
    if omitted:
        states = {
            each.state for each in _guilty_first(diagnosis.standing, len(diagnosis.standing))[max_ranks:]
        }
        common_state = next(iter(states)) if len(states) == 1 else None
        where = "`-v` shows" if max_ranks < HUNG_ROWS else "`--json F` has"
        notes.append(f"{where} {omitted} more{_shared_state(common_state, omitted)}")
    title += words.in_parentheses("; ".join(notes))
    rows = [list(row) for row in zip(*(cells for _, cells in filled), strict=True)]
    return Table(title, [name for name, _ in filled], rows)


_CALL_NUMBER = re.compile(r", call \d+$")
"""End of a collective's text that comes from a rank's own log of its calls, in which the last call is known."""


def _collective_head(shown: Sequence[Standing]) -> str:
    """The head of the column of collectives. Flight recorders show the one in which a rank waits, or its first unfinished one."""
    known = [each.collective for each in shown if each.collective]
    is_last = all(_CALL_NUMBER.search(collective) for collective in known)
    return "last collective issued" if is_last else "unfinished or last collective"


def _shared_state(state: str | None, ranks: int) -> str:
    """The state that all of the ranks have that a table omits, to follow their number; "" for None."""
    if state == "waits for other ranks":
        return ", waiting for other ranks" if ranks == 1 else ", all waiting for other ranks"
    return f", {'' if ranks == 1 else 'all '}in the state: {state}" if state else ""


def stacks(diagnosis: Diagnosis) -> list[Stack]:
    """The recorded stacks, those of ranks at fault first."""
    return [
        Stack(
            f"Rank {each.rank}{', at fault' if each.guilty else ''}",
            [f"{line.file}:{line.line} {function_name(line.function)}" for line in each.stack[:FRAMES]],
        )
        for each in _guilty_first(diagnosis.standing, HUNG_ROWS)
        if each.stack
    ]


def _guilty_first(standing: Sequence[Standing], max_ranks: int) -> list[Standing]:
    return sorted(standing, key=lambda each: (not each.guilty, each.rank))[:max_ranks]
