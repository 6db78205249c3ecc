"""What a convolution takes has its channels last, in one copy for forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.compiled.channels_last import order_convolutions

aten = torch.ops.aten


def graph_of(function: Any, *inputs: Tensor) -> tuple[Graph, Any]:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    return module.graph, module


def train(image: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    wanted = weight.detach().requires_grad_()
    loss = torch.conv2d(image.relu(), wanted, padding=1).square().sum()
    return (loss.detach(), *torch.autograd.grad(loss, wanted))


def inputs_of(graph: Graph, target: Any, count: int) -> list[Node]:
    (node,) = [node for node in graph.nodes if node.target is target]
    return list(node.args[:count])


def test_forward_and_backward_share_what_was_put_in_order() -> None:
    graph, module = graph_of(train, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    order_convolutions(graph)
    graph.lint()
    forward = inputs_of(graph, aten.convolution.default, 2)
    backward = inputs_of(graph, aten.convolution_backward.default, 3)
    assert forward == backward[1:]
    for given in backward:
        assert given.target is aten.clone.default
        assert given.meta["val"].is_contiguous(memory_format=torch.channels_last)
    module.recompile()
    image, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    torch.testing.assert_close(module(image, weight), train(image, weight))


def test_what_is_no_image_stays_as_it_is() -> None:
    def convolve(line: Tensor, weight: Tensor) -> Tensor:
        return torch.conv1d(line, weight)

    graph, _ = graph_of(convolve, torch.randn(2, 3, 8), torch.randn(4, 3, 3))
    before = [node.target for node in graph.nodes]
    order_convolutions(graph)
    assert [node.target for node in graph.nodes] == before
