"""Where the launchers of a run's hosts meet, and its ranks after them.

torch's own rendezvous listens on every interface and unpickles what it finds there. Here the first
host keeps the stores (``machine_stores.py``), and nobody unpickles anything. Hosts are
numbered by ``--node-rank`` or as they come. A restart is a new round: its ranks get a store of
their own. Where the number of hosts may change (``MIN:MAX``), a round begins when the least have
come and no more do for a while; who comes later, or again, calls all to the next round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from ...errors import LaunchCountError
from .machine_stores import open_stores
from .plan import Launch

TIMEOUT = timedelta(minutes=15)  # torchrun's, for all hosts to come
LAST_CALL = timedelta(seconds=30)  # torchrun's, for more than the least
_PATIENCE = timedelta(seconds=2)  # that a consequence waits for its cause on another host
_LOOK = 0.05  # seconds between two looks at the store
_GOODBYE = timedelta(seconds=5)  # that the first host waits for the others to hear of a failure


class MachineMeeting(RendezvousHandler):
    """Several hosts; the first one keeps the stores."""

    def __init__(
        self, launch: Launch, timeout: timedelta = TIMEOUT, last_call: timedelta = LAST_CALL
    ) -> None:
        self.nodes = launch.max_nodes  # in this round
        self.address = launch.address
        self.node_rank = launch.node_rank
        self.timeout = timeout
        self._last_call = last_call
        self._least, self._most = launch.min_nodes, launch.max_nodes
        self._run_id = launch.run_id or "paceline"
        self._round = 0
        self._stores = open_stores(launch, timeout)
        self._store = self._stores.store

    @property
    def hosts(self) -> bool:
        """Whether this host keeps the stores."""
        return self._stores.hosts

    @property
    def port(self) -> int:
        """Where the hosts meet."""
        return self._stores.port

    @property
    def is_alone(self) -> bool:
        """Whether there never are other hosts."""
        return self._most == 1

    @property
    def may_change(self) -> bool:
        """Whether hosts may come and go."""
        return self._least != self._most

    def get_backend(self) -> str:
        """Name this kind of meeting; torch puts it into its own events."""
        return "paceline"

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the launcher's store, so that none of them opens a port."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all hosts, and give the ranks of this round a store that is empty."""
        self._round += 1
        if not self.is_alone:
            self._gather()
        else:
            self._stores.begin(self._round)
        where = self._stores.ranks_meet_at(self._round)
        corner = PrefixStore(f"paceline/launchers/{self._round}", self._store)
        assert self.node_rank is not None
        return RendezvousInfo(corner, self.node_rank, self.nodes, where)

    def is_closed(self) -> bool:
        """Stay open until :meth:`shutdown`."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nobody to keep out."""

    def num_nodes_waiting(self) -> int:
        """Count the hosts that have gone on to the next round, where this one shall follow."""
        if self.is_alone:
            return 0
        return self._store.add(f"paceline/round/{self._round + 1}", 0)

    def get_run_id(self) -> str:
        """Return what ranks see as TORCHELASTIC_RUN_ID."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave; the first host lets the others read why."""
        if not self.is_alone:
            with suppress(DistError, RuntimeError):
                self._store.add("paceline/left", 1)
                if self.hosts:
                    self._until(self._alone, _GOODBYE)
        self._stores.close()
        return True

    def _alone(self) -> bool:
        """Whether all other hosts that came have left."""
        came = self._store.add("paceline/came", 0)
        return self._store.add("paceline/left", 0) >= came

    # -- failures of other hosts -----------------------------------------------------------

    def settle(self, headline: str, final: bool, ranks: Collection[int] = ()) -> str:
        """Agree with the other hosts on what failed first, and return it.

        What is only a consequence (not ``final``) waits a little for its cause to be told.
        ``ranks`` are this host's, which have all ended.
        """
        if self.is_alone or self.may_change:  # then the others go on without this one
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
        """Why another host gave up; empty while none has."""
        if self.is_alone:
            return ""
        try:
            if self._store.check(["paceline/failure"]):
                return self._store.get("paceline/failure").decode()
        except (DistError, RuntimeError):
            return f"the launcher at {self.address}:{self.port} is gone"
        return ""

    def lost(self) -> list[int]:
        """The ranks of the hosts that gave up."""
        with suppress(DistError, RuntimeError):
            machines = range(1, self._store.add("paceline/failing", 0) + 1)
            words = [self._store.get(f"paceline/lost/{number}").split() for number in machines]
            return [int(word) for machine in words for word in machine]
        return []

    def finish(self, timeout: timedelta, without: Collection[int] = ()) -> str:
        """Wait for the other hosts' ranks to end too; returns why one gave up, if one did.

        ``without`` are ranks that those of this host have gone on without.
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
        return ""  # the first host is gone: it does not leave before all have ended, or failed

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

    # -- several hosts ---------------------------------------------------------------------

    def _gather(self) -> None:
        if self._round == 1:
            self._agree_on_nodes()
            self._store.add("paceline/came", 1)
        if self.hosts:
            self._stores.begin(self._round)
        here = self._store.add(f"paceline/round/{self._round}", 1)
        done = f"paceline/round/{self._round}/all"
        if self.may_change:
            return self._gather_some(here, done)
        if here == self.nodes:
            self._store.set(done, "")
        self._wait_for(done)
        return None

    def _gather_some(self, here: int, done: str) -> None:
        """Take part in a round of as many hosts as come in time, or wait for the next."""
        if self.hosts:
            self._close_round(done)
        self._wait_for(done)
        self.nodes = int(self._store.get(done))
        if here > self.nodes:  # too late for this one; the others see that it waits
            self._round += 1
            self._gather()
        else:
            self.node_rank = here - 1

    def _close_round(self, done: str) -> None:
        """Wait for the least, then a while for more; who comes later waits for the next round."""
        key = f"paceline/round/{self._round}"
        self._until(lambda: self._store.add(key, 0) >= self._least, self.timeout)
        if self._store.add(key, 0) >= self._least:
            self._until(lambda: self._store.add(key, 0) >= self._most, self._last_call)
            self._store.set(done, str(min(self._store.add(key, 0), self._most)))

    def _wait_for(self, done: str) -> None:
        if not self._until(lambda: self._store.check([done]), self.timeout):
            came = self._store.add(f"paceline/round/{self._round}", 0)
            raise LaunchCountError(
                f"{came} of {self._least} hosts came within {self.timeout.total_seconds():g} s",
                "Start paceline on every host, with the same --nnodes and endpoint.",
                self._least,
                came,
            )

    def _agree_on_nodes(self) -> None:
        mine = f"{self._least}:{self._most}" if self.may_change else str(self._most)
        others = (self._store.compare_set("paceline/nodes", "", mine) or mine.encode()).decode()
        if others != mine:
            raise LaunchCountError(
                f"--nnodes is {mine} here and {others} on another host",
                "Give every host the same.",
                self._most,
                int(others.rpartition(":")[2]),
            )
        if not self.may_change:  # else they are numbered in each round, as they come
            self.node_rank = self._claim_number()

    def _claim_number(self) -> int:
        number = self.node_rank
        if number is None:
            number = self._store.add("paceline/comers", 1) - 1
        if number >= self.nodes or self._store.add(f"paceline/node/{number}", 1) > 1:
            raise LaunchCountError(
                f"there is a host with --node-rank {number} already, of {self.nodes}",
                "Give each its own --node-rank, and start as many as --nnodes says.",
                self.nodes,
                number + 1,
            )
        return number
