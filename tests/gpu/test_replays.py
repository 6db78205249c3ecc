"""Whole steps as one CUDA graph: the bits of the same steps without it, on all ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.compiled import Step, train_step
from paceline.compiled.replay import WARM_UP, CudaCapture, Replays
from paceline.errors import NotCapturedError, PeerError
from paceline.testing import Meeting, spawn_ranks

from .machine import Machine, here
from .scene import Scene, on_ranks

SMALL = 1e-3  # MiB
STEPS = 9
DEADLINE = 90.0  # seconds: Inductor compiles, one rank after the other
BAD = 1  # the rank that fails
CUDA = torch.device("cuda")
CYCLES = 10**8  # of the GPU: some 50 ms


class Net(nn.Module):
    """With random numbers, and with buffers that change in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 3)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.norm(self.first(x)))))


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def batch(scene: Scene, step: int, rows: int = 8) -> Tensor:
    return scene.data(rows, 6, seed=10 * step + scene.rank, dtype=torch.float32)


def wrapped(scene: Scene, group: Any = None, **options: Any) -> DDP:
    torch.manual_seed(0)
    model = Net().to(scene.device)
    return DDP(model, process_group=group or scene.group, bucket_cap_mb=SMALL, **options)


def adamw(ddp: DDP) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)


def train_twice(scene: Scene, loop: Any, **options: Any) -> Step:
    """Train without replays, then from the same start with them; all bits must be the same.

    The same kernels do both: Inductor may choose others, with other last bits, each time it
    compiles, and does so for a shape that comes second. So all is compiled in a run before.
    """
    ddp = wrapped(scene)
    step = train_step(ddp, adamw(ddp), loss_of, graph=True, **options)
    start = [t.detach().clone() for t in (*ddp.parameters(), *ddp.buffers())]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Replays, "now", False)
        train(scene, step, loop)
        go_back(step, start)
        expected = train(scene, step, loop)
    assert step.replays is not None
    assert step.replays.count == 0
    go_back(step, start)
    found = train(scene, step, loop)
    assert step.replays.count > 2
    assert found[0] == expected[0], (found[0], expected[0])
    assert all(torch.equal(p, q) for p, q in zip(found[1], expected[1], strict=True))
    return step


def go_back(step: Step, start: list[Tensor]) -> None:
    """Give weights and buffers the values of the start, and the optimizer's state zeros."""
    with torch.no_grad():
        for now, before in zip((*step.ddp.parameters(), *step.ddp.buffers()), start, strict=True):
            now.copy_(before)
        for states in step.optimizer.state.values():
            for state in states.values():
                state.zero_()


def train(scene: Scene, step: Step, loop: Any) -> tuple[list[float], list[Tensor]]:
    """Losses, then weights, buffers and state after some steps, the first seed being the same."""
    torch.manual_seed(5 + scene.rank)
    losses = [float(loss) for loss in loop(scene, step)]
    assert step.reason == ""
    state = [t for s in step.optimizer.state.values() for t in s.values()]
    ddp = step.ddp
    return losses, [t.detach().clone() for t in (*ddp.parameters(), *ddp.buffers(), *state)]


def plain(scene: Scene, step: Step) -> list[Tensor]:
    return [step(batch(scene, number)) for number in range(STEPS)]


def scheduled(scene: Scene, step: Step) -> list[Tensor]:
    losses = []
    for number in range(STEPS):
        step.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        losses.append(step(batch(scene, number)))
    return losses


def weighted(scene: Scene, step: Step) -> list[Tensor]:
    return [
        step(batch(scene, number), samples=1 + (number + scene.rank) % 3) for number in range(STEPS)
    ]


def only_one_weighted(scene: Scene, step: Step) -> list[Tensor]:
    weights = {"samples": 5} if scene.rank == 0 else {}
    return [step(batch(scene, number), **weights) for number in range(STEPS)]


def of_two_sizes(scene: Scene, step: Step) -> list[Tensor]:
    return [step(batch(scene, number, rows=8 if number % 2 else 5)) for number in range(2 * STEPS)]


def evaluated_between(scene: Scene, step: Step) -> list[Tensor]:
    losses = []
    for number in range(STEPS + 4):
        step.ddp.train(number not in (6, 7))
        losses.append(step(batch(scene, number)))
    return losses


def with_eager_steps_between(scene: Scene, step: Step) -> list[Tensor]:
    losses = []
    for number in range(STEPS):
        if number == 6:
            step.optimizer.zero_grad()
            loss = loss_of(step.ddp, batch(scene, number))
            loss.backward()
            step.optimizer.step()
            step.optimizer.zero_grad()
        else:
            loss = step(batch(scene, number))
        losses.append(loss.detach())
    return losses


LOOPS = {
    function.__name__: function
    for function in (
        plain,
        scheduled,
        weighted,
        only_one_weighted,
        of_two_sizes,
        evaluated_between,
        with_eager_steps_between,
    )
}


@on_ranks(deadline=DEADLINE, cuda=True)
@pytest.mark.parametrize("name", LOOPS)
def test_replayed_steps_have_the_bits_of_steps_that_are_not(scene: Scene, name: str) -> None:
    step = train_twice(scene, LOOPS[name])
    scene.assert_same_bits(list(step.ddp.parameters()))


@on_ranks(deadline=DEADLINE, cuda=True)
@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 0.05},
        {"autocast": torch.bfloat16},
        {"keep_grads": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_so_have_steps_that_do_more(scene: Scene, options: dict[str, Any]) -> None:
    step = train_twice(scene, plain, **options)
    if "keep_grads" in options:
        assert all(p.grad is not None and p.grad.any() for p in step.ddp.parameters())


@on_ranks(deadline=DEADLINE, cuda=True)
def test_a_scaler_skips_the_same_steps_in_replays(scene: Scene) -> None:
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**32, growth_interval=2)  # far too much
    start, scales = scaler.state_dict(), list[float]()

    def loop(scene: Scene, step: Step) -> list[Tensor]:
        scaler.load_state_dict(start)
        losses = []
        for number in range(2 * STEPS):
            losses.append(step(batch(scene, number)))
            scales.append(scaler.get_scale())
        return losses

    step = train_twice(scene, loop, scaler=scaler, autocast=torch.float16)
    plain, replayed = scales[2 * STEPS : 4 * STEPS], scales[4 * STEPS :]
    assert replayed == plain
    assert any(scale > later for scale, later in pairwise(replayed[WARM_UP:]))  # some were skipped
    scene.assert_same_bits(list(step.ddp.parameters()))


@on_ranks(deadline=DEADLINE, cuda=True)
def test_dropout_is_another_one_in_each_replay(scene: Scene) -> None:
    ddp = wrapped(scene)
    step = train_step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.0), loss_of, graph=True)
    ddp.module.norm.momentum = 0.0
    losses = [float(step(batch(scene, 0))) for _ in range(STEPS)]
    assert len(set(losses)) == STEPS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_first_replay_has_random_numbers_of_its_own_though_the_capture_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the capture leaves on its stream is done before the replay, however long it takes."""
    capture, drawn = CudaCapture(CUDA), torch.zeros(64, device="cuda")

    def draw_late() -> None:
        torch.cuda._sleep(4 * CYCLES)
        drawn.normal_()

    def keep_busy() -> None:  # called right before torch sets what the capture needs
        with torch.cuda.stream(capture.stream):
            torch.cuda._sleep(CYCLES)

    first = capture(draw_late)  # the stream is there from now on
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "empty_cache", keep_busy)
        captured = capture(draw_late)
    torch.manual_seed(3)
    drawn.normal_()  # what comes is not what a seed begins with
    captured.start()
    found = drawn.clone()
    torch.manual_seed(3)
    drawn.normal_()
    assert torch.equal(found, drawn.normal_())
    first.end()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_is_captured_after_the_last_one_has_ended() -> None:
    """Though somebody still holds what that one computed."""
    capture, given = CudaCapture(CUDA), torch.ones(64, device="cuda")
    held = []
    for factor in (2.0, 3.0):
        captured = capture(lambda factor=factor: given * factor)
        captured.start()
        assert torch.equal(captured.results, given * factor)
        held.append(captured.results)
        captured.end()


@on_ranks(deadline=DEADLINE, cuda=True)
def test_a_rank_without_a_graph_takes_part_in_the_same_passes(scene: Scene) -> None:
    ddp = wrapped(scene)
    step = train_step(ddp, adamw(ddp), loss_of, graph=scene.rank == 0)
    for number in range(STEPS):
        step(batch(scene, number))
    assert (step.replays is not None and step.replays.count > 2) == (scene.rank == 0)
    scene.assert_same_bits(list(ddp.parameters()))


def no_luck(*_arguments: Any) -> Any:
    raise ArithmeticError("no luck")


@on_ranks(deadline=DEADLINE, cuda=True)
def test_a_failure_elsewhere_is_raised_and_nothing_was_stepped(scene: Scene) -> None:
    with scene.new_group() as group:
        ddp = wrapped(scene, group)
        step = train_step(ddp, adamw(ddp), loss_of, graph=True)
        for number in range(STEPS):
            step(batch(scene, number))
        scene.wait()
        before = [p.detach().clone() for p in ddp.parameters()]
        if scene.rank == BAD:
            with pytest.MonkeyPatch.context() as patched, pytest.raises(ArithmeticError):
                patched.setattr(step, "_run", no_luck)
                step(batch(scene, STEPS))
        else:
            step(batch(scene, STEPS))  # its graph has been started before anybody knows
            scene.wait()
            assert all(torch.equal(p, q) for p, q in zip(before, ddp.parameters(), strict=True))
        if scene.rank != BAD:
            with pytest.raises(PeerError, match="no luck"):
                step(batch(scene, STEPS + 1))
        else:
            step(batch(scene, STEPS + 1))
        for number in range(2):
            step(batch(scene, number))
        scene.assert_same_bits(list(ddp.parameters()))


def no_memory(*_arguments: Any) -> Any:
    raise torch.OutOfMemoryError("no luck")


@on_ranks(deadline=DEADLINE, cuda=True)
def test_a_rank_that_cannot_capture_its_step_says_so_to_the_others(scene: Scene) -> None:
    with scene.new_group() as group:
        ddp = wrapped(scene, group)
        step, heard = train_step(ddp, adamw(ddp), loss_of, graph=True), list[tuple[int, str]]()
        assert step.replays is not None
        usual = step.replays.capture
        if scene.rank == BAD:
            step.replays.capture = no_memory
        for number in range(STEPS):
            try:
                step(batch(scene, number))
            except (NotCapturedError, PeerError) as error:
                heard.append((number, str(error)))
                step.replays.capture = usual
        ((at, text),) = heard
        assert at == (WARM_UP if scene.rank == BAD else WARM_UP + 1)
        assert "no luck" in text
        scene.assert_same_bits(list(ddp.parameters()))


@on_ranks(deadline=DEADLINE, cuda=True)
def test_a_batch_of_no_samples_counts_nothing(scene: Scene) -> None:
    """Though its gradients are no numbers, and the other ranks replay their step."""
    ddp = wrapped(scene)
    step = train_step(ddp, adamw(ddp), loss_of, graph=True)
    for number in range(STEPS):
        step(batch(scene, number), samples=1.0)
    ddp.module.norm.eval()
    for number in range(STEPS):
        step(batch(scene, number), samples=1.0)
    nothing = scene.rank == BAD
    x = torch.full_like(batch(scene, 0), torch.nan) if nothing else batch(scene, 0)
    step(x, samples=0.0 if nothing else 1.0)
    assert all(p.isfinite().all() for p in ddp.parameters())
    scene.assert_same_bits(list(ddp.parameters()))


# What a replay would leave out. One rank, which has graphs without asking for them.


class Follower(nn.Module):
    """A frozen layer follows a trained one; a tensor that is no buffer counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.leads, self.follows = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)
        self.drop, self.count = nn.Dropout(0.3), torch.zeros(2, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count[1:].add_(1)
            for own, given in zip(self.follows.parameters(), self.leads.parameters(), strict=True):
                own.lerp_(given, 0.5)
        return self.drop(self.leads(x) - self.follows(x))


def alone(loss: Any, **options: Any) -> Step:
    """A step of one rank; each is compiled anew."""
    torch.manual_seed(0)
    group = paceline.new_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device=torch.device("cuda", 0)
    )
    ddp = DDP(Follower().cuda(), process_group=group)
    trained = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    return train_step(ddp, optimizer, loss, **options)


def trained_alone(step: Step, total: Tensor) -> list[Tensor]:
    """All that some steps have written to."""
    torch.manual_seed(4)
    given = [torch.randn(8, 6, device="cuda") for _ in range(STEPS)]
    losses = [step(x) for x in given]
    model = step.ddp.module
    step.ddp.replica.group.shutdown()
    return [*model.parameters(), model.count, total, *given, *losses]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of Inductor's
def test_a_replay_writes_to_whatever_the_step_writes_to() -> None:
    found = []
    for graph in (False, True):
        total = torch.zeros((), device="cuda")

        def loss(model: nn.Module, x: Tensor, total: Tensor = total) -> Tensor:
            x.mul_(2.0)
            value = model(x).square().mean()
            total.add_(value.detach())
            return value

        step = alone(loss, graph=graph)
        found.append(trained_alone(step, total))
    assert step.replays is not None
    assert step.replays.count == STEPS - WARM_UP
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert found[1][4][1] == STEPS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of Inductor's
def test_random_numbers_of_the_cpu_are_drawn_in_every_step() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * torch.rand(())).square().mean()

    step = alone(loss)
    trained_alone(step, torch.zeros(()))
    assert step.reason == ""
    assert step.replays is not None
    assert step.replays.count == 0
    assert step.replays.reason == "it draws random numbers on cpu"


@torch.library.custom_op("paceline_tests::stops", mutates_args=())
def stops(x: Tensor) -> Tensor:
    """Waits for the GPU, which spoils a capture."""
    x.sum().item()
    return x.clone()


@stops.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of Inductor's
def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() + 0.0 * stops(x.detach()).sum()

    stream, found = torch.cuda.current_stream(), []
    for graph in (False, None):
        step = alone(loss, graph=graph)
        found.append(trained_alone(step, torch.zeros(())))
    assert step.replays is not None
    assert step.replays.count == 0
    assert step.replays.reason
    assert torch.cuda.current_stream() == stream
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    capture, drawn = CudaCapture(CUDA), torch.zeros(64, device="cuda")
    captured = capture(drawn.normal_)
    torch.manual_seed(3)
    captured.start()
    first = drawn.clone()
    torch.manual_seed(3)
    assert torch.equal(first, drawn.normal_())
    captured.end()


@on_ranks(deadline=DEADLINE, cuda=True)
def test_ranks_have_graphs_only_if_they_are_asked_for(scene: Scene) -> None:
    ddp = wrapped(scene)
    assert train_step(ddp, adamw(ddp), loss_of).replays is None
    with pytest.raises(NotCapturedError, match="only code compiled by Inductor"):
        train_step(ddp, adamw(ddp), loss_of, graph=True, backend="aot_eager")


def _destroy(meeting: Meeting, machine: Machine) -> int:
    """Train on torch's default group, end it as torch's tutorial does; how many were replays."""
    device = torch.device("cuda", meeting.rank % machine.count)
    torch.cuda.set_device(device)
    store = meeting.store()
    dist.init_process_group("nccl", store=store, rank=meeting.rank, world_size=meeting.size)
    torch.manual_seed(0)
    ddp = DDP(Net().to(device))
    step = train_step(ddp, adamw(ddp), loss_of, graph=True)
    for _ in range(STEPS):
        step(torch.ones(8, 6, device=device))
    assert step.replays is not None
    dist.destroy_process_group()
    return step.replays.count


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_graphs_do_not_keep_torchs_group_from_its_end() -> None:
    machine = here()
    if machine.torch_backend != "nccl":
        pytest.skip("graphs of several ranks need NCCL")
    found = spawn_ranks(2, _destroy, machine, deadline=180, env=machine.environment(2))
    assert min(found) > 0


# A rank that does not come back. Processes of their own: what hangs there is not for others.

TIMEOUT = 30  # seconds; also for ranks that wait for one that compiles


def _leave(meeting: Meeting, machine: Machine) -> str:
    """Train until rank 1 is gone; what the others then raise."""
    with Scene.opened(meeting, machine) as scene:
        group = scene.new_group(timeout=timedelta(seconds=TIMEOUT))
        ddp = wrapped(scene, group)
        step = train_step(ddp, adamw(ddp), loss_of, graph=True)
        for number in range(STEPS):
            step(batch(scene, number))
        scene.wait()
        if scene.rank == BAD:
            os._exit(7)
        try:
            for number in range(3):
                step(batch(scene, number))
                scene.wait()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_rank_that_dies_ends_the_replay_of_the_others() -> None:
    machine = here()
    found = spawn_ranks(
        2, _leave, machine, deadline=180, may_die=[0, 1], env=machine.environment(2)
    )
    assert found[0] is None or "rank" in found[0], found
