"""Lightning starts the ranks itself: ``python with_lightning.py ddp|ddp_spawn``. Eight batches a rank, so eight steps."""

from __future__ import annotations

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        if self.trainer.is_global_zero:
            print(f"took {self.trainer.global_step} steps", flush=True)


def main() -> None:
    trainer = lightning.Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))


if __name__ == "__main__":
    main()
