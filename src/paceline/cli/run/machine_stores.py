"""The stores of a run on several hosts: one for its launchers, one for each start of its ranks.

The first host keeps them. With a key (``--key``) they are Unix sockets there; other hosts
reach them through one port, with TLS and certificates of the job (``_doors``), and give their own
ranks a Unix socket for it. Without one (``--key none``) they are torch's, at ports that whoever
reaches them can use.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Protocol

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

from _paceline_store import Lines, SocketStore

from ..._doors import (
    AGENT,
    SIDE,
    SIDE_DOOR,
    JobKey,
    Porter,
    SideDoor,
    bind_private,
    connect,
    listen,
)
from ..._members import StoreHost
from ...errors import LaunchError, PortTakenError
from .one_machine import private_folder
from .plan import Launch

_ANSWER = timedelta(seconds=20)  # that a store has to answer once somebody listens there
_PATIENCE = timedelta(seconds=2)
_CALL = 20.0  # seconds for one try to reach the first host
_PAUSE = 0.1
_LAUNCHERS, _RANKS = "launchers", "ranks"  # services
_ELSEWHERE = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL})


class MachineStores(Protocol):
    """What a host has of them."""

    hosts: bool  # whether this host keeps them
    port: int

    @property
    def store(self) -> Store:
        """The launchers' own."""

    def begin(self, number: int) -> None:
        """Make an empty store for start ``number`` of the ranks, where they are kept here."""

    def ranks_meet_at(self, number: int) -> RendezvousStoreInfo:
        """What this host's ranks are told, once all hosts have come to that start."""

    def close(self) -> None:
        """Leave."""


def open_stores(launch: Launch, timeout: timedelta) -> MachineStores:
    """Keep the stores, or reach those of the first host."""
    return LockedStores(launch, timeout) if launch.key else OpenStores(launch, timeout)


class ElsewhereError(Exception):
    """The stores are kept by another launcher."""


def cannot_listen(launch: Launch, error: OSError, port: int) -> Exception:
    """Why this host does not keep the stores."""
    if launch.node_rank is None and error.errno in _ELSEWHERE:
        return ElsewhereError()  # another launcher of this run, here or on its host
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(
            f"port {port} on {launch.address} is taken by another process",
            "Leave --master-port out to take a free one, or give another.",
            port,
        )
    return LaunchError(
        f"cannot listen on {launch.address}:{port} ({error.strerror or error})",
        "It must be an address of the host with --node-rank 0.",
    )


def nobody_answered(launch: Launch, timeout: timedelta) -> LaunchError:
    """That the first host did not come."""
    return LaunchError(
        f"nobody answered at {launch.address}:{launch.port} within {timeout.total_seconds():g} s",
        "Start paceline on the host of that address too, and check that the port is open.",
    )


class LockedStores:
    """Stores that only hosts with the job's key reach."""

    def __init__(self, launch: Launch, timeout: timedelta) -> None:
        self.port = launch.port
        self._launch, self._timeout = launch, timeout
        self._identity = JobKey.read(launch.key).identity(AGENT)
        self._porter = Porter()
        self._folder = private_folder()
        self._lines = Lines(self._path(_LAUNCHERS))
        self._side = SideDoor.make(self._folder.path)
        self._kept: dict[str, StoreHost] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self.hosts = bool(self._kept)
        self.store: Store = SocketStore(self._lines, 0, timeout)

    def begin(self, number: int) -> None:
        """Make an empty store for start ``number`` of the ranks, where they are kept here."""
        if self.hosts:
            self._kept[_RANKS].begin(number)

    def ranks_meet_at(self, number: int) -> RendezvousStoreInfo:
        """What this host's ranks are told."""
        os.environ["PACELINE_STORE"] = f"unix:{number}:{self._path(_RANKS)}"
        os.environ[SIDE_DOOR] = self._side.folder
        return RendezvousStoreInfo(self._launch.address, self.port)

    def close(self) -> None:
        """Leave."""
        self._lines.close()
        self._porter.close()
        for kept in self._kept.values():
            kept.close()
        self._folder.close()

    def _path(self, service: str) -> str:
        return str(self._folder.path / service)

    def _open(self) -> None:
        if self._launch.node_rank in (None, 0):
            with suppress(ElsewhereError):
                self._keep()
                return
        self._reach()

    def _keep(self) -> None:
        refuse_own_name(self._launch)
        try:
            listener = listen(self._launch.address, self._launch.port)
        except OSError as error:
            raise cannot_listen(self._launch, error, self._launch.port) from None
        self.port = listener.getsockname()[1]
        self._kept = {name: StoreHost(self._path(name)) for name in (_LAUNCHERS, _RANKS)}
        places = {name: kept.path for name, kept in self._kept.items()}
        places[SIDE] = self._side.folder
        self._side.join(self._porter, self._identity, self._launch.address, self.port)
        self._porter.serve(listener, self._identity, places)

    def _reach(self) -> None:
        """Wait for the first host, see that it is one of this job, and be led to it."""
        address = (self._launch.address, self._launch.port)
        until = time.monotonic() + self._timeout.total_seconds()
        while not _answers(lambda: connect(address, self._identity, _LAUNCHERS, _CALL)):
            if time.monotonic() > until:
                raise nobody_answered(self._launch, self._timeout)
            time.sleep(_PAUSE)
        for name in (_LAUNCHERS, _RANKS):
            self._porter.reach(bind_private(self._path(name)), address, self._identity, name)
        self._side.open(self._porter, self._identity, self._launch.address)


def _answers(call: Callable[[], socket.socket]) -> bool:
    """Whether a host of the job is there by now; one of another raises StrangerError."""
    try:
        call().close()
        return True
    except (ConnectionRefusedError, TimeoutError):
        return False
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return False
        raise


def refuse_own_name(launch: Launch) -> None:
    """Refuse the name of this host where it means loopback: others could not come there."""
    with suppress(OSError):
        found = socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)[0][4][0]
        if ipaddress.ip_address(found).is_loopback and not is_literal(launch.address):
            raise LaunchError(
                f"{launch.address} is {found} on this host, which others cannot reach",
                "Give every host an address of the first one instead of its name.",
            )


class OpenStores:
    """torch's stores, at ports that whoever reaches them can use."""

    def __init__(self, launch: Launch, timeout: timedelta) -> None:
        self.port = launch.port
        self.hosts = launch.node_rank == 0
        self._launch, self._timeout = launch, timeout
        self._ports = {1: launch.port}  # by start of the ranks
        self.store = self._open()

    def begin(self, number: int) -> None:
        """Make an empty store for start ``number`` of the ranks, where they are kept here."""
        if self.hosts and number > 1:
            self._latest, port = self._host(0)  # the server lives as long as this object
            self.store.set(f"paceline/port/{number}", str(port))

    def ranks_meet_at(self, number: int) -> RendezvousStoreInfo:
        """What this host's ranks are told."""
        port = self.port
        if number > 1:
            port = int(self.store.get(f"paceline/port/{number}"))  # there before all had come
        return RendezvousStoreInfo(self._launch.address, port)

    def close(self) -> None:
        """Leave: the server ends with its object."""

    def _open(self) -> Store:
        if self._launch.node_rank in (None, 0):
            with suppress(ElsewhereError):
                store, self.port = self._host(self.port)
                self.hosts = True
                return store
        return self._join()

    def _host(self, port: int) -> tuple[Store, int]:
        """Open a store on the address we were told; port 0 takes one that is free."""
        address = self._launch.address
        try:
            listener = listen_openly(address, port, alone=self._launch.max_nodes == 1)
        except OSError as error:
            raise cannot_listen(self._launch, error, port) from None
        number = listener.getsockname()[1]
        store = TCPStore(
            address,
            number,
            None,
            True,
            self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return store, number

    def _join(self) -> Store:
        """Reach the first host's store; it may come later, but answers at once when it has.

        torch waits without end for the first answer, which may have to come from anybody who
        listens there, and holds up signals meanwhile; hence a thread, which is left behind.
        """
        address, port = self._launch.address, self.port
        limit = _ANSWER.total_seconds() if _somebody_listens(address, port) else None
        answer: Future[Store] = Future()
        Thread(target=lambda: _put(answer, self._reach), daemon=True).start()
        try:
            return answer.result(limit)
        except FutureTimeoutError:  # until Python 3.11 not the builtin
            raise PortTakenError(
                f"{address}:{port} belongs to another program, not to a launcher of this run",
                "Give every host another port.",
                port,
            ) from None

    def _reach(self) -> Store:
        where = self._launch.address, self.port
        try:
            return TCPStore(*where, None, False, self._timeout, wait_for_workers=False)
        except (DistError, RuntimeError):
            raise nobody_answered(self._launch, self._timeout) from None


def _put(answer: Future[Store], action: Callable[[], Store]) -> None:
    try:
        answer.set_result(action())
    except Exception as error:
        answer.set_exception(error)


def _somebody_listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE.total_seconds()):
            return True
    except OSError:
        return False


def listen_openly(address: str, port: int, alone: bool) -> socket.socket:
    """Listen on ``address``; on every interface where that is this host's name for loopback."""
    family, kind, proto, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    own_name_only = ipaddress.ip_address(where[0]).is_loopback and not is_literal(address)
    if own_name_only and not alone:
        where = ("", port)  # /etc/hosts maps the host's name to loopback: take every interface
        family = socket.AF_INET
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def is_literal(address: str) -> bool:
    """Whether it is written in numbers."""
    return address == "localhost" or address.replace(".", "").isdigit() or ":" in address
