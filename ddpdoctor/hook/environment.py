"""Environment variables with which the launcher configures the recording of ranks."""

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
"""Set only by ``ddpdoctor try``: the settings to change and the number of steps, as JSON."""

DEFAULT_PROFILE_STEPS = (10, 15)
"""Late enough that DDP has rebuilt its buckets, the caching allocator has grown and most autotuning is done; early enough for short
jobs."""
DEFAULT_MAX_TRACE_MB = 256
"""Per rank. The traces of 1000 ranks then take 256 GB."""
DEFAULT_HANG_AFTER_S = 300.0
"""Half of the shortest default timeout of a collective (NCCL: 10 minutes, Gloo: 30)."""

FLIGHT_ENTRIES, OLDER_FLIGHT_ENTRIES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Number of entries in torch's flight recorders. torch 2.8 and newer read the first name, then the second with a deprecation
warning. torch 2.7 and older read only the second, and record nothing if it is unset."""

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""Folder to put on the job's ``PYTHONPATH``."""


class HookOptions(NamedTuple):
    """Options of the hook."""

    profile_steps: tuple[int, int] | None = DEFAULT_PROFILE_STEPS
    """First step of the profiler window and the step before which it closes; None for no window."""
    max_trace_mb: int = DEFAULT_MAX_TRACE_MB
    """Upper limit of one rank's trace on disk, MB of 10^6 bytes."""
    hang_after_s: float = DEFAULT_HANG_AFTER_S
    """Seconds without a step after which a hang is suspected; 0: no hang detection."""


def job_environment(run: str, spool: str, options: HookOptions, base: Mapping[str, str]) -> dict[str, str]:
    """Return ``base`` with the variables that start the recording in every Python process of the command. ``run`` is the run
    directory, ``spool`` the folder made for it by ``rundir.make_spool_root``. Both are absolute."""
    steps = options.profile_steps
    environment = dict(base)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = SITE + os.pathsep + path if path else SITE
    environment[RUN] = run
    environment[SPOOL] = spool
    environment[PROFILE_STEPS] = f"{steps[0]}:{steps[1]}" if steps else ""
    environment[MAX_TRACE_MB] = str(options.max_trace_mb)
    environment[HANG_AFTER] = f"{options.hang_after_s:g}"
    # Kineto logs each start and stop to the job's stderr; only a level above 5 silences that.
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    # Older versions keep no flight record by default. If this variable is set but empty, Gloo hangs.
    if not environment.get(FLIGHT_ENTRIES):
        environment[FLIGHT_ENTRIES] = environment.get(OLDER_FLIGHT_ENTRIES) or "2000"
    return environment


def name_flight_entries(environment: MutableMapping[str, str], c10d: object) -> None:
    """Set the older variable in ``environment`` if this torch (``c10d``) reads only that one. Call before the process group is
    created."""
    older = hasattr(c10d, "_dump_nccl_trace") and not hasattr(c10d, "_dump_fr_trace")
    if older and environment.get(FLIGHT_ENTRIES):
        environment.setdefault(OLDER_FLIGHT_ENTRIES, environment[FLIGHT_ENTRIES])


def profile_steps(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """The requested window (first step, step before which it closes). None if there is none or the variable is malformed."""
    first, _, stop = environment.get(PROFILE_STEPS, "").partition(":")
    if not (first.isdecimal() and stop.isdecimal()) or int(first) >= int(stop):
        return None
    return int(first), int(stop)


def max_trace_bytes(environment: Mapping[str, str]) -> int:
    """Upper limit of this rank's trace on disk, bytes."""
    text = environment.get(MAX_TRACE_MB, "")
    return (int(text) if text.isdecimal() else DEFAULT_MAX_TRACE_MB) * 1_000_000


def hang_after_s(environment: Mapping[str, str]) -> float:
    """Seconds without a step after which a hang is suspected; 0: no hang detection."""
    try:
        return max(0.0, float(environment.get(HANG_AFTER, "0")))
    except ValueError:
        return 0.0
