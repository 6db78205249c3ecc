"""Ranks under the launcher ask each other without a port of their own, on one machine or two."""

import socket
from pathlib import Path

import pytest

from paceline._doors import JobKey
from tests.cli.launches import paceline, start
from tests.cli.run.test_no_port import LISTENS
from tests.scripts import ROOT

ASK = """
import paceline
from paceline.recorder.places import is_far
from paceline.recorder.watch import watch
from tests.recorder.patience import be_patient

be_patient(100)
group = paceline.new_group(sys.argv[1])
group.barrier()
listens = watch.peers._listener
other = 1 - group.rank()
said = watch.peers.hear(group.board, [other])[other]
far = is_far(watch.peers.known(group.board, 60)[other])
group.barrier()
folder = Path(listens.path).parent
print(said.rank, far, folder.name, oct(folder.stat().st_mode & 0o777), ports(os.getpid()))
group.barrier()
group.shutdown()
"""
PORTS = LISTENS[: LISTENS.index("dist.init_process_group")]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PORTS + ASK)
    return path


@pytest.mark.slow
def test_ranks_of_one_machine_have_no_port(script: Path, capsys) -> None:
    ended = paceline(capsys, "run", "--nproc", 2, script, "shm", PYTHONPATH=str(ROOT))
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == [
        "[0] 1 False side 0o700 []",
        "[1] 0 False side 0o700 []",
    ]


@pytest.mark.slow
def test_ranks_of_two_machines_ask_each_other_through_their_launchers(
    script: Path, tmp_path: Path
) -> None:
    key = tmp_path / "job.key"
    JobKey.make().write(key)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["run", "--nnodes", 2, "--nproc", 1, "--master-addr", "127.0.0.1", "--key", key]
    words += ["--master-port", port, "--node-rank"]
    launched = [start(*words, n, script, "gloo", PYTHONPATH=str(ROOT)) for n in (0, 1)]
    said = [each.communicate(timeout=300) for each in launched]
    assert [each.returncode for each in launched] == [0, 0], said
    assert said[0][0].startswith("[0] 1 True side 0o700 ")
    assert said[1][0].startswith("[1] 0 True side 0o700 ")
