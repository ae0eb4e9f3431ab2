"""Wraps the data loader: how long the training thread waited for each batch and for the start of the workers; and the workers'
loop, in their own processes."""

from __future__ import annotations

import multiprocessing
import os
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from ...rundir.spool import append_lines
from ...rundir.stepevents import EventField, EventKind, WorkerField
from ..environment import SPOOL
from ..guard import part
from ..job import batch_size, calling_frame
from ..patching import Patches, around
from ..profiling import WorkerRecorder
from ..recording import Session, active, recording_here

_PART = part("data loading")
_WORKERS_PART = part("data loader workers")
_DATA = EventKind.DATA.opening
_ITERATION = EventKind.ITERATION.opening + EventField.LOADER.next_key
_WHERE, _LOADER = EventField.WHERE.next_key, EventField.LOADER.next_key
_COUNT, _READY = EventField.COUNT.next_key, EventField.BATCHES_READY.next_key
_ASLEEP = EventField.ASLEEP_NS.next_key
_EXHAUSTED = f"{EventField.EXHAUSTED.next_key}true"


def _before_iter(args: Any, kwargs: Any) -> tuple[Any, int, int | None] | None:
    current = active.session
    if current is None or not recording_here(current.recorder):
        return (args[0], 0, None) if current is not None else None
    return args[0], perf_counter_ns(), current.recorder.lines.of_frame(calling_frame())


def _after_iter(token: tuple[Any, int, int | None], result: Any) -> None:
    end = perf_counter_ns()
    loader, start, where = token
    current = active.session
    if current is None or isinstance(result, BaseException):
        return
    number = current.loaders.number(loader, where, current.recorder.lines)
    if current.loaders.register_iterator(result, number):
        _note_workers(current, result, number)
    if start:
        fields = "" if where is None else f"{_WHERE}{where}"
        current.recorder.add(start, end - start, f"{_ITERATION}{number}{fields}")


def _before_next(args: Any, kwargs: Any) -> tuple[Any, int, str, int] | None:
    recorder, iterator = active.recorder, args[0]
    if recorder is None or recorder.thread != get_ident():
        return None
    # This process's clocks do not include what workers do.
    awake = recorder.awake_ns() if getattr(iterator, "_num_workers", -1) == 0 else -1
    return iterator, perf_counter_ns(), recorder.lines.caller() + _batches_ready_field(iterator), awake


def _after_next(token: tuple[Any, int, str, int], result: Any) -> None:
    end = perf_counter_ns()
    iterator, start, fields, awake = token
    current = active.session
    if current is None:
        return
    if awake >= 0:
        awake_since = current.recorder.awake_ns() - awake
        if awake_since >= 0:
            fields += f"{_ASLEEP}{max(0, end - start - awake_since)}"
    number = current.loaders.number_of_iterator(iterator)
    if number >= 0:
        fields += f"{_LOADER}{number}"
    if isinstance(result, StopIteration):
        fields += _EXHAUSTED
    else:
        size = batch_size(result)
        if size is not None:
            fields += f"{_COUNT}{size}"
    current.recorder.add(start, end - start, _DATA + fields)


def _batches_ready_field(iterator: Any) -> str:
    """The field with the number of batches that the workers have ready."""
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return ""
    try:
        out_of_order = sum(1 for info in iterator._task_info.values() if len(info) > 1)
        return f"{_READY}{queue.qsize() + out_of_order}"
    except (AttributeError, NotImplementedError, OSError, TypeError):
        return ""


def _note_workers(current: Session, iterator: Any, number: int) -> None:
    """Write the process ids of this loader's workers."""
    pids = [worker.pid for worker in getattr(iterator, "_workers", ())]
    if pids:
        line = f"{{{WorkerField.LOADER.key}{number}{WorkerField.PROCESSES.next_key}{pids}}}\n"
        try:
            append_lines(current.spool.directory, line.encode())
        except OSError:
            pass  # workers cannot write there either


def _before_loop(args: Any, kwargs: Any) -> WorkerRecorder | None:
    """Start recording in a worker process."""
    from torch.utils.data._utils import fetch

    root = os.environ.get(SPOOL)
    if not root or multiprocessing.parent_process() is None:
        return None
    fetchers: list[Any] = [fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher]
    worker = WorkerRecorder(root, [each.fetch.__code__ for each in fetchers])
    for each in fetchers:
        each.fetch = around(each.fetch, _WORKERS_PART, worker.before, worker.after)
    return worker


def _after_loop(worker: WorkerRecorder, result: Any) -> None:
    worker.finish()


def install(patches: Patches) -> None:
    """Wrap ``DataLoader.__iter__`` and its iterators' ``__next__``, which subclasses inherit, and the loop of their workers."""
    from torch.utils.data import dataloader
    from torch.utils.data._utils import worker

    iterator, loader = dataloader._BaseDataLoaderIter, dataloader.DataLoader
    patches.attribute(
        iterator, "__next__", around(iterator.__next__, _PART, _before_next, _after_next, active)
    )
    patches.attribute(loader, "__iter__", around(loader.__iter__, _PART, _before_iter, _after_iter))
    # Spawned workers find it by its name, so it must be wrapped in both this process and the worker, or in neither. Both
    # wrap it.
    loop = around(worker._worker_loop, _WORKERS_PART, _before_loop, _after_loop)
    patches.attribute(worker, "_worker_loop", loop)
