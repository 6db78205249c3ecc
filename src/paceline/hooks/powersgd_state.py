"""PowerSGDState: the settings of PowerSGD, and what it remembers from one step to the next.

What is remembered belongs to a parameter, not to a bucket: DDP moves parameters between buckets
when it learns in which order gradients come, and a run that is resumed has to learn it again.
Parameters are numbered from the end of the model, the order in which DDP's first buckets hold them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, is_initialized
from torch.futures import Future
from torch.utils.weak import WeakIdKeyDictionary

from .._exchange import JobLane, LowRankPlan, Seeds
from .._torch.c10d import default_group
from ..errors import HookStateError
from ..groups import current_process_group

# Records go where torch's hook writes them, so that filters and handlers for those see them.
log = logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")


class _Here:
    """What belongs to this process and is neither saved nor compared."""

    __slots__ = ("_lane", "_numbers")

    def _begin(self) -> None:
        self._lane = JobLane()
        self._numbers: Any = WeakIdKeyDictionary()  # parameter → its number

    def start(self, job: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
        """Run the communication of all buckets in order, while the backward pass continues."""
        return self._lane.start(job, device)


class PowerSGDState(_Here):
    """Settings and state of :func:`powerSGD_hook` and :func:`batched_powerSGD_hook`.

    For ``start_powerSGD_iter`` steps gradients are averaged uncompressed. After that, a gradient
    that shrinks by more than a factor of ``min_compression_rate`` is sent as two matrices of
    ``matrix_approximation_rank`` columns. ``use_error_feedback`` adds the error of an approximation
    to the next gradient; ``warm_start`` starts each approximation from the last one. Keep both on.
    ``orthogonalization_epsilon`` is accepted and not needed. ``batch_tensors_with_same_shape``
    multiplies matrices of one shape in one call, which needs a copy.

    Errors differ between ranks, so each rank saves its own state.
    """

    __slots__ = [
        "batch_tensors_with_same_shape",
        "compression_stats_logging_frequency",
        "error_dict",
        "iter",
        "matrix_approximation_rank",
        "min_compression_rate",
        "next_stats_report",
        "orthogonalization_epsilon",
        "p_memory_dict",
        "process_group",
        "q_memory_dict",
        "rng",
        "start_powerSGD_iter",
        "total_numel_after_compression",
        "total_numel_before_compression",
        "use_error_feedback",
        "warm_start",
    ]

    def __init__(
        self,
        process_group: ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        _check_start(start_powerSGD_iter, use_error_feedback or warm_start)
        _check_rank(matrix_approximation_rank)
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.rng = Seeds(random_seed)
        # by the index of the parameter; for the batched hook, by that of the bucket
        self.error_dict: dict[int, Tensor] = {}
        self.p_memory_dict: dict[int, Tensor] = {}
        self.q_memory_dict: dict[int, Tensor] = {}
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._begin()
        log.info("PowerSGD: %s", self._settings())

    def _settings(self) -> dict[str, Any]:
        memory = ("process_group", "error_dict", "p_memory_dict", "q_memory_dict", "iter")
        return {name: getattr(self, name) for name in self.__slots__ if name not in memory}

    # -- steps --------------------------------------------------------------------------------

    @property
    def averages_plainly(self) -> bool:
        """Return whether this step is still averaged uncompressed."""
        return self.iter < self.start_powerSGD_iter

    def maybe_increase_iter(self, bucket: Any) -> None:
        """Count a step when its last bucket arrives."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                log.info("Gradients are compressed with PowerSGD, after %s steps.", self.iter)

    def indices_of(self, params: Sequence[Tensor]) -> list[int]:
        """Return the indices of the parameters; new parameters get the next ones."""
        for param in reversed(params):
            if param not in self._numbers:
                self._numbers[param] = len(self._numbers)
        return [self._numbers[param] for param in params]

    def seed_for(self, index: int) -> int:
        """Return the seed of the first ``Q`` of a parameter in this step."""
        return self.rng.at(self.iter, index)

    # -- what was saved -----------------------------------------------------------------------

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the compression ratio, the number of elements, and how many of them were sent."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    def count(self, layout: LowRankPlan, *, last: bool) -> None:
        """Add a bucket to the statistics, and log them when due."""
        self.total_numel_before_compression += layout.numel
        self.total_numel_after_compression += layout.numel_sent
        if last and self.iter >= self.next_stats_report:
            rate, before, after = self.compression_stats()
            log.info("step %s: sent %s elements for %s, %s to 1", self.iter, after, before, rate)
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    # -- saving -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, as tensors and numbers, without the settings."""
        return {
            "iter": self.iter,
            "seed": self.rng.seed,
            "errors": dict(self.error_dict),
            "p": dict(self.p_memory_dict),
            "q": dict(self.q_memory_dict),
            "numel_before": self.total_numel_before_compression,
            "numel_after": self.total_numel_after_compression,
            "next_stats_report": self.next_stats_report,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue like the state that returned ``state_dict``; call it before the first pass."""
        missing = self.state_dict().keys() - state_dict.keys()
        if missing:
            raise HookStateError(
                f"PowerSGDState.load_state_dict: {', '.join(sorted(missing))} not found.",
                "Give what PowerSGDState.state_dict() returned, on every rank its own.",
            )
        self._begin()
        self.iter = state_dict["iter"]
        self.rng = Seeds(state_dict["seed"])
        self.error_dict = _copied(state_dict["errors"])
        self.p_memory_dict = _copied(state_dict["p"])
        self.q_memory_dict = _copied(state_dict["q"])
        self.total_numel_before_compression = state_dict["numel_before"]
        self.total_numel_after_compression = state_dict["numel_after"]
        self.next_stats_report = state_dict["next_stats_report"]

    def __getstate__(self) -> dict[str, Any]:
        # in torch's words: its users, and its tests, look for this record and the one below
        log.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return {name: getattr(self, name) for name in self.__slots__ if name != "process_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        default = default_group() if is_initialized() else None
        self.process_group = current_process_group() or default
        log.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size)."
            "                If a different group is desired, please set `self.process_group` "
            "after PowerSGD state is loaded."
        )
        for name, value in state.items():
            setattr(self, name, value)
        self._begin()


def _copied(tensors: dict[Any, Tensor]) -> dict[int, Tensor]:
    return {int(index): tensor.clone() for index, tensor in tensors.items()}


def _check_start(start: int, remembers: bool) -> None:
    if remembers and start <= 1:
        raise HookStateError(
            "PowerSGDState: Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or "
            "`warm_start` is enabled, because PowerSGD can only be applied after the first two "
            f"iterations in DDP. It is {start}: the buckets of the first pass are provisional, and "
            "every rank would raise this error.",
            "Begin with the second step or later, or turn both off.",
        )


def _check_rank(rank: int) -> None:
    if rank < 1:
        raise HookStateError(
            f"PowerSGDState: matrix_approximation_rank is {rank}.", "Give a rank of 1 or more."
        )
