"""Patches torch once, right after it is imported."""

from __future__ import annotations

import importlib
import os
import sys

from . import finder
from .environment import TRIAL, name_flight_entries
from .guard import part
from .patches import PARTS
from .patching import skip_module, torch_patches


def install() -> None:
    """Install all parts. A part that does not fit this version of torch is skipped; its data are missing."""
    for name in PARTS:
        module, _, function = name.partition(".")
        try:
            found = importlib.import_module(f".patches.{module}", __package__)
            getattr(found, function or "install")(torch_patches)
        except Exception as error:
            part(function.replace("install_", "").replace("_", " ") or module).failed(error)
    importlib.import_module(".lifetime", __package__)
    name_flight_entries(os.environ, sys.modules.get("torch._C._distributed_c10d"))
    if TRIAL in os.environ:
        importlib.import_module(".trial", __package__).install(torch_patches)
    finder.after_import("torch._dynamo", __name__, "keep_from_compiler")


def keep_from_compiler() -> None:
    """Make torch.compile skip the hook's code. Called when torch._dynamo is imported, which loader workers, for example, never do."""
    package = __package__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(package + ".") and module is not None:
            try:
                skip_module(module)
            except Exception as error:
                part("torch.compile").failed(error)
