"""How does paceline's training step compare with that of other libraries, on one host?

    python3 benchmarks/peers_setup.py                                once: makes .venv-peers
    .venv-peers/bin/python benchmarks/peers.py --save results.md     about twenty minutes
    .venv-peers/bin/python benchmarks/peers.py --quick               a rough picture
    .venv-peers/bin/python benchmarks/peers.py --only shm horovod --models mlp

The models are those of ``step.py``; 2 ranks of one thread. Every library has processes of its own,
and so have the local steps, which use none. They take turns in blocks of five steps, each round
begins with another, and while one runs all others are stopped (``peers_turns.py``). How each is
used is in ``peers_ways.py``. The table has the step of each as a multiple of the local step of the
same round: the median over rounds, in brackets the quartiles. A step takes as long as on its slower
rank, a block counts by its median step. All of it is done several times from the start, so that
where a process happens to lie in memory counts less.

*flat*: no wrapper; the user's loop keeps all gradients in one tensor and averages it with one call
after backward. That spares what a wrapper does for every parameter, and overlaps nothing.

Each way is first checked on a small model; one that does not average is shown as failed. What is
not installed is shown with the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from peers_turns import Command, Failed, Party, no_one_left
from report import Log, describe_machine, digits, row
from step import MODELS, Ratio

HERE = Path(__file__).parent
RANKS = 2
LOCAL = "local"


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
    LOCAL: Peer("no library"),
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
    "shm-flat": Peer("paceline's all-reduce, shm, flat"),
    "deepspeed-shm": Peer("DeepSpeed's shm op, flat", "deepspeed", settings=CPU_ONLY),
    "mpi4py": Peer("mpi4py, OpenMPI, flat", "mpi4py", launcher="mpirun"),
}
ASKED = [name for name in PEERS if name != LOCAL]


# -- starting them ----------------------------------------------------------------------------


def commands(name: str, folder: Path) -> list[Command]:
    """What starts a library's ranks."""
    peer = PEERS[name]
    command = [sys.executable, str(HERE / "peers_rank.py"), name, str(folder)]
    env = os.environ | meeting_point() | peer.settings | {"OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.prefix, 'bin')}{os.pathsep}{env.get('PATH', '')}"  # for ninja
    if peer.launcher == "mpirun":
        mpi = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(RANKS)]
        return [(["mpirun", *mpi, *command], env)]
    if peer.launcher == "one":
        return [(command, env)]
    places = [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(RANKS)]
    return [(command, env | place) for place in places]


def meeting_point() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = str(RANKS)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, **address}


@contextmanager
def swept() -> Iterator[None]:
    """Remove what DeepSpeed's op, or a rank of OpenMPI that was killed, leaves in shared memory."""
    before = set(left_behind())
    yield
    for left in set(left_behind()) - before:
        left.unlink(missing_ok=True)


def left_behind() -> Iterator[Path]:
    for pattern in ("deepspeed_*", "vader_segment.*"):
        yield from Path("/dev/shm").glob(pattern)


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


# -- what they measure ------------------------------------------------------------------------


@dataclass
class Found:
    """What is known of one library on one model."""

    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    failure: str = ""

    def cell(self) -> str:
        return f"failed: {self.failure}" if self.failure else str(Ratio.of(self.ratios))


class Ride:
    """All libraries once from the start: they come, and take turns on one model after another."""

    def __init__(self, folder: Path, found: dict[tuple[str, str], Found]) -> None:
        self.folder, self.found = folder, found
        self.parties: dict[str, Party] = {}

    def go(self, names: Sequence[str], models: Sequence[str], rounds: int) -> None:
        for name in names:
            self.start(name, models)
        for index, model in enumerate(models):
            print(f"    {MODELS[model].title}", file=sys.stderr)
            for name in list(self.parties):
                self.ask(name, models[index:], what="prepare", model=model)
            for number in range(rounds):
                self.round(number, models[index:])
        for name in list(self.parties):
            self.ask(name, (), what="close")
        for party in self.parties.values():
            party.dismiss()

    def start(self, name: str, models: Sequence[str]) -> None:
        print(f"  {PEERS[name].title}", file=sys.stderr)
        folder = self.folder / name
        folder.mkdir()
        try:
            self.parties[name] = Party(commands(name, folder), folder, RANKS)
        except Failed as failed:
            self.drop(name, models, str(failed))
        else:
            self.ask(name, models, what="check")

    def round(self, number: int, models: Sequence[str]) -> None:
        """Let each take a block of steps on the first of ``models``; the first to go changes."""
        names = list(self.parties)
        turn = number % len(names)
        taken = {}
        for name in (*names[turn:], *names[:turn]):
            if blocks := self.ask(name, models, what="block"):
                taken[name] = slowest(blocks)
        for name, seconds in taken.items():
            found = self.found[name, models[0]]
            found.seconds.append(seconds)
            found.ratios.append(seconds / taken[LOCAL])

    def ask(self, name: str, models: Sequence[str], **request: str) -> list[list[float]]:
        """Give the answers; a library that fails is out, and the cells of these models say why."""
        try:
            return self.parties[name].ask(**request)
        except Failed as failed:
            self.drop(name, models, str(failed))
            return []

    def drop(self, name: str, models: Sequence[str], why: str) -> None:
        if name == LOCAL:
            raise SystemExit(f"the local steps have failed: {why}")
        for model in models:
            self.found[name, model].failure = why
        if party := self.parties.pop(name, None):
            party.kill()


def slowest(ranks: Sequence[Sequence[float]]) -> float:
    """The median step of a block; a step takes as long as on its slowest rank."""
    return statistics.median(max(step) for step in zip(*ranks, strict=True))


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
    alone = [statistics.median(found[LOCAL, model].seconds) for model in models]
    lines = [
        row("", *(MODELS[model].title for model in models)),
        row("---", *["--:"] * len(models)),
        row(PEERS[LOCAL].title, *(f"{digits(1e3 * seconds)} ms" for seconds in alone)),
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
    parser.add_argument("--only", nargs="+", choices=ASKED, default=ASKED)
    parser.add_argument("--starts", type=int, help="of all of it (2)")
    parser.add_argument("--rounds", type=int, help="in each start (6)")
    parser.add_argument("--quick", action="store_true", help="one start of 4 rounds")
    parser.add_argument("--save", type=Path, help="write the result here")
    args = parser.parse_args()
    args.starts = args.starts or (1 if args.quick else 2)
    args.rounds = args.rounds or (4 if args.quick else 6)
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
    found = {(name, model): Found() for name in (LOCAL, *present) for model in args.models}
    for number in range(args.starts):
        print(f"start {number + 1} of {args.starts}", file=sys.stderr)
        with ExitStack() as opened:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="peers-"))
            opened.enter_context(swept())
            opened.enter_context(no_one_left())
            Ride(Path(folder), found).go([LOCAL, *present], args.models, args.rounds)
    log("\n" + "\n".join(table(args.only, args.models, absent, found)))
    if args.save is not None:
        args.save.write_text("\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
