"""What the job is made of, by number: its DDP modules, data loaders and optimizers, and its source lines.

In come the job's own objects, stack frames and code; out go the numbers by which events name them, and what rank.json says
of each. Things are held weakly and described while they live. A line is the user's where the file is: not torch's, not the
standard library's, not ours; it is written down once, before its number is first used. Optimizers have roles as well, by which
the steps are told.
"""

from .ddp_models import Loaders, Models, OpenForward, data_parallel_built
from .registry import (
    MOST_LISTED,
    Listed,
    Numbered,
    asks_for_worker,
    batch_size,
    input_elements,
    record_construction,
)
from .roles import Role, Roles
from .source_lines import MOST_FRAMES, Kinds, Lines, calling_frame, place_of
from .torch_objects import (
    describe_ddp,
    describe_loader,
    describe_optimizer,
    device,
    group_name,
    job_torch,
    process_groups,
    torch_settings,
)
