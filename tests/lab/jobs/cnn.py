"""Image classification with epochs, batch norm, a loader with a worker and an evaluation after each epoch."""

import argparse
import time  # noqa: F401

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerator import kernel
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

# slot: top


class Digits(Dataset):
    def __init__(self, length, rank, training=True):
        self.length, self.rank, self.training = length, rank, training

    def __len__(self):
        return self.length

    def load(self, index):
        image = torch.full((1, 12, 12), float(index % 10))
        if self.training:
            # slot: dataset rank=self.rank
            pass
        return image

    def __getitem__(self, index):
        return self.load(index), index % 10


class Net(nn.Module):
    def __init__(self, step_ms, samples):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4 * 4, 10)
        self.step_ms, self.samples = step_ms, samples

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = kernel(F.max_pool2d(x, 2), self.step_ms, self.samples)
        if self.training:
            # slot: forward rank=dist.get_rank() var=x
            pass
        x = F.relu(self.bn2(self.conv2(F.pad(x, (1, 0, 1, 0)))))
        return self.fc(x.flatten(1))


def train_one_epoch(model, loader, optimizer, epoch, rank):
    model.train()
    for i, (images, targets) in enumerate(loader):  # the loader
        output = model(images)
        loss = F.cross_entropy(output, targets)
        # slot: between rank=rank
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        # slot: after_backward rank=rank
        optimizer.step()
        # slot: loop_end rank=rank
    if rank == 0:
        print(f"epoch {epoch}: {i + 1} steps, loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = torch.zeros(1)
    for images, targets in loader:
        correct += (model.module(images).argmax(1) == targets).sum()
    dist.all_reduce(correct)
    return correct.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    per_epoch = args.steps // args.epochs * args.batch * world - args.batch * world // 2
    train_set, test_set = Digits(per_epoch, rank), Digits(4 * args.batch * world, rank, training=False)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(  # the loader
        train_set, batch_size=args.batch, sampler=sampler, num_workers=1, persistent_workers=True
    )
    test_loader = DataLoader(
        test_set, batch_size=args.batch, sampler=DistributedSampler(test_set, shuffle=False)
    )
    model = DDP(Net(args.step_ms, args.batch))  # the model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, optimizer, epoch, rank)
        accuracy = evaluate(model, test_loader)
        if rank == 0:
            print(f"correct {accuracy:.0f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
