"""A profiler window ordered from ranks that train meanwhile, and waited for."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.cli.asked import answers, running_ranks
from ddpdoctor.cli.say import say
from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import (
    CAPTURE_ANSWER,
    CAPTURE_ORDER,
    MOST_CAPTURES,
    CaptureOrder,
    Present,
    forget_questions,
    new_request,
    order_capture,
    read_rank,
    recover,
)
from ddpdoctor.telemetry import RECENT_STEPS, LiveRank, LiveRun, step_ms

LEAD_S = 6.0
"""From the order to the first step: ranks look for orders once a second, more rarely where processors are short, and an order
that one of them refuses is taken back before it begins."""
_ANSWER_S = 4.0
_LOOK_S = 0.5
_SAVED, _OVER = "saved", ("saved", "skipped", "failed")
"""States of a window in rank.json."""


def capture(run: Path, steps: int, first: int | None) -> None:
    """Order a window, wait until its traces are in the run directory, and say where. Raises UnusableInput."""
    ranks = running_ranks(run)
    recover(str(run))
    live = LiveRun(run)
    live.look()
    here = {live.ranks[rank.rank].host for rank in ranks if rank.rank in live.ranks}
    others = [each.rank for each in live.ranks.values() if each.host not in here and not each.ended]
    ahead = _first_step(list(live.ranks.values()))
    if others and first is None:
        raise UnusableInput(
            f"{len(others)} more ranks run on other hosts: say on each of them `ddpdoctor capture {run} --first STEP` with the same "
            f"STEP, such as {ahead * 2}; the ranks are in step {ahead} in {LEAD_S:.0f} s."
        )
    begin = first or ahead
    order = CaptureOrder(new_request(), _number(run, live, here, begin), begin, steps)
    _ordered(ranks, order)
    until = f" to {order.first + steps - 1}" if steps > 1 else ""
    say(f"window {order.number}: steps {order.first}{until}, on {len(ranks)} ranks of this host")
    try:
        _wait(run, live, ranks, order)
    except KeyboardInterrupt:
        say(
            f"The ranks go on with it; `ddpdoctor analyze {run} --window {order.number}` once it is there.",
            err=True,
        )
        raise
    finally:
        for rank in ranks:
            forget_questions(rank.spool, order.request, CAPTURE_ANSWER)


def _first_step(ranks: Sequence[LiveRank]) -> int:
    """The first that no rank has reached before all have heard of it."""
    times = [ms for each in ranks if (ms := step_ms(each, RECENT_STEPS))]
    if not times:
        raise UnusableInput("no rank has finished a step yet: there is nothing to capture.")
    newest = max(each.steps_total for each in ranks)
    # What was recorded of the newest steps lies up to a second in the past.
    return newest + 2 + math.ceil((LEAD_S + 1.0) / (statistics.median(times) / 1e3))


def _number(run: Path, live: LiveRun, here: Collection[str | None], first: int) -> int:
    """Of the window from step ``first`` on: the one that ranks of other hosts than ``here`` have for it, else one that none has."""
    used = {
        each.rank: {
            capture.get("number", 0): (capture.get("steps") or [None])[0]
            for capture in _captures(each.log.path.parent)
        }
        for each in live.ranks.values()
    }
    taken = {number for each in live.ranks.values() if each.host in here for number in used[each.rank]}
    same = {number for numbers in used.values() for number, begin in numbers.items() if begin == first}
    number = max(
        (number for number in same if number > max(taken, default=0)),
        default=max((number for numbers in used.values() for number in numbers), default=0) + 1,
    )
    if number > MOST_CAPTURES:
        raise UnusableInput(f"{run} has {MOST_CAPTURES} captures already, the most per recording.")
    return number


def _captures(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (read_rank(str(folder), []) or {}).get("captures") or []
    return found


def _ordered(ranks: Sequence[Present], order: CaptureOrder) -> None:
    """Tell the ranks, and take it back where one cannot. Raises UnusableInput."""
    for rank in ranks:
        order_capture(rank.spool, order)
    found = answers(ranks, CAPTURE_ANSWER, order.request, _ANSWER_S)
    silent = [rank.rank for rank in ranks if rank.rank not in found]
    refused = {rank: str(answer["why"]) for rank, answer in found.items() if answer.get("why")}
    if not silent and not refused:
        return
    for rank in ranks:
        forget_questions(rank.spool, order.request, CAPTURE_ORDER, CAPTURE_ANSWER)
    if refused:
        rank_number, why = next(iter(refused.items()))
        raise UnusableInput(f"no window, because rank {rank_number} cannot open one: {why}.")
    raise UnusableInput(
        f"no window, because rank {silent[0]} does not answer: a thread may hold Python's lock (the GIL), the process may be suspended, "
        "or the job was started with --hang-after 0, which leaves out who would answer."
    )


def _wait(run: Path, live: LiveRun, ranks: Sequence[Present], order: CaptureOrder) -> None:
    folders = {rank.rank: live.ranks[rank.rank].log.path.parent for rank in ranks if rank.rank in live.ranks}
    while True:
        live.look()
        recover(str(run))
        states = {
            rank: next((c for c in _captures(folder) if c.get("number") == order.number), {})
            for rank, folder in folders.items()
        }
        if live.ended or all(state.get("state") in _OVER for state in states.values()):
            break
        time.sleep(_LOOK_S)
    for rank in ranks:
        forget_questions(rank.spool, order.request, CAPTURE_ORDER)
    for number, state in states.items():
        if state.get("state") != _SAVED:
            why = state.get("why") or "the job ended before it was saved"
            say(f"Note: rank {number} has no trace of it: {why}.", err=True)
    saved = sum(state.get("state") == _SAVED for state in states.values())
    if not saved:
        raise UnusableInput("no rank saved a trace.")
    say(f"{saved} traces saved; `ddpdoctor analyze {run} --window {order.number}` diagnoses them")
