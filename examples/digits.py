"""Two processes train one model on handwritten digits, on nothing but a paceline group.

    python examples/digits.py                              starts its two ranks by itself
    torchrun --nproc-per-node 4 examples/digits.py         or let torchrun start any number

Every rank holds a copy of the model and takes its share of each batch. The gradients live in one
flat tensor that the group has allocated; one all-reduce per step makes them the average over ranks,
so all copies take the same step. At the end the same training runs in one process, to compare.
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from paceline import Group, ReduceOp, new_group

RANKS = 2  # when nobody else starts them
BATCH = 32  # samples per rank and step


def load() -> list[Tensor]:
    """Images and labels to train on, then those to test on."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return [images[order[:1440]], labels[order[:1440]], images[order[1440:]], labels[order[1440:]]]


def batches(samples: int, batch: int, epoch: int) -> Iterator[Tensor]:
    """The same order on every rank; what does not fill a batch waits for the next epoch."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
    return (part for part in order.split(batch) if len(part) == batch)


def flatten_gradients(model: nn.Module, group: Group) -> Tensor:
    """One tensor that holds every gradient; each parameter's ``.grad`` is a stretch of it."""
    sizes = [param.numel() for param in model.parameters()]
    flat = group.allocate(sum(sizes))
    for param, part in zip(model.parameters(), flat.split(sizes), strict=True):
        param.grad = part.view_as(param)
    return flat


def train(model: nn.Module, data: list[Tensor], group: Group, epochs: int) -> int:
    """Train ``model`` in step with the other ranks; the number of samples that all have seen."""
    images, labels = data[:2]
    gradients = flatten_gradients(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = 0
    for epoch in range(epochs):
        totals = torch.zeros(3)  # loss, hits, samples
        for batch in batches(len(images), BATCH * group.size(), epoch):
            mine = batch[group.rank() * BATCH :][:BATCH]
            output = model(images[mine])
            loss = cross_entropy(output, labels[mine])
            gradients.zero_()  # not zero_grad: it would take the gradients out of the flat tensor
            loss.backward()
            group.all_reduce(gradients, ReduceOp.AVG)
            optimizer.step()
            hits = (output.argmax(1) == labels[mine]).sum()
            totals += torch.stack([loss.detach() * BATCH, hits, torch.tensor(BATCH)])
        group.all_reduce(totals)
        seen += int(totals[2])
        if group.rank() == 0:
            loss, accuracy = (totals[:2] / totals[2]).tolist()
            print(f"epoch {epoch + 1:2}   loss {loss:.4f}   accuracy {accuracy:.3f}")
    return seen


def train_alone(model: nn.Module, data: list[Tensor], batch: int, epochs: int) -> None:
    """The plain loop that :func:`train` must agree with."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for part in batches(len(data[0]), batch, epoch):
            optimizer.zero_grad()
            cross_entropy(model(data[0][part]), data[1][part]).backward()
            optimizer.step()


def one_rank(epochs: int, backend: str) -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    data = load()
    with new_group(backend) as group:
        torch.manual_seed(group.rank())  # every rank has other weights…
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        for param in model.parameters():
            group.broadcast(param.data)  # …until it has those of rank 0
        alone = copy.deepcopy(model)
        start = time.perf_counter()
        seen = train(model, data, group, epochs)
        seconds = time.perf_counter() - start
        weights = parameters_to_vector(model.parameters()).detach()
        everyone = [torch.empty_like(weights) for _ in range(group.size())]
        group.all_gather(everyone, weights)
        if not all(torch.equal(weights, other) for other in everyone):
            sys.exit(f"rank {group.rank()}: the ranks have drifted apart")
        if group.rank() > 0:
            return
        print(f"all {group.size()} ranks hold the same weights, bit for bit")
        train_alone(alone, data, BATCH * group.size(), epochs)
        difference = (weights - parameters_to_vector(alone.parameters())).abs().max().item()
        print(f"one process on the same batches ends within {difference:.1e} of them")
        accuracy = (model(data[2]).argmax(1) == data[3]).float().mean().item()
        print(f"test accuracy {accuracy:.3f}")
        print(f"{group.size()} ranks over {group.backend}: {seen / seconds:,.0f} samples/s")


def start_ranks() -> int:
    """Run this script once per rank; when one fails, end the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command, env = [sys.executable, *sys.argv], os.environ | meet
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(rank)}) for rank in range(RANKS)]
    try:
        while {process.poll() for process in ranks} in ({None}, {None, 0}):
            time.sleep(0.05)
    except KeyboardInterrupt:
        return 130
    finally:
        for process in ranks:
            process.terminate()  # does nothing to one that has ended
            process.wait()
    return max(abs(process.returncode) for process in ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on digits, on several processes.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--backend", default="auto", help="auto takes shm when all share a host")
    args = parser.parse_args()
    if "RANK" in os.environ:
        one_rank(args.epochs, args.backend)
    else:
        sys.exit(start_ranks())
