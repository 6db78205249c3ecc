"""What a job's steps change, and so what a newcomer needs: taken, put back, compared.

Nothing is copied when it is taken: a :class:`JobState` refers to the tensors themselves, as they
are between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data import ShardedLoader
from ..errors import JobStateError
from .digests import digests
from .packing import copied, pack, unpack
from .randomness import GlobalRandom

MODEL, GRADIENT = "model.", "gradient."


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be saved and restored: a scheduler, a scaler, a metric."""

    def state_dict(self) -> dict[str, Any]:
        """The state to continue from."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Go on from there."""


@dataclass(frozen=True)
class JobState:
    """The state of a job after ``steps`` commits."""

    steps: int
    plain: Any  # packed: see packing.py
    tensors: Mapping[str, Tensor]
    known: Mapping[str, int] | None = None  # digests, where they were found right before

    @cached_property
    def digests(self) -> Mapping[str, int]:
        """Of each tensor."""
        return digests(self.tensors) if self.known is None else self.known


@dataclass(eq=False)
class Belongings:
    """The objects of one rank that make up its state."""

    module: nn.Module
    optimizers: Sequence[Optimizer]
    loader: ShardedLoader
    rules: Mapping[str, Any]  # that all ranks must have in common
    registered: dict[str, Stateful]
    unwatched: set[str]  # names of those that shards do not change
    draws: bool  # random numbers outside of shards are this rank's alone

    def __post_init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._random = GlobalRandom({param.device for param in self.module.parameters()})
        self._settings: tuple[list[Any], str] = ([], "")

    # -- the whole ------------------------------------------------------------------------------

    def take(self, steps: int) -> JobState:
        """The state as it is now."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._model().items():
            tensors[MODEL + name] = tensor.detach()
        for name, param in self.module.named_parameters():
            if param.grad is not None:
                tensors[GRADIENT + name] = param.grad.detach()
        rest = {
            "steps": steps,
            "rules": dict(self.rules),
            "loader": self.loader.state_dict(),
            "extra": self._extra(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "registered": {name: one.state_dict() for name, one in self.registered.items()},
            "random": self._where_random(),
            "trained": self._trained(),
        }
        return JobState(steps, pack(rest, tensors, "job"), tensors)

    def put(self, state: JobState, *, of_run: bool = True) -> None:
        """Make ``state`` this rank's, with its tensors; what does not fit changes nothing.

        ``of_run``: another rank of this run has it, whose rules must be the same.
        """
        rest = unpack(state.plain, state.tensors)
        self._require_fit(state, rest, self.rules if of_run else {})
        with torch.no_grad():
            for name, tensor in self._model().items():
                tensor.copy_(state.tensors[MODEL + name])
        for name, param in self.module.named_parameters():
            param.grad = state.tensors.get(GRADIENT + name)
        if rest["extra"]:
            self.module.load_state_dict(rest["extra"], strict=False)
        for optimizer, its in zip(self.optimizers, rest["optimizers"], strict=True):
            load_exactly(optimizer, its)
        for name, one in self.registered.items():
            one.load_state_dict(rest["registered"][name])
        self.loader.load_state_dict(rest["loader"])
        self._go_on_random(rest["random"])

    def _require_fit(
        self, state: JobState, rest: Mapping[str, Any], rules: Mapping[str, Any]
    ) -> None:
        for name, value in rules.items():
            if rest["rules"].get(name) != value:
                raise JobStateError(
                    f"{name} is {value!r} here and {rest['rules'].get(name)!r} there"
                )
        if len(rest["optimizers"]) != len(self.optimizers):
            counts = f"{len(self.optimizers)} optimizers here and {len(rest['optimizers'])} there"
            raise JobStateError(counts)
        if set(rest["registered"]) != set(self.registered):
            names = f"{sorted(self.registered)} here and {sorted(rest['registered'])} there"
            raise JobStateError(f"registered are {names}")
        if rules and set(rest["trained"]) != set(self._trained()):
            odd = sorted({*rest["trained"]} ^ {*self._trained()})
            raise JobStateError(
                f"{', '.join(odd[:5])}: trained here and frozen there, or vice versa"
            )
        here = {MODEL + name: tensor for name, tensor in self._model().items()}
        there = {n: t for n, t in state.tensors.items() if n.startswith(MODEL)}
        for name in {**here, **there}:
            mine, other = _kind(here.get(name)), _kind(there.get(name))
            if mine != other:
                raise JobStateError(f"{name.removeprefix(MODEL)} is {mine} here and {other} there")

    def likeness(self) -> dict[str, str]:
        """What all ranks must have in common when a job begins, each in words."""
        trained = set(self._trained())
        found = {
            name: f"{_kind(tensor)}, {'trained' if name in trained else 'not trained'}"
            for name, tensor in self._model().items()
        }
        found["the order of parameters and buffers"] = ", ".join(self._model())
        found.update((name, repr(value)) for name, value in self.rules.items())
        place = ("epoch", "step")
        data = {k: v for k, v in self.loader.state_dict().items() if k not in place}
        found.update((f"the loader's {name}", repr(value)) for name, value in data.items())
        found["the number of optimizers"] = str(len(self.optimizers))
        found["what is registered"] = ", ".join(sorted(self.registered)) or "nothing"
        return found

    # -- its parts ------------------------------------------------------------------------------

    def _model(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def _trained(self) -> list[str]:
        return [name for name, param in self.module.named_parameters() if param.requires_grad]

    def _extra(self) -> dict[str, Any]:
        """What modules keep besides tensors, where they say so."""
        has = (
            type(m).get_extra_state is not nn.Module.get_extra_state for m in self.module.modules()
        )
        if not any(has):
            return {}
        found = self.module.state_dict()
        return {name: value for name, value in found.items() if name.endswith("_extra_state")}

    def _where_random(self) -> dict[str, Any]:
        return self._random.state() if self.draws else {}

    def _go_on_random(self, state: Mapping[str, Any]) -> None:
        if state and self.draws:
            self._random.set(state)

    # -- to do a step again ---------------------------------------------------------------------

    def remember(self) -> None:
        """A step begins: what its shards may change can be put back from now on."""
        watched = {n: one for n, one in self.registered.items() if n not in self.unwatched}
        self._before = {
            "random": self._where_random(),
            "registered": {name: copied(one.state_dict()) for name, one in watched.items()},
        }

    def undo(self) -> None:
        """Make registered objects and random numbers what they were when the step began."""
        for name, state in self._before["registered"].items():
            self.registered[name].load_state_dict(copied(state))
        self._go_on_random(self._before["random"])

    # -- what all ranks compare -----------------------------------------------------------------

    @property
    def settings(self) -> str:
        """The optimizers' settings in words: learning rates and the like."""
        found = [
            [*group.items()] for optimizer in self.optimizers for group in optimizer.param_groups
        ]
        values = [[(k, _shown(v)) for k, v in items if k != "params"] for items in found]
        if values != self._settings[0]:
            groups = [", ".join(f"{key}={value}" for key, value in items) for items in values]
            self._settings = values, " | ".join(groups)
        return self._settings[1]


def load_exactly(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load ``state`` without the conversions to the parameters' types that torch makes."""
    optimizer.load_state_dict(state)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for param, number in zip(params, numbers, strict=True):
        for key, value in state["state"].get(number, {}).items():
            held = optimizer.state[param].get(key)
            if isinstance(value, Tensor) and isinstance(held, Tensor) and held.dtype != value.dtype:
                optimizer.state[param][key] = value.to(held.device)


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):  # to read one on a device would wait for the device
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else "a tensor"
    return value


def _kind(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
