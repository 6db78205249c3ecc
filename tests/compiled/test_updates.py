"""The graph's optimizers against torch's own, in eager mode: the functions are the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.compiled import updates

SGD, ADAM = torch.optim.SGD, torch.optim.Adam
CASES: list[tuple[type, dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (SGD, {"lr": 0.1, "foreach": True}),
    (ADAM, {"lr": 0.01}),
    (ADAM, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (ADAM, {"lr": 0.01, "maximize": True, "betas": (0.8, 0.9), "eps": 1e-3}),
    (ADAM, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.5, "amsgrad": True}),
]


def pair(kind: type, options: dict[str, Any]) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    ours, theirs = list(model.parameters()), list(twin.parameters())
    return kind(ours, **options), kind(theirs, **options), ours, theirs


def grads_for(params: list[Tensor], step: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=source) for p in params]


def graph_step(optimizer: Any, params: list[Tensor], grads: list[Tensor]) -> None:
    """What a compiled step does with an optimizer."""
    slots = {p: n for n, p in enumerate(params)}
    classes = updates.classes_of(optimizer, slots)
    for found in classes:
        numbers = torch.tensor(updates.hyperparameters_of(optimizer, found), dtype=torch.float64)
        own = [params[slot] for slot in found.slots]
        with torch.no_grad():
            updates.apply(found.kind, own, [grads[s] for s in found.slots], found.state, numbers)
    updates.count_step(classes, [True] * len(params))


def _names_in(optimizer: Any) -> list[tuple[str, ...]]:
    """Of what the optimizer keeps for each parameter."""
    kept = [{k for k, v in own.items() if v is not None} for own in optimizer.state.values()]
    return [tuple(sorted(names)) for names in kept]


def torch_step(optimizer: Any, params: list[Tensor], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: str(value)[-40:])
def test_an_update_does_what_torchs_optimizer_does(kind: type, options: dict[str, Any]) -> None:
    ours, theirs, params, others = pair(kind, options)
    for step in range(4):
        graph_step(ours, params, grads_for(params, step))
        torch_step(theirs, others, grads_for(others, step))
    torch.testing.assert_close(params, others, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: str(value)[-40:])
def test_the_state_is_the_optimizers_own(kind: type, options: dict[str, Any]) -> None:
    ours, theirs, params, others = pair(kind, options)
    for step in range(2):
        graph_step(ours, params, grads_for(params, step))
        torch_step(theirs, others, grads_for(others, step))
    assert _names_in(ours) == _names_in(theirs)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    graph_step(ours, params, grads_for(params, 2))
    torch_step(theirs, others, grads_for(others, 2))
    torch.testing.assert_close(params, others, rtol=1e-6, atol=1e-7)


def test_classes_hold_until_somebody_else_steps_or_loads() -> None:
    ours, _, params, _ = pair(ADAM, {"lr": 0.1})
    slots = {p: n for n, p in enumerate(params)}
    classes = updates.classes_of(ours, slots)
    updates.count_step(classes, [True] * 4)
    assert updates.hold(ours, classes, params)
    torch_step(ours, params, grads_for(params, 0))
    assert not updates.hold(ours, classes, params)
    classes = updates.classes_of(ours, slots)
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert not updates.hold(ours, classes, params)


def test_parameters_that_took_fewer_steps_are_a_class_of_their_own() -> None:
    ours, theirs, params, others = pair(ADAM, {"lr": 0.1})
    for optimizer, own in ((ours, params), (theirs, others)):
        own[0].grad = torch.ones_like(own[0])
        optimizer.step()
    graph_step(ours, params, grads_for(params, 1))
    torch_step(theirs, others, grads_for(others, 1))
    torch.testing.assert_close(params, others, rtol=1e-6, atol=1e-7)


def test_clipping_scales_only_what_is_too_long() -> None:
    grads = [torch.full((4,), 3.0), torch.zeros(2)]
    clipped, norm = updates.clip(grads, 2.0)
    torch.testing.assert_close(norm, torch.tensor(6.0))
    torch.testing.assert_close(clipped[0], torch.full((4,), 1.0))
    same, _ = updates.clip(grads, 10.0)
    torch.testing.assert_close(same, grads)


def test_optimizers_that_a_graph_cannot_hold_are_named() -> None:
    params = [nn.Parameter(torch.ones(1))]
    assert "RMSprop" in updates.why_not(torch.optim.RMSprop(params))
    hooked = SGD(params, 0.1)
    hooked.register_step_post_hook(lambda *_: None)
    assert "hooks" in updates.why_not(hooked)
    assert updates.why_not(SGD(params, 0.1)) == ""
