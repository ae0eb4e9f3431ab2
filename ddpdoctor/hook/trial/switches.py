"""Settings of the process: torch's global switches, its threads, and the processors that a rank may use."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Tuple

from ..guard import part
from ..job import job_torch
from .asked import Trial

_PART = part("trial")


def _precision() -> Any:
    return job_torch().get_float32_matmul_precision()


def _benchmark() -> Any:
    return bool(job_torch().backends.cudnn.benchmark)


def _set_benchmark(value: Any) -> None:
    job_torch().backends.cudnn.benchmark = bool(value)


def _affinity() -> str:
    """ "spread" where this rank's processors are its own share of what the job may use; else their number."""
    mine = sorted(os.sched_getaffinity(0))
    return "spread" if mine == _share.get("of") else str(len(mine))


_share: Dict[str, Any] = {}


def _set_affinity(value: Any) -> None:
    """Each local rank gets an equal share of the processors, neighbours together."""
    allowed = sorted(os.sched_getaffinity(0))
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    each = len(allowed) // ranks
    if each < 1:
        raise ValueError(f"{len(allowed)} processors for {ranks} ranks")
    _share["of"] = allowed[rank * each : (rank + 1) * each]
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), _share["of"])


_SWITCHES: Dict[str, Tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch.threads": (
        lambda: job_torch().get_num_threads(),
        lambda value: job_torch().set_num_threads(int(value)),
    ),
    "torch.matmul_precision": (
        _precision,
        lambda value: job_torch().set_float32_matmul_precision(str(value)),
    ),
    "torch.cudnn_benchmark": (_benchmark, _set_benchmark),
    "cpu.affinity": (_affinity, _set_affinity),
}
NAMES = tuple(_SWITCHES)


def apply_in_rank(trial: Trial) -> None:
    """As the process group is there; what the script sets later holds, and is told."""
    for name, (get, change) in _SWITCHES.items():
        if name in trial.settings:
            was = get()
            try:
                change(trial.settings[name])
            except Exception as error:
                trial.refuse(name, f"{type(error).__name__}: {error}")
                continue
            trial.set_to(name, was, get())


def read_again(trial: Trial) -> None:
    """At the trial's end: whether the script has set them otherwise."""
    for name, (get, _) in _SWITCHES.items():
        change = trial.changes.get(name)
        if change is not None and change["state"] == "applied":
            trial.set_to(name, change["was"], get())
