"""Changes the number of workers of loaders between blocks of steps, so that a search can try several settings without restarting
the job.

A training loop holds an iterator, whose workers cannot be changed. So its ``__next__`` calls that of a new iterator with the wanted
workers, which continues the same sampler after the batches already queued. No sample is given twice; the queued batches are lost.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary, ref

from ..guard import part
from ..patching import Patches
from .request import Trial

_PART = part("trial")
SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "timeout")
"""Settings of a loader that depend on the number of workers."""


class IteratorReplacer:
    """The current block of steps of a trial, and the iterators that replace those held by training loops."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._ends = list(accumulate(block["steps"] for block in trial.blocks))
        self._loaders: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._settings: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        """Original settings of each loader."""
        self._current: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._blocks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The block in which each loop's iterator was last checked."""
        self._off = False

    @property
    def block(self) -> int:
        """The current block, from the number of steps taken."""
        return min(bisect_right(self._ends, self._trial.document["steps"]), len(self._ends) - 1)

    def note_loop(self, loader: Any, iterator: Any) -> None:
        """Note that a loop begins to iterate over a loader. With ``persistent_workers``, the same iterator serves loop after loop."""
        if loader not in self._settings:
            self._settings[loader] = _settings_of(loader)
        self._loaders[iterator] = ref(loader)
        self._current.pop(iterator, None)
        self._blocks[iterator] = -1

    def current_iterator(self, iterator: Any) -> Any:
        """The iterator that currently replaces the one held by a loop."""
        if not self._off and iterator in self._loaders and self._blocks[iterator] != self.block:
            self._blocks[iterator] = self.block
            try:
                self._switch(iterator)
            except Exception as error:
                self._off = True
                self._set_state("refused", f"{type(error).__name__}: {error}")
        return self._current.get(iterator, iterator)

    def _wanted_settings(self) -> dict[str, Any]:
        return {
            name.partition(".")[2]: value for name, value in self._trial.blocks[self.block]["set"].items()
        }

    def _switch(self, iterator: Any) -> None:
        from torch.utils.data import IterableDataset

        loader = self._loaders[iterator]()
        if loader is None:
            return
        if isinstance(loader.dataset, IterableDataset):
            self._off = True
            self._set_state("refused", f"{type(loader.dataset).__name__} is iterable: it would begin again")
            return
        wanted = {**self._settings[loader], **self._wanted_settings()}
        if not wanted["num_workers"]:
            wanted.update(prefetch_factor=None, persistent_workers=False, timeout=0)
        elif wanted["prefetch_factor"] is None:
            wanted["prefetch_factor"] = 2
        old, before = self._current.get(iterator, iterator), _settings_of(loader)
        if before != wanted:
            try:
                _change(loader, wanted)
                self._current[iterator] = new = _resumed_iterator(loader, old)
            except BaseException:
                _change(loader, before)
                raise
            if hasattr(old, "_shutdown_workers"):
                old._shutdown_workers()
            if getattr(loader, "_iterator", None) is old:
                loader._iterator = None  # the next loop must start new workers
            if new._num_workers != wanted["num_workers"]:
                self._set_state("refused", f"it still has {new._num_workers} workers")
                return
        self._set_state("applied", "")

    def _set_state(self, state: str, why: str) -> None:
        block = self._trial.document["blocks"][self.block]
        if block["state"] != "refused":
            block.update(state=state, why=why)


def _settings_of(loader: Any) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in SETTINGS}


def _change(loader: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        object.__setattr__(loader, name, value)  # the loader's own __setattr__ refuses some


class _ResumedSampler:
    """A sampler that continues an unfinished pass."""

    def __init__(self, sampler: Any, live: Iterator[Any]) -> None:
        self._sampler, self._live = sampler, live

    def __iter__(self) -> Iterator[Any]:
        return self._live

    def __len__(self) -> int:
        return len(self._sampler)


def _resumed_iterator(loader: Any, old: Any) -> Any:
    """Return a new iterator of the loader that continues where ``old`` is."""
    from torch.utils.data import dataloader

    loaders: Any = dataloader.DataLoader
    original = vars(loaders)["_index_sampler"]
    sampler = _ResumedSampler(old._index_sampler, old._sampler_iter)
    loaders._index_sampler = property(lambda each: sampler if each is loader else original.fget(each))
    try:
        return loader._get_iterator()
    finally:
        loaders._index_sampler = original


def install(trial: Trial, patches: Patches) -> None:
    """Wrap loaders and their iterators, if the trial has blocks."""
    if not trial.blocks:
        return
    from torch.utils.data import dataloader

    replacer = IteratorReplacer(trial)
    iterator, loader = dataloader._BaseDataLoaderIter, dataloader.DataLoader
    begin, following = loader.__iter__, iterator.__next__

    @functools.wraps(begin)
    def begin_loop(self: Any) -> Any:
        found = begin(self)
        try:
            replacer.note_loop(self, found)
        except Exception as error:
            _PART.failed(error)
        return found

    @functools.wraps(following)
    def next_batch(self: Any) -> Any:
        return following(replacer.current_iterator(self))

    patches.attribute(loader, "__iter__", begin_loop)
    patches.attribute(iterator, "__next__", next_batch)
