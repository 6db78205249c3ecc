"""Faults in real elastic jobs: the weights at the end are those of a run without any."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
DEADLINE = 600.0  # seconds
TRAIN = """
import ctypes, hashlib, os, signal, socket, struct, sys, time
from datetime import timedelta
import torch
from torch.utils.data import TensorDataset
import paceline
from paceline.data import ShardedLoader

STEPS = 60
me = int(os.environ.get("PACELINE_MEMBER", "0"))
faults = dict(word.split("=") for word in sys.argv[1:])  # member@step=what

def keeper():
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(os.environ["PACELINE_MEMBERS"])
        found = door.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", found)[0]

def go_wrong(what):
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "keeper":
        os.kill(keeper(), signal.SIGKILL)
    elif what.startswith("gil"):
        ctypes.PyDLL(None).sleep(int(what[3:]))  # unlike CDLL, it keeps the interpreter's lock
    elif what == "linger":
        time.sleep(3600)
    elif what == "leave":
        os.kill(os.getpid(), signal.SIGTERM)
    elif what == "raise":
        raise ValueError("of this member alone")

torch.manual_seed(0)
if f"{me}@start" in faults:
    go_wrong(faults[f"{me}@start"])
data = TensorDataset(torch.randn(8 * STEPS, 4), torch.randn(8 * STEPS, 1))
limit = timedelta(seconds=float(faults.get("timeout", 600)))
group = paceline.elastic.group(timeout=limit)
model = torch.nn.Linear(4, 1)
ddp = paceline.DistributedDataParallel(model, process_group=group, shards=4)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
loader = ShardedLoader(data, shards=4, batch=8, group=group)
with paceline.elastic.job(ddp, optimizer, loader, timeout=limit) as job:
    for step in job:
        for shard, (x, y) in step:
            fault = faults.pop(f"{me}@{step.number}", "")
            with ddp.shard(shard):
                torch.nn.functional.mse_loss(ddp(x), y).backward()
            go_wrong(fault)
        optimizer.step()
        optimizer.zero_grad()
        if "PACELINE_MEMBER" in os.environ:
            time.sleep(0.02)
    finished = job.finished
if finished:
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
    if "write" in faults:
        draft = f"{faults['write']}/draft {me}"
        with open(draft, "w") as file:
            file.write(hashlib.sha256(weights).hexdigest())
        os.replace(draft, f"{faults['write']}/weights {me}")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def expected(script) -> str:
    """The weights of one process that nobody disturbs."""
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    return found.stdout.split()[-1]


def run(
    script: Path, ranks: int, *faults: str, options: tuple[object, ...] = ()
) -> tuple[int, str]:
    start = [sys.executable, "-m", "paceline", "run", "--elastic", "--nproc", str(ranks)]
    ended = subprocess.run(
        [*start, *map(str, options), script, *faults],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return ended.returncode, ended.stdout


def weights(said: str) -> set[str]:
    return {line.split()[-1] for line in said.splitlines() if " weights " in line}


@pytest.mark.parametrize(
    ("ranks", "spares", "faults"),
    [
        (2, 1, ("0@10=kill", "1@10=kill", "2@10=kill", "1@30=keeper", "0@30=keeper")),
        (3, 0, ("0@10=kill", "1@10=kill")),  # two at once, and all but one
        (2, 0, ("0@10=stop", "2@start=kill")),  # and the one that comes in its place
        (2, 0, ("1@5=keeper", "0@20=leave")),
        (3, 0, ("1@12=raise",)),
    ],
    ids=["kills", "all-but-one", "stop-and-joiner", "keeper-and-leave", "raise"],
)
def test_the_weights_are_those_of_a_run_without_faults(
    script, expected, ranks, spares, faults
) -> None:
    code, said = run(script, ranks, *faults, options=("--spares", spares))
    assert code == 0, said
    assert weights(said) == {expected}, said


def test_a_member_that_keeps_the_interpreter_for_two_seconds_is_not_lost(script, expected) -> None:
    code, said = run(script, 2, "1@10=gil2")
    assert code == 0, said
    assert "lost" not in said
    assert weights(said) == {expected}


@pytest.mark.parametrize(
    ("fault", "options"),
    [("1@10=gil60", ("--heartbeat", 6)), ("1@10=gil70", ())],
    ids=["6 s", "by default"],
)
def test_a_member_that_keeps_the_interpreter_for_longer_than_the_heartbeat_is_named_and_replaced(
    script, expected, fault, options
) -> None:
    code, said = run(script, 2, fault, options=options)
    assert code == 0, said
    assert "member 1 is ended: nothing was heard from it for" in said
    assert weights(said) == {expected}


def test_a_member_that_does_not_come_back_from_its_step_is_ended_and_replaced(
    script, expected
) -> None:
    code, said = run(script, 3, "1@10=linger", "timeout=10")
    assert code == 0, said
    assert "member 1 is ended: others waited" in said
    assert weights(said) == {expected}


def test_a_job_whose_launcher_is_killed_comes_to_its_end(script, expected, tmp_path) -> None:
    start = [sys.executable, "-m", "paceline", "run", "--elastic", "--nproc", "2"]
    with subprocess.Popen(
        [*start, script, f"write={tmp_path}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as agent:
        assert agent.stderr is not None
        watchdog = threading.Timer(DEADLINE, agent.kill)
        watchdog.start()
        assert any("members 0, 1 train" in line for line in agent.stderr)
        watchdog.cancel()
        agent.kill()
    found = [tmp_path / f"weights {member}" for member in (0, 1)]
    until = time.monotonic() + DEADLINE
    while not all(path.exists() for path in found):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert [path.read_text() for path in found] == [expected] * 2
