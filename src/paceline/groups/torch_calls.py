# mypy: disable-error-code="override, assignment"
# (torch's stubs give its methods narrower signatures, and other ones in every version)
"""What torch asks of any group, or of the engine in it, by names that only torch uses.

torch's own groups hand these questions to an engine that C++ knows. A group of ours has none there,
so that each would end in "Could not find the default backend": ours answers for itself. What it
cannot do is refused with the name of what does it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.distributed import Work as TorchWork
from typing_extensions import Self

from .._torch.streams import devices_holding
from ..errors import CollectiveArgumentError, NotANumberError, UnsupportedError
from .engine import Call
from .lineage import Lineage
from .work import FINISHED, Together

if TYPE_CHECKING:
    from .group import Group

_HANDLE = "paceline:"  # and the number of a member


class TorchCalls(Lineage):
    """Methods of a :class:`Group` that torch calls."""

    # -- its engine, and what that can do -----------------------------------------------------

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    _supports_time_estimate = supports_window = False
    supports_abort_hooks = supports_completion_hooks = False

    def _get_backend(self, device: torch.device) -> Self:
        return self

    def get_backend(self, device: torch.device) -> Self:
        """Return the group itself, which torch uses as the backend of every device."""
        return self

    def get_comm(self) -> Self:
        """Return what torch keeps, and later ends, for a group that it split with torchcomms."""
        return self

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """More time for what is under way; ours waits as long as the call was told."""

    def _set_sequence_number_for_group(self) -> None:
        """torch's engines number their collectives on demand; ours always do."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    # -- coalescing ---------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        works, self._coalescing = self._coalescing or [], None
        return Together(works, (), self._watcher, devices_holding((), device))

    # -- hooks --------------------------------------------------------------------------------

    def register_pre_hook(self, hook_id: int, hook: Callable[..., None]) -> None:
        """Raise an error: torch calls these hooks only for its own engines."""
        self._refuse_hook("register_pre_hook")

    def register_post_hook(self, hook_id: int, hook: Callable[..., None]) -> None:
        """Raise an error, as :meth:`register_pre_hook` does."""
        self._refuse_hook("register_post_hook")

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Raise an error, as :meth:`register_pre_hook` does."""
        self._refuse_hook("register_abort_hook")

    def _refuse_hook(self, name: str) -> None:
        backend, remedy = self._engine.capabilities.backend, "Use Group.register_hooks instead."
        raise UnsupportedError(backend, f"torch's {name}", remedy, self._rank)

    # -- other members ------------------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Return whether :meth:`reconfigure` can be called."""
        return self._reopen is not None and self._store is not None

    def get_reconfigure_handle(self) -> str:
        """Return the handle of this rank for torch's ``ReconfigureOptions``."""
        return f"{_HANDLE}{self._members[self._rank]}"

    @overload
    def reconfigure(self, members: Sequence[int], *, timeout: timedelta | None = None) -> Self: ...
    @overload
    def reconfigure(self, members: Any) -> TorchWork: ...
    def reconfigure(self, members: Any, *, timeout: timedelta | None = None) -> Self | TorchWork:
        """Continue with some of the current ranks; this object stays the group.

        ``members`` lists current ranks in their new order. All members call it; other ranks may be
        dead. Collectives that are running are aborted. On a rank that is not a member the group is
        closed.

        If a member does not call it in time, it raises on the members that did, and the group
        stays closed. They can call it again, with the same or other members.

        torch calls it with ``ReconfigureOptions``. Then the members are its ``handles`` (in the
        current order if it is a set), its ``uuid`` must be the same on all members, and the result
        is a completed Work.
        """
        if not hasattr(members, "handles"):
            return self._go_on(members, timeout, "reconfigure")
        ranks = self._ranks_of(members.handles)
        self._go_on(ranks, members.timeout or timeout, f"reconfigure/{members.uuid}")
        return FINISHED

    def _ranks_of(self, handles: Sequence[str] | set[str]) -> list[int]:
        """The present ranks that these name; a set is in the order of the present ranks."""
        present = {f"{_HANDLE}{member}": rank for rank, member in enumerate(self._members)}
        if unknown := sorted(set(handles) - set(present)):
            expected = f"handles of its {self._size} ranks, by get_reconfigure_handle"
            raise CollectiveArgumentError(
                self._rank, "reconfigure", "handles", expected, ", ".join(unknown)
            )
        ranks = [present[handle] for handle in handles]
        return sorted(ranks) if isinstance(handles, set | frozenset) else ranks


def refuse_nan(group: Group) -> None:
    """Check what this rank gives to each call of ``group``: ``TORCH_DIST_NAN_CHECK`` asks for it.

    torch's own check hangs on hooks that are called for its engines alone. Groups that are split or
    merged from ``group`` are checked too.
    """

    def check(call: Call) -> None:
        if call.kind == "broadcast" and call.root != group.rank():
            return
        for tensor in call.inputs:
            if found := int(tensor.isnan().sum()):
                raise NotANumberError(group.rank(), call.kind, found, tensor.numel())

    group.refuses_nan = True
    group.register_hooks(before=check)
