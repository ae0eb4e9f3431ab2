"""Measures when a step's work ran on its GPU, by CUDA events that are recorded with the work and read steps later.

On a GPU the host's times only show when work was issued. An event costs its stream next to nothing and the host some microseconds.
``query``, which checks whether it has completed, never waits; times are read only of completed events. Events are pooled. Nothing
is recorded before the job itself uses CUDA, nor while the stream captures a CUDA graph, which would include the event.

Another event marks when the rank's own gradients are complete, before it waits for the other ranks. Autograd's engine runs the
callbacks that are queued during a backward in order, at its end, on the compute stream, and DDP queues its wait for the collectives
last.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ...rundir.stepevents import LineField
from ..guard import part
from ..job import job_torch
from ..patching import guarded
from .active import active

if TYPE_CHECKING:
    from .recorder import Recorder

_PART = part("CUDA events")
MOST_WAITING = 32
"""Upper limit of the steps whose events have not completed. Beyond it a step is not timed. A host is rarely this far ahead."""
MOST_MARKS = 256
"""Upper limit of the events of one step. Beyond it, as with 100 micro-batches, the step is not timed."""
START, END = "start", "end"
_Marks = list[tuple[str, Any]]


def devices_of(recorder: Recorder) -> Devices | None:
    """Return a recorder of CUDA event times; None if the job's torch has neither CUDA nor ROCm. Does not check whether there is a
    GPU: that would initialize CUDA, which a process that forks workers must not do."""
    version = job_torch().version
    return Devices(recorder) if version.cuda or getattr(version, "hip", None) else None


class Devices:
    """The CUDA events of one recording. Called on the training thread, and on autograd's while the training thread waits for it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._cuda: Any = job_torch().cuda
        self._device: int | None = None
        """The first current device. Times between events of two devices cannot be measured."""
        self._pool: list[Any] = []
        self._marks: _Marks = []
        """Events of the current step; empty if it is not timed."""
        self._waiting: deque[tuple[int, _Marks]] = deque()
        self._done = -1
        """The last step whose events have completed."""
        self._anchor: Any | None = None
        """The start event of the last step that was read. ``_anchor_ns`` is its device time since the first one."""
        self._anchor_ns = 0
        self.at_step = guarded(_PART, self._at_step)
        """Call with the number of the step that has just begun."""
        self.mark = guarded(_PART, self._mark)
        """Call with a name when something begins or ends on the current stream."""
        self.unmark = guarded(_PART, self._unmark)
        """Call with a name to discard its last begin."""
        self.hook_gradient_end = guarded(_PART, self._hook_gradient_end)
        """Call with the output of a forward whose backward reduces gradients. Records when the backward's own work is done."""
        self.finish = guarded(_PART, self._finish)
        """Call at the end of the recording."""
        self._read_completed = guarded(_PART, self._read_unless_capturing)
        self._at_backward = guarded(_PART, self._backward_begun)
        self._at_gradients = guarded(_PART, self._gradients_done)

    @property
    def timing(self) -> bool:
        """Whether this step's events are recorded. Check it before calling ``mark``."""
        return bool(self._marks)

    @property
    def device(self) -> int | None:
        """The device on which the training thread works; None if it has not used one yet."""
        return self._device

    def has_finished(self, step: int) -> bool:
        """Whether the device is known to have finished this step. False also if no event was recorded for it."""
        self._read_completed()
        return self._done >= step

    def _read_unless_capturing(self) -> None:
        if self._waiting and not self._cuda.is_current_stream_capturing():
            self._read()

    def _finish(self) -> None:
        self._marks = []
        self._read()

    def _at_step(self, step: int) -> None:
        # This step's first event is also the last one of the step before.
        if not self._cuda.is_initialized():
            return
        begun = perf_counter_ns()
        marks, self._marks = self._marks, []
        if self._cuda.is_current_stream_capturing():
            # Not even a query is allowed during capture.
            return
        if marks:
            self._record(END, marks)
        if marks:
            self._waiting.append((step - 1, marks))
        if self._waiting:
            self._read()
        if active.full and len(self._waiting) < MOST_WAITING and not _PART.off:
            if marks:
                self._marks = [(START, marks[-1][1])]
            else:
                self._record(START, self._marks)
        self._recorder.add_overhead(perf_counter_ns() - begun)

    def _mark(self, name: str) -> None:
        self._record(name, self._marks)

    def _unmark(self, name: str) -> None:
        if self._marks and self._marks[-1][0] == name:
            self._pool.append(self._marks.pop()[1])

    def _record(self, name: str, marks: _Marks) -> None:
        device = self._cuda.current_device()
        if self._device is None:
            self._device = device
        if (
            device != self._device
            or len(marks) >= MOST_MARKS
            or not (marks or name == START)
            or self._cuda.is_current_stream_capturing()
        ):
            # Do not return them to the pool: the first may be the end of the step before, which is still to be read.
            marks.clear()
            return
        event = self._pool.pop() if self._pool else self._cuda.Event(enable_timing=True)
        event.record()
        marks.append((name, event))

    def _hook_gradient_end(self, output: Any) -> None:
        function = _grad_function(output)
        if function is not None:
            function.register_prehook(self._at_backward)

    def _backward_begun(self, gradients: Any) -> None:
        """Handle the arrival of a backward at the model's output. Returns None, which leaves the gradients unchanged."""
        if self._marks:
            job_torch().autograd.Variable._execution_engine.queue_callback(self._at_gradients)

    def _gradients_done(self) -> None:
        if self._marks:
            self._mark("ready")

    def _read(self) -> None:
        """Write the times of all steps whose last event has completed."""
        while self._waiting and self._waiting[0][1][-1][1].query():
            step, marks = self._waiting.popleft()
            self._done = step
            start = marks[0][1]
            if self._anchor is not None:
                self._anchor_ns += _ns_between(self._anchor, start)
            times = [f'["{name}",{_ns_between(start, event)}]' for name, event in marks[1:]]
            self._recorder.pending.append(
                f"{{{LineField.DEVICE.key}{step}{LineField.DEVICE_START_NS.next_key}{self._anchor_ns}"
                f"{LineField.DEVICE_TIMES_NS.next_key}[{','.join(times)}]}}\n"
            )
            if self._anchor is not None and self._anchor is not start:
                self._pool.append(self._anchor)
            self._pool.extend(event for _, event in marks[1:-1])
            self._anchor = start


def _ns_between(first: Any, second: Any) -> int:
    ms: float = first.elapsed_time(second)
    return round(ms * 1e6)


def _grad_function(output: Any, nested: int = 2) -> Any:
    """The ``grad_fn`` of the first tensor in a model's output that has one; None if there is none."""
    function = getattr(output, "grad_fn", None)
    if function is not None:
        return function
    if nested and isinstance(output, dict):
        output = list(output.values())
    if nested and isinstance(output, (list, tuple)):
        for value in output:
            function = _grad_function(value, nested - 1)
            if function is not None:
                return function
    return None
