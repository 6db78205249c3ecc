"""A run on one machine opens no port: its store is reached through the file system alone."""

import os

import pytest
import torch

from paceline.cli.run import one_machine
from tests.cli.launches import paceline

LISTENS = """
import os, re, sys
from pathlib import Path
import torch
import torch.distributed as dist

def ports(pid):
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    listening = {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inode = re.match(r"socket:.(\\d+).$", os.readlink(fd))
        except OSError:
            continue
        if inode and inode[1] in listening:
            found.append(listening[inode[1]])
    return found

dist.init_process_group("gloo", init_method=sys.argv[1] if len(sys.argv) > 1 else None)
total = torch.ones(1)
dist.all_reduce(total)
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 0:
    launchers = set(ports(os.getppid())) - set(map(int, os.environ["MINE"].split()))
    master = int(os.environ["MASTER_PORT"])
    kind = os.environ.get("PACELINE_STORE", "port")[:4]
    side = os.path.isdir(os.environ.get("PACELINE_SIDE_DOOR", ""))
    print(int(total), sorted(launchers), master in launchers, kind, side)
dist.barrier()
dist.destroy_process_group()
"""


def listening_here() -> str:
    """Ports that this process, which is the launcher, listens on already."""
    scope: dict = {}
    text = LISTENS[LISTENS.index("def ports") : LISTENS.index("dist.init_process_group")]
    exec("import os, re\nfrom pathlib import Path\n" + text, scope)
    return " ".join(map(str, scope["ports"](os.getpid())))


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LISTENS)
    return path


@pytest.mark.parametrize("method", ["env://", "tcp"])
def test_the_launcher_listens_on_no_port_and_ranks_meet_all_the_same(
    script, capsys, method, tmp_path
) -> None:
    if method == "tcp":
        text = LISTENS.replace(
            "init_method=sys.argv[1] if len(sys.argv) > 1 else None",
            'init_method="tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ), '
            'rank=int(os.environ["RANK"]), world_size=2',
        )
        script.write_text(text)
    ended = paceline(capsys, "run", "--nproc", 2, script, MINE=listening_here())
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["[0] 2 [] False unix True"]


def test_ranks_with_gpus_meet_in_a_file_that_is_gone_afterwards(
    script, capsys, monkeypatch, tmp_path
) -> None:
    """NCCL asks a store when Python has ended; here the launcher only believes in a GPU."""
    monkeypatch.setattr("paceline.cli.machine.ThisMachine.gpus", 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    ended = paceline(capsys, "run", "--nproc", 2, script, MINE=listening_here())
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["[0] 2 [] False file True"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_port_that_was_asked_for_is_opened_on_loopback(script, capsys) -> None:
    port = one_machine.unused_port()
    ended = paceline(
        capsys, "run", "--nproc", 2, "--master-port", port, script, MINE=listening_here()
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == [f"[0] 2 [{port}] True port False"]


OWN = """
import os, sys
from datetime import timedelta
from torch.distributed import TCPStore
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*where, size, is_master=False, timeout=timedelta(seconds=int(sys.argv[1])))
"""


def test_a_script_that_opens_the_store_itself_is_told_how_to_have_a_port(capsys, tmp_path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    ended = paceline(capsys, "run", "--nproc", 1, tmp_path / "own.py", 1)
    assert ended.code == 1
    assert "--master-port" in ended.err
    port = one_machine.unused_port()
    ended = paceline(capsys, "run", "--nproc", 1, "--master-port", port, tmp_path / "own.py", 60)
    assert (ended.code, ended.err) == (0, "")


AGAIN = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
assert store.add(f"seen{dist.get_rank()}", 1) == 1, "keys of an older start"
dist.barrier()
if attempt == "0" and dist.get_rank() == 1:
    sys.exit(3)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("gpus", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_that_start_again_find_an_empty_store(capsys, tmp_path, monkeypatch, gpus) -> None:
    monkeypatch.setattr("paceline.cli.machine.ThisMachine.gpus", gpus)
    (tmp_path / "again.py").write_text(AGAIN)
    ended = paceline(capsys, "run", "--nproc", 2, "--max-restarts", 1, tmp_path / "again.py")
    assert ended.code == 0, ended.err


def test_a_folder_with_a_long_name_is_not_used_for_sockets(monkeypatch, tmp_path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with one_machine.private_folder() as folder:
        assert len(str(folder.path)) < 90
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert list(long.iterdir()) == []


def test_torch_that_loads_no_backends_gets_a_port(monkeypatch) -> None:
    assert one_machine.ranks_find_sockets()
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert not one_machine.ranks_find_sockets()
    assert torch.distributed.is_available()
