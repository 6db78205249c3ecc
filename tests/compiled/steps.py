"""What tests of compiled steps share: models, batches, and the same training done in other ways."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

import paceline
from paceline.compiled import Step, train_step
from paceline.groups import Group

SMALL = 1e-3  # MiB: every layer or two have a bucket of their own
Weights = dict[str, Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


class Transformer(nn.Module):
    """One layer of attention and one of two linear maps, each with a norm.

    A bias of the keys would have a gradient of zero, and Adam would follow the rounding errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.mix = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unflatten(0, (2, -1))
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.mix(mixed)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x).flatten(0, 1)


class Conv(nn.Module):
    """Two convolutions with BatchNorm, whose buffers change in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 4, 3, padding=1, bias=False)
        self.conv2 = nn.Conv1d(4, 8, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm1d(4), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x.unsqueeze(1))))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean(-1))


class Branches(nn.Module):
    """A first layer, and one of two others; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left, self.right, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.left(x) if left else self.right(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "transformer": Transformer,
    "conv": Conv,
    "branches": Branches,
}


def seeded(name: str) -> nn.Module:
    """A model of known weights; ranks that are threads share torch's random numbers."""
    model = MODELS[name]()
    source = torch.Generator().manual_seed(1)
    for param in model.parameters():
        fan = param.shape[-1] if param.dim() > 1 else 4
        param.data.copy_(torch.randn(param.shape, generator=source) / fan**0.5)
    return model


def batch(rank: int, step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 6, generator=source), torch.randn(rows, 3, generator=source)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, *more: Any) -> Tensor:
    return F.mse_loss(model(x, *more), y)


def state(model: nn.Module) -> Weights:
    """Copies of parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05),
    "momentum": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=0.01),
    "dampened": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, dampening=0.5),
    "adam": lambda params: torch.optim.Adam(params, 0.01),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
}


class Pair:
    """A model trained by a compiled step, and a copy trained in eager mode, in two groups."""

    def __init__(
        self,
        groups: Sequence[Group],
        model: str = "mlp",
        optimizer: str = "adamw",
        *,
        wrapper: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.rank = groups[0].rank()
        own, other = (self._wrap(model, group, wrapper or {}) for group in groups)
        self.ddp, self.eager = own, other
        self.optimizer = OPTIMIZERS[optimizer](own.parameters())
        self.eager_optimizer = OPTIMIZERS[optimizer](other.parameters())
        self.options = {"backend": "aot_eager", **options}
        self._step: Step | None = None

    def _wrap(self, model: str, group: Group, wrapper: dict[str, Any]) -> Any:
        options = {"bucket_cap_mb": SMALL, **wrapper}
        return paceline.DistributedDataParallel(seeded(model), process_group=group, **options)

    @property
    def step(self) -> Step:
        if self._step is None:
            self._step = train_step(self.ddp, self.optimizer, loss_of, **self.options)
        return self._step

    def eager_step(self, *inputs: Any, max_norm: float | None = None) -> Tensor:
        """What a user writes without us."""
        self.eager_optimizer.zero_grad()
        loss = loss_of(self.eager, *inputs)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.eager.parameters(), max_norm)
        self.eager_optimizer.step()
        return loss.detach()

    @property
    def states(self) -> tuple[Weights, Weights]:
        """Of the compiled model and of the eager one."""
        return state(self.ddp.module), state(self.eager.module)


STEPS, BAD = 8, (0, 3, 4)  # of a Scaled: in the bad ones rank 1 has infinite gradients


def scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**12, growth_interval=2)


def inputs_of(rank: int, number: int) -> tuple[Tensor, Tensor]:
    x, y = batch(rank, number)
    return (x, y * 1e38) if number in BAD and rank == 1 else (x, y)


class Scaled(Pair):
    """A pair whose halves have a scaler each."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.own, self.other = scaler(), scaler()
        super().__init__(*arguments, scaler=self.own, **options)

    def eager_scaled(
        self, *inputs: Any, max_norm: float | None = None, last: bool = True
    ) -> Tensor:
        """What a user writes without us."""
        loss = loss_of(self.eager, *inputs)
        scaled: Any = self.other.scale(loss)
        scaled.backward()
        if last:
            self.other.unscale_(self.eager_optimizer)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.eager.parameters(), max_norm)
            self.other.step(self.eager_optimizer)
            self.other.update()
        return loss.detach()

    def train(self, max_norm: float | None = None) -> list[float]:
        """All steps; returns the scale before each."""
        scales = []
        for number in range(STEPS):
            scales.append(self.own.get_scale())
            assert self.other.get_scale() == scales[-1]
            inputs = inputs_of(self.rank, number)
            self.step(*inputs)
            self.eager_optimizer.zero_grad()
            self.eager_scaled(*inputs, max_norm=max_norm)
        return scales


def assert_alike(found: Weights, expected: Weights, tolerance: float = 1e-6) -> None:
    """The same names, and numbers that are as good as the same."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
        )


def torch_ddp_states(
    model: str, optimizer: str, steps: int, rank: int, group: Any = None
) -> Weights:
    """What torch's own wrapper comes to."""
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(seeded(model)), process_group=group)
    opt = OPTIMIZERS[optimizer](ddp.parameters())
    for number in range(steps):
        opt.zero_grad()
        loss_of(ddp, *batch(rank, number)).backward()
        opt.step()
    return state(ddp.module)
