"""Matrices as products of two thin ones: PowerSGD.

A gradient ``M`` is close to ``P @ Q.T`` with few columns. One step of the power method finds them
when it begins with the last step's ``Q``: ``P = M @ Q``, made orthonormal, then ``Q = M.T @ P``.
Both are linear in ``M``, so ranks average ``P`` and ``Q`` instead of the matrices; nobody ever
sends what others have sent, and the bytes do not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...errors import CodecSettingError
from ..low_rank import (
    as_matrix,
    left_factors,
    orthonormal,
    random_columns,
    right_factors,
    worth_it,
)
from ..routes import FactorRoute, Route, RouteSetting
from .codec import Codec, Encoded, State


class PowerSGD(Codec):
    """Sends each matrix as two of ``rank`` columns, and other tensors as they are."""

    def __init__(self, rank: int = 4, *, warm_start: bool = True, seed: int = 0) -> None:
        if rank < 1:
            raise CodecSettingError(f"PowerSGD({rank})", "rank must be at least 1")
        self.rank, self.warm_start, self.seed = rank, warm_start, seed
        self._right: dict[str, Tensor] = {}  # by the name of the parameter

    def gains(self, shape: Sequence[int]) -> bool:
        """Return whether the two factors are smaller than a tensor of this shape."""
        high, wide = as_matrix(shape)
        return len(shape) > 1 and worth_it(high, wide, min(self.rank, high, wide), 1)

    def route(self, setting: RouteSetting) -> Route:
        """Ranks average one factor, then the other."""
        return FactorRoute(self, setting)

    def start(self, matrix: Tensor, name: str) -> Tensor:
        """Return the right factor of the last step, or random columns, the same on all ranks."""
        high, wide = matrix.shape
        held = self._right.get(name)
        columns = min(self.rank, high, wide)
        if held is not None and held.shape == (wide, columns) and held.device == matrix.device:
            return held
        return random_columns(wide, columns, self.seed + wide).to(matrix.device)

    def keep(self, name: str, right: Tensor) -> None:
        """Start the next step from ``right``, or from random columns if it is not finite."""
        if self.warm_start and bool(right.isfinite().all()):
            self._right[name] = right.clone()
        else:
            self._right.pop(name, None)

    def encode(self, tensor: Tensor, name: str = "") -> Encoded:
        matrix = tensor.detach().float().reshape(len(tensor), -1) if tensor.dim() > 1 else None
        if matrix is None or not self.gains(tensor.shape):
            return Encoded({"values": tensor.detach().float()}, tensor.shape, tensor.dtype)
        (left,) = left_factors([matrix], [self.start(matrix, name)])
        left = orthonormal(left)
        (right,) = right_factors([matrix], [left])
        self.keep(name, right)
        return Encoded({"left": left, "right": right}, tensor.shape, tensor.dtype)

    def decode(self, encoded: Encoded) -> Tensor:
        parts = encoded.parts
        values = parts["values"] if "values" in parts else parts["left"] @ parts["right"].t()
        return values.reshape(encoded.shape).to(encoded.dtype)

    def state_dict(self) -> State:
        return {"right": {name: right.clone() for name, right in self._right.items()}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        right: dict[str, Tensor] = state["right"]  # type: ignore[assignment]
        self._right = {name: tensor.clone() for name, tensor in right.items()}

    def restart(self) -> None:
        """Start from random columns again, as ranks do that have just joined."""
        self._right.clear()

    def __repr__(self) -> str:
        warm = "" if self.warm_start else ", warm_start=False"
        seed = f", seed={self.seed}" if self.seed else ""
        return f"PowerSGD({self.rank}{warm}{seed})"
