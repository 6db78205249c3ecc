"""Makes .venv-peers, where the libraries that peers.py measures live, from nothing.

    python3 benchmarks/peers_setup.py                 ten minutes, and ten more to build Horovod
    python3 benchmarks/peers_setup.py --without horovod deepspeed
    PEERS_TORCH=2.15.0 python3 benchmarks/peers_setup.py     another torch, in .venv-peers-2.15.0

Each peer is optional: one that does not install is noted with the reason, which the table then
shows in its place. What is installed already is left alone, so a second call is quick. OpenMPI
comes from the system (``apt-get install openmpi-bin libopenmpi-dev``); without it, mpi4py and
Horovod are noted as missing. Needs nothing but Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
USUAL = "2.13.0"  # of which there is a build without CUDA
CHOSEN = os.environ.get("PEERS_TORCH", USUAL)
VENV = ROOT / (".venv-peers" if CHOSEN == USUAL else f".venv-peers-{CHOSEN}")
PYTHON = VENV / "bin" / "python"
NOTES = VENV / "peers.json"  # peer: why it is not here, or nothing

TORCH = f"torch=={CHOSEN}"
# A version of NCCL that is nowhere, so that nobody brings CUDA along.
WITHOUT_CUDA = "nvidia-nccl-cu12==0.0.0\nnvidia-nccl-cu13==0.0.0\n" if CHOSEN == USUAL else ""
CONSTRAINTS = f"{TORCH}\nnumpy==2.4.6\n{WITHOUT_CUDA}"
BASE = ("numpy==2.4.6", "setuptools==78.1.1", "wheel", "ninja", "packaging", "msgspec")
BASE += ("typing_extensions", "typer", "rich", "safetensors", "cryptography", "pytest")


class NotInstalled(Exception):
    """A step that failed, in one line."""


# -- the peers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """What to install under which name, and the module that shows it is there."""

    module: str
    packages: Sequence[str] = ()
    settings: dict[str, str] = field(default_factory=dict)
    needs: str = ""  # a command of the system
    build: Callable[[Peer], None] | None = None


def install(peer: Peer) -> None:
    constraints = VENV / "constraints.txt"
    constraints.write_text(CONSTRAINTS)
    isolation = ["--no-build-isolation"] if peer.settings else []
    pip("install", "-c", str(constraints), *isolation, *peer.packages, settings=peer.settings)


def install_deepspeed(peer: Peer) -> None:
    """And build its shared-memory op, which it would do inside the first run."""
    install(peer)
    load = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load()"
    extensions = {"TORCH_EXTENSIONS_DIR": str(VENV / "extensions")}
    path = {"PATH": f"{PYTHON.parent}:{os.environ['PATH']}"}  # for ninja
    run([str(PYTHON), "-c", load], peer.settings | extensions | path)


def build_horovod(peer: Peer) -> None:
    """From its source, which asks for an older C++ than torch's headers do."""
    with tempfile.TemporaryDirectory() as folder:
        own, *others = peer.packages
        pip("install", *others)
        fetch = ("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod")
        pip(*fetch, "-d", folder, own)
        (archive,) = Path(folder).glob("horovod-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        source = Path(folder, archive.name.removesuffix(".tar.gz"))
        for file, standard in (("CMakeLists.txt", 17), ("horovod/torch/CMakeLists.txt", 20)):
            text = (source / file).read_text()
            (source / file).write_text(text.replace("CXX_STANDARD 14", f"CXX_STANDARD {standard}"))
        pip("install", "--no-deps", "--no-build-isolation", str(source), settings=peer.settings)


HOROVOD_SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_MPI": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # what a CMake of today wants to hear of old projects
}

PEERS = {
    "accelerate": Peer("accelerate", ["accelerate", "transformers"]),
    "lightning": Peer("lightning.fabric", ["lightning"]),
    "mpi4py": Peer("mpi4py.MPI", ["mpi4py"], needs="mpirun"),
    "ray": Peer("ray.train", ["ray[train]"]),
    "deepspeed": Peer(
        "deepspeed",
        ["deepspeed"],
        {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
        build=install_deepspeed,
    ),
    "horovod": Peer(
        "horovod.torch",
        ["horovod==0.28.1", "cloudpickle", "psutil", "pyyaml", "cffi"],
        HOROVOD_SETTINGS,
        needs="mpirun",
        build=build_horovod,
    ),
}


# -- the steps --------------------------------------------------------------------------------


def run(command: Sequence[str], settings: dict[str, str] | None = None) -> None:
    env = os.environ | (settings or {})
    done = subprocess.run(command, env=env, text=True, capture_output=True)
    if done.returncode:
        (VENV / "failed.log").write_text(done.stdout + done.stderr)
        lines = [
            line for line in (done.stderr or done.stdout).splitlines() if "error" in line.lower()
        ]
        raise NotInstalled((lines or ["it failed"])[-1].strip()[:160])


def pip(*arguments: str, settings: dict[str, str] | None = None) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*command, *arguments], settings)


def imports(module: str) -> bool:
    """Whether it is there and loads; OpenMPI as root only says so in a launched process."""
    found = subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, timeout=300)
    return found.returncode == 0


def make_base() -> None:
    """The environment with torch and paceline; without these there is nothing to measure."""
    if not PYTHON.exists():
        run([sys.executable, "-m", "venv", str(VENV)])
    (VENV / ".gitignore").write_text("*\n")
    if not (imports("torch") and imports("pytest")):
        pip("install", TORCH)
        pip("install", *BASE)
    if not imports("paceline"):
        pip("install", "--no-build-isolation", "--no-deps", "-e", str(ROOT))


def add(peer: Peer) -> str:
    """Install a peer unless it is there; why it is not, or nothing."""
    if peer.needs and not shutil.which(peer.needs):
        return f"the system has no {peer.needs}"
    if imports(peer.module):
        return ""
    try:
        (peer.build or install)(peer)
    except NotInstalled as failure:
        return str(failure)
    return "" if imports(peer.module) else f"{peer.module} does not import"


def main() -> int:
    parser = argparse.ArgumentParser(description="Install what peers.py measures.")
    parser.add_argument("--without", nargs="*", choices=PEERS, default=[], help="peers to leave")
    args = parser.parse_args()
    try:
        make_base()
    except NotInstalled as failure:
        print(f"no environment: {failure} (all of it: {VENV / 'failed.log'})", file=sys.stderr)
        return 1
    notes = {}
    for name, peer in PEERS.items():
        print(f"{name}: ", end="", flush=True)
        notes[name] = "left out" if name in args.without else add(peer)
        print(f"not installed: {notes[name]}" if notes[name] else "here", flush=True)
        NOTES.write_text(json.dumps(notes, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
