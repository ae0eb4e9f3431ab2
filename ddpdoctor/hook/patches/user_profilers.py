"""The constructors of torch's profilers: whether the job profiles itself."""

from __future__ import annotations

import importlib
from typing import Any

from ..guard import part
from ..patching import Patches, around
from ..profiling import constructed

_PART = part("detection of other profilers")
_CLASSES = {
    "torch.profiler.profiler": ("_KinetoProfile",),
    "torch.autograd.profiler": ("profile", "emit_nvtx", "emit_itt"),
}


def _before(args: Any, kwargs: Any) -> None:
    constructed(args[0])


def install(patches: Patches) -> None:
    """Watch the constructors."""
    for module_name, names in _CLASSES.items():
        module = importlib.import_module(module_name)
        for name in names:
            owner = vars(module).get(name)
            if owner is not None:
                patches.attribute(owner, "__init__", around(owner.__init__, _PART, _before))
