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


class OpenForward:
    """A forward in progress. Backward and optimizer may run inside it, as in Lightning's manual optimization: what comes
    before each backward is then the forward that belongs to it.
    """

    __slots__ = ("ddp", "elements", "interrupted", "since")

    def __init__(self, ddp: Any, since: int, elements: str) -> None:
        self.ddp = ddp
        self.elements = elements
        self.interrupted = False
        """Whether a backward ran in it."""
        self.since: Optional[int] = since
        """perf_counter_ns since which it computes; None while a backward runs or an optimizer steps."""


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
        self.open: List[OpenForward] = []
        """Forwards in progress on the training thread, outermost first."""

    def interrupt(self, current: "session.Session", at: int, loss: Any) -> None:
        """A backward of ``loss`` begins at ``at`` inside the innermost open forward."""
        forward, recorder = self.open[-1], current.recorder
        model = self.of(forward.ddp, recorder)
        since, forward.since, forward.interrupted = forward.since, None, True
        devices = current.devices if current.devices is not None and current.devices.timing else None
        if since is not None:
            if recording_here(recorder):
                recorder.add(since, at - since, f'"k":"fwd","m":{model.index}{forward.elements}')
            if devices is not None:
                devices.mark("fwd_end")
        if model.forward_end is None:
            # Whoever calls backward here has DDP prepare for it just before.
            self.forward_ended(model, at)
            model.reduces = getattr(forward.ddp, "require_backward_grad_sync", True)
        if devices is not None and model.reduces:
            devices.gradients_follow(loss)

    def pause(self, current: "session.Session") -> None:
        """An optimizer is about to step inside the innermost open forward: what came since the backward led to none."""
        forward = self.open[-1]
        if forward.interrupted and forward.since is not None:
            forward.since = None
            if current.devices is not None:
                current.devices.unmark("fwd")

    def resume(self, current: "session.Session", at: int) -> None:
        """The backward, or the optimizer's step, inside the innermost open forward is over: there may be one more backward."""
        forward = self.open[-1]
        if forward.since is None:
            forward.since = at
            if current.devices is not None and current.devices.timing:
                current.devices.mark("fwd")

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
_TimedForward = Tuple["session.Session", Any, int, str, Optional[OpenForward]]
"""The same, and its entry among those in progress; None on another thread than the training thread."""


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


def _before_timed_forward(args: Any, kwargs: Any) -> Optional[_TimedForward]:
    token = _before_forward(args, kwargs)
    if token is None:
        return None
    current, ddp, start, elements = token
    forward = None
    if current.recorder.thread == get_ident():
        forward = OpenForward(ddp, start, elements)
        current.models.open.append(forward)
    if current.devices is not None and current.devices.timing and _is_grad_enabled():
        current.devices.mark("fwd")
    return current, ddp, start, elements, forward


def _after_timed_forward(token: _TimedForward, result: Any) -> None:
    current, ddp, start, elements, forward = token
    end = perf_counter_ns()
    recorder = current.recorder
    recording = recording_here(recorder)
    if forward is not None:
        # A forward inside this one may have been left by an exception.
        opened = current.models.open
        del opened[opened.index(forward) if forward in opened else len(opened) :]
        if forward.interrupted and not getattr(ddp, "require_backward_grad_sync", True):
            # Its backward was inside; what comes behind that belongs to none.
            current.models.of(ddp, recorder).forward_end = None
            if forward.since is not None and current.devices is not None:
                current.devices.unmark("fwd")
            return
        if forward.since is not None:
            start = max(forward.since, recorder.start_perf_ns) if forward.interrupted else start
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
            around(original, _PART, _before_timed_forward, _after_timed_forward, active),
        )
    patches.attribute(
        DataParallel, "__init__", around(DataParallel.__init__, _PART, _before_data_parallel, _after_buffers)
    )
