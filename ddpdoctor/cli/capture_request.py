"""A profiler window ordered from ranks that train meanwhile, and waited for."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.cli.rank_answers import STOPPED, answers, is_stopped, running_ranks
from ddpdoctor.cli.say import say
from ddpdoctor.errors import UnusableInput
from ddpdoctor.launch.standstill import Tuning
from ddpdoctor.rundir import (
    CAPTURE_ANSWER,
    CAPTURE_ORDER,
    MOST_CAPTURES,
    STALL_FILE,
    CaptureOrder,
    Present,
    Standstill,
    fitting,
    forget_questions,
    host_document,
    living_ranks,
    new_request,
    order_capture,
    read_rank,
    recover,
)
from ddpdoctor.rundir.phases import LONG_PHASES, Phase
from ddpdoctor.rundir.typed import STALL
from ddpdoctor.telemetry import RECENT_STEPS, LiveRank, LiveRun, step_ms
from ddpdoctor.telemetry.live import KEPT_STEPS

LEAD_S = 6.0
"""From the order to the first step: ranks look for orders once a second, more rarely where processors are short, and an order
that one of them refuses is taken back before it begins."""
_ANSWER_S = 4.0
_LOOK_S = 0.5
_LEAST_S, _TIMES_LONGEST, _TIMES_IN_LONG_PHASE = 60.0, Tuning.times_longest, Tuning.times_in_long_phase
"""After how long without the end of a step nobody waits for a window any more, see :func:`why_it_stands`."""
_SAVED, _OVER = "saved", ("saved", "skipped", "failed")
"""States of a window in rank.json."""


def capture(run: Path, steps: int, first: int | None) -> None:
    """Order a window, wait until its traces are in the run directory, and say where. Raises UnusableInput, also if the job has ended,
    was killed, or stands still as :func:`why_it_stands` says, before or while the window is waited for."""
    ranks = running_ranks(run)
    recover(str(run))
    live = LiveRun(run)
    live.look()
    if why := why_no_step(live, ranks, live.silent_s() or 0.0):
        raise UnusableInput(f"no window, because {why}")
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
    _ordered(live, ranks, order)
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


def why_no_step(live: LiveRun, ranks: Sequence[Present], silent_s: float) -> str | None:
    """Why no window can be waited for, as the end of a sentence that says what to do; None while there is hope. Windows open and close
    at the ends of steps, of which there was none for ``silent_s``.

    Either the job's monitor says that it hangs, or the deadline is over: ten times the longest of the newest 200 recorded steps (the
    monitor's own factor), five times as long while a rank evaluates, saves, loads, compiles or is in a debugger (the same), and a minute at
    least. So there is no limit for a job that trains, however slowly, nor for a window that is far ahead.
    """
    roots = {os.path.dirname(rank.spool) for rank in ranks}  # noqa: PTH120
    stalls = [fitting(host_document(root, STALL_FILE), STALL, "", []) for root in roots]
    hangs = [stall for stall in stalls if stall.get("state") == Standstill.LASTS]
    if not hangs and (silent_s < _LEAST_S or silent_s < _longest_wait_s(live, ranks)):
        return None
    silent_s = max([silent_s, *(float(stall.get("silent_s") or 0.0) for stall in hangs)])
    step = max((each.steps_total for each in live.ranks.values()), default=0)
    return f"the job {'hangs' if hangs else 'stands'} in step {step}: {_silence(live, silent_s)}"


def _silence(live: LiveRun, silent_s: float) -> str:
    return f"no rank has finished a step for {silent_s:.0f} s. `ddpdoctor stacks {live.path}` says where its ranks are."


def _longest_wait_s(live: LiveRun, ranks: Sequence[Present]) -> float:
    steps = [step for each in live.ranks.values() for step in each.recent(KEPT_STEPS)]
    longest_s = max((step.duration_ms for step in steps), default=0.0) / 1e3
    told = {rank.rank: rank.progress or {} for rank in ranks}
    phases = {said.get("phase") for rank, said in told.items() if live.is_there(rank, said)}
    in_long_phase = bool(phases & {*LONG_PHASES, Phase.DEBUGGER})
    return max(_LEAST_S, _TIMES_LONGEST * longest_s) * (_TIMES_IN_LONG_PHASE if in_long_phase else 1.0)


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


def _ordered(live: LiveRun, ranks: Sequence[Present], order: CaptureOrder) -> None:
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
    if stopped := [rank.rank for rank in ranks if is_stopped(rank)]:
        raise UnusableInput(f"no window, because rank {stopped[0]} is {STOPPED}.")
    if refused and (stands_s := live.stands_s()) is not None:
        raise UnusableInput(
            f"no window, because windows open and close at the ends of steps, and {_silence(live, stands_s)}"
        )
    if refused:
        rank_number, why = next(iter(refused.items()))
        raise UnusableInput(f"no window, because rank {rank_number} cannot open one: {why}.")
    raise UnusableInput(
        f"no window, because rank {silent[0]} does not answer: a thread may hold Python's lock (the GIL), or the job "
        "was started with --hang-after 0, which leaves out who would answer."
    )


def _wait(run: Path, live: LiveRun, ranks: Sequence[Present], order: CaptureOrder) -> None:
    """Until the window is over on all ranks, or cannot come any more. Raises UnusableInput where no rank saved a trace."""
    folders = {rank.rank: live.ranks[rank.rank].log.path.parent for rank in ranks if rank.rank in live.ranks}
    silent_since_s, signs = time.monotonic() - (live.silent_s() or 0.0), ""
    why = None
    while True:
        live.look()
        recover(str(run))
        states = {
            rank: next((c for c in _captures(folder) if c.get("number") == order.number), {})
            for rank, folder in folders.items()
        }
        if _is_over(live, ranks, states.values()):
            break
        before, signs = signs, f"{states} {[each.steps_total for each in live.ranks.values()]}"
        if before and signs != before:
            silent_since_s = time.monotonic()
        why = why_no_step(live, ranks, time.monotonic() - silent_since_s)
        if why is not None:
            break
        time.sleep(_LOOK_S)
    for rank in ranks:
        forget_questions(rank.spool, order.request, CAPTURE_ORDER)
    if why is not None:
        raise UnusableInput(f"the window is taken back, because {why}")
    live.look()  # its ranks may have gone since
    ended = f"the job {'was killed' if live.gone else 'ended'} before it was saved"
    for number, state in states.items():
        if state.get("state") != _SAVED:
            say(f"Note: rank {number} has no trace of it: {state.get('why') or ended}.", err=True)
    saved = sum(state.get("state") == _SAVED for state in states.values())
    if not saved:
        raise UnusableInput("no rank saved a trace.")
    say(f"{saved} traces saved; `ddpdoctor analyze {run} --window {order.number}` diagnoses them")


def _is_over(live: LiveRun, ranks: Sequence[Present], states: Collection[Mapping[str, Any]]) -> bool:
    """Whether nothing of the window, whose ``states`` these are, will change any more. What ranks have handed over to be saved outlives
    them, while their launcher's side is there."""
    now = [state.get("state") for state in states]
    if live.over or all(state in _OVER for state in now):
        return True
    left = {rank.spool for rank in living_ranks(str(live.path))}
    return "saving" not in now and left.isdisjoint(rank.spool for rank in ranks)
