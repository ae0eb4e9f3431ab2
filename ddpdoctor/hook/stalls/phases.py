"""In which phase of a step a stack is, by the functions of torch on it."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

from ...rundir import Phase
from ..patching import UNCOUNTED_FILE

ANY: FrozenSet[str] = frozenset()
"""All functions of a file."""
_COLLECTIVES = frozenset(
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_single _all_gather_base all_gather_object all_reduce "
    "all_reduce_coalesced all_to_all all_to_all_single broadcast broadcast_object_list gather gather_object recv "
    "recv_object_list reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single _reduce_scatter_base scatter "
    "scatter_object_list send send_object_list batch_isend_irecv isend irecv".split()
)
_PLACES: Dict[str, Tuple[Tuple[FrozenSet[str], Phase], ...]] = {
    "torch/utils/data/dataloader.py": (
        (frozenset(["__next__", "__iter__", "__init__", "_reset"]), Phase.DATA),
    ),
    "torch/autograd/__init__.py": ((frozenset(["backward", "grad"]), Phase.BACKWARD),),
    "torch/autograd/graph.py": ((frozenset(["_engine_run_backward"]), Phase.BACKWARD),),
    "torch/nn/modules/module.py": (
        (frozenset(["_call_impl", "_wrapped_call_impl", "__call__"]), Phase.FORWARD),
    ),
    "torch/nn/parallel/distributed.py": (
        (frozenset(["forward", "_pre_forward", "_run_ddp_forward", "_post_forward"]), Phase.FORWARD),
        (ANY, Phase.COLLECTIVE),
    ),
    "torch/distributed/distributed_c10d.py": (
        (frozenset(["barrier", "monitored_barrier"]), Phase.BARRIER),
        (_COLLECTIVES, Phase.COLLECTIVE),
        (
            frozenset(
                ["init_process_group", "new_group", "_new_process_group_helper", "_store_based_barrier"]
            ),
            Phase.RENDEZVOUS,
        ),
    ),
    "torch/distributed/utils.py": (
        (frozenset(["_verify_param_shape_across_processes", "_sync_module_states"]), Phase.COLLECTIVE),
    ),
    "torch/distributed/rendezvous.py": ((ANY, Phase.RENDEZVOUS),),
    "torch/serialization.py": (
        (frozenset(["save", "_save", "_legacy_save"]), Phase.SAVE),
        (frozenset(["load", "_load", "_legacy_load"]), Phase.LOAD),
    ),
    "torch/distributed/checkpoint/state_dict_saver.py": ((ANY, Phase.SAVE),),
    "torch/distributed/checkpoint/state_dict_loader.py": ((ANY, Phase.LOAD),),
    "bdb.py": ((ANY, Phase.DEBUGGER),),
    "pdb.py": ((ANY, Phase.DEBUGGER),),
}
"""By the end of a file's path: functions, and what they are part of; what stands first counts."""
_FOLDERS = (
    ("/torch/optim/", Phase.OPTIMIZER),
    ("/debugpy/", Phase.DEBUGGER),
    ("/pydevd", Phase.DEBUGGER),
    ("/IPython/terminal/debugger", Phase.DEBUGGER),
)
_BY_NAME: Dict[str, List[str]] = {place.rpartition("/")[2]: [] for place in _PLACES}
for _place in _PLACES:
    _BY_NAME[_place.rpartition("/")[2]].append(_place)


_COMPILING = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")
"""What is called from here compiles, whatever it calls."""


def phase_of(frames: Sequence[Sequence[Any]]) -> Phase:
    """Of (file, line, function), innermost first: the phase of the innermost one that belongs to one."""
    if frames and frames[0][0] == UNCOUNTED_FILE and not _is_of_collectives(frames[1:2]):
        # Of what is wrapped, only the wait for an asynchronous collective has no Python in it.
        return Phase.WAIT
    if any(file.endswith(_COMPILING) for file, _, _ in frames):
        return Phase.COMPILE
    for file, _, function in frames:
        found = _phase(file, function)
        if found is not None:
            return found
    return Phase.OTHER


def _is_of_collectives(frames: Sequence[Sequence[Any]]) -> bool:
    return any(file.endswith("/distributed_c10d.py") for file, _, _ in frames)


def _phase(file: str, function: str) -> Optional[Phase]:
    name = function.rpartition(".")[2]
    for place in _BY_NAME.get(file.rpartition("/")[2], ()):
        if file == place or file.endswith("/" + place):
            for functions, phase in _PLACES[place]:
                if not functions or name in functions:
                    return phase
    for folder, phase in _FOLDERS:
        if folder in file:
            return phase
    return None
