"""install(): torch's names mean ours, everywhere, until they are put back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import DistributedDataParallel as Renamed

import paceline
from paceline import ddp as paceline_ddp

# In tuples, because install() replaces what this module, too, holds by name.
TORCHS = (Join, *[DistributedDataParallel] * 4)
OURS = (paceline.Join, *[paceline.DistributedDataParallel] * 4)


def names() -> tuple[type, ...]:
    """What torch's names mean now, also those that this module imported before."""
    return (
        Join,
        DistributedDataParallel,
        Renamed,
        torch.nn.parallel.DistributedDataParallel,
        torch.nn.parallel.distributed.DistributedDataParallel,
    )


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    paceline.uninstall()
    assert names() == TORCHS


def test_all_names_mean_ours_and_then_torchs_again() -> None:
    assert names() == TORCHS
    paceline.install()
    assert names() == OURS
    paceline.uninstall()
    assert names() == TORCHS


def test_it_is_a_context() -> None:
    with paceline.install():
        assert names() == OURS
    assert names() == TORCHS


def test_a_context_left_by_an_error_puts_the_names_back() -> None:
    with pytest.raises(ArithmeticError), paceline.install():
        raise ArithmeticError
    assert names() == TORCHS


def test_installing_twice_is_undone_at_once() -> None:
    paceline.install()
    paceline.install()
    assert names() == OURS
    paceline.uninstall()
    assert names() == TORCHS


def test_uninstalling_what_is_not_installed_does_nothing() -> None:
    paceline.uninstall()
    paceline.uninstall()
    assert names() == TORCHS


def test_an_inner_context_leaves_the_outer_one_in_force() -> None:
    with paceline.install():
        with paceline.install():
            assert names() == OURS
        assert names() == OURS
    assert names() == TORCHS


def test_a_module_imported_since_is_reached_by_a_second_install(tmp_path: Path) -> None:
    paceline.install()
    module = type(sys)("imported_later")
    module.DDP = TORCHS[1]
    sys.modules["imported_later"] = module
    try:
        paceline.install()
        assert module.DDP is paceline.DistributedDataParallel
        paceline.uninstall()
        assert module.DDP is TORCHS[1]
    finally:
        del sys.modules["imported_later"]


def test_our_own_names_stay_ours() -> None:
    paceline.install()
    paceline.uninstall()
    assert paceline.DistributedDataParallel is OURS[1]
    assert paceline_ddp.DistributedDataParallel is OURS[1]
    assert issubclass(paceline.DistributedDataParallel, TORCHS[1])


def test_strictness_ends_with_the_installation() -> None:
    from paceline.ddp import is_strict

    assert not is_strict()
    with paceline.install(strict=True):
        assert is_strict()
    assert not is_strict()


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]),
                        world_size=2)
model = DDP(torch.nn.Linear(2, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    optimizer.step()
print(type(model).__module__.split(".")[0], isinstance(model, DDP), sep="; ", end="; ")
print(model.module.weight.grad.tolist())
dist.destroy_process_group()
"""
RUN = (
    "import paceline, runpy, sys; paceline.install(); "
    "runpy.run_path(sys.argv[3], run_name='__main__')"
)


def test_an_unmodified_script_runs_on_paceline(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = [str(tmp_path / "store"), str(script)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in said] == ["paceline; True; [[1.5, 1.5]]\n"] * 2, said


LATER = """
import sys
import paceline
assert "torch.distributed.optim" not in sys.modules, "it takes a second"
paceline.install()
assert "torch.distributed.optim" not in sys.modules, "nor does installing import it"
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
assert ZeroRedundancyOptimizer is paceline.optim.ZeroRedundancyOptimizer
assert PostLocalSGDOptimizer is paceline.optim.PostLocalSGDOptimizer
assert PeriodicModelAverager is paceline.optim.PeriodicModelAverager
assert PowerSGDState is paceline.hooks.PowerSGDState
assert fp16_compress_hook is paceline.hooks.fp16_compress_hook
assert ddp_comm_hooks.DDPCommHookType is paceline.hooks.DDPCommHookType
paceline.uninstall()
import torch
assert torch.distributed.optim.ZeroRedundancyOptimizer.__module__.startswith("torch.")
assert ddp_comm_hooks.default_hooks.fp16_compress_hook.__module__.startswith("torch.")
assert ddp_comm_hooks.DDPCommHookType.__module__.startswith("torch.")
"""


def test_what_is_imported_later_is_ours_too_and_then_torchs_again() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATER], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_hooks_and_optimizers_that_were_imported_before_are_replaced() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer as before

    with paceline.install():
        assert torch.distributed.optim.ZeroRedundancyOptimizer is not before
        assert default_hooks.allreduce_hook is paceline.hooks.allreduce_hook
    assert torch.distributed.optim.ZeroRedundancyOptimizer is before


def test_torchs_replicate_is_replaced_wherever_it_stands() -> None:
    import torch.distributed._composable as package
    from torch.distributed._composable.replicate import replicate as before

    home = sys.modules["torch.distributed._composable.replicate"]
    assert before is not paceline.replicate
    with paceline.install():
        assert package.replicate is home.replicate is paceline.replicate
        assert home.DDP is paceline_ddp.Replicated
    assert package.replicate is home.replicate is before


# -- what torch's class made before ---------------------------------------------------------------


@pytest.fixture
def torchs_own() -> Iterator[torch.nn.Module]:
    """A model that torch's own class has wrapped, in a default group of one rank."""
    gc.collect()  # models that other tests have left are found too
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield TORCHS[1](torch.nn.Linear(2, 1))
    finally:
        dist.destroy_process_group()


def test_isinstance_is_true_both_ways_while_it_is_installed(torchs_own) -> None:
    ours = OURS[1](torch.nn.Linear(2, 1))
    assert isinstance(ours, TORCHS[1])
    assert not isinstance(torchs_own, OURS[1])
    with pytest.warns(UserWarning, match=r"models that torch has wrapped already \(Linear\)"):
        paceline.install()
    assert isinstance(torchs_own, torch.nn.parallel.DistributedDataParallel)
    assert isinstance(torchs_own, OURS[1])
    assert not isinstance(torch.nn.Linear(2, 1), OURS[1])
    paceline.uninstall()
    assert not isinstance(torchs_own, OURS[1])


def test_a_subclass_of_ours_does_not_take_torchs_objects_for_its_own(torchs_own) -> None:
    class Mine(OURS[1]):
        pass

    with pytest.warns(UserWarning, match="wrapped already"):
        paceline.install()
    assert not isinstance(torchs_own, Mine)
    with pytest.raises(TypeError, match=r"expected a paceline\.DistributedDataParallel"):
        paceline.compiled.train_step(torchs_own, None, None)


def test_a_class_derived_from_torchs_before_is_named_in_a_warning() -> None:
    class Derived(TORCHS[1]):
        pass

    with pytest.warns(
        UserWarning, match=r"install\(\) was called late: classes derived .*Derived\) stay"
    ):
        paceline.install()
    del Derived
    gc.collect()
