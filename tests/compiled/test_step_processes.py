"""Steps that are really compiled, on two processes: each row works and equals eager mode."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import paceline
from paceline.compiled import train_step
from paceline.errors import ModuleArgumentError
from paceline.testing import Meeting, spawn_ranks

from .marks import needs_compiler
from .ranks import Open, Opener, Results, Row, check, launch
from .steps import Pair, Scaled, assert_alike, batch, loss_of, state, torch_ddp_states

ROWS: dict[str, Row] = {}


def row(function: Row) -> Row:
    ROWS[function.__name__] = function
    return function


def counted(**options: Any) -> dict[str, Any]:
    return {"backend": CompileCounterWithBackend("aot_eager"), **options}


def graphs(pair: Pair) -> int:
    return int(pair.options["backend"].frame_count)


def train(pair: Pair, steps: int = 5, **eager: Any) -> None:
    for number in range(steps):
        inputs = batch(pair.rank, number)
        pair.step(*inputs)
        pair.eager_step(*inputs, **eager)


def compare(pair: Pair, tolerance: float = 1e-6) -> None:
    assert pair.step.reason == ""
    assert_alike(*pair.states, tolerance)


# -- the rows ---------------------------------------------------------------------------------


def parity(open_: Open, model: str, backend: str = "aot_eager") -> None:
    pair = Pair([open_(), open_()], model, "momentum", **counted(keep_grads=True))
    if backend != "aot_eager":
        pair.options["backend"] = backend
    train(pair)
    compare(pair)
    grads = zip(pair.ddp.module.parameters(), pair.eager.module.parameters(), strict=True)
    for own, other in grads:
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert_alike(state(pair.ddp.module), torch_ddp_states(model, "momentum", 5, pair.rank), 1e-6)
    if backend == "aot_eager":
        assert graphs(pair) == 1


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
def a_group_of_torchs_own(open_: Open) -> None:
    pair = Pair([dist.new_group(), dist.new_group()], "conv", "momentum", **counted())
    train(pair)
    compare(pair)
    assert graphs(pair) == 1


@row
def adamw_with_clipping(open_: Open) -> None:
    pair = Pair([open_(), open_()], **counted(max_norm=0.1))
    train(pair, max_norm=0.1)
    compare(pair, 1e-5)
    assert graphs(pair) == 1


@row
def schedules_of_the_learning_rate(open_: Open) -> None:
    """Neither a schedule nor a changed weight decay compiles anew."""
    pair = Pair([open_(), open_()], optimizer="adam", **counted())
    optimizers = pair.optimizer, pair.eager_optimizer
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in optimizers]
    for number in range(4):
        train(pair, 1)
        for schedule in schedules:
            schedule.step()
        for optimizer in optimizers:
            optimizer.param_groups[0]["betas"] = (0.9 - 0.1 * number, 0.99)
    compare(pair, 1e-5)
    assert graphs(pair) == 1


@row
def autocast(open_: Open) -> None:
    pair = Pair([open_(), open_()], optimizer="sgd", **counted(autocast=torch.bfloat16))
    for number in range(3):
        inputs = batch(pair.rank, number)
        pair.step(*inputs)
        pair.eager_optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(pair.eager, *inputs)
        loss.backward()
        pair.eager_optimizer.step()
    compare(pair, 1e-3)  # eight bits of precision
    plain = Pair([open_(), open_()], optimizer="sgd")
    for number in range(3):
        plain.eager_step(*batch(plain.rank, number))
    own, other = pair.states[0], plain.states[1]
    assert any(not torch.equal(own[name], other[name]) for name in own)


@row
def a_gradient_scaler(open_: Open) -> None:
    """A step that is skipped, and other scales, are the same graph."""
    pair = Scaled([open_(), open_()], optimizer="adamw", **counted(max_norm=0.1))
    pair.train(max_norm=0.1)
    compare(pair, 1e-5)
    assert graphs(pair) == 1


@row
def accumulation_with_weights(open_: Open) -> None:
    pair = Pair([open_(), open_()], optimizer="sgd", **counted(accumulate=2))
    for number in range(4):
        rows = 4 + 2 * pair.rank
        inputs = batch(pair.rank, number, rows)
        pair.step(*inputs, samples=rows)
        with pair.eager.accumulate(2) as last, pair.eager.samples(rows):
            loss_of(pair.eager, *inputs).backward()
        if last:
            pair.eager_optimizer.step()
            pair.eager_optimizer.zero_grad()
    compare(pair)
    assert graphs(pair) == 2  # one that gathers, one that steps


@row
def communication_hooks(open_: Open) -> None:
    groups = [open_(), open_()]
    pair = Pair(groups, optimizer="sgd", **counted())
    for ddp, group in zip((pair.ddp, pair.eager), groups, strict=True):
        ddp.register_comm_hook(group, paceline.hooks.bf16_compress_hook)
    train(pair, 3)
    compare(pair, 1e-3)
    assert graphs(pair) == 1


@row
def unused_parameters(open_: Open) -> None:
    pair = Pair([open_(), open_()], "branches", "adamw", **counted())
    for number in range(4):
        inputs = (*batch(pair.rank, number), pair.rank == 0)
        pair.step(*inputs)
        pair.eager_step(*inputs)
    compare(pair, 1e-5)
    assert all(not pair.optimizer.state.get(p) for p in pair.ddp.module.never.parameters())


@row
def join(open_: Open) -> None:
    pair = Pair([open_(), open_()], "conv", "sgd", **counted())
    counts = 2 + 2 * pair.rank
    step = pair.step
    with pair.ddp.join():
        for number in range(counts):
            step(*batch(pair.rank, number))
    with pair.eager.join():
        for number in range(counts):
            pair.eager_step(*batch(pair.rank, number))
    compare(pair)


@row
def batches_of_any_size(open_: Open) -> None:
    """The second size compiles for all sizes."""
    pair = Pair([open_(), open_()], optimizer="sgd", **counted())
    for number, rows in enumerate((4, 6, 9, 5, 11)):
        inputs = batch(pair.rank, number, rows)
        pair.step(*inputs)
        pair.eager_step(*inputs)
    compare(pair)
    assert graphs(pair) == 2


@row
def backward_hooks_of_modules(open_: Open) -> None:
    pair = Pair([open_(), open_()], optimizer="sgd", **counted())
    seen: list[int] = []

    def double(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        seen.append(1)
        return tuple(None if grad is None else 2 * grad for grad in inputs)

    handles = [d.module[2].register_full_backward_hook(double) for d in (pair.ddp, pair.eager)]
    train(pair, 3)
    compare(pair)
    assert len(seen) == 6
    assert graphs(pair) == 1  # the gates of a module stay what they were
    for handle in handles:
        handle.remove()
    train(pair, 2)
    compare(pair)
    assert len(seen) == 6


@row
def a_loss_that_calls_the_wrapper_itself(open_: Open) -> None:
    pair = Pair([open_(), open_()], "conv", "sgd", **counted())
    step = train_step(
        pair.ddp, pair.optimizer, lambda _, x, y: loss_of(pair.ddp, x, y), **pair.options
    )
    for number in range(3):
        inputs = batch(pair.rank, number)
        step(*inputs)
        pair.eager_step(*inputs)
    assert_alike(*pair.states)
    assert step.reason == ""
    assert graphs(pair) == 1


@row
def a_loss_that_cannot_be_traced(open_: Open) -> None:
    """Such steps are done in eager mode, and the log has one line that says why."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.compiled").addHandler(handler)

    def untraceable(model: nn.Module, x: Any, y: Any) -> Any:
        torch._dynamo.graph_break()
        return loss_of(model, x, y)

    pair = Pair([open_(), open_()], optimizer="sgd")
    step = train_step(pair.ddp, pair.optimizer, untraceable, backend="aot_eager")
    for number in range(3):
        inputs = batch(pair.rank, number)
        step(*inputs)
        pair.eager_step(*inputs)
    logging.getLogger("paceline.compiled").removeHandler(handler)
    assert_alike(*pair.states)
    assert len(lines) == 1, lines
    assert "\n" not in lines[0]
    assert "graph_break" in step.reason
    strict = train_step(pair.ddp, pair.optimizer, untraceable, backend="aot_eager", fullgraph=True)
    with pytest.raises((torch._dynamo.exc.TorchDynamoException, paceline.errors.PeerError)):
        strict(*batch(pair.rank, 0))


@row
def a_hook_that_cannot_be_kept(open_: Open) -> None:
    pair = Pair([open_(), open_()], optimizer="sgd", fullgraph=True)
    pair.ddp.module[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(ModuleArgumentError, match=r"0\.weight has a hook"):
        pair.step(*batch(pair.rank, 0))


# -- running them -----------------------------------------------------------------------------


PARITY = ["an_mlp", "a_transformer", "a_conv_net_with_batchnorm"]
QUICK = [
    "an_mlp",
    "a_conv_net_with_batchnorm",
    "adamw_with_clipping",
    "accumulation_with_weights",
    "unused_parameters",
    "join",
    "batches_of_any_size",
    "a_loss_that_cannot_be_traced",
]
REST = [name for name in ROWS if name not in QUICK]
OVER_GLOO = [f"{name}@gloo" for name in (*PARITY, "a_group_of_torchs_own")]
QUICK.append("an_mlp@gloo")


@pytest.fixture(scope="module")
def quick() -> Results:
    return launch(__name__, QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_a_compiled_step_equals_an_eager_one(quick: Results, name: str) -> None:
    check(quick, name)


@pytest.mark.slow
@pytest.mark.parametrize("names", [REST, OVER_GLOO])
def test_so_it_does_in_every_other_way(names: list[str]) -> None:
    results = launch(__name__, names)
    for name in names:
        check(results, name)


# -- with Inductor ----------------------------------------------------------------------------


def run_inductor(meeting: Meeting, engine: str, folder: str) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    open_ = Opener(meeting)
    open_.engine = engine
    for model in ("mlp", "transformer", "conv"):
        parity(open_, model, "inductor")
    dist.destroy_process_group()
    return int(counters["inductor"]["fxgraph_cache_hit"])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_inductors_steps_equal_eager_ones_and_ranks_share_what_is_compiled(
    engine: str, tmp_path: Any
) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = spawn_ranks(2, run_inductor, engine, str(tmp_path), deadline=900.0, env=env)
    assert hits == [0, 3]  # rank 0 compiled each model, rank 1 found it
    again = spawn_ranks(2, run_inductor, engine, str(tmp_path), deadline=900.0, env=env)
    assert again == [3, 3]  # and so does a restart
