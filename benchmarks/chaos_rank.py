"""One member of ``chaos.py``: trains a small model, and writes down what it commits, and when.

A parameter for every sample goes down by one each time that the sample is in a committed step, so
that the weights at the end say how often each was seen. SIGUSR1 lets it cut its own TCP
connections, as a network would that breaks between healthy processes. What the job logs about its
recoveries is written down too: when this member met the others, knew the roster, and had it open.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import DistributedDataParallel, elastic
from paceline.data import ShardedLoader

SHARDS, BATCH, SAMPLES = 6, 24, 2400  # 100 steps in an epoch
FULL, SLOW = 3, 0.3  # ranks that a run has, and seconds of a step while there are fewer


class Counting(nn.Module):
    """A small net, and a number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))
        self.seen = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        return (self.net(inputs) - inputs).square().mean() + self.seen[numbers].mean()


def digest(model: nn.Module) -> str:
    bits = hashlib.sha256()
    for tensor in model.state_dict().values():
        bits.update(tensor.contiguous().numpy().tobytes())
    return bits.hexdigest()[:16]


def cut_connections() -> None:
    """Shut down this process's TCP connections."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.shutdown(socket.SHUT_RDWR)


class Moments(logging.Handler):
    """Writes down the moments of a recovery; ``file`` is the descriptor of the log."""

    WORDS = (("meets", "meets"), ("is open", "opened"), ("roster", "decided"))

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        logger = logging.getLogger("paceline.elastic.crew")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        now, text = time.monotonic(), record.getMessage()
        found = next((name for word, name in self.WORDS if word in text), "")
        if found:
            os.write(self._file, f"{now} {os.getpid()} {found}\n".encode())


def used() -> str:
    """Descriptors, threads and resident MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return f"{len(os.listdir('/proc/self/fd'))} {threading.active_count()} {megabytes:.1f}"


def rest(log: Path, step: int, ranks: int, pause: float) -> None:
    """Pause; once the steps that are due by the next fault are done, until that one comes.

    With fewer ranks steps go on, slowly, since others join between two.
    """
    due, hurry = log.with_suffix(".due"), log.with_suffix(".hurry")

    def is_ahead() -> bool:
        return due.exists() and step >= int(due.read_text() or "0") and not hurry.exists()

    time.sleep(pause)
    if ranks < FULL and is_ahead():
        time.sleep(SLOW)
    while ranks == FULL and is_ahead():
        time.sleep(0.005)


def main(log: str, steps: int, pause: float) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, lambda *_: cut_connections())
    torch.manual_seed(int(os.environ.get("PACELINE_MEMBER", "0")))  # the weights come from rank 0's
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    Moments(file)
    hurry = Path(log).with_suffix(".hurry")  # no faults will come any more
    group = elastic.group()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 16, generator=generator), torch.arange(SAMPLES))
    loader = ShardedLoader(data, shards=SHARDS, batch=BATCH, group=group)
    torch.manual_seed(0)
    model = Counting()
    ddp = DistributedDataParallel(model, process_group=group, shards=SHARDS)
    optimizers = [
        torch.optim.AdamW(model.net.parameters(), lr=1e-3),
        torch.optim.SGD([model.seen], lr=float(BATCH)),
    ]
    epochs = max(1, steps // (SAMPLES // BATCH))
    with elastic.job(ddp, optimizers, loader, epochs=epochs) as job:
        for step in job:
            for shard, (inputs, numbers) in step:
                with ddp.shard(shard):
                    ddp(inputs, numbers).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            place = f"{step.number} {group.rank()} {os.getpid()} {group.size()}"
            os.write(file, f"{time.monotonic()} {place} {used()}\n".encode())
            if pause and not hurry.exists():
                rest(Path(log), step.number, group.size(), pause)
        if group.rank() == 0 and job.finished:
            times = (-model.seen.detach()).round()
            once = bool((times == epochs).all())
            print(f"{'each sample once an epoch' if once else 'samples lost or seen twice'}: "
                  f"{int(times.min())} to {int(times.max())} times in {epochs}")  # fmt: skip
            print(f"digest {digest(model)}", flush=True)
    group.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
