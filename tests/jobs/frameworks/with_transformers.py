"""Hugging Face's Trainer under torchrun, with a model of our own: eight steps a rank."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Numbers(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"data": torch.full((4,), index / 32)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(data).square().mean()}


def main() -> None:
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        num_train_epochs=1,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=Net(), args=arguments, train_dataset=Numbers())
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"took {result.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
