"""Notes on the limits of a recording that affect how its numbers are to be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.measure.graph import Graphs
from ddpdoctor.measure.metrics import critical_work
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.measure.window import RUNTIME_CALLS, Window


class _Tuning(msgspec.Struct, frozen=True):
    few_steps: int = 10
    """A run with fewer measured steps gets a note: they may not contain an event that occurs in every tenth step."""
    note_share: float = 0.1
    """Share of the step from which on time without a known cause, or added by the profiler, gets a note."""


_TUNING = _Tuning()


def caveats(graphs: Graphs, profiler_ns: float) -> list[str]:
    """Return the notes on one run's recording. ``profiler_ns``: time that the profiler adds to each cycle of the window."""
    return [
        *_not_matched(graphs),
        *([] if graphs.logs else [*_missing_ranks(graphs), *_missing_metadata(graphs)]),
        *(_missing_events(graphs) if graphs.primary_is_window else ()),
        *_no_window(graphs),
        *_profiler_overhead(graphs, profiler_ns),
        *_few_steps(graphs),
        *_unattributed_time(graphs),
    ]


def _not_matched(graphs: Graphs) -> Iterator[str]:
    """Why no collective was matched, or how many were not matched on all their ranks, with the reasons."""
    window = graphs.window
    if window is None:
        return
    if graphs.primary is window and window.refused:
        yield (
            f"Collectives could not be matched across ranks: {window.refused}. "
            "Waiting cannot be separated from transfer, so no rank is reported as late."
        )
    found = window.coverage
    if found is None or not found.incomplete:
        return
    reasons = [
        (
            found.outside_window,
            "lies outside a rank's recorded window",
            "lie outside a rank's recorded window",
        ),
        (found.event_missing, "lacks the event of a rank", "lack the event of a rank"),
        (
            found.rank_stopped,
            "comes after a rank's last recorded collective",
            "come after a rank's last recorded collective",
        ),
    ]
    parts = [(count, one if count == 1 else many) for count, one, many in reasons if count]
    why = ", ".join(f"{count} {what}" for count, what in parts)
    rest = f"the other {why}" if len(parts) == 1 else f"of the other {found.incomplete}, {why}"
    yield f"{found.complete} of {found.complete + found.incomplete} collectives were matched on all their ranks; {rest}."


def _missing_ranks(graphs: Graphs) -> Iterator[str]:
    if len(graphs.windows) == 1 and len(graphs.windows[0].collectives):
        yield (
            "The trace of one rank cannot show whether a collective was transferring data or waiting for a straggler. "
            "Record the same steps on all ranks."
        )
    worlds = (window.trace.meta.world_size for window in graphs.windows)
    world = next((size for size in worlds if size), None)
    if world is not None and 1 < len(graphs.windows) < world:
        yield (
            f"There are traces of {len(graphs.windows)} of {world} ranks. A missing rank may have been the last to arrive, "
            "so transfer times are upper bounds."
        )


def _missing_metadata(graphs: Graphs) -> Iterator[str]:
    metas = [window.trace.meta for window in graphs.windows]
    unnamed = [meta.source for meta in metas if not meta.rank_from]
    known = {
        "world size": any(meta.world_size for meta in metas),
        "backend": any(meta.backend for meta in metas),
    }
    unknown = [what for what, is_known in known.items() if not is_known]
    if unnamed and unknown:
        others = " and others" if len(unnamed) > 1 else ""
        yield (
            f"{unnamed[0]}{others}: the trace does not name its rank and job (no distributedInfo), so "
            f"{' and '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} unknown."
        )


def _missing_events(graphs: Graphs) -> Iterator[str]:
    """Notes on traces without host events, without kernels, or without step marks."""
    devices = [window for window in graphs.windows if window.on_device]
    found = [window for window in devices if not window.shows_host]
    if found:
        yield (
            f"The traces of {_ranks(found, devices)} contain no host events (operators, runtime calls). Why a device is idle there is "
            "unknown, and so is how fast the host could issue a step, so costs are upper bounds."
        )
    # Runtime calls but no kernels: an export without the table of kernels, or a profiler without access to the device.
    hosts = [window for window in graphs.windows if not window.on_device]
    found = [window for window in hosts if window.trace.category_mask(*RUNTIME_CALLS).any()]
    if found:
        yield (
            f"The traces of {_ranks(found, graphs.windows)} contain runtime calls (cuda_runtime) but no kernels. Compute is therefore the "
            "hosts' work only, and nothing is known about the devices. Record or export the kernels, too."
        )
    if graphs.primary.groups and not any(len(of.steps) for of in graphs.primary.steps):
        yield (
            "The traces mark no steps, so the whole recording is measured as one step: costs are per recording, and the speedup of a step "
            "is unknown."
        )


def _ranks(chosen: Sequence[Window], every: Sequence[Window]) -> str:
    return "all ranks" if len(chosen) == len(every) else f"{len(chosen)} of {len(every)} ranks"


def _no_window(graphs: Graphs) -> Iterator[str]:
    if graphs.primary_is_log and graphs.logs[0].on_device_time:
        yield (
            "Measured with CUDA events. They show when a phase began and ended on the device, not whether it was busy in between: waiting "
            "for kernel launches counts as compute."
        )
    if graphs.on_device and graphs.logs and not graphs.windows and not graphs.logs[0].on_device_time:
        yield (
            "No profiler window was recorded. On a GPU, step logs show when the host issued work, not when it ran, "
            "so causes are approximate."
        )


def _profiler_overhead(graphs: Graphs, profiler_ns: float) -> Iterator[str]:
    window_ms, added_ms = graphs.primary.mean_cycle_ns / 1e6, profiler_ns / 1e6
    if added_ms > _TUNING.note_share * window_ms:
        yield (
            f"With the profiler open, a step took {window_ms:.3g} ms instead of {window_ms - added_ms:.3g} ms: the profiler slows hosts, "
            "not devices. This overhead is not included in the costs."
        )


def _few_steps(graphs: Graphs) -> Iterator[str]:
    measured, more = graphs.timing.cycles, sum(graphs.timing.set_aside.values())
    if graphs.logs and 0 < measured < _TUNING.few_steps:
        excluded = f", {more} more {'were' if more > 1 else 'was'} excluded" if more else ""
        steps = "step was" if measured == 1 else "steps were"
        yield (
            f"Only {measured} {steps} measured{excluded}. What happens in so few steps may not persist, and occasional stalls and start-up "
            "costs may be missing. Record a longer run before you change anything."
        )


def _unattributed_time(graphs: Graphs) -> Iterator[str]:
    """A note if much of the critical path has no known cause, with the reason."""
    work = critical_work(graphs.primary)
    unseen, idle = work.get(Component.UNSEEN, 0.0), work.get(Component.IDLE, 0.0)
    if unseen + idle < _TUNING.note_share:
        return
    most = "" if min(unseen, idle) == 0.0 else "mostly, "
    why = (
        "the rank on the critical path was not yet being recorded, because the ranks' profiler windows begin at different times"
        if unseen >= idle
        else "a device was idle, and no events of its host were recorded"
    )
    yield f"{100 * (unseen + idle):.0f} % of the step cannot be attributed (other): {most}{why}."
