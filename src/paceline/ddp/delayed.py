"""Parameters whose average is put off until a chosen parameter has its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .._reducer import Reducer
from ..groups import Group
from ..policies import BucketCaps, Reduction
from .models import broadcast


class Delayed:
    """A reducer that is set off by one parameter and does all its work at the end of the pass."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        sets_off: nn.Parameter | None,
        group: Group,
    ) -> None:
        assert sets_off is not None  # torch_args.check_delayed
        self.params = [param for _, param in named]
        broadcast(group, [param.detach() for param in self.params], 0)
        policy = Reduction(BucketCaps.create(None, None))
        names = [name for name, _ in named]
        self.reducer = Reducer(self.params, names, group, policy, hooks=False)
        self._handle = sets_off.register_post_accumulate_grad_hook(self._set_off)

    def _set_off(self, _param: Tensor) -> None:
        self.reducer.begin()

    def before_forward(self) -> None:
        """Lay out what the last pass planned."""
        self.reducer.settle_plan()
