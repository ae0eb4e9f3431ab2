"""Which fields an event of each kind may have: what is written is held to it, and what is documented."""

from __future__ import annotations

from ddpdoctor.rundir.stepevents import EventField, EventKind

COMMON_FIELDS = (EventField.KIND, EventField.START_NS, EventField.DURATION_NS, EventField.WHERE)
"""Those that an event of any kind may have."""

_CALL_FIELDS = (
    EventField.OPERATION,
    EventField.GROUP,
    EventField.MESSAGE_BYTES,
    EventField.IS_ASYNC,
    EventField.SOURCE,
    EventField.DESTINATION,
)
FIELDS_OF: dict[EventKind, tuple[EventField, ...]] = {
    EventKind.DATA: (
        EventField.LOADER,
        EventField.COUNT,
        EventField.BATCHES_READY,
        EventField.ASLEEP_NS,
        EventField.EXHAUSTED,
    ),
    EventKind.ITERATION: (EventField.LOADER,),
    EventKind.FORWARD: (EventField.MODULE, EventField.ELEMENTS),
    EventKind.BROADCAST: (EventField.MODULE,),
    EventKind.EVALUATION: (EventField.COUNT,),
    EventKind.BACKWARD: (
        EventField.MODULE,
        EventField.SYNCED,
        EventField.FORWARD_END_NS,
        EventField.READY_NS,
        EventField.ALSO,
    ),
    EventKind.OPTIMIZER: (EventField.OPTIMIZER,),
    EventKind.COLLECTIVE: _CALL_FIELDS,
    EventKind.BARRIER: _CALL_FIELDS,
    EventKind.WAIT: (),
    EventKind.COLLECTION: (),
    EventKind.SAVE: (),
    EventKind.LOAD: (),
    EventKind.MORE: (EventField.COUNT,),
}
"""What an event of each kind may have besides."""
