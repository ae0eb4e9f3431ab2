"""``init_process_group``, where a recording begins, and ``destroy_process_group``, before which everything must be
on disk.

Gloo sometimes aborts the process in ``destroy_process_group``, and then no exit handler runs.
"""

from __future__ import annotations

import time
from threading import get_ident
from typing import Any

from .. import lifetime
from ..guard import part
from ..patching import Patches, around, cell_of
from ..recording import active
from ..stalls import note_join_started

_PART = part("arming")


def _before_init(args: Any, kwargs: Any) -> int:
    note_join_started()
    recorder = active.recorder
    if recorder is not None:
        recorder.heartbeat.reopen()  # a process that trains several times, with a process group for each
    return time.time_ns()


def _after_init(joining_ns: int, result: Any) -> None:
    import torch.distributed as dist

    if isinstance(result, BaseException) or not dist.is_initialized():
        return
    lifetime.arm(dist.get_rank(), dist.get_world_size(), joining_ns)


def _before_destroy(args: Any, kwargs: Any) -> bool | None:
    recorder = active.recorder
    if recorder is not None:
        recorder.calls.known.clear()  # by the id of their process group, which the next one may get
    group = args[0] if args else kwargs.get("group")
    import torch.distributed as dist

    if group is None or group is dist.group.WORLD:
        lifetime.flush()
        if recorder is not None and recorder.thread == get_ident():
            recorder.record_as_at_first()
    return None


def install(patches: Patches) -> None:
    """Wrap both."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    cell = cell_of(c10d.init_process_group)
    if cell is not None:
        patches.cell(cell, around(cell.cell_contents, _PART, _before_init, _after_init))
    else:
        wrapped = around(c10d.init_process_group, _PART, _before_init, _after_init)
        for module in (dist, c10d):
            patches.attribute(module, "init_process_group", wrapped)
    wrapped = around(c10d.destroy_process_group, _PART, _before_destroy)
    for module in (dist, c10d):
        patches.attribute(module, "destroy_process_group", wrapped)
    lifetime.watch_process()
