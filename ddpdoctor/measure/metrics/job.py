"""Who ran: what the ranks state, or where there are no step logs, what the traces say of themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpdoctor.measure.facts import JobFacts
from ddpdoctor.measure.steplog import RankLog, first
from ddpdoctor.measure.window import Window

_DDP_FORWARD = "DistributedDataParallel.forward"
"""The annotation around each forward call of a wrapped model (torch/nn/parallel/distributed.py)."""
_DATA_PARALLEL = re.compile(r"(?<![A-Za-z])DataParallel\.forward|nn\.Module: DataParallel_\d")
"""``torch.nn.DataParallel`` as it stands in the name of its annotation or of a Python frame, not another class whose name
ends so: DistributedDataParallel, FullyShardedDataParallel."""


def job_facts(logs: Sequence[RankLog], windows: Sequence[Window]) -> JobFacts:
    """Who ran, from the first rank that says it."""
    return _stated(logs) if logs else _shown(windows)


def _stated(logs: Sequence[RankLog]) -> JobFacts:
    """From the ranks' own records."""
    infos = [log.record.info for log in logs]
    device = first(infos, "device")
    return JobFacts(
        world_size=first(infos, "world_size"),
        ranks_seen=len(logs),
        hosts=len({log.host for log in logs if log.host}) or None,
        backend=first(infos, "backend"),
        device=str(device).split(":")[0] if device else None,
        device_name=first(infos, "device_name"),
        torch=first(infos, "torch"),
        nccl=first(infos, "nccl"),
        is_ddp=any(info.get("ddp") for info in infos),
        data_parallel=first(infos, "data_parallel"),
        compiled=first(infos, "compiled"),
        autocast=first(infos, "autocast"),
        matmul_precision=first(infos, "matmul_precision"),
    )


def _shown(windows: Sequence[Window]) -> JobFacts:
    """From the traces' metadata and the names of their events."""
    metas = [window.trace.meta for window in windows]
    names = {name for window in windows for name in window.trace.names}
    devices = [device for meta in metas for device in meta.devices]
    return JobFacts(
        world_size=next((meta.world_size for meta in metas if meta.world_size is not None), None),
        ranks_seen=len(windows),
        hosts=len({meta.host for meta in metas if meta.host}) or None,
        backend=next((meta.backend for meta in metas if meta.backend), None),
        device="cuda" if any(window.on_device for window in windows) else "cpu",
        device_name=str(devices[0].get("name")) if devices else None,
        torch=next((meta.torch_version for meta in metas if meta.torch_version), None),
        nccl=next((meta.nccl_version for meta in metas if meta.nccl_version), None),
        is_ddp=any(_DDP_FORWARD in name for name in names) or None,
        data_parallel=any(_DATA_PARALLEL.search(name) for name in names) or None,
    )
