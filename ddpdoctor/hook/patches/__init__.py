"""Wrappers around torch and Python's garbage collector: one module per subject, with a function ``install``, and
``others``.

Input: the job's calls of torch. Output: events and ends of steps for the recorder, and numbers of the job's objects. A
wrapper never raises, changes neither arguments nor results, waits for nothing, and costs one attribute look-up while
nothing is recorded. Each is installed alone: what does not fit this version of torch is left out, and its data are
missing.
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
"""What is installed, in this order: modules by their ``install``, or by the function that is named."""
