"""What an optimizer does to parameters, as functions that a graph can hold.

State stays where the optimizer keeps it and under its names, so checkpoints, ``state_dict`` and a
change between compiled and eager steps need nothing. Every number that may change from step to step
(learning rate, momentum, the corrections of Adam) goes in as a tensor: a schedule does not compile
anew. What an optimizer *does* (Nesterov, AMSGrad) is part of the graph.

Parameters that share all hyperparameters are a *class*: those of a parameter group that have taken
equally many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from .._torch import foreach
from .._torch.optim import has_step_hooks
from .._torch.tensors import version_of

Tensors = list[Tensor]


@dataclass(frozen=True)
class Kind:
    """What is done to a class of parameters; classes of one kind share their code in the graph."""

    name: str
    maximize: bool = False
    decays: bool = False
    momentum: bool = False
    nesterov: bool = False
    amsgrad: bool = False
    decoupled: bool = False  # weight decay on the parameter, not in the gradient


@dataclass(eq=False)
class Class:
    """Parameters that share all hyperparameters, and where their state is."""

    kind: Kind
    group: int  # of the optimizer
    slots: tuple[int, ...]  # the parameters, in the step's count
    state: dict[str, Tensors]  # names of the optimizer's → a tensor for each parameter
    steps: Tensors  # the optimizer's count of steps of each; empty where it keeps none
    taken: float  # steps
    versions: int  # of the counts, when they were last read or written here
    fresh: set[int]  # slots whose state was made for a step that they have not taken

    @property
    def key(self) -> tuple[Kind, tuple[int, ...]]:
        """What the graph depends on."""
        return self.kind, self.slots


def why_not(optimizer: Optimizer) -> str:
    """Why a graph cannot do what the optimizer does; empty when it can."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"{type(optimizer).__name__} is not SGD, Adam or AdamW"
    if has_step_hooks(optimizer):
        return f"{type(optimizer).__name__} has hooks on its step"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "the optimizer is differentiable"
        if any(p.is_complex() or p.is_sparse for p in group["params"]):
            return "the optimizer has complex or sparse parameters"
    return ""


def classes_of(optimizer: Optimizer, indices: dict[Tensor, int]) -> list[Class]:
    """The classes of those parameters that have a number; their state is made if there is none."""
    found: list[Class] = []
    for index, group in enumerate(optimizer.param_groups):
        params = [p for p in group["params"] if p in indices]
        kind = _kind(optimizer, group)
        new = {p for p in params if not optimizer.state.get(p)}
        by_steps: dict[float, list[Tensor]] = {}
        for param, taken in zip(params, _taken(optimizer, kind, group, params), strict=True):
            by_steps.setdefault(taken, []).append(param)
        for taken, members in by_steps.items():
            state = {n: [optimizer.state[p][n] for p in members] for n in _names(kind)}
            slots, steps = tuple(indices[p] for p in members), state.pop("step", [])
            fresh = {indices[p] for p in members if p in new}
            found.append(Class(kind, index, slots, state, steps, taken, _versions(steps), fresh))
    return found


def hold(optimizer: Optimizer, classes: Sequence[Class], params: Sequence[Tensor]) -> bool:
    """Whether the classes still hold: no other step was taken and no state was loaded."""
    for found in classes:
        group = optimizer.param_groups[found.group]
        if found.kind != _kind(optimizer, group) or found.versions != _versions(found.steps):
            return False
        names = {**found.state, **({"step": found.steps} if found.steps else {})}
        for at, slot in enumerate(found.slots):
            state = optimizer.state.get(params[slot], {})
            if any(state.get(name) is not tensors[at] for name, tensors in names.items()):
                return False
    return True


def _versions(steps: Sequence[Tensor]) -> int:
    return sum(map(version_of, steps))


def _kind(optimizer: Optimizer, group: dict[str, Any]) -> Kind:
    maximize, decays = bool(group["maximize"]), bool(group["weight_decay"])
    if isinstance(optimizer, SGD):
        momentum, nesterov = bool(group["momentum"]), bool(group["nesterov"])
        return Kind("sgd", maximize, decays, momentum=momentum, nesterov=nesterov)
    decoupled = isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))
    amsgrad = bool(group["amsgrad"])
    return Kind("adam", maximize, decays, amsgrad=amsgrad, decoupled=decoupled)


def _names(kind: Kind) -> tuple[str, ...]:
    if kind.name == "sgd":
        return ("momentum_buffer",) if kind.momentum else ()
    more = ("max_exp_avg_sq",) if kind.amsgrad else ()
    return ("step", "exp_avg", "exp_avg_sq", *more)


def _taken(
    optimizer: Optimizer, kind: Kind, group: dict[str, Any], params: Sequence[Tensor]
) -> list[float]:
    """How many steps each has taken; of SGD only whether there was one, where it matters."""
    if not _names(kind):  # there is no state, and looking it up would leave an empty one
        return [1.0] * len(params)
    taken = [_prepare(optimizer.state[p], kind, group, p) for p in params]
    if kind.name == "adam" and params:
        found: list[float] = torch.stack([optimizer.state[p]["step"] for p in params]).tolist()
        return found
    return taken if group["dampening"] else [1.0] * len(params)


def _prepare(state: dict[str, Any], kind: Kind, group: dict[str, Any], param: Tensor) -> float:
    """Make the state that a first step would make."""
    fresh = 0.0
    for name in _names(kind):
        if isinstance(state.get(name), Tensor):
            fresh = 1.0
        elif name == "step":
            on_device = group.get("capturable") or group.get("fused")
            device = param.device if on_device else torch.device("cpu")
            state[name] = torch.zeros((), dtype=_step_dtype(group), device=device)
        else:
            state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return fresh


def _step_dtype(group: dict[str, Any]) -> torch.dtype:
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return torch.float64 if wide else torch.float32


# -- hyperparameters --------------------------------------------------------------------------


def hyperparameters_of(optimizer: Optimizer, found: Class) -> list[float]:
    """What the rule of a class needs to know in the step that comes."""
    group = optimizer.param_groups[found.group]
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if found.kind.name == "sgd":
        gain = 1.0 - float(group["dampening"]) if found.taken else 1.0
        return [lr, decay, float(group["momentum"]), gain]
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = found.taken + 1
    return [
        lr / (1 - beta1**step),
        1 - lr * decay if found.kind.decoupled else decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        float(group["eps"]),
    ]


def idle(kind: Kind) -> list[float]:
    """What :func:`hyperparameters_of` would say of a step that leaves parameters and state alone.

    For gradients that are zero.
    """
    if kind.name == "sgd":
        return [0.0, 0.0, 1.0, 0.0]
    return [0.0, 1.0 if kind.decoupled else 0.0, 0.0, 1.0, 0.0, 1.0, 1.0]


def count_step(classes: Sequence[Class], used: Sequence[bool]) -> None:
    """One more step, of the parameters that were used."""
    for found in classes:
        found.fresh -= {slot for slot in found.fresh if used[slot]}
        stepped = [s for slot, s in zip(found.slots, found.steps, strict=False) if used[slot]]
        if stepped:
            foreach.add_(stepped, 1.0)
        if len(stepped) == len(found.steps):  # else the class falls apart: it is found anew
            found.taken += 1
            found.versions = _versions(found.steps)


def forget_unused(
    optimizer: Optimizer, classes: Sequence[Class], params: Sequence[Tensor], used: Sequence[bool]
) -> None:
    """Drop the state that was made for parameters that have never taken a step."""
    for found in classes:
        for slot in found.fresh:
            if not used[slot]:
                optimizer.state.pop(params[slot], None)


def step_only(optimizer: Optimizer, chosen: Sequence[Tensor]) -> None:
    """Let the optimizer itself step some parameters, by what their ``.grad`` holds."""
    others = [p for group in optimizer.param_groups for p in group["params"]]
    held = {p: p.grad for p in others if not any(p is c for c in chosen)}
    for param in held:
        param.grad = None
    try:
        optimizer.step()
    finally:
        for param, grad in held.items():
            param.grad = grad


# -- rules: in place, for the graph -----------------------------------------------------------


def apply(
    kind: Kind, params: Tensors, grads: Tensors, state: dict[str, Tensors], n: Tensor
) -> None:
    """Step ``params``; ``n`` holds what :func:`hyperparameters_of` says."""
    if kind.maximize:
        grads = list(foreach.neg(grads))
    if kind.decays and kind.decoupled:
        foreach.mul_(params, n[1])
    elif kind.decays:
        grads = list(foreach.add(grads, foreach.mul(params, n[1])))
    if kind.name == "sgd":
        _sgd(kind, params, grads, state, n)
    else:
        _adam(kind, params, grads, state, n)


def _sgd(kind: Kind, params: Tensors, grads: Tensors, state: dict[str, Tensors], n: Tensor) -> None:
    if kind.momentum:
        buffers = state["momentum_buffer"]
        foreach.mul_(buffers, n[2])
        foreach.add_(buffers, foreach.mul(grads, n[3]))
        if kind.nesterov:
            grads = list(foreach.add(grads, foreach.mul(buffers, n[2])))
        else:
            grads = buffers
    foreach.add_(params, foreach.mul(grads, -n[0]))


def _adam(
    kind: Kind, params: Tensors, grads: Tensors, state: dict[str, Tensors], n: Tensor
) -> None:
    means, squares = state["exp_avg"], state["exp_avg_sq"]
    foreach.add_(means, foreach.mul(foreach.sub(grads, means), n[2]))
    foreach.mul_(squares, n[3])
    foreach.add_(squares, foreach.mul(foreach.mul(grads, grads), n[4]))
    if kind.amsgrad:
        foreach.maximum_(state["max_exp_avg_sq"], squares)
        squares = state["max_exp_avg_sq"]
    roots = foreach.div(foreach.sqrt(squares), n[5])
    # As a list: added as one tensor it would be read from the GPU first, and everything awaited.
    steps = foreach.div(means, foreach.add(roots, [n[6]] * len(roots)))
    foreach.add_(params, foreach.mul(steps, -n[0]))


def clip(grads: Tensors, max_norm: float) -> tuple[Tensors, Tensor]:
    """The gradients, scaled down if their norm is above ``max_norm``; and that norm."""
    norm = torch.linalg.vector_norm(torch.stack(foreach.norm(grads)))
    return list(foreach.mul(grads, clip_factor(norm, max_norm))), norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this norm are multiplied by."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
