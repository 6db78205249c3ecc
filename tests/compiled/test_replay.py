"""Replayed steps, on one rank and without a GPU: a graph is a function that is called again.

What CUDA makes of it is seen in ``tests/gpu``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline import DistributedDataParallel as DDP
from paceline import Group
from paceline._reducer import RepeatedExchange
from paceline.compiled import Step, replay, train_step
from paceline.compiled.replay import GRAPHS, IN_USE, TRIAL, WARM_UP, Captured, Replays, Trial, _own
from paceline.compiled.wire import Wire
from paceline.errors import NotCapturedError, PeerError
from paceline.groups.collectives import Collectives
from paceline.testing import Meeting, spawn_ranks


class CalledAgain:
    """A capture that runs nothing, and a replay that runs what was captured."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.captured = self.ended = 0

    def __call__(self, function: Callable[[], Any]) -> Captured:
        exchange = self._wire._captured
        results: list[Any] = []
        self.captured += 1

        def start() -> None:
            with self._wire.captured_into(exchange):
                results[:] = function()

        def end() -> None:
            self.ended += 1

        return Captured(start, results, end)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setenv("PACELINE_SKIP_ALONE", "0")
    monkeypatch.setattr(Collectives, "refuses_capture", "")
    torch._dynamo.reset()
    with paceline.new_group("gloo", store=dist.HashStore(), rank=0, world_size=1) as opened:
        yield opened


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def replayed(
    group: Group,
    *,
    model: nn.Module | None = None,
    loss: Callable[..., Tensor] = loss_of,
    asked: bool = True,
    bucket_cap_mb: float | None = None,
    **options: Any,
) -> Step:
    step = unreplayed(group, model, loss, bucket_cap_mb=bucket_cap_mb, **options)
    wire = step._wire
    step.replays = Replays(wire, step._binding, asked=asked, capture=CalledAgain(wire))
    return step


def unreplayed(
    group: Group,
    model: nn.Module | None = None,
    loss: Callable[..., Tensor] = loss_of,
    *,
    bucket_cap_mb: float | None = None,
    **options: Any,
) -> Step:
    ddp = DDP(model or net(), process_group=group, bucket_cap_mb=bucket_cap_mb)
    ddp.replica.reducer.read_late()
    trained = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    return train_step(ddp, optimizer, loss, backend="aot_eager", **options)


def eager(batches: list[Tensor], rates: list[float]) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    return list(model.parameters())


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(5, 4) for _ in range(count)]


def test_replayed_steps_are_those_of_eager_mode_with_a_learning_rate_that_changes(
    group: Group,
) -> None:
    step, rates = replayed(group), [0.1 / (n + 1) for n in range(8)]
    for x, rate in zip(batches(8), rates, strict=True):
        step.optimizer.param_groups[0]["lr"] = rate
        step(x)
    assert step.replays is not None
    assert step.replays.count == 8 - WARM_UP
    torch.testing.assert_close(list(step.ddp.module.parameters()), eager(batches(8), rates))


def train(step: Step, given: list[Tensor], **options: Any) -> list[Tensor]:
    return [step(x, **options) for x in given]


def test_a_loss_keeps_its_value_when_the_next_step_is_replayed(group: Group) -> None:
    step = replayed(group)
    losses = train(step, batches(8))
    values = [float(loss) for loss in losses]
    assert len(set(values)) == len(values)
    assert losses[-1].data_ptr() != losses[-2].data_ptr()


def test_weights_that_change_are_in_each_replay(group: Group) -> None:
    step, plain = replayed(group), replayed(group)
    for number, x in enumerate(batches(8)):
        step(x, samples=float(number + 1))
        plain(x)
    assert step.replays is not None
    assert step.replays.count == 8 - WARM_UP
    torch.testing.assert_close(
        list(step.ddp.module.parameters()), list(plain.ddp.module.parameters())
    )


class Follower(nn.Module):
    """A frozen layer follows a trained one; a tensor that is no buffer counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leads, self.follows = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.count = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count[1:].add_(1)
            for own, given in zip(self.follows.parameters(), self.leads.parameters(), strict=True):
                own.lerp_(given, 0.5)
        return self.leads(x) - self.follows(x)


def written(step: Step, total: Tensor) -> list[Tensor]:
    """What is there after some steps that write to what they are given."""
    given = batches(8)
    train(step, given)
    model = step.ddp.module
    return [*model.parameters(), model.count, total, *given]


def test_a_replay_writes_to_whatever_the_step_writes_to(group: Group) -> None:
    found = []
    for make in (unreplayed, replayed):
        total = torch.zeros(())

        def loss(model: nn.Module, x: Tensor, total: Tensor = total) -> Tensor:
            x.mul_(2.0)
            value = model(x).square().mean()
            total.add_(value.detach())
            return value

        step = make(group, model=Follower(), loss=loss)
        found.append(written(step, total))
    assert step.replays is not None
    assert step.replays.count == 8 - WARM_UP
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert found[1][4][1] == 8  # forwards


def test_inputs_that_share_memory_are_refused_if_one_is_written_to(group: Group) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor, *, writes: bool = True) -> Tensor:
        if writes:
            x.mul_(2.0)
        return (model(x) - y).square().mean()

    def reads(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss(model, x, y, writes=False)

    given = [(rows[:, :4], rows[:, 4:]) for rows in torch.ones(8, 5, 7)]
    step = replayed(group, loss=reads)
    for x, y in given:
        step(x, y)
    assert step.replays is not None
    assert step.replays.count == 8 - WARM_UP
    other = replayed(group, loss=loss)
    with pytest.raises(NotCapturedError, match="memory that two of its inputs share"):
        for x, y in given:
            other(x, y)


def test_a_batch_of_no_samples_counts_nothing_though_its_gradients_are_no_numbers(
    group: Group,
) -> None:
    step = replayed(group)
    for x in batches(6):
        step(x, samples=1)
    assert step.replays is not None
    before, weights = step.replays.count, [p.detach().clone() for p in step.ddp.parameters()]
    assert before > 0
    step(torch.full((5, 4), torch.nan), samples=0)
    assert step.replays.count == before
    assert all(p.isfinite().all() for p in step.ddp.parameters())
    step(batches(7)[6], samples=1)
    assert step.replays.count == before + 1
    assert not any(torch.equal(p, q) for p, q in zip(step.ddp.parameters(), weights, strict=True))


def test_many_shapes_in_turn_are_not_captured_over_and_over(group: Group) -> None:
    step = replayed(group, dynamic=True)
    given = [torch.randn(rows, 4) for rows in range(5, 5 + GRAPHS + 2)] * (WARM_UP + 4)
    train(step, given)
    assert step.replays is not None
    assert step.replays.capture.captured == GRAPHS
    torch.testing.assert_close(list(step.ddp.module.parameters()), eager(given, [0.1] * len(given)))


def test_a_graph_that_is_no_longer_used_makes_room(group: Group) -> None:
    step = replayed(group, dynamic=True)
    for rows in range(5, 5 + GRAPHS):
        train(step, [torch.randn(rows, 4)] * (WARM_UP + 1))
    assert step.replays is not None
    assert step.replays.capture.captured == GRAPHS
    train(step, [torch.randn(40, 4)] * (WARM_UP + IN_USE + 2))
    assert step.replays.capture.captured == GRAPHS + 1


def test_a_module_in_another_mode_is_another_graph(group: Group) -> None:
    step = replayed(group)
    inner = step.ddp.module
    inner.append(nn.Dropout(0.5))
    train(step, batches(6))
    step.ddp.eval()
    x = batches(1)[0]
    expected = loss_of(inner, x).item()
    assert step(x).item() == pytest.approx(expected)
    assert step.replays is not None
    assert step.replays.count == 6 - WARM_UP


def test_batches_of_several_shapes_have_a_graph_each(group: Group) -> None:
    step = replayed(group, dynamic=True)
    given = [torch.randn(rows, 4) for rows in (5, 7) * 6]
    train(step, given)
    assert step.replays is not None
    assert step.replays.capture.captured == 2
    torch.testing.assert_close(list(step.ddp.module.parameters()), eager(given, [0.1] * len(given)))


def test_memory_that_moved_is_captured_anew(group: Group) -> None:
    step = replayed(group)
    train(step, batches(6))
    layer = step.ddp.module[0]
    with torch.no_grad():
        layer.weight.data = layer.weight.data.clone()
    given = batches(8)[6:]
    train(step, given)
    assert step.replays is not None
    assert step.replays.capture.captured == 2
    torch.testing.assert_close(list(step.ddp.module.parameters()), eager(batches(8), [0.1] * 8))


def test_memory_that_moves_all_the_time_is_not_captured_in_every_step(group: Group) -> None:
    step, given = replayed(group), batches(WARM_UP + 9)
    layer = step.ddp.module[0]
    for x in given:
        step(x)
        with torch.no_grad():
            layer.weight.data = layer.weight.data.clone()
    assert step.replays is not None
    assert step.replays.capture.captured == 2
    weights = list(step.ddp.module.parameters())
    torch.testing.assert_close(weights, eager(given, [0.1] * len(given)))


def test_a_graph_keeps_its_trial_when_shapes_are_counted_anew(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "SHAPES", 2)
    step = replayed(group, dynamic=True, asked=False)
    assert step.replays is not None
    train(step, batches(6))
    (replayer,) = step.replays._replayers
    (key,) = replayer._graphs
    trial = replayer._trials[key]
    train(step, [torch.randn(rows, 4) for rows in range(6, 12)])
    assert replayer._trials[key] is trial
    assert len(replayer._trials) <= 4


def test_graphs_end_before_their_group_does(group: Group) -> None:
    step = replayed(group)
    train(step, batches(6))
    assert step.replays is not None
    capture, engine = step.replays.capture, group._engine
    ends = []

    def note() -> None:
        ends.append(capture.ended)

    with mock.patch.object(engine, "shutdown", note):
        group.shutdown()
    engine.shutdown()
    assert ends == [capture.captured] == [1]


def test_graphs_end_while_their_group_is_aborted(group: Group) -> None:
    step = replayed(group)
    train(step, batches(6))
    assert step.replays is not None
    capture, engine, ended = step.replays.capture, group._engine, threading.Event()
    dropped = capture.ended

    def wait_for_graphs() -> None:  # as NCCL does
        while capture.ended == dropped:
            ended.wait(0.01)
        ended.set()

    with mock.patch.object(engine, "abort", wait_for_graphs):
        group.abort()
    assert ended.is_set()


def test_graphs_that_were_dropped_are_captured_anew(group: Group) -> None:
    step = replayed(group)
    train(step, batches(6))
    assert step.replays is not None
    step.replays.drop()
    train(step, batches(8)[6:])
    assert step.replays.capture.captured == 2
    torch.testing.assert_close(list(step.ddp.module.parameters()), eager(batches(8), [0.1] * 8))


def test_a_pass_that_was_gathered_is_not_replayed_and_counts(group: Group) -> None:
    step = replayed(group)
    train(step, batches(6))
    assert step.replays is not None
    before = step.replays.count
    step.ddp.replica.reducer.ledger.plain = 1  # as if a pass had been kept back
    train(step, batches(7)[6:])
    assert step.replays.count == before


def test_what_a_replay_averaged_is_kept_if_asked(group: Group) -> None:
    step = replayed(group, keep_grads=True)
    train(step, batches(6))
    model = net()
    for p, q in zip(model.parameters(), step.ddp.module.parameters(), strict=True):
        p.data.copy_(q)
    loss_of(model, batches(7)[6]).backward()
    step(batches(7)[6])
    for p, q in zip(model.parameters(), step.ddp.module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_the_recorder_has_the_calls_of_a_replay(group: Group) -> None:
    step, board = replayed(group), group.board
    assert board is not None
    made = []
    for x in batches(WARM_UP + 2):
        before = board.made
        step(x)
        made.append(board.made - before)
    assert step.replays is not None
    assert step.replays.count == 2
    assert made[-1] == made[-2] == made[WARM_UP - 1] > 0


# What cannot be.


@pytest.mark.parametrize("share", ["", "100", "50", "33.3", "all"])
def test_buckets_leave_at_the_end_where_mps_gives_a_rank_some_of_a_gpu(
    group: Group, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", share)
    order: list[str] = []
    take, send = RepeatedExchange.take, RepeatedExchange._send

    def takes(self: RepeatedExchange, numbers: Any, grads: Any) -> None:
        order.append("take")
        take(self, numbers, grads)

    def sends(self: RepeatedExchange, tensor: Tensor) -> None:
        order.append("send")
        send(self, tensor)

    monkeypatch.setattr(RepeatedExchange, "take", takes)
    monkeypatch.setattr(RepeatedExchange, "_send", sends)
    step = replayed(group, bucket_cap_mb=1e-4)
    train(step, batches(WARM_UP + 1))
    sent, takes_made = order.count("send"), order.count("take")
    assert takes_made > 1
    assert sent > 1
    late = order == ["take"] * takes_made + ["send"] * sent
    assert late == (share in ("50", "33.3"))
    weights = list(step.ddp.module.parameters())
    torch.testing.assert_close(weights, eager(batches(WARM_UP + 1), [0.1] * (WARM_UP + 1)))


def test_a_graph_for_a_model_on_the_cpu_is_refused_by_name(group: Group) -> None:
    ddp = DDP(net(), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(NotCapturedError, match="the model is on cpu"):
        train_step(ddp, optimizer, loss_of, graph=True)
    assert train_step(ddp, optimizer, loss_of).replays is None


def test_a_communication_hook_is_named_where_a_graph_was_asked_for(group: Group) -> None:
    step = replayed(group)
    step.ddp.register_comm_hook(group, paceline.hooks.allreduce_hook)
    with pytest.raises(NotCapturedError, match="a communication hook averages the gradients"):
        step(batches(1)[0])
    other = replayed(group, asked=False)
    other.ddp.register_comm_hook(group, paceline.hooks.allreduce_hook)
    train(other, batches(6))
    assert other.replays is not None
    assert other.replays.count == 0
    assert other.replays.reason == "a communication hook averages the gradients"


def test_a_parameter_without_a_gradient_is_named(group: Group) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    ddp = DDP(Partly(), process_group=group)
    ddp.replica.reducer.read_late()
    partly = train_step(
        ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_of, backend="aot_eager"
    )
    wire = partly._wire
    partly.replays = Replays(wire, partly._binding, asked=True, capture=CalledAgain(wire))
    with pytest.raises(NotCapturedError, match=r"no gradient comes to unused\."):
        train(partly, batches(6))


def test_random_numbers_that_a_replay_would_not_draw_anew_are_named(group: Group) -> None:
    model = nn.Sequential(net(), nn.Dropout(0.5))
    step = replayed(group, model=model, asked=False)
    assert step.replays is not None
    step.replays.device = torch.device("meta")  # as if it were the GPU
    train(step, batches(6))
    assert step.replays.count == 0
    assert step.replays.reason == "it draws random numbers on cpu"


def test_what_lasts_on_another_device_is_named(group: Group) -> None:
    step, given = replayed(group), torch.zeros(3, device="meta")
    with pytest.raises(NotCapturedError, match="a tensor that the step reads is on meta"):
        _own(given, {given.data_ptr()}, step._wire)


def test_graphs_go_when_a_capture_fails(group: Group) -> None:
    step = replayed(group, asked=False, dynamic=True)
    train(step, batches(6))
    assert step.replays is not None
    capture = step.replays.capture
    with mock.patch.object(step.replays, "capture", side_effect=RuntimeError("no memory")):
        train(step, [torch.randn(9, 4)] * (WARM_UP + 1))
    assert capture.ended == capture.captured == 1
    assert step.replays.reason == "no memory"


class Refusing(CalledAgain):
    """A capture that fails."""

    def __call__(self, function: Callable[[], Any]) -> Captured:
        raise RuntimeError("out of memory")


def train_through_an_error(meeting: Meeting) -> tuple[str, int, list[Tensor]]:
    """What is raised where rank 1 cannot capture its step, in which step, and the weights then."""
    heard, at = "nothing", -1
    with (
        mock.patch.object(Collectives, "refuses_capture", ""),
        meeting.new_group("gloo", timeout=timedelta(seconds=60)) as group,
    ):
        step = replayed(group)
        assert step.replays is not None
        usual = step.replays.capture
        step.replays.capture = Refusing(step._wire) if group.rank() == 1 else usual
        for number, x in enumerate(batches(WARM_UP + 4)):
            try:
                step(x)
            except (NotCapturedError, PeerError) as error:
                heard, at = f"{type(error).__name__}: {error}", number
                step.replays.capture = usual
        return heard, at, [p.detach() for p in step.ddp.parameters()]


def test_the_other_ranks_hear_of_a_step_that_cannot_be_captured() -> None:
    (other, later, weights), (own, at, same) = spawn_ranks(2, train_through_an_error)
    assert own.startswith("NotCapturedError: rank 1: train_step(graph=True): out of memory")
    assert other.startswith("PeerError")
    assert "rank 1" in other
    assert "out of memory" in other
    assert (at, later) == (WARM_UP, WARM_UP + 1)  # on a device it is known a step later
    assert all(torch.equal(p, q) for p, q in zip(weights, same, strict=True))


# Does a graph pay?


class Clock:
    """Stands for a CUDA event; the device's time is what the test says."""

    now = 0.0

    def __init__(self, **_options: bool) -> None:
        self.at = -1.0

    def record(self, _stream: object) -> None:
        self.at = Clock.now

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, other: Clock) -> float:
        return other.at - self.at


def tried(
    monkeypatch: pytest.MonkeyPatch, without: float, replay: float, warm_up: int = WARM_UP
) -> list[str]:
    """What a trial says after each replay."""
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    trial = Trial(torch.device("cuda"))

    def take(milliseconds: float) -> None:
        Clock.now += milliseconds

    for _ in range(warm_up):
        trial.time(trial.without, lambda: take(without))
    said = []
    for _ in range(TRIAL + 3):
        trial.time(trial.replays, lambda: take(replay))
        said.append(trial.objection())
    return said


def test_a_graph_that_is_quicker_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, 10.0, 4.0) == [""] * (TRIAL + 3)


def test_a_graph_whose_steps_without_were_not_timed_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tried(monkeypatch, 10.0, 9.9, warm_up=1) == [""] * (TRIAL + 3)


def test_a_graph_that_is_not_quicker_is_dropped_once_with_both_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = tried(monkeypatch, 10.0, 9.9)
    assert [text for text in said if text] == ["a replay takes 9.9 ms, a step without 10.0"]
