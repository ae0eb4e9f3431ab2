"""Ranks that have lost their launcher: torchrun gives each a session of its own, so nothing else reaches them once it was killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from ddpdoctor.launch import procfs
from ddpdoctor.launch.leftovers import HostRanks, is_alive, ranks_of_spools
from ddpdoctor.rundir.door import at_door

_GRACE_S = 5.0
_RANK = b"RANK="
_OF_A_RANK = (_RANK, b"WORLD_SIZE=", b"LOCAL_RANK=")
"""What launchers of ranks set; whatever a rank starts inherits it."""


def known_ranks(root: Path, ranks: HostRanks) -> dict[int, int]:
    """By process id, the ranks of this host that were recorded, or wait to join their process group, dead ones included."""
    found = {pid: rank for rank, pid in ranks.all()}
    return found | ranks_of_spools(root) | {pid: rank for rank, pid, _ in at_door(str(root))}


def unseen_ranks(variable: str, value: str, seen: Collection[int]) -> dict[int, int]:
    """By process id, ranks of a launcher that were started and have not shown themselves yet, most of them because they are still to
    import torch. They are known by ``variable`` in their environment, which holds ``value`` for the ranks of this launcher only.

    ``seen`` are the numbers of those that have: what runs by their number was started by them.
    """
    marker = f"{variable}={value}".encode()
    number_of = {pid: number for pid in procfs.pids() if (number := _rank_of(pid, marker)) is not None}
    return {
        pid: number
        for pid, number in number_of.items()
        if number not in seen and procfs.parent_of(pid) not in number_of
    }


def _rank_of(pid: int, marker: bytes) -> int | None:
    """The rank's number in the environment of a process that has ``marker`` there."""
    environment = _environment(pid)
    if marker not in environment:
        return None
    values = [next((each for each in environment if each.startswith(name)), b"") for name in _OF_A_RANK]
    number = values[0].removeprefix(_RANK)
    return int(number) if all(values) and number.isdigit() and len(number) < 10 else None


def end_orphaned_ranks(pids: Iterable[int], variable: str, value: str) -> list[int]:
    """End those of some processes that are ranks which outlived the command that started them: SIGTERM, after a grace
    SIGKILL.

    Returns their ids. They are known as in ``unseen_ranks``.
    """
    marker = f"{variable}={value}".encode()
    ended = [pid for pid in sorted(set(pids)) if is_alive(pid) and marker in _environment(pid)]
    _signal(ended, signal.SIGTERM)
    deadline_s = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline_s and any(is_alive(pid) for pid in ended):
        time.sleep(0.05)
    _signal([pid for pid in ended if is_alive(pid) and marker in _environment(pid)], signal.SIGKILL)
    return ended


def _environment(pid: int) -> list[bytes]:
    """What a process was started with; empty where it is gone, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
