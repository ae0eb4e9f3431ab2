"""Sends requests to the ranks that run on this host and reads their answers. ``capture`` waits until its traces are saved."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.cli.session import say
from ddpdoctor.errors import UnusableInput
from ddpdoctor.launch.hang_detection import Tuning
from ddpdoctor.rundir import (
    CAPTURE_ANSWER,
    CAPTURE_ORDER,
    MOST_CAPTURES,
    STALL_FILE,
    fitting,
    is_run_directory,
)
from ddpdoctor.rundir.draining import recover
from ddpdoctor.rundir.host_files import host_document
from ddpdoctor.rundir.liveness import writer_of
from ddpdoctor.rundir.reader import read_manifest, read_rank
from ddpdoctor.rundir.requests import (
    CaptureRequest,
    Present,
    answer_of,
    delete_requests,
    launcher_runs,
    living_ranks,
    new_request,
    request_capture,
)
from ddpdoctor.rundir.stepevents import LONG_PHASES, Phase
from ddpdoctor.rundir.stops import Standstill
from ddpdoctor.rundir.typed import STALL
from ddpdoctor.telemetry.live import KEPT_STEPS, RECENT_STEPS, LiveRank, LiveRun, step_ms
from ddpdoctor.telemetry.procfs import state_of

POLL_S = 0.1
STOPPED = "stopped (SIGSTOP)"
"""State of a rank that a signal has suspended."""


def running_ranks(run: Path) -> list[Present]:
    """The ranks whose processes run on this host. Raises UnusableInput, with the reason, if there are none."""
    if not is_run_directory(str(run)):
        raise UnusableInput(
            f"{run} is not a ddpdoctor run directory. To record one: `ddpdoctor run --out {run} -- COMMAND`."
        )
    if found := living_ranks(str(run)):
        return found
    manifest = read_manifest(str(run), []) or {}
    if manifest.get("ended_ns") is not None:
        raise UnusableInput(f"the job of {run} has ended: `ddpdoctor analyze {run}` diagnoses it.")
    if launcher_runs(str(run), manifest) is False:
        raise UnusableInput(
            f"the job of {run} is no longer running: its launcher was killed, and no rank runs on this host. `ddpdoctor analyze {run}` "
            "diagnoses it."
        )
    launch_host = manifest.get("host")
    raise UnusableInput(
        f"no rank of {run} records on this host as this user{f'; the job was started on {launch_host}' if launch_host else ''}. "
        "If the job has just started, its ranks have not joined yet: try again. Else run the command on a host of the ranks."
    )


def is_stopped(rank: Present) -> bool:
    """Whether a signal has suspended the rank's process; False if unknown."""
    pid = writer_of(rank.spool).pid
    return bool(pid) and state_of(pid) == "T"


def answers(
    ranks: Sequence[Present], name: str, request: int, timeout_s: float, since_ns: int | None = None
) -> Mapping[int, Mapping[str, Any]]:
    """Wait until all ranks have answered or ``timeout_s`` has passed; returns the answers by rank.

    An answer is the document ``name`` with the id ``request``, or with another id and a time at or after ``since_ns``.
    """
    found: dict[int, Mapping[str, Any]] = {}
    deadline_s = time.monotonic() + timeout_s
    while True:
        for rank in ranks:
            if (
                rank.rank not in found
                and (answer := answer_of(rank.spool, name, request, since_ns)) is not None
            ):
                found[rank.rank] = answer
        if len(found) == len(ranks) or time.monotonic() >= deadline_s:
            return found
        time.sleep(POLL_S)


_ANSWER_S = 4.0
"""Time for all ranks to answer. Ranks poll for requests once a second, less often under CPU contention."""
_WITHDRAW_S = 2.0
"""Time to withdraw the request from all ranks before the window opens, if one refuses or does not answer: they poll for this, too."""
LEAD_S = _ANSWER_S + _WITHDRAW_S
"""Minimum seconds between the request and the first step."""
_LOG_AGE_S = 1.0
"""The steps known of a rank are up to this much older than the rank: it writes its log once a second."""
_MIN_STEPS_AHEAD = 2
"""A rank refuses a window that begins before the step after its next one."""
_SEVERAL_HOSTS_LEAD_S = 60.0
"""Lead of the step suggested for a job on several hosts: the user runs the command on each host before this step."""
_POLL_S = 0.5
_MIN_SILENCE_S = 60.0
"""A job that finished no step for a shorter time may open a window, see :func:`why_no_window`."""
_SAVED_STATE, _FINAL_STATES = "saved", ("saved", "skipped", "failed")
"""States of a window in rank.json: success, and all final states."""


def capture(run: Path, steps: int, first: int | None) -> None:
    """Request a window, wait until its traces are in the run directory, and print how to analyze them.

    Raises UnusableInput if no window is possible, or if the job ends, is killed or stalls (:func:`why_no_window`) meanwhile.
    """
    ranks = running_ranks(run)
    recover(str(run))
    live = LiveRun(run)
    live.update()
    if why := why_no_window(live, ranks, live.silent_s() or 0.0):
        raise UnusableInput(f"no window, because {why}")
    hosts_here = {live.ranks[rank.rank].host for rank in ranks if rank.rank in live.ranks}
    remote_ranks = [
        each.rank for each in live.ranks.values() if each.host not in hosts_here and not each.ended
    ]
    if remote_ranks and first is None:
        later = _first_step(list(live.ranks.values()), _SEVERAL_HOSTS_LEAD_S)
        raise UnusableInput(
            f"{len(remote_ranks)} more ranks run on other hosts. Run `ddpdoctor capture {run} --first STEP` on each host with the same "
            f"STEP, such as {later}, which the ranks reach in {_SEVERAL_HOSTS_LEAD_S:.0f} s."
        )
    begin = first or _first_step(list(live.ranks.values()), LEAD_S)
    request = CaptureRequest(new_request(), _window_number(run, live, hosts_here, begin), begin, steps)
    _send_request(live, ranks, request)
    until = f" to {request.first + steps - 1}" if steps > 1 else ""
    on_ranks = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    say(f"window {request.number}: steps {request.first}{until} on {on_ranks} of this host")
    try:
        _wait_until_saved(run, live, ranks, request)
    except KeyboardInterrupt:
        say(
            f"The ranks still record the window; then `ddpdoctor analyze {run} --window {request.number}` diagnoses it.",
            err=True,
        )
        raise
    finally:
        for rank in ranks:
            delete_requests(rank.spool, request.request, CAPTURE_ANSWER)


def why_no_window(live: LiveRun, ranks: Sequence[Present], silent_s: float) -> str | None:
    """Why a window cannot open or close, as the end of a sentence with advice; None if it can. ``silent_s``: seconds since the last
    step ended. Windows open and close only at the end of a step.

    A window is impossible if the job's monitor reports a hang, or if ``silent_s`` exceeds a limit (:func:`_longest_wait_s`). There is no
    time limit while the job makes steps.
    """
    roots = {os.path.dirname(rank.spool) for rank in ranks}  # noqa: PTH120
    stalls = [fitting(host_document(root, STALL_FILE), STALL, "", []) for root in roots]
    hangs = [stall for stall in stalls if stall.get("state") == Standstill.LASTS]
    if not hangs and (silent_s < _MIN_SILENCE_S or silent_s < _longest_wait_s(live, ranks)):
        return None
    silent_s = max([silent_s, *(float(stall.get("silent_s") or 0.0) for stall in hangs)])
    step = max((each.steps_total for each in live.ranks.values()), default=0)
    return (
        f"the job {'hangs' if hangs else 'makes no progress'} in step {step}: {_silence_text(live, silent_s)}"
    )


def _silence_text(live: LiveRun, silent_s: float) -> str:
    return f"no rank has finished a step for {silent_s:.0f} s. `ddpdoctor stacks {live.path}` shows where its ranks are."


def _longest_wait_s(live: LiveRun, ranks: Sequence[Present]) -> float:
    """Limit of the time without a finished step, at least ``_MIN_SILENCE_S``: with the hang monitor's factors, a multiple of the longest of
    the newest ``KEPT_STEPS`` steps, more while a rank evaluates, saves, loads, compiles or is in a debugger."""
    steps = [step for each in live.ranks.values() for step in each.recent(KEPT_STEPS)]
    longest_s = max((step.duration_ms for step in steps), default=0.0) / 1e3
    documents = {rank.rank: rank.progress or {} for rank in ranks}
    phases = {
        document.get("phase")
        for rank, document in documents.items()
        if live.is_current_position(rank, document)
    }
    in_long_phase = bool(phases & {*LONG_PHASES, Phase.DEBUGGER})
    limit_s = max(_MIN_SILENCE_S, Tuning.longest_gap_factor * longest_s)
    return limit_s * (Tuning.long_phase_factor if in_long_phase else 1.0)


def _first_step(ranks: Sequence[LiveRank], lead_s: float) -> int:
    """The first step that no rank reaches within ``lead_s``. Raises UnusableInput if it cannot be known."""
    times = [ms for each in ranks if (ms := step_ms(each, RECENT_STEPS))]
    if not times:
        raise UnusableInput("no rank has finished a step yet: there is nothing to capture.")
    newest_step = max(each.steps_total for each in ranks)
    return (
        newest_step + _MIN_STEPS_AHEAD + math.ceil((lead_s + _LOG_AGE_S) / (statistics.median(times) / 1e3))
    )


def _window_number(run: Path, live: LiveRun, hosts_here: Collection[str | None], first: int) -> int:
    """Number of the window that begins at step ``first``: the number of a window of other hosts with that step, else a new one."""
    used = {
        each.rank: {
            capture.get("number", 0): (capture.get("steps") or [None])[0]
            for capture in _captures(each.log.path.parent)
        }
        for each in live.ranks.values()
    }
    used_here = {
        number for each in live.ranks.values() if each.host in hosts_here for number in used[each.rank]
    }
    same_first = {number for numbers in used.values() for number, begin in numbers.items() if begin == first}
    number = max(
        (number for number in same_first if number > max(used_here, default=0)),
        default=max((number for numbers in used.values() for number in numbers), default=0) + 1,
    )
    if number > MOST_CAPTURES:
        raise UnusableInput(f"{run} already has {MOST_CAPTURES} captures, the most of a recording.")
    return number


def _captures(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (read_rank(str(folder), []) or {}).get("captures") or []
    return found


def _send_request(live: LiveRun, ranks: Sequence[Present], request: CaptureRequest) -> None:
    """Send the request to the ranks; if a rank refuses or does not answer, withdraw it. Raises UnusableInput."""
    for rank in ranks:
        request_capture(rank.spool, request)
    found = answers(ranks, CAPTURE_ANSWER, request.request, _ANSWER_S)
    unanswered = [rank.rank for rank in ranks if rank.rank not in found]
    refused = {rank: str(answer["why"]) for rank, answer in found.items() if answer.get("why")}
    if not unanswered and not refused:
        return
    for rank in ranks:
        delete_requests(rank.spool, request.request, CAPTURE_ORDER, CAPTURE_ANSWER)
    if stopped := [rank.rank for rank in ranks if is_stopped(rank)]:
        raise UnusableInput(f"no window, because rank {stopped[0]} is {STOPPED}.")
    if refused and (stalled_s := live.long_silence_s()) is not None:
        raise UnusableInput(
            f"no window, because windows open and close at the ends of steps, and {_silence_text(live, stalled_s)}"
        )
    if refused:
        rank_number, why = next(iter(refused.items()))
        raise UnusableInput(f"no window, because rank {rank_number} cannot open one: {why}.")
    raise UnusableInput(
        f"no window, because rank {unanswered[0]} does not answer: a thread may hold Python's lock (the GIL), or the job "
        "was started with --hang-after 0, which disables the thread that answers."
    )


def _wait_until_saved(run: Path, live: LiveRun, ranks: Sequence[Present], request: CaptureRequest) -> None:
    """Wait until the window is over on all ranks or cannot open. Raises UnusableInput if no rank saved a trace."""
    folders = {rank.rank: live.ranks[rank.rank].log.path.parent for rank in ranks if rank.rank in live.ranks}
    silent_since_s, progress = time.monotonic() - (live.silent_s() or 0.0), ""
    why = None
    while True:
        live.update()
        recover(str(run))
        states = {
            rank: next((c for c in _captures(folder) if c.get("number") == request.number), {})
            for rank, folder in folders.items()
        }
        if _is_final(live, ranks, states.values()):
            break
        before, progress = progress, f"{states} {[each.steps_total for each in live.ranks.values()]}"
        if before and progress != before:
            silent_since_s = time.monotonic()
        why = why_no_window(live, ranks, time.monotonic() - silent_since_s)
        if why is not None:
            break
        time.sleep(_POLL_S)
    for rank in ranks:
        delete_requests(rank.spool, request.request, CAPTURE_ORDER)
    if why is not None:
        raise UnusableInput(f"the window is canceled, because {why}")
    live.update()  # ranks may have ended since
    ended = f"the job {'was killed' if live.gone else 'ended'} before it was saved"
    for number, state in states.items():
        if state.get("state") != _SAVED_STATE:
            say(f"Note: rank {number} has no trace of the window: {state.get('why') or ended}.", err=True)
    saved = sum(state.get("state") == _SAVED_STATE for state in states.values())
    if not saved:
        raise UnusableInput("no rank saved a trace.")
    traces, them = ("1 trace", "it") if saved == 1 else (f"{saved} traces", "them")
    say(f"{traces} saved; `ddpdoctor analyze {run} --window {request.number}` diagnoses {them}")


def _is_final(live: LiveRun, ranks: Sequence[Present], states: Collection[Mapping[str, Any]]) -> bool:
    """Whether the ``states`` of the window are final. Traces that are being saved are still saved after their ranks end."""
    states_now = [state.get("state") for state in states]
    if live.over or all(state in _FINAL_STATES for state in states_now):
        return True
    alive = {rank.spool for rank in living_ranks(str(live.path))}
    return "saving" not in states_now and alive.isdisjoint(rank.spool for rank in ranks)
