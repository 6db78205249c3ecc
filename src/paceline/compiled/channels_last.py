"""Convolutions on a CPU, in the order of memory that suits them.

Inductor gives the convolutions of a forward graph their channels last, which a CPU prefers. A
backward graph of its own then finds the activations so; in the graph of a whole step it is told of
the order that eager mode would have, and copies everything back. So both are told here: what a
convolution and its backward take is put in order once, where it is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_aten = torch.ops.aten
_TENSORS = {_aten.convolution.default: 2, _aten.convolution_backward.default: 3}  # leading inputs


def order_convolutions(graph: Graph) -> None:
    """Give all convolutions of images in ``graph`` their channels last."""
    ordered: dict[Node, Node] = {}
    for node in list(graph.nodes):
        count = _TENSORS.get(node.target, 0)
        inputs = node.args[:count]
        if count and all(_is_image(given) for given in inputs):
            last = [_ordered(graph, given, ordered) for given in inputs]
            node.args = (*last, *node.args[count:])


def _is_image(given: Any) -> bool:
    value = given.meta.get("val") if isinstance(given, Node) else None
    return isinstance(value, Tensor) and value.ndim == 4 and value.device.type == "cpu"


def _ordered(graph: Graph, given: Node, ordered: dict[Node, Node]) -> Node:
    if given not in ordered:
        order = torch.channels_last
        with graph.inserting_after(given):
            ordered[given] = graph.call_function(
                _aten.clone.default, (given,), {"memory_format": order}
            )
        ordered[given].meta["val"] = given.meta["val"].clone(memory_format=order)
    return ordered[given]
