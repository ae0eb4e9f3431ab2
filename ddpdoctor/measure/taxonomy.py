"""The vocabulary of the analysis: kinds of work, synchronisations, causes, parts of a step, and how they relate.

Code that counts, prices or draws work takes its names from here. A component may count differently in different tables. Launching is
host work where one rank is late (:data:`LATE_COMPONENTS`); launching that all ranks have in common is a cause of its own, with its own
fix (:data:`SHARED_COMPONENTS`). The optimizer is computation in the breakdown of a step (:data:`PART_OF`) and in device time
(:data:`RARE_ON_DEVICE`); as a cause it is separate, since its fix is another one.

To add a cause: a member here with its components, or with a pricer in ``costs``; and a rule in ``rules``. See docs/architecture.md.
"""

from __future__ import annotations

from enum import StrEnum


class Component(StrEnum):
    """A kind of work in a segment between two synchronisations. The components of a segment add up to its length."""

    DATA = "data"
    """Waiting for the next batch."""
    EPOCH_START = "epoch_start"
    """Waiting for the first batches of a pass over the loader, while its workers start."""
    COPY = "copy"
    """Copies from the host to the device."""
    FORWARD = "forward"
    """The forward pass, and any computation that belongs to no other component."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LOSS = "loss"
    """Operators in a gap between phases that a step needs: a loss, clipping of gradients, the forward of an unmarked model. See
    :func:`ddpdoctor.measure.phases.gap_component`."""
    OUTSIDE = "outside"
    """Operators in any other gap, such as from the optimizer's step to the next forward pass."""
    COLLECTION = "collection"
    """Python's garbage collection."""
    CHECKPOINT = "checkpoint"
    DEVICE_SYNC = "device_sync"
    """The device idles because its host waited for it."""
    LAUNCH = "launch"
    """The device idles between kernels while the host issues them."""
    HOST = "host"
    """Python work outside the other components, and all host time there where Python and operators cannot be separated; on a device: no
    kernel runs, for no reason among the other components."""
    UNMATCHED = "unmatched"
    """Exposed time in collectives that could not be matched: waiting and transfer cannot be separated."""
    UNSEEN = "unseen"
    """The time before the rank's own window began."""
    IDLE = "idle"
    """The device idles, and nothing was recorded of what its host did: neither work nor waiting."""


COMPONENTS = tuple(Component)
"""The last axis of arrays of work, in this order."""
INDEX: dict[str, int] = {component: place for place, component in enumerate(COMPONENTS)}
"""Component → its place on that axis."""


class SyncKind(StrEnum):
    """Where ranks, or a rank and its device, wait for each other."""

    GRADIENTS = "gradients"
    """DDP's reduction after one backward pass, or what a job does instead."""
    BARRIER = "barrier"
    COLLECTIVE = "collective"
    """A blocking collective called from Python."""
    BROADCAST = "broadcast"
    """DDP's, of buffers."""
    MODEL = "model"
    """Of the model itself: tensor, pipeline, expert or embedding parallelism, sharded parameters."""
    STEP_END = "step end"
    """A mark without any waiting, for jobs of one rank."""
    DEVICE_SYNC = "device_sync"
    """A host's waiting for its own device: no collective, but what lets the device run dry as barriers do."""


class Part(StrEnum):
    """A part of the breakdown of a step; the parts do not overlap and add up to it."""

    DATA_WAIT = "data_wait"
    H2D = "h2d"
    COMPUTE = "compute"
    COMM_WAIT = "comm_wait"
    COMM_TRANSFER = "comm_transfer"
    BARRIER = "barrier"
    HOST = "host"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


PARTS = tuple(Part)
"""In the order in which reports show them."""


class LateCause(StrEnum):
    """Why some ranks arrive later than the others: the names of the facts under ``late``, and what each is."""

    DATA = "data"
    """Waiting for the data loader."""
    COPY = "copy"
    """Host-to-device copies."""
    COMPUTE = "compute"
    """Forward, backward (GPU: kernels; CPU: the thread's own work)."""
    UNEVEN = "uneven"
    """The part of ``compute`` explained by more samples or larger shapes on the late rank."""
    OPTIMIZER = "optimizer"
    """The optimizer's step."""
    HOST = "host"
    """The rank's own work outside forward, backward, optimizer and data, both Python and operators; on a GPU: gaps without kernels, and
    kernels that were launched there."""
    COLLECTION = "collection"
    """Python garbage collection."""
    CHECKPOINT = "checkpoint"
    """torch.save and distributed checkpoints."""
    EVALUATION = "evaluation"
    """Evaluation on these ranks alone, in steps that are excluded: what sharing it among all ranks saves, spread over all steps."""
    CPU_STARVED = "cpu_starved"
    """Runnable but without a CPU (scheduler's run delay)."""
    THROTTLED = "throttled"
    """The part of ``compute`` explained by lowered GPU clocks on the late rank."""
    UNKNOWN = "unknown"
    """Lateness for which no activity was recorded."""
    TURNS = "turns"
    """Lateness of different ranks in different steps: no single rank is the culprit, all ranks are concerned. Its ``period_steps`` is
    the number of ranks if the step number decides which rank is late, else null."""
    TOTAL = "total"
    """All lateness, of any cause: the step time if no rank were late."""


class SharedCause(StrEnum):
    """What all ranks spend: the names of the facts under ``shared``, and what each is."""

    DATA = "data"
    """Waiting for the data loader, after the first batches of a pass."""
    DATA_EPOCH_START = "data_epoch_start"
    """The first batches of each pass over the loader (worker start), without the ordinary wait."""
    COPY = "copy"
    """Host-to-device copies."""
    OPTIMIZER = "optimizer"
    """The optimizer's step."""
    HOST = "host"
    """Python work outside forward, backward, optimizer and data, and outside of operators."""
    IDLE = "idle"
    """The devices are idle, in no collective, and what their hosts did was not recorded: the devices had no work, for an unknown
    reason."""
    OUTSIDE = "outside"
    """Everything between the optimizer's step and the next forward pass except the wait for data: operators, and the Python work
    of ``host``."""
    BARRIER = "barrier"
    """Explicit barriers: what steps save if ranks do not synchronize there, and hosts do not wait there for their devices, which are
    idle afterwards (see ``device_sync``)."""
    COLLECTIVE = "collective"
    """Blocking collectives called from Python (metrics), without DDP's own; including the idle time of devices whose hosts
    wait for the result."""
    DEVICE_SYNC = "device_sync"
    """The device is idle because the host waited for it: .item(), .cpu(), synchronize, copies from pageable memory. All
    such calls of a step together; no more than the host would be ahead without them."""
    CHECKPOINT = "checkpoint"
    """torch.save and distributed checkpoints."""
    COLLECTION = "collection"
    """Python garbage collection."""
    COMMUNICATION = "communication"
    """Exposed transfer of gradients: no rank is late, and too little computation is left to hide it."""
    MODEL_COMMUNICATION = "model_communication"
    """Exposed transfer of the model's own collectives on a device, such as all-to-all and all-gather."""
    BROADCAST = "broadcast"
    """DDP's broadcast of buffers before each forward pass."""
    LAUNCH = "launch"
    """The GPU is idle because kernels are launched too slowly."""
    REDUNDANT_SYNC = "redundant_sync"
    """Gradient reductions in all micro-batches of a step except the last."""
    SMALL_BUCKETS = "small_buckets"
    """Per-message cost that fewer, larger buckets would save (what-if estimate with the best bucket size)."""
    NO_OVERLAP = "no_overlap"
    """Transfer that could have been hidden behind the backward pass, but was not."""
    CPU_STARVED = "cpu_starved"
    """Runnable but without a CPU (scheduler's run delay): what all ranks lose."""


Components = tuple[Component, ...]

WAITING_FOR_DATA: Components = (Component.DATA, Component.EPOCH_START)
COMPUTATION: Components = (Component.FORWARD, Component.BACKWARD)
HOST_IDLE: Components = (Component.DEVICE_SYNC, Component.LAUNCH, Component.HOST)
"""A device's idle time that its host causes; on a CPU only ``host`` occurs."""
BETWEEN_PHASES: Components = (Component.LOSS, Component.OUTSIDE)
"""Operators between the phases."""
PHASES: Components = (*COMPUTATION, Component.OPTIMIZER)
"""What each step computes."""
DEVICE_COMPUTATION: Components = (*PHASES, *BETWEEN_PHASES)
"""What kernels other than collectives do, in all phases."""
DEVICE_WORK: Components = (Component.COPY, *DEVICE_COMPUTATION)
"""What a device does, and can do concurrently with a collective."""

NO_WORK: Components = (Component.UNMATCHED, Component.UNSEEN, Component.IDLE)
"""No known work: collectives that could not be matched, and time of which nothing was recorded."""

LATE_COMPONENTS: dict[LateCause, Components] = {
    LateCause.DATA: WAITING_FOR_DATA,
    LateCause.COPY: (Component.COPY,),
    LateCause.COMPUTE: COMPUTATION,
    LateCause.OPTIMIZER: (Component.OPTIMIZER,),
    LateCause.HOST: (Component.HOST, Component.LAUNCH, Component.DEVICE_SYNC, *BETWEEN_PHASES),
    LateCause.COLLECTION: (Component.COLLECTION,),
    LateCause.CHECKPOINT: (Component.CHECKPOINT,),
    LateCause.UNKNOWN: NO_WORK,
}
"""Causes of lateness that are kinds of work → their components, each of which belongs to one cause."""

RECORDED: frozenset[LateCause] = frozenset(
    {LateCause.DATA, LateCause.COPY, LateCause.COLLECTION, LateCause.CHECKPOINT}
)
"""Causes that are recorded as such: an outlier is real even where each rank has it in other steps. Then no single rank is the culprit,
and the cause is common to all."""

SHARED_COMPONENTS: dict[str, Components] = {
    SharedCause.DATA: (Component.DATA,),
    SharedCause.DATA_EPOCH_START: (Component.EPOCH_START,),
    SharedCause.COPY: (Component.COPY,),
    SharedCause.OPTIMIZER: (Component.OPTIMIZER,),
    SharedCause.HOST: (Component.HOST,),
    SharedCause.IDLE: (Component.IDLE,),
    SharedCause.OUTSIDE: (Component.HOST, Component.OUTSIDE),
    SharedCause.CHECKPOINT: (Component.CHECKPOINT,),
    SharedCause.COLLECTION: (Component.COLLECTION,),
    SharedCause.LAUNCH: (Component.LAUNCH,),
}
"""Causes common to all ranks that are kinds of work → their components."""

SHARED_SYNCS: dict[SharedCause, SyncKind] = {
    SharedCause.BARRIER: SyncKind.BARRIER,
    SharedCause.COLLECTIVE: SyncKind.COLLECTIVE,
    SharedCause.DEVICE_SYNC: SyncKind.DEVICE_SYNC,
    SharedCause.BROADCAST: SyncKind.BROADCAST,
}
"""Causes common to all ranks that are synchronisations, priced by a replay without them."""

SHARED_TRANSFERS: dict[SharedCause, SyncKind] = {
    SharedCause.COMMUNICATION: SyncKind.GRADIENTS,
    SharedCause.MODEL_COMMUNICATION: SyncKind.MODEL,
}
"""Causes common to all ranks that are exposed transfers, priced by a replay in which they take no time."""

STALLS: dict[str, Components] = {
    LateCause.DATA: (Component.DATA,),
    LateCause.COLLECTION: (Component.COLLECTION,),
    LateCause.CHECKPOINT: (Component.CHECKPOINT,),
}
"""What stops the host of a device, and is recorded as such."""
RARE_ON_HOST: dict[str, Components] = {**STALLS, LateCause.HOST: (Component.HOST,)}
"""What stops the host of a device occasionally, as its step log shows it. ``host`` and waiting can be separated by lateness only."""
RARE_ON_DEVICE: dict[str, Components] = {**RARE_ON_HOST, LateCause.COMPUTE: DEVICE_COMPUTATION}
"""The same of device time, which also has computation."""

STANDALONE: dict[str, Components] = {
    LateCause.DATA: (Component.DATA,),
    LateCause.HOST: HOST_IDLE,
}
"""Kinds of work that can hide in the wait for other ranks: meanwhile loaders prepare batches and hosts issue work."""

PART_OF: dict[Component, Part] = {
    Component.DATA: Part.DATA_WAIT,
    Component.EPOCH_START: Part.DATA_WAIT,
    Component.COPY: Part.H2D,
    Component.FORWARD: Part.COMPUTE,
    Component.BACKWARD: Part.COMPUTE,
    Component.OPTIMIZER: Part.COMPUTE,
    Component.LOSS: Part.COMPUTE,
    Component.OUTSIDE: Part.COMPUTE,
    Component.COLLECTION: Part.HOST,
    Component.CHECKPOINT: Part.CHECKPOINT,
    Component.DEVICE_SYNC: Part.HOST,
    Component.LAUNCH: Part.HOST,
    Component.HOST: Part.HOST,
    Component.UNMATCHED: Part.COMM_TRANSFER,
    Component.UNSEEN: Part.OTHER,
    Component.IDLE: Part.OTHER,
}
"""Component of the work → part of the breakdown, on devices."""


def part_of(component: Component, on_device: bool) -> Part:
    """The part of the breakdown that a component of the work belongs to. Operators between the phases that run on CPUs, other than the
    loss, are host work: they are part of the script's own code there, as findings say."""
    if component is Component.OUTSIDE and not on_device:
        return Part.HOST
    return PART_OF[component]


def drawn_as(component: Component, on_device: bool) -> str:
    """The kind of a component in a timeline: a part of the breakdown, and computation by its phases."""
    return component if component in PHASES else part_of(component, on_device)
