"""The ways of ``compiled.py`` to train one step: eager, compiled, and whole steps in one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.compiled import Settings, train_step

ALONE, EAGER = "compiled, no wrapper", "torch DDP"
SPLIT = "torch DDP + compile, ddp_optimizer"
PYTHON = "torch DDP + compile, python_reducer"
WHOLE = "torch DDP + compile, no_optimization"
OURS, OURS_COMPILED, STEP = "paceline", "torch.compile(paceline)", "paceline train_step"
WAYS = (ALONE, EAGER, SPLIT, PYTHON, WHOLE, OURS, OURS_COMPILED, STEP)

# On a GPU alone.
EAGER_ALONE = "eager, no wrapper"
REDUCED_ALONE = "reduce-overhead, no wrapper"
REDUCED = "torch DDP + compile, reduce-overhead"
GRAPHED = "paceline train_step, graph"
LIMIT = "whole step in one CUDA graph, compiled, no wrapper"
GPU_WAYS = (
    *(EAGER_ALONE, ALONE, REDUCED_ALONE, LIMIT),
    *(EAGER, SPLIT, PYTHON, WHOLE, REDUCED),
    *(OURS, OURS_COMPILED, STEP, GRAPHED),
)

UNWRAPPED = (EAGER_ALONE, ALONE, REDUCED_ALONE, LIMIT)
TORCH = (EAGER, SPLIT, PYTHON, WHOLE, REDUCED)
NOT_COMPILED = (EAGER_ALONE, EAGER, OURS)
CAPTURED = (LIMIT, GRAPHED)  # in a graph of the whole step
HAS_GRAPH = "graph" in {field.name for field in fields(Settings)}

Step = Callable[[], None]
Loss = Callable[..., Tensor]


@contextmanager
def mode_of(way: str) -> Iterator[None]:
    """Set what torch reads when it makes a wrapper and when it compiles one."""
    mode = way.rpartition(", ")[2] if way in (SPLIT, PYTHON, WHOLE) else "ddp_optimizer"
    autograd = way == PYTHON  # that mode needs it
    with torch._dynamo.config.patch(optimize_ddp=mode, compiled_autograd=autograd):
        yield


def wrap(way: str, model: nn.Module, groups: Callable[[], Any]) -> nn.Module:
    if way in UNWRAPPED:
        return model
    if way in TORCH:
        with mode_of(way):
            return DistributedDataParallel(model, process_group=dist.new_group())
    return paceline.DistributedDataParallel(model, process_group=groups())


def make_step(
    way: str, model: Any, optimizer: Any, loss: Loss, batch: Sequence[Tensor], **options: Any
) -> Step:
    if way in (STEP, GRAPHED):
        graph = {"graph": way == GRAPHED} if HAS_GRAPH else {}
        compiled = train_step(model, optimizer, loss, fullgraph=True, **graph, **options)
        return lambda: _ignore(compiled(*batch))
    reduced = way in (REDUCED_ALONE, REDUCED)
    if way not in NOT_COMPILED:
        model = torch.compile(model, mode="reduce-overhead" if reduced else None)
    dtype = options.get("autocast")

    def forward_and_backward() -> None:
        with torch.autocast(batch[0].device.type, dtype or torch.bfloat16, enabled=bool(dtype)):
            value = loss(model, *batch)
        value.backward()

    def step() -> None:
        if reduced:
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        forward_and_backward()
        optimizer.step()

    return captured(step, optimizer, forward_and_backward) if way == LIMIT else step


def captured(step: Step, optimizer: Any, forward_and_backward: Step, warm_up: int = 4) -> Step:
    """The same step as one replay of a CUDA graph, as torch's documentation captures one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward_and_backward()
        optimizer.step()
    return partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, _reads_and_writes: Step) -> None:
    """Replay it while the step holds the weights and the batch, whose memory the graph uses."""
    graph.replay()


def _ignore(_value: object) -> None:
    return None
