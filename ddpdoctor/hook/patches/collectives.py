"""Wraps collectives that the job calls from Python, and waits for asynchronous ones.

torch decorates almost all of them. The wrapped function is replaced in the decorator's closure, so that names imported earlier, the
functions' identity and the state of ``torch.compile`` stay valid. Collectives called inside other collectives are not recorded.

In every step, even one whose events are not recorded, each call is written when it begins; see :mod:`..recording.crash_records`.
The fields of a call from a known place are cached.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Callable

from ...rundir.stepevents import POINT_TO_POINT, CallField, EventField, EventKind, Phase
from .. import lifetime
from ..guard import part
from ..job import group_name
from ..patching import Before, Patches, around, cell_of
from ..recording import MOST_PLACES, Call, Recorder, active, exception_recorder, recording_here

_PART = part("collectives")

_WAIT = EventKind.WAIT.opening
_OPERATION, _GROUP = EventField.OPERATION.next_key, EventField.GROUP.next_key
_BYTES, _ASYNC = EventField.MESSAGE_BYTES.next_key, f"{EventField.IS_ASYNC.next_key}true"

DECORATED = (
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_single _all_gather_base all_gather_object all_reduce "
    "all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_object "
    "recv recv_object_list reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single _reduce_scatter_base scatter "
    "scatter_object_list send send_object_list"
).split()
UNDECORATED = "monitored_barrier batch_isend_irecv isend irecv".split()
_BARRIERS = ("barrier", "monitored_barrier")
_PEERS = EventField.SOURCE, EventField.DESTINATION
"""Fields with the peer rank. Their names in the step log, ``src`` and ``dst``, are also those of torch's arguments."""
_BY_NAME = 99
"""Larger than the number of arguments of any function: the argument, if there is one, is given by name."""
_TENSOR_POSITION = {
    "reduce_scatter_tensor": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter_single": 1,
    "all_gather_single": 1,
    "all_to_all_single": 1,
    "reduce_scatter": 1,
}
"""Position of the tensor that this rank contributes, if it is not the first argument."""
_DTYPE = CallField.DTYPE.next_key

_Token = tuple[int, str, int]
"""The start (perf_counter_ns), the fields of the event, and the index of the call in the calls page."""
_FRAMES_ABOVE = 3
"""Frames from the function that runs when a call begins to the caller of torch, past the wrapper and torch's decorator."""


_depth = [0]
"""Nesting depth of collectives on the training thread."""


def _positions(function: Callable[..., Any]) -> dict[str, int]:
    """Positions of the arguments of torch's ``function``, by name; empty if unknown. They differ between versions of torch."""
    try:
        return {name: position for position, name in enumerate(inspect.signature(function).parameters)}
    except (TypeError, ValueError):
        return {}


def _peer_of(
    field: EventField, positions: Mapping[str, int], args: Any, kwargs: Any, group: Any
) -> int | None:
    """The peer's rank in the default process group; None if the call does not say it."""
    for name in (field.value, f"group_{field.value}"):
        at = positions.get(name, _BY_NAME)
        rank = args[at] if len(args) > at else kwargs.get(name)
        if type(rank) is int:
            return rank if name == field.value or group is None else _global_rank(group, rank)
    return None


def _global_rank(group: Any, rank: int) -> int | None:
    from torch.distributed import distributed_c10d as c10d

    try:
        return int(c10d.get_global_rank(group, rank))
    except ValueError:
        return None  # torch refuses the call, too


def _before_collective(function: Callable[..., Any], name: str) -> Before:  # noqa: C901
    is_barrier = name in _BARRIERS
    kind = EventKind.BARRIER if is_barrier else EventKind.COLLECTIVE
    opening = f'{kind.opening}{_OPERATION}"{name}"{_GROUP}"'
    positions = _positions(function)
    group_at, async_at = positions.get("group", _BY_NAME), positions.get("async_op", _BY_NAME)
    tensor_at = _TENSOR_POSITION.get(name, 0)
    peer_field = next((field for field in _PEERS if field.value in positions), None)

    frames_above = _FRAMES_ABOVE - (name in UNDECORATED)
    is_point_to_point = name in POINT_TO_POINT

    def recurring(
        recorder: Recorder, group: Any, is_async: bool, peer: int | None, size: int | None, dtype: Any
    ) -> tuple[Call, str]:
        group_text = group_name(group)
        fields = f'{opening}{group_text}"{recorder.lines.caller(through=True)}'
        if size is not None and not is_barrier:
            fields += f"{_BYTES}{size}"
        if is_async:
            fields += _ASYNC
        if peer_field is not None and peer is not None:
            fields += f"{peer_field.next_key}{peer}"
        dtype_field = "" if dtype is None else f'{_DTYPE}"{str(dtype).rpartition(".")[2]}"'
        return recorder.calls.recurring(
            fields + dtype_field, None if is_point_to_point else group_text
        ), fields

    def start(args: Any, kwargs: Any) -> _Token | None:
        recorder = active.recorder
        if recorder is None or recorder.thread != get_ident():
            return None
        if _depth[0]:
            _depth[0] += 1
            return 0, "", -1
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        is_async = bool(args[async_at] if len(args) > async_at else kwargs.get("async_op"))
        peer = None if peer_field is None else _peer_of(peer_field, positions, args, kwargs, group)
        tensor = args[tensor_at] if len(args) > tensor_at else kwargs.get("tensor")
        size, dtype = _bytes(tensor), getattr(tensor, "dtype", None)
        if active.full:
            call, fields = recurring(recorder, group, is_async, peer, size, dtype)
        else:
            frame, known = sys._getframe(frames_above), recorder.calls.known
            key = name, id(frame.f_code), frame.f_lasti, id(group), is_async, peer, size, dtype
            cached = known.get(key)
            if cached is None:
                cached = *recurring(recorder, group, is_async, peer, size, dtype), frame.f_code
                if len(known) < MOST_PLACES:
                    known[key] = cached
            call, fields, _ = cached
        recorder.flush_definitions()
        place = recorder.calls.begin(call, recorder.step)
        token = perf_counter_ns() if active.full else 0, fields, place
        # Set last: an exception from a signal handler of the job must not leave it set.
        _depth[0] = 1
        return token

    return start


def _bytes(value: Any) -> int | None:
    """Bytes of a tensor or a list of tensors; None for anything else."""
    try:
        if type(value) in (list, tuple):
            return int(sum(each.numel() * each.element_size() for each in value))
        return int(value.numel() * value.element_size())
    except AttributeError:
        return None


def _after_collective(token: _Token, result: Any) -> None:
    end = perf_counter_ns()
    _depth[0] = max(0, _depth[0] - 1)
    start, fields, place = token
    recorder = active.recorder
    if not fields or recorder is None:
        return
    if start:
        recorder.add(start, end - start, fields)
    if not (_ASYNC in fields or isinstance(result, BaseException)):
        recorder.calls.end(place)


def _before_wait(args: Any, kwargs: Any) -> tuple[int, str] | None:
    recorder = active.recorder
    if recorder is None or _depth[0] or not recording_here(recorder):
        return None
    return perf_counter_ns(), _WAIT + recorder.lines.caller()


def _after_wait(token: tuple[int, str], result: Any) -> None:
    end = perf_counter_ns()
    recorder = active.recorder
    if recorder is not None:
        recorder.add(token[0], end - token[0], token[1])


def install(patches: Patches) -> None:
    """Replace the functions in the decorators' closures, the few undecorated ones, and ``Work.wait``."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    lifetime.at_fork.append(lambda: _depth.__setitem__(0, 0))
    for name in DECORATED:
        cell = cell_of(vars(c10d).get(name))
        if cell is not None:
            patches.cell(cell, _wrapped(cell.cell_contents, name))
    for name in UNDECORATED:
        function = vars(c10d).get(name)
        if function is not None:
            timed = _wrapped(function, name)
            for module in (dist, c10d):
                if vars(module).get(name) is function:
                    patches.attribute(module, name, timed)
    work = c10d.Work
    wait = around(work.wait, _PART, _before_wait, _after_wait, active, exception_recorder(Phase.WAIT))
    patches.attribute(work, "wait", wait)


def _wrapped(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    failed = exception_recorder(Phase.BARRIER if name in _BARRIERS else Phase.COLLECTIVE)
    return around(function, _PART, _before_collective(function, name), _after_collective, failed=failed)
