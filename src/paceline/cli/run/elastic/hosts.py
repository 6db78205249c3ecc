"""A keeper for several hosts: the first one has it, and agents of the others carry words to it.

Members of any host know a Unix socket and nothing else. What they say there goes through the port
of the first host, with TLS and certificates of the job's own key (``_doors``).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from pathlib import Path

from ...._doors import AGENT, SIDE, Identity, JobKey, Porter, SideDoor, bind_private, listen
from ....errors import LaunchError, PortTakenError
from ..plan import Launch
from .elected import elect_keeper
from .keeper import KeeperProcess, Keeping, keeper_unheard

_SERVICE = "keeper"
_ELSEWHERE = frozenset({errno.EADDRNOTAVAIL, errno.EADDRINUSE})


class ServedKeeper:
    """The keeper of the first host, which others reach at a port."""

    serves_others = True
    pause = 0.005
    over = None

    def __init__(
        self,
        keeper: KeeperProcess,
        path: str,
        listener: socket.socket,
        identity: Identity,
        side: SideDoor,
    ) -> None:
        self._keeper = keeper
        self._porter = Porter()
        side.join(self._porter, identity, *listener.getsockname()[:2])
        self._porter.serve(listener, identity, {_SERVICE: path, SIDE: side.folder})

    def look(self, now: float) -> str:
        """Put another in its place if it has ended."""
        return self._keeper.look(now)

    def unheard(self, seconds: float) -> LaunchError:
        """Say why nothing was heard of it for so long."""
        return keeper_unheard(seconds)

    def end(self) -> None:
        """Hang up on the others, and leave nothing of it."""
        self._porter.close()
        self._keeper.end()


class DistantKeeper:
    """The keeper of another host, as a socket of this one."""

    serves_others = False
    pause = 0.1
    over = None

    def __init__(
        self, path: str, address: tuple[str, int], identity: Identity, side: SideDoor
    ) -> None:
        self._porter = Porter()
        self._porter.reach(bind_private(path), address, identity, _SERVICE)
        side.open(self._porter, identity, address[0])

    def look(self, now: float) -> str:
        """Nothing: whether it answers is seen by who asks it."""
        return ""

    def unheard(self, seconds: float) -> LaunchError:
        """Say why nothing was heard of it for so long."""
        return keeper_unheard(seconds)

    def end(self) -> None:
        """Hang up."""
        self._porter.close()


def open_keeper(
    plan: Launch, path: str, command: Sequence[str], folder: Path, lease: int
) -> Keeping:
    """A keeper that listens at ``path`` here, be it of this host or of the first of several."""
    key = JobKey.read(plan.key) if plan.max_nodes > 1 else None
    if key is not None and plan.store:
        return elect_keeper(plan, key, command, folder, lease)
    side = SideDoor.make(folder)
    if key is None:
        return KeeperProcess(command, folder)
    identity = key.identity(AGENT)
    listener = _listen_if_first(plan)
    if listener is None:
        return DistantKeeper(path, (plan.address, plan.port), identity, side)
    return ServedKeeper(KeeperProcess(command, folder), path, listener, identity, side)


def _listen_if_first(plan: Launch) -> socket.socket | None:
    """The port where others come, if the place to meet is on this host; else None."""
    if plan.node_rank not in (None, 0):
        return None
    try:
        return listen(plan.address, plan.port)
    except OSError as error:
        if plan.node_rank is None and error.errno in _ELSEWHERE:
            return None
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {plan.port} of {plan.address} belongs to another process",
                "End that one, or give all hosts another --rdzv-endpoint.",
                plan.port,
            ) from None
        raise LaunchError(
            f"cannot listen on {plan.address}:{plan.port} ({error.strerror})",
            "Give --rdzv-endpoint an address of the first host.",
        ) from None
