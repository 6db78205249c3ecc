"""DistributedSampler: every sample once, whatever the number of ranks and wherever it resumes."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import DistributedSampler as TorchSampler

from paceline.data import DistributedSampler
from paceline.errors import SamplerStateError
from paceline.groups import Group, process_group
from paceline.join import Join
from paceline.testing import run_ranks
from tests.join.test_protocol import Counter

LENGTHS = st.integers(0, 60)
RANKS = st.integers(1, 7)
EPOCHS = st.integers(0, 5)


def samplers(length: int, ranks: int, epoch: int = 0, **options: Any) -> list[DistributedSampler]:
    made = [DistributedSampler(range(length), ranks, rank, **options) for rank in range(ranks)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


def dealt(row: Sequence[DistributedSampler]) -> list[int]:
    """All ranks' samples in the order of positions: round by round, rank by rank."""
    rounds = itertools.zip_longest(*map(list, row))
    return [index for turn in rounds for index in turn if index is not None]


# -- an epoch -----------------------------------------------------------------------------------


@given(LENGTHS, RANKS, EPOCHS, st.booleans())
def test_every_sample_comes_once_and_ranks_differ_by_one_at_most(
    length: int, ranks: int, epoch: int, shuffle: bool
) -> None:
    row = samplers(length, ranks, epoch, shuffle=shuffle)
    parts = [list(sampler) for sampler in row]
    assert sorted(itertools.chain(*parts)) == list(range(length))
    assert [len(sampler) for sampler in row] == [sampler.num_samples for sampler in row]
    assert [len(sampler) for sampler in row] == [len(part) for part in parts]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert row[0].total_size == length


@given(LENGTHS, RANKS, EPOCHS)
def test_the_order_of_all_ranks_together_does_not_depend_on_their_number(
    length: int, ranks: int, epoch: int
) -> None:
    assert dealt(samplers(length, ranks, epoch)) == dealt(samplers(length, 1, epoch))


@given(st.integers(0, 100), EPOCHS, st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_a_global_batch_has_the_same_samples_for_any_number_of_ranks(
    length: int, epoch: int, ranks: int
) -> None:
    whole = dealt(samplers(length, 1, epoch))
    batches = [
        list(torch.utils.data.BatchSampler(sampler, 12 // ranks, drop_last=False))
        for sampler in samplers(length, ranks, epoch)
    ]
    steps = itertools.zip_longest(*batches, fillvalue=[])
    found = [sorted(itertools.chain(*step)) for step in steps]
    assert found == [sorted(whole[k : k + 12]) for k in range(0, length, 12)]


@given(LENGTHS, RANKS, EPOCHS)
def test_drop_last_leaves_out_only_what_does_not_go_around(
    length: int, ranks: int, epoch: int
) -> None:
    row = samplers(length, ranks, epoch, drop_last=True)
    parts = [list(sampler) for sampler in row]
    assert {len(part) for part in parts} == {length // ranks}
    assert {len(sampler) for sampler in row} == {length // ranks}
    assert len(set(itertools.chain(*parts))) == row[0].total_size == length - length % ranks


@given(st.integers(1, 9), RANKS, EPOCHS, st.integers(0, 3), st.booleans(), st.booleans())
def test_where_torchs_sampler_need_not_pad_it_deals_the_same(
    rounds: int, ranks: int, epoch: int, seed: int, shuffle: bool, drop_last: bool
) -> None:
    length = rounds * ranks + (1 if drop_last and ranks > 1 else 0)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    for rank in range(ranks):
        ours = DistributedSampler(range(length), ranks, rank, **options)
        theirs: TorchSampler[int] = TorchSampler(range(length), ranks, rank, **options)  # type: ignore[arg-type]
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)


def test_epochs_and_seeds_change_the_order_and_the_same_ones_repeat_it() -> None:
    orders = {
        (seed, epoch): tuple(dealt(samplers(50, 2, epoch, seed=seed)))
        for seed, epoch in [(0, 0), (0, 1), (7, 0)]
    }
    assert len(set(orders.values())) == 3
    (sampler,) = samplers(50, 1)
    sampler.set_epoch(0)
    assert list(sampler) == list(sampler) == list(orders[0, 0])


def test_it_is_one_of_torchs_samplers_and_can_be_pickled() -> None:
    sampler = DistributedSampler(range(9), 2, 1)
    assert isinstance(sampler, TorchSampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


# -- where rank and size come from --------------------------------------------------------------


def test_rank_and_size_come_from_the_group_or_the_current_group() -> None:
    def one_rank(group: Group) -> list[tuple[int, int]]:
        given_group = DistributedSampler(range(9), group=group)
        with process_group(group):
            current = DistributedSampler(range(9))
        numbers = DistributedSampler(range(9), 5, 4, group=group)
        return [(s.rank, s.num_replicas) for s in (given_group, current, numbers)]

    assert run_ranks(2, one_rank) == [[(r, 2), (r, 2), (4, 5)] for r in range(2)]


def test_without_a_group_torch_says_that_there_is_none() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DistributedSampler(range(9))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"Invalid rank .*, rank should be in the interval \[0, 1"):
        DistributedSampler(range(9), 2, rank)


# -- resuming -----------------------------------------------------------------------------------


@given(LENGTHS, RANKS, RANKS, EPOCHS, st.booleans(), st.data())
def test_a_state_of_some_ranks_is_resumed_on_others_with_each_sample_once(
    length: int, before: int, after: int, epoch: int, shuffle: bool, data: st.DataObject
) -> None:
    old = samplers(length, before, epoch, shuffle=shuffle)
    draws = data.draw(st.integers(0, -(-length // before)))
    seen: list[int] = []
    for sampler in old:
        seen += itertools.islice(iter(sampler), draws)
    states = [sampler.state_dict() for sampler in old]
    state = max(states, key=lambda s: s["position"])  # a rank with one less has drawn all it has
    assert state["position"] == len(seen)

    new = samplers(length, after, shuffle=shuffle)
    for sampler in new:
        sampler.load_state_dict(state)
        sampler.set_epoch(epoch)  # as training loops do, at the start of the resumed epoch
    assert [len(s) for s in new] == [len(range(len(seen) + s.rank, length, after)) for s in new]
    rest = dealt(new)
    assert sorted(seen + rest) == list(range(length))
    assert rest == dealt(samplers(length, 1, epoch, shuffle=shuffle))[len(seen) :]
    assert all(sampler.state_dict()["position"] == length for sampler in new)
    assert sorted(dealt(new)) == list(range(length)), "the iteration after that is a whole one"


def test_the_position_can_be_given_by_who_knows_better() -> None:
    (sampler,) = samplers(10, 1)
    list(sampler)
    state = sampler.state_dict(position=4)
    sampler.load_state_dict(state)
    assert list(sampler) == dealt(samplers(10, 1))[4:]


def test_another_epoch_starts_afresh() -> None:
    (sampler,) = samplers(10, 1)
    sampler.load_state_dict(sampler.state_dict(position=4))
    sampler.set_epoch(1)
    assert len(sampler) == 10
    assert sampler.state_dict()["position"] == 0
    assert list(sampler) == dealt(samplers(10, 1, epoch=1))


def test_an_epoch_that_was_over_gives_nothing_when_it_is_resumed() -> None:
    (old,) = samplers(10, 1, epoch=3)
    list(old)
    (new,) = samplers(10, 1)
    new.load_state_dict(old.state_dict())
    seen = {}
    for epoch in range(new.epoch, 6):
        new.set_epoch(epoch)
        seen[epoch] = len(list(new))
    assert seen == {3: 0, 4: 10, 5: 10}


@pytest.mark.parametrize(
    ("field", "options"),
    [("seed", {"seed": 1}), ("shuffle", {"shuffle": False}), ("length", {"length": 9})],
)
def test_a_state_of_another_row_of_samples_is_refused(field: str, options: Any) -> None:
    state = DistributedSampler(range(10), 2, 0).state_dict()
    other = DistributedSampler(range(options.pop("length", 10)), 2, 0, **options)
    with pytest.raises(SamplerStateError) as caught:
        other.load_state_dict(state)
    assert caught.value.field == field


# -- loaders ------------------------------------------------------------------------------------


class Squares(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


def numbers(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gets_every_sample_once(workers: int) -> None:
    dataset = Squares(23)
    found: list[int] = []
    for rank in range(3):
        sampler = DistributedSampler(dataset, 3, rank)
        loader = DataLoader(dataset, 2, sampler=sampler, num_workers=workers, timeout=10 * workers)
        batches = list(loader)
        assert len(batches) == len(loader)
        found += numbers(batches)
    assert sorted(found) == [n * n for n in range(23)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_stateful_data_loader_resumes_on_another_number_of_ranks(
    workers: int, steps: int
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = Squares(26)

    def loader(size: int, rank: int) -> Any:
        sampler = DistributedSampler(dataset, size, rank, seed=5)
        return torchdata.StatefulDataLoader(
            dataset, 12 // size, sampler=sampler, num_workers=workers
        )

    old = [loader(4, rank) for rank in range(4)] if workers == 0 else [loader(4, 3)]
    seen: list[int] = []
    for one in old:
        one.sampler.set_epoch(2)
        seen += numbers(itertools.islice(iter(one), steps))
    state = old[-1].state_dict()
    whole = [n * n for n in dealt(samplers(26, 1, 2, seed=5))]
    if workers == 0:
        assert sorted(seen) == sorted(whole[: steps * 12])
    rest: list[int] = []
    for rank in range(2):
        one = loader(2, rank)
        one.load_state_dict(state)
        one.sampler.set_epoch(2)
        rest += numbers(one)
    assert sorted(rest) == sorted(whole[steps * 12 :])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_saved_after_an_epoch_begins_the_next(
    workers: int, told: bool
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = Squares(10)

    def loader() -> Any:
        sampler = DistributedSampler(dataset, 1, 0)
        return torchdata.StatefulDataLoader(dataset, 4, sampler=sampler, num_workers=workers)

    old, new = loader(), loader()
    assert len(numbers(old)) == 10
    new.load_state_dict(old.state_dict())
    if told:
        new.sampler.set_epoch(1)
    assert numbers(new) == [n * n for n in dealt(samplers(10, 1, int(told)))]


def test_uneven_shards_train_in_a_join_context() -> None:
    dataset = Squares(10)

    def one_rank(group: Group) -> tuple[int, int]:
        counter = Counter(group)
        loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, group=group))
        with Join([counter]):
            for _ in loader:
                counter.step()
        return len(loader), counter.shadowed

    assert run_ranks(4, one_rank) == [(2, 0), (2, 0), (1, 1), (1, 1)]


def test_an_epoch_that_is_dealt_twice_is_warned_of_once() -> None:
    sampler = DistributedSampler(range(4), num_replicas=2, rank=1)
    list(sampler)
    with pytest.warns(UserWarning, match=r"rank 1: DistributedSampler begins a second epoch, and"):
        list(sampler)
    list(sampler)


def test_epochs_that_are_set_or_resumed_or_in_order_are_not_warned_of() -> None:
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    for epoch in (0, 1, 1):
        sampler.set_epoch(epoch)
        list(sampler)
    sampler.load_state_dict(sampler.state_dict(position=2))
    list(sampler)
    ordered = DistributedSampler(range(4), num_replicas=2, rank=0, shuffle=False)
    list(ordered), list(ordered)
