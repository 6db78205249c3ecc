"""LocalSGD: ranks train alone and average their parameters every so many steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..._exchange import FlatBuffer, Largest, WeightedMean, group_for_buffers, local_values
from ...errors import AveragingArgumentError, AveragingTypeError
from ...groups import Group, group_or_default
from ...policies import MIB
from .fragment import Fragment
from .rounds import Rounds, check_known
from .schedule import RoundSchedule

Model = nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]]


class LocalSGD(Rounds):
    """Steps ``optim`` on each rank alone, and averages the models every ``sync_every`` steps.

    ``model_or_params`` is a module, its parameters, or the parameter groups of an optimizer. For a
    module, buffers are averaged too; integer buffers take the maximum over ranks. Tensors are sent
    in flat buffers of about ``bucket_cap_mb`` MiB, with one collective each. ::

        optimizer = LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), sync_every=8)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).sum().backward()  # no communication here
            optimizer.step(samples=len(batch))  # here, every eighth time

    Do not wrap the module in DistributedDataParallel, which would average gradients as well, unless
    its group is smaller.
    """

    def __init__(
        self,
        model_or_params: Model,
        optim: Optimizer,
        sync_every: int,
        *,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        params, buffers = tensors_of(model_or_params)
        chosen = group_or_default(process_group)
        group = Group.wrap(chosen, local_values(params[0]).device)
        pieces = value_pieces([*params, *buffers], group, cap_bytes(bucket_cap_mb))
        super().__init__(optim, RoundSchedule(sync_every), [Fragment(pieces)], chosen, group)
        check_known([p for g in optim.param_groups for p in g["params"]], params, type(self))
        self._begin({})

    def _take(self, fragment: Fragment, *, useful: bool, now: bool) -> None:
        if useful:
            for piece in fragment.pieces:
                piece.take()


def tensors_of(model: Model) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters to be trained, and the buffers that a module has."""
    buffers: list[Tensor] = []
    if isinstance(model, nn.Module):
        given: list[Any] = list(model.parameters())
        buffers = [b for b in model.buffers() if b.numel()]
    else:
        given = [p for entry in model for p in _listed(entry)]
    params = [p for p in given if p.requires_grad]
    if not params:
        raise AveragingArgumentError(
            "There is no parameter to be trained.", "Give the model before freezing all of it."
        )
    return list(dict.fromkeys(params)), buffers


def _listed(entry: Tensor | Mapping[str, Any]) -> Sequence[Tensor]:
    if isinstance(entry, Mapping):
        found: Sequence[Tensor] = entry["params"]
        return found
    if not isinstance(entry, Tensor):
        raise AveragingTypeError(
            f"expected parameters, got an object of type {type(entry).__name__} among them.",
            "Give a module, model.parameters() or optimizer.param_groups.",
        )
    return [entry]


def value_pieces(tensors: Sequence[Tensor], group: Group, cap: int) -> tuple[FlatBuffer, ...]:
    """Buffers for tensors that become their mean, or their largest if they are whole numbers."""
    real = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    whole = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
    means = [FlatBuffer(part, WeightedMean(group)) for part in group_for_buffers(real, cap)]
    return (*means, *(FlatBuffer(part, Largest(group)) for part in group_for_buffers(whole, cap)))


def cap_bytes(bucket_cap_mb: float) -> int:
    """The cap in bytes, if it is one."""
    if not bucket_cap_mb > 0:
        raise AveragingArgumentError(
            f"bucket_cap_mb: expected a size in MiB above 0, got {bucket_cap_mb}."
        )
    return max(1, int(min(bucket_cap_mb, 1 << 20) * MIB))
