"""Which parameters of a module are averaged, as layers are frozen and thawed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from weakref import WeakMethod

from torch import Tensor, nn

from .._torch import sweep
from .frozen import LetGo


class Trained:
    """The parameters of a module, except the ignored ones, and those that have a place in buckets.

    Every rank freezes and thaws the same ones at the same time.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self.all = {n: p for n, p in module.named_parameters() if n not in ignored}
        self._everything = tuple(self.all.values())
        self.placed: dict[str, nn.Parameter] = {}  # averaged, in this order
        self._flags: list[bool] = []  # which were trained when places were given
        self.toggles = False  # they are frozen and thawed inside forwards
        self._let_go = LetGo({}, 0)

    def place(self, keep: Collection[str] = ()) -> tuple[list[nn.Parameter], list[str], list[bool]]:
        """Give places to what is trained now, and to those in ``keep``.

        Returns the parameters, their names, and which gradients are sparse.
        """
        self.placed = {n: p for n, p in self.all.items() if p.requires_grad or n in keep}
        self._flags = self._flags_now()
        sparse = sparse_parameters(self._module)
        params = list(self.placed.values())
        return params, list(self.placed), [p in sparse for p in params]

    def _flags_now(self) -> list[bool]:
        return sweep.trained(self._everything)

    @property
    def changed(self) -> bool:
        """Whether something was frozen or thawed since places were given."""
        return self._flags_now() != self._flags

    @property
    def has_thawed(self) -> bool:
        """Whether something is trained now that has no place."""
        return any(p.requires_grad and n not in self.placed for n, p in self.all.items())

    def refuse_let_go(
        self, before: Collection[str], rank: int, averages: WeakMethod[Callable[[], bool]]
    ) -> None:
        """Refuse gradients of those that had a place ``before``, in a pass that ``averages``."""
        self._let_go.forget()
        gone = {n: self.all[n] for n in before if n not in self.placed}
        self._let_go = LetGo(gone, rank)
        self._let_go.watch(averages)


def sparse_parameters(module: nn.Module) -> set[Tensor]:
    """Parameters whose gradients will be sparse."""
    layers = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {layer.weight for layer in layers if layer.sparse}
