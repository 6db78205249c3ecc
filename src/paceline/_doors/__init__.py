"""Who may reach a job. On one host: Unix sockets that only the same user can open, and no port.

Between hosts: one port on each, and TLS 1.3 with a certificate of the job on both sides. Services
know Unix sockets only; ``porter.py`` carries their bytes through the port.
"""

from .carry import settle
from .certificates import AGENT, Identity, JobKey
from .names import GONE, Wanted
from .porter import Porter
from .side import OUT, SIDE, SIDE_DOOR, SideDoor, way_to
from .tls import WELCOME, connect, listen
from .unix import bind_nameless, bind_private, check_user, connect_private

__all__ = [
    "AGENT",
    "GONE",
    "OUT",
    "SIDE",
    "SIDE_DOOR",
    "WELCOME",
    "Identity",
    "JobKey",
    "Porter",
    "SideDoor",
    "Wanted",
    "bind_nameless",
    "bind_private",
    "check_user",
    "connect",
    "connect_private",
    "listen",
    "settle",
    "way_to",
]
