"""Ray Train: the ranks are actors of a local cluster, no children of this process. Six steps a rank; with a second argument, the last
one raises in its fourth."""

from __future__ import annotations

import sys

import ray
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn


def work(config: dict[str, bool]) -> None:
    model = prepare_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if config["raises"] and step == 3 and dist.get_rank() == 1:
            raise ValueError("planted")
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])
    TorchTrainer(
        work,
        train_loop_config={"raises": len(sys.argv) > 2},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    ).fit()
    ray.shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    main()
