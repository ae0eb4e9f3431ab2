"""A job of each framework whose model has buffers: ``with_buffers.py FRAMEWORK MIB ARGUMENTS``.

``ARGUMENTS``, JSON, go to the framework's object for DDP's settings. Under torchrun, but Lightning starts its ranks itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, BATCH, WIDTH = 150, 16, 256


class Numbers(Dataset):
    def __len__(self) -> int:
        return 2 * STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"data": torch.full((WIDTH,), index / len(self))}


class Net(nn.Module):
    def __init__(self, mib: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)], nn.Linear(WIDTH, 1))
        self.register_buffer("table", torch.zeros(max(1, mib << 18)))

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(data).square().mean()}


def lightning(model: nn.Module, arguments: dict[str, Any]) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch, number):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    strategy = DDPStrategy(**arguments)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **quiet)
    trainer.fit(Module(), DataLoader(Numbers(), batch_size=BATCH))


def accelerate(model: nn.Module, arguments: dict[str, Any]) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    kwargs = DistributedDataParallelKwargs(**arguments)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(), batch_size=BATCH))
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def transformers(model: nn.Module, arguments: dict[str, Any]) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **{"logging_strategy": "no", **arguments},
        )
        Trainer(model=model, args=given, train_dataset=Numbers()).train()


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]](Net(int(sys.argv[2])), json.loads(sys.argv[3]))
