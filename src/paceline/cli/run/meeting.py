"""Where the launchers of a run's machines meet, and its ranks after them.

torch's own rendezvous listens on every interface. Here the first machine listens on the address it
was told, loopback when it is alone, and nobody unpickles anything. Machines are numbered by
``--node-rank`` or as they come. A restart is a new round: its ranks get a store of their own.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from threading import Thread

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from ...errors import LaunchCountError, LaunchError, PortTakenError
from .plan import Launch

TIMEOUT = timedelta(minutes=15)  # torchrun's, for all machines to come
_PATIENCE = timedelta(seconds=2)  # that a consequence waits for its cause on another machine
_ANSWER = timedelta(seconds=20)  # that a store has to answer once somebody listens there
_LOOK = 0.05  # seconds between two looks at the store
_GOODBYE = timedelta(seconds=5)  # that the first machine waits for the others to hear of a failure


class MachineMeeting(RendezvousHandler):
    """A fixed number of machines; the first one keeps the store."""

    def __init__(self, launch: Launch, timeout: timedelta = TIMEOUT) -> None:
        self.nodes = launch.max_nodes
        self.address = launch.address
        self.port = launch.port
        self.node_rank = launch.node_rank
        self.timeout = timeout
        self.hosts = self.node_rank == 0
        self._run_id = launch.run_id or "paceline"
        self._round = 0
        self._store = self._open()

    def get_backend(self) -> str:
        """Name this kind of meeting; torch puts it into its own events."""
        return "paceline"

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the launcher's store, so that none of them opens a port."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines, and give the ranks of this round a store that is empty."""
        self._round += 1
        if self.nodes > 1:
            self._gather()
        port = self.port if self._round == 1 else self._fresh_port()
        where = RendezvousStoreInfo(self.address, port)
        corner = PrefixStore(f"paceline/launchers/{self._round}", self._store)
        assert self.node_rank is not None
        return RendezvousInfo(corner, self.node_rank, self.nodes, where)

    def is_closed(self) -> bool:
        """Stay open until :meth:`shutdown`."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nobody to keep out."""

    def num_nodes_waiting(self) -> int:
        """Count the machines that have gone on to the next round, where this one shall follow."""
        if self.nodes == 1:
            return 0
        return self._store.add(f"paceline/round/{self._round + 1}", 0)

    def get_run_id(self) -> str:
        """Return what ranks see as TORCHELASTIC_RUN_ID."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave; the first machine lets the others read why."""
        if self.nodes > 1:
            with suppress(DistError, RuntimeError):
                self._store.add("paceline/left", 1)
                if self.hosts:
                    self._until(self._alone, _GOODBYE)
        return True

    def _alone(self) -> bool:
        """Whether all other machines that came have left."""
        came = self._store.add("paceline/round/1", 0)
        return self._store.add("paceline/left", 0) >= came

    # -- failures of other machines -----------------------------------------------------------

    def settle(self, headline: str, final: bool, ranks: Collection[int] = ()) -> str:
        """Agree with the other machines on what failed first, and return it.

        What is only a consequence (not ``final``) waits a little for its cause to be told.
        ``ranks`` are this machine's, which have all ended.
        """
        if self.nodes == 1:
            return headline
        with suppress(DistError, RuntimeError):
            words = " ".join(map(str, ranks))
            number = self._store.add("paceline/failing", 1)
            self._store.set(f"paceline/lost/{number}", words)
            self._store.add("paceline/failures", 1)
            if not final:
                self._until(lambda: self._store.check(["paceline/failure"]), _PATIENCE)
            told = self._store.compare_set("paceline/failure", "", headline).decode()
            return told if told == headline else f"{told}; here, {headline}"
        return headline

    def failure(self) -> str:
        """Why another machine gave up; empty while none has."""
        if self.nodes == 1:
            return ""
        try:
            if self._store.check(["paceline/failure"]):
                return self._store.get("paceline/failure").decode()
        except (DistError, RuntimeError):
            return f"the launcher at {self.address}:{self.port} is gone"
        return ""

    def lost(self) -> list[int]:
        """The ranks of the machines that gave up."""
        with suppress(DistError, RuntimeError):
            machines = range(1, self._store.add("paceline/failing", 0) + 1)
            words = [self._store.get(f"paceline/lost/{number}").split() for number in machines]
            return [int(word) for machine in words for word in machine]
        return []

    def finish(self, timeout: timedelta, without: Collection[int] = ()) -> str:
        """Wait for the other machines' ranks to end too; returns why one gave up, if one did.

        ``without`` are ranks that those of this machine have gone on without.
        """
        key = f"paceline/round/{self._round}/ended"

        def over() -> bool:
            gave_up = self._store.add("paceline/failures", 0)
            return self._store.add(key, 0) + gave_up >= self.nodes or missed()

        def missed() -> bool:
            return bool(self.failure()) and not set(without).issuperset(self.lost())

        with suppress(DistError, RuntimeError):
            self._store.add(key, 1)
            self._until(over, timeout)
            return self.failure() if missed() else ""
        return ""  # the first machine is gone: it does not leave before all have ended, or failed

    def _until(self, true: Callable[[], bool], timeout: timedelta) -> bool:
        """Whether something became true in time.

        torch's own wait would hold up signals for as long as it lasts, such as Ctrl-C.
        """
        until = time.monotonic() + timeout.total_seconds()
        while not true():
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK)
        return True

    # -- stores -------------------------------------------------------------------------------

    def _open(self) -> Store:
        if self.node_rank is None or self.hosts:
            with suppress(_ElsewhereError):
                store, self.port = self._host(self.port)
                self.hosts = True
                return store
        return self._join()

    def _host(self, port: int) -> tuple[Store, int]:
        """Open a store on the address we were told; port 0 takes one that is free."""
        try:
            listener = _listen(self.address, port, alone=self.nodes == 1)
        except OSError as error:
            raise self._cannot_listen(error, port) from None
        number = listener.getsockname()[1]
        store = TCPStore(
            self.address,
            number,
            None,
            True,
            self.timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._latest = store  # the server lives as long as this object
        return store, number

    def _cannot_listen(self, error: OSError, port: int) -> Exception:
        if self.node_rank is None and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return _ElsewhereError()  # another launcher of this run, here or on its machine
        if error.errno == errno.EADDRINUSE:
            return PortTakenError(
                f"port {port} on {self.address} is taken by another process",
                "Leave --master-port out to take a free one, or give another.",
                port,
            )
        return LaunchError(
            f"cannot listen on {self.address}:{port} ({error.strerror or error})",
            "The address has to be one of the machine with --node-rank 0.",
        )

    def _join(self) -> Store:
        """Reach the first machine's store; it may come later, but answers at once when it has.

        torch waits without end for the first answer, which may have to come from anybody who
        listens there, and holds up signals meanwhile; hence a thread, which is left behind.
        """
        limit = _ANSWER.total_seconds() if _somebody_listens(self.address, self.port) else None
        answer: Future[Store] = Future()
        Thread(target=lambda: _put(answer, self._reach), daemon=True).start()
        try:
            return answer.result(limit)
        except FutureTimeoutError:  # until Python 3.11 not the builtin
            raise PortTakenError(
                f"{self.address}:{self.port} belongs to another program, no launcher of this run",
                "Give every machine another port.",
                self.port,
            ) from None

    def _reach(self) -> Store:
        try:
            return TCPStore(
                self.address, self.port, None, False, self.timeout, wait_for_workers=False
            )
        except (DistError, RuntimeError):
            raise LaunchError(
                f"nobody answered at {self.address}:{self.port} "
                f"within {self.timeout.total_seconds():g} s",
                "Start paceline on the machine of that address too, and see that the port is open.",
            ) from None

    def _fresh_port(self) -> int:
        """A new, empty store for a new round, from the first machine."""
        key = f"paceline/port/{self._round}"
        if self.hosts:
            _, port = self._host(0)
            self._store.set(key, str(port))
        self._until(lambda: self._store.check([key]), self.timeout)
        return int(self._store.get(key))

    # -- several machines ---------------------------------------------------------------------

    def _gather(self) -> None:
        if self._round == 1:
            self._agree_on_nodes()
        here = self._store.add(f"paceline/round/{self._round}", 1)
        done = f"paceline/round/{self._round}/all"
        if here == self.nodes:
            self._store.set(done, "")
        if not self._until(lambda: self._store.check([done]), self.timeout):
            came = self._store.add(f"paceline/round/{self._round}", 0)
            raise LaunchCountError(
                f"{came} of {self.nodes} machines came within {self.timeout.total_seconds():g} s",
                "Start paceline on every machine, with the same --nnodes and endpoint.",
                self.nodes,
                came,
            )

    def _agree_on_nodes(self) -> None:
        others = int(self._store.compare_set("paceline/nodes", "", str(self.nodes)) or self.nodes)
        if others != self.nodes:
            raise LaunchCountError(
                f"--nnodes is {self.nodes} here and {others} on another machine",
                "Give every machine the same.",
                self.nodes,
                others,
            )
        self.node_rank = self._claim_number()

    def _claim_number(self) -> int:
        number = self.node_rank
        if number is None:
            number = self._store.add("paceline/comers", 1) - 1
        if number >= self.nodes or self._store.add(f"paceline/node/{number}", 1) > 1:
            raise LaunchCountError(
                f"there is a machine {number} of {self.nodes} already",
                "Give each its own --node-rank, and start as many as --nnodes says.",
                self.nodes,
                number + 1,
            )
        return number


class _ElsewhereError(Exception):
    """The store is kept by another launcher."""


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


def _listen(address: str, port: int, alone: bool) -> socket.socket:
    family, kind, proto, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    own_name_only = ipaddress.ip_address(where[0]).is_loopback and not _is_literal(address)
    if own_name_only and not alone:
        where = ("", port)  # /etc/hosts maps the machine's name to loopback: take every interface
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


def _is_literal(address: str) -> bool:
    return address == "localhost" or address.replace(".", "").isdigit() or ":" in address
