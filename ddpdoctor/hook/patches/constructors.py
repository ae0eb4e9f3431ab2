"""The constructors of data loaders and DDP modules, for the line that built each."""

from __future__ import annotations

from typing import Any

from ..guard import part
from ..job import calling_frame, note_built
from ..patching import Patches, around

_PART = part("constructors")


def _before_module(args: Any, kwargs: Any) -> None:
    note_built(args[0], None, calling_frame())


def _before_loader(args: Any, kwargs: Any) -> None:
    note_built(args[0], kwargs.get("dataset", args[1] if len(args) > 1 else None), calling_frame())


def install(patches: Patches) -> None:
    """Wrap both constructors, which subclasses call."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    for owner, before in ((DistributedDataParallel, _before_module), (DataLoader, _before_loader)):
        patches.attribute(owner, "__init__", around(owner.__init__, _PART, before))
