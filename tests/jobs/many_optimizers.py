"""Meta-learning in one process: each task has an optimizer and a loader of its own, let go at its end unless ``--keep``.

    python many_optimizers.py [--tasks N] [--keep]

Prints how many optimizers and loaders the recording still remembers, the mean time of a task at the end, in µs, goes to
stderr.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--tasks", type=int, default=300)
parser.add_argument("--keep", action="store_true")
options = parser.parse_args()
model = nn.Linear(4, 1)
outer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
took_s = []
for _ in range(options.tasks):
    began_s = time.perf_counter()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(torch.ones(2, 4), batch_size=2)
    for batch in loader:
        model(batch).sum().backward()
    inner.step()
    outer.step()
    if options.keep:
        kept.append((inner, loader))
    took_s.append(time.perf_counter() - began_s)
gc.collect()
recording = sys.modules.get("_ddpdoctor.hook.recording")
if recording is not None:
    session = recording.active.session
    print(len(session.optimizers._known), len(session.loaders.known._known))
last = took_s[-100:]
print(f"{1e6 * sum(last) / len(last):.0f} us a task", file=sys.stderr)
