"""A rank on its way to its process group: it says that it is there, and faulthandler answers for it where it stands.

Nothing of ours runs meanwhile: there is no thread. faulthandler is asked by a signal (see ``faults``), which the launcher's side sends
where other ranks have waited for long, but never to a rank that has asked to join.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from threading import get_ident

from ...rundir.door import close_door, open_door, say_at_door
from .. import environment
from ..guard import part
from ..patching import guarded
from ..profiling import can_be_read, stack_of
from .faults import listen, reserve_signal, stop_listening
from .rank_status import described, frames_of, uncaught

_PART = part("watching for ranks that do not join")
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What launchers of ranks set; one that runs in a pod of several may have the first two itself."""


class _Door:
    """Of this process."""

    __slots__ = ("handle", "path")

    def __init__(self) -> None:
        self.handle, self.path = -1, ""


_door = _Door()


def _stand() -> None:
    if _door.handle >= 0 or multiprocessing.parent_process() is not None:
        return
    rank, world_size, local_rank = (os.environ.get(name, "") for name in _OF_A_RANK)
    root = os.environ.get(environment.SPOOL)
    if not root or not (rank.isdecimal() and world_size.isdecimal() and local_rank.isdecimal()):
        return
    if int(world_size) < 2 or not environment.hang_after_s(os.environ):
        return
    _door.handle, _door.path = open_door(root, int(rank))
    reserve_signal()
    say_at_door(
        _door.handle,
        rank=int(rank),
        world_size=int(world_size),
        handle=_door.handle,
        signal=listen(_door.handle),
        at_ns=time.time_ns(),
    )


def _joining() -> None:
    if _door.handle < 0:
        return
    say_at_door(_door.handle, joining_ns=time.time_ns())
    if can_be_read():
        # Nobody sends it the signal from now on.
        say_at_door(_door.handle, frames=frames_of(stack_of(get_ident())))


def _tell_end() -> None:
    error = uncaught()
    if _door.handle >= 0 and error is not None:
        say_at_door(_door.handle, ended_ns=time.time_ns(), raised=described(error))


def _leave() -> None:
    if _door.handle >= 0:
        close_door(_door.path)
        _forget()


def _forget() -> None:
    if _door.handle >= 0:
        stop_listening()
        os.close(_door.handle)
    _door.handle, _door.path = -1, ""


stand_at_door = guarded(_PART, _stand)
"""This process may become a rank."""
joining = guarded(_PART, _joining)
"""It has asked to."""
tell_end_at_door = guarded(_PART, _tell_end)
"""It ends without."""
leave_door = guarded(_PART, _leave)
"""It has become one."""
forget_door = guarded(_PART, _forget)
"""In a forked child, which is another process."""
