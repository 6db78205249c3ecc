"""The folders of a launch: gone with it, and those of one that was killed with the next launch.

A launcher has locked the file ``launch.lock`` of its folder while it lives, and a keeper, which
may outlive it, a file of its own. The kernel frees the locks of a process that was killed. A folder
without ``launch.lock`` is still being made, or is somebody else's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

_LOCK = "launch.lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # locks of other hosts may be invisible here


class LaunchFolder:
    """A new folder that only this user can look into, from now until :meth:`close`."""

    def __init__(self, prefix: str, where: str | None = None) -> None:
        parent = Path(where or tempfile.gettempdir())
        _clear(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = os.open(self.path / "new.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks: then nobody clears it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._lock, _boot())
            os.rename(self.path / "new.lock", self.path / _LOCK)

    def close(self) -> None:
        """Remove it, with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _boot() -> bytes:
    with suppress(OSError):
        return _BOOT.read_bytes().strip()
    return b""


def _clear(parent: Path, prefix: str) -> None:
    """Remove folders of this user's launches of which no process is left."""
    for lock in parent.glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError), ExitStack() as locks:
            if _is_left(lock, locks):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _is_left(lock: Path, locks: ExitStack) -> bool:
    """Whether nobody has a lock of this folder; raises OSError if somebody has."""
    folder = lock.parent.lstat()
    if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.getuid():
        return False
    if not _boot() or lock.read_bytes() != _boot():
        return False
    for each in [lock, *lock.parent.glob("[!l]*.lock")]:
        fd = os.open(each, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        locks.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True
