"""Hooks by name, for scripts that choose one from a list."""

import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from .allreduce import allreduce_hook
from .compress import bf16_compress_hook, fp16_compress_hook
from .debugging import noop_hook
from .powersgd import batched_powerSGD_hook, powerSGD_hook
from .powersgd_state import PowerSGDState
from .quantization import quantization_perchannel_hook, quantization_pertensor_hook

if sys.version_info >= (3, 11):  # a partial would be taken for a method there
    from enum import member
else:

    def member(value: Any) -> Any:
        """An enum's value, as before 3.11."""
        return value


def _plain(comm_hook: Callable[..., Any], model: Any, state: Any) -> None:
    model.register_comm_hook(state, comm_hook)


def _power(
    comm_hook: Callable[..., Any],
    model: Any,
    state: Any,
    matrix_approximation_rank: int,
    start_powerSGD_iter: int = 1_000,
) -> None:
    """Return a PowerSGD hook whose ``state`` is a group, like that of the other hooks."""
    whole = PowerSGDState(state, matrix_approximation_rank, start_powerSGD_iter)
    model.register_comm_hook(whole, comm_hook)


class DDPCommHookType(Enum):
    """Names of hooks; ``DDPCommHookType.ALLREDUCE.value(model=ddp, state=group)`` registers one."""

    ALLREDUCE = member(partial(_plain, comm_hook=allreduce_hook))
    FP16_COMPRESS = member(partial(_plain, comm_hook=fp16_compress_hook))
    BF16_COMPRESS = member(partial(_plain, comm_hook=bf16_compress_hook))
    QUANTIZE_PER_TENSOR = member(partial(_plain, comm_hook=quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = member(partial(_plain, comm_hook=quantization_perchannel_hook))
    POWER_SGD = member(partial(_power, comm_hook=powerSGD_hook, matrix_approximation_rank=1))
    POWER_SGD_RANK2 = member(partial(_power, comm_hook=powerSGD_hook, matrix_approximation_rank=2))
    BATCHED_POWER_SGD = member(
        partial(_power, comm_hook=batched_powerSGD_hook, matrix_approximation_rank=1)
    )
    BATCHED_POWER_SGD_RANK2 = member(
        partial(_power, comm_hook=batched_powerSGD_hook, matrix_approximation_rank=2)
    )
    NOOP = member(partial(_plain, comm_hook=noop_hook))


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None) -> None:
    """Register a hook by name; ``state`` is the group to average over, or None."""
    comm_hook_type.value(model=model, state=state)
