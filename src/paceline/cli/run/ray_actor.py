"""One rank's process on a host of a Ray cluster, as the actor that starts it sees it."""

from __future__ import annotations

import importlib
import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_PATIENCE = 0.5  # seconds to wait for news before saying that there are none
_CHUNK = 1 << 16


class Seat(NamedTuple):
    """Where an actor is; seats of one host sort together."""

    node: str
    address: str
    gpus: str  # what Ray lets it see


@dataclass(frozen=True)
class RankNews:
    """What a rank has written since it was last asked, and how it ended, if it has."""

    out: bytes = b""
    err: bytes = b""
    code: int | None = None
    report: dict[str, Any] | None = None
    stopped: bool = False
    survivor: dict[str, Any] | None = None  # what it says of going on without others


class RankProcess:
    """Becomes a Ray actor: starts one rank, hands on its output, and ends it."""

    def __init__(self) -> None:
        self._notes = Path(tempfile.mkdtemp(prefix="paceline-run-"))
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._kill_at = math.inf  # on this host's monotonic clock

    def seat(self) -> Seat:
        """Say where this actor has been placed."""
        ray: Any = importlib.import_module("ray")
        node = ray.get_runtime_context().get_node_id()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Seat(node, ray.util.get_node_ip_address(), gpus)

    def free_port(self) -> int:
        """A port that is free now, for the ranks to meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Start the rank; ``command`` are the interpreter's arguments."""
        own = {"PACELINE_NOTES": str(self._notes), "PACELINE_LAUNCHER": str(os.getpid())}
        self._process = subprocess.Popen(
            [sys.executable, "-u", *command],
            env=os.environ | environment | own,
            cwd=folder if os.path.isdir(folder) else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for number, pipe in ((1, self._process.stdout), (2, self._process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, number)

    def news(self) -> RankNews:
        """Wait a little for output or the end, and say what came."""
        assert self._process is not None
        if time.monotonic() >= self._kill_at:
            self._send(signal.SIGKILL)
        found = {1: b"", 2: b""}
        ready = self._selector.select(_PATIENCE)
        for key, _ in ready:
            data = os.read(key.fd, _CHUNK)
            found[key.data] += data
            if not data:
                self._selector.unregister(key.fileobj)
        # A rank may close its output and go on. What it has left running may hold its pipes for
        # long, and has nothing to say.
        code = None if ready else self._process.poll()
        survivor = self._read_survivor()
        report = None if code is None else self._end()
        return RankNews(
            found[1], found[2], code, report, self._stopped and report is None, survivor
        )

    def stop(self, number: int, grace: float) -> None:
        """Send the rank and what it started a signal; after ``grace`` seconds :meth:`news` kills.

        Returns at once: what the rank writes while it saves has to be read, or it would block.
        """
        assert self._process is not None
        self._stopped = self._stopped or self._process.poll() is None
        self._kill_at = min(self._kill_at, time.monotonic() + grace)
        self._send(number)

    def _send(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            os.killpg(self._process.pid, signal.SIGCONT)  # a stopped one would not notice

    def _read_survivor(self) -> dict[str, Any] | None:
        for path in self._notes.glob("survivor-*.json"):
            with suppress(OSError, ValueError):  # such as taken back meanwhile
                return dict(json.loads(path.read_text()))
        return None

    def _end(self) -> dict[str, Any] | None:
        """Leave nothing of a rank that has ended; returns its report."""
        assert self._process is not None
        if self._stopped:
            self._send(signal.SIGKILL)  # what it has started
        self._selector.close()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        return self._read_report()

    def _read_report(self) -> dict[str, Any] | None:
        """What the rank wrote down about its failure; its folder is then no longer needed.

        ``when`` becomes seconds from now, since no other host has this one's clock.
        """
        notes = [json.loads(path.read_text()) for path in self._notes.glob("rank-*.json")]
        shutil.rmtree(self._notes, ignore_errors=True)
        return notes[0] | {"when": notes[0]["when"] - time.monotonic()} if notes else None
