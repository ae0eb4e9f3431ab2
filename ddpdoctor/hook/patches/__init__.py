"""What of torch is wrapped, and of Python's garbage collector: one module for each, with a function ``install``.

In come the job's calls of torch; out go events and ends of steps to the recording, and the job's things to their numbers. A
wrapper never raises, changes neither arguments nor results, waits for nothing, and while nobody records costs a look at one
attribute. Each is installed alone: what does not fit this version of torch is left out, and its data missing.
"""

PARTS = (
    "arming",
    "optimizers",
    "unhooked",
    "constructors",
    "ddp",
    "backward",
    "collectives",
    "dataloader",
    "checkpoints",
    "garbage",
    "user_profilers",
    "spawned",
)
"""The modules that are installed, in this order."""
