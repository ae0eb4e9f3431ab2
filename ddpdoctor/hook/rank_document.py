"""Builds rank.json: the rank's identity, and the settings of the job that affect its speed."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from typing import Any

from ..rundir import RANK_SCHEMA
from ..rundir.liveness import boot_id, pid_namespace
from .guard import part
from .job import (
    Listed,
    NumberedWeakMap,
    data_parallel_built,
    describe_ddp,
    describe_loader,
    describe_optimizer,
    device,
    process_groups,
    torch_settings,
)
from .recording import Session

_PART = part("settings")


def at_start(session: Session) -> dict[str, Any]:
    """The fields of rank.json that are known when the recording starts. A part that fails is left out."""
    from ..rundir.privacy import recorded_environment  # compiles patterns: only in ranks

    document: dict[str, Any] = {
        "schema": RANK_SCHEMA,
        "rank": session.rank,
        "local_rank": _number("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        "world_size": session.world_size,
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid_namespace": pid_namespace(),
        "pid": os.getpid(),
        "parent_pid": os.getppid(),
        "attempt": _number("TORCHELASTIC_RESTART_COUNT") or 0,
        "job_id": _job_id(),
        "joining_ns": session.joining_ns,
        "started_ns": time.time_ns(),
        "ended_ns": None,
        "backend": None,
        "python": platform.python_version(),
        "cpu_affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "process_groups": [], "ddp": [], "loaders": [], "optimizers": [],
        "data_parallel": False, "fsdp": False, "autocast": None,
        "environment": recorded_environment(os.environ),
    }  # fmt: skip
    _fill(document, torch_settings)
    _fill(document, device)
    _fill(document, process_groups)
    return document


def after_first_steps(session: Session) -> None:
    """Update the settings that are known only after a few training steps. Call on the training thread."""
    document = session.document
    for fill in (torch_settings, device, process_groups):
        _fill(document, fill)
    kinds: list[tuple[str, NumberedWeakMap[Any], Any]] = [
        ("ddp", session.models.known, describe_ddp),
        ("loaders", session.loaders.known, describe_loader),
        ("optimizers", session.optimizers, describe_optimizer),
    ]
    for key, things, describe in kinds:
        try:
            before = session.loaders.described if key == "loaders" else document[key]
            document[key] = _descriptions(before, things.listed, describe)
            if things.count > len(things.listed):
                document["not_listed"] = {
                    **document.get("not_listed", {}),
                    key: things.count - len(things.listed),
                }
        except Exception as error:
            _PART.failed(error)
    document["autocast"] = session.models.first.autocast if session.models.first else None
    document["data_parallel"] = bool(data_parallel_built)
    document["fsdp"] = any(described.get("sharded") for described in document["optimizers"])


def _fill(document: dict[str, Any], read_part: Any) -> None:
    try:
        document.update(read_part())
    except Exception as error:
        _PART.failed(error)


def _descriptions(before: list[dict[str, Any]], things: list[Listed], describe: Any) -> list[dict[str, Any]]:
    """Describe each (weak reference, source line) in ``things``; an object that was freed keeps its description from ``before``."""
    found = []
    for number, (reference, where) in enumerate(things):
        thing = reference()
        known = before[number] if number < len(before) else {"id": number, "where": where}
        found.append(known if thing is None else {"id": number, "where": where, **describe(thing)})
    return found


def _number(*names: str) -> int | None:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


def _job_id() -> str:
    """An id shared by all ranks of one start of the job."""
    value = os.environ.get
    elastic = value("TORCHELASTIC_RUN_ID")
    if elastic and elastic != "none":
        return elastic
    if value("SLURM_JOB_ID"):
        return f"{value('SLURM_JOB_ID')}.{value('SLURM_STEP_ID', '0')}"
    if value("MASTER_ADDR") and value("MASTER_PORT"):
        return f"{value('MASTER_ADDR')}:{value('MASTER_PORT')}"
    return "none" if elastic else str(sys.argv[0] if sys.argv else "")
