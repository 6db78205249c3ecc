"""keyed_random: the numbers of a shard inside, those of before outside."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from paceline.data import Shard, keyed_random
from paceline.groups import Group
from paceline.testing import run_ranks

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

SHARD = Shard(seed=7, step=3, index=2, count=8)


def draw() -> tuple[Any, ...]:
    """Some numbers of every generator, an odd number of normal ones included."""
    return (
        *torch.randn(3).tolist(),
        *torch.randint(1 << 30, (2,)).tolist(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.randn()),
    )


def keyed(shard: Shard, **options: Any) -> tuple[Any, ...]:
    with keyed_random(shard, **options):
        return draw()


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


# -- inside -------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_shard_whatever_was_drawn_before() -> None:
    first = keyed(SHARD)
    draw()
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    assert keyed(SHARD) == first


def test_the_numbers_are_the_same_in_another_process() -> None:
    code = """
        import sys
        import torch
        from paceline.data import Shard, keyed_random
        if sys.argv[1] == "late":
            assert "numpy.random" not in sys.modules  # it is keyed all the same
        with keyed_random(Shard(seed=7, step=3, index=2, count=8)):
            import random
            import numpy as np
            print(float(torch.rand(())), random.random(), float(np.random.random()))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with keyed_random(SHARD):
        expected = [float(torch.rand(())), random.random(), float(np.random.random())]
    done = subprocess.run([*command, "late"], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == [str(number) for number in expected], done.stderr


def test_shards_that_differ_in_one_number_have_different_random_numbers() -> None:
    shards = [
        Shard(seed, step, index, 4, epoch)
        for seed, step, index, epoch in itertools.product(range(4), repeat=4)
    ]
    drawn = [keyed(shard) for shard in shards]
    for source in zip(*drawn, strict=True):
        assert len(set(source)) > 0.999 * len(shards)  # each by itself; chance meetings apart
    assert len({numbers[0] for numbers in drawn}) == len(shards)


def test_another_purpose_gives_other_numbers() -> None:
    assert keyed(SHARD) != keyed(SHARD, purpose="samples")


def test_a_shard_inside_another_has_its_own_numbers_and_the_outer_one_goes_on() -> None:
    other = Shard(seed=7, step=3, index=3, count=8)
    with keyed_random(SHARD):
        whole = draw(), draw()
    with keyed_random(SHARD):
        first = draw()
        assert keyed(other) == keyed(other) != first
        assert (first, draw()) == whole


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_again_in_backward_has_the_dropout_of_the_forward(
    use_reentrant: bool,
) -> None:
    x = torch.ones(64, requires_grad=True)

    def gradient(again: bool) -> tuple[list[float], list[float]]:
        def layer(values: torch.Tensor) -> torch.Tensor:
            return torch.dropout(values, 0.5, train=True)

        with keyed_random(SHARD):
            y = checkpoint(layer, x, use_reentrant=use_reentrant) if again else layer(x)
            torch.rand(5)  # what comes after the layer has no part in it
            (found,) = torch.autograd.grad(y.sum(), x) if not use_reentrant else _backward(y, x)
        return found.tolist(), torch.dropout(torch.ones(2), 0.0, train=True).tolist()

    assert gradient(True) == gradient(False)


def _backward(y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    x.grad = None
    y.sum().backward()
    assert x.grad is not None
    return (x.grad,)


def test_ranks_that_are_threads_have_the_numbers_of_their_own_shards() -> None:
    shards = [[Shard(0, step, rank, 4) for step in range(20)] for rank in range(4)]
    expected = [[keyed(shard) for shard in own] for own in shards]
    before = states()

    def one_rank(group: Group) -> list[tuple[Any, ...]]:
        found = []
        for shard in shards[group.rank()]:
            with keyed_random(shard):
                torch.ones(64, 64) @ torch.ones(64, 64)  # others may come in between
                time.sleep(0)
                found.append(draw())
        return found

    assert run_ranks(4, one_rank) == expected
    assert states() == before


def test_a_child_that_is_forked_while_a_thread_is_inside_does_not_wait_for_it() -> None:
    entered, left = threading.Event(), threading.Event()

    def inside() -> None:
        with keyed_random(SHARD):
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=inside)
    thread.start()
    assert entered.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child, should it wait
        keyed(SHARD)
        os._exit(0)
    left.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- outside ------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [False, True])
def test_afterwards_every_generator_is_where_it_was(odd: bool) -> None:
    if odd:  # half a pair of normal numbers is left over
        draw()
    else:
        np.random.seed(0)
    before = states()
    keyed(SHARD)
    assert states() == before


def test_numpys_left_over_half_of_a_pair_is_kept_however_often_a_block_is_entered() -> None:
    np.random.seed(5)
    expected = np.random.randn(7).tolist()
    np.random.seed(5)
    found = []
    for number in range(7):
        for _ in range(number % 3):
            keyed(SHARD)
        found.append(float(np.random.randn()))
    assert found == expected


def test_numpy_can_be_seeded_inside_and_its_bit_generator_be_another_one() -> None:
    np.random.seed(6)
    with keyed_random(SHARD):
        np.random.seed(1)
        inside = np.random.random()
    np.random.seed(1)
    assert inside == np.random.random()
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        first, again = keyed(SHARD), np.random.random()
        np.random.set_bit_generator(np.random.PCG64(3))
        assert again == np.random.random()
    finally:
        np.random.set_bit_generator(usual)
    assert keyed(SHARD) == first


def test_so_it_is_after_an_exception() -> None:
    draw()
    before = states()
    with pytest.raises(ZeroDivisionError), keyed_random(SHARD):
        draw()
        _ = 1 / 0
    assert states() == before


def test_a_device_that_is_not_there_is_refused_before_anything_changes() -> None:
    before = states()
    with pytest.raises((RuntimeError, AssertionError)), keyed_random(SHARD, ["xpu:7"]):
        pass
    assert states() == before


def test_the_cpu_and_the_meta_device_may_be_among_the_devices() -> None:
    assert keyed(SHARD, devices=["cpu", torch.device("meta")]) == keyed(SHARD)


@needs_cuda
def test_a_gpu_has_the_numbers_of_the_shard_and_goes_on_where_it_was() -> None:
    def on_gpu() -> list[float]:
        with keyed_random(SHARD, ["cuda"]):
            return torch.rand(4, device="cuda").tolist()

    first = on_gpu()
    torch.rand(100, device="cuda")
    before = torch.cuda.get_rng_state()
    assert on_gpu() == first
    assert torch.equal(torch.cuda.get_rng_state(), before)
