"""A rank on its way to its process group: it says that it is there, and faulthandler answers for it where it stands.

Nothing of ours runs meanwhile: there is no thread, and no timer. faulthandler takes one real-time signal, which the launcher's
side sends where other ranks have waited for long, but never to a rank that has asked to join; it is given back when the rank has
joined. A signal for which the job has a handler, or which it blocks, is not taken.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from threading import get_ident

from ...rundir.door import close_door, open_door, say_at_door
from .. import environment
from ..guard import part
from ..patching import guarded
from ..profiling import can_be_read, stack_of
from .rank_status import described, frames_of, uncaught

_PART = part("watching for ranks that do not join")
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What launchers of ranks set; one that runs in a pod of several may have the first two itself."""
_BELOW_LAST = 9
"""Of real-time signals the first ones are the C library's, and programs that use any count from either end."""


class _Door:
    """Of this process."""

    __slots__ = ("handle", "number", "path")

    def __init__(self) -> None:
        self.handle, self.path, self.number = -1, "", 0


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
    number = getattr(signal, "SIGRTMAX", 0) - _BELOW_LAST
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    if number > 0 and signal.getsignal(number) is signal.SIG_DFL and number not in blocked:
        faulthandler.register(number, file=_door.handle, all_threads=True, chain=False)
        _door.number = int(number)
    say_at_door(
        _door.handle,
        rank=int(rank),
        world_size=int(world_size),
        handle=_door.handle,
        signal=_door.number,
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
    # To unregister puts back what was before, also where the job has set a handler of its own since.
    if _door.number and signal.getsignal(_door.number) is signal.SIG_DFL:
        faulthandler.unregister(_door.number)
    if _door.handle >= 0:
        os.close(_door.handle)
    _door.handle, _door.path, _door.number = -1, "", 0


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
