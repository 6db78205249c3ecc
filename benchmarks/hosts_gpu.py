"""Does NCCL alone beat an all-reduce within hosts and then between them?

    python benchmarks/hosts_gpu.py --save results.md      a minute; needs a GPU, NCCL 2.30 and MPS
    python benchmarks/hosts_gpu.py --small                on the CPU over gloo, to see it run

That is what ``hybrid`` does for CPU tensors, and why it refuses GPUs. Two hosts are made of one:
ranks with another ``NCCL_HOSTID`` are another host to NCCL, and it reaches them through sockets.
Four ranks, two on each host. The ways take turns, every round begins with another:

- NCCL alone;
- reduced to one rank of each host, summed between those, and handed out again;
- scattered within hosts, each part summed between hosts, gathered within hosts.

A time is that between two synchronisations of the GPU, on the slowest rank; the median of all
rounds, and in brackets the quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import Log, describe_machine, digits, row
from torch import Tensor

from paceline.groups import Group
from paceline.testing import Meeting, spawn_ranks

RANKS, PER_HOST = 4, 2
SIZES = (1 << 12, 1 << 20, 26 << 20)  # bytes
CALLS, WARM_UP, DEADLINE = 10, 3, 600.0
ALONE, LEADERS, PARTS = "NCCL alone", "by one rank of each host", "by parts"
WAYS = (ALONE, LEADERS, PARTS)
HEAD = "| bytes | way | all-reduce | over NCCL alone |\n|--:|---|--:|--:|"


def way_of(name: str, world: Group) -> Callable[[Tensor], None]:
    """An all-reduce over the ranks of all hosts."""
    rank = world.rank()
    first = rank // PER_HOST * PER_HOST
    host = world.split(list(range(first, first + PER_HOST)))
    across = None
    for place in range(PER_HOST):  # every rank makes all of these calls
        ranks = list(range(place, world.size(), PER_HOST))
        across = world.split(ranks) or across
    assert host is not None
    assert across is not None

    def by_leaders(tensor: Tensor) -> None:
        host.reduce(tensor, 0)
        if host.rank() == 0:
            across.all_reduce(tensor)
        host.broadcast(tensor, 0)

    def by_parts(tensor: Tensor) -> None:
        parts = tensor.view(PER_HOST, -1)
        own = torch.empty_like(parts[0])
        host.reduce_scatter(own, list(parts.unbind()))
        across.all_reduce(own)
        host.all_gather(list(parts.unbind()), own)

    return {ALONE: world.all_reduce, LEADERS: by_leaders, PARTS: by_parts}[name]


def measure(meeting: Meeting, device: str, rounds: int) -> dict[tuple[int, str], list[float]]:
    """Seconds of a call on this rank, by size and way, of each round."""
    os.environ["NCCL_HOSTID"] = f"host{meeting.rank // PER_HOST}"
    if device == "cuda":
        torch.cuda.set_device(meeting.rank % torch.cuda.device_count())
    backend = "nccl" if device == "cuda" else "gloo"
    times: dict[tuple[int, str], list[float]] = {}
    with meeting.new_group(backend, device=device) as world:
        ways = {name: way_of(name, world) for name in WAYS}
        for size in SIZES:
            check(ways, world, device)
            tensor = torch.zeros(size // 4, device=device)
            for number in range(rounds + WARM_UP):
                turn = number % len(WAYS)
                for name in (*WAYS[turn:], *WAYS[:turn]):
                    taken = time_calls(ways[name], tensor, world, device)
                    if number >= WARM_UP:
                        times.setdefault((size, name), []).append(taken)
        world.barrier()
    return times


def check(ways: dict[str, Callable[[Tensor], None]], world: Group, device: str) -> None:
    for name, way in ways.items():
        tensor = torch.full((64,), world.rank() + 1.0, device=device)
        way(tensor)
        assert tensor.tolist() == [sum(range(1, RANKS + 1))] * 64, name


def time_calls(way: Callable[[Tensor], None], tensor: Tensor, world: Group, device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    world.barrier()
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        way(tensor)
    wait()
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description="NCCL alone, or hosts one after the other.")
    parser.add_argument("--rounds", type=int, help="of each way (20)")
    parser.add_argument("--quick", action="store_true", help="a rough picture, from 5 rounds")
    parser.add_argument("--small", action="store_true", help="on the CPU, over gloo")
    parser.add_argument("--save", type=Path, help="write the result here")
    args = parser.parse_args()
    rounds = max(2, args.rounds or (5 if args.quick or args.small else 20))
    device = "cpu" if args.small else "cuda"
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    log = Log()
    log(describe_machine())
    name = torch.cuda.get_device_name() if device == "cuda" else "none, gloo in the place of NCCL"
    log(f"GPU: {name}. {RANKS} ranks, {PER_HOST} on each host, {rounds} rounds.\n\n{HEAD}")
    by_rank = spawn_ranks(RANKS, measure, device, rounds, deadline=DEADLINE, env=env)
    slowest = {
        key: [max(taken) for taken in zip(*(own[key] for own in by_rank), strict=True)]
        for key in by_rank[0]
    }
    for (size, way), taken in slowest.items():
        ratios = [a / b for a, b in zip(taken, slowest[size, ALONE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        over = "" if way == ALONE else f"{middle:.2f} ({low:.2f}-{high:.2f})"
        log(
            row(
                size if way == ALONE else "",
                way,
                f"{digits(1e6 * statistics.median(taken))} us",
                over,
            )
        )
    if args.save is not None:
        args.save.write_text("\n".join(log.lines) + "\n")


if __name__ == "__main__":
    main()
