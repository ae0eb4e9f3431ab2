"""Describes torch and its objects in the job, for rank.json. Attributes that a version of torch lacks are None."""

from __future__ import annotations

import os
import sys
from typing import Any

MOST_RANKS_LISTED = 64
"""Upper limit of the ranks listed for a process group. For a larger group only the size is written."""


def job_torch() -> Any:
    """The job's torch module. Its version is unknown, so check attributes before use."""
    return sys.modules["torch"]


def torch_settings() -> dict[str, Any]:
    """Versions, thread counts and global switches."""
    torch = job_torch()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "threads": {"torch": torch.get_num_threads(), "interop": torch.get_num_interop_threads(), "omp": os.environ.get("OMP_NUM_THREADS")},
        "matmul_precision": _matmul_precision(),
        "compiled": "torch._inductor.compile_fx" in sys.modules,
        "deepspeed": "deepspeed" in sys.modules,
        "frameworks": _frameworks(),
    }  # fmt: skip


_FRAMEWORKS = (
    "lightning",
    "pytorch_lightning",
    "transformers",
    "accelerate",
    "trl",
    "ray",
    "mmengine",
    "ignite",
    "deepspeed",
)
"""Packages with their own training loop or settings."""


def _frameworks() -> dict[str, str]:
    """Versions of the frameworks that the job has imported, by name; "" if unknown."""
    modules = {name: sys.modules.get(name) for name in _FRAMEWORKS}
    return {name: _version(each) for name, each in modules.items() if each is not None}


def _version(module: Any) -> str:
    """The module's ``__version__``. Read without getattr, which would execute a lazy module or code of the job."""
    try:
        return str(object.__getattribute__(module, "__dict__").get("__version__", ""))
    except Exception:
        return ""


def _matmul_precision() -> str | None:
    """torch refuses to name it if the job has set the precision of a single backend (``torch.backends.cuda.matmul.fp32_precision``)."""
    try:
        return str(job_torch().get_float32_matmul_precision())
    except Exception:
        return None


def _nccl_version() -> str | None:
    torch = job_torch()
    if torch.version.cuda is None:
        return None
    try:
        return ".".join(str(number) for number in torch.cuda.nccl.version())
    except Exception:
        return None


def device() -> dict[str, Any]:
    """The accelerator in use. Does not initialize one."""
    torch = job_torch()
    found: dict[str, Any] = {"device": "cpu", "device_name": None, "device_uuid": None, "device_pci": None}
    if torch.cuda.is_initialized() and torch.cuda.is_available():
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        found.update(device=f"cuda:{index}", device_name=properties.name)
        uuid = getattr(properties, "uuid", None)
        found["device_uuid"] = None if uuid is None else str(uuid)
        if hasattr(properties, "pci_bus_id"):
            domain, bus, slot = (
                getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")
            )
            found["device_pci"] = f"{domain:08X}:{bus:02X}:{slot:02X}.0"
    return found


def group_name(group: Any) -> str:
    """The process group's name; "0" for the default group."""
    if group is None:
        return "0"
    try:
        return str(group.group_name).replace('"', "'")
    except AttributeError:
        return "?"


def backend_of(group: Any = None) -> str:
    """A process group's backend; if ``init_process_group`` got none, those of its devices ("cpu:gloo,cuda:nccl")."""
    import torch.distributed as dist

    name = str(dist.get_backend(group))
    return str(dist.get_backend_config(group)) if name == "undefined" else name


def process_groups() -> dict[str, Any]:
    """The default backend, and all process groups of this rank."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_initialized():
        return {}
    groups: list[dict[str, Any]] = []
    for group, ranks in list(c10d._world.pg_group_ranks.items()):
        size = len(ranks)
        listed = sorted(ranks) if size <= MOST_RANKS_LISTED else None
        groups.append(
            {
                "name": c10d._world.pg_names.get(group),
                "backend": backend_of(group),
                "ranks": listed,
                "size": size,
            }
        )
    return {"backend": backend_of(), "process_groups": groups}


def describe_ddp(ddp: Any) -> dict[str, Any]:
    """Describe one DDP instance, from its logging data. Sizes in bytes."""
    data = ddp.logger._get_ddp_logging_data()
    text, number = data.strs_map, data.ints_map
    sizes = text.get("rebuilt_bucket_sizes") or text.get("bucket_sizes") or ""
    module = ddp.module
    buffers = sum(each.numel() * each.element_size() for each in module.buffers())
    parameter_sizes = [
        each.numel() * each.element_size() for each in module.parameters() if each.requires_grad
    ]
    join = getattr(getattr(ddp, "_join_config", None), "enable", None)
    return {
        "module": text.get("module_name") or type(module).__name__,
        "bucket_cap_bytes": number.get("bucket_cap_bytes"),
        "bucket_bytes": [int(size) for size in sizes.split(",") if size.strip()],
        "parameters_bytes": number.get("total_parameter_size_bytes"),
        "largest_parameter_bytes": max(parameter_sizes, default=None),
        "parameter_tensors": number.get("num_parameter_tensors"),
        "find_unused_parameters": bool(ddp.find_unused_parameters),
        "unused_parameter_bytes": number.get("unused_parameter_size") if ddp.find_unused_parameters else None,
        "gradient_as_bucket_view": bool(ddp.gradient_as_bucket_view),
        "static_graph": bool(getattr(ddp, "static_graph", False)),
        "broadcast_buffers": bool(ddp.broadcast_buffers), "buffer_bytes": buffers,
        "dtypes": text.get("dtypes"), "comm_hook": text.get("comm_hook") or None,
        "has_sync_bn": bool(number.get("has_sync_bn", 0)), "join": None if join is None else bool(join),
    }  # fmt: skip


def describe_loader(loader: Any) -> dict[str, Any]:
    """Describe one DataLoader. Lengths are read only if that has no side effects."""
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    context = getattr(loader, "multiprocessing_context", None)
    name = _type_name(sampler) if not callable(sampler) else type(sampler).__name__
    shuffles = {"RandomSampler": True, "SequentialSampler": False}.get(
        str(name), getattr(sampler, "shuffle", None)
    )
    size = loader.batch_size if loader.batch_size is not None else getattr(batches, "batch_size", None)
    return {
        "num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor,
        "pin_memory": bool(loader.pin_memory), "persistent_workers": bool(loader.persistent_workers),
        "batch_size": size if isinstance(size, int) else None, "drop_last": bool(getattr(batches, "drop_last", loader.drop_last)),
        "sampler": name, "shuffle": shuffles if isinstance(shuffles, bool) else None,
        "dataset": type(loader.dataset).__name__, "dataset_length": _length(loader.dataset),
        "collate": _type_name(loader.collate_fn), "in_order": getattr(loader, "in_order", None),
        "multiprocessing_context": None if context is None else str(context.get_start_method()),
        "batches_per_epoch": _length(batches),
    }  # fmt: skip


def _type_name(value: Any) -> str | None:
    """The name of a function, or of the object's type."""
    if value is None:
        return None
    name = getattr(value, "__name__", None)
    return str(name) if name else type(value).__name__


def _length(value: Any) -> int | None:
    # Not the length of the loader: for an iterable dataset, asking for it changes what torch warns about.
    try:
        return len(value)
    except Exception:
        return None


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Describe one optimizer."""
    defaults = getattr(optimizer, "defaults", None) or {}
    return {
        "type": type(optimizer).__name__,
        "foreach": defaults.get("foreach"),
        "fused": defaults.get("fused"),
        "sharded": _is_sharded(optimizer),
    }


def _is_sharded(optimizer: Any) -> bool:
    """Whether the first parameter is FSDP's: a flat one or a DTensor."""
    for group in optimizer.param_groups[:1]:
        for parameter in group["params"][:1]:
            flat = getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False)
            return bool(flat) or type(getattr(parameter, "data", None)).__name__ == "DTensor"
    return False
