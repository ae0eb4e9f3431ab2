"""Limits of the recording that a reader of the numbers must know, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.measure.graph import Graphs
from ddpdoctor.measure.metrics import critical_work
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.measure.window import RUNTIME_CALLS, Window


class _Tuning(msgspec.Struct, frozen=True):
    few_steps: int = 10
    """A run with fewer measured steps gets a note: an event of every tenth step need not be among them."""
    much: float = 0.1
    """Share of the step from which on it is said why it is unknown what took the time."""


_TUNING = _Tuning()


def caveats(graphs: Graphs, profiler_ns: float) -> list[str]:
    """The limits of one run's recording, one sentence each; ``profiler_ns``: what the profiler adds to each of its
    cycles."""
    return [
        *_not_matched(graphs),
        *([] if graphs.logs else [*_missing_ranks(graphs), *_nameless(graphs)]),
        *(_unseen(graphs) if graphs.primary_is_window else ()),
        *_no_window(graphs),
        *_slower_hosts(graphs, profiler_ns),
        *_few_steps(graphs),
        *_much_unseen(graphs),
    ]


def _not_matched(graphs: Graphs) -> Iterator[str]:
    """Why no collective is matched, or how many lack members, and why."""
    window = graphs.window
    if window is None:
        return
    if graphs.primary is window and window.refused:
        yield (
            f"Collectives could not be matched across ranks: {window.refused}. "
            "Waiting and transfer cannot be separated, and no rank is reported as late."
        )
    found = window.coverage
    if found is None or not found.incomplete:
        return
    reasons = {
        "outside a rank's window": found.outside_window,
        "without events of a rank": found.event_missing,
        "of which a rank has no more although its window goes on": found.rank_stopped,
    }
    why = "; ".join(f"{count} {what}" for what, count in reasons.items() if count)
    yield f"{found.complete} of {found.complete + found.incomplete} collectives were matched on all their ranks; not matched: {why}."


def _missing_ranks(graphs: Graphs) -> Iterator[str]:
    if len(graphs.windows) == 1 and len(graphs.windows[0].collectives):
        yield (
            "One rank's trace cannot show whether its collectives were transferring or waiting for a late "
            "rank. Record the same steps on all ranks."
        )
    worlds = (window.trace.meta.world_size for window in graphs.windows)
    world = next((size for size in worlds if size), None)
    if world is not None and 1 < len(graphs.windows) < world:
        yield (
            f"Traces of {len(graphs.windows)} of {world} ranks: a missing rank may have been the last to arrive, "
            "so transfer times are upper bounds."
        )


def _nameless(graphs: Graphs) -> Iterator[str]:
    metas = [window.trace.meta for window in graphs.windows]
    nameless = [meta.source for meta in metas if not meta.rank_from]
    known = {
        "world size": any(meta.world_size for meta in metas),
        "backend": any(meta.backend for meta in metas),
    }
    unknown = [what for what, is_known in known.items() if not is_known]
    if nameless and unknown:
        others = " and others" if len(nameless) > 1 else ""
        yield (
            f"{nameless[0]}{others}: the trace does not name its rank and job (no distributedInfo), so "
            f"{' and '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} unknown."
        )


def _unseen(graphs: Graphs) -> Iterator[str]:
    """Traces that show only devices, only hosts, or no steps."""
    devices = [window for window in graphs.windows if window.on_device]
    unseen = [window for window in devices if not window.shows_host]
    if unseen:
        yield (
            f"The traces of {_some(unseen, devices)} do not show what the host did (operators, runtime calls): why a device idles there "
            "is unknown, and so is how fast the host could issue a step: prices are upper bounds."
        )
    # Runtime calls but no kernels: an export without its table of kernels, or a profiler without access to the device.
    hosts = [window for window in graphs.windows if not window.on_device]
    unseen = [window for window in hosts if window.trace.category_mask(*RUNTIME_CALLS).any()]
    if unseen:
        yield (
            f"The traces of {_some(unseen, graphs.windows)} show calls of the device's runtime, but no kernel: what the devices did is "
            "missing, so compute means the hosts' own work here, and nothing is said of the devices. Record, or export, the kernels too."
        )
    if graphs.primary.groups and not any(len(of.steps) for of in graphs.primary.steps):
        yield (
            "The traces mark no steps: the whole recording is measured as one step. Costs are those of the recording, and how much faster "
            "a step would be is unknown."
        )


def _some(chosen: Sequence[Window], every: Sequence[Window]) -> str:
    return "all ranks" if len(chosen) == len(every) else f"{len(chosen)} of {len(every)} ranks"


def _no_window(graphs: Graphs) -> Iterator[str]:
    if graphs.primary_is_log and graphs.logs[0].on_device_time:
        yield (
            "Measured by CUDA events, which show when a device began and ended a phase, not whether it was busy in between: where it waits "
            "for launches, that counts as computation."
        )
    if graphs.on_device and graphs.logs and not graphs.windows and not graphs.logs[0].on_device_time:
        yield (
            "No profiler window was recorded: on a GPU, step logs show when the host issued work, not when it ran. "
            "Causes are approximate."
        )


def _slower_hosts(graphs: Graphs, profiler_ns: float) -> Iterator[str]:
    window_ms, added_ms = graphs.primary.mean_cycle_ns / 1e6, profiler_ns / 1e6
    if added_ms > _TUNING.much * window_ms:
        yield (
            f"While the profiler was open, a step took {window_ms:.3g} ms instead of {window_ms - added_ms:.3g} ms: it slows hosts, not "
            "devices. What devices wait longer for their hosts by that is no part of the costs."
        )


def _few_steps(graphs: Graphs) -> Iterator[str]:
    """A note for a run of few measured steps."""
    measured, aside = graphs.timing.cycles, sum(graphs.timing.set_aside.values())
    if graphs.logs and 0 < measured < _TUNING.few_steps:
        left_out = f", and {aside} more {'are' if aside > 1 else 'is'} left out" if aside else ""
        steps = "step is" if measured == 1 else "steps are"
        yield (
            f"Only {measured} {steps} measured{left_out}: what happens in so few need not last, and what stops the job now and "
            "then, or at the start, is missing. Record a longer run before you change anything."
        )


def _much_unseen(graphs: Graphs) -> Iterator[str]:
    """Why it is unknown what took much of the critical path."""
    work = critical_work(graphs.primary)
    unseen, idle = work.get(Component.UNSEEN, 0.0), work.get(Component.IDLE, 0.0)
    if unseen + idle < _TUNING.much:
        return
    why = (
        "the ranks' profiler windows begin at different times, and the critical path runs through one that had not begun"
        if unseen >= idle
        else "a device idles there, and nothing was recorded of its host"
    )
    yield f"{100 * (unseen + idle):.0f} % of the step cannot be attributed (other): {why}."
