"""The job's DDP modules, data loaders, optimizers and source lines, by number.

Input: the job's objects, stack frames and code. Output: the numbers used for them in events, and their descriptions in
rank.json. Objects are held weakly and described before they are freed. A line counts as the user's if its file does not
belong to torch, the standard library or the hook; it is written once, before its number is first used. Optimizers also
have roles, which determine where a step ends.
"""

from .ddp_models import Loaders, Models, OpenForward, data_parallel_built
from .registry import (
    MOST_LISTED,
    Listed,
    NumberedWeakMap,
    batch_size,
    input_elements,
    record_construction,
    tensor_bytes,
    uses_worker_info,
)
from .roles import Role, Roles
from .source_lines import MOST_FRAMES, CodeKinds, Lines, calling_frame, place_of
from .torch_objects import (
    backend_of,
    describe_ddp,
    describe_loader,
    describe_optimizer,
    device,
    group_name,
    job_torch,
    process_groups,
    torch_settings,
)
