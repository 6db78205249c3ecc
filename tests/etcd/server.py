"""A real etcd for tests, where one is installed (Debian's ``etcd-server``)."""

import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEADLINE = 300.0  # seconds until it answers
ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}


def no_etcd() -> str:
    """Why there can be no etcd here; empty if there can."""
    return "" if shutil.which("etcd") else "etcd is not installed (Debian: etcd-server)"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def etcd_server(
    folder: Path,
    address: str = "127.0.0.1",
    port: int = 0,
    inside: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Iterator[str]:
    """An etcd of one server; gives its HOST:PORT. ``inside`` is a command that it is started by."""
    port = port or free_port()
    scheme = "https" if any("cert" in option for option in options) else "http"
    clients, peers = f"{scheme}://{address}:{port}", f"http://{address}:{free_port()}"
    command = [
        *inside, "etcd", "--data-dir", str(folder / "etcd"), *options,
        "--listen-client-urls", clients, "--advertise-client-urls", clients,
        "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
        "--initial-cluster", f"default={peers}", "--log-outputs", "stderr",
    ]  # fmt: skip
    machine = platform.machine()
    env = os.environ | {"ETCD_UNSUPPORTED_ARCH": ARCHITECTURES.get(machine, machine)}
    log = folder / "etcd.log"
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=env) as one,
    ):
        try:
            until = time.monotonic() + DEADLINE
            while b"ready to serve client requests" not in log.read_bytes() and one.poll() is None:
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.02)
            assert one.poll() is None, log.read_text()
            yield f"{address}:{port}"
        finally:
            one.kill()
