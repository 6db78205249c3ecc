"""Where the ranks of one host meet: a store that only processes of the same user reach.

There is no port. ``MASTER_PORT`` names one that nobody listens on, since scripts read it; torch's
``env://`` and ``tcp://`` with that address find the store (``_paceline_store.py``). A program that
opens a ``TCPStore`` there itself needs a port all the same: ``--master-port`` opens one on loopback
(``meeting.py``).

Where there are GPUs the store is a file. NCCL asks a store from threads that C++ ends after Python
has ended, and one that is written in Python could not answer then.
"""

from __future__ import annotations

import os
import socket
import tempfile
from importlib.metadata import entry_points

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from ..._doors import SIDE_DOOR, SideDoor
from ..._members import StoreHost
from ..machine import ThisMachine
from .folders import LaunchFolder
from .plan import Launch

_LONGEST_PATH = 100  # bytes; a Unix socket's may have 107


def ranks_find_sockets() -> bool:
    """Whether a rank that imports torch hears of a store without a port.

    torch reads the entry points of packages for that, unless it is told not to.
    """
    told = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    return told == "1" and any(
        one.name == "paceline" for one in entry_points(group="torch.backends")
    )


class LocalMeeting(RendezvousHandler):
    """One host; its launcher keeps the ranks' store, or the folder that it lies in."""

    def __init__(self, launch: Launch) -> None:
        self._run_id = launch.run_id or "paceline"
        self._address = launch.address
        self._folder = private_folder()
        path = self._folder.path
        self._host = None if ThisMachine().gpus else StoreHost(path / "store")
        self._side = SideDoor.make(path)
        self._round = 0

    def get_backend(self) -> str:
        """Name this kind of meeting; torch puts it into its own events."""
        return "paceline"

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the launcher's store, so that none of them opens a port."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Give the ranks of this start a store that is empty."""
        self._round += 1
        os.environ["PACELINE_STORE"] = self._begin_store()
        os.environ[SIDE_DOOR] = self._side.folder
        where = RendezvousStoreInfo(self._address, unused_port())
        corner = PrefixStore(f"paceline/launchers/{self._round}", HashStore())
        return RendezvousInfo(corner, 0, 1, where)

    def _begin_store(self) -> str:
        """Where ranks find it, as ``_paceline_store.py`` reads it."""
        if self._host is None:
            return f"file:{self._folder.path / f'store-{self._round}'}"
        self._host.begin(self._round)
        return f"unix:{self._round}:{self._host.path}"

    def is_closed(self) -> bool:
        """Stay open until :meth:`shutdown`."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nobody to keep out."""

    def num_nodes_waiting(self) -> int:
        """Count the other hosts that wait: there is none."""
        return 0

    def get_run_id(self) -> str:
        """Return what ranks see as TORCHELASTIC_RUN_ID."""
        return self._run_id

    def shutdown(self) -> bool:
        """Answer no more, and leave nothing."""
        if self._host is not None:
            self._host.close()
        self._folder.close()
        return True


def private_folder() -> LaunchFolder:
    """A new folder that only this user can look into, whose sockets have short enough paths."""
    usual = os.fsencode(tempfile.gettempdir() + "/paceline-store-12345678")
    long = len(usual) > _LONGEST_PATH - 16
    return LaunchFolder("paceline-store-", "/tmp" if long else None)


def unused_port() -> int:
    """A number that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
