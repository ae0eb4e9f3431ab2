"""What of torch is wrapped, and of Python's garbage collector: one module for each, with a function ``install``, and ``others``.

In come the job's calls of torch; out go events and ends of steps to the recording, and the job's things to their numbers. A
wrapper never raises, changes neither arguments nor results, waits for nothing, and while nobody records costs a look at one
attribute. Each is installed alone: what does not fit this version of torch is left out, and its data missing.
"""

PARTS = (
    "arming",
    "optimizers",
    "unhooked",
    "others.install_constructors",
    "ddp",
    "backward",
    "collectives",
    "dataloader",
    "checkpoints",
    "others.install_garbage",
    "others.install_profilers",
    "others.install_spawned",
)
"""What is installed, in this order: modules by their ``install``, or by the function that is named."""
