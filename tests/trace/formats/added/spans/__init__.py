"""Spans, a made-up format: a first line ``#spans rank=0 world=2``, then begin (ns), duration (ns), kind and name of each.

#spans rank=0 world=2
1000 250000 user_annotation ProfilerStep#1
1500 90000 cpu_op aten::mm
"""

from __future__ import annotations

import numpy as np

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import reason_of
from ddpdoctor.trace.columns import Collectives, RankTrace, TraceMeta, sorted_order
from ddpdoctor.trace.formats import Candidate
from ddpdoctor.trace.sources import open_source

_MARK = b"#spans "


def recognises(candidate: Candidate) -> bool:
    return (candidate.head or b"").startswith(_MARK)


def read(path: str, rank: int | None) -> RankTrace:
    try:
        with open_source(path) as stream:
            first, *lines = stream.read().decode().splitlines()
    except OSError as error:
        raise UnusableInput(f"{path} cannot be opened: {reason_of(error).lower()}.") from None
    rows = [line.split(" ", 3) for line in lines]
    if not rows:
        raise UnusableInput(f"{path} holds no profiler events: it ends after its first line.")
    said = dict(pair.split("=") for pair in first.split()[1:])
    meta = TraceMeta(
        source=path,
        rank=int(said["rank"]) if rank is None else rank,
        rank_from="distributedInfo" if rank is None else "run directory",
        world_size=int(said["world"]),
        backend=None,
        host=None,
        clock="relative",
    )
    return _table(meta, rows)


def _table(meta: TraceMeta, rows: list[list[str]]) -> RankTrace:
    start_ns, duration_ns = (np.array([int(row[i]) for row in rows], np.int64) for i in (0, 1))
    order = sorted_order(start_ns, duration_ns)
    categories, category = np.unique([row[2] for row in rows], return_inverse=True)
    names, name = np.unique([row[3] for row in rows], return_inverse=True)
    absent = np.full(len(rows), -1, np.int32)
    return RankTrace(
        meta=meta,
        names=names.tolist(),
        categories=categories.tolist(),
        name=name[order].astype(np.int32),
        category=category[order].astype(np.int32),
        lane=np.zeros(len(rows), np.int32),
        start_ns=start_ns[order],
        duration_ns=duration_ns[order],
        stream=absent,
        device=absent,
        correlation=absent.astype(np.int64),
        external_id=absent.astype(np.int64),
        bytes=absent.astype(np.int64),
        shapes=absent,
        collectives=Collectives.of({}),
    )
