"""ShardedLoader: the same shards on any number of ranks, from any worker, and after a resume."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from paceline.data import Shard, ShardedLoader, ShardedStep, fetching, keyed_random
from paceline.errors import (
    DatasetChangedError,
    LoaderArgumentError,
    LoaderStateError,
    ShardNumberError,
    ShareError,
    WorkerLostError,
)
from paceline.groups import Group, process_group
from paceline.testing import run_ranks
from tests.waiting import until

Found = dict[tuple[int, int, int], Any]  # epoch, step, shard


class Noisy(Dataset[Any]):
    """Samples that are their number and what augmentation would draw."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[float]:
        return [index, float(torch.rand(())), random.random(), float(np.random.random())]


def loader(length: int = 50, rank: int = 0, members: Any = 1, **options: Any) -> ShardedLoader:
    given = {"shards": 4, "batch": 12, "collate_fn": list, **options}
    dataset = given.pop("dataset", None) or Noisy(length)
    return ShardedLoader(dataset, members=members, rank=rank, **given)


def loaders(size: int, **options: Any) -> list[ShardedLoader]:
    return [loader(rank=rank, members=size, **options) for rank in range(size)]


def contents(steps: Iterator[ShardedStep] | ShardedLoader) -> Found:
    """All of one rank's shards."""
    found: Found = {}
    for step in steps:
        for shard, batch in step:
            place = shard.epoch, shard.step, shard.index
            assert (shard.epoch, shard.step) == (step.epoch, step.number)
            assert place not in found
            assert shard.samples == len(batch)
            found[place] = batch
    return found


def together(parts: Sequence[Found]) -> Found:
    """What several ranks have; no shard twice."""
    assert sum(map(len, parts)) == len(set(itertools.chain(*parts)))
    return {place: batch for part in parts for place, batch in part.items()}


def numbers(found: Found) -> list[int]:
    return [sample[0] for batch in found.values() for sample in batch]


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    shards = draw(st.integers(1, 9))
    return {
        "shards": shards,
        "batch": draw(st.integers(shards, 20)),
        "length": draw(st.integers(shards, 60)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "shuffle": draw(st.booleans()),
    }


SIZES = st.integers(1, 9)


# -- an epoch -----------------------------------------------------------------------------------


@given(settings(), SIZES)
def test_every_sample_comes_once_and_shards_do_not_depend_on_the_number_of_ranks(
    options: dict[str, Any], size: int
) -> None:
    alone = contents(loader(**options))
    assert sorted(numbers(alone)) == list(range(options["length"]))
    parts = [contents(one) for one in loaders(size, **options)]
    assert together(parts) == alone  # what was drawn at random, too


@given(settings(), SIZES, SIZES, st.integers(0, 2), st.data())
def test_a_state_of_some_ranks_is_resumed_on_others_at_the_same_next_shard(
    options: dict[str, Any], before: int, after: int, epoch: int, data: st.DataObject
) -> None:
    old = loaders(before, **options)
    stop = data.draw(st.integers(0, len(old[0])))
    seen = []
    for one in old:
        one.seek(epoch)
        seen.append(contents(itertools.islice(iter(one), stop)))
    state = old[0].state_dict()
    assert all(one.state_dict() == state for one in old)

    rest = []
    for one in loaders(after, **options):
        one.load_state_dict(state)
        assert one.epoch == epoch
        rest.append(contents(one))
        assert one.epoch == epoch + 1
    whole = loader(**options)
    whole.seek(epoch)
    assert together(seen + rest) == contents(whole)


@given(settings(), st.data())
def test_ranks_may_change_in_every_step_and_be_any(
    options: dict[str, Any], data: st.DataObject
) -> None:
    alone = loader(**options)
    found = []
    members = st.sets(st.integers(0, 9), min_size=1, max_size=5)
    chosen = [sorted(data.draw(members)) for _ in range(len(alone))]
    for rank in range(10):
        mine = loader(rank=rank, members=[rank], **options)
        for step, ranks in zip(mine, chosen, strict=True):
            if rank in ranks:
                mine.members = ranks
                found.append(contents(iter([step])))
    assert together(found) == contents(alone)


@given(settings(), st.integers(0, 3), st.data())
def test_any_rank_fetches_any_shard_again(
    options: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    alone = loader(**options)
    alone.seek(epoch)
    whole = contents(alone)
    other = loader(rank=5, members=[5, 6], **options)
    place = data.draw(st.sampled_from(sorted(whole)))
    shard, batch = other.fetch(place[1], place[2], epoch=epoch)
    assert (shard.epoch, shard.step, shard.index) == place
    assert batch == whole[place]
    assert other.state_dict() == loader(**options).state_dict()


def test_one_loop_is_one_epoch_and_epochs_differ() -> None:
    one = loader()
    epochs = [contents(one) for _ in range(3)]
    assert [{place[0] for place in found} for found in epochs] == [{0}, {1}, {2}]
    orders = {tuple(numbers(found)) for found in epochs}
    assert len(orders) == 3
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert tuple(numbers(contents(loader(seed=1)))) not in orders


def test_after_a_break_the_next_step_comes_next() -> None:
    one = loader()
    first = contents(itertools.islice(iter(one), 1))
    assert contents(one) | first == contents(loader())


def test_what_a_shard_draws_while_it_is_fetched_is_not_what_it_draws_in_training() -> None:
    shard, batch = loader().fetch(0, 0)
    with keyed_random(shard):
        assert batch[0][1] != float(torch.rand(()))


def test_the_random_numbers_of_the_program_go_on_as_if_nothing_was_fetched() -> None:
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    contents(loader())
    after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_batches_are_collated_as_torch_does_and_by_what_is_given() -> None:
    rows = TensorDataset(torch.arange(8.0), torch.arange(8))
    one = ShardedLoader(rows, shards=2, batch=4, members=1, rank=0, shuffle=False)
    for step, ((shard, (x, y)), _) in enumerate(one):
        assert x.tolist() == [4 * step, 4 * step + 1] == y.tolist()
        source = "8 samples in order, 4 to a step"
        assert shard == Shard(seed=0, step=step, index=0, count=2, samples=2, source=source)

    def masked(samples: list[Any]) -> list[float]:
        return [float(torch.rand(())) for _ in samples]

    found = [contents(loader(collate_fn=masked, num_workers=0)) for _ in range(2)]
    assert found[0] == found[1]


def test_a_dataset_that_gives_several_samples_at_once_is_asked_for_a_whole_shard() -> None:
    class Lots(Noisy):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [[index] for index in indices]

    assert sorted(numbers(contents(loader(dataset=Lots(50))))) == list(range(50))


def test_samples_are_fetched_with_one_thread_wherever_that_happens() -> None:
    class Threads(Noisy):
        def __getitem__(self, index: int) -> list[float]:
            return [torch.get_num_threads()]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert set(numbers(contents(loader(dataset=Threads(50))))) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- ranks --------------------------------------------------------------------------------------


def test_ranks_are_those_of_the_group_or_of_the_current_one() -> None:
    def one_rank(group: Group) -> list[Any]:
        first = loader(rank=None, members=None, group=group)
        with process_group(group):
            second = loader(rank=None, members=None)
        return [(one.rank, one.members, one.share_of(0)) for one in (first, second)]

    shares = [(0, 1), (2,), (3,)]
    assert run_ranks(3, one_rank) == [[(r, (0, 1, 2), shares[r])] * 2 for r in range(3)]


def test_a_step_that_is_iterated_again_has_what_this_rank_has_to_do_now() -> None:
    one = loader(rank=1, members=[0, 1, 2])
    step = next(iter(one))
    first = contents(iter([step]))
    assert [shard.index for shard in step.shards] == [2]
    assert contents(iter([step])) == first
    one.members = [1, 2]
    assert len(step) == 2
    again = contents(iter([step]))
    assert again == {
        place: b for place, b in contents(loader()).items() if place[1:] in ((0, 0), (0, 1))
    }


def test_who_computes_what_can_be_said_by_a_function() -> None:
    def backwards(count: int, members: Sequence[int], rank: int, *, step: int) -> list[int]:
        return [index for index in reversed(range(count)) if (index + step) % len(members) == rank]

    parts = [contents(one) for one in loaders(3, share=backwards)]
    assert together(parts) == contents(loader())
    assert list(parts[0])[:2] == [(0, 0, 3), (0, 0, 0)]


@pytest.mark.parametrize("found", [(0, 0), (4,), (-1,), ("0",)])
def test_a_function_that_gives_what_is_no_shard_is_refused(found: Any) -> None:
    with pytest.raises(LoaderArgumentError, match="of 4 shards"):
        loader(share=lambda *_, **__: found)


# -- what is refused ----------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@pytest.mark.parametrize("dataset", [Stream(), iter(range(9)), {1, 2, 3, 4}])
def test_a_dataset_that_is_not_read_by_number_is_refused(dataset: Any) -> None:
    with pytest.raises(LoaderArgumentError) as caught:
        ShardedLoader(dataset, shards=1, batch=2, members=1, rank=0)
    assert caught.value.argument == "dataset"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ShardNumberError, {"seed": -1}),
        (ShareError, {"rank": 3, "members": 3}),
        (LoaderArgumentError, {"batch": 3}),
        (LoaderArgumentError, {"length": 3}),
        (TypeError, {"batch_size": 3}),
        (TypeError, {"prefetch": 3}),
        (ValueError, {"num_workers": -1}),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(kind: Any, options: Any) -> None:
    with pytest.raises(kind):
        loader(**options)


@pytest.mark.parametrize(("step", "index"), [(-1, 0), (4, 0), (0, -1), (0, 4)])
def test_a_shard_that_is_not_there_is_not_fetched(step: int, index: int) -> None:
    with pytest.raises(LoaderArgumentError):
        loader().fetch(step, index)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("seed", {"seed": 1}),
        ("shuffle", {"shuffle": False}),
        ("length", {"length": 51}),
        ("shards", {"shards": 3}),
        ("batch", {"batch": 13}),
        ("drop_last", {"drop_last": True}),
    ],
)
def test_a_state_of_other_shards_is_refused_by_name_and_nothing_changes(
    field: str, other: dict[str, Any]
) -> None:
    old = loader(**other)
    next(iter(old))
    new = loader()
    with pytest.raises(LoaderStateError) as caught:
        new.load_state_dict(old.state_dict())
    assert caught.value.field == field
    assert new.state_dict() == loader().state_dict()


@pytest.mark.parametrize("state", [{}, {"epoch": 0, "step": 0}])
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(LoaderStateError):
        loader().load_state_dict(state)


@pytest.mark.parametrize(("epoch", "step"), [(0, 6), (0, -1), (-1, 0)])
def test_a_step_that_is_not_there_is_not_sought(epoch: int, step: int) -> None:
    with pytest.raises(LoaderStateError):
        loader().seek(epoch, step)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # told to be so
def test_it_goes_into_a_distributed_checkpoint_as_it_is(tmp_path: Any) -> None:
    old, new = loader(), loader(rank=1, members=3)
    old.seek(4, 3)
    dcp.save({"loader": old}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"loader": new}, checkpoint_id=tmp_path, no_dist=True)
    assert new.state_dict() == old.state_dict()


# -- a dataset that changes ---------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_may_grow_between_epochs_and_not_within_one(workers: int) -> None:
    dataset = Noisy(20)
    one = loader(dataset=dataset, num_workers=workers)
    assert sorted(numbers(contents(one))) == list(range(20))
    dataset.length = 70
    assert sorted(numbers(contents(one))) == list(range(70))
    steps = iter(one)
    step = next(steps)
    dataset.length = 69
    with pytest.raises(DatasetChangedError) as caught:
        next(steps)
    assert (caught.value.before, caught.value.now) == (70, 69)
    with pytest.raises(DatasetChangedError):
        contents(iter([step]))
    one.seek(1)
    assert sorted(numbers(contents(one))) == list(range(69))
    one.close()


# -- workers ------------------------------------------------------------------------------------


def test_workers_give_what_this_process_gives_random_numbers_included() -> None:
    expected = [contents(one) for one in (loader(),) for _ in range(2)]
    one = loader(num_workers=2, timeout=30)
    assert [contents(one) for _ in range(2)] == expected


def test_a_worker_is_asked_for_a_whole_shard_and_lives_on_in_the_next_epoch() -> None:
    class Who(Noisy):
        def __getitem__(self, index: int) -> list[float]:
            info = get_worker_info()
            assert info is not None
            return [index, os.getpid()]

    one = loader(dataset=Who(50), num_workers=2, timeout=30)
    found = [contents(one), contents(one)]
    processes = [{s[1] for batch in part.values() for s in batch} for part in found]
    assert processes[0] == processes[1]
    assert len(processes[0]) == 2
    assert all(len({s[1] for s in batch}) == 1 for batch in found[0].values())


def test_with_workers_ranks_may_change_in_every_step_and_a_step_be_left_in_the_middle() -> None:
    alone = contents(loader())
    one = loader(rank=1, members=2, num_workers=2, timeout=30)
    for step in one:
        one.members = ([1], [0, 1], [0, 1, 2, 3], [1, 3])[step.number % 4]
        for shard, batch in itertools.islice(step, 1 + step.number % 2):
            assert batch == alone[0, step.number, shard.index]
        again = contents(iter([step]))
        assert again.items() <= alone.items()
        assert len(again) == len(step)


def test_a_state_saved_while_workers_are_ahead_is_that_of_the_steps_given_out() -> None:
    one = loader(num_workers=2, prefetch_factor=4, timeout=30)
    seen = contents(itertools.islice(iter(one), 1))
    assert one.state_dict()["step"] == 1
    new = loader(num_workers=0)
    new.load_state_dict(one.state_dict())
    assert together([seen, contents(new)]) == contents(loader())


class Deadly(Noisy):
    """Fetching a sample ends the worker, once."""

    def __init__(self, length: int, mark: str, end: Callable[[], None]) -> None:
        super().__init__(length)
        self.mark, self.end = mark, end

    def __getitem__(self, index: int) -> list[float]:
        if index == 17 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            self.end()
        return super().__getitem__(index)


@pytest.mark.parametrize("timeout", [0, 30])
@pytest.mark.parametrize(
    ("end", "told"),
    [
        (partial(signal.raise_signal, signal.SIGKILL), "was killed by signal 9 (Killed)"),
        (partial(os._exit, 3), "ended with exit code 3"),
        (partial(os._exit, 0), "ended with exit code 0"),  # of which torch's handler says nothing
    ],
    ids=["killed", "failed", "ended"],
)
def test_a_worker_that_dies_is_told_and_the_step_is_fetched_again_by_others(
    end: Callable[[], None], told: str, timeout: float, tmp_path: Path
) -> None:
    dataset = Deadly(50, str(tmp_path / "dead"), end)
    one = loader(dataset=dataset, num_workers=2, timeout=timeout)
    steps = iter(one)
    with pytest.raises(WorkerLostError, match=re.escape(told)) as caught:
        contents(steps)
    lost = caught.value
    assert (lost.rank, lost.epoch, lost.step) == (0, 0, one.state_dict()["step"] - 1)
    one.seek(0, lost.step)
    rest = {place: batch for place, batch in contents(loader()).items() if place[1] >= lost.step}
    assert contents(one) == rest
    one.close()


class Who(Noisy):
    """Samples are the process that fetched them."""

    def __getitem__(self, index: int) -> list[float]:
        return [os.getpid()]


def test_that_a_worker_died_is_told_where_a_batch_is_taken_and_nowhere_else() -> None:
    """torch's handler raises wherever the main thread is, such as in a backward pass."""
    one = loader(dataset=Who(50), num_workers=1, timeout=30)
    steps = iter(one)
    worker = numbers(contents(itertools.islice(steps, 1)))[0]
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # SIGCHLD has come, too
    torch.ones(2, requires_grad=True).sum().backward()
    with pytest.raises(WorkerLostError, match="killed by signal"):
        next(iter(next(steps)))
    one.seek(0, 1)
    assert contents(one).keys() == {place for place in contents(loader()) if place[1] >= 1}
    one.close()


def test_what_a_dataset_raises_in_a_worker_comes_out_as_it_is_and_the_step_can_be_retried() -> None:
    class Picky(Noisy):
        def __getitem__(self, index: int) -> list[float]:
            if index == 17:
                raise LookupError("sample 17 is damaged")
            return super().__getitem__(index)

    one = loader(dataset=Picky(50), num_workers=2, timeout=30)
    with pytest.raises(LookupError, match="sample 17 is damaged"):
        contents(one)
    with pytest.raises(LookupError, match="sample 17 is damaged"):
        contents(iter([ShardedStep(one, 0, one.state_dict()["step"] - 1)]))
    one.seek(0, len(one))
    assert contents(one) == {}
    one.close()


def test_a_forked_child_has_workers_of_its_own_and_leaves_those_of_its_parent_alone() -> None:
    one = loader(num_workers=2, timeout=30)
    steps = iter(one)
    seen = contents(itertools.islice(steps, 2))
    child = os.fork()
    if child == 0:
        right = False
        try:
            right = contents(one) == {k: v for k, v in contents(loader()).items() if k[1] >= 2}
        finally:
            os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert together([seen, contents(steps)]) == contents(loader())


def test_workers_go_when_the_loader_is_closed_or_forgotten() -> None:
    one = loader(dataset=Who(50), num_workers=1, timeout=30)
    workers = set(numbers(contents(one)))
    one.close()
    assert until(lambda: not any(alive(process) for process in workers))
    workers = set(numbers(contents(one)))
    forgotten = weakref.ref(one)
    del one
    assert forgotten() is None
    assert until(lambda: not any(alive(process) for process in workers))


def alive(process: int) -> bool:
    multiprocessing.active_children()  # reaps: torch does not wait for a worker that it ends late
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("error", "dead"),
    [
        (RuntimeError("DataLoader worker (pid 7) exited unexpectedly"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (EOFError(), True),
        (
            ConnectionResetError("Caught ConnectionResetError in DataLoader worker process 0."),
            False,
        ),
        (RuntimeError("out of memory"), False),
        (KeyError("x"), False),
    ],
)
def test_a_broken_pipe_is_the_death_of_a_worker_and_an_error_of_the_dataset_is_not(
    error: Exception, dead: bool
) -> None:
    assert bool(fetching._death_in(error)) == dead
