"""What a rank does that stands: by the functions it is in, and by what the kernel says of its thread."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ddpdoctor.measure.places import CodeLine
from ddpdoctor.rundir.phases import Phase


class Activity(msgspec.Struct, frozen=True):
    """What it does: a word for rules, and words for readers that go on ``rank 3 ...``."""

    name: str
    says: str


_BY_PHASE = {
    Phase.DATA: Activity("loader", "waits for its DataLoader"),
    Phase.EVALUATION: Activity("evaluation", "evaluates"),
    Phase.SAVE: Activity("checkpoint", "writes a checkpoint"),
    Phase.LOAD: Activity("checkpoint", "reads a checkpoint"),
    Phase.BARRIER: Activity("barrier", "is in a barrier"),
    Phase.RENDEZVOUS: Activity("rendezvous", "waits for a process group to be created"),
    Phase.COMPILE: Activity("compile", "compiles with torch.compile"),
    Phase.DEBUGGER: Activity("debugger", "is in a debugger"),
}
_LOCK = Activity("lock", "waits for a lock or for another thread")
_SLEEP = Activity("sleep", "sleeps")
_STORAGE = Activity("storage", "waits for storage")
_NETWORK = Activity("network", "waits for the network")
_PIPE = Activity("process", "waits for another process")
_LOOP = Activity("loop", "keeps computing in Python")
_NATIVE = Activity("native", "is in native code that holds Python's lock (the GIL)")
_STOPPED = Activity("stopped", "is stopped by a signal (SIGSTOP)")
_TRACED = Activity("debugger", "is stopped by a debugger")

_WAITS_IN = (
    (re.compile(r"nanosleep"), _SLEEP),
    (
        re.compile(
            r"nfs|rpc_wait|fuse|cifs|smb|lustre|gpfs|ceph|io_schedule|folio_wait|wait_on_page|ext4|xfs_|btrfs|jbd2|blk_"
        ),
        _STORAGE,
    ),
    (re.compile(r"^(?:pipe_|anon_pipe|wait_for_partner|fifo_open|do_wait|kernel_wait|wait4)"), _PIPE),
    (re.compile(r"sk_wait|tcp_|inet_|unix_stream|wait_woken|skb_"), _NETWORK),
)
"""Functions of the kernel in which a thread waits, as ``/proc/<pid>/wchan`` names them."""
_FILES = (
    (
        re.compile(
            r"[/\\](?:socket|ssl|http[/\\]client|selectors|asyncio[/\\]\w+)\.py$|urllib3?|requests|botocore|aiohttp|grpc"
        ),
        _NETWORK,
    ),
    (re.compile(r"[/\\](?:threading|queue|concurrent[/\\]futures[/\\]\w+)\.py$"), _LOCK),
    (re.compile(r"[/\\](?:subprocess|multiprocessing[/\\]\w+)\.py$"), _PIPE),
)
"""Files of the innermost function."""
_FUTEX = re.compile(r"futex")
_READS = re.compile(r"^(?:0|1|2|17|18|19|20|74|75|257|267) ")
"""System calls on files: read, write, open, pread, pwrite, readv, writev, fsync, fdatasync, openat, readlinkat (x86-64)."""


def activity_of(
    phase: Any,
    stack: Sequence[CodeLine],
    process: Mapping[str, Any],
    *,
    keeps_lock: bool,
) -> Activity | None:
    """What the rank does; None where nothing shows it.

    ``process`` is the kernel's view of its training thread, ``keeps_lock`` whether faulthandler found that no other thread of
    the rank could run.
    """
    state, waits_in = str(process.get("state") or ""), str(process.get("wchan") or "")
    if state.startswith(("T", "t")):
        return _TRACED if process.get("tracer") else _STOPPED
    known = Phase(phase) if phase in set(Phase) else None
    if known in _BY_PHASE and known is not Phase.EVALUATION:
        return _BY_PHASE[known]
    if state.startswith("D"):
        return _STORAGE
    if keeps_lock:
        return _NATIVE
    waiting = _waiting(stack, waits_in, str(process.get("syscall") or ""))
    if waiting is not None:
        return waiting
    if known is Phase.EVALUATION:
        return _BY_PHASE[known]
    return _LOOP if state.startswith("R") and known in (None, Phase.OTHER) else None


def _waiting(stack: Sequence[CodeLine], waits_in: str, syscall: str) -> Activity | None:
    innermost = stack[0] if stack else None
    if innermost is not None:
        named = next((does for files, does in _FILES if files.search(innermost.file)), None)
        if named is not None:
            return named
    found = next((does for names, does in _WAITS_IN if names.search(waits_in)), None)
    if found is not None:
        return found
    if _READS.match(syscall) and not _FUTEX.search(waits_in):
        return _STORAGE
    return _LOCK if _FUTEX.search(waits_in) else None
