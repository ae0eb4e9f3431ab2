"""Which rank's folder, in which run directory, a spool is for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from .layout import parse_rank_directory
from .owned import NotOursError, private_folder, read_file

TARGET_FILE = "target"
_RANKS = "ranks"
_LONGEST = 1 << 14


@contextmanager
def opened_spool(spool: str) -> Iterator[int]:
    """A descriptor of a spool, which is in a root of this user's own. Raises OSError, NotOursError."""
    root, name = os.path.split(spool)
    with private_folder(root) as within, private_folder(name, within) as here:
        yield here


def target_of(spool: str) -> str:
    """The rank's folder in the run directory that a spool was made for; ``RUN/ranks`` where it has none yet. Raises
    OSError."""
    with opened_spool(spool) as here:
        return read_target(here)


def read_target(spool: int) -> str:
    """The same of an open spool. Raises OSError, NotOursError."""
    target = os.fsdecode(read_file(TARGET_FILE, spool)[:_LONGEST])
    ranks = target if is_unclaimed(target) else os.path.dirname(target)
    named = is_unclaimed(target) or parse_rank_directory(os.path.basename(target)) is not None
    if not (os.path.isabs(target) and os.path.basename(ranks) == _RANKS and named):
        raise NotOursError(errno.EINVAL, "it names no rank's folder in a run directory", TARGET_FILE)
    return target


def is_unclaimed(target: str) -> bool:
    """Whether a rank has no folder in the run directory yet."""
    return os.path.basename(target) == _RANKS


def unclaimed_target(run: str) -> str:
    """The target of a spool whose rank has no folder yet."""
    return os.path.join(os.path.abspath(run), _RANKS)


def run_of(target: str) -> str:
    """The run directory in which a spool's target lies."""
    return os.path.dirname(target if is_unclaimed(target) else os.path.dirname(target))
