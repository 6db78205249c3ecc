"""The Strategies for Lightning: Fabric's and the Trainer's, and what is said without Lightning."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.errors import IntegrationMissingError, JobArgumentError
from paceline.integrations.published import strategies_of
from paceline.testing import Meeting, spawn_ranks

from ..scripts import on_ranks, run
from .digests import assert_two_equal_digests

STEPS = 4
quiet = pytest.mark.filterwarnings("ignore")  # Lightning's own, of which it has many


@pytest.mark.parametrize("name", ["lightning", "lightning_trainer"])
def test_without_lightning_the_import_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hidden in ("lightning", "lightning_fabric", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.delitem(sys.modules, f"paceline.integrations.{name}", raising=False)
    with pytest.raises(IntegrationMissingError) as caught:
        importlib.import_module(f"paceline.integrations.{name}")
    assert "pip install 'paceline[lightning]'" in str(caught.value)
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "lightning"


def test_the_package_that_is_imported_already_is_the_one_that_is_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("first_lightning", "second_lightning")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, f"{name}.strategies", ModuleType(f"{name}.strategies"))
    assert strategies_of("me", *names).__name__ == "first_lightning.strategies"
    monkeypatch.delitem(sys.modules, "first_lightning")
    assert strategies_of("me", *names).__name__ == "second_lightning.strategies"


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


# -- Fabric -----------------------------------------------------------------------------------


def train_fabric(meeting: Meeting, strategy: str, backend: str = "") -> dict[str, Any]:
    from lightning.fabric import Fabric

    from paceline.integrations.lightning import PacelineStrategy

    chosen: Any = PacelineStrategy(process_group_backend=backend) if backend else strategy
    fabric = Fabric(accelerator="cpu", devices=meeting.size, strategy=chosen)
    fabric.launch()
    torch.manual_seed(meeting.rank)  # what rank 0 has, the others must get
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    losses = []
    for step in range(STEPS):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = model(batch(meeting.rank, step)).square().mean()
            fabric.backward(loss)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
    wrapped = model._forward_module
    ours = isinstance(wrapped, paceline.DistributedDataParallel)
    names = sorted(strategy_state(fabric, model))
    group = str(dist.group.WORLD)
    fabric.barrier()
    dist.destroy_process_group()
    return {"losses": losses, "ours": ours, "group": group, "names": names}


def strategy_state(fabric: Any, model: Any) -> dict[str, Any]:
    return fabric.strategy.get_module_state_dict(model._forward_module)


@quiet
def test_fabric_learns_on_paceline_what_it_learns_on_its_own_ddp() -> None:
    pytest.importorskip("lightning.fabric")
    theirs = spawn_ranks(2, train_fabric, "ddp")
    ours = spawn_ranks(2, train_fabric, "paceline")
    for one, other in zip(ours, theirs, strict=True):
        assert one["ours"]
        assert not other["ours"]
        assert one["group"].startswith("Group(")
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-6)
        assert one["names"] == other["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]


@quiet
def test_the_strategy_takes_another_backend_of_torchs() -> None:
    pytest.importorskip("lightning.fabric")
    for found in spawn_ranks(2, train_fabric, "", "gloo"):
        assert found["ours"]
        assert not found["group"].startswith("Group(")


@quiet
def test_the_example_for_fabric_learns() -> None:
    pytest.importorskip("lightning.fabric")
    said = on_ranks(2, "examples/fabric.py")
    assert said[0].startswith("2 ranks, Group(")
    assert float(said[-1].split()[-1]) < 0.3


@quiet
@pytest.mark.slow
def test_killed_members_of_a_fabric_loop_change_no_bit() -> None:
    pytest.importorskip("lightning.fabric")
    assert_two_equal_digests(run("examples/fabric_elastic.py"))


@quiet
def test_a_fabric_loop_trains_alone_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning.fabric")
    from lightning.fabric import Fabric

    from paceline.integrations.lightning import ElasticStrategy

    monkeypatch.setenv("LOCAL_RANK", "3")  # of a host where others are
    strategy = ElasticStrategy(shards=2)
    with pytest.raises(JobArgumentError, match="launch"):
        _ = strategy.group
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    plain = make_model()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    loader = strategy.loader([batch(0, n)[0] for n in range(8)], batch=4)
    with strategy.job(model, optimizer, loader) as job:
        for step in job:
            for shard, rows in step:
                with strategy.shard(model, shard):
                    fabric.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert (job.steps, fabric.world_size, fabric.global_rank) == (2, 1, 0)
    assert fabric.all_reduce(torch.tensor(3.0)) == 3
    assert fabric.all_gather(torch.ones(2)).shape == (1, 2)
    assert fabric.broadcast({"plain": [1]}) == {"plain": [1]}
    fabric.barrier()
    with pytest.raises(JobArgumentError, match="does not come from"):
        strategy.shard(make_model(), shard)
    strategy.group.shutdown()


# -- the Trainer ------------------------------------------------------------------------------


def train_trainer(meeting: Meeting, strategy: str, manual: bool) -> dict[str, Any]:
    import lightning.pytorch as pl

    import paceline.integrations.lightning_trainer  # noqa: F401

    class Task(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.automatic_optimization = not manual
            self.losses: list[float] = []

        def training_step(self, rows: Tensor, number: int) -> Tensor | None:
            loss = self.net(rows).square().mean()
            self.losses.append(loss.item())
            if not manual:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> DataLoader[Tensor]:
            return DataLoader([batch(meeting.rank, n) for n in range(STEPS)], batch_size=None)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=meeting.size,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,  # each rank has its own batches
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    task = Task()
    trainer.fit(task)
    kind = type(trainer.strategy).__module__
    dist.destroy_process_group()
    return {"losses": task.losses, "kind": kind}


@quiet
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_the_trainer_learns_on_paceline_what_it_learns_on_its_own_ddp(manual: bool) -> None:
    pytest.importorskip("lightning.pytorch")
    theirs = spawn_ranks(2, train_trainer, "ddp", manual)
    ours = spawn_ranks(2, train_trainer, "paceline", manual)
    for one, other in zip(ours, theirs, strict=True):
        assert one["kind"] == "paceline.integrations.lightning_trainer"
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-6)
        assert len(one["losses"]) == STEPS
