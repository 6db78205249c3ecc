"""torch's DistributedDataParallel: what others in torch ask of it, or note for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._utils import _get_device_index
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel as _TorchDDP

device_index = _get_device_index
"""The number of a device, the current one's if it has none; refuses devices without numbers."""

move_inputs = _to_kwargs
"""Copy a forward's inputs to a device, tensors in any structure, on a stream beside if wanted."""


# Not Python functions: they are called between graphs, where Dynamo would trace those.
active: Callable[[], Any] = partial(getattr, _TorchDDP, "_active_ddp_module")
"""The wrapper whose forward runs now. Dynamo asks torch's class for it, to split graphs."""

set_active: Callable[[Any], None] = partial(setattr, _TorchDDP, "_active_ddp_module")
"""Say whose forward runs now."""


def ignored(module: nn.Module) -> Collection[str]:
    """Names of what a wrapper of ``module`` is to leave alone. Users mark modules through
    ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``: there is no other way.
    """
    names: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def ignore(module: nn.Module, names: Sequence[str] | set[str]) -> None:
    """Mark what a wrapper of ``module`` is to leave alone, by name alone."""
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = names


def is_ignored(tensor: Tensor) -> bool:
    """Whether it is marked itself: some of torch looks at the tensors."""
    return hasattr(tensor, "_ddp_ignored")


def ignore_tensor(tensor: Tensor) -> None:
    """Mark a parameter or buffer that a wrapper is to leave alone."""
    tensor._ddp_ignored = True  # type: ignore[attr-defined]


def optimizers_in_backward(param: Tensor) -> Sequence[Any]:
    """What ``apply_optimizer_in_backward`` has set up for ``param``."""
    found: Sequence[Any] = getattr(param, "_in_backward_optimizers", ())
    return found


def logged_error(logger: Any) -> str:
    """The error that was told to torch's own logger of a wrapper."""
    return str(logger._get_ddp_logging_data().strs_map.get("error", ""))
