"""Lets tests that were written for GPUs, and need none, run where there is none.

Most of PyTorch's DDP tests put their model on ``rank``'s GPU only because that is where models
live. After :func:`pretend` torch claims to have GPUs, and whatever asks for one gets the CPU. A
torch-function mode sees to the tensors: all functions and methods of torch that take a device pass
through it, so no list of them is needed. What is not a function on tensors (streams, counts,
decorators that skip) is replaced by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def pretend(gpus: int) -> None:
    """Claim that there are ``gpus`` of them, for the rest of this process and those it forks.

    The mode holds for the thread that calls this.
    """
    # These look at the machine when they are imported, and must see it as it is.
    import torch.distributed.optim
    import torch.testing._internal.common_cuda
    import torch.testing._internal.common_distributed as common_distributed
    import torch.testing._internal.common_utils as common_utils
    import torch.utils._triton

    _replace_cuda(gpus)
    _replace_autocast()
    _replace_module_to()
    for module in (common_utils, common_distributed):
        module.TEST_CUDA = True
    common_distributed.HAS_ACCELERATOR = True
    torch.utils._triton.has_triton = _always(False)  # it would ask the driver what a GPU can do
    _OnCpu().__enter__()  # never left


def ignore_device_ids(ddp: type) -> None:
    """Make ``ddp`` take ``device_ids`` and ``output_device``, and forget them: there is no GPU."""
    init = ddp.__init__

    @functools.wraps(init)
    def on_cpu(
        self: object,
        module: torch.nn.Module,
        device_ids: object = None,
        output_device: object = None,
        *args: object,
        **options: object,
    ) -> None:
        init(self, module, None, None, *args, **options)

    ddp.__init__ = on_cpu


class _OnCpu(TorchFunctionMode):
    """Turns every GPU among the arguments of a torch function into the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is Tensor.cuda:
            # A copy of a leaf, as a real move would be; a parameter stays what it is.
            return args[0] if args[0].requires_grad else args[0].clone()
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.record_stream:
            return None
        if func is Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        if options.get("device") is not None:
            options["device"] = _on_cpu(options["device"])
        options.pop("pin_memory", None)
        return func(*args, **options)


def _on_cpu(wanted: Any) -> Any:
    """Give the CPU for whatever names a GPU; a dtype or a tensor, which ``to`` takes too, stays."""
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return _CPU
    if isinstance(wanted, str):
        return _CPU if wanted.split(":")[0] == "cuda" else wanted
    if isinstance(wanted, torch.device):
        return _CPU if wanted.type == "cuda" else wanted
    return wanted


class _Nothing:
    """A stream, an event, or a ``with`` of either: on the CPU everything has already happened."""

    device = _CPU

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def record_event(self, event: _Nothing | None = None) -> _Nothing:
        return event or _Nothing()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def _do_nothing(self, *args: object, **options: object) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = _do_nothing


def _always(value: object) -> Callable[..., object]:
    return lambda *args, **options: value


def _replace_cuda(gpus: int) -> None:
    cuda, accelerator = torch.cuda, torch.accelerator
    answers: dict[Any, dict[str, object]] = {
        cuda: {
            "is_available": True,
            "is_initialized": True,
            "device_count": gpus,
            "current_device": 0,
            "current_stream": _Nothing(),
            "default_stream": _Nothing(),
            "get_rng_state": None,
        },
        accelerator: {
            "is_available": True,
            "device_count": gpus,
            "current_accelerator": _CPU,
            "current_device_index": 0,
            "current_stream": _Nothing(),
        },
    }
    orders = {
        cuda: "init _lazy_init empty_cache manual_seed manual_seed_all set_device set_rng_state "
        "set_stream synchronize",
        accelerator: "set_device_index set_stream synchronize",
    }
    for module, values in answers.items():
        for name, value in values.items():
            setattr(module, name, _always(value))
        for name in orders[module].split():
            setattr(module, name, _always(None))
    for name in ("Stream", "Event", "stream", "device"):
        setattr(cuda, name, type(name, (_Nothing,), {}))
    for name in ("Stream", "Event"):
        setattr(torch, name, getattr(cuda, name))


def _replace_autocast() -> None:
    """Have autocast for GPUs work on the CPU, where it would otherwise change nothing."""
    autocast = torch.amp.autocast_mode.autocast
    init = autocast.__init__

    @functools.wraps(init)
    def on_cpu(self: object, device_type: str, *args: object, **options: object) -> None:
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **options)

    autocast.__init__ = on_cpu


def _replace_module_to() -> None:
    """Have modules go to the CPU: they read a GPU's number before any tensor sees it."""
    to = torch.nn.Module.to

    @functools.wraps(to)
    def on_cpu(self: torch.nn.Module, *args: object, **options: object) -> torch.nn.Module:
        there = {name: _on_cpu(value) for name, value in options.items() if name == "device"}
        return to(self, *(_on_cpu(arg) for arg in args), **(options | there))

    torch.nn.Module.to = on_cpu
