"""Facts that the job states about itself: rank.json of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddpdoctor.measure.facts import DdpFacts, JobFacts, LoaderFacts, Where
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.steplog import RankLog, first
from ddpdoctor.rundir import EventKind
from ddpdoctor.rundir.packages import is_well_known


def job_facts(logs: Sequence[RankLog]) -> JobFacts:
    """Who ran, from the first rank that says it."""
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
        is_ddp=any(info.get("ddp") for info in infos) if infos else None,
        data_parallel=first(infos, "data_parallel"),
        compiled=first(infos, "compiled"),
        autocast=first(infos, "autocast"),
        matmul_precision=first(infos, "matmul_precision"),
    )


def loader_facts(logs: Sequence[RankLog], graph: Graph) -> LoaderFacts:
    """Settings of the training loop's loader, and how long ranks wait for it."""
    waits, ready = [], []
    for log in logs:
        times = [
            [e.duration_ns for e in step.events if e.kind == EventKind.DATA and not e.exhausted]
            for step in log.steps[3:]
        ]
        if any(times):
            waits.append(float(np.mean([sum(t) for t in times])) / 1e6)
        ready += [
            e.batches_ready
            for step in log.steps
            for e in step.events
            if e.kind == EventKind.DATA and e.batches_ready >= 0
        ]
    for log in logs:
        loader = log.main_loader_settings
        if loader is not None:
            return LoaderFacts(
                num_workers=loader.get("num_workers"),
                prefetch_factor=loader.get("prefetch_factor"),
                pin_memory=loader.get("pin_memory"),
                persistent_workers=loader.get("persistent_workers"),
                batch_size=loader.get("batch_size"),
                drop_last=loader.get("drop_last"),
                sampler=loader.get("sampler"),
                dataset=loader.get("dataset"),
                where=_line(log, loader.get("where")),
                wait_ms=float(np.median(waits)) if waits else None,
                longest_wait_ms=max(waits) if waits else None,
                ready_batches=float(np.mean(ready)) if ready else None,
            )
    return LoaderFacts(
        wait_ms=float(np.median(waits)) if waits else None, longest_wait_ms=max(waits) if waits else None
    )


def ddp_facts(logs: Sequence[RankLog]) -> DdpFacts:
    """Settings of the largest DDP module."""
    for log in logs:
        modules = log.record.info.get("ddp") or []
        if modules:
            ddp = max(modules, key=lambda module: module.get("parameters_bytes") or 0)
            return DdpFacts(
                module=ddp.get("module"),
                parameters_bytes=ddp.get("parameters_bytes"),
                find_unused_parameters=ddp.get("find_unused_parameters"),
                unused_parameter_bytes=ddp.get("unused_parameter_bytes"),
                gradient_as_bucket_view=ddp.get("gradient_as_bucket_view"),
                static_graph=ddp.get("static_graph"),
                broadcast_buffers=ddp.get("broadcast_buffers"),
                buffer_bytes=ddp.get("buffer_bytes"),
                comm_hook=ddp.get("comm_hook"),
                where=_line(log, ddp.get("where")),
            )
    return DdpFacts()


def _line(log: RankLog, where: Any) -> Where | None:
    """The line to change; None where only a framework's was seen, as in processes that Lightning spawns."""
    found = log.where.get(where) if isinstance(where, int) else None
    return None if found is None or is_well_known(found.file) else found
