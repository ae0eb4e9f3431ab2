"""The data loader: how long the training thread waited for each batch, and for the start of the workers."""

from __future__ import annotations

import weakref
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import session
from .constructors import line_of
from .guard import part
from .numbered import MOST_LISTED, Numbered
from .patching import Patches, around
from .recorder import recording_here
from .settings_torch import describe_loader
from .state import active
from .where import Lines

_PART = part("data loading")
_DEEPEST_BATCH = 4


class Loaders:
    """The DataLoaders of this process, numbered in the order in which they are first iterated."""

    def __init__(self) -> None:
        self.known: Numbered[int] = Numbered()
        """Each with its number; the source line is the one that built it, or else first iterated it."""
        self._iterators: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
        self._last: Tuple[Callable[[], Any], int] = (lambda: None, -1)
        """The iterator asked for last (weakly), and its loader's number."""
        self.described: List[Dict[str, Any]] = []
        """By number, the first ones, for rank.json: made at the first iteration, for the job may keep the iterator only."""

    def number(self, loader: Any, where: Optional[int], lines: Lines) -> int:
        """The loader's number."""
        number = self.known.find(loader)
        if number is None:
            number = self.known.count
            built = line_of(loader, lines)
            line = where if built is None else built
            self.known.add(loader, line, number)
            if number < MOST_LISTED:
                self.described.append({"id": number, "where": line, **_description(loader)})
        return number

    def iterated(self, iterator: Any, number: int) -> None:
        """This iterator belongs to that loader."""
        self._iterators[iterator] = number

    def of_iterator(self, iterator: Any) -> int:
        """The number of an iterator's loader, -1 where unknown."""
        if self._last[0]() is not iterator:
            self._last = weakref.ref(iterator), self._iterators.get(iterator, -1)
        return self._last[1]


def _description(loader: Any) -> Dict[str, Any]:
    try:
        return describe_loader(loader)
    except Exception:
        return {}  # told when the settings are written, if the loader is still there


def _before_iter(args: Any, kwargs: Any) -> Optional[Tuple[Any, int, Optional[int]]]:
    current = session.current
    if current is None or not recording_here(current.recorder):
        return (args[0], 0, None) if current is not None else None
    return args[0], perf_counter_ns(), current.recorder.lines.of_frame(session.calling_frame())


def _after_iter(token: Tuple[Any, int, Optional[int]], result: Any) -> None:
    end = perf_counter_ns()
    loader, start, where = token
    current = session.current
    if current is None or isinstance(result, BaseException):
        return
    number = current.loaders.number(loader, where, current.recorder.lines)
    current.loaders.iterated(result, number)
    if start:
        fields = "" if where is None else f',"w":{where}'
        current.recorder.add(start, end - start, f'"k":"iter","l":{number}{fields}')


def _before_next(args: Any, kwargs: Any) -> Optional[Tuple[Any, int, str]]:
    recorder = active.recorder
    if recorder is None or recorder.thread != get_ident():
        return None
    return args[0], perf_counter_ns(), recorder.lines.caller() + _waiting(args[0])


def _after_next(token: Tuple[Any, int, str], result: Any) -> None:
    end = perf_counter_ns()
    iterator, start, fields = token
    current = session.current
    if current is None:
        return
    number = current.loaders.of_iterator(iterator)
    if number >= 0:
        fields += f',"l":{number}'
    if isinstance(result, StopIteration):
        fields += ',"end":true'
    else:
        size = batch_size(result)
        if size is not None:
            fields += f',"n":{size}'
    current.recorder.add(start, end - start, '"k":"data"' + fields)


def _waiting(iterator: Any) -> str:
    """How many batches the workers have ready, as the training thread asks for one."""
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return ""
    try:
        early = sum(1 for info in iterator._task_info.values() if len(info) > 1)
        return f',"q":{queue.qsize() + early}'
    except (AttributeError, NotImplementedError, OSError, TypeError):
        return ""


def batch_size(batch: Any) -> Optional[int]:
    """The first dimension of the first tensor in a batch; of a plain list of things, its length. None where
    there is neither.
    """
    for _ in range(_DEEPEST_BATCH):
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else None
        if hasattr(batch, "values") and hasattr(batch, "keys"):
            values = batch.values() if callable(batch.values) else ()
            batch = next(iter(values), None)
        elif isinstance(batch, (list, tuple)) and batch:
            if isinstance(batch[0], (int, float, str, bytes)):
                return len(batch)
            batch = batch[0]
        else:
            return None
    return None


def install(patches: Patches) -> None:
    """Wrap ``DataLoader.__iter__`` and its iterators' ``__next__``, which subclasses inherit."""
    from torch.utils.data import dataloader

    iterator, loader = dataloader._BaseDataLoaderIter, dataloader.DataLoader
    patches.attribute(
        iterator, "__next__", around(iterator.__next__, _PART, _before_next, _after_next, active)
    )
    patches.attribute(loader, "__iter__", around(loader.__iter__, _PART, _before_iter, _after_iter))
