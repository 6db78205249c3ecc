"""Waiting for the averages by hand: torch's names for it (``_reducer/finalization.py`` does it)."""

from __future__ import annotations

from ..errors import ModuleStateError
from .replica import Replica


class ManualFinalization:
    """How a program waits for the averages itself; a part of the wrapper."""

    replica: Replica
    mixed_precision: object
    shards: int | None
    _delay_all_reduce_all_params: bool
    _require_manual_backward_finalization: bool

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the program itself waits for the averages, with :meth:`finalize_backward`.

        Set it before a forward. A backward pass then returns while its buckets are still being
        averaged, so that you can do other work; ``.grad`` is None until the averages are there::

            ddp.require_manual_backward_finalization = True
            for batch in loader:
                loss(ddp(batch)).backward()
                exchange_embeddings()  # while gradients are averaged
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
        """Whether :meth:`finalize_backward` must be called after the backward pass has returned.

        Read it after a forward. If it is False, a hook may call :meth:`finalize_backward` inside
        the backward pass, once every parameter has its gradient. It is True in the first pass and
        whenever the order of gradients is learned, with mixed precision, and for models with unused
        parameters or with parameters that get several gradients. It is False if
        :attr:`require_manual_backward_finalization` is.
        """
        if not self._require_manual_backward_finalization:
            return False
        return self.mixed_precision is not None or self.replica.reducer.finalization.after_backward

    def finalize_backward(self) -> None:
        """Wait for the averages of the last backward pass; ``.grad`` holds them when it returns.

        Every rank calls it once for each backward pass that averages, at the same place among its
        collectives. It raises the errors of the pass, such as the failure of another rank. On a GPU
        the current stream waits, not the program.
        """
        self._check_manual_backward_finalization_supported()
        self.replica.reducer.finalization.finalize()

    def _check_manual_backward_finalization_supported(self) -> None:
        if self.shards is not None:
            raise ModuleStateError(
                "Manual backward finalization is not supported with shards=.",
                "A step of shards ends by itself. Every rank raises this.",
            )
        if self._delay_all_reduce_all_params:
            raise ModuleStateError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params.",
                "Those are averaged inside the backward pass. Every rank raises this.",
            )
