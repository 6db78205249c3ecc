"""Wrappers inside wrappers, ours and torch's: how what is compiled in them is split, and averaged.

Dynamo asks which wrapper is in its forward, and splits what it compiles there by that one's buckets
(torch's DDPOptimizer). Where it is torch's to choose, it finds under ours what it finds under its
own. ``torch.compile`` of our wrapper is ours to choose: one graph, unless one of torch's is inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline import DistributedDataParallel as OurDDP

from .ranks import Open, Row, check, launch

# Dynamo looks at ``.grad`` of whatever goes into a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
WIDTH = 520  # torch wants buckets of 1 MiB at least
LAYER = (WIDTH + 1) * WIDTH * 4 / 2**20  # MiB of one layer's parameters
WRAPPERS = {"none": None, "torch's": TorchDDP, "ours": OurDDP}


class Stack(nn.Module):
    """Three equal layers; Dynamo does not compile a bare Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Nest(nn.Module):
    """Three stacks, of which the second has a wrapper of its own, with buckets twice as large."""

    def __init__(self, inner: str, group: Any) -> None:
        super().__init__()
        self.before, self.between, self.behind = Stack(), Stack(), Stack()
        source = torch.Generator().manual_seed(1)
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=source) / WIDTH**0.5)
        self.stacks = [self.before, self.between, self.behind]
        wrap = WRAPPERS[inner]
        if wrap is not None:
            self.between = wrap(self.between, process_group=group, bucket_cap_mb=2 * LAYER)
            names = [name for name, _ in self.named_parameters() if name.startswith("between.")]
            TorchDDP._set_params_and_buffers_to_ignore_for_model(self, names)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.between(self.before(x)))


def nested(outer: str, inner: str, groups: Sequence[Any]) -> tuple[Any, Nest]:
    model = Nest(inner, groups[0])
    wrapper: Any = WRAPPERS[outer]
    return wrapper(model, process_group=groups[1], bucket_cap_mb=LAYER), model


def alone() -> Any:
    return paceline.new_group("fake", store=dist.HashStore(), rank=0, world_size=1)


def graphs_of_parts(outer: str, inner: str) -> list[int]:
    """Into how many graphs each stack is split when each is compiled by itself."""
    torch.compiler.reset()
    whole, model = nested(outer, inner, (alone(), alone()))
    counters = [CompileCounterWithBackend("aot_eager") for _ in model.stacks]
    for stack, counter in zip(model.stacks, counters, strict=True):
        stack.compile(backend=counter)
    whole(torch.ones(2, WIDTH)).sum().backward()
    return [counter.frame_count for counter in counters]


def graphs_of_all(outer: str, inner: str) -> int:
    """Into how many graphs the outer wrapper is split when it is compiled."""
    torch.compiler.reset()
    whole, _ = nested(outer, inner, (alone(), alone()))
    counter = CompileCounterWithBackend("aot_eager")
    torch.compile(whole, backend=counter)(torch.ones(2, WIDTH)).sum().backward()
    return int(counter.frame_count)


def test_what_is_compiled_in_our_wrapper_is_split_as_in_torchs() -> None:
    split = graphs_of_parts("torch's", "none")
    assert split == [3, 3, 3]
    assert graphs_of_parts("ours", "none") == split


@pytest.mark.parametrize(("outer", "inner"), [("ours", "torch's"), ("torch's", "ours")])
def test_in_nested_wrappers_each_part_is_split_by_the_wrapper_it_is_in(
    outer: str, inner: str
) -> None:
    split = graphs_of_parts("torch's", "torch's")
    assert split[:2] == [3, 2]
    found = graphs_of_parts(outer, inner)
    assert found[:2] == split[:2]
    # by the outer one again: torch forgets it until 2.12, ours does not
    assert found[2] in (split[2], 3)


def test_torchs_wrapper_inside_a_compiled_one_of_ours_is_split_as_in_torchs() -> None:
    assert graphs_of_all("ours", "torch's") == graphs_of_all("torch's", "torch's")


@pytest.mark.parametrize("inner", ["none", "ours"])
def test_our_wrapper_alone_is_compiled_to_one_graph(inner: str) -> None:
    assert graphs_of_all("ours", inner) == 1


# -- the numbers ------------------------------------------------------------------------------


def grads_of(outer: str, inner: str, open_: Open, *, compiled: bool) -> list[Tensor]:
    """What the second of two backward passes leaves."""
    whole, model = nested(outer, inner, (open_(), open_()))
    rank = dist.get_rank()
    run = torch.compile(whole, backend="aot_eager") if compiled else whole
    for step in range(2):
        model.zero_grad()
        run(torch.full((2, WIDTH), 1.0 + rank + step)).sum().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def row(outer: str, inner: str) -> Row:
    def compare(open_: Open) -> None:
        expected = grads_of("torch's", "torch's", open_, compiled=False)
        assert len(expected) == 18
        for compiled in (False, True):
            found = grads_of(outer, inner, open_, compiled=compiled)
            torch.testing.assert_close(found, expected)

    return compare


ROWS: dict[str, Row] = {
    f"{inner} in {outer}": row(outer, inner)
    for outer, inner in (("ours", "torch's"), ("torch's", "ours"), ("ours", "ours"))
}


def test_torchs_wrapper_in_a_compiled_one_of_ours_leaves_torchs_averages() -> None:
    check(launch(__name__, ["torch's in ours"]), "torch's in ours")


@pytest.mark.slow
def test_so_it_is_the_other_way_round_and_with_ours_alone() -> None:
    rest = ["ours in torch's", "ours in ours"]
    results = launch(__name__, rest)
    for name in rest:
        check(results, name)
