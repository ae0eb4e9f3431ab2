"""The job's environment: what the hook needs, and a mark by which this launcher knows its own ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ddpdoctor.hook.environment import (
    DEFAULT_HANG_AFTER_S,
    DEFAULT_PROFILE_STEPS,
    HookOptions,
    job_environment,
)
from ddpdoctor.launch.options import RunOptions

LAUNCHER_VARIABLE = "DDPDOCTOR_LAUNCHER"


def child_environment(
    base: Mapping[str, str], run: Path, spool: Path, marker: str, options: RunOptions
) -> dict[str, str]:
    """``base`` with what switches the recording on in every Python below the command.

    ``marker`` is this launcher's own: several launchers may record into the same ``run`` on one host.
    """
    hook_options = HookOptions(
        profile_steps=(options.profile_steps or DEFAULT_PROFILE_STEPS) if options.profile else None,
        max_trace_mb=options.max_trace_mb,
        launcher_pid=os.getpid(),
        hang_after_s=DEFAULT_HANG_AFTER_S if options.hang_after_s is None else options.hang_after_s,
    )
    return {**job_environment(str(run), str(spool), hook_options, base), LAUNCHER_VARIABLE: marker}
