"""Types of the fields of manifest.json, rank.json, telemetry.jsonl and the status files. Fields of another type are left out, with
a note."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Callable

from .files import ignored, short
from .notes import Note
from .stepevents import CallField, EventField, LineField

Check = Callable[[Any], bool]
_MOST_RANKS = 10_000_000
"""Upper limit of a world size; a larger one was not written by the hook."""
_LATEST_NS = 1 << 62
"""In the year 2116. Sums and differences of two times before it fit into 64 bits."""
_MOST_LETTERS = 1 << 20


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and isfinite(value))


def is_moment(value: Any) -> bool:
    """Whether ``value`` is a valid time in epoch ns."""
    return _whole(value) and 0 <= value < _LATEST_NS


def _count(value: Any) -> bool:
    return _whole(value) and value >= 0


def _process(value: Any) -> bool:
    return _whole(value) and 0 < value < 2**31


def _ranks(value: Any) -> bool:
    return _whole(value) and 0 <= value <= _MOST_RANKS


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_LETTERS


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


def _object_with(**fields: Check) -> Check:
    return lambda value: isinstance(value, dict) and not invalid_fields(value, fields)


def _each(check: Check, names: str) -> dict[str, Check]:
    """The same ``check`` for each of ``names``."""
    return dict.fromkeys(names.split(), check)


def invalid_fields(document: Mapping[str, Any], fields: Mapping[str, Check]) -> dict[str, Any]:
    """The fields of ``document`` whose types are invalid."""
    return {
        name: document[name]
        for name, check in fields.items()
        if document.get(name) is not None and not check(document[name])
    }


MANIFEST: Mapping[str, Check] = {
    **_each(_text, "schema ddpdoctor cwd host boot python platform job_id run_id"),
    **_each(_whole, "exit_code signal"),
    **_each(is_moment, "started_ns ended_ns"),
    "pid": _process,
    "pid_namespace": _count,
    "command": _list_of(_text),
    "hosts": _list_of(_text),
    "notes": _list_of(_text),
    "note_codes": _list_of(_text),
    "options": _mapping,
    "environment": _texts,
}

_DDP = _object_with(
    **_each(_whole, "id where"),
    **_each(_text, "module dtypes comm_hook"),
    **_each(_number, "bucket_cap_bytes parameters_bytes largest_parameter_bytes"),
    **_each(_number, "parameter_tensors unused_parameter_bytes buffer_bytes"),
    **_each(_flag, "find_unused_parameters gradient_as_bucket_view static_graph"),
    broadcast_buffers=_flag,
    bucket_bytes=_list_of(_number),
)
_LOADER = _object_with(
    **_each(_whole, "id where num_workers prefetch_factor batch_size"),
    **_each(_flag, "pin_memory persistent_workers drop_last"),
    **_each(_text, "sampler dataset"),
)

RANK: Mapping[str, Check] = {
    **_each(_text, "schema host boot backend python torch cuda nccl job_id"),
    **_each(_text, "device device_name device_uuid device_pci matmul_precision"),
    **_each(_count, "local_rank attempt cpu_affinity"),
    **_each(is_moment, "started_ns ended_ns"),
    **_each(_flag, "data_parallel fsdp deepspeed compiled autocast"),
    **_each(_ranks, "rank world_size"),
    **_each(_process, "pid parent_pid"),
    "pid_namespace": _count,
    "process_groups": _list_of(_mapping),
    "ddp": _list_of(_DDP),
    # The id must not be null. If it is missing, the position in the list counts.
    "loaders": _list_of(lambda value: _LOADER(value) and value.get("id", 0) is not None),
    "optimizers": _list_of(_mapping),
    "threads": _object_with(torch=_whole, interop=_whole),
    "frameworks": _texts,
    "environment": _texts,
    "window": _object_with(state=_text, why=_text),
    "captures": _list_of(_object_with(number=_count, state=_text, why=_text, steps=_list_of(_count))),
    "hook": _object_with(errors=_list_of(_text)),
}

TELEMETRY_HEADER: Mapping[str, Check] = {
    **_each(_text, "schema host"),
    "started_ns": is_moment,
    "host_facts": _object_with(
        **_each(_number, "cpu_count_usable cpu_count_logical numa_nodes memory_total_bytes"),
        **_each(_number, "cgroup_cpu_limit_cores cgroup_memory_limit_bytes"),
    ),
    "gpus": _list_of(
        lambda value: (
            isinstance(value, dict)
            and _count(value.get("index"))
            and not invalid_fields(value, {"memory_total_bytes": _number, "pcie_width_max": _number})
        )
    ),
}
_RANK_USE = _object_with(
    pid=_process,
    **_each(_number, "cpu_percent rss_bytes num_children"),
    **_each(_number, "process_rss_bytes process_memory_bytes children_memory_bytes"),
)
TELEMETRY_SAMPLE: Mapping[str, Check] = {
    "host": _object_with(
        **_each(_number, "cpu_percent iowait_percent memory_used_bytes"),
        **_each(_number, "memory_available_bytes cgroup_memory_free_bytes"),
        **_each(_number, "swap_in_bytes_per_s swap_out_bytes_per_s"),
    ),
    "ranks": lambda value: (
        isinstance(value, dict)
        and all(name.isdecimal() and len(name) < 9 for name in value)
        and all(map(_RANK_USE, value.values()))
    ),
    "others": _list_of(_object_with(name=_text, **_each(_number, "cores processes"), rank=_ranks)),
    "gpus": _list_of(
        lambda value: (
            isinstance(value, dict) and _count(value.get("index")) and not invalid_fields(value, _GPU)
        )
    ),
}
_GPU: Mapping[str, Check] = {
    **_each(_number, "gpu_utilization_percent memory_used_bytes"),
    **_each(_number, "power_watts temperature_celsius sm_clock_mhz memory_clock_mhz"),
    **_each(_number, "pcie_generation pcie_width ecc_uncorrected_total"),
    "throttle_reasons": _list_of(_text),
    "xid_errors": _list_of(lambda value: _text(value) or _whole(value)),
}


_FRAME = _list_of(lambda value: _text(value) or _count(value) or value is None)
"""File, line and function of a frame; the line may be unknown."""
_FRAMES = _list_of(_FRAME)


def _groups(value: Any) -> bool:
    """By process group: numbers of the last collective enqueued, started and completed, -1 for none or unknown."""
    return isinstance(value, dict) and all(map(_list_of(_whole), value.values()))


_RAISED = _object_with(type=_text, message=_text, relation=_text, frames=_FRAMES)
PROGRESS: Mapping[str, Check] = {
    **_each(_text, "schema phase syscall"),
    **_each(_ranks, "rank world_size"),
    **_each(is_moment, "at_ns step_since_ns"),
    **_each(_count, "step evaluations events"),
    "pid": _process,
    **_each(_flag, "exhausted evaluating"),
    "frames": _FRAMES,
    "user": _FRAMES,
    "groups": _groups,
}
STANDING: Mapping[str, Check] = {
    **PROGRESS,
    "request": _count,
    "threads": _list_of(_object_with(name=_text, training=_flag, frames=_FRAMES)),
    "raised": _list_of(_RAISED),
    "errors": _list_of(_text),
}
ENDING: Mapping[str, Check] = {**PROGRESS, "how": _text, "raised": _list_of(_RAISED)}
CALL: Mapping[str, Check] = {
    **dict.fromkeys((CallField.OPEN.value, CallField.NUMBER.value, CallField.TURN.value), _count),
    **dict.fromkeys((CallField.LAST_TURN.value, CallField.TURN_BEFORE.value, LineField.STEP.value), _count),
    CallField.DTYPE.value: _text,
    **dict.fromkeys((EventField.WHERE.value, EventField.MESSAGE_BYTES.value), _count),
    **dict.fromkeys((EventField.KIND.value, EventField.OPERATION.value, EventField.GROUP.value), _text),
    EventField.IS_ASYNC.value: _flag,
}
STALL: Mapping[str, Check] = {
    **_each(_text, "schema host state boot paused_in"),
    **_each(is_moment, "detected_ns silent_since_ns looked_ns"),
    "silent_s": _number,
    "ranks": _list_of(
        _object_with(
            rank=_ranks,
            pid=_process,
            **_each(_flag, "answered in_order waits computes joined"),
            **_each(_text, "phase faults"),
            step=_count,
            last_step_ns=is_moment,
            process=_object_with(**_each(_text, "state wchan syscall"), tracer=_count),
        )
    ),
}
ASKED: Mapping[str, Check] = {**_each(_text, "schema host boot"), "signal": _count, "at_ns": is_moment}
ENDS: Mapping[str, Check] = {
    **_each(_text, "schema host boot"),
    "oom_kills": _count,
    "ends": _list_of(
        _object_with(
            rank=_ranks,
            pid=_process,
            seen_ns=is_moment,
            **_each(_count, "code signal oom_kills step"),
            **_each(_flag, "in_order joined waits"),
            raised=_list_of(_RAISED),
        )
    ),
}


def fitting(
    document: dict[str, Any], fields: Mapping[str, Check], path: str, notes: list[Note]
) -> dict[str, Any]:
    """Return ``document`` of ``path`` without the fields that do not pass ``fields``. A note names them."""
    wrong = invalid_fields(document, fields)
    if not wrong:
        return document
    notes.append(ignored(path, [f"{name} ({short(value)})" for name, value in wrong.items()]))
    return {name: value for name, value in document.items() if name not in wrong}
