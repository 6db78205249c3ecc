"""Elastic jobs on several hosts: network namespaces with host names of their own, and a cable."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from paceline._doors import JobKey
from tests.groups.netns import Host, two_hosts, unable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(unable()), reason=unable()),
]
DEADLINE = 600.0  # seconds
TRAIN = """
import hashlib, os, time
import torch
from torch.utils.data import TensorDataset
import paceline
from paceline.data import ShardedLoader

torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 4), torch.randn(480, 1))
group = paceline.elastic.group()
model = torch.nn.Linear(4, 1)
ddp = paceline.DistributedDataParallel(model, process_group=group, shards=4)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
loader = ShardedLoader(data, shards=4, batch=8, group=group)
with paceline.elastic.job(ddp, optimizer, loader) as job:
    for number, step in enumerate(job):
        for shard, (x, y) in step:
            with ddp.shard(shard):
                torch.nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 5:
            print("fifth step", flush=True)
        time.sleep(0.05)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
"""


@contextmanager
def agent(host: Host, name: str, folder: Path, *options: object) -> Iterator[subprocess.Popen[str]]:
    """``paceline run`` on a host, as a process whose output can be read; ended with the block."""
    python = [sys.executable, "-m", "paceline", "run", "--elastic", "--nproc", "1"]
    meet = ["--rdzv-endpoint", "192.0.2.1:29499", "--key", str(folder / "key")]
    command = [*python, *meet, *map(str, options), str(folder / "train.py")]
    inside = f"hostname {name} && exec timeout -k 5 {DEADLINE:g} {' '.join(command)}"
    with subprocess.Popen(
        ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", inside],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": host.interface},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture
def hosts(tmp_path) -> Iterator[tuple[Host, Host]]:
    (tmp_path / "train.py").write_text(TRAIN)
    JobKey.make().write(tmp_path / "key")
    with two_hosts() as found:
        yield found


def weights(output: str) -> set[str]:
    return {line.split()[-1] for line in output.splitlines() if " weights " in line}


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """What it says up to a line with ``words``; the process has a deadline."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


def test_members_of_two_hosts_train_together(hosts, tmp_path) -> None:
    with ExitStack() as stack:
        agents = [
            stack.enter_context(agent(host, name, tmp_path, "--nnodes", 2))
            for host, name in zip(hosts, "ab", strict=True)
        ]
        said = [process.communicate(timeout=DEADLINE)[0] for process in agents]
    assert [process.returncode for process in agents] == [0, 0], said
    assert len(weights(said[0]) | weights(said[1])) == 1
    assert "members 0, 1 train" in said[0]


def test_a_host_that_is_cut_off_ends_and_the_other_goes_on(hosts, tmp_path) -> None:
    options = ("--nnodes", "1:2", "--heartbeat", 4)
    with (
        agent(hosts[0], "a", tmp_path, *options) as first,
        agent(hosts[1], "b", tmp_path, *options) as second,
    ):
        said = read_until(second, "fifth step")
        cut = ["ip", "-n", hosts[1].namespace, "link", "set", hosts[1].interface, "down"]
        subprocess.run(cut, check=True, timeout=20)
        said += second.communicate(timeout=DEADLINE)[0]
        alone = first.communicate(timeout=DEADLINE)[0]
    assert second.returncode == 2, said
    assert "the process that keeps the roster has not answered for 4 s" in said
    assert first.returncode == 0, alone
    assert len(weights(alone)) == 1


# The first host goes on slowly until the other's member is about to come, and in.
WAITS = """        if number > 5 and group.size() == 1:
            while not os.path.exists(f"{os.path.dirname(os.path.abspath(__file__))}/comes"):
                time.sleep(0.05)
            time.sleep(0.3)
        time.sleep(0.05)
"""
COMES = """
if os.uname().nodename == "b":
    open(f"{os.path.dirname(os.path.abspath(__file__))}/comes", "x").close()
with paceline.elastic.job("""


def test_a_host_that_comes_later_joins(hosts, tmp_path) -> None:
    script = TRAIN.replace("480", "1600").replace("        time.sleep(0.05)\n", WAITS)
    (tmp_path / "train.py").write_text(script.replace("\nwith paceline.elastic.job(", COMES))
    with agent(hosts[0], "a", tmp_path, "--nnodes", "1:2") as first:
        said = read_until(first, "fifth step")
        with agent(hosts[1], "b", tmp_path, "--nnodes", "1:2") as second:
            late = second.communicate(timeout=DEADLINE)[0]
        said += first.communicate(timeout=DEADLINE)[0]
    assert (first.returncode, second.returncode) == (0, 0), said + late
    assert "train on, with 1 new" in said
    assert len(weights(said) | weights(late)) == 1, said + late
