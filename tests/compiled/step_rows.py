"""What compiled training does: one row for each thing that a training loop has.

Each row is the same loop, run in eager mode and in one of three ways: ``train_step``,
``torch.compile`` of our wrapper, ``torch.compile`` of torch's. A verdict says how many graphs that
took and whether the weights are those of eager mode. ``python -m tests.compiled.table`` prints
them side by side, ``test_step_table.py`` says what ours must be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import paceline
from paceline.compiled import keep_hooks, train_step

from .steps import OPTIMIZERS, SMALL, Weights, batch, loss_of, seeded, state

Open = Callable[[], Any]
STEPS = 4
NOTHING = "not in torch"
EAGER = "eager mode, right"
WRONG = "other weights than in eager mode"
WAYS = ("train_step", "torch.compile(ddp)", "torch's DDP, compiled")
_MORE_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd, foreach": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


@dataclass(frozen=True)
class Row:
    """A training loop and what is special about it."""

    model: str = "mlp"
    optimizer: str = "sgd"
    max_norm: float | None = None
    autocast: bool = False
    accumulate: int = 1
    weighted: bool = False
    decay: float = 1.0  # of the learning rate, in every step
    sizes: Sequence[int] = (8,) * STEPS
    joined: bool = False
    compressed: bool = False
    branches: bool = False  # ranks use different parameters
    hook: str = ""  # on a module or a parameter
    tolerance: float = 1e-5
    wrapper: dict[str, Any] = field(default_factory=dict)  # what torch's class needs to be told


ROWS: dict[str, Row] = {
    "a plain loop": Row(),
    "the learning rate changes in every step": Row(optimizer="adam", decay=0.7),
    "gradients are clipped": Row(max_norm=0.1),
    "autocast": Row(autocast=True, tolerance=1e-3),
    "accumulation": Row(accumulate=2),
    "`ddp.samples(n)`": Row(weighted=True),
    "a communication hook": Row(compressed=True, tolerance=1e-3),
    "BatchNorm": Row(model="conv"),
    "unused parameters": Row(
        model="branches", branches=True, wrapper={"find_unused_parameters": True}
    ),
    "Join, uneven numbers of batches": Row(joined=True),
    "batches of any size": Row(sizes=(4, 6, 9, 5)),
    "SGD with momentum": Row(optimizer="momentum"),
    "SGD, foreach": Row(optimizer="sgd, foreach"),
    "Adam": Row(optimizer="adam"),
    "Adam, fused": Row(optimizer="adam, fused"),
    "AdamW, foreach": Row(optimizer="adamw"),
    "AdamW, fused": Row(optimizer="adamw, fused"),
    "a full backward hook of a module": Row(hook="module"),
    "the same, inside `keep_hooks`": Row(hook="kept module"),
    "`register_hook` on a parameter": Row(hook="tensor"),
    "`register_post_accumulate_grad_hook`": Row(hook="after"),
}


class Loop:
    """One training of one row."""

    def __init__(self, row: Row, ddp: Any, rank: int) -> None:
        self.row, self.ddp, self.rank = row, ddp, rank
        self.call: Any = ddp  # what is called in the place of the wrapper
        makers = {**OPTIMIZERS, **_MORE_OPTIMIZERS}
        self.optimizer = makers[row.optimizer](ddp.parameters())
        self.heard: list[int] = []
        self._rates = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, row.decay)
        if row.compressed:
            self._compress()
        if row.hook:
            self._hook()

    def _compress(self) -> None:
        if isinstance(self.ddp, paceline.DistributedDataParallel):
            group = self.ddp.process_group
            self.ddp.register_comm_hook(group, paceline.hooks.fp16_compress_hook)
        else:
            self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def _hook(self) -> None:
        def heard(*_: Any) -> None:
            self.heard.append(1)

        layer = self.ddp.module[0]
        if "module" in self.row.hook:
            self.ddp.module[2].register_full_backward_hook(heard)
        elif self.row.hook == "tensor":
            layer.weight.register_hook(heard)
        else:
            layer.weight.register_post_accumulate_grad_hook(heard)

    def run(self, step: Callable[..., Any] | None = None) -> tuple[Weights, int]:
        """The weights that training ends with, and how often a hook was called."""
        count = STEPS - (1 - self.rank) if self.row.joined else STEPS
        kept = self.row.hook == "kept module" and step is None
        keeping = keep_hooks(self.ddp.module) if kept else contextlib.nullcontext()
        joining = self.ddp.join() if self.row.joined else contextlib.nullcontext()
        with keeping, joining:
            for number in range(count):
                self._train(number, step)
        return state(self.ddp.module), len(self.heard)

    def _train(self, number: int, step: Callable[..., Any] | None) -> None:
        rows = self.row.sizes[number] + (self.rank if self.row.weighted else 0)
        inputs: tuple[Any, ...] = batch(self.rank, number, rows)
        if self.row.branches:
            inputs = (*inputs, self.rank == 0)
        last = (number + 1) % self.row.accumulate == 0
        if step is not None:
            step(*inputs, samples=rows if self.row.weighted else None)
        else:
            self._step_as_users_do(inputs, rows, last)
        if last and self.row.decay != 1.0:
            self._rates.step()

    def _step_as_users_do(self, inputs: Any, rows: int, last: bool) -> None:
        with contextlib.ExitStack() as stack:
            if not last:
                stack.enter_context(self.ddp.no_sync())
            if self.row.weighted:
                stack.enter_context(self.ddp.samples(rows))
            with torch.autocast("cpu", torch.bfloat16, enabled=self.row.autocast):
                loss = loss_of(self.call, *inputs)
            loss.backward()
        if last:
            if self.row.max_norm is not None:
                nn.utils.clip_grad_norm_(self.ddp.parameters(), self.row.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()


def loop(row: Row, way: str, open_: Open, rank: int) -> Loop:
    """A model of the known weights in a wrapper of the right kind."""
    model = seeded(row.model)
    if row.model == "mlp":
        model = Layers(*model)
    if way == WAYS[2]:
        ddp: Any = nn.parallel.DistributedDataParallel(model, **row.wrapper)
    else:
        cap = None if row.hook else SMALL  # where Dynamo splits by buckets, they are 1 MiB at least
        ddp = paceline.DistributedDataParallel(model, process_group=open_(), bucket_cap_mb=cap)
    return Loop(row, ddp, rank)


class Layers(nn.Sequential):
    """Dynamo does not compile the forward of torch's own class."""

    def forward(self, x: Any) -> Any:
        for layer in self:
            x = layer(x)
        return x


def measure(way: str, open_: Open, titles: Sequence[str] = ()) -> dict[str, str]:
    """A verdict for each of these rows, or for all."""
    return {title: verdict(ROWS[title], way, open_) for title in titles or ROWS}


def verdict(row: Row, way: str, open_: Open) -> str:
    """How ``row`` does in this way; every rank calls it."""
    rank = dist.get_rank()
    if way == WAYS[2] and (row.weighted or "kept" in row.hook):
        return NOTHING
    expected = loop(row, way, open_, rank).run()
    torch._dynamo.reset()
    try:
        found, told = _compiled(row, way, open_, rank, fullgraph=True)
    except Exception:
        try:
            found, told = _compiled(row, way, open_, rank, fullgraph=False)
        except Exception as error:
            return f"error ({type(error).__name__})"
    return told if _alike(found, expected, row.tolerance) else WRONG


def _compiled(
    row: Row, way: str, open_: Open, rank: int, *, fullgraph: bool
) -> tuple[tuple[Weights, int], str]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    made = loop(row, way, open_, rank)
    if way != WAYS[0]:
        made.call = torch.compile(made.ddp, backend=counter, fullgraph=fullgraph)
        found = made.run()
        if not fullgraph:
            return found, f"graph break, {_counted(counter.frame_count)}"
        return found, _counted(counter.frame_count)
    step = train_step(
        made.ddp,
        made.optimizer,
        loss_of,
        backend=counter,
        max_norm=row.max_norm,
        autocast=torch.bfloat16 if row.autocast else None,
        accumulate=row.accumulate,
        fullgraph=fullgraph,
    )
    found = made.run(step)
    return found, EAGER if step.reason else _counted(counter.frame_count)


def _counted(graphs: int) -> str:
    return "one graph" if graphs == 1 else f"{graphs} graphs"


def _alike(found: tuple[Weights, int], expected: tuple[Weights, int], tolerance: float) -> bool:
    same = found[1] == expected[1] and list(found[0]) == list(expected[0])
    pairs = ((found[0][name], value) for name, value in expected[0].items())
    return same and all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)
