"""Makes the kernel send a signal to a process when its parent dies, see prctl(2), so that a killed launcher leaves no processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
"""From <linux/prctl.h>."""


def die_with_parent(number: int, libc: ctypes.CDLL | None = None) -> None:
    """Make the kernel send this process the signal ``number`` when its parent dies. ``libc``: an already loaded libc, for use directly
    after fork, when no library should be loaded."""
    if libc is None:
        import ctypes

        libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
