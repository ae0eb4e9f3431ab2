"""Builds the graphs of a run, and chooses the primary one, from which causes are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.steplog import RankLog, in_device_time
from ddpdoctor.measure.window import Window
from ddpdoctor.rundir.stepevents import EventKind

from .from_logs import OperatorShares, graph_of_logs, operator_shares
from .from_windows import graph_of_windows
from .graph import Graph, RankSteps


class Recording(StrEnum):
    """Recordings that can be the primary one."""

    HOST_LOG = "host-log"
    DEVICE_LOG = "device-log"
    WINDOW = "window"


_WHY = {
    Recording.HOST_LOG: "On CPUs, the hosts' clocks show when work was done, in every step of the run.",
    Recording.DEVICE_LOG: "CUDA events show when devices did the work of every step, and no profiler window shows as many ranks.",
    Recording.WINDOW: "Hosts only issue work: the profiler window shows when their devices did it.",
}
_NO_LOGS = "There are no step logs, only traces."
_MORE_WINDOWS = "The profiler window shows more ranks than have a step log: waiting for a rank that was not recorded looks like transfer."
_NO_WINDOW = (
    "No profiler window could be used: the step logs show when hosts issued work, not when devices did it."
)


class Graphs(msgspec.Struct, frozen=True):
    """All graphs of a run, and the primary one, from which causes are measured."""

    recording: Recording
    """The primary recording."""
    why: str
    """Why this recording is primary, as a sentence for the user."""
    primary: Graph
    log: Graph | None
    """Graph of the step logs; in device time if that is the primary recording."""
    window: Graph | None
    device: Graph | None
    """Graph of the step logs in device time, for rare slow steps of devices; only if the window is the primary recording."""
    logs: Sequence[RankLog]
    """The logs that ``log`` was built from."""
    device_logs: Sequence[RankLog]
    """The logs that ``device`` was built from."""
    windows: Sequence[Window]
    """On the run's clock."""
    operator_shares: Mapping[int, OperatorShares]
    """See :func:`operator_shares`."""
    on_device: bool
    """Whether the job computes on devices."""

    @property
    def timing(self) -> Graph:
        """The graph from which step times are reported: that of the step logs if it has cycles, else the primary one."""
        return self.log if self.log is not None and self.log.groups else self.primary

    @property
    def primary_is_log(self) -> bool:
        """Whether the primary graph is built from step logs, by the host's clock or in device time."""
        return self.primary is self.log

    @property
    def primary_is_window(self) -> bool:
        """Whether the profiler window is the primary recording."""
        return self.recording is Recording.WINDOW

    @property
    def log_beside_window(self) -> Graph | None:
        """The graph of the step logs if the profiler window is the primary recording; None if it has no cycles."""
        return self.log if self.primary_is_window and self.log is not None and self.log.groups else None

    @property
    def operators_seen(self) -> bool:
        """Whether the operators outside forward, backward and optimizer were recorded on every rank."""
        seen = sum(shares.measured for shares in self.operator_shares.values())
        return self.primary_is_window or seen == len(self.logs)


def build_graphs(logs: Sequence[RankLog], windows: Sequence[Window]) -> Graphs:
    """Build the graphs of logs and windows, which are on one clock and ordered by rank; at most one of them may be empty.

    For jobs on CPUs the step logs are primary, because the hosts' clocks show when work was done. With a device the host only issues
    work, so the profiler window is primary; step times, settings and source lines still come from the step logs. The window is also
    primary if it has more ranks than there are step logs: what looks like transfer in the logs may be waiting for the missing ranks. If
    the run was timed by CUDA events, device time is primary if fewer ranks have a window than a log. Otherwise it shows what slowed a
    device outside the window.
    """
    timed = in_device_time(logs)
    on_cuda = any(str(log.record.info.get("device") or "").startswith("cuda") for log in logs)
    on_device = timed is not None or any(window.on_device for window in windows) or on_cuda
    window_graph, aligned = graph_of_windows(windows) if windows else (None, [])
    shares = {} if on_device else operator_shares(logs, aligned)
    more_windows = len(windows) > len(logs)
    window_seen = (on_device or more_windows) and window_graph is not None and window_graph.cycles > 0
    windows_of_all = window_seen and len(windows) >= len(logs)
    if timed is not None and not windows_of_all and not _synchronise_on_hosts(logs):
        recording, own_logs = Recording.DEVICE_LOG, timed
        log_graph: Graph | None = graph_of_logs(timed)
    else:
        log_graph, own_logs = (graph_of_logs(logs, shares) if logs else None), list(logs)
        recording = Recording.WINDOW if window_seen or log_graph is None else Recording.HOST_LOG
    why = _WHY[recording]
    if recording is Recording.WINDOW and more_windows:
        why = _MORE_WINDOWS if logs else _NO_LOGS
    elif recording is Recording.HOST_LOG and on_device:
        why = _NO_WINDOW
    if window_graph is not None and log_graph is not None:
        window_graph = _with_amounts_of_logs(window_graph, log_graph)
    primary = window_graph if recording is Recording.WINDOW else log_graph
    assert primary is not None, "neither step logs nor windows"
    return Graphs(
        recording=recording,
        why=why,
        primary=primary,
        log=log_graph,
        window=window_graph,
        device=graph_of_logs(timed) if timed is not None and recording is Recording.WINDOW else None,
        logs=own_logs,
        device_logs=timed or [],
        windows=aligned,
        operator_shares=shares,
        on_device=on_device,
    )


def _with_amounts_of_logs(graph: Graph, log_graph: Graph) -> Graph:
    """The graph of windows with the amounts of work that step logs recorded of the same steps. A window has no samples, and elements
    only if shapes were recorded. Those count other operators than the logs', so the two are never mixed."""
    own = dict(zip(log_graph.ranks, log_graph.steps, strict=True))
    shapes = any(not np.isnan(steps.elements).all() for steps in graph.steps)
    filled = []
    for rank, steps in zip(graph.ranks, graph.steps, strict=True):
        known = own.get(rank)
        if known is not None:
            elements = steps.elements if shapes else _in_steps(known.elements, known, steps)
            steps = replace(steps, samples=_in_steps(known.samples, known, steps), elements=elements)
        filled.append(steps)
    return replace(graph, steps=filled)


def _in_steps(values: Array, of: RankSteps, wanted: RankSteps) -> Array:
    """``values`` of the steps ``of`` for the steps ``wanted``, by number; NaN for others."""
    by_number = dict(zip(of.steps.tolist(), values.tolist(), strict=True))
    return np.array([by_number.get(number, np.nan) for number in wanted.steps.tolist()], float)


def _synchronise_on_hosts(logs: Sequence[RankLog]) -> bool:
    """Whether most steps recorded in full have collectives called from Python, which logs in device time lack."""
    calls = [
        any(event.kind in (EventKind.COLLECTIVE, EventKind.BARRIER) for event in step.events)
        for log in logs
        for step in log.steps
        if step.in_full
    ]
    return sum(calls) * 2 > len(calls)
