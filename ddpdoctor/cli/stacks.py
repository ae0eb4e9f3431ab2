"""``ddpdoctor stacks``: print the stack of each rank of a running job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ddpdoctor.rundir.requests import Present

ANSWER_S = 5.0
"""Time limit for answers. Ranks poll for requests once a second, less often under CPU contention."""


@click.command("stacks")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("-v", "--verbose", is_flag=True, help="Show all threads, with the frames of libraries.")
def command(run: Path, verbose: bool) -> None:
    """Print where each rank of a job that runs under `ddpdoctor run` is now. The job keeps running.

    The ranks on this host are asked. A rank that holds Python's lock (the GIL) in C code, or is stopped (SIGSTOP), cannot
    answer.

    \b
    Examples:
      ddpdoctor stacks ddpdoctor-runs/20260101T120000Z-train
      ddpdoctor stacks ddpdoctor-runs/20260101T120000Z-train -v
    """
    from rich.console import Console
    from rich.text import Text

    from ddpdoctor.cli.rank_requests import answers, running_ranks
    from ddpdoctor.plain import plain
    from ddpdoctor.rundir import STACKS_FILE, STACKS_QUESTION, fitting
    from ddpdoctor.rundir.requests import ask, delete_requests, new_request
    from ddpdoctor.rundir.typed import STANDING

    ranks, request, since_ns = running_ranks(run), new_request(), time.time_ns()
    for rank in ranks:
        ask(rank.spool, request, STACKS_QUESTION)
    try:
        found = answers(ranks, STACKS_FILE, request, ANSWER_S, since_ns)
    finally:
        for rank in ranks:
            delete_requests(rank.spool, request, STACKS_QUESTION, STACKS_FILE)
    console = Console(highlight=False)

    def line(text: str, style: str = "") -> None:
        console.print(Text(plain(text), style=style), soft_wrap=True)

    for rank in ranks:
        answer = found.get(rank.rank)
        if answer is None:
            what, *more = _unanswered_text(rank)
            line(f"rank {rank.rank} (process {rank.pid}) {what}.", "bold red")
            for text in more:
                line(f"  {text}")
            continue
        answer = fitting(dict(answer), STANDING, "", [])
        line(f"rank {rank.rank} (process {rank.pid}) {_state_text(answer)}", "bold")
        for text in _lines(answer, verbose):
            line(f"  {text}")
    if spread := _answer_spread(list(found.values())):
        line(spread, "dim")


def _answer_spread(answers: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on the time between the first and the last answer; "" with fewer than two answers."""
    times_ns = [at_ns for answer in answers if isinstance(at_ns := answer.get("at_ns"), int)]
    if len(times_ns) < 2:
        return ""
    apart_s = (max(times_ns) - min(times_ns)) / 1e9
    return f"The stacks were not taken at the same time: the first and the last are {apart_s:.1f} s apart."


def _unanswered_text(rank: Present) -> Sequence[str]:
    """Lines on a rank that did not answer: its state, then the stack written by faulthandler or possible reasons."""
    from ddpdoctor.cli.rank_requests import STOPPED, is_stopped
    from ddpdoctor.rundir import FAULTS_FILE, read_bounded

    if is_stopped(rank):
        return [f"is {STOPPED}"]
    try:
        faults = read_bounded(str(Path(rank.spool) / FAULTS_FILE), 1 << 20).decode(errors="replace")
    except OSError:
        faults = ""
    return ["does not answer", *(faults.splitlines() or _NO_ANSWER_REASONS)]


_NO_ANSWER_REASONS = (
    "Possible reasons: a thread holds Python's lock (the GIL); the process gets no CPU time; /dev/shm is full; or the "
    "job was started with --hang-after 0, which disables the thread that answers.",
)


def _state_text(answer: Mapping[str, Any]) -> str:
    step, since_ns, at_ns = (answer.get(name) for name in ("step", "step_since_ns", "at_ns"))
    duration_text = (
        f" for {(at_ns - since_ns) / 1e9:.1f} s" if since_ns and at_ns and at_ns >= since_ns else ""
    )
    age_ns = time.time_ns() - at_ns if at_ns else 0
    stale = f", {age_ns / 1e9:.0f} s ago" if age_ns > 10e9 else ""
    in_step = "" if step is None else f"in step {step:,}{duration_text}: "
    return f"{in_step}{answer.get('phase') or 'running'}{stale}"


def _lines(answer: Mapping[str, Any], verbose: bool) -> list[str]:
    """Lines with the frames, innermost first, as in reports and unlike in Python's tracebacks."""
    if not verbose:
        return _frames(answer.get("user") or answer.get("frames") or [])
    found = []
    for thread in answer.get("threads") or [
        {"name": "training", "training": True, "frames": answer.get("frames")}
    ]:
        found.append(f"{thread.get('name') or 'thread'}{' (trains)' if thread.get('training') else ''}:")
        found += [f"  {text}" for text in _frames(thread.get("frames") or [])]
    return found


def _frames(frames: Sequence[Sequence[Any]]) -> list[str]:
    return [f"{frame[0]}:{frame[1]} {frame[2]}" for frame in frames if len(frame) == 3]
