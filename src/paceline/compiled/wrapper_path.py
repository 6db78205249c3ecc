"""``torch.compile(ddp)``: the wrapper's forward as Dynamo traces it.

One graph forward, one backward, with the averages inside the backward. The parameters of each layer
go through a *gate*, an identity function whose backward hands the gradients over (``wire.py``) and
lets none through: the reducer puts the averages into ``.grad`` itself, as it does in eager mode. A
layer that the loss does not reach has a gate whose backward never runs, so unused parameters are
known. What every gate's backward returns is a ticket, the gradient of one number, ``anchor``, that
all gates share: autograd adds tickets up, and behind that sum everything is awaited.

Whether a pass is averaged, weighted or only gathered is decided when it runs. Where something
cannot be traced (sparse gradients, hooks of parameters), the wrapper stays outside of graphs, as
torch's.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from .._torch import dynamo
from .._torch.graphs import map_only
from ..ddp import DistributedDataParallel, forward_in_graph, wrapper_numbered
from . import reasons
from .turns import WrapperTurns

log = logging.getLogger("paceline.compiled")
_turns = WrapperTurns()


class _Gate(torch.autograd.Function):
    """The parameters of one layer."""

    @staticmethod
    def forward(
        ctx: Any, indices: list[int], wire: Tensor, anchor: Tensor, *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.indices = indices
        ctx.save_for_backward(wire)
        return tuple([param.view_as(param) for param in params])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (wire,) = ctx.saved_tensors
        ticket = torch.ops.paceline.hand_over(list(grads), ctx.indices, wire)
        return (None, None, ticket, *[None for _ in grads])


class _End(torch.autograd.Function):
    """What all gates' tickets come to."""

    @staticmethod
    def forward(ctx: Any, wire: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(wire)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, tickets: Tensor) -> tuple[Tensor | None, ...]:
        (wire,) = ctx.saved_tensors
        return None, torch.ops.paceline.average(tickets, wire)


def traced_forward(ddp: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """The wrapper's forward in a graph; inside a compiled step, the module's own."""
    if ddp.traced.in_step:
        return ddp.module(*inputs, **kwargs)
    if why_not(ddp.traced.number):
        return ddp.traced.eager_forward(*inputs, **kwargs)
    buffers = [ddp.traced.beat, *[b for _, b in ddp.module.named_buffers()]]
    trains, alone = torch.is_grad_enabled(), is_alone(ddp.traced.number)
    torch.ops.paceline.before_forward(buffers, trains, alone, ddp.traced.number)
    if ddp.device_ids:
        device = torch.device(ddp.device_type, ddp.device_ids[0])
        inputs, kwargs = map_only(Tensor, lambda t: t.to(device), (inputs, kwargs))
    if alone or not trains:
        return ddp.module(*inputs, **kwargs)
    take_turn(ddp.traced.number)
    return torch.func.functional_call(ddp.module, _gated(ddp), inputs, kwargs)


@dynamo.folded
def why_not(number: Tensor) -> str:
    """Why a wrapper's averages cannot be in a graph; asked when it is traced."""
    ddp = wrapper_numbered(number)
    strict = ddp.replica.reducer.policy.strict
    if strict and not dynamo.wants_averages_in_graphs():  # as with torch's, Dynamo splits the graph
        return "strict"
    reason = reasons.never(ddp) or reasons.now(ddp, ddp.replica.reducer.params)
    if reason:
        rank = ddp.replica.group.rank()
        log.warning("rank %d: torch.compile(ddp): averages outside the graph: %s", rank, reason)
    return reason


@dynamo.folded
def is_alone(number: Tensor) -> bool:
    """Whether there is nobody to average with; asked when it is traced."""
    return not wrapper_numbered(number).replica.reducer.averages


@dynamo.folded
def take_turn(number: Tensor) -> bool:
    """Wait until this rank may compile (``turns.py``); asked when it is traced."""
    _turns.take(wrapper_numbered(number))
    return True


def _gated(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters by name, behind their gates."""
    gate: Any = _Gate  # torch has no annotations for apply
    end: Any = _End
    anchor = end.apply(ddp.traced.number, ddp.traced.anchor)
    layers: dict[str, list[tuple[int, str, Tensor]]] = {}
    for number, (name, param) in enumerate(ddp.replica.trained.placed.items()):
        if param.requires_grad:
            layers.setdefault(name.rpartition(".")[0], []).append((number, name, param))
    gated: dict[str, Tensor] = {}
    for members in layers.values():
        indices = [number for number, _, _ in members]
        params = [param for _, _, param in members]
        passed = gate.apply(indices, ddp.traced.number, anchor, *params)
        for (_, name, _), tensor in zip(members, passed, strict=True):
            gated[name] = tensor
    return gated


def offer_forward() -> None:
    """Have ``torch.compile`` trace it: a note on a function of ours. Called once."""
    dynamo.trace_instead(forward_in_graph, traced_forward)
