# mypy: disable-error-code="misc, no-any-return"
# (Lightning is optional: where types are checked it need not be there)
"""A Strategy with which Lightning Fabric trains on paceline; importing this module offers it. ::

    import paceline.integrations.lightning

    fabric = Fabric(accelerator="cpu", devices=2, strategy="paceline")

What Fabric's own ``ddp`` strategy can do, this one can: it starts processes or finds those that a
launcher started, and it keeps gradients local under ``fabric.no_backward_sync``. Two things differ:
the default group is one of ours, and ``setup_module`` wraps in our DistributedDataParallel. With
``lightning_fabric`` instead of ``lightning.fabric``, import that first.

:class:`ElasticStrategy` is for loops that go on when ranks are lost (``paceline run --elastic``).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from .. import elastic
from ..data import Shard, ShardedLoader
from ..ddp import DistributedDataParallel
from ..errors import JobArgumentError
from ..groups import Group
from .published import strategies_of

__all__ = ["ElasticStrategy", "PacelineStrategy"]

NAME = "paceline"
_strategies = strategies_of(__name__, "lightning.fabric", "lightning_fabric")
_DDPStrategy: Any = _strategies.DDPStrategy


class PacelineStrategy(_DDPStrategy):
    """Fabric's strategy for copies of one model on many processes, on paceline.

    Takes what Fabric's DDPStrategy takes; further keywords go to our DistributedDataParallel.
    ``process_group_backend`` may name another backend of torch's, such as ``"gloo"``.
    """

    def __init__(self, *args: Any, process_group_backend: str = NAME, **kwargs: Any) -> None:
        super().__init__(*args, process_group_backend=process_group_backend, **kwargs)

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap ``module``; Fabric calls it."""
        device_ids = self._determine_ddp_device_ids()
        return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Offer the strategy under its name, unless that is done."""
        if NAME not in strategy_registry:
            strategy_registry.register(NAME, cls, description="DDP on paceline")


class ElasticStrategy(PacelineStrategy):
    """Fabric's strategy for a loop that goes on when ranks are lost, and when others join. ::

        strategy = ElasticStrategy(shards=8)
        fabric = Fabric(devices=1, strategy=strategy)  # of this process; the job knows the others
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        loader = strategy.loader(dataset, batch=64)
        with strategy.job(model, optimizer, loader, epochs=3) as job:
            for step in job:
                for shard, (x, y) in step:
                    with strategy.shard(model, shard):
                        fabric.backward(loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    ``fabric.world_size`` and ``fabric.global_rank`` are those of the job at that moment.
    Collectives of Fabric's in the body raise when a rank is lost in them: ``job.run(step_fn)``
    calls again.
    Further keywords go to our DistributedDataParallel.
    """

    def __init__(
        self,
        *,
        shards: int,
        backend: str = "auto",
        timeout: timedelta = timedelta(minutes=10),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.shards = shards
        self._engine, self._limit = backend, timeout
        self._group: Group | None = None
        self._wrappers: WeakKeyDictionary[nn.Module, DistributedDataParallel] = WeakKeyDictionary()

    @property
    def group(self) -> Group:
        """The members of the job; this process alone until it begins."""
        if self._group is None:
            raise JobArgumentError("call fabric.launch() before the strategy's group is used")
        return self._group

    # -- what a job needs -------------------------------------------------------------------------

    def loader(self, dataset: Any, *, batch: int, **options: Any) -> ShardedLoader:
        """A loader for this job, of ``batch`` samples a step on all ranks together."""
        return ShardedLoader(dataset, shards=self.shards, batch=batch, group=self.group, **options)

    def job(self, model: Any, optimizer: Any, loader: ShardedLoader, **options: Any) -> elastic.Job:
        """The loop, of what ``fabric.setup`` gave; options are those of :func:`elastic.job`."""
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        plain: list[Any] = [getattr(one, "optimizer", one) for one in given]
        return elastic.job(self._wrapper_of(model), plain, loader, **options)

    def shard(self, model: Any, shard: Shard) -> AbstractContextManager[object]:
        """Compute one shard of a step inside of it."""
        return self._wrapper_of(model).shard(shard)

    # -- what Fabric calls ------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this process, by its place on the host."""
        place = int(os.environ.get("LOCAL_RANK", "0"))
        return self.parallel_devices[place % len(self.parallel_devices)]

    @property
    def num_processes(self) -> int:
        """Those that Fabric would start: the launcher does."""
        return 1

    @property
    def global_rank(self) -> int:
        """The rank of this process now."""
        return 0 if self._group is None else self._group.rank()

    @property
    def world_size(self) -> int:
        """How many ranks there are now."""
        return 1 if self._group is None else self._group.size()

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap ``module``; Fabric calls it."""
        given: dict[str, Any] = {"process_group": self.group, "shards": self.shards}
        wrapper = DistributedDataParallel(module, **given, **self._ddp_kwargs)
        self._wrappers[module] = wrapper
        return wrapper

    def _wrapper_of(self, model: Any) -> DistributedDataParallel:
        """Our wrapper of the model that ``fabric.setup`` gave."""
        found = self._wrappers.get(getattr(model, "module", model))
        if found is None:
            raise JobArgumentError("the model does not come from fabric.setup with this strategy")
        return found

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks that are there now."""
        if not isinstance(tensor, Tensor):
            return tensor
        words = {"mean": ReduceOp.AVG, "avg": ReduceOp.AVG, "sum": ReduceOp.SUM}
        op = words[reduce_op.lower()] if isinstance(reduce_op, str) else reduce_op
        reduced = tensor.clone()
        self.group.all_reduce(reduced, op).wait()
        return reduced

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks that are there now, stacked; without gradients."""
        found = [torch.empty_like(tensor) for _ in range(self.group.size())]
        self.group.all_gather(found, tensor.contiguous()).wait()
        return torch.stack(found)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the ranks that are there now."""
        self.group.barrier().wait()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank ``src`` has; plain data, never a pickle."""
        return self.group.broadcast_object(obj, src)

    def _configure_launcher(self) -> None:
        self._launcher = None

    def _setup_distributed(self) -> None:
        self._group = elastic.group(self._engine, self._limit, self.root_device)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Offer nothing: it is made with its number of shards, not by a name."""


PacelineStrategy.register_strategies(_strategies.STRATEGY_REGISTRY)
