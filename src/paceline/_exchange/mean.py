"""The mean of one flat tensor over any group (ours, torch's or others'): now, or as a future."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.futures import Future

from ..groups import Group, group_to_call


def mean_later(group: ProcessGroup, tensor: Tensor) -> Future[Tensor]:
    """The mean of ``tensor`` over ``group``, in place; returns at once."""
    return first_of(_start(group, tensor).get_future())


def mean_now(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """The mean of ``tensor`` over ``group``, in place; blocks until it is there."""
    _start(group, tensor).wait()
    return tensor


def sum_later(group: ProcessGroup, tensor: Tensor) -> Future[Tensor]:
    """The sum of ``tensor`` over ``group``, in place; returns at once."""
    return first_of(_add(group, tensor, ReduceOp.SUM).get_future())


def gather_later(group: ProcessGroup, tensor: Tensor) -> Future[Tensor]:
    """Every rank's ``tensor``, in rows of one; returns at once."""
    group = group_to_call(group, tensor.device)
    rows = tensor.new_empty(group.size(), tensor.numel())
    if isinstance(group, Group):
        work: Any = group.all_gather_single(rows.view(-1), tensor.view(-1), async_op=True)
    else:
        work = dist.all_gather(list(rows), tensor.view(-1), group=group, async_op=True)

    def take(future: Future[Any]) -> Tensor:
        future.value()  # raises what went wrong; what it holds differs between groups
        return rows

    future: Future[Tensor] = work.get_future().then(take)
    return future


def done(tensor: Tensor) -> Future[Tensor]:
    """A future that is already complete."""
    dense = tensor.is_cuda and not tensor.is_sparse  # whose indices torch would read
    future: Future[Tensor] = Future(devices=[tensor.device] if dense else [])
    future.set_result(tensor)
    return future


def first_of(future: Future[Any]) -> Future[Tensor]:
    """The tensor of a collective's future, which holds it in a list."""
    return future.then(lambda done: one_tensor(done.value()))


def one_tensor(value: Any) -> Tensor:
    """What a hook's future holds; torch takes lists of one too."""
    found: Tensor = value[0] if isinstance(value, list | tuple) else value
    return found


def _start(group: ProcessGroup, tensor: Tensor) -> Any:
    """Start a mean; without an AVG reduction, divide first, since a sum may overflow 16 bits."""
    group = group_to_call(group, tensor.device)
    if isinstance(group, Group) and group.capabilities.averages:
        return _add(group, tensor, ReduceOp.AVG)
    return _add(group, tensor.div_(group.size()), ReduceOp.SUM)


def _add(group: ProcessGroup, tensor: Tensor, op: Any) -> Any:
    group = group_to_call(group, tensor.device)
    if isinstance(group, Group):
        return group.all_reduce(tensor, op, async_op=True)
    return dist.all_reduce(tensor, op, group=group, async_op=True)
