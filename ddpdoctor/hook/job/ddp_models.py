"""The job's DDP modules and data loaders, by number, and when each DDP bucket's gradients were ready in a backward.

DDP's reducer records for each parameter when its gradient was ready, relative to the end of the forward. These times identify the
late rank; the duration of the backward does not, because all ranks wait in it for the last one. Reading them copies a list of
numbers, without device synchronization. (DDP's logger has the same as absolute times, but in every iteration only at a sampling
rate that synchronizes CUDA devices.) Communication hooks also see the buckets, but they change the result's bits.
"""

from __future__ import annotations

import weakref
from operator import attrgetter, itemgetter
from typing import Any, Callable

from ...rundir.stepevents import EventField
from .registry import MOST_LISTED, NumberedWeakMap, line_of
from .source_lines import Lines, calling_frame
from .torch_objects import describe_loader, group_name

_INDEX = attrgetter("index")
_MODULE, _READY = EventField.MODULE.key, EventField.READY_NS.next_key
_FORWARD_END, _ALSO = EventField.FORWARD_END_NS.next_key, EventField.ALSO.next_key
_REDUCED = f"{EventField.SYNCED.next_key}true"
_NOT_REDUCED = f"{EventField.SYNCED.next_key}false"

_MOST_MODELS_CHECKED = 8
"""Upper limit of the models that are asked whether DDP reduces their gradients, in each backward."""
data_parallel_built: list[bool] = []
"""Not empty if the job has constructed the single-process ``DataParallel``."""


class Model:
    """One DDP instance."""

    def __init__(self, ddp: Any, index: int) -> None:
        self.ref = weakref.ref(ddp)
        self.index = index
        self.forward_end: int | None = None
        """End of the last forward with gradients since the last backward, perf_counter_ns; None if there was none."""
        self.group = group_name(getattr(ddp, "process_group", None))
        self.reduces = True
        """Whether that forward prepared DDP to reduce the gradients of the next backward."""
        self.ready: list[int] | None = None
        self.autocast: bool | None = None
        """Whether its first forward with gradients ran under autocast."""
        self._stats: list[int] | None = None
        self._buckets: list[Callable[[list[int]], Any]] | None = None

    def after_backward(self) -> bool:
        """Whether the backward that just ended reduced this model's gradients. If so, ``ready`` holds each bucket's time, ns."""
        ddp = self.ref()
        if ddp is None or not self.reduces:
            return False
        stats = ddp.reducer.get_backward_stats()
        if stats == self._stats or not any(stats):
            return False
        if self._buckets is None and self._stats is not None:
            self._buckets = _buckets(ddp)
        self._stats = stats
        self.ready = [max(stats)] if self._buckets is None else [max(pick(stats)) for pick in self._buckets]
        return True


def _buckets(ddp: Any) -> list[Callable[[list[int]], Any]] | None:
    """For each bucket, a function that selects the entries of its parameters. None until DDP has rebuilt its buckets, after the
    first backward."""
    text = ddp.logger._get_ddp_logging_data().strs_map.get("rebuilt_per_bucket_param_indices", "")
    groups = [[int(number) for number in group.split()] for group in text.split(",") if group.strip()]
    if not groups:
        return None
    # For a bucket with one parameter, a slice makes the result a sequence, too.
    return [
        itemgetter(*group) if len(group) > 1 else itemgetter(slice(group[0], group[0] + 1))
        for group in groups
    ]


class OpenForward:
    """A forward in progress. Backwards and optimizer steps may run inside it, as in Lightning's manual optimization. The time
    before each backward is then recorded as the forward of that backward."""

    __slots__ = ("ddp", "elements", "interrupted", "since")

    def __init__(self, ddp: Any, since: int, elements: str) -> None:
        self.ddp = ddp
        self.elements = elements
        """The event field with the size of the inputs."""
        self.interrupted = False
        """Whether a backward ran inside it."""
        self.since: int | None = since
        """perf_counter_ns since which it computes; None during a backward or an optimizer step."""


class Models:
    """The DDP instances of this process, in the order of their first forward."""

    def __init__(self) -> None:
        self.known: NumberedWeakMap[Model] = NumberedWeakMap()
        self.first: Model | None = None
        self._forwarded: list[Model] = []
        """Models whose forward has ended since the last backward."""
        self.open: list[OpenForward] = []
        """Forwards in progress on the training thread, outermost first."""

    def find(self, ddp: Any, lines: Lines) -> Model:
        """Return the entry of this instance; create it at the first forward."""
        known = self.known.find(ddp)
        if known is not None:
            return known
        line = line_of(ddp, lines)
        if line is None:
            line = lines.of_frame(calling_frame())
        model = Model(ddp, self.known.count)
        self.known.add(ddp, line, model)
        self.first = self.first or model
        return model

    def first_reducing(self) -> Model | None:
        """The first model whose gradients DDP reduces in a backward that begins now; None if there is none, as in ``no_sync()``."""
        for reference, _ in self.known.listed[:_MOST_MODELS_CHECKED]:
            ddp = reference()
            if ddp is not None and getattr(ddp, "require_backward_grad_sync", True):
                return self.known.find(ddp)
        return None

    def note_forward_end(self, model: Model, at: int) -> None:
        """Note that a forward with gradients ended at ``at``, perf_counter_ns."""
        if model.forward_end is None:
            self._forwarded.append(model)
        model.forward_end = at

    def after_backward(self, origin: int, since: int) -> str:
        """The fields of a backward's event: for each model whose forward preceded it, whether its gradients were reduced and when.

        ``origin`` is the start of the step, perf_counter_ns. Forwards that ended before ``since`` are ignored: their backward was
        not recorded.
        """
        texts = []
        forwarded, self._forwarded = self._forwarded, []
        for model in sorted(forwarded, key=_INDEX):
            base, model.forward_end = model.forward_end, None
            if base is not None and base >= since:
                if model.after_backward():
                    ready = str(model.ready).replace(" ", "")
                    texts.append(
                        f"{_MODULE}{model.index}{_REDUCED}{_READY}{ready}{_FORWARD_END}{base - origin}"
                    )
                else:
                    texts.append(f"{_MODULE}{model.index}{_NOT_REDUCED}")
        if len(texts) > 1:
            return f",{texts[0]}{_ALSO}[{','.join('{' + text + '}' for text in texts[1:])}]"
        return "," + texts[0] if texts else ""


class Loaders:
    """The DataLoaders of this process, numbered in the order in which they are first iterated."""

    def __init__(self) -> None:
        self.known: NumberedWeakMap[int] = NumberedWeakMap()
        """Loaders with their numbers. The source line is the one that constructed the loader or, if unknown, first iterated over
        it."""
        self._iterators: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._last: tuple[Callable[[], Any], int] = (lambda: None, -1)
        """The iterator that was looked up last (weakly), and its loader's number."""
        self.described: list[dict[str, Any]] = []
        """Descriptions of the first loaders for rank.json, by number. Made at the first iteration, because the job may keep only
        the iterator."""

    def number(self, loader: Any, where: int | None, lines: Lines) -> int:
        """Return the loader's number; assign one if it is new."""
        number = self.known.find(loader)
        if number is None:
            number = self.known.count
            built = line_of(loader, lines)
            line = where if built is None else built
            self.known.add(loader, line, number)
            if number < MOST_LISTED:
                self.described.append({"id": number, "where": line, **_description(loader)})
        return number

    def register_iterator(self, iterator: Any, number: int) -> bool:
        """Note that ``iterator`` belongs to loader ``number``. Returns whether it is new; with persistent workers, one iterator
        serves all epochs."""
        is_new = iterator not in self._iterators
        self._iterators[iterator] = number
        return is_new

    def number_of_iterator(self, iterator: Any) -> int:
        """The number of an iterator's loader; -1 if unknown."""
        if self._last[0]() is not iterator:
            self._last = weakref.ref(iterator), self._iterators.get(iterator, -1)
        return self._last[1]


def _description(loader: Any) -> dict[str, Any]:
    try:
        return describe_loader(loader)
    except Exception:
        return {}  # described when the settings are written, if the loader is still there
