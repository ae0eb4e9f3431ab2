"""``python -m tests.net``: compares what the analysis says with the frozen answers, or freezes them anew.

Floats that agree to 1e-6 of their value are the same, all else must be equal. Exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from .answers import NOTHING, Difference, answer_or_crash, differences, freeze, frozen
from .cases import GROUPS

SHOWN = 12
"""Maximum number of differences printed per case."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or freeze. Returns 1 if something differs or a case fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.net", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="cases whose name contains this")
    parser.add_argument(
        "--only", default=",".join(GROUPS), metavar="GROUP,GROUP", help="[default: %(default)s]"
    )
    parser.add_argument("--freeze", action="store_true", help="write the answers instead of comparing them")
    parser.add_argument("--all", action="store_true", help=f"print more than {SHOWN} differences of a case")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes [default: 2]")
    chosen = parser.parse_args(arguments)
    groups = chosen.only.split(",")
    if unknown := [group for group in groups if group not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    began_s = time.monotonic()
    cases, count, wrong = 0, 0, 0
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        for group in groups:
            place = GROUPS[group].place
            if place is not None and not place.is_dir():
                print(f"{group}: skipped, the cases are not here")
                continue
            names = [name for name in GROUPS[group].names() if chosen.pattern in name]
            answers = dict(zip(names, pool.map(answer_or_crash, [group] * len(names), names), strict=True))
            cases += len(names)
            if chosen.freeze:
                wrong += _freeze(group, answers, chosen.pattern)
                continue
            for name, found in _compared(group, answers, chosen.pattern):
                count += len(found)
                wrong += 1
                _print_differences(f"{group}/{name}", found, len(found) if chosen.all else SHOWN)
    said = f"{wrong} failed" if chosen.freeze else f"{count} differences in {wrong} cases"
    print(f"{cases} cases, {said}, {time.monotonic() - began_s:.0f} s")
    return 1 if wrong else 0


def _compared(group: str, answers: dict[str, Any], pattern: str) -> Iterator[tuple[str, list[Difference]]]:
    """Yields (case, its differences) for each case that differs."""
    before = {name: old for name, old in frozen(group).items() if pattern in name}
    for name in sorted(before.keys() | answers):
        found = list(differences(before.get(name, NOTHING), answers.get(name, NOTHING)))
        if found:
            yield name, found


def _freeze(group: str, answers: dict[str, Any], pattern: str) -> int:
    """Write the answers, and keep those of the cases that were not chosen. If cases crashed, writes nothing and returns their number."""
    crashed = {name: given["crash"] for name, given in answers.items() if "crash" in given}
    for name, crash in crashed.items():
        print(f"{group}/{name}: {crash}")
    if not crashed:
        others = {name: old for name, old in frozen(group).items() if pattern not in name}
        file = freeze(group, others | answers)
        print(f"{group}: {len(answers)} cases frozen, {file.stat().st_size} bytes")
    return len(crashed)


def _print_differences(case: str, found: list[Difference], limit: int) -> None:
    print(f"{case}: {len(found)} differences")
    for difference in found[:limit]:
        print(f"  {difference}")
    if len(found) > limit:
        print(f"  and {len(found) - limit} more, see --all")


if __name__ == "__main__":
    sys.exit(main())
