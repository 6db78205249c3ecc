"""One endpoint for Prometheus on each host, for all its ranks, without a line of code.

``PACELINE_METRICS=PORT`` (or ``HOST:PORT``; ``paceline run --metrics`` sets it) makes every rank
keep its numbers in a small file, in a folder that only this user can read. The rank whose
``LOCAL_RANK`` is 0 answers for all of them. What processes that have ended left is not counted.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import msgspec

from ..errors import RecorderArgumentError
from .export import Numbers, families, numbers_here, serve
from .run import write_whole

METRICS = "PACELINE_METRICS"
EVERY = 1.0  # seconds between two notes of a rank


class RankNumbers(msgspec.Struct, frozen=True):
    """What a rank has written down: whose numbers these are."""

    pid: int
    numbers: dict[int, Numbers]  # by rank; several where ranks are threads


_NOTES = msgspec.json.Decoder(RankNumbers)


def begin(where: str) -> None:
    """Keep this process's numbers for its host's endpoint; errors are only printed."""
    try:
        host, port = _address(where)
        folder = _folder(port)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            serve(HostNumbers(folder), port, host)
    except (ImportError, OSError, RecorderArgumentError) as error:
        print(f"paceline: {METRICS}={where}: no metrics of this rank: {error}", file=sys.stderr)
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_keep, args=(folder, over), name="paceline metrics", daemon=True
    )
    thread.start()

    def end() -> None:
        over.set()
        thread.join(EVERY)

    # A child of multiprocessing calls its finalizers, and nothing of atexit.
    atexit.register(Finalize(None, end, exitpriority=0))


def _address(where: str) -> tuple[str, int]:
    host, _, port = where.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise RecorderArgumentError("port", "PORT or HOST:PORT, from 1 to 65535", repr(where))
    return host or "127.0.0.1", int(port)


def _folder(port: int) -> Path:
    """Where the ranks of this host that share a port leave their notes: this user's alone."""
    folder = Path(tempfile.gettempdir(), f"paceline-metrics-{os.geteuid()}-{port}")
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o777 != 0o700 or folder.is_symlink():
        raise PermissionError(f"{folder} is open to other users; remove it, or use another port")
    return folder


def _keep(folder: Path, over: threading.Event) -> None:
    """Write this process's numbers down again and again until it is ``over``; then remove them."""
    path = folder / f"{os.getpid()}.json"
    while not over.is_set():
        with suppress(Exception):  # such as a full disk: training goes on, and so does this
            write_whole(path, msgspec.json.encode(RankNumbers(os.getpid(), numbers_here())))
        over.wait(EVERY)
    path.unlink(missing_ok=True)
    with suppress(OSError):  # others have notes there
        folder.rmdir()


class HostNumbers:
    """What Prometheus collects: the latest numbers of every rank on this host that runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """Read the notes; those of processes that have ended are removed."""
        found: dict[int, Numbers] = {}
        for path in sorted(self._folder.glob("*.json")):
            with suppress(OSError, msgspec.DecodeError):
                note = _NOTES.decode(path.read_bytes())
                if _runs(note.pid):
                    found |= note.numbers
                else:
                    path.unlink(missing_ok=True)
        return families(found)

    describe = collect


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
