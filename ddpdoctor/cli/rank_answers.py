"""Requests to the ranks that run on this host, and their answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import (
    Present,
    answer_of,
    is_run_directory,
    launcher_runs,
    living_ranks,
    read_manifest,
    writer_of,
)
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
    """Whether a signal has suspended the rank's process; False if that is unknown here."""
    pid = writer_of(rank.spool).pid
    return bool(pid) and state_of(pid) == "T"


def answers(
    ranks: Sequence[Present], name: str, request: int, timeout_s: float, since_ns: int | None = None
) -> Mapping[int, Mapping[str, Any]]:
    """Answers by rank, once all ranks have answered or after ``timeout_s``.

    An answer is the document ``name`` with this ``request``, or with another one and a time at or after ``since_ns``.
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
