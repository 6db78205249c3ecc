"""Ranks started by others: by a real mpirun, by Ray, by srun as far as its environment goes."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.machine import cores
from paceline.cli.run.on_ray import environments
from paceline.cli.run.ray_actor import Seat
from tests.cli.launches import FOREIGN, paceline, start

ABOUT = """
import os, sys
print("rank", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"],
      os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
for both_have_spoken in sys.argv[1:]:  # a named pipe, which opens when both ranks open it
    open(both_have_spoken, "rw"[int(os.environ["RANK"])]).close()
raise SystemExit(5 if os.environ["RANK"] == "1" else 0)
"""
_RAY = importlib.util.find_spec("ray")
HAS_RAY = _RAY is not None and _RAY.origin is not None  # not just a folder of that name


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(ABOUT)
    return path


@pytest.fixture
def both_have_spoken(tmp_path):
    """Rank 1 fails after this, and whoever started the two may end rank 0 then."""
    os.mkfifo(tmp_path / "both")
    return tmp_path / "both"


def test_under_srun_the_process_becomes_its_rank_and_keeps_its_code(script) -> None:
    task = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node7",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
    }
    launched = start("run", script, **task)
    out, err = launched.communicate(timeout=600)
    assert out.split()[:5] == ["rank", "1", "2", "1", "127.0.0.1"]
    assert (err, launched.returncode) == ("", 5)


# Starts what it is given twice, as srun would on two machines; both are this one.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE='1(x2)'
export SLURM_STEP_NODELIST=127.0.0.1 SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_LOCALID=0
SLURM_PROCID=0 SLURM_NODEID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_NODEID=1 "$@"; second=$?
wait $first && exit $second
"""


@pytest.mark.slow
def test_the_example_for_slurm_trains_on_two_machines(tmp_path) -> None:
    here = Path(__file__).parents[3]
    tools = {"srun": SRUN, "paceline": f'#!/bin/bash\nexec {sys.executable} -m paceline "$@"\n'}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    trained = subprocess.run(
        ["bash", "examples/slurm.sh"],
        cwd=here,
        env=environ | {"PATH": f"{tmp_path}:{environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    assert f"{2 * cores()} ranks" in trained.stdout
    assert not list(here.glob(".paceline-key-*"))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_under_mpirun_the_processes_become_its_ranks(script, both_have_spoken) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout:
        pytest.skip("mpirun is not Open MPI's")
    words = [sys.executable, "-m", "paceline", "run", script, both_have_spoken]
    launched = subprocess.run(
        ["mpirun", "--oversubscribe", "-n", "2", *words],
        env=environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = sorted(line.split() for line in launched.stdout.splitlines() if "rank" in line)
    assert [line[1:5] for line in lines] == [
        ["0", "2", "0", "127.0.0.1"],
        ["1", "2", "1", "127.0.0.1"],
    ]
    assert lines[0][5] == lines[1][5]
    assert launched.returncode == 5


# Ray.


def test_seats_on_a_cluster_become_what_torchrun_would_set() -> None:
    seats = [Seat("a", "10.0.0.1", "3"), Seat("a", "10.0.0.1", "1"), Seat("b", "10.0.0.2", "0")]
    found = environments(seats, 4000)
    assert [own["RANK"] for own in found] == ["0", "1", "2"]
    assert [own["LOCAL_RANK"] for own in found] == ["0", "1", "0"]
    assert [own["LOCAL_WORLD_SIZE"] for own in found] == ["2", "2", "1"]
    assert [own["GROUP_RANK"] for own in found] == ["0", "0", "1"]
    assert [own["CUDA_VISIBLE_DEVICES"] for own in found] == ["3,1", "3,1", "0"]
    assert {own["MASTER_ADDR"] for own in found} == {"10.0.0.1"}
    (alone,) = environments([Seat("a", "10.0.0.1", "")], 4000)
    assert alone["MASTER_ADDR"] == "127.0.0.1"
    assert "CUDA_VISIBLE_DEVICES" not in alone


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_its_option_says_how_to_get_it(script, capsys) -> None:
    ended = paceline(capsys, "run", "--ray", "local", "--nproc", 2, script)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "paceline: Ray is not installed here. Install it with: pip install 'paceline[ray]'.\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_on_a_ray_cluster_the_script_runs_and_its_failure_is_told(script, both_have_spoken) -> None:
    launched = start("run", "--ray", "local", "--nproc", 2, script, both_have_spoken)
    out, err = launched.communicate(timeout=600)
    assert sorted(line[:8] for line in out.splitlines()) == ["[0] rank", "[1] rank"]
    assert "rank 1 of 2 failed first: it ended with exit code 5 (at script.py:7)" in err
    assert launched.returncode == 5
