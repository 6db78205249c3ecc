"""DiLoCo: ranks train alone, and an outer optimizer steps along the mean of where they went.

Every rank holds the same *outer parameters*, in float32 or wider. What a rank exchanges is its
outer gradient: the outer parameters less its own. Its mean over the ranks, weighted as
``rounds.py`` says, is the gradient of a step of the outer optimizer, which every rank makes alike;
then the rank's own parameters become the outer ones and the next round begins.

**Streaming.** Cut into ``fragments``, the model is exchanged one part at a time, evenly spread over
the round, so that the wire is never asked for all at once. With ``overlap`` the exchange of a part
goes on while the ranks take that many more steps, and nobody waits for it unless it takes longer.
What a rank learned in these steps is kept in the share ``mix`` when the outcome comes; the rest of
it is overwritten.

**Memory.** Besides the outer parameters there is a buffer of the same size for the exchange, and
whatever the outer optimizer keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, Optimizer

from ..._exchange import (
    BufferExchange,
    CodedMean,
    Encodes,
    FlatBuffer,
    WeightedMean,
    as_codec,
    cut_evenly,
    group_for_buffers,
    is_codec,
    local_values,
)
from ..._torch import foreach
from ...errors import AveragingArgumentError, AveragingTypeError, RoundsStateError
from ...groups import Group, group_or_default
from .fragment import Fragment
from .local_sgd import Model, cap_bytes, tensors_of, value_pieces
from .rounds import Rounds, check_known
from .schedule import RoundSchedule

Outer = Callable[[list[nn.Parameter]], Optimizer]

NESTEROV: Outer = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


class OuterBuffer(FlatBuffer):
    """Parameters and their outer ones; what is exchanged is the difference."""

    def __init__(self, tensors: Sequence[Tensor], exchange: BufferExchange) -> None:
        super().__init__(tensors, exchange)
        self.outer = [nn.Parameter(v.clone(), requires_grad=True) for v in self.views]

    def fill(self) -> None:
        foreach.copy_(self.views, [p.detach() for p in self.outer])
        foreach.sub_(self.views, [h.to(self.buffer.dtype) for h in self.held()])

    def broadcast(self) -> None:
        super().broadcast()
        self.begin()

    def begin(self) -> None:
        """Let the outer parameters be the ones that are here."""
        foreach.copy_([p.detach() for p in self.outer], self.held())

    def offer(self) -> None:
        """Give the outer optimizer its gradients."""
        for param, mean in zip(self.outer, self.views, strict=True):
            param.grad = mean

    def adopt(self, mix: float) -> None:
        """Let the parameters be the outer ones, but for the share ``mix`` of their own."""
        outer: list[Tensor] = [p.detach() for p in self.outer]
        held = self.held()
        if mix:
            outer = [o.lerp(h.to(o.dtype), mix) for o, h in zip(outer, held, strict=True)]
        foreach.copy_(held, outer)


class DiLoCo(Rounds):
    """Steps ``optim`` on each rank alone, and an outer optimizer every ``sync_every`` steps.

    ``outer`` creates the outer optimizer from a list of parameters; by default SGD with lr 0.7 and
    Nesterov momentum 0.9. Schedulers can use :attr:`outer_optimizer`; all ranks must step them
    equally. Only the parameters of the fragment that is due have gradients.

    ``fragments`` divides the model into parts that are synchronized at different steps. ``overlap``
    is the number of steps that a fragment's communication may take while training continues, and
    ``mix`` the share of the local parameters that is kept when its result is applied. ``codec``
    compresses outer gradients (:class:`paceline.hooks.Int8` to a quarter); with ``error_feedback``
    the error is added to the next ones. With more than two ranks and without ``overlap`` gradients
    are averaged in two stages, otherwise each rank gathers from all. The buffers of a module are
    sent with the last fragment, and averaged as by :class:`LocalSGD`. ::

        inner = torch.optim.AdamW(model.parameters(), 4e-4)
        optimizer = DiLoCo(model, inner, sync_every=100, fragments=4, overlap=5, codec=Int8())
    """

    def __init__(
        self,
        model_or_params: Model,
        optim: Optimizer,
        outer: Outer | None = None,
        *,
        sync_every: int,
        fragments: int = 1,
        overlap: int = 0,
        mix: float = 0.0,
        codec: Encodes | None = None,
        error_feedback: bool = False,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        schedule = RoundSchedule(sync_every, fragments, overlap)
        params, buffers = tensors_of(model_or_params)
        _check(params, fragments, mix, codec)
        chosen = group_or_default(process_group)
        group = Group.wrap(chosen, local_values(params[0]).device)
        cap = cap_bytes(bucket_cap_mb)

        def exchange() -> BufferExchange:
            if codec is None:
                return WeightedMean(group)
            return CodedMean(
                group, as_codec(codec), error_feedback=error_feedback, one_stage=overlap > 0
            )

        runs = cut_evenly([p.numel() for p in params], fragments)
        parts = [_outer_pieces(params[r.start : r.stop], exchange, cap) for r in runs]
        others = value_pieces(buffers, group, cap)
        whole = [Fragment((*part, *(others if part is parts[-1] else ()))) for part in parts]
        super().__init__(optim, schedule, whole, chosen, group)
        check_known([p for g in optim.param_groups for p in g["params"]], params, type(self))
        self.mix = mix
        self._outer_params = _in_order(params, parts)
        self.outer_optimizer = _make_outer(outer or NESTEROV, self._outer_params)
        self._begin({"mix": mix, "codec": repr(codec), "error_feedback": error_feedback})

    def _take(self, fragment: Fragment, *, useful: bool, now: bool) -> None:
        if useful:
            for piece in _outer(fragment):
                piece.offer()
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad(set_to_none=True)
            for buffers in (p for p in fragment.pieces if not isinstance(p, OuterBuffer)):
                buffers.take()
        for piece in _outer(fragment):
            piece.adopt(0.0 if now else self.mix)

    def _own_state(self) -> dict[str, Any]:
        return {
            "outer": self.outer_optimizer.state_dict(),
            "outer_params": [p.detach() for p in self._outer_params],
        }

    def _check_state(self, rounds: dict[str, Any]) -> None:
        super()._check_state(rounds)
        saved = [list(t.shape) for t in rounds["outer_params"]]
        own = [list(p.shape) for p in self._outer_params]
        if saved != own:
            raise RoundsStateError(
                f"The state dict has {len(saved)} outer parameters of other shapes than this "
                f"model's {len(own)}.",
                "Load it into a DiLoCo of the same model.",
            )

    def _load_own(self, rounds: dict[str, Any]) -> None:
        if "outer_params" not in rounds:
            for fragment in self._fragments:
                for piece in _outer(fragment):
                    piece.begin()
            return
        self.outer_optimizer.load_state_dict(rounds["outer"])
        foreach.copy_([p.detach() for p in self._outer_params], rounds["outer_params"])


def _outer(fragment: Fragment) -> list[OuterBuffer]:
    return [piece for piece in fragment.pieces if isinstance(piece, OuterBuffer)]


def _outer_pieces(
    params: Sequence[Tensor], exchange: Callable[[], BufferExchange], cap: int
) -> list[OuterBuffer]:
    return [OuterBuffer(part, exchange()) for part in group_for_buffers(params, cap)]


def _in_order(
    params: Sequence[Tensor], parts: Sequence[Sequence[OuterBuffer]]
) -> list[nn.Parameter]:
    """The outer parameters in the order of the model's, however it is cut."""
    found: dict[Tensor, nn.Parameter] = {}
    for part in parts:
        for piece in part:
            found.update(zip(piece.tensors, piece.outer, strict=True))
    return [found[param] for param in params]


def _make_outer(outer: Outer, params: list[nn.Parameter]) -> Optimizer:
    made = outer(params)
    if not isinstance(made, Optimizer):
        raise AveragingTypeError(
            f"outer: expected a function that makes a torch.optim.Optimizer of a list of "
            f"parameters, but it made an object of type {type(made).__name__}.",
            "For instance: lambda params: torch.optim.SGD(params, lr=0.7).",
        )
    return made


def _check(params: Sequence[Tensor], fragments: int, mix: float, codec: Encodes | None) -> None:
    if fragments > len(params):
        raise AveragingArgumentError(
            f"fragments: the model has {len(params)} parameters and cannot be divided into "
            f"{fragments}."
        )
    if not 0 <= mix < 1:
        raise AveragingArgumentError(f"mix: expected a share from 0 to below 1, got {mix}.")
    if codec is not None and not is_codec(codec):
        raise AveragingTypeError(
            f"codec: expected an object with encode and decode, got {type(codec).__name__}.",
            "paceline.hooks has some, for instance Int8().",
        )
