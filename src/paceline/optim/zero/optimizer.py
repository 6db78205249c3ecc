# mypy: disable-error-code="override, misc"
# (torch's classes have no annotations worth inheriting, and other ones in every version)
"""ZeroRedundancyOptimizer: every rank keeps the optimizer state of its part of the parameters.

Each rank steps its part with an ordinary optimizer, then all ranks exchange what they have updated.
How parameters are dealt out is in ``deal.py``, how they travel in ``rows.py``, what the
inner optimizer gets to see in ``pieces.py``, how state dicts come about in ``state.py``.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ...errors import OptimizerArgumentError, OptimizerStateError
from ...groups import Group
from ...join import Join, Joinable, JoinHook
from ..clip import Gradients
from .args import check_types, choose_class, choose_group, read_params
from .checkpoint import Checkpointed
from .deal import Cut, choose_cut, deal
from .overlap import Overlap, _OverlapInfo, _OverlapStatus
from .pairing import GradientStretches, PairedRow, pair, set_apart
from .pieces import LocalPiece, RunPiece
from .rows import Laid, Row
from .state import Share, State, assemble, kind_of, shares_of, state_for

log = logging.getLogger(__name__)


class ZeroJoinHook(JoinHook):
    """A rank that has run out still steps its part of the parameters."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self.zero = zero

    def main_hook(self) -> None:
        """Take the step that the others take; gradients are there already."""
        self.zero.step()


class ZeroRedundancyOptimizer(Optimizer, Joinable, Checkpointed):
    """Shards the state of ``optimizer_class`` over the ranks of a group.

    Accepts the arguments of torch's class. ``ddp`` is a Paceline DistributedDataParallel with these
    parameters: gradients are then reduce-scattered, which sends half the bytes of an all-reduce;
    ``.grad`` is None after a backward pass, and each rank has the averages of its part only.
    ``cut="flat"`` divides all elements equally, ``"whole"`` assigns each parameter to one rank, and
    ``"auto"`` divides elements if the optimizer is elementwise. If ``ddp`` has ``shards``,
    gradients and parameters are not divided, so that the result is the same on any number of ranks.

    ``optim`` is the inner optimizer of this rank's part; ``param_groups`` has all parameters. ::

        ddp = paceline.DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=1e-3)
    """

    asks_first = True  # before a step, whether the last backward pass failed; see ddp/pending.py

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool | None = False,
        overlap_with_ddp: bool = False,
        *,
        cut: Cut = "auto",
        ddp: Any = None,
        **defaults: Any,
    ) -> None:
        listed, self._all_params = read_params(params)
        check_types(self._all_params, may_differ=cut != "auto" or ddp is not None)
        self.initialized = False
        Optimizer.__init__(self, listed, defaults)
        Joinable.__init__(self)
        self._default_device = self._all_params[0].device
        self.process_group = choose_group(process_group, ddp)
        self._group = Group.wrap(self.process_group, self._default_device)
        self.rank, self.world_size = self._group.rank(), self._group.size()
        self.global_rank = self._group.members[self.rank]
        self.parameters_as_bucket_view = bool(parameters_as_bucket_view)
        self._overlap_with_ddp = overlap_with_ddp
        self._optim_defaults = defaults
        self._optim_constructor = choose_class(optimizer_class, overlaps=overlap_with_ddp)
        kind = self._optim_constructor
        self._of_shards = getattr(ddp, "shards", None) is not None
        if self._of_shards:
            cut = _uncut(cut)
        self._how = choose_cut(cut, kind, self._all_params, defaults)
        self._rows: list[Row] = []
        self._pieces: list[LocalPiece] = []
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._paired: GradientStretches | None = None
        self._ddp = ddp
        self._overlap: Overlap | None = None
        if overlap_with_ddp:
            self._begin_overlap(ddp)
        else:
            self._begin(ddp)
        self.optim: Any = self._make_inner()
        self.initialized = True

    # -- what it is made of -------------------------------------------------------------------

    def _begin(self, ddp: Any) -> None:
        indices = self._param_to_index
        if ddp is not None and not self._of_shards:
            self._require_cuttable()
            self._paired = _scattered(ddp, self._group)
            self._rows.extend(pair(self._paired, indices))
        paired = {index for row in self._rows for index in row.params}
        rest = {index: param for param, index in indices.items() if index not in paired}
        laid = self.parameters_as_bucket_view and not self._of_shards
        self._rows.extend(deal(rest, self._group, self._how, laid=laid))
        self._pieces = self._cut(range(len(self.param_groups)))

    def _begin_overlap(self, ddp: Any) -> None:
        if ddp is not None:
            raise OptimizerArgumentError(
                "overlap_with_ddp=True and ddp= were given.",
                "Leave ddp= out: the communication hook pairs the optimizer with its wrapper.",
            )
        if len(self.param_groups) > 1:
            self._refuse_groups()
        if self.parameters_as_bucket_view:
            log.warning(
                "`parameters_as_bucket_view=True` will be ignored since `overlap_with_ddp=True`; "
                "instead, a different bucketing strategy will be used"
            )
        params = dict(enumerate(self._index_to_param))
        self._overlap = Overlap(params, self._group)
        self._rows = [self._overlap.row]
        self._pieces = list(self._overlap.pieces.values())

    def _require_cuttable(self) -> None:
        if self._how != "flat":
            raise OptimizerArgumentError(
                f"ddp= was given, but {self._optim_constructor.__name__} needs whole parameters.",
                "Every rank has only a part of the gradients. Leave ddp= out.",
            )

    def _cut(
        self, groups: Sequence[int], kind: Callable[[int], Hashable] = lambda _: None
    ) -> list[LocalPiece]:
        """This rank's pieces of the parameters of some groups, in their order."""
        indices = self._param_to_index
        group_of = {indices[p]: g for g in groups for p in self.param_groups[g]["params"]}
        pieces = [piece for row in self._rows for piece in row.pieces(group_of, kind)]
        return sorted(pieces, key=lambda piece: piece.group)

    def _make_inner(self) -> Optimizer:
        groups = self._groups_of(self._pieces, range(len(self.param_groups)))
        inner: Optimizer = self._optim_constructor(groups, **self._optim_defaults)
        self._sync_param_groups(inner.param_groups, self.param_groups)
        return inner

    def _groups_of(
        self, pieces: Sequence[LocalPiece], groups: Sequence[int]
    ) -> list[dict[str, Any]]:
        return [
            {**self.param_groups[g], "params": [p.tensor for p in pieces if p.group == g]}
            for g in groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; every rank calls it. Other parameters stay on their ranks."""
        if getattr(self, "initialized", False) and self._overlap_with_ddp:
            self._refuse_groups()
        super().add_param_group(param_group)
        if not getattr(self, "initialized", False):
            return
        last = len(self.param_groups) - 1
        added = self.param_groups[last]["params"]
        self._all_params.extend(added)
        indices = self._param_to_index
        for row in self._rows:
            if isinstance(row, PairedRow):
                row.adopt(indices)
        known = {id(param) for row in self._rows for param in row.params.values()}
        fresh = {indices[param]: param for param in added if id(param) not in known}
        loads = [sum(_owned(row, rank) for row in self._rows) for rank in range(self.world_size)]
        laid = self.parameters_as_bucket_view and not self._of_shards
        self._rows.extend(deal(fresh, self._group, self._how, laid=laid, loads=loads))
        pieces = self._cut([last])
        self._pieces.extend(pieces)
        self.optim.add_param_group(self._groups_of(pieces, [last])[0])
        self._sync_param_groups(self.optim.param_groups, self.param_groups)

    def _refuse_groups(self) -> None:
        raise OptimizerStateError(
            "ZeroRedundancyOptimizer with `overlap_with_ddp=True` only supports a single parameter "
            "group."
        )

    @property
    def cuts(self) -> bool:
        """Whether a rank may step a part of a parameter."""
        return self._how == "flat"

    # -- a step -------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Step this rank's part, then gather all parameters on all ranks; every rank calls it.

        Other arguments are passed to the inner optimizer.
        """
        if self._overlap_with_ddp:
            log.warning(
                "`step()` should not be included in the training loop when `overlap_with_ddp=True`"
            )
            return None
        self._refuse_lonely_join()
        loss = self._local_step(closure=closure, **kwargs)
        self._sync_params()
        return loss

    def _local_step(
        self,
        gradients: Sequence[Tensor | None] | None = None,
        closure: Callable[[], float] | None = None,
        **kwargs: Any,
    ) -> float | None:
        """Step this rank's part, without sending it to the other ranks."""
        self._refuse_other_ranks()
        Join.notify_join_context(self)
        if gradients is not None:
            raise OptimizerStateError(
                "Specifying `gradients` is for torch's own communication hooks.",
                "Use paceline.hooks.hook_with_zero_step.",
            )
        loss = None
        if closure is not None and self._how == "flat":  # its gradients are cut before the step
            with torch.enable_grad():
                loss = closure()
            closure = None
        with self._lent_gradients():
            arguments = kwargs if closure is None else {"closure": closure, **kwargs}
            result = self._step_inner(**arguments)
        if self._paired is not None:
            self._paired.use()
        return result if loss is None else loss

    def _step_inner(self, **arguments: Any) -> Any:
        """Settings may have been changed on either side, by a scheduler or by the step itself."""
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        result = self.optim.step(**arguments)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        return result

    @contextmanager
    def _lent_gradients(self) -> Any:
        for row in self._rows:
            if isinstance(row, Laid):
                row.refresh()
        if self._how == "flat":
            self._refuse_sparse()
        if self._paired is not None:
            self._let_rest()
        for piece in self._pieces:
            piece.lend_grad()
        try:
            yield
        finally:
            for piece in self._pieces:
                piece.drop_grad()

    def _let_rest(self) -> None:
        """Skip parameters that had no gradient on any rank, as every optimizer does."""
        rows = [row for row in self._rows if isinstance(row, PairedRow)]
        idle = {index for row in rows for index in row.idle()}
        if idle or any(piece.rests for piece in self._pieces if isinstance(piece, RunPiece)):
            self._pieces = set_apart(self._pieces, idle, self.optim)

    def _refuse_sparse(self) -> None:
        """Raise on every rank; the inner optimizer would raise only on the rank that steps it."""
        if issubclass(self._optim_constructor, (torch.optim.SGD, torch.optim.Adagrad)):
            return
        params = self._index_to_param
        sparse = [n for n, p in enumerate(params) if p.grad is not None and p.grad.is_sparse]
        if sparse:
            raise OptimizerStateError(
                f"rank {self.rank}: {self._optim_constructor.__name__} does not support sparse "
                f"gradients, and parameters {sparse[:5]} have such. No rank has stepped.",
                "Consider SparseAdam, or an embedding with sparse=False.",
            )

    def _sync_params(self) -> None:
        """Gather the parameters of all ranks on all ranks."""
        with torch.no_grad():
            for row in self._rows:
                if row.awake:
                    row.share()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including this rank's part of scattered ones."""
        super().zero_grad(set_to_none)
        if self._paired is not None:
            self._paired.clear(in_place=not set_to_none)

    def gradients(self) -> Gradients:
        """Return the gradients of this rank: parts of divided ones, and whole ones."""
        runs = [piece for piece in self._pieces if isinstance(piece, RunPiece)]
        parts = [grad for run in runs if (grad := run.gradient()) is not None]
        inside = {n for row in self._rows if isinstance(row, PairedRow) for n in row.params}
        whole = [
            param.grad
            for index, param in enumerate(self._index_to_param)
            if index not in inside and param.grad is not None
        ]
        return Gradients(whole, parts, self._group if self._paired is not None else None)

    # -- inside a backward pass ---------------------------------------------------------------

    @property
    def overlaps_with_ddp(self) -> bool:
        """Whether a communication hook steps it, bucket by bucket."""
        return self._overlap_with_ddp

    def overlap_begin(self, ddp: Any, shard_buckets: bool = False) -> None:
        """Prepare for :meth:`overlap_bucket`; a communication hook of ``ddp`` calls it once."""
        self._overlapping().begin(ddp, shard_buckets)

    def overlap_bucket(
        self,
        bucket_index: int,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        is_last: bool,
    ) -> None:
        """Step this rank's part of an averaged bucket.

        The call with ``is_last`` is the last one of a pass, and comes at the same point on all
        ranks. It also gathers all parameters, and blocks until they are here.
        """
        with torch.no_grad():
            self._overlapping().take(parameters, gradients, self._step_inner, is_last)

    def _overlapping(self) -> Overlap:
        if self._overlap is None:
            raise OptimizerArgumentError(
                "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use "
                "this hook properly."
            )
        return self._overlap

    @property
    def _overlap_info(self) -> _OverlapInfo:
        return self._overlapping().info

    def _check_overlap_initialized(self) -> None:
        overlap = self._overlap
        if overlap is not None and overlap.info.status is not _OverlapStatus.INITIALIZED:
            raise OptimizerStateError(
                "This method should not be called until this ZeroRedundancyOptimizer instance has "
                "been fully initialized.",
                "The first passes of its wrapper do that.",
            )

    # -- state dicts --------------------------------------------------------------------------

    def _refuse_other_ranks(self) -> None:
        """Raise if the group has other ranks now: the state of the lost ones is gone."""
        now = self._group.rank(), self._group.size()
        if now != (self.rank, self.world_size):
            raise OptimizerStateError(
                f"rank {now[0]} of {now[1]}: the group has other ranks than when this "
                f"ZeroRedundancyOptimizer was made (then this was rank {self.rank} of "
                f"{self.world_size}), and the state of those that left is gone. Nothing was "
                "stepped; every rank of the group raises this.",
                "Create a new optimizer and load a state that was saved before; it may come from "
                "any number of ranks.",
            )

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all parameters on rank ``to``; every rank calls it."""
        self._refuse_other_ranks()
        self._check_overlap_initialized()
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        own = [share.pack() for share in shares_of(self._pieces, self.optim.state)]
        everyone: Any = self._group.gather_object(own, to)
        self._consolidated = None
        if self.rank == to:
            shares = [Share.unpack(packed) for packed in itertools.chain(*everyone)]
            self._consolidated = assemble(shares, self._index_to_param)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that was last consolidated on this rank, as a plain optimizer's."""
        self._check_overlap_initialized()
        if self._consolidated is None:
            raise OptimizerStateError(
                "Optimizer state has not been consolidated on this rank. Please call "
                f"`consolidate_state_dict(to={self.rank})` on all ranks beforehand if you meant to "
                "save the global state."
            )
        return {**super().state_dict(), "state": dict(self._consolidated)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict, from this class or from a plain optimizer.

        It may have been saved with any number of ranks.
        """
        self._check_overlap_initialized()
        super().load_state_dict({**state_dict, "state": {}})
        saved = itertools.chain(*(group["params"] for group in state_dict["param_groups"]))
        indices = {key: index for index, key in enumerate(saved)}
        given = state_dict["state"].items()
        self._take_state({indices[key]: value for key, value in given if key in indices})

    def _take_state(self, state: State) -> None:
        """Give the inner optimizer its part of the state of whole parameters."""
        params = self._index_to_param
        if self._paired is not None:
            self._recut(lambda index: kind_of(index, state, params))
        self._set_inner_state([state_for(piece, state, params) for piece in self._pieces])

    def _recut(self, kind: Callable[[int], Hashable]) -> None:
        """Let parameters share a run only if their kind is the same.

        One tensor has one step count; parameters that come from elsewhere may have had several.
        """
        self._pieces = self._cut(range(len(self.param_groups)), kind)
        self.optim = self._make_inner()

    def _set_inner_state(self, states: Sequence[dict[str, Any] | None]) -> None:
        self._consolidated = None
        packed = self.optim.state_dict()
        order = [p for group in self.optim.param_groups for p in group["params"]]
        place = {tensor: at for at, tensor in enumerate(order)}
        pairs = zip(self._pieces, states, strict=True)
        packed["state"] = {place[piece.tensor]: own for piece, own in pairs if own is not None}
        self.optim.load_state_dict(packed)
        self._sync_param_groups(self.param_groups, self.optim.param_groups)

    @staticmethod
    def _sync_param_groups(
        src_param_groups: Sequence[Mapping[str, Any]], dst_param_groups: Sequence[dict[str, Any]]
    ) -> None:
        """Copy all settings, but not the parameters."""
        for source, target in zip(src_param_groups, dst_param_groups, strict=True):
            target.update((key, value) for key, value in source.items() if key != "params")

    # -- Join ---------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> ZeroJoinHook:
        """Return the hook of a rank that has run out; list DDP before the optimizer in Join."""
        return ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        return self._default_device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group over which the state is sharded."""
        return self.process_group

    def _refuse_lonely_join(self) -> None:
        theirs = getattr(self._ddp, "join_config", None)
        if theirs is not None and theirs.enable and not self.join_config.enable:
            raise OptimizerStateError(
                f"rank {self.rank}: the model is in a Join context and this optimizer is not. A "
                "rank that has run out would not step its part, and the others wait for it.",
                "Pass both to one Join: Join([ddp, optimizer]).",
            )

    # -- torch's names for what is where ------------------------------------------------------

    @property
    def _index_to_param(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def _param_to_index(self) -> dict[Tensor, int]:
        return {param: index for index, param in enumerate(self._index_to_param)}

    @property
    def _param_to_rank(self) -> dict[Tensor, int]:
        """Who has the first element of each parameter."""
        params = self._index_to_param
        return {
            params[part.param]: rank
            for row in self._rows
            for rank, slices in enumerate(row.owned)
            for part in slices
            if part.start == 0 and part.param >= 0
        }

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """For each rank the groups of its inner optimizer, with parts of parameters as views."""
        return [
            self._groups_of(self._pieces_of(rank), range(len(self.param_groups)))
            for rank in range(self.world_size)
        ]

    def _pieces_of(self, rank: int) -> list[LocalPiece]:
        if rank == self.rank:
            return self._pieces
        indices = self._param_to_index
        group_of = {
            indices[p]: g for g, group in enumerate(self.param_groups) for p in group["params"]
        }
        return [piece for row in self._rows for piece in row.pieces_of(rank, group_of)]


def _owned(row: Row, rank: int) -> int:
    return sum(part.length for part in row.owned[rank])


def _uncut(cut: Cut) -> Cut:
    """How parameters are dealt out where the number of ranks may not be seen in the result.

    Kernels treat the last elements of a tensor in another way than the others, some with another
    rounding: a parameter that is cut has such elements in other places on other numbers of ranks.
    """
    if cut == "flat":
        raise OptimizerArgumentError(
            'cut="flat", and ddp= has shards: results would depend on where parameters are cut.',
            'Use cut="auto", which gives each parameter to one rank.',
        )
    return "whole"


def _scattered(ddp: Any, group: Group) -> GradientStretches:
    """Have ``ddp`` reduce-scatter its gradients from now on."""
    if not hasattr(ddp, "scatter_gradients"):
        raise OptimizerArgumentError(
            f"ddp= is a {type(ddp).__name__}, which cannot divide gradients between ranks.",
            "Give the model as wrapped by paceline.DistributedDataParallel, or leave ddp= out.",
        )
    scattered: GradientStretches = ddp.scatter_gradients()
    if (scattered.group.rank(), scattered.group.size()) != (group.rank(), group.size()):
        raise OptimizerArgumentError(
            f"ddp= averages over {scattered.group}, and process_group is {group}.",
            "Leave process_group out.",
        )
    return scattered
