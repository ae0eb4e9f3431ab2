"""Wrappers around torch and Python's garbage collector: one module per subject, with a function ``install``, and
``others``.

Input: the job's calls of torch. Output: events and ends of steps for the recorder, and numbers of the job's objects. A
wrapper raises no exception of its own, changes neither arguments nor results, never waits, and costs one attribute lookup
while nothing is recorded. Each is installed separately. A wrapper that does not fit this version of torch is left out.
"""

PARTS = (
    "others.install_process_groups",
    "optimizers",
    "optimizers.install_unhooked",
    "others.install_constructors",
    "ddp",
    "backward",
    "collectives",
    "dataloader",
    "others.install_checkpoints",
    "others.install_garbage",
    "others.install_profilers",
    "others.install_spawned",
)
"""The modules to install, in this order. ``module.function`` names another function than ``install``."""
