"""A callback that runs the model on a fixed batch after each step: ``with_callbacks.py lightning|transformers all|rank0``, 100 steps."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import Dataset

STEPS, BATCH, CLASSES = 100, 32, 10
NAME, WHO = sys.argv[1:3]


class Samples(Dataset):
    def __len__(self) -> int:
        return 2 * STEPS * BATCH

    def __getitem__(self, number: int):
        data = torch.full((64,), number / len(self))
        return (data, number % CLASSES) if NAME == "lightning" else {"data": data, "labels": number % CLASSES}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, CLASSES))

    def forward(self, data: torch.Tensor, labels: torch.Tensor | None = None):
        scores = self.layers(data)
        if labels is None:
            return scores
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


class Entropy:
    def __init__(self) -> None:
        self.probe = torch.randn(2048, 64)
        self.means: list[float] = []

    def note(self, model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(4):
                chances = model(self.probe).softmax(-1)
                self.means.append(-(chances * chances.log()).sum(-1).mean().item())


def chosen(rank: int) -> bool:
    return WHO == "all" or rank == 0


def with_lightning() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch, number):
            return self.net(*batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Probe(lightning.Callback):
        def on_train_start(self, trainer, module):
            self.entropy = Entropy()

        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            if chosen(trainer.global_rank):
                self.entropy.note(module.net)

    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Probe()],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Samples(), batch_size=BATCH))


def with_transformers() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Probe(TrainerCallback):
        def __init__(self) -> None:
            self.entropy = Entropy()

        def on_step_end(self, args, state, control, model=None, **others):
            if chosen(args.process_index):
                self.entropy.note(model)

    arguments = TrainingArguments(
        output_dir=os.environ["HF_HOME"],
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=Net(), args=arguments, train_dataset=Samples(), callbacks=[Probe()]).train()


if __name__ == "__main__":
    with_lightning() if NAME == "lightning" else with_transformers()
