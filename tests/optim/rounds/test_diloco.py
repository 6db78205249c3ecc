"""DiLoCo: alone for a while, then a step of the outer optimizer, in one piece or in several."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from paceline import DistributedDataParallel, Group, Join
from paceline._exchange import cut_evenly
from paceline.errors import (
    AveragingArgumentError,
    AveragingTypeError,
    PeerFailedError,
    RoundsMismatchError,
    RoundsStateError,
)
from paceline.hooks import Fp8, Fp16, Int8, RowCodec, Sign, TopK
from paceline.optim import DiLoCo, LocalSGD
from paceline.optim.rounds.schedule import RoundSchedule
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import watch
from tests.marks import USUAL
from tests.optim.local import (
    assert_all_equal,
    assert_close,
    plain,
    sgd,
    small,
    train,
    weights_of,
)


@dataclass(frozen=True)
class Rounded:
    """A tensor in float16."""

    parts: dict[str, Tensor]


class Half:
    """A codec that shows what is asked of one: it rounds, and counts what it encoded."""

    def __init__(self) -> None:
        self.encoded = 0

    def __repr__(self) -> str:
        return "Half()"

    def encode(self, tensor: Tensor) -> Rounded:
        self.encoded += 1
        odd = torch.tensor([tensor.numel()], dtype=torch.uint8)
        return Rounded({"count": odd, "values": tensor.to(torch.float16)})

    def decode(self, encoded: Rounded) -> Tensor:
        return encoded.parts["values"].to(torch.float32)

    def state_dict(self) -> dict[str, int]:
        return {"encoded": self.encoded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.encoded = state["encoded"]


NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


# -- against a reference -------------------------------------------------------------------------


def reference(
    ranks: int,
    steps: int,
    schedule: RoundSchedule,
    *,
    mix: float = 0.0,
    outer: Callable[..., torch.optim.Optimizer] = NESTEROV,
) -> list[dict[str, Tensor]]:
    """Streaming DiLoCo in one process, with one outer optimizer for each fragment, by hand."""
    models = [plain() for _ in range(ranks)]
    inner = [sgd(model) for model in models]
    local = [list(model.parameters()) for model in models]
    outers = [nn.Parameter(p.detach().clone()) for p in local[0]]
    runs = cut_evenly([p.numel() for p in outers], schedule.fragments)
    optimizers = [outer([outers[i] for i in run]) for run in runs]
    under_way: dict[int, list[Tensor]] = {}

    def end(fragment: int) -> None:
        for i, mean in zip(runs[fragment], under_way.pop(fragment), strict=True):
            outers[i].grad = mean
        optimizers[fragment].step()
        for params in local:
            for i in runs[fragment]:
                own = params[i].data * mix
                params[i].data.copy_(own + outers[i].detach() * (1 - mix))

    for step in range(1, steps + 1):
        for rank in range(ranks):
            train(models[rank], inner[rank], rank, range(step - 1, step))
        ending, starting = schedule.ending(step), schedule.starting(step)
        if schedule.overlap and ending is not None:
            end(ending)
        if starting is not None:
            under_way[starting] = [
                torch.stack([outers[i].detach() - params[i].detach() for params in local]).mean(0)
                for i in runs[starting]
            ]
            if not schedule.overlap:
                end(starting)
    return [weights_of(model) for model in models]


@pytest.mark.parametrize(
    ("schedule", "mix"),
    [
        (RoundSchedule(4), 0.0),
        (RoundSchedule(1), 0.0),
        (RoundSchedule(4, 2), 0.0),
        (RoundSchedule(4, 4), 0.0),
        (RoundSchedule(5, 3, 1), 0.0),
        (RoundSchedule(4, 1, 3), 0.0),
        (RoundSchedule(4, 2, 3), 0.5),  # two exchanges under way at a time
    ],
)
def test_it_does_what_the_reference_does(schedule: RoundSchedule, mix: float) -> None:
    def one_rank(group: Group) -> Any:
        model = plain(seed=group.rank())
        opt = DiLoCo(model, sgd(model), mix=mix, process_group=group, **vars(schedule))
        train(model, opt, group.rank(), range(11))
        return weights_of(model)

    found = run_ranks(2, one_rank)
    for ours, expected in zip(found, reference(2, 11, schedule, mix=mix), strict=True):
        assert_close(ours, expected)


def test_another_outer_optimizer_does_what_the_reference_does_with_it() -> None:
    adam = partial(torch.optim.Adam, lr=0.05)

    def one_rank(group: Group) -> Any:
        model = plain()
        opt = DiLoCo(model, sgd(model), adam, sync_every=4, fragments=2, process_group=group)
        assert isinstance(opt.outer_optimizer, torch.optim.Adam)
        train(model, opt, group.rank(), range(9))
        return weights_of(model)

    expected = reference(2, 9, RoundSchedule(4, 2), outer=adam)
    for ours, by_hand in zip(run_ranks(2, one_rank), expected, strict=True):
        assert_close(ours, by_hand)


def test_with_a_plain_outer_step_it_is_local_sgd() -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        one, other = small(), small()
        whole = partial(torch.optim.SGD, lr=1.0)
        diloco = DiLoCo(one, sgd(one), whole, sync_every=3, process_group=group)
        train(one, diloco, group.rank(), range(7))
        train(other, LocalSGD(other, sgd(other), 3, process_group=group), group.rank(), range(7))
        return weights_of(one), weights_of(other)

    for diloco, local in run_ranks(3, one_rank):
        assert_close(diloco, local)


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("codec", [None, Half()])
def test_all_ranks_have_the_same_bits_after_an_exchange(fragments: int, codec: Any) -> None:
    def one_rank(group: Group) -> list[Any]:
        model = small(group.rank(), dtype=torch.float32)
        opt = DiLoCo(
            model, sgd(model), sync_every=3, fragments=fragments, codec=codec, process_group=group
        )
        params = list(model.parameters())
        runs = cut_evenly([p.numel() for p in params], fragments)
        seen = []
        for step in range(1, 7):
            train(model, opt, group.rank(), range(step - 1, step))
            turn = opt.schedule.starting(step)
            if turn is not None:
                seen.append({str(i): params[i].detach().clone() for i in runs[turn]})
        return seen

    found = run_ranks(3, one_rank)
    assert len(found[0]) == 2 * fragments
    for together in zip(*found, strict=True):
        assert_all_equal(list(together))


def test_low_precision_parameters_have_outer_ones_in_float32() -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        model = plain(dtype=torch.bfloat16)
        opt = DiLoCo(model, sgd(model), sync_every=2, process_group=group)
        train(model, opt, group.rank(), range(4))
        state = opt.state_dict()["rounds"]
        return weights_of(model), state["outer_params"]

    found = run_ranks(2, one_rank)
    assert_all_equal([weights for weights, _ in found])
    for weights, outer in found:
        assert {t.dtype for t in outer} == {torch.float32}
        for value, wide in zip(weights.values(), outer, strict=True):
            assert torch.equal(value, wide.to(torch.bfloat16))
            assert not torch.equal(value.float(), wide)


# -- the wire ------------------------------------------------------------------------------------


def test_a_fragment_is_one_collective_and_buffers_travel_with_the_last() -> None:
    def one_rank(group: Group) -> list[list[tuple[str, int]]]:
        model = small()
        opt = DiLoCo(model, sgd(model), sync_every=4, fragments=2, process_group=group)
        calls = watch(group)
        by_step = []
        for step in range(4):
            train(model, opt, group.rank(), range(step, step + 1))
            by_step.append(list(calls))
            calls.clear()
        return by_step

    first, second, third, last = run_ranks(2, one_rank)[0]
    assert [first, third] == [[], []]
    assert [kind for kind, _ in second] == ["all_reduce"]
    # the parameters, the two running statistics of six features, the count of batches
    assert [kind for kind, _ in last] == ["all_reduce"] * 3
    assert second[0][1] + last[0][1] == sum(p.numel() for p in small().parameters()) + 2 * 3
    assert [numel for _, numel in last[1:]] == [12 + 3, 1 + 3]


def test_two_ranks_that_are_steps_apart_do_not_wait_within_the_overlap() -> None:
    ahead, behind = threading.Event(), threading.Event()

    def one_rank(group: Group) -> Any:
        model = plain()
        opt = DiLoCo(model, sgd(model), sync_every=5, overlap=3, process_group=group)
        if group.rank() == 0:
            train(model, opt, 0, range(7))  # begins after 5, is awaited after 8
            ahead.set()
            assert behind.wait(120)
        else:
            assert ahead.wait(120)  # rank 0 got there although this rank has sent nothing
            behind.set()
            train(model, opt, 1, range(7))
        train(model, opt, group.rank(), range(7, 8))
        return weights_of(model)

    assert_all_equal(run_ranks(2, one_rank))


def test_a_codec_sends_less_and_stays_near() -> None:
    def one_rank(group: Group, codec: Any) -> tuple[Any, int]:
        model = plain(dtype=torch.float32)
        opt = DiLoCo(model, sgd(model), sync_every=2, codec=codec, process_group=group)
        nbytes: list[int] = []
        group.register_hooks(lambda call: nbytes.append(sum(t.nbytes for t in call.inputs)))
        train(model, opt, group.rank(), range(4))
        return weights_of(model), sum(nbytes)

    exact = run_ranks(2, lambda g: one_rank(g, None))
    coded = run_ranks(2, lambda g: one_rank(g, Half()))
    assert_all_equal([weights for weights, _ in coded])
    assert_close(coded[0][0], exact[0][0], rtol=2e-3, atol=1e-4)
    assert coded[0][1] < 0.8 * exact[0][1]  # 44 parameters in half of 4 bytes, and a header


def test_error_feedback_sends_later_what_rounding_lost() -> None:
    class Whole(Half):
        """Rounds to whole numbers."""

        def encode(self, tensor: Tensor) -> Rounded:
            return Rounded({"values": tensor.round()})

    def one_rank(group: Group, feedback: bool) -> float:
        held = nn.Parameter(torch.zeros(3))
        opt = DiLoCo(
            [held],
            torch.optim.SGD([held], 0.25),
            partial(torch.optim.SGD, lr=1.0),
            sync_every=1,
            codec=Whole(),
            error_feedback=feedback,
            process_group=group,
        )
        for _ in range(8):
            held.grad = -torch.ones_like(held)
            opt.step()
        return held.detach()[0].item()

    assert run_ranks(2, lambda g: one_rank(g, False)) == [0.0, 0.0]
    assert run_ranks(2, lambda g: one_rank(g, True)) == [2.0, 2.0]


def test_a_number_that_is_not_finite_reaches_everybody_once() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        held = nn.Parameter(torch.zeros(3))
        opt = DiLoCo(
            [held],
            torch.optim.SGD([held], 1.0),
            partial(torch.optim.SGD, lr=1.0),
            sync_every=1,
            codec=Half(),
            error_feedback=True,
            process_group=group,
        )
        held.grad = torch.tensor([float("nan") if group.rank() else 1.0, 1.0, 1.0])
        opt.step()
        broken = held.detach().clone()
        fresh = {**opt.state_dict()}
        fresh["rounds"]["outer_params"] = [torch.zeros(3)]
        opt.load_state_dict(fresh)
        held.data.zero_()
        held.grad = torch.ones(3)
        opt.step()
        return [broken, held.detach()]

    for broken, mended in run_ranks(2, one_rank):
        assert broken.isnan().tolist() == [True, False, False]
        assert mended.tolist() == [-1.0, -1.0, -1.0]


CODECS = {
    "Int8": lambda: Int8(),
    "Fp16": lambda: Fp16(),
    "Fp8": lambda: Fp8(),
    "Sign": lambda: Sign(),
    "TopK | Int8": lambda: TopK(0.25) | Int8(),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("overlap", [0, 1])
def test_our_codecs_leave_all_ranks_with_the_same_bits(name: str, ranks: int, overlap: int) -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        model = plain(dtype=torch.float32)
        opt = DiLoCo(
            model,
            sgd(model),
            sync_every=3,
            fragments=2,
            overlap=overlap,
            codec=CODECS[name](),
            error_feedback=True,
            process_group=group,
        )
        train(model, opt, group.rank(), range(7))
        opt.sync()
        return weights_of(model), [p.clone() for p in opt.state_dict()["rounds"]["outer_params"]]

    found = run_ranks(ranks, one_rank)
    assert_all_equal([weights for weights, _ in found])
    start = weights_of(plain(dtype=torch.float32))
    assert not torch.equal(found[0][0]["0.weight"], start["0.weight"])
    assert all(torch.isfinite(value).all() for value in found[0][0].values())


def test_two_stages_send_less_than_the_buffer_twice_however_many_ranks_there_are() -> None:
    def one_rank(group: Group) -> float:
        held = nn.Parameter(torch.zeros(8192))
        inner = torch.optim.SGD([held], 1.0)
        opt = DiLoCo([held], inner, sync_every=1, codec=Int8(), process_group=group)
        group.traffic.reset()
        held.grad = torch.ones_like(held)
        opt.step()
        return group.traffic.bytes_sent

    two, three, four = (run_ranks(ranks, one_rank)[0] for ranks in (2, 3, 4))
    assert two == pytest.approx(8192, rel=0.1)
    assert three == pytest.approx(8192 * 4 / 3, rel=0.1)
    assert four == pytest.approx(8192 * 3 / 2, rel=0.1)


@pytest.mark.parametrize("feedback", [False, True])
def test_the_second_stage_feeds_back_what_it_lost(feedback: bool) -> None:
    def one_rank(group: Group) -> float:
        held = nn.Parameter(torch.zeros(6))
        opt = DiLoCo(
            [held],
            torch.optim.SGD([held], 1.0),
            partial(torch.optim.SGD, lr=1.0),
            sync_every=1,
            codec=Dense(),
            error_feedback=feedback,
            process_group=group,
        )
        for _ in range(9):
            held.grad = -torch.full_like(held, float(group.rank() == 0))  # a third on average
            opt.step()
        return held.detach()[5].item()

    assert run_ranks(3, one_rank) == [3.0 if feedback else 0.0] * 3


class Dense(RowCodec):
    """Rounds to whole numbers, each of which travels."""

    def pack(self, rows: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {"values": rows.round()}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        return parts["values"].clone()


def test_bytes_are_those_of_data_parallel_training_divided_by_the_round() -> None:
    def one_rank(group: Group) -> tuple[float, float]:
        model, wrapped = plain(), plain()
        opt = DiLoCo(model, sgd(model), sync_every=8, process_group=group)
        ddp = DistributedDataParallel(wrapped, process_group=group)
        inner = sgd(ddp)
        sent = []
        for trained, optimizer in ((model, opt), (ddp, inner)):
            group.traffic.reset()
            train(trained, optimizer, group.rank(), range(16))
            sent.append(group.traffic.bytes_sent)
        return sent[0], sent[1]

    for diloco, every_step in run_ranks(2, one_rank):
        assert diloco < every_step / 7


# -- weights and Join ----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, Half()])
def test_ranks_count_by_their_weights(codec: Any) -> None:
    def one_rank(group: Group) -> float:
        held = nn.Parameter(torch.zeros(2))
        opt = DiLoCo(
            [held],
            torch.optim.SGD([held], 1.0),
            partial(torch.optim.SGD, lr=1.0),
            sync_every=2,
            codec=codec,
            process_group=group,
        )
        for samples in ((1, 2), (6, 2), (0, 0))[group.rank()]:
            held.grad = torch.full((2,), 1.0 + group.rank())
            if group.rank() == 2:
                held.grad.fill_(float("inf"))
            opt.step(samples=samples)
        return held.detach()[0].item()

    # 3 samples say -2, 8 say -4, none say anything else
    expected = -(3 * 2 + 8 * 4) / 11
    for found in run_ranks(3, one_rank):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("steps", [(2, 9), (9, 2), (0, 3), (6, 6)])
@pytest.mark.parametrize(("fragments", "overlap", "mix"), [(1, 0, 0.0), (3, 2, 0.5)])
def test_ranks_may_run_out_at_different_times(
    steps: tuple[int, int], fragments: int, overlap: int, mix: float
) -> None:
    def one_rank(group: Group) -> tuple[Any, int, Any]:
        model = small()
        opt = DiLoCo(
            model,
            sgd(model),
            sync_every=4,
            fragments=fragments,
            overlap=overlap,
            mix=mix,
            process_group=group,
        )
        with Join([opt]):
            train(model, opt, group.rank(), range(steps[group.rank()]))
        inside = opt.steps
        train(model, opt, group.rank(), range(20, 24))  # and the ranks are in step afterwards
        opt.sync()
        return weights_of(model), inside, opt.state_dict()["rounds"]["outer_params"]

    found = run_ranks(2, one_rank)
    assert_all_equal([weights for weights, _, _ in found])
    assert found[0][1] == found[1][1] >= max(steps)
    assert_all_equal([{str(i): t for i, t in enumerate(outer)} for _, _, outer in found])


def test_ranks_with_even_inputs_get_the_same_inside_join_and_outside() -> None:
    def one_rank(group: Group, joined: bool) -> Any:
        model = plain()
        opt = DiLoCo(model, sgd(model), sync_every=3, process_group=group)
        with Join([opt], enable=joined):
            train(model, opt, group.rank(), range(6))
        return weights_of(model)

    inside, outside = (run_ranks(2, lambda g, j=j: one_rank(g, j)) for j in (True, False))
    assert_all_equal([*inside, *outside])


@pytest.mark.parametrize(("fails_at", "others"), [(3, 9), (9, 3), (0, 0), (5, 5)])
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("codec", [None, Half()])
def test_an_error_on_one_rank_inside_join_is_heard_by_the_others(
    fails_at: int, others: int, overlap: int, codec: Any
) -> None:
    def one_rank(group: Group) -> tuple[str, str, Any]:
        model = plain()
        opt = DiLoCo(
            model,
            sgd(model),
            sync_every=4,
            fragments=4,
            overlap=overlap,
            codec=codec,
            process_group=group,
        )
        with pytest.raises((PeerFailedError, OSError)) as caught, Join([opt]):
            train(model, opt, group.rank(), range(fails_at if group.rank() else others))
            if group.rank() == 1:
                raise OSError("the disk is full")
        opt.sync()  # the group and the optimizer are as good as before
        return type(caught.value).__name__, str(caught.value), weights_of(model)

    found = run_ranks(3, one_rank)
    assert [name for name, _, _ in found] == ["PeerFailedError", "OSError", "PeerFailedError"]
    assert all("the disk is full" in text for _, text, _ in found)
    assert_all_equal([weights for _, _, weights in found])


def test_alone_in_a_join_it_sends_nothing_but_its_exchanges() -> None:
    def one_rank(group: Group, joined: bool) -> int:
        model = plain()
        opt = DiLoCo(model, sgd(model), sync_every=5, process_group=group)
        calls = watch(group)
        with Join([opt], enable=joined):
            train(model, opt, group.rank(), range(20))
            inside = len(calls)
        return inside

    assert run_ranks(2, lambda g: one_rank(g, True)) == [4, 4]
    assert run_ranks(2, lambda g: one_rank(g, False)) == [4, 4]


# -- as an optimizer -----------------------------------------------------------------------------


def test_both_optimizers_take_schedulers() -> None:
    def one_rank(group: Group) -> None:
        model = plain()
        opt = DiLoCo(model, sgd(model), sync_every=2, fragments=2, process_group=group)
        inner, outer = (LambdaLR(o, lambda n: 0.5**n) for o in (opt, opt.outer_optimizer))
        train(model, opt, 0, range(2))
        inner.step()
        outer.step()
        assert opt.optim.param_groups[0]["lr"] == 0.05
        assert opt.outer_optimizer.param_groups[0]["lr"] == 0.35

    run_ranks(1, one_rank)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"sync_every": 0}, AveragingArgumentError, "sync_every"),
        ({"sync_every": 4, "fragments": 5}, AveragingArgumentError, "fragments"),
        ({"sync_every": 9, "fragments": 5}, AveragingArgumentError, "has 4 parameters"),
        ({"sync_every": 4, "overlap": 4}, AveragingArgumentError, "overlap"),
        ({"sync_every": 4, "mix": 1.0}, AveragingArgumentError, "mix"),
        ({"sync_every": 4, "codec": "int8"}, AveragingTypeError, "encode and decode"),
        ({"sync_every": 4, "outer": lambda p: p}, AveragingTypeError, "of type list"),
    ],
)
def test_what_it_cannot_work_with_is_refused_at_once(
    settings: dict[str, Any], error: Any, words: str
) -> None:
    def one_rank(group: Group) -> int:
        model = plain()
        calls = watch(group)
        with pytest.raises(error, match=words):
            DiLoCo(model, sgd(model), process_group=group, **settings)
        return len(calls)

    assert run_ranks(1, one_rank) == [0]


def test_ranks_that_disagree_all_hear_of_it() -> None:
    def one_rank(group: Group) -> tuple[str, object]:
        model = plain()
        codec = Half() if group.rank() else None
        with pytest.raises(RoundsMismatchError) as caught:
            DiLoCo(model, sgd(model), sync_every=2, codec=codec, process_group=group)
        return caught.value.fact, caught.value.own

    assert run_ranks(2, one_rank) == [("codec", "None"), ("codec", "Half()")]


# -- checkpoints ---------------------------------------------------------------------------------


def streaming(group: Any, seed: int = 0, **settings: Any) -> tuple[Any, DiLoCo]:
    """One with everything on: two exchanges may be under way at any time."""
    model = small(seed)
    inner = torch.optim.AdamW(model.parameters(), 0.01)
    chosen = {"sync_every": 5, "fragments": 3, "overlap": 3, "mix": 0.3, "codec": Half()}
    settings = {**chosen, "error_feedback": True, **settings}
    return model, DiLoCo(model, inner, process_group=group, **settings)


@pytest.mark.parametrize("stop", range(3, 9))
def test_training_goes_on_to_the_last_bit_from_a_checkpoint(stop: int, tmp_path: Path) -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        file = tmp_path / str(group.rank())
        weight = 1 + group.rank()
        model, opt = streaming(group)
        train(model, opt, group.rank(), range(stop), samples=weight)
        torch.save([model.state_dict(), opt.state_dict()], file)
        train(model, opt, group.rank(), range(stop, 14), samples=weight)
        other, resumed = streaming(group, seed=1)
        saved = torch.load(file, weights_only=True)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(other, resumed, group.rank(), range(stop, 14), samples=weight)
        return weights_of(model), weights_of(other)

    for straight, resumed in run_ranks(2, one_rank):
        assert_all_equal([straight, resumed])


def test_saving_does_not_change_the_training() -> None:
    def one_rank(group: Group, save: bool) -> Any:
        model, opt = streaming(group)
        for step in range(12):
            train(model, opt, group.rank(), range(step, step + 1))
            if save:
                opt.state_dict()
        return weights_of(model)

    saved, unsaved = (run_ranks(2, lambda g, s=s: one_rank(g, s)) for s in (True, False))
    for a, b in zip(saved, unsaved, strict=True):
        assert_all_equal([a, b])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_two_ranks_serves_any_number(ranks: int) -> None:
    def save(group: Group) -> Any:
        model, opt = streaming(group)
        train(model, opt, group.rank(), range(7))
        opt.sync()
        return model.state_dict(), opt.state_dict()

    saved = run_ranks(2, save)[0]

    def load(group: Group) -> tuple[Any, Any, Any]:
        model, opt = streaming(group, seed=1)
        model.load_state_dict(saved[0])
        opt.load_state_dict(copy.deepcopy(saved[1]))  # ranks that are threads would share it
        at_once = weights_of(model)
        train(model, opt, group.rank(), range(7, 17))
        opt.sync()
        return at_once, weights_of(model), opt.state_dict()["rounds"]["outer_params"]

    found = run_ranks(ranks, load)
    assert_all_equal([saved[0], *(before for before, _, _ in found)])
    assert_all_equal([after for _, after, _ in found])


def test_a_model_cut_in_another_way_goes_on_if_nothing_was_under_way() -> None:
    def one_rank(group: Group) -> None:
        model, opt = streaming(group)
        train(model, opt, group.rank(), range(7))
        flying = opt.state_dict()
        assert flying["rounds"]["in_flight"]
        opt.sync()
        calm = opt.state_dict()
        _, other = streaming(group, fragments=2)
        with pytest.raises(RoundsStateError, match="divides the model in another way"):
            other.load_state_dict(flying)
        assert other.steps == 0
        other.load_state_dict(calm)
        assert other.steps == 7
        momentum = other.outer_optimizer.state_dict()["state"][0]["momentum_buffer"]
        expected = opt.outer_optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert torch.equal(momentum, expected)

    run_ranks(2, one_rank)


def test_another_model_is_refused() -> None:
    def one_rank(group: Group) -> None:
        model, opt = plain(), nn.Linear(3, 3)
        state = DiLoCo(model, sgd(model), sync_every=2, process_group=group).state_dict()
        with pytest.raises(RoundsStateError, match="outer parameters of other shapes"):
            DiLoCo(opt, sgd(opt), sync_every=2, process_group=group).load_state_dict(state)

    run_ranks(1, one_rank)


def test_a_plain_optimizers_state_begins_a_round_from_the_model_as_it_is() -> None:
    def one_rank(group: Group) -> None:
        model = plain()
        opt = DiLoCo(model, sgd(model), sync_every=3, process_group=group)
        model.load_state_dict(plain(seed=5).state_dict())
        with pytest.warns(UserWarning, match="A round begins here"):
            opt.load_state_dict(sgd(model).state_dict())
        outer = opt.state_dict()["rounds"]["outer_params"]
        assert all(torch.equal(o, p) for o, p in zip(outer, model.parameters(), strict=True))

    run_ranks(1, one_rank)


# -- over real transports ------------------------------------------------------------------------


def on_processes(meeting: Meeting, backend: str) -> Any:
    """Train over a group of ours, or over torch's default one."""
    if backend == "torch":
        dist.init_process_group("gloo")
        group: Any = None
    else:
        group = meeting.new_group(backend)
    model, opt = streaming(group)
    train(model, opt, meeting.rank, range(8))
    with Join([opt]):
        train(model, opt, meeting.rank, range(8, 9 + 3 * meeting.rank))
    found = weights_of(model)
    if backend == "torch":
        dist.destroy_process_group()
    else:
        group.shutdown()
    return found


def test_it_gives_the_same_numbers_over_shm_and_over_torchs_own_group() -> None:
    assert_all_equal([*spawn_ranks(2, on_processes, "shm"), *spawn_ranks(2, on_processes, "torch")])


def to_the_end(group: Group, folder: str = "", *, die: bool = False) -> Any:
    """Train from the checkpoint in ``folder``, if any; or save one and be killed on the way."""
    model, opt = streaming(group)
    file = Path(folder) / f"{group.rank()}.pt"
    if folder and not die:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
    for step in range(opt.steps, 16):
        train(model, opt, group.rank(), range(step, step + 1))
        if die and step == 6:
            assert opt.state_dict()["rounds"]["in_flight"]
            torch.save([model.state_dict(), opt.state_dict()], file)
            group.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    return weights_of(model)


def killed(meeting: Meeting, folder: str) -> None:
    with meeting.new_group(USUAL) as group:
        to_the_end(group, folder, die=True)


def resumed_and_straight(meeting: Meeting, folder: str) -> tuple[Any, Any]:
    with meeting.new_group(USUAL) as group:
        return to_the_end(group, folder), to_the_end(group)


def test_a_killed_run_resumes_to_the_last_bit(tmp_path: Path) -> None:
    spawn_ranks(2, killed, str(tmp_path), may_die=(0, 1))
    for resumed, straight in spawn_ranks(2, resumed_and_straight, str(tmp_path)):
        assert_all_equal([resumed, straight])
