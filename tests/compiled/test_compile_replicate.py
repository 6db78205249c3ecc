"""``torch.compile`` of replicated modules: one graph, with the averages in its backward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline import hooks, replicate

from .ranks import Open, Results, Row, check, launch

ROWS: dict[str, Row] = {}
BACKEND = "aot_eager"


def row(function: Row) -> Row:
    ROWS[function.__name__] = function
    return function


class Net(nn.Module):
    """Parameters of its own, of children, and buffers."""

    def __init__(self, *, breaks: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.norm, self.fc2 = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.breaks, self.checkpointed = breaks, checkpointed

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        if self.checkpointed:
            x = checkpoint(self.fc1, x, use_reentrant=False)
        else:
            x = self.fc1(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.fc2(self.norm(x)) * self.scale * factor


def compare(
    open_: Open,
    make: Callable[[Net, Any], Any],
    *,
    fullgraph: bool = True,
    syncs: tuple[bool, ...] = (True, True, True),
    compiled_backward: bool = False,
    **options: bool,
) -> CompileCounterWithBackend:
    """Train a compiled one beside an eager one; both have the same numbers after every step."""
    group = open_()
    ours, eager = (make(Net(**options), group) for _ in range(2))
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(ours, backend=counter, fullgraph=fullgraph)
    models = ((compiled, ours), (eager, eager))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _, model in models]
    for step, sync in enumerate(syncs):
        data = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        for (call, model), optimizer in zip(models, optimizers, strict=True):
            for part in model.modules():
                if replicate.state(part) is not None:
                    part.set_requires_gradient_sync(sync)
            loss = call(data).square().mean()
            inside = compiled_backward and call is compiled
            with _compiled_autograd() if inside else contextlib.nullcontext():
                loss.backward()
            if sync:
                optimizer.step()
                optimizer.zero_grad()
        assert_close(ours.state_dict(), eager.state_dict())
    flat = torch.cat([p.detach().flatten() for p in ours.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(2)]
    group.all_gather(everyone, flat)
    assert torch.equal(*everyone)
    return counter


def _compiled_autograd() -> Any:
    return compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager"))


def whole(model: Net, group: Any) -> Any:
    return replicate(model, process_group=group)


@row
def a_whole_model_is_one_graph(open_: Open) -> None:
    assert compare(open_, whole).frame_count == 1


@row
def parts_of_a_model(open_: Open) -> None:
    def parts(model: Net, group: Any) -> Net:
        for part in (model.fc1, model.norm):
            replicate(part, process_group=group)
        return replicate(model, process_group=group)

    assert compare(open_, parts).frame_count == 1


@row
def a_graph_that_breaks(open_: Open) -> None:
    compare(open_, whole, fullgraph=False, breaks=True)


@row
def no_sync(open_: Open) -> None:
    assert compare(open_, whole, syncs=(False, True, True, False, True)).frame_count == 1


@row
def activation_checkpoints(open_: Open) -> None:
    compare(open_, whole, checkpointed=True)


@row
def hooks_in_half_precision(open_: Open) -> None:
    for hook in (hooks.fp16_compress_hook, hooks.bf16_compress_hook):

        def hooked(model: Net, group: Any, hook: Any = hook) -> Net:
            whole(model, group).register_comm_hook(group, hook)
            return model

        compare(open_, hooked)
        torch._dynamo.reset()


@row
def compiled_autograd_around_it(open_: Open) -> None:
    compare(open_, whole, fullgraph=False, compiled_backward=True)


@row
def a_copy_is_compiled_as_an_ordinary_model(open_: Open) -> None:
    group = open_()
    model = copy.deepcopy(whole(Net(), group))
    before = group.traffic.calls
    torch.compile(model, backend=BACKEND, fullgraph=True)(torch.ones(3, 4)).sum().backward()
    assert group.traffic.calls == before


QUICK = ["a_whole_model_is_one_graph", "a_graph_that_breaks", "hooks_in_half_precision"]


@pytest.fixture(scope="module")
def quick() -> Results:
    return launch(__name__, QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_a_compiled_replicated_module_does_what_an_eager_one_does(
    quick: Results, name: str
) -> None:
    check(quick, name)


@pytest.mark.slow
def test_so_it_does_in_every_other_way() -> None:
    rest = [name for name in ROWS if name not in QUICK]
    results = launch(__name__, rest)
    for name in rest:
        check(results, name)
