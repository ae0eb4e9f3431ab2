"""Whether a process that a document names still runs, as far as that can be known from here."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from .liveness import boot_id, pid_namespace, started

_CLOCK_S = 60.0
"""How far the clock may have been set since a process wrote when it began, before its process id counts as reused."""


def is_running(document: Mapping[str, Any]) -> bool | None:
    """Whether the process runs that a manifest, a launcher's record or ``rank.json`` is about. None if that cannot be known: another
    machine, another boot, another pid namespace, or a document that does not say which. Never raises.

    One that has ended and was not waited for does not run, nor does one whose id another process has now.
    """
    pid = document.get("pid")
    if not isinstance(pid, int) or pid <= 0 or not _is_of_here(document):
        return None
    ticks = started(pid)
    if ticks is None:
        return False
    booted_s, started_ns = _booted_s(), document.get("started_ns")
    if booted_s is None or not isinstance(started_ns, int):
        return True
    return booted_s + ticks / os.sysconf("SC_CLK_TCK") <= started_ns / 1e9 + _CLOCK_S


def _is_of_here(document: Mapping[str, Any]) -> bool:
    here = {"host": socket.gethostname(), "boot": boot_id(), "pid_namespace": pid_namespace()}
    return all(here.values()) and all(document.get(name) == value for name, value in here.items())


def _booted_s() -> float | None:
    try:
        with open("/proc/stat") as source:
            return next((float(line.split()[1]) for line in source if line.startswith("btime ")), None)
    except (OSError, ValueError, IndexError):
        return None
