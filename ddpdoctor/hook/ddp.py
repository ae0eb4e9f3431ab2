"""DistributedDataParallel: forwards, and what its reducer knows of each backward.

The reducer notes, for each parameter, when its gradient was ready, relative to the moment at which the
forward had ended. That
names the late rank: the duration of the backward does not, since all ranks wait in it for the last. The
reading is a copy of a list
of numbers, without a device synchronisation. (DDP's logger has the same as absolute times, but in every
iteration only at a
sampling rate that synchronises CUDA devices.) Communication hooks would see the buckets too, but change the
result's bits.
"""

from __future__ import annotations

import weakref
from operator import attrgetter, itemgetter
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Callable, List, Optional, Tuple

from . import session
from .constructors import line_of
from .guard import part
from .numbered import Numbered
from .patching import Patches, around
from .recorder import Recorder, recording_here
from .state import active

_PART = part("DistributedDataParallel")
_INDEX = attrgetter("index")


class Model:
    """One DDP instance."""

    def __init__(self, ddp: Any, index: int) -> None:
        self.ref = weakref.ref(ddp)
        self.index = index
        self.forward_end: Optional[int] = None
        """Since the last backward there was a forward with gradients, and it ended then (perf_counter_ns)."""
        self.reduces = True
        """Whether that forward prepared DDP to reduce the gradients of the next backward."""
        self.ready: Optional[List[int]] = None
        self.autocast: Optional[bool] = None
        """Whether its first forward with gradients ran under autocast."""
        self._stats: Optional[List[int]] = None
        self._buckets: Optional[List[Callable[[List[int]], Any]]] = None

    def after_backward(self) -> bool:
        """Whether the backward that just ended reduced this model's gradients; ``ready`` then holds each
        bucket's time, ns.
        """
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


def _buckets(ddp: Any) -> Optional[List[Callable[[List[int]], Any]]]:
    """For each bucket, what picks its parameters' numbers. None before DDP has rebuilt its buckets, after the
    first backward.
    """
    text = ddp.logger._get_ddp_logging_data().strs_map.get("rebuilt_per_bucket_param_indices", "")
    groups = [[int(number) for number in group.split()] for group in text.split(",") if group.strip()]
    if not groups:
        return None
    # A slice keeps the result a sequence where a bucket holds one parameter.
    return [
        itemgetter(*group) if len(group) > 1 else itemgetter(slice(group[0], group[0] + 1))
        for group in groups
    ]


_data_parallel: List[bool] = []


def _before_data_parallel(args: Any, kwargs: Any) -> None:
    _data_parallel.append(True)


class Models:
    """The DDP instances of this process, in the order of their first forward."""

    def __init__(self) -> None:
        self.known: Numbered[Model] = Numbered()
        self.first: Optional[Model] = None
        self._forwarded: List[Model] = []
        """Those whose forward has ended since the last backward."""

    @property
    def data_parallel(self) -> bool:
        """Whether the job has built the old, one-process ``DataParallel``."""
        return bool(_data_parallel)

    def of(self, ddp: Any, recorder: Recorder) -> Model:
        """The entry of this instance, made at its first forward."""
        known = self.known.find(ddp)
        if known is not None:
            return known
        where = line_of(ddp, recorder.lines)
        if where is None:
            where = recorder.lines.of_frame(session.calling_frame())
        model = Model(ddp, self.known.count)
        self.known.add(ddp, where, model)
        self.first = self.first or model
        return model

    def forward_ended(self, model: Model, at: int) -> None:
        """A forward with gradients has ended, at perf_counter_ns ``at``."""
        if model.forward_end is None:
            self._forwarded.append(model)
        model.forward_end = at

    def after_backward(self, origin: int, since: int) -> str:
        """The fields of a ``bwd`` event: of each model whose forward this backward went through, whether it was reduced
        and when; further models under ``also``. ``origin`` is the start of the step, perf_counter_ns; forwards that
        ended before ``since`` are those of a backward that was not seen.
        """
        texts = []
        forwarded, self._forwarded = self._forwarded, []
        for model in sorted(forwarded, key=_INDEX):
            base, model.forward_end = model.forward_end, None
            if base is not None and base >= since:
                if model.after_backward():
                    ready = str(model.ready).replace(" ", "")
                    texts.append(f'"m":{model.index},"sync":true,"ready":{ready},"base":{base - origin}')
                else:
                    texts.append(f'"m":{model.index},"sync":false')
        if len(texts) > 1:
            return f',{texts[0]},"also":[{",".join("{" + text + "}" for text in texts[1:])}]'
        return "," + texts[0] if texts else ""


_Forward = Tuple["session.Session", Any, int, str]
"""The recording, the DDP module, the start, and the field with the size of the inputs."""


def _before_forward(args: Any, kwargs: Any) -> Optional[_Forward]:
    current = session.current
    if current is None:
        return None
    if current.recorder.thread != get_ident():
        return None if current.thread_is_known else (current, args[0], perf_counter_ns(), "")
    size = input_elements((*args[1:], *kwargs.values()))
    return current, args[0], perf_counter_ns(), f',"e":{size}' if size else ""


def input_elements(values: Any, nested: int = 2) -> int:
    """Elements of all tensors among the arguments, and in the lists and dictionaries among them."""
    total = 0
    for value in values:
        if hasattr(value, "numel"):
            total += int(value.numel())
        elif nested and type(value) in (list, tuple):
            total += input_elements(value, nested - 1)
        elif nested and hasattr(value, "values") and hasattr(value, "keys") and callable(value.values):
            total += input_elements(value.values(), nested - 1)
    return total


def _before_timed_forward(args: Any, kwargs: Any) -> Optional[_Forward]:
    token = _before_forward(args, kwargs)
    if token is not None and token[0].devices is not None and token[0].devices.timing and _is_grad_enabled():
        token[0].devices.mark("fwd")
    return token


def _after_forward(token: _Forward, result: Any) -> None:
    current, ddp, start, elements = token
    end = perf_counter_ns()
    recorder = current.recorder
    recording = recording_here(recorder)
    if not _is_grad_enabled():
        if recording:
            recorder.add_evaluation(start, end - start)
        return
    model = current.models.of(ddp, recorder)
    if model.autocast is None:
        model.autocast = _autocast()
    if recording:
        recorder.add(start, end - start, f'"k":"fwd","m":{model.index}{elements}')
    model.reduces = getattr(ddp, "require_backward_grad_sync", True)
    if current.devices is not None and current.devices.timing:
        current.devices.mark("fwd_end")
        if model.reduces:
            current.devices.gradients_follow(result)
    current.models.forward_ended(model, end)


def _is_grad_enabled() -> bool:
    """torch's function of this name, from the installation on."""
    return True


def _autocast() -> bool:
    """Whether autocast is on for any device, asked without the warning that is_autocast_cpu_enabled gives since 2.4."""
    import torch

    try:
        on_cpu = torch.is_autocast_enabled("cpu")
    except TypeError:
        on_cpu = torch.is_autocast_cpu_enabled()
    return bool(on_cpu or torch.is_autocast_enabled())


def _after_buffers(token: _Forward, result: Any) -> None:
    """Rank 0's buffers are broadcast before a forward: the others wait in it for rank 0."""
    current, ddp, start, _ = token
    recorder = current.recorder
    model = current.models.of(ddp, recorder)
    if recording_here(recorder):
        recorder.add(start, perf_counter_ns() - start, f'"k":"bcast","m":{model.index}')


def install(patches: Patches) -> None:
    """Wrap the part of DDP's forward that ``torch.compile`` leaves alone, and the broadcast before it."""
    import torch
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    global _is_grad_enabled
    _is_grad_enabled = torch.is_grad_enabled
    buffers = getattr(DistributedDataParallel, "_sync_buffers", None)
    if buffers is not None:
        patches.attribute(
            DistributedDataParallel,
            "_sync_buffers",
            around(buffers, _PART, _before_forward, _after_buffers, active),
        )

    original = getattr(DistributedDataParallel, "_run_ddp_forward", None)
    if original is not None:
        patches.attribute(
            DistributedDataParallel,
            "_run_ddp_forward",
            around(original, _PART, _before_timed_forward, _after_forward, active),
        )
    patches.attribute(
        DataParallel, "__init__", around(DataParallel.__init__, _PART, _before_data_parallel, _after_forward)
    )
