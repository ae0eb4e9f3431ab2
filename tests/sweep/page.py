"""What a sweep found, as a page: a line for each constant, and each change below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .constants import MOVED_BY, Constant, constants
from .jobs import PRICE_DIFFERS
from .sweep import DIRECTIONS, Change, Swept

LISTED = 6
"""Changes of a constant in one direction that the page lists."""
SIGNS = {-1: "−", 1: "+"}
WORDS = {
    "finding": "another first finding",
    "ranks": "other ranks",
    "price": "another price",
    "crash": "a crash",
}


def page(swept: Sequence[Swept], said: str) -> str:
    """The whole page; ``said`` is a sentence about which cases these were."""
    by_constant: dict[str, list[Change]] = {constant.name: [] for constant in constants()}
    for change in (change for job in swept for change in job.changes):
        by_constant[change.constant].append(change)
    ordered = sorted(constants(), key=lambda constant: (-len(by_constant[constant.name]), constant.name))
    seen = frozenset().union(*(job.looked_at for job in swept))
    silent = [constant.name for constant in ordered if not by_constant[constant.name]]
    without_effect = [name for name in silent if name in seen]
    unseen = [name for name in silent if name not in seen]
    parts = [
        "<!-- Written by `python -m tests.sweep --write`; edit tests/sweep/page.py instead. -->\n",
        "# What hangs on a constant\n",
        _introduction(swept, said),
        *_table([constant for constant in ordered if by_constant[constant.name]], by_constant, swept),
        "\n## Where\n",
        f"At most {LISTED} cases per constant and direction.\n",
        *(line for constant in ordered for line in _cases(constant, by_constant[constant.name])),
        "\n## Without effect\n",
        f"{len(without_effect)} constants change no answer: {_listed(without_effect)}.\n",
        f"{len(unseen)} are used by none of these jobs: {_listed(unseen)}.",
    ]
    return "\n".join(parts) + "\n"


def summary(swept: Sequence[Swept]) -> str:
    """One sentence."""
    measured = sum(len(job.looked_at) * len(DIRECTIONS) for job in swept)
    changes = [change for job in swept for change in job.changes]
    kinds = Counter(change.what for change in changes)
    told = ", ".join(f"{count} {WORDS[kind]}" for kind, count in kinds.most_common())
    share = len(changes) / max(measured, 1)
    return f"{len(swept)} jobs, {measured} moves, {len(changes)} changes ({share:.2%}): {told or 'none'}."


def _introduction(swept: Sequence[Swept], said: str) -> str:
    return (
        f"Each constant of the analysis was moved by {MOVED_BY:.0%} down and up, one at a time (a count by at least one; for a "
        "share or ratio near one, its distance from one). The table lists how often the first finding then changes, names other "
        f"ranks, or costs over {PRICE_DIFFERS:.0%} more or less. A change means that a job is near a threshold, not that there is "
        "an error: other tests show which side is right. A constant on which many answers hang is a cliff.\n\n"
        f"{said} {summary(swept)} A constant that a job does not use is not moved for that job.\n"
    )


def _table(
    chosen: Sequence[Constant], by_constant: dict[str, list[Change]], swept: Sequence[Swept]
) -> Iterator[str]:
    yield "| constant | value | used by | − 30 % | + 30 % |"
    yield "| --- | --- | --- | --- | --- |"
    for constant in chosen:
        looking = sum(constant.name in job.looked_at for job in swept)
        down, up = (_counted(by_constant[constant.name], direction) for direction in DIRECTIONS)
        yield f"| `{constant.name}` | {_shown(constant.value)} | {looking} jobs | {down} | {up} |"


def _counted(changes: Sequence[Change], direction: int) -> str:
    kinds = Counter(change.what for change in changes if change.direction == direction)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def _cases(constant: Constant, changes: Sequence[Change]) -> Iterator[str]:
    if changes:
        yield f"\n`{constant.name}`\n"
    for direction in DIRECTIONS:
        own = [change for change in changes if change.direction == direction]
        for change in own[:LISTED]:
            moved = f"{_shown(constant.value)} → {_shown(constant.moved(direction))}"
            yield f"- {moved}, {change.job}: {change.before} → {change.after}"
        if len(own) > LISTED:
            yield f"- {SIGNS[direction]} {MOVED_BY:.0%}: and {len(own) - LISTED} more"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"{_shown(value[0])} to {_shown(value[-1])}"
    return f"{value:g}" if isinstance(value, float) else str(value)
