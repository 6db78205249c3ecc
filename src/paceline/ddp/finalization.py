"""Waiting for the averages by hand: torch's names for it (``_reducer/finalization.py`` does it)."""

from __future__ import annotations

from ..errors import ModuleStateError
from .replica import Replica


class ManualFinalization:
    """The part of the wrapper by which a program waits for averages itself."""

    replica: Replica
    mixed_precision: object
    shards: int | None
    _delay_all_reduce_all_params: bool
    _require_manual_backward_finalization: bool

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the program waits for the averages itself, by :meth:`finalize_backward`.

        Set it before a forward. A backward pass then returns with its buckets on their way, and
        other work can go on meanwhile; ``.grad`` is None until the averages are there::

            ddp.require_manual_backward_finalization = True
            for batch in loader:
                loss(ddp(batch)).backward()
                exchange_embeddings()  # while the gradients travel
                ddp.finalize_backward()
                optimizer.step()
                optimizer.zero_grad()
        """
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._check_manual_backward_finalization_supported()
        self.replica.reducer.finalization.require(bool(required))
        self._require_manual_backward_finalization = bool(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` must wait until the backward pass has returned.

        Asked after a forward. Where it is False, a hook may call it inside the backward pass, once
        every parameter has its gradient. True in the first pass and wherever the order of
        gradients is learned, with mixed precision, and for models with parameters that are not
        used, or that get gradients several times; False when averages are not awaited by hand.
        """
        if not self._require_manual_backward_finalization:
            return False
        return self.mixed_precision is not None or self.replica.reducer.finalization.after_backward

    def finalize_backward(self) -> None:
        """Wait for the averages of the last backward pass: ``.grad`` holds them when it returns.

        Every rank calls it once for each backward pass that is averaged, in the same place among
        its collectives. Whatever the pass came to, such as the failure of another rank, is raised
        here. On a GPU the current stream waits, not the program.
        """
        self._check_manual_backward_finalization_supported()
        self.replica.reducer.finalization.finalize()

    def _check_manual_backward_finalization_supported(self) -> None:
        if self.shards is not None:
            raise ModuleStateError(
                "Manual backward finalization is not supported with shards=.",
                "A step of shards ends by itself. Every rank refuses it.",
            )
        if self._delay_all_reduce_all_params:
            raise ModuleStateError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params.",
                "Those are averaged inside the backward pass. Every rank refuses it.",
            )
