"""Small trace files of every kind that Kineto has written, and an independent reading of them to compare
with."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"

BASE_NS = 1_790_857_026_000_000_000


def is_cut(trace):
    """Whether a note says that the file ended early, or is damaged in its middle."""
    return any(
        "is truncated: it" in note or "what was read before is used" in note for note in trace.meta.notes
    )


def event(name="aten::add", ts=100.5, dur=10.25, cat="cpu_op", pid=7, tid=7, ph="X", **args):
    """One event as Kineto writes it."""
    return {"ph": ph, "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name="void k()", ts=200.0, dur=5.0, stream=7, correlation=3, **args):
    """One kernel on GPU 0."""
    args = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return event(name, ts, dur, "kernel", 0, stream, **args)


def events(count=200):
    """A mixture of operators, launches, kernels, flows and metadata."""
    made = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7 "}}]
    for i in range(count):
        ts = 1_000_000 + i * 20 + i / 1000
        made.append(
            event(f"aten::op{i % 7}", ts, 9.5, **{"External id": i + 1, "Input Dims": [[i % 3, 2], []]})
        )
        launch = {"correlation": 5000 + i, "External id": i + 1}
        made.append(event("cudaLaunchKernel", ts + 1, 3.125, "cuda_runtime", **launch))
        made.append(kernel('void k<float, {1}>("x")', ts + 2, 12.001, correlation=5000 + i, bytes=i))
        made.append({"ph": "s", "id": i, "pid": 7, "tid": 7, "ts": ts + 1, "cat": "ac2g", "name": "ac2g"})
    return made


def document(content, rank=0, world_size=2, **top):
    """A whole trace around ``content``."""
    job = {"backend": "nccl", "rank": rank, "world_size": world_size}
    top = {"schemaVersion": 1, "distributedInfo": job, "baseTimeNanoseconds": BASE_NS, **top}
    return {**top, "traceEvents": content, "traceName": "t.json"}


def write(path, content):
    """Writes text, bytes or an object as JSON; gzip where the name says so."""
    if not isinstance(content, (str, bytes)):
        content = json.dumps(content, indent=2)
    data = content.encode() if isinstance(content, str) else content
    Path(path).write_bytes(gzip.compress(data, 6, mtime=0) if str(path).endswith(".gz") else data)
    return str(path)


def expected_rows(text):
    """Sorted (start_ns, -duration_ns, name) of all complete and instant events, by exact decimal
    arithmetic."""
    top = json.loads(text, strict=False, parse_float=Decimal, parse_int=Decimal)
    found, base = (
        (top["traceEvents"], int(top.get("baseTimeNanoseconds", 0))) if isinstance(top, dict) else (top, 0)
    )
    rows = []
    for e in found:
        if e["ph"] in "Xi":
            dur = e.get("dur", 0)
            dur = 0 if isinstance(dur, float) else int(dur * 1000)  # the one float that is no Decimal is NaN
            rows.append((int(e["ts"] * 1000) + base, -dur, e["name"]))
    return sorted(rows)


def rows_of(trace):
    """The same of a loaded trace."""
    names = [trace.names[i] for i in trace.name.tolist()]
    return sorted(zip(trace.start_ns.tolist(), (-trace.duration_ns).tolist(), names, strict=True))


def job(folder, ranks, **options):
    """The traces of some ranks of a job, written to ``folder``."""
    return [write(folder / f"t{r}.json.gz", document(events(30), rank=r, **options)) for r in ranks]


def columns(trace):
    """All columns of a trace by name, those of its collectives too."""
    named = {
        name: column
        for name, column in msgspec.structs.asdict(trace).items()
        if name not in ("meta", "collectives")
    }
    collectives = msgspec.structs.asdict(trace.collectives)
    named.update((f"c.{name}", column) for name, column in collectives.items())
    return named


def assert_same(one, other):
    """That two traces hold the same, except that columns of one may have wider types."""
    assert one.meta == other.meta
    mine, theirs = columns(one.narrowed()), columns(other.narrowed())
    for name, column in mine.items():
        if isinstance(column, np.ndarray):
            assert column.dtype == theirs[name].dtype, name
            np.testing.assert_array_equal(column, theirs[name], err_msg=name)
        else:
            assert column == theirs[name], name
