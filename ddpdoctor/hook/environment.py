"""The environment variables by which the launcher tells the ranks what to record."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

RUN = "DDPDOCTOR_RUN"
SPOOL = "DDPDOCTOR_SPOOL"
PROFILE_STEPS = "DDPDOCTOR_PROFILE_STEPS"
MAX_TRACE_MB = "DDPDOCTOR_MAX_TRACE_MB"
HANG_AFTER = "DDPDOCTOR_HANG_AFTER_S"
TRIAL = "DDPDOCTOR_TRIAL"
"""Set by ``try`` alone: the settings to change and the number of steps, as JSON."""

DEFAULT_PROFILE_STEPS = (10, 15)
"""Past the bucket rebuild, the caching allocator's growth and most autotuning, yet early enough for short jobs."""
DEFAULT_MAX_TRACE_MB = 256
"""Per rank: the traces of a thousand ranks take 256 GB."""
DEFAULT_HANG_AFTER_S = 300.0
"""Half of the shortest default timeout of a collective (NCCL's ten minutes, Gloo's thirty)."""

FLIGHT_ENTRIES, OLDER_FLIGHT_ENTRIES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Entries that torch's flight recorders keep. torch 2.8 and newer read the first name, then the second, of which they warn; torch 2.7 and
older read the second alone, and keep none without it."""

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""The folder that is put on the job's ``PYTHONPATH``."""


class HookOptions(NamedTuple):
    """What the hook is to do."""

    profile_steps: tuple[int, int] | None = DEFAULT_PROFILE_STEPS
    """First step of the profiler window and the step before which it closes; None for no window."""
    max_trace_mb: int = DEFAULT_MAX_TRACE_MB
    """Most that one rank's trace may take on disk, in MB of 10^6 bytes."""
    hang_after_s: float = DEFAULT_HANG_AFTER_S
    """Seconds without a step after which the job may hang; 0: hangs are not watched for."""


def job_environment(run: str, spool: str, options: HookOptions, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with what switches the recording on in every Python below the command.

    ``run`` is the run directory and ``spool`` the folder that ``rundir.make_spool_root`` made for it, both absolute.
    """
    steps = options.profile_steps
    environment = dict(base)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = SITE + os.pathsep + path if path else SITE
    environment[RUN] = run
    environment[SPOOL] = spool
    environment[PROFILE_STEPS] = f"{steps[0]}:{steps[1]}" if steps else ""
    environment[MAX_TRACE_MB] = str(options.max_trace_mb)
    environment[HANG_AFTER] = f"{options.hang_after_s:g}"
    # Kineto reports each start and stop on the job's stderr at a level that only a number above 5 silences.
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    # Older versions keep no flight record by default; set but empty, this variable hangs Gloo.
    if not environment.get(FLIGHT_ENTRIES):
        environment[FLIGHT_ENTRIES] = environment.get(OLDER_FLIGHT_ENTRIES) or "2000"
    return environment


def name_flight_entries(environment: MutableMapping[str, str], c10d: object) -> None:
    """Set the older name in a rank's own ``environment``, before its process group is made, where this torch's ``c10d`` reads no other."""
    older = hasattr(c10d, "_dump_nccl_trace") and not hasattr(c10d, "_dump_fr_trace")
    if older and environment.get(FLIGHT_ENTRIES):
        environment.setdefault(OLDER_FLIGHT_ENTRIES, environment[FLIGHT_ENTRIES])


def profile_steps(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """The requested window (first step, step before which it closes); None without one, or if the variable is
    malformed."""
    first, _, stop = environment.get(PROFILE_STEPS, "").partition(":")
    if not (first.isdecimal() and stop.isdecimal()) or int(first) >= int(stop):
        return None
    return int(first), int(stop)


def max_trace_bytes(environment: Mapping[str, str]) -> int:
    """Most bytes that this rank's trace may take on disk."""
    text = environment.get(MAX_TRACE_MB, "")
    return (int(text) if text.isdecimal() else DEFAULT_MAX_TRACE_MB) * 1_000_000


def hang_after_s(environment: Mapping[str, str]) -> float:
    """Seconds without a step after which the job may hang; 0 if hangs are not watched for."""
    try:
        return max(0.0, float(environment.get(HANG_AFTER, "0")))
    except ValueError:
        return 0.0
