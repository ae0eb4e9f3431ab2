"""What data loader workers record: whole lines that they append to one file, in the spool of the rank that started them.

Workers may be many, may be made again for each pass over the data, and may be killed at any moment. So each write is one
system call that adds whole lines, nothing is locked, no worker makes a file, and the file's size has a limit that
depends on how long the rank has been recorded. What comes beyond it is not written.
"""

from __future__ import annotations

import os
import time
from math import log2

from .draining import spools_in
from .layout import WORKERS_FILE, opened_spool, parse_spool_name
from .liveness import WRITER_FILE
from .owned import open_file
from .segments import LEAST_FREE_SHARE
from .spool import Spool

WORKERS_SEGMENT = f"{WORKERS_FILE}.{0:015d}"
"""The file in the spool: one piece, from the beginning on."""
_FIRST_BYTES = 64 * 1024
"""Allowed at the beginning of a recording, and once more each time that its age doubles."""
_YOUNG_S = 30.0
"""Age of a recording up to which its first doubling counts."""


def accept_workers(spool: Spool) -> None:
    """Let workers of this rank record. Raises OSError."""
    os.close(spool.open_text(WORKERS_SEGMENT))


def spool_of_process(root: str, pid: int) -> str | None:
    """The newest spool in ``root`` of the rank that is this process and lets its workers record; None where there is none. Never
    raises."""
    found = []
    for spool in spools_in(root):
        named = parse_spool_name(spool)
        if named is not None and named[1] == pid:
            try:
                found.append((os.stat(os.path.join(spool, WORKERS_SEGMENT)).st_ctime_ns, spool))
            except OSError:
                continue
    return max(found)[1] if found else None


def recorded_s(spool: str) -> float:
    """For how long the rank of a spool has been recorded, s. Raises OSError."""
    return max(0.0, time.time() - os.stat(os.path.join(spool, WRITER_FILE)).st_mtime)


def append_lines(spool: str, data: bytes) -> bool:
    """Append whole lines to the workers' file of a spool; False, and nothing of them, where its limit is reached or
    storage is short. Raises OSError where the spool is gone."""
    most = _FIRST_BYTES * (1 + log2(1 + recorded_s(spool) / _YOUNG_S))
    with opened_spool(spool) as spool_fd:
        handle = open_file(WORKERS_SEGMENT, spool_fd, os.O_WRONLY | os.O_APPEND)
        try:
            storage = os.fstatvfs(handle)
            if storage.f_bavail < storage.f_blocks * LEAST_FREE_SHARE:
                return False
            if os.fstat(handle).st_size + len(data) > most:
                return False
            return os.write(handle, data) == len(data)
        finally:
            os.close(handle)
