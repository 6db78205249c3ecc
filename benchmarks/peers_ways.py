"""How each library trains a model on several processes: one class each, all with one shape.

A way is opened once in every rank and then prepares one model after another. ``prepare`` gives a
step (zero_grad, forward, backward, plain SGD), ``barrier`` waits for all ranks, ``close`` ends it.
Each is used as its own guide says, with the settings it has by itself; where there is a choice, the
docstring says which was made. Libraries are imported when their way is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline

RATE = 1e-4
MIB = 1 << 20

Step = Callable[[], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def plain_step(
    model: Any, batch: Tensor, optimizer: Any, backward: Callable[[Tensor], Any] = Tensor.backward
) -> Step:
    """The step that all share, but for how a loss is sent backward."""

    def step() -> None:
        optimizer.zero_grad()  # to None; Horovod's takes no arguments
        backward(model(batch).square().mean())
        optimizer.step()

    return step


class Way:
    """What every way has in common: ranks of torch's, over gloo."""

    def __init__(self) -> None:
        self.open()
        self.rank, self.size = self.place()

    def open(self) -> None:
        dist.init_process_group("gloo")

    def place(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        raise NotImplementedError

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class Local(Way):
    """No library: each rank trains for itself."""

    def open(self) -> None:
        """Nobody to meet."""

    def place(self) -> tuple[int, int]:
        return 0, 1

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        return plain_step(model, batch, sgd(model))

    def barrier(self) -> None:
        """Nobody to wait for."""


# -- paceline ---------------------------------------------------------------------------------


class Shm(Way):
    """Paceline's DistributedDataParallel over shared memory."""

    backend = "shm"

    def open(self) -> None:
        self.group = paceline.new_group(self.backend)

    def place(self) -> tuple[int, int]:
        return self.group.rank(), self.group.size()

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        wrapped = paceline.DistributedDataParallel(model, process_group=self.group)
        return plain_step(wrapped, batch, sgd(wrapped))

    def barrier(self) -> None:
        self.group.barrier()

    def close(self) -> None:
        self.group.shutdown()


class Gloo(Shm):
    """The same over gloo."""

    backend = "gloo"


# -- torch and what stands on its DistributedDataParallel -------------------------------------


class TorchDDP(Way):
    """torch's DistributedDataParallel over gloo."""

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        wrapped = nn.parallel.DistributedDataParallel(model)
        return plain_step(wrapped, batch, sgd(wrapped))


class Accelerate(Way):
    """Hugging Face Accelerate: ``prepare`` and ``accelerator.backward``."""

    def open(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        wrapped, optimizer = self.accelerator.prepare(model, sgd(model))
        return plain_step(wrapped, batch, optimizer, self.accelerator.backward)

    def close(self) -> None:
        self.accelerator.end_training()
        super().close()


class Fabric(Way):
    """Lightning Fabric with its ``ddp`` strategy."""

    def open(self) -> None:
        from lightning.fabric import Fabric as LightningFabric

        ranks = int(os.environ["WORLD_SIZE"])
        self.fabric = LightningFabric(accelerator="cpu", devices=ranks, strategy="ddp")
        self.fabric.launch()

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        wrapped, optimizer = self.fabric.setup(model, sgd(model))
        return plain_step(wrapped, batch, optimizer, self.fabric.backward)


class RayTrain(Way):
    """Ray Train's ``prepare_model``; Ray has started the ranks (``peers_rank.py``)."""

    def open(self) -> None:
        """Ray has done it."""

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        from ray.train.torch import prepare_model

        wrapped = prepare_model(model)
        return plain_step(wrapped, batch, sgd(wrapped))

    def close(self) -> None:
        """Ray will do it."""


class FullyShard(Way):
    """FSDP2 over gloo: every child of a mebibyte or more by itself, the rest with the root."""

    def apply(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=self.mesh)

    def open(self) -> None:
        super().open()
        self.mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        children = model.layers if hasattr(model, "layers") else model
        for child in children:  # type: ignore[union-attr]
            if sum(param.nbytes for param in child.parameters()) >= MIB:
                self.apply(child)
        self.apply(model)
        return plain_step(model, batch, sgd(model))


class Replicate(FullyShard):
    """torch's ``replicate`` on FSDP2, over gloo, on the same parts."""

    def apply(self, module: nn.Module) -> None:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(module, mesh=self.mesh)


# -- others -----------------------------------------------------------------------------------


class Horovod(Way):
    """Horovod's DistributedOptimizer over OpenMPI."""

    def open(self) -> None:
        import horovod.torch

        self.horovod = horovod.torch
        self.horovod.init()

    def place(self) -> tuple[int, int]:
        return self.horovod.rank(), self.horovod.size()

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        self.horovod.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = self.horovod.DistributedOptimizer(
            sgd(model), named_parameters=model.named_parameters()
        )
        return plain_step(model, batch, optimizer)

    def barrier(self) -> None:
        self.horovod.allreduce(torch.zeros(1), name="barrier")

    def close(self) -> None:
        self.horovod.shutdown()


class DeepSpeed(Way):
    """DeepSpeed's engine with ZeRO off; gradients go over gloo."""

    def open(self) -> None:
        import deepspeed

        self.deepspeed = deepspeed
        deepspeed.init_distributed("gloo")

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        settings = {
            "train_micro_batch_size_per_gpu": len(batch),
            "zero_optimization": {"stage": 0},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # it clips by itself otherwise
            "steps_per_print": 1 << 30,
        }
        engine, *_ = self.deepspeed.initialize(model=model, optimizer=sgd(model), config=settings)

        def step() -> None:  # the engine forgets gradients itself
            engine.backward(engine(batch).square().mean())
            engine.step()

        return step


class Flat(Way):
    """One all-reduce of all gradients after backward; they lie in one tensor."""

    def allocate(self, numel: int) -> Tensor:
        return torch.zeros(numel)

    def average(self, flat: Tensor) -> None:
        self.all_reduce(flat)
        flat.div_(self.size)

    def all_reduce(self, flat: Tensor) -> None:
        raise NotImplementedError

    def prepare(self, model: nn.Module, batch: Tensor) -> Step:
        params = list(model.parameters())
        sizes = [param.numel() for param in params]
        flat = self.allocate(sum(sizes))
        for param, part in zip(params, flat.split(sizes), strict=True):
            param.grad = part.view_as(param)
        optimizer = sgd(model)

        def step() -> None:
            flat.zero_()
            model(batch).square().mean().backward()
            self.average(flat)
            optimizer.step()

        return step


class ShmFlat(Flat, Shm):
    """A bare paceline group, without a wrapper."""

    def allocate(self, numel: int) -> Tensor:
        return self.group.allocate(numel).zero_()

    def average(self, flat: Tensor) -> None:
        self.group.all_reduce(flat, paceline.ReduceOp.AVG)


class DeepSpeedShm(Flat):
    """DeepSpeed's all-reduce through shared memory, which it offers for inference."""

    def open(self) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")
        self.comm = deepspeed.comm

    def all_reduce(self, flat: Tensor) -> None:
        self.comm.inference_all_reduce(flat)


class Mpi(Flat):
    """OpenMPI's all-reduce through mpi4py."""

    def open(self) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD

    def place(self) -> tuple[int, int]:
        return self.comm.rank, self.comm.size

    def all_reduce(self, flat: Tensor) -> None:
        self.comm.Allreduce(self.mpi.IN_PLACE, flat.numpy())

    def barrier(self) -> None:
        self.comm.Barrier()

    def close(self) -> None:
        """MPI ends with the process."""
