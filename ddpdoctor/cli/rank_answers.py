"""Questions to the ranks of a job that runs on this host, and their answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.errors import UnusableInput
from ddpdoctor.launch.procfs import state_of
from ddpdoctor.rundir import (
    Present,
    answer_of,
    is_run_directory,
    launcher_runs,
    living_ranks,
    read_manifest,
    writer_of,
)

LOOK_S = 0.1
STOPPED = "stopped (SIGSTOP)"
"""What a rank is that a signal has stopped, until another one lets it go on."""


def running_ranks(run: Path) -> list[Present]:
    """Those whose processes live. Raises UnusableInput where there are none here, and says why."""
    if not is_run_directory(str(run)):
        raise UnusableInput(
            f"{run} is no run directory of ddpdoctor: `ddpdoctor run --out {run} -- COMMAND` makes one."
        )
    if found := living_ranks(str(run)):
        return found
    manifest = read_manifest(str(run), []) or {}
    if manifest.get("ended_ns") is not None:
        raise UnusableInput(f"the job of {run} has ended: `ddpdoctor analyze {run}` says what was recorded.")
    if launcher_runs(str(run), manifest) is False:
        raise UnusableInput(
            f"the job of {run} is no longer running: its launcher was killed, and none of its ranks is left on this host. `ddpdoctor "
            f"analyze {run}` says what was recorded."
        )
    where = manifest.get("host")
    raise UnusableInput(
        f"no rank of {run} records on this host as this user{f'; it was started on {where}' if where else ''}. "
        "If the job has just begun, its ranks have not joined yet: try again. Else run the command where the ranks are."
    )


def is_stopped(rank: Present) -> bool:
    """Whether somebody has stopped its process by a signal, as far as that can be seen from here."""
    pid = writer_of(rank.spool).pid
    return bool(pid) and state_of(pid) == "T"


def answers(
    ranks: Sequence[Present], name: str, request: int, patience_s: float, since_ns: int | None = None
) -> Mapping[int, Mapping[str, Any]]:
    """By rank what it has answered to ``request`` in the document ``name``, or to another one at or after ``since_ns``, once all
    have, or after ``patience_s``."""
    found: dict[int, Mapping[str, Any]] = {}
    deadline_s = time.monotonic() + patience_s
    while True:
        for rank in ranks:
            if (
                rank.rank not in found
                and (answer := answer_of(rank.spool, name, request, since_ns)) is not None
            ):
                found[rank.rank] = answer
        if len(found) == len(ranks) or time.monotonic() >= deadline_s:
            return found
        time.sleep(LOOK_S)
