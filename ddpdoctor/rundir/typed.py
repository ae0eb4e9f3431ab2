"""Which types the fields of manifest.json and rank.json have. A field of another type is left out, and told."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping

_Check = Callable[[Any], bool]
_MOST_RANKS = 10_000_000
"""No job has so many: a world size beyond it was not written by the hook."""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, float) or _whole(value)


def _ranks(value: Any) -> bool:
    return _whole(value) and 0 <= value <= _MOST_RANKS


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _listing(value: Any) -> bool:
    return isinstance(value, list)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _with(**fields: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and not _misfits(value, fields)


def _misfits(document: Mapping[str, Any], fields: Mapping[str, _Check]) -> Dict[str, Any]:
    return {
        name: document[name]
        for name, check in fields.items()
        if document.get(name) is not None and not check(document[name])
    }


MANIFEST: Mapping[str, _Check] = {
    **dict.fromkeys(("schema", "ddpdoctor", "cwd", "host", "python", "platform"), _text),
    **dict.fromkeys(("pid", "started_ns", "ended_ns", "exit_code", "signal"), _whole),
    "command": _list_of(_text),
    "hosts": _list_of(_text),
    "notes": _listing,
    "options": _mapping,
    "environment": _mapping,
}

_DDP = _with(
    **dict.fromkeys(("id", "where"), _whole),
    **dict.fromkeys(("module", "dtypes", "comm_hook"), _text),
    **dict.fromkeys(("bucket_cap_bytes", "parameters_bytes", "largest_parameter_bytes"), _number),
    **dict.fromkeys(("parameter_tensors", "unused_parameter_bytes", "buffer_bytes"), _number),
    **dict.fromkeys(("find_unused_parameters", "gradient_as_bucket_view", "static_graph"), _flag),
    broadcast_buffers=_flag,
    bucket_bytes=_list_of(_number),
)
_LOADER = _with(
    **dict.fromkeys(("id", "where", "num_workers", "prefetch_factor", "batch_size"), _whole),
    **dict.fromkeys(("pin_memory", "persistent_workers", "drop_last"), _flag),
    **dict.fromkeys(("sampler", "dataset"), _text),
)

RANK: Mapping[str, _Check] = {
    **dict.fromkeys(("schema", "host", "backend", "python", "torch", "cuda", "nccl"), _text),
    **dict.fromkeys(("device", "device_name", "device_uuid", "device_pci", "matmul_precision"), _text),
    **dict.fromkeys(("local_rank", "pid", "attempt", "started_ns", "ended_ns", "cpu_affinity"), _whole),
    **dict.fromkeys(("data_parallel", "fsdp", "deepspeed", "compiled"), _flag),
    **dict.fromkeys(("rank", "world_size"), _ranks),
    "process_groups": _list_of(_mapping),
    "ddp": _list_of(_DDP),
    "loaders": _list_of(_LOADER),
    "optimizers": _list_of(_mapping),
    "threads": _with(torch=_whole, interop=_whole),
    "environment": _mapping,
    "window": _with(state=_text, why=_text),
    "hook": _with(errors=_listing),
    "notes": _listing,
}


def fitting(
    document: Dict[str, Any], fields: Mapping[str, _Check], path: str, notes: "list[str]"
) -> Dict[str, Any]:
    """``document`` of ``path`` without the fields whose types are not those of ``fields``; one note names them."""
    wrong = _misfits(document, fields)
    if not wrong:
        return document
    said = ", ".join(f"{name} ({_short(value)})" for name, value in wrong.items())
    notes.append(f"{path}: fields with values that they cannot have are ignored: {said}.")
    return {name: value for name, value in document.items() if name not in wrong}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
