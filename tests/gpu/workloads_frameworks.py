"""The jobs of workloads.py whose loop a framework owns, or whose parts it prepares."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from workloads_parts import CUDA, DEVICE, LENGTH, VOCABULARY, Clock, Tokens, batches, corpus, new_gpt, pick


def lightning(clock: Clock, slow: bool) -> None:
    import lightning.pytorch as pl

    class LanguageModel(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = new_gpt(6)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.network(*batch)
            self.log("train_loss", loss, on_step=True, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    class Stamps(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if clock.step():
                trainer.should_stop = True

    trainer = pl.Trainer(
        accelerator=pick("auto", "cpu"),
        devices=1,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Stamps()],
    )
    trainer.fit(LanguageModel(), batches(Tokens(), pick(12, 2)))


class MaskedTokens(Dataset):
    """Random tokens to predict, as transformers wants them."""

    def __len__(self) -> int:
        return 1 << 17

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * 977 % (1 << 19)
        tokens = corpus()[start : start + LENGTH // 2]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def hf(clock: Clock, slow: bool) -> None:
    import tempfile

    import transformers
    from accelerate.state import AcceleratorState

    class Stamps(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if clock.step():
                control.should_training_stop = True

    AcceleratorState._reset_state(True)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=pick(512, 32),
        num_hidden_layers=pick(6, 2),
        num_attention_heads=pick(8, 2),
        intermediate_size=pick(2048, 64),
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=pick(32, 2),
            gradient_accumulation_steps=2,
            max_steps=5000,
            logging_steps=1 if slow else 50,
            bf16=CUDA,
            use_cpu=not CUDA,
            ddp_backend=pick("nccl", "gloo"),
            dataloader_num_workers=pick(4, 1),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        model = transformers.BertForMaskedLM(config)
        trainer = transformers.Trainer(model, arguments, train_dataset=MaskedTokens(), callbacks=[Stamps()])
        trainer.train()


def accelerate(clock: Clock, slow: bool) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=not CUDA)
    model = new_gpt(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(Tokens(), pick(12, 2)))
    losses = []
    for tokens, targets in loader:
        loss = model(tokens, targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if slow:
            losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)))
            accelerator.wait_for_everyone()
        if clock.step():
            break
    print("ran on", accelerator.distributed_type, DEVICE, "and gathered", len(losses), "losses")
