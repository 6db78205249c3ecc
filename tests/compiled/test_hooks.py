"""Backward hooks of modules and tensors inside compiled code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.modules.module import register_module_full_backward_hook

from paceline.compiled import (
    UNAVAILABLE,
    gradient_hook,
    hooks_of,
    keep_hooks,
    on_gradient,
    refuse_hooks,
)
from paceline.errors import HookRefusedError, HookResultError

from .marks import needs_compiler, no_instances

pytestmark = [
    pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE),
    no_instances,
]
Log = list[Any]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def model() -> nn.Sequential:
    made = nn.Sequential(
        nn.Linear(4, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 2)
    )
    for number, param in enumerate(made.parameters()):
        nn.init.constant_(param, 0.1 * (number + 1))
    return made


def sums(gradients: Any) -> list[float | None]:
    return [None if g is None else round(float(g.sum()), 4) for g in gradients]


def watched(log: Log) -> nn.Sequential:
    """A model whose hooks write a log and change gradients."""
    made = model()

    def before(module: nn.Module, outputs: Any) -> Any:
        log.append(("before", type(module).__name__, sums(outputs)))
        return tuple(g * 2 for g in outputs)

    def after(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        log.append(("after", type(module).__name__, sums(inputs), sums(outputs)))
        return tuple(g * 3 for g in inputs)

    def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
        log.append(("look", sums(inputs), sums(outputs)))

    made[1].register_full_backward_pre_hook(before)
    made[1].register_full_backward_hook(after)
    made[2].register_full_backward_hook(look)
    return made


def train(module: nn.Module, call: Callable[[Tensor], Tensor], needs: bool) -> list[Tensor]:
    x = (torch.arange(12.0).view(3, 4) / 10).requires_grad_(needs)
    for _ in range(2):
        call(x).square().sum().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("needs", [True, False])
def test_kept_hooks_see_and_change_the_gradients_of_eager_mode(
    backend: str | None, needs: bool
) -> None:
    wanted: Log = []
    expected = watched(wanted)
    gradients = train(expected, expected, needs)
    found: Log = []
    module = watched(found)
    with keep_hooks(module):
        call: Any = module
        if backend is not None:
            call = torch.compile(module, backend=backend, fullgraph=True)
        got = train(module, call, needs)
    torch.testing.assert_close(got, gradients)
    assert found == wanted
    assert len(found) == 6


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients:UserWarning")
def test_a_hook_of_a_module_whose_inputs_need_no_gradient_is_called() -> None:
    def logged(log: Log) -> nn.Module:
        made = model()
        made[0].register_full_backward_hook(lambda m, i, o: log.append((sums(i), sums(o))))
        return made

    wanted: Log = []
    found: Log = []
    expected, module = logged(wanted), logged(found)
    train(expected, expected, False)
    with keep_hooks(module):
        train(module, torch.compile(module, backend="aot_eager", fullgraph=True), False)
    assert found == wanted
    assert found[0][0] == [None]


@pytest.mark.slow
@needs_compiler
def test_inductor_keeps_hooks() -> None:
    wanted: Log = []
    found: Log = []
    expected, module = watched(wanted), watched(found)
    gradients = train(expected, expected, True)
    with keep_hooks(module):
        got = train(module, torch.compile(module, fullgraph=True), True)
    torch.testing.assert_close(got, gradients)
    assert [entry[0] for entry in found] == [entry[0] for entry in wanted]


def test_a_module_that_is_called_twice_pairs_its_gradients() -> None:
    def logged(log: Log) -> nn.Linear:
        made = nn.Linear(2, 2)
        nn.init.constant_(made.weight, 0.5)
        nn.init.zeros_(made.bias)
        made.register_full_backward_hook(lambda m, i, o: log.append((sums(i), sums(o))))
        return made

    wanted: Log = []
    found: Log = []
    for log, compile_it in ((wanted, False), (found, True)):
        module = logged(log)
        x = torch.ones(1, 2, requires_grad=True)

        def twice(x: Tensor, module: nn.Linear = module) -> Tensor:
            return (module(module(x) * 3) + module(x) * 5).sum()

        if compile_it:
            with keep_hooks(module):
                torch.compile(twice, backend="aot_eager", fullgraph=True)(x).backward()
        else:
            twice(x).backward()
    assert sorted(found) == sorted(wanted)
    assert len(found) == 3


def test_parameters_keep_their_tensor_and_post_accumulate_hooks() -> None:
    log: Log = []
    module = model()
    module[2].weight.register_hook(lambda g: log.append("tensor") or g * 5)
    module[2].bias.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))
    expected = model()
    wanted = train(expected, expected, True)
    got = train(module, torch.compile(module, backend="aot_eager", fullgraph=True), True)
    torch.testing.assert_close(got[4], wanted[4] * 5)
    torch.testing.assert_close(got[5], wanted[5])
    assert sorted(log) == ["accumulated", "accumulated", "tensor", "tensor"]


SEEN: Log = []


def double(grad: Tensor) -> Tensor:
    SEEN.append(sums([grad]))
    return grad * 2


DOUBLE = gradient_hook(double)


def test_a_hook_of_a_tensor_made_in_the_graph_is_called_with_its_gradient() -> None:
    def loss(w: Tensor) -> Tensor:
        y = on_gradient(w * 3, DOUBLE)
        return y.square().sum()

    SEEN.clear()
    grads = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        w = torch.ones(2, requires_grad=True)
        call(w).backward()
        grads.append(w.grad)
    assert torch.equal(*grads)
    assert grads[0].tolist() == [36.0, 36.0]
    assert SEEN == [[12.0], [12.0]]


def test_removing_gives_the_module_back_as_it_was() -> None:
    module = watched([])
    before = [dict(m._backward_hooks) for m in module.modules()]
    kept = keep_hooks(module)
    assert not any(m._backward_hooks or m._backward_pre_hooks for m in module.modules())
    kept.remove()
    assert [dict(m._backward_hooks) for m in module.modules()] == before
    assert not any("forward" in vars(m) for m in module.modules())


def test_without_gradients_a_gate_is_only_the_module() -> None:
    module = watched([])
    x = torch.ones(1, 4)
    with torch.no_grad(), keep_hooks(module):
        assert torch.equal(module(x), model()(x))


def test_every_hook_that_would_be_lost_is_named() -> None:
    module = watched([])
    module[0].weight.register_hook(double)
    module[0].bias.register_post_accumulate_grad_hook(lambda p: None)
    names = list(hooks_of(module))
    assert len(names) == 5
    assert "double of 0.weight (tensor hook)" in names
    assert any(name.endswith("of 0.bias (post-accumulate hook)") for name in names)
    with pytest.raises(HookRefusedError) as caught:
        refuse_hooks(module)
    assert list(caught.value.hooks) == names
    refuse_hooks(model())


def test_a_hook_that_no_gate_can_call_is_refused_by_name() -> None:
    module = model()
    module[0].register_backward_hook(lambda m, i, o: None)
    with pytest.raises(HookRefusedError, match="register_backward_hook"):
        keep_hooks(module)
    handle = register_module_full_backward_hook(lambda m, i, o: None)
    try:
        with pytest.raises(HookRefusedError, match="all modules"):
            keep_hooks(model())
    finally:
        handle.remove()


def test_a_hook_that_returns_another_number_of_gradients_is_an_error_with_its_module() -> None:
    module = model()
    module[1].register_full_backward_hook(lambda m, i, o: (*i, *i))
    with keep_hooks(module), pytest.raises(HookResultError) as caught:
        module(torch.ones(1, 4)).sum().backward()
    assert (caught.value.module, caught.value.given, caught.value.returned) == ("1", 1, 2)


def test_hooks_that_are_kept_again_do_not_compile_again() -> None:
    log: Log = []
    module = watched(log)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for _ in range(3):
        with keep_hooks(module):
            train(module, compiled, True)
    assert counter.frame_count == 1
    twin = copy.deepcopy(module)
    assert [type(m) for m in twin.modules()] == [type(m) for m in module.modules()]
    assert twin[1].forward.__self__ is twin[1]


def test_a_forward_that_belongs_to_one_object_comes_back() -> None:
    module = watched([])
    usual = module[1].forward

    def doubled(x: Tensor) -> Tensor:
        return usual(x) * 2

    module[1].forward = doubled
    with keep_hooks(module):
        assert module[1].forward is not doubled
    assert module[1].forward is doubled
