"""What the kernel does to a process when its parent dies, see prctl(2): a launcher that is killed leaves nobody behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
"""From <linux/prctl.h>."""


def die_with_parent(number: int, libc: ctypes.CDLL | None = None) -> None:
    """Have this process get the signal ``number`` when its parent dies. ``libc``: for a process fresh from a fork, which had
    better load nothing."""
    if libc is None:
        import ctypes

        libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
