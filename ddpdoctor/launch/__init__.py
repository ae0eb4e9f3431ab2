"""Running a job under ddpdoctor: the run directory, the child process and its signals, the environment, the telemetry.

The launcher adds nothing to the job's streams, passes each signal on once, ends as the job ends, and where its own part fails the job
goes on without it.

::

    the run       session       one recorded run from start to end
                  options       what the user asked for
                  directory     the run directory and its manifest
    the job       child         the process, its streams and signals
                  witness       a signal to the group, or to the launcher alone
                  alone         the job without us, where our part fails before it starts
    beside it     helper        forked processes that the launcher never waits for
                  keeper        the one that touches storage: copies records, samples the host
                  sentinel      the one that watches for hangs: it asks, reports, and ends the job where that was ordered
    a hang        rankwatch     the ranks of this host, by their memory and /proc
                  unjoined      ranks before init_process_group    procfs, usage   what the kernel counts
                  standstill    whether the job stands still       proof         whether that is proven, so that it may be ended
                  hangwords     what the terminal says of it
    afterwards    leftovers     records that are still in memory   orphans       ranks that outlived the command
    ``doctor``    checkup       what can be recorded here          jobpython     the job's own Python
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
        "alone": "CommandNotStartedError run_alone",
        "checkup": "Check CheckState checks_for",
        "child": "ExitStatus",
        "session": "Outcome run_job",
    },
)
