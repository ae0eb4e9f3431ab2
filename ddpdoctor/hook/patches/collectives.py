"""Wraps collectives that the job calls from Python, and waits for asynchronous ones.

torch decorates almost all of them. The wrapped function is replaced in the decorator's closure, so that names imported earlier, the
functions' identity and the state of ``torch.compile`` stay valid. Collectives called inside other collectives are not recorded.

In every step, even one whose events are not recorded, each call is written when it begins; see :mod:`..recording.crash_records`.
The fields of a call from a known place are cached.
"""

from __future__ import annotations

import sys
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Callable

from ...rundir import POINT_TO_POINT, CallField, EventField, EventKind, Phase
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
_GROUP_POSITION = {"barrier": 0, "monitored_barrier": 0, "all_to_all_single": 4}
_GROUP_POSITION.update(
    dict.fromkeys(
        "all_reduce broadcast all_gather all_gather_into_tensor all_gather_single all_gather_object all_to_all send recv "
        "isend irecv broadcast_object_list _all_gather_base".split(),
        2,
    )
)
_GROUP_POSITION.update(
    dict.fromkeys(
        "reduce gather gather_object scatter reduce_scatter reduce_scatter_tensor reduce_scatter_single scatter_object_list "
        "_reduce_scatter_base".split(),
        3,
    )
)
"""Position of the argument ``group``, by function."""
_BY_NAME = 99
"""Larger than the number of arguments of any function: ``group`` can only be a keyword argument."""
_TENSOR_POSITION = {
    "reduce_scatter_tensor": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter_single": 1,
    "all_gather_single": 1,
    "all_to_all_single": 1,
    "reduce_scatter": 1,
}
"""Position of the tensor that this rank contributes, if it is not the first argument."""
_PEER = dict.fromkeys("reduce gather gather_object send isend".split(), EventField.DESTINATION)
_PEER.update(dict.fromkeys("broadcast broadcast_object_list scatter recv irecv".split(), EventField.SOURCE))
"""The argument with the peer rank, which follows the tensor. Its name in torch, ``dst`` or ``src``, is also the one in the step
log."""

_DTYPE = CallField.DTYPE.next_key

_Token = tuple[int, str, int]
"""The start (perf_counter_ns), the fields of the event, and the index of the call in the calls page."""
_FRAMES_ABOVE = 3
"""Frames from the function that runs when a call begins to the caller of torch, past the wrapper and torch's decorator."""


_depth = [0]
"""Nesting depth of collectives on the training thread."""


def _before_collective(name: str) -> Before:  # noqa: C901
    is_barrier = name in _BARRIERS
    kind = EventKind.BARRIER if is_barrier else EventKind.COLLECTIVE
    opening = f'{kind.opening}{_OPERATION}"{name}"{_GROUP}"'
    group_at = _GROUP_POSITION.get(name, _BY_NAME)
    tensor_at = _TENSOR_POSITION.get(name, 0)
    peer = _PEER[name].value if name in _PEER else None
    peer_key = _PEER[name].next_key if name in _PEER else ""

    frames_above = _FRAMES_ABOVE - (name in UNDECORATED)
    is_point_to_point = name in POINT_TO_POINT

    def recurring(
        recorder: Recorder, args: Any, kwargs: Any, group: Any, size: int | None, dtype: Any
    ) -> tuple[Call, str]:
        group_text = group_name(group)
        fields = f'{opening}{group_text}"{recorder.lines.caller(through=True)}'
        if size is not None and not is_barrier:
            fields += f"{_BYTES}{size}"
        if kwargs.get("async_op"):
            fields += _ASYNC
        if peer is not None:
            peer_rank = args[1] if len(args) > 1 else kwargs.get(peer)
            if type(peer_rank) is int:
                fields += f"{peer_key}{peer_rank}"
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
        tensor = args[tensor_at] if len(args) > tensor_at else kwargs.get("tensor")
        size, dtype = _bytes(tensor), getattr(tensor, "dtype", None)
        if active.full:
            call, fields = recurring(recorder, args, kwargs, group, size, dtype)
        else:
            frame, known = sys._getframe(frames_above), recorder.calls.known
            key = name, id(frame.f_code), frame.f_lasti, id(group), kwargs.get("async_op"), size, dtype
            cached = known.get(key)
            if cached is None:
                cached = *recurring(recorder, args, kwargs, group, size, dtype), frame.f_code
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

    lifetime.depths.append(_depth)
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
    return around(function, _PART, _before_collective(name), _after_collective, failed=failed)
