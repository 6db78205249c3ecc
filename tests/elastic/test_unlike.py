"""A rank whose model, data or loop is not that of the others: named on all, or left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data import Shard, keyed_random
from paceline.errors import JobStateError, LoaderStateError, StartMismatchError

from .runs import BATCH, Ranks, dataset, model_of, require_equal
from .test_faults import at
from .test_job import survivors, undisturbed


def of_width(width: int) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        with keyed_random(Shard(seed, 0, 0, 1)):
            return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    return make


def of_dtype(seed: int) -> nn.Module:
    model = model_of(seed)
    model[4].double()
    return model


def frozen(seed: int) -> nn.Module:
    model = model_of(seed)
    model[0].weight.requires_grad_(False)
    return model


class Two(nn.Module):
    """Two layers of one size, under names that may come in another order."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        made = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
        for name in names:
            self.add_module(name, made[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu()).sum(1)  # type: ignore[no-any-return]


def in_order(*names: str) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        with keyed_random(Shard(seed, 0, 0, 1)):
            return Two(*names)

    return make


UNLIKE: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], nn.Module]]] = {
    "shape": (of_width(8), of_width(9)),
    "dtype": (model_of, of_dtype),
    "requires_grad": (model_of, frozen),
    "order": (in_order("one", "two"), in_order("two", "one")),
    "names": (in_order("one", "two"), of_width(8)),
}


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", list(UNLIKE))
def test_another_model_on_one_rank_is_an_error_on_all_before_anything_is_averaged(
    what: str, odd: int
) -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.start(model=UNLIKE[what][rank == odd])
    for member, one in ranks.wait().items():
        assert isinstance(one.error, StartMismatchError)
        assert (one.error.rank, set(one.error.said)) == (member, {0, 1})
        assert one.committed == []


def longer() -> TensorDataset:
    x, numbers = dataset().tensors
    more = torch.arange(len(x), len(x) + BATCH)
    return TensorDataset(torch.cat([x, x[:BATCH]]), torch.cat([numbers, more]))


LOOPS: dict[str, Callable[[], dict[str, Any]]] = {
    "the loader's length": lambda: {"samples": longer()},
    "epochs": lambda: {"epochs": 3},
    "check_every": lambda: {"check_every": 7},
}


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", list(LOOPS))
def test_one_iteration_more_on_one_rank_is_an_error_on_all(what: str, odd: int) -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.start(**(LOOPS[what]() if rank == odd else {}))
    for one in ranks.wait().values():
        assert isinstance(one.error, StartMismatchError)
        assert (one.error.what, one.committed) == (what, [])


JOINERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shape": lambda: {"model": of_width(9)},
    "dtype": lambda: {"model": of_dtype},
    "requires_grad": lambda: {"model": frozen},
    "samples": lambda: {"samples": longer()},
    "epochs": lambda: {"epochs": 3},
}


@pytest.mark.parametrize("what", list(JOINERS))
def test_a_newcomer_that_differs_raises_and_the_others_go_on(what: str) -> None:
    ranks = Ranks(2)

    def join() -> None:
        ranks.let_in(0, **JOINERS[what]())

    for _ in range(2):
        ranks.start(at(2, "begin", join, 0))
    outcomes = ranks.wait()
    assert isinstance(outcomes.pop(2).error, JobStateError | LoaderStateError)
    for one in survivors(outcomes):
        require_equal(one, undisturbed())
