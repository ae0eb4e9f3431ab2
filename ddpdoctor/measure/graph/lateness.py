"""How late each rank arrives at each synchronisation of its cycle, and where it became so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, nan_median
from ddpdoctor.measure.taxonomy import SyncKind

if TYPE_CHECKING:
    from .graph import CycleGroup

_RELEASES = 0.5
"""Mean probability over the members, from which they wait for a collective: as likely as not."""


class Lateness(msgspec.Struct, frozen=True):
    """Lateness of each rank at each synchronisation, [N, K, R] ns; 0 at step ends, at which the ranks do not meet: which steps of different
    ranks are the same is then unknown. NaN if the rank takes no part."""

    signed: Array
    """How much later than the median member it is (with two members: than the other one); negative if it is earlier. A wait for members of
    an earlier synchronisation does not count as lateness for others."""
    gained: Array
    """The part of the lateness that the rank did not yet have at an earlier synchronisation, at least 0."""


def lateness_of(group: CycleGroup) -> Lateness:
    """Return the lateness at each synchronisation.

    A synchronisation *releases* its members if their work waits for its end; on a device, buckets that are reduced during the backward
    pass do not. Between the members of a synchronisation, only what happened since their last common release counts. What a member has
    waited for others since then is not its lateness; what it has gained since then, or was late at that release (of a broadcast, which
    members may leave one by one), it has not gained again. On a device, the time is when the rank was ready, because a part that is
    queued behind other collectives arrives later.
    """
    own = (
        np.minimum(group.ready, group.arrival - _inherited_wait(group)) if group.on_device else group.arrival
    )
    waits = group.waits_for_end if group.on_device else np.ones(own.shape[1:])
    waited = (group.wait - group.concurrent_compute_in_wait) * waits
    signed, gained = np.where(np.isnan(group.arrival), np.nan, 0.0), np.zeros(own.shape)
    sets = {sync.members: frozenset(sync.members) for sync in group.syncs}
    # [2, N, R]: what each rank has waited in this cycle, and the lateness that it has gained; and by members, from where both count.
    since_begin = np.zeros((2, *group.begin.shape))
    counted_from = dict.fromkeys(sets, since_begin.copy())
    for k, sync in enumerate(group.syncs):
        members = list(sync.members)
        if sync.kind == SyncKind.STEP_END:
            continue
        waited_since, gained_since = (since_begin - counted_from[sync.members])[:, :, members]
        time = own[:, k, members] - waited_since
        signed[:, k, members] = time - typical_arrival(time)
        gained[:, k, members] = np.clip(signed[:, k, members] - gained_since, 0, None)
        since_begin = since_begin.copy()
        since_begin[0][:, members] += np.clip(waited[:, k, members], 0, None)
        since_begin[1][:, members] += gained[:, k, members]
        if waits[k, members].mean() >= _RELEASES:
            for of in (of for of, ranks in sets.items() if ranks <= sets[sync.members]):
                counted_from[of] = since_begin
                if sync.root is not None:
                    left = group.released[:, k, list(of)]
                    counted_from[of] = since_begin.copy()
                    counted_from[of][1][:, list(of)] -= np.clip(left - typical_arrival(left), 0, None)
    return Lateness(signed, gained)


def typical_arrival(arrival: Array) -> Array:
    """Return [..., 1] when the median rank arrives, for arrivals [..., R] with NaN for non-members. With two members it is the first
    arrival, because the other rank causes the whole wait."""
    of_two = (~np.isnan(arrival)).sum(axis=-1, keepdims=True) == 2
    middle = nan_median(arrival, axis=-1, keepdims=True)
    return np.where(of_two, np.nan_to_num(arrival, nan=np.inf).min(axis=-1, keepdims=True), middle)


def _inherited_wait(group: CycleGroup) -> Array:
    """[N, K, R] ns that a rank waited in an earlier collective of only some members, behind which this one was queued. If no launch was
    recorded, the rank was ready before its arrival by at least this."""
    inherited = np.zeros(group.arrival.shape)
    wait = group.wait
    for k, sync in enumerate(group.syncs):
        for j in np.unique(group.queued_after[:, k]):
            if j >= 0 and not set(sync.members) <= set(group.syncs[j].members):
                queued = group.queued_after[:, k] == j
                inherited[:, k] = np.where(queued, wait[:, j] + inherited[:, j], inherited[:, k])
    return inherited
