"""State dicts of a sharded optimizer: those of an ordinary one, whatever the number of ranks."""

from __future__ import annotations

import copy
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import OptimizerStateError
from paceline.groups import Group
from paceline.optim import ZeroRedundancyOptimizer as Zero
from paceline.optim.zero.pieces import RunPiece, piece_of
from paceline.optim.zero.state import Share, assemble, shares_of, state_for
from paceline.optim.zero.stretches import Slice, even_bounds, slices_between
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.optim.zero.ranks import (
    OPTIMIZERS,
    alone,
    assert_equal_states,
    assert_equal_weights,
    group_of,
    model,
    train,
    weights,
)

# Cut and put together.


@given(
    st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=6),
    st.integers(1, 5),
    st.booleans(),
)
def test_a_state_that_is_cut_and_put_together_is_the_same(
    shapes: list[list[int]], ranks: int, long_runs: bool
) -> None:
    params = [torch.zeros(shape) for shape in shapes]
    state = {
        number: {"step": torch.tensor(3.0), "m": torch.rand(param.shape), "note": "as it was"}
        for number, param in enumerate(params)
    }
    sizes = [param.numel() for param in params]
    bounds = even_bounds(sum(sizes), ranks)
    shares: list[Share] = []
    for start, stop in itertools.pairwise(bounds):
        slices = slices_between(range(len(sizes)), sizes, start, stop)
        if long_runs and slices:
            pieces: Any = [RunPiece(torch.zeros(stop - start), slices, 0, lambda: None)]
        else:
            pieces = [piece_of(params[part.param], part, 0) for part in slices]
        kept = {piece.tensor: state_for(piece, state, params) for piece in pieces}
        shares.extend(Share.unpack(share.pack()) for share in shares_of(pieces, kept))
    found = assemble(shares, params)
    assert found.keys() == state.keys()
    for number, own in state.items():
        assert list(found[number]) == list(own)
        assert torch.equal(found[number]["m"], own["m"])
        assert torch.equal(found[number]["step"], own["step"])
        assert found[number]["note"] == "as it was"


# One dict for all.


def save(group: Group, name: str, cut: Any = "auto", steps: int = 4) -> dict[str, Any] | None:
    kind, settings = OPTIMIZERS[name]
    net = model()
    zero = Zero(net.parameters(), kind, group, cut=cut, **settings)
    train(net, zero, range(steps))
    zero.consolidate_state_dict(to=group.size() - 1)
    return zero.state_dict() if group.rank() == group.size() - 1 else None


@pytest.mark.parametrize("cut", ["auto", "whole"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_that_of_an_ordinary_optimizer(name: str, cut: Any) -> None:
    _, expected = alone(name)
    for ranks in (1, 3):
        found = run_ranks(ranks, lambda group: save(group, name, cut))[-1]
        assert found is not None
        assert_equal_states(found, expected)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_state_of_four_ranks_goes_on_bit_for_bit_on_any_number(name: str, ranks: int) -> None:
    kind, settings = OPTIMIZERS[name]
    state = run_ranks(4, lambda group: save(group, name, steps=2))[-1]
    assert state is not None
    middle, _ = alone(name, 2)

    def one_rank(group: Group) -> list[Tensor]:
        net = model()
        for param, value in zip(net.parameters(), middle, strict=True):
            param.data.copy_(value)
        zero = Zero(net.parameters(), kind, group, **settings)
        zero.load_state_dict(copy.deepcopy(state))
        train(net, zero, range(2, 4))
        return weights(net)

    expected, _ = alone(name)
    for found in run_ranks(ranks, one_rank):
        assert_equal_weights(found, expected)


def test_an_ordinary_optimizer_takes_it_and_gives_it() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        net = model()
        zero = Zero(net.parameters(), torch.optim.AdamW, group, lr=0.1)
        train(net, zero, range(2))
        zero.consolidate_state_dict(0)
        state = group.broadcast_object(zero.state_dict() if group.rank() == 0 else None)
        plain = torch.optim.AdamW(net.parameters(), lr=0.5)
        plain.load_state_dict(state)  # type: ignore[arg-type]
        train(net, plain, range(2, 3))
        zero.load_state_dict(plain.state_dict())
        train(net, zero, range(3, 4))
        return weights(net)

    expected, _ = alone("AdamW")
    for found in run_ranks(2, one_rank):
        assert_equal_weights(found, expected)


def test_it_is_one_file_that_loads_without_pickled_code() -> None:
    state = run_ranks(2, lambda group: save(group, "AdamW"))[-1]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    _, expected = alone("AdamW")
    assert_equal_states(loaded, expected)


def test_loading_leaves_the_dict_alone_and_does_not_share_its_memory() -> None:
    _, state = alone("AdamW", 2)
    before = copy.deepcopy(state)

    def one_rank(group: Group) -> None:
        net = model()
        zero = Zero(net.parameters(), torch.optim.AdamW, group, lr=0.1)
        zero.load_state_dict(state)
        train(net, zero, range(2))

    run_ranks(2, one_rank)
    assert_equal_states(state, before)


def test_settings_come_with_the_state() -> None:
    _, state = alone("AdamW")
    state["param_groups"][0]["lr"] = 0.25

    def one_rank(group: Group) -> tuple[float, float]:
        zero = Zero(model().parameters(), torch.optim.AdamW, group, lr=0.1)
        zero.load_state_dict(state)
        return zero.param_groups[0]["lr"], zero.optim.param_groups[0]["lr"]

    assert run_ranks(2, one_rank) == [(0.25, 0.25)] * 2


def test_only_the_rank_it_was_brought_to_has_the_state() -> None:
    def one_rank(group: Group) -> None:
        net = model()
        zero = Zero(net.parameters(), torch.optim.SGD, group, lr=0.1)
        with pytest.raises(RuntimeError, match="has not been consolidated"):
            zero.state_dict()
        zero.consolidate_state_dict(to=1)
        if group.rank() == 1:
            assert zero.state_dict()["state"] == {}
        else:
            with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\)"):
                zero.state_dict()

    run_ranks(2, one_rank)


def test_a_dict_for_other_parameters_is_refused() -> None:
    def one_rank(group: Group) -> None:
        zero = Zero(model().parameters(), torch.optim.SGD, group, lr=0.1)
        other = torch.optim.SGD([torch.zeros(1)], lr=0.1).state_dict()
        with pytest.raises(ValueError, match="doesn't match the size"):
            zero.load_state_dict(other)

    run_ranks(2, one_rank)


def test_groups_added_later_are_in_the_state() -> None:
    def one_rank(group: Group) -> Any:
        net = model()
        params = list(net.parameters())
        zero = Zero(params[:2], torch.optim.AdamW, group, lr=0.1)
        train(net, zero, range(2))
        zero.add_param_group({"params": params[2:], "lr": 0.2})
        train(net, zero, range(2, 4))
        zero.consolidate_state_dict(0)
        return zero.state_dict() if group.rank() == 0 else None

    net = model()
    params = list(net.parameters())
    optimizer = torch.optim.AdamW(params[:2], lr=0.1)
    train(net, optimizer, range(2))
    optimizer.add_param_group({"params": params[2:], "lr": 0.2})
    train(net, optimizer, range(2, 4))
    assert_equal_states(run_ranks(3, one_rank)[0], optimizer.state_dict())


def test_state_that_only_some_ranks_have_is_refused() -> None:
    share = Share(Slice(0, 0, 2), ("m",), {"m": torch.zeros(2)}, {})
    with pytest.raises(OptimizerStateError, match="2 of 3 elements"):
        assemble([share], [torch.zeros(3)])


def consolidate_in_process(meeting: Meeting, backend: str) -> Any:
    with group_of(meeting, backend) as group:
        net = model()
        zero = Zero(net.parameters(), torch.optim.AdamW, group, lr=0.1)
        train(net, zero, range(4))
        zero.consolidate_state_dict(0)
        return zero.state_dict() if group.rank() == 0 else None


@pytest.mark.parametrize("backend", ["shm", "torch"])
def test_processes_bring_their_state_together(backend: str) -> None:
    found = spawn_ranks(2, consolidate_in_process, backend)[0]
    _, expected = alone("AdamW")
    assert_equal_states(found, expected)


# Through torch's distributed checkpoints.


def save_sharded(meeting: Meeting, path: str, name: str) -> None:
    with group_of(meeting, "torch") as group:
        kind, settings = OPTIMIZERS[name]
        net = model()
        zero = Zero(net.parameters(), kind, group, **settings)
        train(net, zero, range(2))
        state = {"model": net.state_dict(), "optimizer": zero.sharded_state_dict()}
        dcp.save(state, checkpoint_id=path)


def resume(group: Group, path: Path, name: str) -> list[Tensor]:
    kind, settings = OPTIMIZERS[name]
    net = model()
    middle, _ = alone(name, 2)
    for param, value in zip(net.parameters(), middle, strict=True):
        param.data.copy_(value)
    zero = Zero(net.parameters(), kind, group, **{**settings, "lr": 7.0})
    zero.load_sharded(path, "optimizer")
    assert zero.param_groups[0]["lr"] == settings["lr"]
    train(net, zero, range(2, 4))
    return weights(net)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_a_checkpoint_of_three_ranks_goes_on_bit_for_bit_on_any_number(
    name: str, tmp_path: Path
) -> None:
    spawn_ranks(3, save_sharded, str(tmp_path), name)
    expected, _ = alone(name)
    for ranks in (1, 2, 4):
        for found in run_ranks(ranks, lambda group: resume(group, tmp_path, name)):
            assert_equal_weights(found, expected)


def test_each_rank_saves_its_own_part_only() -> None:
    def one_rank(group: Group) -> int:
        net = model()
        zero = Zero(net.parameters(), torch.optim.AdamW, group, lr=0.1)
        train(net, zero, range(1))
        found = zero.sharded_state_dict()
        parts = [p for k, v in found.items() if k.endswith(".exp_avg") for p in v.parts.values()]
        return sum(part.numel() for part in parts)

    assert run_ranks(2, one_rank) == [33, 33]


def test_a_checkpoint_of_another_model_or_of_none_is_refused(tmp_path: Path) -> None:
    spawn_ranks(1, save_sharded, str(tmp_path), "SGD")

    def one_rank(group: Group) -> None:
        other = nn.Linear(5, 8, dtype=torch.float64)
        zero = Zero(other.parameters(), torch.optim.SGD, group, lr=0.1)
        with pytest.raises(OptimizerStateError, match="4 there, 2 here, parameter 0"):
            zero.load_sharded(tmp_path)
        with pytest.raises(OptimizerStateError, match="no sharded optimizer state"):
            zero.load_sharded(tmp_path, "model")

    run_ranks(1, one_rank)
