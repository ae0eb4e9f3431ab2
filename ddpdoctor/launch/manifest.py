"""What a run directory's manifest says when the run begins."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ddpdoctor
from ddpdoctor.launch.identity import JobIdentity
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.launch.privacy import mask_command
from ddpdoctor.rundir import RUN_SCHEMA, boot_id, new_run_id, pid_namespace
from ddpdoctor.rundir.privacy import mask_text, recorded_environment


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return os.environ.get("PWD", "")


def new_manifest(
    command: Sequence[str], options: RunOptions, environment: Mapping[str, str], identity: JobIdentity
) -> dict[str, Any]:
    """Of a run that begins now. ``environment`` is the job's."""
    return {
        "schema": RUN_SCHEMA,
        "run_id": new_run_id(),
        "ddpdoctor": ddpdoctor.__version__,
        "command": mask_command(command),
        "cwd": mask_text(_working_directory()),
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid_namespace": pid_namespace(),
        "pid": os.getpid(),
        "started_ns": time.time_ns(),
        "ended_ns": None,
        "exit_code": None,
        "signal": None,
        "job_id": identity.job_id,
        "task": identity.task,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "options": options.as_document(),
        "environment": recorded_environment(environment),
        "hosts": [],
        "notes": [],
        "note_codes": [],
    }
