"""Trains with DeepSpeed on CPUs: its engine averages the gradients and steps the optimizer itself. Argument: ZeRO stage."""

import sys

import deepspeed
import torch
from torch import nn

STEPS, MICRO_BATCHES = 8, 2

stage = int(sys.argv[1])
deepspeed.init_distributed(dist_backend="gloo")
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "zero_optimization": {"stage": stage},
    "bf16": {"enabled": stage > 0},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
dtype = torch.bfloat16 if stage else torch.float32
for _ in range(STEPS * MICRO_BATCHES):
    loss = engine(torch.randn(4, 64, dtype=dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
print("took", engine.global_steps, "steps", flush=True)
