"""A rank before its process group exists: it has a status file and a faulthandler signal.

The hook runs no thread and no timer meanwhile. The launcher's hang monitor sends the signal (see ``faults``) if other
ranks have waited for long, but never to a rank that has begun to join.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from threading import get_ident

from ...rundir.host_files import append_unjoined, create_unjoined_file, remove_unjoined_file
from .. import environment
from ..guard import part
from ..patching import guarded
from ..profiling import can_be_read, stack_of
from .faults import listen, reserve_signal, stop_listening
from .rank_status import exception_documents, frames_of, uncaught

_PART = part("watching for ranks that do not join")
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Variables that launchers of ranks set; a launcher in a pod of several may have the first two itself."""


_own_file: list[tuple[int, str]] = []
"""The descriptor and path of this process's file, while it has one."""


def _begin() -> None:
    if _own_file or multiprocessing.parent_process() is not None:
        return
    rank, world_size, local_rank = (os.environ.get(name, "") for name in _OF_A_RANK)
    root = os.environ.get(environment.SPOOL)
    if not root or not (rank.isdecimal() and world_size.isdecimal() and local_rank.isdecimal()):
        return
    if int(world_size) < 2 or not environment.hang_after_s(os.environ):
        return
    handle, path = create_unjoined_file(root, int(rank))
    _own_file.append((handle, path))
    reserve_signal()
    append_unjoined(
        handle,
        rank=int(rank),
        world_size=int(world_size),
        handle=handle,
        signal=listen(handle),
        at_ns=time.time_ns(),
    )


def _note_join_started() -> None:
    for handle, _ in _own_file:
        append_unjoined(handle, joining_ns=time.time_ns())
        if can_be_read():
            # It is not sent the signal from now on.
            append_unjoined(handle, frames=frames_of(stack_of(get_ident())))


def _write_end() -> None:
    error = uncaught()
    if _own_file and error is not None:
        append_unjoined(_own_file[0][0], ended_ns=time.time_ns(), raised=exception_documents(error))


def _end() -> None:
    for _, path in _own_file:
        remove_unjoined_file(path)
    _forget()


def _forget() -> None:
    while _own_file:
        handle, _ = _own_file.pop()
        stop_listening()
        os.close(handle)


begin_unjoined = guarded(_PART, _begin)
"""Create the file: this process may become a rank."""
note_join_started = guarded(_PART, _note_join_started)
"""Note that the process has called init_process_group."""
write_unjoined_end = guarded(_PART, _write_end)
"""Write the exception that ends the process before it has joined."""
end_unjoined = guarded(_PART, _end)
"""Remove the file: the process has joined."""
forget_unjoined = guarded(_PART, _forget)
"""Forget the file in a forked child, which is another process."""
