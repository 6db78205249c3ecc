"""Unix sockets that only processes of the same user can open.

The folder of such a socket has to be the user's alone, and who connects has to be the user: the
kernel says who it is (``SO_PEERCRED``), and nobody can claim to be another. Where there is no such
folder, a socket has a random name that is no file's: any process of the host can call there, and
another user's is hung up on.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from pathlib import Path

from ..errors import StrangerError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
BACKLOG = 512


def bind_private(path: str | Path) -> socket.socket:
    """A socket that listens at ``path``, in a folder that is made for this user alone if need be.

    Raises PermissionError where others could put another socket in its place.
    """
    folder = Path(path).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = folder.stat()
    if seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
        raise PermissionError(f"other users can write to {folder}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bind_nameless() -> socket.socket:
    """A socket that listens at a random name, which is no file; who calls is to be checked."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0paceline-{secrets.token_hex(16)}")
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def connect_private(path: str | Path, timeout: float | None = None) -> socket.socket:
    """A connection to the socket at ``path``, which has to be this user's."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout)
        made.connect(str(path))
        check_user(made)
    except OSError:
        made.close()
        raise
    return made


def check_user(connection: socket.socket) -> int:
    """The process at the other end, which has to be of this user, or root's."""
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(answer)
    if user not in (os.geteuid(), 0):
        raise StrangerError(f"process {pid}", f"it runs as user {user}, not {os.geteuid()}")
    return int(pid)
