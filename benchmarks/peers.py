"""How does paceline's training step compare with that of other libraries, on one host?

    python3 benchmarks/peers_setup.py                                once: makes .venv-peers
    .venv-peers/bin/python benchmarks/peers.py --save results.md     about twenty minutes
    .venv-peers/bin/python benchmarks/peers.py --quick               a rough picture
    .venv-peers/bin/python benchmarks/peers.py --only shm horovod --models mlp

The models are those of ``step.py``; 2 ranks of one thread. Every library has processes of its own,
in which its step and the plain model's take turns in blocks of five (``peers_rank.py``); how each
is used is in ``peers_ways.py``. The table has the step of each as a multiple of the local step:
the median over rounds, in brackets the quartiles. A step takes as long as on its slower rank, a
block counts by its median step. The libraries take turns as well: each is started several times,
so that what the machine does in a minute meets them all alike.

Each way is first checked on a small model; one that does not average is shown as failed. What is
not installed is shown with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from report import Log, describe_machine, row
from step import MODELS, Ratio

HERE = Path(__file__).parent
DEADLINE = 1200.0  # seconds for one start of one library
RANKS = 2


@dataclass(frozen=True)
class Peer:
    """A row of the table: a way of ``peers_rank.py``, and what it takes to start it."""

    title: str
    package: str = ""  # that must be installed
    launcher: str = "ranks"  # or mpirun, or one process
    settings: dict[str, str] = field(default_factory=dict)


# Where peers_setup.py has built DeepSpeed's op; it would build it at the first step otherwise.
EXTENSIONS = {"TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "extensions"))}
CPU_ONLY = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true", **EXTENSIONS}
CPU_ONLY["LOCAL_SIZE"] = str(RANKS)  # as DeepSpeed's launcher says it; its op crashes otherwise
PEERS = {
    "shm": Peer("paceline, shm"),
    "gloo": Peer("paceline, gloo"),
    "torch": Peer("torch DDP, gloo"),
    "accelerate": Peer("Accelerate (torch DDP, gloo)", "accelerate", settings=CPU_ONLY),
    "fabric": Peer("Lightning Fabric (torch DDP, gloo)", "lightning"),
    "ray": Peer("Ray Train (torch DDP, gloo)", "ray", launcher="one"),
    "fsdp2": Peer("FSDP2 fully_shard, gloo"),
    "replicate": Peer("replicate on FSDP2, gloo"),
    "horovod": Peer("Horovod, OpenMPI", "horovod", launcher="mpirun"),
    "deepspeed": Peer("DeepSpeed ZeRO-0, gloo", "deepspeed", settings=CPU_ONLY),
    "deepspeed-shm": Peer("DeepSpeed's shm op, flat", "deepspeed", settings=CPU_ONLY),
    "mpi4py": Peer("mpi4py, flat, OpenMPI", "mpi4py", launcher="mpirun"),
}


# -- one start of one library -----------------------------------------------------------------


def start(name: str, rounds: int, models: Sequence[str], folder: Path) -> str:
    """Run a way's ranks to their end; why they failed, or nothing."""
    peer = PEERS[name]
    command = [sys.executable, str(HERE / "peers_rank.py"), name, str(rounds), str(folder), *models]
    env = os.environ | meeting_point() | peer.settings | {"OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.prefix, 'bin')}{os.pathsep}{env.get('PATH', '')}"  # for ninja
    if peer.launcher == "mpirun":
        mpi = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(RANKS)]
        commands = [(["mpirun", *mpi, *command], env)]
    elif peer.launcher == "one":
        commands = [(command, env)]
    else:
        places = [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(RANKS)]
        commands = [(command, env | place) for place in places]
    return run_together(commands, folder)


def meeting_point() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = str(RANKS)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, **address}


def run_together(commands: Sequence[tuple[list[str], dict[str, str]]], folder: Path) -> str:
    """Run all to their end; when one fails or time is up, end the others and say why."""
    started: list[subprocess.Popen[bytes]] = []
    until = time.monotonic() + DEADLINE
    try:
        for number, (command, env) in enumerate(commands):
            with (folder / f"log-{number}").open("w") as log:
                settings = {"env": env, "stdout": log, "stderr": log}
                started.append(subprocess.Popen(command, start_new_session=True, **settings))
        while (codes := {process.poll() for process in started}) in ({None}, {None, 0}):
            if time.monotonic() > until:
                return f"still running after {DEADLINE:.0f} s"
            time.sleep(0.1)
    finally:
        for process in started:  # each leads a session of its own, with all it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        sweep()
    return "" if codes == {0} else last_words(folder)


def last_words(folder: Path) -> str:
    """The last error that a rank has printed, or else its last line."""
    said = [line for log in sorted(folder.glob("log-*")) for line in log.read_text().splitlines()]
    lines = [line.strip() for line in said if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it ended with an error"])[-1][:120]


def sweep() -> None:
    """Remove what DeepSpeed's shm op leaves in shared memory when its ranks end."""
    for left in Path("/dev/shm").glob("deepspeed_*"):
        left.unlink(missing_ok=True)


# -- what they measured -----------------------------------------------------------------------


@dataclass
class Found:
    """What is known of one library on one model."""

    ratios: list[float] = field(default_factory=list)
    failure: str = ""

    def read(self, folder: Path, model: str, failure: str) -> None:
        """Take in one start's results."""
        files = sorted(folder.glob(f"{model}-*.json"))
        if len(files) != RANKS:
            self.failure = self.failure or failure or "a rank wrote nothing"
            return
        by_rank = [json.loads(file.read_text()) for file in files]
        for blocks in zip(*by_rank, strict=True):
            alone, own = (slowest([rank[which] for rank in blocks]) for which in (0, 1))
            self.ratios.append(own / alone)

    def cell(self) -> str:
        return f"failed: {self.failure}" if self.failure else str(Ratio.of(self.ratios))


def slowest(ranks: Sequence[Sequence[float]]) -> float:
    """The median step of a block; a step takes as long as on its slowest rank."""
    return statistics.median(max(step) for step in zip(*ranks, strict=True))


def measure(
    name: str, rounds: int, models: Sequence[str], found: dict[tuple[str, str], Found]
) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-peers-") as folder:
        failure = start(name, rounds, models, Path(folder))
        for model in models:
            found.setdefault((name, model), Found()).read(Path(folder), model, failure)


def missing(name: str) -> str:
    """Why a library cannot be measured here, or nothing."""
    peer = PEERS[name]
    if peer.launcher == "mpirun" and not shutil.which("mpirun"):
        return "not installed: the system has no mpirun"
    if not peer.package:
        return ""
    try:
        importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        notes = Path(sys.prefix, "peers.json")
        known = json.loads(notes.read_text()) if notes.exists() else {}
        return f"not installed: {known.get(peer.package) or 'run benchmarks/peers_setup.py'}"
    return ""


# -- the run ----------------------------------------------------------------------------------


def versions(names: Sequence[str]) -> str:
    packages = sorted({PEERS[name].package for name in names} - {""})
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


def table(
    names: Sequence[str],
    models: Sequence[str],
    absent: dict[str, str],
    found: dict[tuple[str, str], Found],
) -> list[str]:
    lines = [
        row("", *(MODELS[model].title for model in models)),
        row("---", *["--:"] * len(models)),
    ]
    for name in names:
        if name in absent:
            lines.append(row(PEERS[name].title, absent[name], *[""] * (len(models) - 1)))
            continue
        cells = [found[name, model].cell() for model in models]
        lines.append(row(PEERS[name].title, *cells))
    return lines


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training steps of many libraries, over local.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--starts", type=int, help="of each library (3)")
    parser.add_argument("--rounds", type=int, help="in each start (8)")
    parser.add_argument("--quick", action="store_true", help="one start of 4 rounds")
    parser.add_argument("--save", type=Path, help="write the result here")
    args = parser.parse_args()
    args.starts = args.starts or (1 if args.quick else 3)
    args.rounds = args.rounds or (4 if args.quick else 8)
    return args


def main() -> int:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending what it started
    log = Log()
    log(describe_machine())
    absent = {name: why for name in args.only if (why := missing(name))}
    present = [name for name in args.only if name not in absent]
    log(f"{RANKS} ranks of one thread, {args.starts} starts of {args.rounds} rounds. "
        f"{versions(present)}")  # fmt: skip
    found: dict[tuple[str, str], Found] = {}
    for number in range(args.starts):
        for name in present:
            print(f"start {number + 1} of {args.starts}: {PEERS[name].title}", file=sys.stderr)
            measure(name, args.rounds, args.models, found)
    log("\n" + "\n".join(table(args.only, args.models, absent, found)))
    if args.save is not None:
        args.save.write_text("\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
