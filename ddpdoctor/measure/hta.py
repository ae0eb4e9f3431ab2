"""Run the analyses of HolisticTraceAnalysis (HTA) on ddpdoctor's columns, without HTA's file parsing.

HTA is imported only when :func:`hta_results` or :func:`hta_trace` is called. The extra ``ddpdoctor[hta]`` installs it.
``docs/hta.md`` compares its numbers with ddpdoctor's.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trace import RankTrace
from ddpdoctor.trace.classify import DEVICE, device_work

Records = list[dict[str, Any]]

_DISTRIBUTIONS = ("HolisticTraceAnalysis", "traceinsight")
"""Names under which HTA has been published; the module is ``hta`` in both."""
_KERNEL_GAP = 30
"""HTA's default for the longest gap between consecutive kernels. HTA documents it as ns, but compares it with times in us."""
_SLOW_CALL_US = 50
"""HTA's default threshold for long calls (``runtime_cutoff``)."""
_LATE_START_US = 100
"""HTA's default threshold for long launch delays (``launch_delay_cutoff``)."""
_LONGEST_REASON = 200
"""Characters of an exception's text that are kept."""


def hta_results(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return HTA's temporal breakdown, overlap, idle time, queue lengths and kernel launches as plain data.

    Each analysis is a list of records, one or more per rank, with units in the names. ``notes`` has a sentence for each
    analysis that had no data or failed on some ranks; these ranks have no records there.

    Raises DdpDoctorError if HTA is not installed.
    """
    _require()
    results: dict[str, Any] = {"library": [_library()]}
    results |= {name: [] for name in _ANALYSES}
    failures: dict[tuple[str, str], list[int]] = {}
    notes: list[str] = []
    for rank, trace in _with_rank_numbers(traces, notes):
        if not device_work(trace).any():
            why = "the trace has no device events, and HTA uses nothing else"
            failures.setdefault(("", why), []).append(rank)
            continue
        # One container per rank: in HTA, one rank without data makes the analysis of all ranks fail.
        container = hta_trace({rank: trace})
        for name, analysis in _ANALYSES.items():
            records, reason = _run_analysis(analysis, container, rank)
            results[name] += records
            if reason:
                failures.setdefault((name, reason), []).append(rank)
    for (name, reason), ranks in failures.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        what = name.replace("_", " ").capitalize() or "All analyses"
        notes.append(f"{what}, {who}: {reason}.")
    results["notes"] = notes
    return results


def hta_trace(traces: dict[int, RankTrace]) -> Any:
    """Return the columns of all ranks as HTA's container, an ``hta.common.trace.Trace``, for its analysers.

    It contains device events and the runtime calls with correlation ids; times are in us from the rank's first such event. Host
    operators are excluded. Raises DdpDoctorError if HTA is not installed.
    """
    _require()
    with _quiet():
        from hta.common.trace import Trace

        container = Trace(trace_files={})
        for rank, trace in traces.items():
            container.traces[rank] = _frame(trace, container.symbol_table)
            container.meta_data[rank] = {}
        container.is_parsed = True
    return container


def _require() -> None:
    try:
        with _quiet():
            import hta.common.trace  # noqa: F401
    except ImportError as error:
        raise DdpDoctorError(
            f"HolisticTraceAnalysis cannot be imported ({error}): pip install '.[hta]' in a checkout of ddpdoctor."
        ) from error


def _library() -> dict[str, Any]:
    """Name and version of the installed distribution; the version is None if its metadata is missing."""
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return {"name": name, "version": importlib.metadata.version(name)}
    return {"name": _DISTRIBUTIONS[0], "version": None}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress HTA's output: it logs to stdout, changes the root logger when imported, and causes pandas warnings."""
    root, own = logging.getLogger(), logging.getLogger("hta")
    handlers, level = list(root.handlers), root.level
    own.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        own.setLevel(logging.CRITICAL)


def _with_rank_numbers(traces: Sequence[RankTrace], notes: list[str]) -> list[tuple[int, RankTrace]]:
    """Each trace with its rank. A trace without a rank, or with a rank that is taken, gets the next free number."""
    known = {trace.meta.rank for trace in traces} - {None}
    taken: set[int] = set()
    result = []
    for trace in traces:
        rank = trace.meta.rank
        if rank is None or rank in taken:
            rank = next(n for n in range(len(traces) + len(known) + 1) if n not in taken and n not in known)
            notes.append(
                f"{PurePath(trace.meta.source).name}: shown as rank {rank}, because its own rank is unknown or taken."
            )
        taken.add(rank)
        result.append((rank, trace))
    return result


def _frame(trace: RankTrace, symbols: Any) -> Any:
    """The table that HTA's analysers read. ``index`` starts at 1, because 0 means "no counterpart"."""
    import pandas as pd

    device = device_work(trace)
    rows = np.flatnonzero(device | ((trace.correlation >= 0) & ~trace.category_mask(*DEVICE)))
    on_device, start = device[rows], trace.start_ns[rows]
    index = np.arange(1, len(rows) + 1)
    correlation = trace.correlation[rows].astype(np.int64)
    # Columns of a trace may have narrower types, which HTA does not expect.
    stream, device_id, lane = (
        column[rows].astype(np.int32) for column in (trace.stream, trace.device, trace.lane)
    )
    stream = np.where(on_device, stream, -1)
    frame = pd.DataFrame(
        {
            "index": index,
            "name": _symbol_ids(trace.names, trace.name[rows], symbols),
            "cat": _symbol_ids(trace.categories, trace.category[rows], symbols),
            "pid": np.where(on_device, device_id, -1),
            "tid": np.where(on_device, stream, lane),
            "ts": (start - start.min()) / 1e3,
            "dur": trace.duration_ns[rows] / 1e3,
            "stream": stream,
            "correlation": correlation,
            "index_correlation": _counterparts(correlation, on_device),
        },
        index=index,
    )
    frame["end"] = frame["ts"] + frame["dur"]
    return frame


def _symbol_ids(texts: list[str], ids: NDArray[Any], symbols: Any) -> NDArray[np.int64]:
    used = np.unique(ids)
    symbols.add_symbols([texts[i] for i in used])
    place = np.zeros(len(texts), np.int64)
    place[used] = [symbols.sym_index[texts[i]] for i in used]
    result: NDArray[np.int64] = place[ids]
    return result


def _counterparts(correlation: NDArray[np.int64], on_device: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[M] index of the device event's call, or of the call's first device event; 0 if there is none, -1 without a correlation id."""
    result = np.minimum(correlation, 0)
    for side in (on_device, ~on_device):
        here, there = np.flatnonzero(side & (correlation >= 0)), np.flatnonzero(~side & (correlation >= 0))
        if not len(there):
            continue
        there = there[np.argsort(correlation[there], kind="stable")]
        nearest = np.clip(np.searchsorted(correlation[there], correlation[here]), 0, len(there) - 1)
        same = correlation[there[nearest]] == correlation[here]
        result[here[same]] = there[nearest[same]] + 1
    return result


def _run_analysis(analysis: Callable[[Any, int], Records], container: Any, rank: int) -> tuple[Records, str]:
    """The records, and the reason if there are none (else "")."""
    try:
        with _quiet():
            records = analysis(container, rank)
    # HTA may raise any exception on data that it does not expect.
    except Exception as error:
        what = " ".join(str(error).split())[:_LONGEST_REASON]
        return [], f"HTA failed with {type(error).__name__}: {what}".rstrip(": ")
    if not records:
        return [], "the trace has no such event, or none that HTA knows by name"
    return records, ""


def _temporal_breakdown(container: Any, rank: int) -> Records:
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis

    table = BreakdownAnalysis.get_temporal_breakdown(container, visualize=False)
    return _records(
        table,
        rank,
        {
            "kernel_time_us": "kernel_time(us)",
            "idle_time_us": "idle_time(us)",
            "compute_time_us": "compute_time(us)",
            "non_compute_time_us": "non_compute_time(us)",
            "idle_percent": "idle_time_pctg",
            "compute_percent": "compute_time_pctg",
            "non_compute_percent": "non_compute_time_pctg",
        },
    )


def _overlap(container: Any, rank: int) -> Records:
    from hta.analyzers.communication_analysis import CommunicationAnalysis

    table = CommunicationAnalysis.get_comm_comp_overlap(container, visualize=False)
    records = _records(table, rank, {"overlap_percent": "comp_comm_overlap_pctg"})
    return [record for record in records if record["overlap_percent"] is not None]


def _idle_time(container: Any, rank: int) -> Records:
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis

    table, _ = BreakdownAnalysis.get_idle_time_breakdown(container, _KERNEL_GAP, rank=rank, visualize=False)
    columns = {
        "stream": "stream",
        "idle_category": "idle_category",
        "idle_time_us": "idle_time",
        "idle_share": "idle_time_ratio",
    }
    return _records(table, rank, columns)


def _queue_length(container: Any, rank: int) -> Records:
    from hta.analyzers.trace_counters import TraceCounters

    table = TraceCounters.get_queue_length_summary(container, ranks=[rank])
    if table is None:
        return []
    table = table["queue_length"].astype({"count": int}).reset_index()
    columns = {
        "stream": "stream",
        "changes": "count",
        "mean_operations": "mean",
        "least_operations": "min",
        "median_operations": "50%",
        "p75_operations": "75%",
        "most_operations": "max",
    }
    return _records(table, rank, columns)


def _kernel_launches(container: Any, rank: int) -> Records:
    """A summary of HTA's rows (one per launch), with the three kinds of outliers that its plots count."""
    from hta.analyzers.cuda_kernel_analysis import CudaKernelAnalysis

    table = CudaKernelAnalysis.cuda_kernel_launch_stats(container, ranks=[rank], visualize=False)[rank]
    if not len(table):
        return []
    record: dict[str, Any] = {"rank": rank, "launches": len(table)}
    for name, column in (
        ("call", "cpu_duration"),
        ("device", "gpu_duration"),
        ("launch_delay", "launch_delay"),
    ):
        record[f"{name}_median_us"] = _python_scalar(table[column].median())
        record[f"{name}_p95_us"] = _python_scalar(table[column].quantile(0.95))
    record["shorter_than_their_call"] = int((table["gpu_duration"] < table["cpu_duration"]).sum())
    record[f"calls_over_{_SLOW_CALL_US}_us"] = int((table["cpu_duration"] > _SLOW_CALL_US).sum())
    record[f"delays_over_{_LATE_START_US}_us"] = int((table["launch_delay"] > _LATE_START_US).sum())
    return [record]


def _records(table: Any, rank: int, columns: dict[str, str]) -> Records:
    """Rows of one of HTA's tables. ``columns`` maps ddpdoctor's names (with units) to HTA's."""
    rows = table[list(columns.values())].itertuples(index=False, name=None)
    return [{"rank": rank} | dict(zip(columns, map(_python_scalar, row), strict=True)) for row in rows]


def _python_scalar(value: Any) -> Any:
    """A numpy scalar as a Python one, rounded to 3 decimals; NaN and infinity as None."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value


_ANALYSES: dict[str, Callable[[Any, int], Records]] = {
    "temporal_breakdown": _temporal_breakdown,
    "overlap": _overlap,
    "idle_time": _idle_time,
    "queue_length": _queue_length,
    "kernel_launches": _kernel_launches,
}
