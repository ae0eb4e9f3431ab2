"""A job of each framework, with or without a fault: ``with_faults.py FRAMEWORK FAULT ARGUMENTS``.

FAULT, JSON: ``mib`` of buffers, ``read_ms`` that a sample takes to read. ARGUMENTS, JSON: what goes to the framework's object for settings;
those of Ignite as Python. Under torchrun, but Lightning and Ray start their ranks themselves.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, BATCH, WIDTH = 150, 16, 256
QUIET = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
ON_CPUS = {
    "use_cpu": True,
    "ddp_backend": "gloo",
    "per_device_train_batch_size": BATCH,
    "num_train_epochs": 1,
}


class Numbers(Dataset):
    def __init__(self, read_ms: float = 0.0) -> None:
        self.read_ms = read_ms

    def __len__(self) -> int:
        return 2 * STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.read_ms:
            time.sleep(self.read_ms / 1000)
        return {"data": torch.full((WIDTH,), index / len(self))}


class Net(nn.Module):
    def __init__(self, mib: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)], nn.Linear(WIDTH, 1))
        if mib:
            self.register_buffer("table", torch.zeros(mib << 18))

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(data).square().mean()}


def lightning(model: nn.Module, dataset: Dataset, arguments: dict[str, Any]) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch, number):
            return self.model(**batch)["loss"]

        def validation_step(self, batch, number):
            self.model(**batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    evaluates = {name: value for name, value in arguments.items() if "_val" in name or "val_" in name}
    strategy = DDPStrategy(**{name: arguments[name] for name in arguments.keys() - evaluates.keys()})
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        num_sanity_val_steps=0,
        **quiet,
        **evaluates,
    )
    evaluated = DataLoader(Numbers(), batch_size=BATCH) if evaluates else None
    trainer.fit(Module(), DataLoader(dataset, batch_size=BATCH), evaluated)


def accelerate(model: nn.Module, dataset: Dataset, arguments: dict[str, Any]) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    kwargs = DistributedDataParallelKwargs(**arguments)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=BATCH))
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def transformers(model: nn.Module, dataset: Dataset, arguments: dict[str, Any]) -> None:
    from transformers import Trainer as Loop
    from transformers import TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        chosen = {**ON_CPUS, **QUIET, "logging_strategy": "no", **arguments}
        given = TrainingArguments(output_dir=folder, **chosen)
        Loop(model=model, args=given, train_dataset=dataset, eval_dataset=Numbers()).train()


def trl(model: nn.Module, dataset: Dataset, arguments: dict[str, Any]) -> None:
    from datasets import Dataset as Table
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    tokens = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": len(words)}
    network = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    for name, buffer in model.named_buffers():
        network.register_buffer(name, buffer)
    texts = Table.from_dict({"text": ["a b c d e f g h"] * len(dataset)})
    with tempfile.TemporaryDirectory() as folder:
        chosen = {**ON_CPUS, **QUIET, "logging_strategy": "no", "bf16": False, "max_length": 32, **arguments}
        given = SFTConfig(output_dir=folder, **chosen)
        SFTTrainer(network, args=given, train_dataset=texts, processing_class=tokenizer).train()


def ray(model: nn.Module, dataset: Dataset, arguments: dict[str, Any]) -> None:
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model

    def work(_: dict[str, Any]) -> None:
        network = prepare_model(model, parallel_strategy_kwargs=dict(arguments))
        loader = prepare_data_loader(DataLoader(dataset, batch_size=BATCH))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        for batch in loader:
            optimizer.zero_grad()
            network(**batch)["loss"].backward()
            optimizer.step()

    # Ray's sockets must have short paths.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        TorchTrainer(
            work,
            train_loop_config={},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        ).fit()
        ray.shutdown()


def ignite(model: nn.Module, dataset: Dataset, arguments: dict[str, Any]) -> None:
    import ignite.distributed as idist
    from ignite.engine import Engine

    def training(rank: int) -> None:
        network = idist.auto_model(model)
        given = {name: eval(str(text), {"idist": idist}) for name, text in arguments.items()}
        loader = idist.auto_dataloader(dataset, batch_size=2 * BATCH, **given)
        optimizer = idist.auto_optim(torch.optim.SGD(network.parameters(), lr=0.01))

        def update(engine: Engine, batch: dict[str, torch.Tensor]) -> None:
            optimizer.zero_grad()
            network(**batch)["loss"].backward()
            optimizer.step()

        Engine(update).run(loader, max_epochs=1)

    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)


def mmengine(model: nn.Module, dataset: Dataset, arguments: dict[str, Any]) -> None:
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Module(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, data: torch.Tensor, mode: str = "tensor") -> dict[str, torch.Tensor]:
            return self.model(data)

    train_dataloader = {
        "batch_size": BATCH,
        "num_workers": 0,
        "dataset": dataset,
        "sampler": {"type": "DefaultSampler", "shuffle": True},
        "collate_fn": {"type": "default_collate"},
    }
    train_dataloader.update(arguments)
    # Its own start of the process group, and the device ids that it gives DDP, need CUDA.
    torch.distributed.init_process_group("gloo")
    wrapper = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(
            model=Module(),
            work_dir=folder,
            train_dataloader=train_dataloader,
            train_cfg={"by_epoch": True, "max_epochs": 1},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
            default_hooks={"checkpoint": None, "logger": None},
            launcher="pytorch",
            log_level="ERROR",
            cfg={"model_wrapper_cfg": wrapper},
        )
        runner.train()


def deepspeed(model: nn.Module, dataset: Dataset, arguments: dict[str, Any]) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = {"train_micro_batch_size_per_gpu": BATCH}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, training_data=dataset, config=config
    )
    if arguments:
        loader = engine.deepspeed_io(dataset, **arguments)
    for batch in loader:
        engine.backward(engine(**batch)["loss"])
        engine.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    fault = json.loads(sys.argv[2])
    given = json.loads(sys.argv[3])
    globals()[sys.argv[1]](Net(fault.get("mib", 0)), Numbers(fault.get("read_ms", 0.0)), given)
