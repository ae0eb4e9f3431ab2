"""Lightning's manual optimization: the optimizer steps inside DDP's forward. ``python with_manual_lightning.py STEPS``"""

from __future__ import annotations

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch[0]).square().mean())
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        if self.trainer.is_global_zero:
            print(f"took {self.trainer.global_step} steps", flush=True)


def main() -> None:
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(8 * int(sys.argv[1]), 4))
    trainer.fit(Net(), DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main()
