r"""Two hosts on one machine: network namespaces joined by a cable, and a launcher in each.

    sudo python examples/two_hosts.py

Ranks in different namespaces share neither loopback nor sockets, so they meet as two machines do.
On real machines the same line is typed on each, with its own --node-rank, and a copy of one key:

    paceline run --new-key job.key
    paceline run --key job.key --nnodes 2 --node-rank 0 --master-addr 192.0.2.1 \
        --master-port 29500 --nproc 2 examples/plain_loop.py

The group that results is hybrid: shared memory within a host, gloo over the cable.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SCRIPT = Path(__file__).with_name("plain_loop.py")
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # reserved for examples, so they are nobody's
PACELINE = (sys.executable, "-m", "paceline")
PORT = 29500  # free, since the namespace is new


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


@contextmanager
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, and of the interface each has; they go when the block ends."""
    name = f"pl{secrets.token_hex(4)}"
    a, b = f"{name}a", f"{name}b"
    try:
        for host in (a, b):
            ip("netns", "add", host)
        ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for host, address in zip((a, b), ADDRESSES, strict=True):
            ip("-n", host, "address", "add", f"{address}/24", "dev", host)
            ip("-n", host, "link", "set", host, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield a, b
    finally:
        for host in (a, b):  # one that could not be made is no reason to leave the other
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=20)


def make_key(folder: str) -> str:
    """The key by which the hosts of the job know each other."""
    path = str(Path(folder, "job.key"))
    subprocess.run([*PACELINE, "run", "--new-key", path], check=True, timeout=60)
    return path


def launch(host: str, number: int, key: str) -> subprocess.Popen[bytes]:
    options = ["--nnodes", "2", "--node-rank", str(number), "--nproc", "2"]
    options += ["--master-addr", ADDRESSES[0], "--master-port", str(PORT), "--key", key]
    command = [*PACELINE, "run", *options, str(SCRIPT)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": host}
    return subprocess.Popen(["ip", "netns", "exec", host, *command], env=env)


def main() -> int:
    if os.geteuid() != 0:
        print("two_hosts.py makes network namespaces, which takes root: sudo python …")
        return 2
    with TemporaryDirectory() as folder, hosts() as names:
        key = make_key(folder)
        launchers = [launch(host, number, key) for number, host in enumerate(names)]
        try:
            return max(abs(launcher.wait()) for launcher in launchers)
        finally:
            for launcher in launchers:  # does nothing to one that has ended
                launcher.terminate()
                launcher.wait()


if __name__ == "__main__":
    sys.exit(main())
