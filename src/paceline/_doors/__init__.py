"""Who may reach a job. On one host: Unix sockets that only the same user can open, and no port.

Between hosts: one port on each, and TLS 1.3 with a certificate of the job on both sides. Services
know Unix sockets only; ``porter.py`` carries their bytes through the port.
"""

from .certificates import AGENT, Identity, JobKey
from .porter import Porter
from .tls import connect, listen
from .unix import bind_private, check_user, connect_private

__all__ = [
    "AGENT",
    "Identity",
    "JobKey",
    "Porter",
    "bind_private",
    "check_user",
    "connect",
    "connect_private",
    "listen",
]
