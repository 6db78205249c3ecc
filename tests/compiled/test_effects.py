"""What a graph does beside its results: which inputs it writes, where it draws numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline._torch.effects import Effects, effects_of, kept_copy

CPU = frozenset({torch.device("cpu")})


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[GraphModule, list[Any]]:
    """What Dynamo makes of a function, and what it would call that with."""
    kept: list[tuple[GraphModule, list[Any]]] = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        kept.append((kept_copy(graph), list(inputs)))
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    (only,) = kept
    return only


def names_of(graph: GraphModule) -> list[str]:
    return [node.name for node in graph.graph.nodes if node.op == "placeholder"]


def written(function: Callable[..., Any], *arguments: Any) -> list[bool]:
    """Of each input, in the order in which the function uses them, whether it is written."""
    graph, inputs = traced(function, *arguments)
    found = effects_of(graph, inputs)
    return [place in found.written for place in range(len(inputs))]


def through_a_view(x: Tensor, y: Tensor) -> Tensor:
    x[1:].t().mul_(2.0)
    return x.sum() + y.sum()


def by_lists(x: Tensor, y: Tensor) -> Tensor:
    total = x.sum()
    torch._foreach_add_([y], [x])
    return total


def into_a_result(x: Tensor, y: Tensor) -> Tensor:
    torch.add(x, 1.0, out=y)
    return x.sum()


def in_a_copy(x: Tensor, y: Tensor) -> Tensor:
    return x.clone().mul_(2.0).sum() + y.sum()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (through_a_view, [True, False]),
        (by_lists, [False, True]),
        (into_a_result, [False, True]),
        (in_a_copy, [False, False]),
    ],
)
def test_writes_are_seen_however_they_are_made(
    function: Callable[..., Tensor], expected: list[bool]
) -> None:
    x, y = torch.ones(3, 3), torch.ones(3, 3)
    assert written(function, x, y) == expected


def test_statistics_of_a_batch_norm_are_written() -> None:
    graph, inputs = traced(nn.BatchNorm1d(3), torch.ones(4, 3))
    names = names_of(graph)
    told = {names[place] for place in effects_of(graph, inputs).written}
    assert sum("running" in name or "tracked" in name for name in told) == len(told) == 3


def test_nothing_is_computed_and_no_number_is_drawn() -> None:
    x = torch.zeros(4)

    def draw(x: Tensor) -> Tensor:
        return x.add_(torch.rand(4))

    graph, _ = traced(draw, torch.zeros(4))
    state = torch.get_rng_state()
    assert effects_of(graph, [x]) == Effects(frozenset({0}), CPU)
    assert not x.any()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_that_fails_leaves_modes_as_they_were() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._C._set_grad_enabled(True)
            torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, None)
            raise ArithmeticError

    with torch.no_grad():
        with pytest.raises(ArithmeticError):
            effects_of(Failing(), [torch.ones(1)])  # type: ignore[arg-type]
        assert not torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
