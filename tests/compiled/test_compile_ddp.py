"""``torch.compile(ddp)`` and ``model.compile()``: averages inside the backward graph, or eager."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounterWithBackend

import paceline
from paceline.errors import ModuleStateError
from paceline.groups import Group

from .marks import no_instances
from .ranks import Open, Results, Row, check, launch
from .steps import OPTIMIZERS, Pair, assert_alike, batch, loss_of, seeded

ROWS: dict[str, Row] = {}


def row(function: Row) -> Row:
    ROWS[function.__name__] = function
    return function


class Compiled(Pair):
    """A wrapper that is compiled, and one that is not."""

    def __init__(self, groups: Any, model: str, optimizer: str, backend: Any = None) -> None:
        super().__init__(groups, model, optimizer)
        self.counter = CompileCounterWithBackend("aot_eager")
        self.compiled = torch.compile(self.ddp, backend=backend or self.counter, fullgraph=True)

    def train(self, steps: int = 4, *more: Any) -> None:
        """On both."""
        for number in range(steps):
            inputs = (*batch(self.rank, number), *more)
            self.optimizer.zero_grad()
            loss_of(self.compiled, *inputs).backward()
            self.optimizer.step()
            self.eager_step(*inputs)


def parity(open_: Open, model: str) -> None:
    pair = Compiled([open_(), open_()], model, "momentum")
    pair.train(1)
    passes = pair.ddp.replica.reducer.passes
    pair.train(3)
    assert pair.ddp.replica.reducer.passes == passes + 3  # no gradient is averaged twice
    assert_alike(*pair.states)
    assert pair.counter.frame_count == 1
    own, other = pair.ddp.module.parameters(), pair.eager.module.parameters()
    for mine, expected in zip(own, other, strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-5, atol=1e-6)


@row
def an_mlp(open_: Open) -> None:
    parity(open_, "mlp")


@row
def a_transformer(open_: Open) -> None:
    parity(open_, "transformer")


@row
def a_conv_net_with_batchnorm(open_: Open) -> None:
    parity(open_, "conv")


@row
def unused_parameters(open_: Open) -> None:
    pair = Compiled([open_(), open_()], "branches", "momentum")
    pair.train(3, pair.rank == 0)
    assert_alike(*pair.states)
    assert pair.ddp.module.never.weight.grad is None


@row
def no_sync_and_weights(open_: Open) -> None:
    pair = Compiled([open_(), open_()], "mlp", "sgd")
    for number in range(4):
        rows = 4 + 2 * pair.rank
        inputs = batch(pair.rank, number, rows)
        both = ((pair.compiled, pair.ddp), (pair.eager, pair.eager))
        optimizers = pair.optimizer, pair.eager_optimizer
        for (model, ddp), optimizer in zip(both, optimizers, strict=True):
            with ddp.accumulate(2) as last, ddp.samples(rows):
                loss_of(model, *inputs).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    assert_alike(*pair.states)
    assert pair.counter.frame_count == 1


@row
def gradients_that_are_not_dropped(open_: Open) -> None:
    """A second backward pass adds to what the first has averaged."""
    pair = Compiled([open_(), open_()], "mlp", "sgd")
    for number in range(3):
        for model in (pair.compiled, pair.eager):
            loss_of(model, *batch(pair.rank, number)).backward()
    grads = zip(pair.ddp.parameters(), pair.eager.parameters(), strict=True)
    for mine, expected in grads:
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-5, atol=1e-6)


@row
def gradients_that_a_rank_holds_before_a_weighted_pass(open_: Open) -> None:
    """Averages that were not dropped, and on one rank more than these."""
    pair = Compiled([open_(), open_()], "mlp", "sgd")
    for number in range(3):
        for model, ddp in ((pair.compiled, pair.ddp), (pair.eager, pair.eager)):
            if number and pair.rank:
                loss_of(ddp.module, *batch(9, number)).backward()
            with ddp.samples(2 + pair.rank):
                loss_of(model, *batch(pair.rank, number)).backward()
    grads = zip(pair.ddp.parameters(), pair.eager.parameters(), strict=True)
    for mine, expected in grads:
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-5, atol=1e-6)
        other = mine.grad.clone()
        pair.ddp.replica.group.broadcast(other, 0)
        assert torch.equal(mine.grad, other)


@row
def communication_hooks(open_: Open) -> None:
    groups = [open_(), open_()]
    pair = Compiled(groups, "mlp", "sgd")
    for ddp, group in zip((pair.ddp, pair.eager), groups, strict=True):
        ddp.register_comm_hook(group, paceline.hooks.fp16_compress_hook)
    pair.train(2)
    assert_alike(*pair.states, 1e-3)


@row
def what_comes_before_a_forward(open_: Open) -> None:
    """The wrapper makes itself ready for every forward, whether there are buffers or not."""
    pair = Compiled([open_(), open_()], "mlp", "sgd")
    made: list[int] = []
    before = pair.ddp.replica.before_forward
    pair.ddp.replica.before_forward = lambda: (made.append(1), before())
    pair.train(3)
    assert len(made) == 3


class TwoForwards(torch.nn.Module):
    """The wrapper called twice, and a parameter of it used beside it."""

    def __init__(self, compiled: Any, weight: torch.nn.Parameter, factor: float) -> None:
        super().__init__()
        self.compiled, self.factor = [compiled], factor
        self.weight = [weight]

    def forward(self, x: Any, twice: bool) -> Any:
        output = self.compiled[0](x)
        if twice:
            output = output + self.compiled[0](x * 2)
        return output + self.factor * self.weight[0].square().sum()


def beside_the_wrapper(open_: Open, *, weighted: bool, twice: bool, everywhere: bool) -> None:
    pair = Compiled([open_(), open_()], "mlp", "sgd")
    factor = 0.01 * (1 + pair.rank) if everywhere or pair.rank == 0 else 0.0
    ways = (
        (pair.compiled, pair.ddp, pair.optimizer),
        (pair.eager, pair.eager, pair.eager_optimizer),
    )
    for number in range(4):
        x, y = batch(pair.rank, number)
        for model, ddp, optimizer in ways:
            both = TwoForwards(model, ddp.module[0].weight, factor)
            counted = ddp.samples(2 + pair.rank) if weighted else contextlib.nullcontext()
            with ddp.accumulate(2 if weighted else 1) as last, counted:
                loss_of(both, x, y, twice).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    assert_alike(*pair.states)


@row
def gradients_from_outside_the_forward(open_: Open) -> None:
    """They come when the graph has handed its own over, on one rank or on all."""
    beside_the_wrapper(open_, weighted=False, twice=False, everywhere=True)
    beside_the_wrapper(open_, weighted=False, twice=False, everywhere=False)


@row
def gradients_from_outside_that_are_weighed_and_gathered(open_: Open) -> None:
    beside_the_wrapper(open_, weighted=True, twice=False, everywhere=True)


@row
def two_forwards_and_one_backward(open_: Open) -> None:
    beside_the_wrapper(open_, weighted=False, twice=True, everywhere=True)
    beside_the_wrapper(open_, weighted=True, twice=True, everywhere=True)


@row
def join(open_: Open) -> None:
    pair = Compiled([open_(), open_()], "mlp", "sgd")
    counts = 2 + 2 * pair.rank
    for ddp, model, optimizer in (
        (pair.ddp, pair.compiled, pair.optimizer),
        (pair.eager, pair.eager, pair.eager_optimizer),
    ):
        with ddp.join():
            for number in range(counts):
                optimizer.zero_grad()
                loss_of(model, *batch(pair.rank, number)).backward()
                optimizer.step()
    assert_alike(*pair.states)


@row
def evaluation_without_gradients(open_: Open) -> None:
    pair = Compiled([open_(), open_()], "conv", "sgd")
    pair.train(1)
    for model in (pair.ddp, pair.eager):
        model.eval()
    x, _ = batch(pair.rank, 9)
    with torch.no_grad():
        torch.testing.assert_close(pair.compiled(x), pair.eager(x), rtol=1e-6, atol=1e-6)


@row
def what_cannot_be_traced_is_averaged_outside(open_: Open) -> None:
    usual = {"bucket_cap_mb": None}  # Dynamo splits such graphs by buckets, of 1 MiB at least
    pair = Pair([open_(), open_()], "mlp", "sgd", wrapper=usual)
    called: list[int] = []
    for ddp in (pair.ddp, pair.eager):
        ddp.module[0].weight.register_hook(lambda grad: called.append(1))
    compiled = torch.compile(pair.ddp, backend="aot_eager")
    for number in range(3):
        inputs = batch(pair.rank, number)
        pair.optimizer.zero_grad()
        loss_of(compiled, *inputs).backward()
        pair.optimizer.step()
        pair.eager_step(*inputs)
    assert_alike(*pair.states)
    assert len(called) == 6


@row
def a_compiled_module_in_an_eager_wrapper(open_: Open) -> None:
    """``model.compile()`` needs nothing of ours: the averages are made by hooks, as always."""
    pair = Pair([open_(), open_()], "transformer", "momentum")
    model = seeded("transformer")
    model.compile(backend="aot_eager")
    ddp = paceline.DistributedDataParallel(model, process_group=open_())
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    for number in range(4):
        inputs = batch(pair.rank, number)
        optimizer.zero_grad()
        loss_of(ddp, *inputs).backward()
        optimizer.step()
        pair.eager_step(*inputs)
    assert_alike(dict(model.state_dict()), pair.states[1])


class Stack(torch.nn.Module):
    """Four layers of two megabytes each; Dynamo does not compile a bare Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(730, 730) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def alone() -> Group:
    return paceline.new_group("fake", store=dist.HashStore(), rank=0, world_size=1)


def test_in_a_group_of_one_the_graph_is_the_modules_own() -> None:
    pair = Compiled([alone(), alone()], "conv", "momentum")
    pair.train()
    assert_alike(*pair.states)
    assert pair.counter.frame_count == 1
    targets = {str(node.target) for node in pair.counter.graphs[0].graph.nodes}
    assert not any("apply" in target for target in targets)


def test_a_weight_that_such_a_graph_does_not_know_of_is_refused() -> None:
    pair = Compiled([alone(), alone()], "mlp", "sgd")
    pair.train(1)
    with (
        pair.ddp.samples(3),
        pytest.raises(ModuleStateError, match="which the graph does not have"),
    ):
        pair.compiled(batch(0, 0)[0])


@no_instances
def test_a_weight_around_the_first_call_makes_a_graph_that_knows_of_it() -> None:
    pair = Compiled([alone(), alone()], "mlp", "sgd")
    for ddp, model in ((pair.ddp, pair.compiled), (pair.eager, pair.eager)):
        for number in range(4):
            with ddp.accumulate(2), ddp.samples(1 + number):
                loss_of(model, *batch(0, number)).backward()
    grads = zip(pair.ddp.parameters(), pair.eager.parameters(), strict=True)
    for mine, expected in grads:
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-5, atol=1e-6)


def strict_wrapper() -> paceline.DistributedDataParallel:
    torch.compiler.reset()  # else Dynamo may have had enough of the wrapper's forward
    paceline.ddp.set_strict(True)
    try:
        return paceline.DistributedDataParallel(Stack(), process_group=alone(), bucket_cap_mb=2)
    finally:
        paceline.ddp.set_strict(False)


def test_a_strict_wrapper_is_split_by_buckets_as_torchs_is() -> None:
    ddp, counter = strict_wrapper(), CompileCounterWithBackend("aot_eager")
    torch.compile(ddp, backend=counter)(torch.ones(2, 730)).sum().backward()
    assert counter.frame_count == 4


def test_a_strict_wrapper_is_one_graph_where_torchs_is() -> None:
    ddp, counter = strict_wrapper(), CompileCounterWithBackend("aot_eager")
    with dynamo_config.patch(optimize_ddp="python_reducer"):
        compiled = torch.compile(ddp, backend=counter, fullgraph=True)
        compiled(torch.ones(2, 730)).sum().backward()
    assert counter.frame_count == 1


QUICK = [
    "gradients_from_outside_the_forward",
    "a_conv_net_with_batchnorm",
    "unused_parameters",
    "no_sync_and_weights",
    "what_comes_before_a_forward",
    "a_compiled_module_in_an_eager_wrapper",
]


@pytest.fixture(scope="module")
def quick() -> Results:
    return launch(__name__, QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_a_compiled_wrapper_does_what_an_eager_one_does(quick: Results, name: str) -> None:
    check(quick, name)


REST = [name for name in ROWS if name not in QUICK]
OVER_GLOO = [f"{name}@gloo" for name in ("an_mlp", "a_conv_net_with_batchnorm", "join")]


@pytest.mark.slow
@pytest.mark.parametrize("names", [REST, OVER_GLOO])
def test_so_it_does_in_every_other_way(names: list[str]) -> None:
    results = launch(__name__, names)
    for name in names:
        check(results, name)
