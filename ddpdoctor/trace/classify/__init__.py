"""What an event is, by its name and category: the one classifier.

Names come in, as profilers of torch 1.8 and newer and the libraries of all vendors write them; out comes what they
mean: communication between ranks (and which), a copy (and which way), a step, a wait for the next batch, a wait for the
device. The functions are pure and are applied to the interned names of a trace (:meth:`RankTrace.name_mask`), not to
its events; those that take a trace give such a mask of its events.
"""

from .communication import (
    communication_kernels,
    communication_operation,
    is_communication_kernel,
    is_gloo,
)
from .device import DEVICE, DEVICE_WORK, device_work, is_optimizer_kernel, memcpy_kind
from .host import (
    IN_PROCESS,
    is_collection,
    is_dataloader,
    is_ddp_forward,
    is_optimizer_step,
    is_save,
    is_sync_call,
    next_batches,
    optimizer_steps,
    step_number,
)
