"""``paceline run`` on one machine, with real processes."""

import json
import os

import pytest

from paceline import testing
from paceline.cli import say
from paceline.cli.run import verdict
from tests.cli.launches import DEADLINE, paceline, start

ENVIRONMENT = """
import json, os, sys
wanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
          "GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS", "PACELINE_BACKEND",
          "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "PACELINE_DROP_IN")
found = {name: os.environ.get(name) for name in wanted}
print(json.dumps(found | {"argv": sys.argv[1:]}))
"""

TRAIN = """
import paceline
import torch, torch.distributed as dist
import torch.nn.parallel
dist.init_process_group("paceline")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
print(type(model).__module__, paceline.groups.Group.wrap(dist.group.WORLD).backend)
assert dist.get_world_size() == 2
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    def write(text: str, name: str = "script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def by_rank(out: str) -> dict[int, list[str]]:
    """Lines of each rank, without their marks."""
    found: dict[int, list[str]] = {}
    for line in out.splitlines():
        mark, _, text = line.partition(" ")
        found.setdefault(int(mark.strip("[]")), []).append(text)
    return found


def test_ranks_find_what_torchrun_would_have_set_and_the_scripts_arguments_are_its_own(
    script, capsys, monkeypatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(verdict, "LONE", DEADLINE)  # one may end long after the other
    words = ["--nproc", "9", "-m", "--", "$a $$b", "rank ${local_rank}", ""]
    path = script(ENVIRONMENT)
    ended = paceline(capsys, "run", "--nproc", 2, "--backend", "gloo", path, *words)
    assert (ended.code, ended.err) == (0, "")
    ranks = {rank: json.loads(lines[0]) for rank, lines in by_rank(ended.out).items()}
    assert sorted(ranks) == [0, 1]
    for rank, seen in ranks.items():
        assert seen["RANK"] == seen["LOCAL_RANK"] == str(rank)
        assert seen["WORLD_SIZE"] == seen["LOCAL_WORLD_SIZE"] == "2"
        assert (seen["GROUP_RANK"], seen["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert seen["MASTER_ADDR"] == "127.0.0.1"
        assert seen["PACELINE_BACKEND"] == "gloo"
        assert int(seen["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
        assert seen["argv"] == [*words[:-2], f"rank {rank}", ""]
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]


def test_torchruns_spellings_and_the_users_threads_are_kept(script, capsys) -> None:
    ended = paceline(
        capsys,
        *("run", "--standalone", "--nnodes=1", "--nproc_per_node=1", "--max_restarts", "0"),
        script(ENVIRONMENT),
        OMP_NUM_THREADS="3",
    )
    assert ended.code == 0
    assert json.loads(by_rank(ended.out)[0][0])["OMP_NUM_THREADS"] == "3"


def test_without_a_number_there_is_a_rank_for_each_core_and_that_is_said(
    script, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("paceline.cli.machine.cores", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(verdict, "LONE", DEADLINE)  # one may end long after the other
    ended = paceline(capsys, "run", script("print('here')"))
    assert sorted(ended.out.splitlines()) == ["[0] here", "[1] here"]
    assert ended.err == "paceline: 2 ranks, one for each core (torch sees no GPU)\n"


def test_the_port_can_be_chosen_and_only_loopback_listens(script, capsys) -> None:
    port = testing._free_port()
    listening = """
import os
port = int(os.environ["MASTER_PORT"])
rows = [row.split() for name in ("tcp", "tcp6") for row in open(f"/proc/net/{name}")]
print(port, [row[1].split(":")[0] for row in rows if row[1].endswith(f":{port:04X}")
      and row[3] == "0A"])
"""
    ended = paceline(capsys, "run", "--nproc", 1, "--master-port", port, script(listening))
    assert by_rank(ended.out) == {0: [f"{port} ['0100007F']"]}


def test_lines_are_not_torn_and_carry_their_rank(script, capsys) -> None:
    many = """
import os, sys
for i in range(300):
    sys.stdout.write(f"{os.environ['RANK']} ")
    sys.stdout.write(f"{i}\\n")
print("no end", end="")
"""
    ended = paceline(capsys, "run", "--nproc", 3, script(many))
    assert by_rank(ended.out) == {
        rank: [*(f"{rank} {i}" for i in range(300)), "no end"] for rank in range(3)
    }


def test_stdout_can_be_shown_of_some_ranks_alone_and_stderr_stays(
    script, capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(verdict, "LONE", DEADLINE)  # one may end long after the others
    text = "import sys; print('out'); print('err', file=sys.stderr)"
    options = ["--nproc", 3, "--show", "1,2", "--record", tmp_path / "run"]
    ended = paceline(capsys, "run", *options, script(text))
    assert sorted(by_rank(ended.out)) == [1, 2]
    *lines, last = ended.err.splitlines()
    assert sorted(by_rank("\n".join(lines))) == [0, 1, 2]
    assert "nothing was recorded into" in last, "it made no group"


def test_a_rank_that_has_ended_while_another_runs_is_told(
    script, capsys, tmp_path, monkeypatch
) -> None:
    told, note = tmp_path / "told", say.note

    def tell(words: str) -> None:
        note(words)
        told.write_text("now")  # rank 1 waits for it

    os.mkfifo(told)
    monkeypatch.setattr(say, "note", tell)
    monkeypatch.setattr(verdict, "LONE", 0.0)
    text = "import os, sys\nif os.environ['RANK'] == '1':\n    open(sys.argv[1]).read()\n"
    ended = paceline(capsys, "run", "--nproc", 2, script(text), told)
    assert ended.code == 0
    lone = "rank 0 ended 0 s ago with exit code 0; rank 1 still runs, maybe waiting for it"
    assert ended.err == f"paceline: {lone}\n"


def test_a_failure_starts_all_ranks_again_as_often_as_asked(script, capsys) -> None:
    text = """
import os
turn = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("turn", turn, os.environ["MASTER_PORT"])
if turn != "2" and os.environ["RANK"] == "1":
    raise ValueError("not yet")
"""
    ended = paceline(capsys, "run", "--nproc", 2, "--max-restarts", 2, script(text))
    assert ended.code == 0
    turns = [line.split()[1] for line in by_rank(ended.out)[1]]
    assert turns == ["0", "1", "2"]
    ports = {line.split()[2] for line in by_rank(ended.out)[1]}
    assert len(ports) == 3  # every turn has a store of its own
    assert ended.err.count("all ranks start again") == 2


def test_drop_in_replaces_torchs_names_the_backend_is_the_one_asked_for_and_the_run_is_recorded(
    script, capsys, tmp_path
) -> None:
    where = tmp_path / "runs" / "first"
    options = ["--nproc", 2, "--drop-in", "--backend", "gloo", "--record", where]
    where.mkdir(parents=True)
    (where / "rank-00002.json").touch()  # of an earlier run, with more ranks
    ended = paceline(capsys, "run", *options, script(TRAIN))
    assert ended.code == 0, ended.err
    assert "held a run of 1 ranks, which this one replaces" in ended.err
    assert by_rank(ended.out) == {rank: ["paceline.ddp.wrapper gloo"] for rank in (0, 1)}
    assert sorted(path.name for path in where.iterdir()) == ["rank-00000.json", "rank-00001.json"]


def test_the_installed_command_starts_a_module_and_passes_its_code_on(tmp_path) -> None:
    (tmp_path / "tool.py").write_text("import sys; print('here', sys.argv[1:]); sys.exit(7)")
    launched = start("run", "--nproc", 1, "-m", "tool", "--flag", PYTHONPATH=str(tmp_path))
    out, err = launched.communicate(timeout=300)
    assert (out, launched.returncode) == ("[0] here ['--flag']\n", 7)
    assert err == "paceline: rank 0 of 1 failed first: it ended with exit code 7 (at tool.py:1)\n"


@pytest.mark.slow
def test_a_spawned_data_loader_finds_the_scripts_dataset(script, capsys) -> None:
    text = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return i * i

if __name__ == "__main__":
    loader = DataLoader(Squares(), 2, num_workers=1, multiprocessing_context="spawn")
    print([batch.tolist() for batch in loader])
"""
    ended = paceline(capsys, "run", "--nproc", 1, "--drop-in", script(text))
    assert by_rank(ended.out) == {0: ["[[0, 1], [4, 9]]"]}, ended.err


def test_showing_a_rank_that_is_not_there_is_an_error_and_nothing_is_started(
    script, capsys
) -> None:
    ended = paceline(capsys, "run", "--nproc", 2, "--show", 5, script("print('started')"))
    assert (ended.code, ended.out) == (2, "")
    assert "--show asks for rank 5, and there are 2" in ended.err
