"""A keeper that any of several hosts may have: the one that was chosen in the store (etcd).

Members of this host know the socket ``members``. It leads to the keeper of this host (``keeper``)
while that is the one chosen, and else to a relay to the host that has it. Every host has a port
where others reach its keeper; while it has none, whoever comes there is hung up on.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from ...._doors import AGENT, SIDE, Identity, JobKey, Porter, SideDoor, bind_private, listen
from ...._etcd import Etcd, parse_store
from ...._members import ChosenTerm, KeeperSeat, KeeperTerms, Over
from ....errors import (
    HostLeftBehindError,
    LaunchError,
    PortTakenError,
    StoreAnswerError,
    StoreLostError,
    StoreUnreachableError,
)
from ... import say
from ..plan import Launch
from .campaign import Campaign, HostStanding
from .keeper import KeeperProcess, keeper_unheard

_SERVICE = "keeper"
_SILENT = 2.0  # seconds without an answer of the store that are worth a word


class ElectedKeeper:
    """The keeper of whichever host was chosen."""

    def __init__(
        self,
        campaign: Campaign,
        command: Sequence[str],
        folder: Path,
        listener: socket.socket,
        identity: Identity,
    ) -> None:
        self._campaign, self._command, self._folder = campaign, [*command], folder
        self._identity = identity
        self._standing = HostStanding()  # that was acted on
        self._process: KeeperProcess | None = None
        self._relay: Porter | None = None
        self._relays = 0
        self._door = Porter()
        side = SideDoor.make(folder)
        side.join(self._door, identity, *listener.getsockname()[:2])
        self._door.serve(listener, identity, {_SERVICE: folder / "keeper", SIDE: side.folder})
        campaign.begin()

    @property
    def serves_others(self) -> bool:
        """Whether the keeper is here, so that members of other hosts need this one."""
        return self._process is not None

    @property
    def pause(self) -> float:
        """Seconds between two attempts to reach it."""
        return 0.1 if self._process is None else 0.005

    @property
    def over(self) -> Over | None:
        """How the job has ended, if the store says so."""
        return self._campaign.standing.over

    def look(self, now: float) -> str:
        """Have a keeper here if this host was chosen; else lead to the one that has it."""
        standing = self._campaign.standing
        if standing.left_behind:
            raise HostLeftBehindError(
                f"the job has gone on without this host: {standing.left_behind}",
                "Its members are ended. Start this host again to join.",
            )
        if standing != self._standing:
            return self._change(standing)
        return self._see_to(self._process, standing.mine)

    def _see_to(self, process: KeeperProcess | None, mine: ChosenTerm | None) -> str:
        if process is None or mine is None:
            return ""
        if not process.resigned:
            return process.look(time.monotonic())
        self._campaign.resign(mine.term)
        self._leave_seat()
        say.note(f"the keeper of this host may not decide any more (term {mine.term})")
        return ""

    def _change(self, standing: HostStanding) -> str:
        """Act on what the store says."""
        before, self._standing = self._standing, standing
        if standing.mine != before.mine or standing.seat is not None:
            self._leave_seat()
        if standing.seat is not None:
            seat = standing.seat
            self._follow(seat.address, seat.port)
            return f"{seat.host} keeps the roster (term {seat.term})"
        if standing.mine is None:
            return ""
        path = self._folder / "keeper"
        term = ["--term", msgspec.json.encode(standing.mine).decode()]
        self._process = KeeperProcess([*self._command, *term], self._folder)
        self._lead_to(path.name)
        self._hang_up()
        return f"this host keeps the roster (term {standing.mine.term})"

    def _follow(self, address: str, port: int) -> None:
        """Give members a socket that leads to the keeper of another host."""
        self._relays += 1
        path = self._folder / f"relay-{self._relays}"
        relay = Porter()
        relay.reach(bind_private(path), (address, port), self._identity, _SERVICE)
        self._lead_to(path.name)
        self._hang_up()
        self._relay = relay

    def _lead_to(self, name: str) -> None:
        """Have the members' socket be another, without a moment in which there is none."""
        fresh = self._folder / "members.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        os.replace(fresh, self._folder / "members")

    def _hang_up(self) -> None:
        """End what members say to a keeper that is not the chosen one any more."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _leave_seat(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def unheard(self, seconds: float) -> LaunchError:
        """Say why nothing was heard of a keeper for so long."""
        silent = time.monotonic() - self._campaign.reached_at
        if silent < _SILENT or not self._campaign.trouble:
            return keeper_unheard(seconds)
        return _unreachable(self._campaign.trouble, silent)

    def end(self) -> None:
        """Leave nothing of it."""
        self._hang_up()
        self._door.close()
        self._leave_seat()
        self._campaign.close()


def elect_keeper(
    plan: Launch, key: JobKey, command: Sequence[str], folder: Path, lease: int
) -> ElectedKeeper:
    """A keeper that is chosen in the store of the plan; ``lease`` is how many seconds it has."""
    etcd = Etcd(parse_store(plan.store))
    prefix = f"paceline/{sha256(key.authority).hexdigest()[:16]}/{plan.run_id or 'job'}"
    try:
        address = plan.address or etcd.local_address()
        listener = _listen(address, plan.port)
        me = KeeperSeat("", 0, os.uname().nodename, address, listener.getsockname()[1])
        campaign = Campaign(KeeperTerms(etcd, prefix), me, lease)
    except (StoreLostError, StoreAnswerError) as error:
        raise _unreachable(str(error), 0.0) from None
    command = [*command, "--store", plan.store]
    return ElectedKeeper(campaign, command, folder, listener, key.identity(AGENT))


def _unreachable(why: str, seconds: float) -> StoreUnreachableError:
    since = f" for {seconds:.0f} s" if seconds else ""
    return StoreUnreachableError(
        f"the store was not reached{since}, and without it this host does not know which keeper "
        f"decides; no member of this host is left running ({why})",
        "Make sure that this host can reach it, and start this host again: the others let it join.",
        why,
        seconds,
    )


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listen(address, port)
    except OSError as error:
        text = f"cannot listen on {address}:{port} ({error.strerror})"
        remedy = "Give --listen an address of this host, and a port that is free."
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(text, remedy, port) from None
        raise LaunchError(text, remedy) from None
