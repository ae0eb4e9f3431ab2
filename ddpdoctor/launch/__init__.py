"""Running a job under ddpdoctor: the run directory, the child process and its signals, the environment, the
telemetry.

The launcher is a guest in front of somebody's production job. It adds nothing to the job's streams, passes
each signal on once, ends as the job ends, and where its own part fails the job goes on without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred
from ddpdoctor.launch.options import RunOptions, asked_options, parse_address, parse_step_range

if TYPE_CHECKING:
    from ddpdoctor.launch.alone import CommandNotStartedError, run_alone
    from ddpdoctor.launch.checkup import Check, CheckState, checks_for
    from ddpdoctor.launch.child import ExitStatus
    from ddpdoctor.launch.session import Outcome, run_job


__getattr__ = deferred(
    __name__,
    {
        "Check": "checkup",
        "CheckState": "checkup",
        "CommandNotStartedError": "alone",
        "ExitStatus": "child",
        "Outcome": "session",
        "checks_for": "checkup",
        "run_alone": "alone",
        "run_job": "session",
    },
)
