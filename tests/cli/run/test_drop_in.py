"""What ``paceline run`` makes of a script that was written for torch alone."""

import subprocess
import sys

import pytest

from paceline import testing
from tests.cli.launches import paceline

OPENS = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

for asked in sys.argv[1:]:  # one after the other, through one store
    dist.init_process_group(*([asked] if asked != "none" else []))
    total = torch.ones(1)
    dist.all_reduce(total)
    engine = getattr(dist.group.WORLD, "backend", "torch's")
    home = DDP.__module__.split(".")[0]
    sys.stdout.write(f"{home} {dist.get_backend()} {engine} {int(total)}\\n")
    dist.destroy_process_group()
"""

SPAWNS = """
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

class Wrapped(DDP):
    pass

def train(rank, size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    home = Wrapped.__mro__[1].__module__.split(".")[0]
    sys.stdout.write(f"{home} {dist.group.WORLD.backend}\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, (2, int(sys.argv[1])), nprocs=2)
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


ALL = ["gloo", "none", "paceline"]


@pytest.mark.parametrize(
    ("options", "asked", "got", "said"),
    [
        (["--drop-in"], ALL, ["paceline paceline shm 2"] * 3, "shm (--keep-backend leaves it to"),
        (["--backend", "shm"], ALL, ["torch paceline shm 2"] * 3, "engine shm (--backend shm)"),
        ([], ALL[::2], ["torch gloo torch's 2", "torch paceline shm 2"], ""),
        pytest.param(
            ["--drop-in", "--keep-backend"],
            ALL[::2],
            ["paceline gloo torch's 2", "paceline paceline shm 2"],
            "",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--drop-in", "--backend", "gloo"],
            ALL,
            ["paceline paceline gloo 2"] * 3,
            "engine gloo (--backend gloo)",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["drop in", "engine alone", "untouched", "kept", "asked for"],
)
def test_what_a_script_for_torch_gets_from_init_process_group(
    script, capsys, options, asked, got, said
) -> None:
    ended = paceline(capsys, "run", "--nproc", 2, *options, script(OPENS), *asked)
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        mark = f"[{rank}] "
        assert [line[4:] for line in ended.out.splitlines() if line.startswith(mark)] == got
    lines = [line for line in ended.err.splitlines() if "init_process_group" in line]
    assert len(lines) == 2 * bool(said), ended.err
    assert all(said in line and line.startswith("[0] ") for line in lines)


@pytest.mark.slow
def test_ranks_that_a_script_spawns_on_a_port_of_its_own_get_all_of_it(script, capsys) -> None:
    port = testing._free_port()
    ended = paceline(capsys, "run", "--nproc", 1, "--drop-in", script(SPAWNS), port)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["[0] paceline shm"] * 2
    assert 'init_process_group("gloo") opened paceline\'s engine shm' in ended.err


MEETS_ELSEWHERE = """
import os, socket
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}?rank=0&world_size=1"))
store.set("key", "value")  # rank 0 of its own ranks opened it
print(rank, size, store.get("key"), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
"""


def test_a_script_that_meets_on_a_port_of_its_own_opens_a_store_there_without_drop_in_too(
    script, capsys
) -> None:
    ended = paceline(capsys, "run", "--nproc", 1, script(MEETS_ELSEWHERE))
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["[0] 0 1 b'value' True"]


def test_importing_torch_names_the_backend_and_imports_nothing_of_paceline() -> None:
    code = (
        "import sys, torch; print(torch.distributed.Backend.PACELINE, 'paceline' in sys.modules, "
        "'msgspec' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (out.stdout, out.stderr) == ("paceline False False\n", "")


def test_importing_torch_goes_on_when_paceline_cannot_be_imported(tmp_path) -> None:
    (tmp_path / "paceline.py").write_text("raise OSError('the disk is gone')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch; print(torch.ones(1))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PACELINE_DROP_IN": "1"},
    )
    assert out.stdout == "tensor([1.])\n", out.stderr
    assert "could not prepare torch" in out.stderr
    assert "OSError: the disk is gone" in out.stderr


ASKS = """
import os
import urllib.request

import torch
import torch.distributed as dist

dist.init_process_group("paceline")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    told = ""
    while 'paceline_collectives_total{rank="1"}' not in told:  # the test has a deadline
        url = f"http://127.0.0.1:{os.environ['PACELINE_METRICS']}/metrics"
        told = urllib.request.urlopen(url).read().decode()
    print("both" if 'paceline_collectives_total{rank="0"}' in told else told)
dist.barrier()
dist.destroy_process_group()
"""


def test_one_endpoint_has_the_numbers_of_all_ranks_of_the_host(script, capsys) -> None:
    port = testing._free_port()
    ended = paceline(capsys, "run", "--nproc", 2, "--metrics", port, script(ASKS))
    assert (ended.code, ended.out) == (0, "[0] both\n"), ended.err
