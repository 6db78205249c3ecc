"""The example and the benchmark, run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.groups import capabilities

ROOT = Path(__file__).parents[1]

needs_shm = pytest.mark.skipif(
    not capabilities()["shm"].available, reason=capabilities()["shm"].reason
)


def run(script: str, *arguments: str, deadline: float) -> list[str]:
    """What the script printed, line by line; it must end well and in time."""
    command = [sys.executable, str(ROOT / script), *arguments]
    # Without the variables of a launcher: the scripts start their own ranks.
    env = {name: os.environ[name] for name in os.environ if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@needs_shm
def test_the_demo_trains_on_two_ranks_and_agrees_with_one_process() -> None:
    pytest.importorskip("sklearn")
    lines = run("examples/digits.py", "--epochs", "2", deadline=120)
    assert [line.split()[:2] for line in lines[:2]] == [["epoch", "1"], ["epoch", "2"]]
    same, alone, accuracy, summary = lines[2:]
    assert same == "all 2 ranks hold the same weights, bit for bit"
    assert float(alone.split()[-3]) < 1e-5
    assert float(accuracy.split()[-1]) > 0.8
    assert summary.startswith("2 ranks over shm: ")


@needs_shm
def test_the_demo_ends_with_an_error_when_its_ranks_do() -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(AssertionError, match="UnknownBackendError"):
        run("examples/digits.py", "--backend", "no such thing", deadline=120)


@needs_shm
def test_uneven_ranks_with_exact_weights_learn_what_one_process_does(tmp_path: Path) -> None:
    picture = tmp_path / "uneven.png"
    lines = run("examples/uneven.py", "--quick", "--save", str(picture), deadline=180)
    few, many = (int(line.split()[2]) for line in lines[:2])  # batches
    assert 2 <= few < many
    means, exact, drawn = lines[-3:]
    assert float(means.split()[-4]) > 1e-2
    assert float(exact.split()[-4]) < 1e-4
    assert picture.exists() == drawn.startswith("drawn in")


@needs_shm
def test_the_benchmark_of_join_saves_what_it_printed(tmp_path: Path) -> None:
    saved = tmp_path / "join.md"
    few = ["--models", "small", "--rounds", "1", "--save", str(saved)]
    lines = run("benchmarks/join.py", *few, deadline=180)
    assert saved.read_text().splitlines() == lines
    assert [line.split("|")[2].strip() for line in lines[-3:]] == [
        "torch, gloo",
        "paceline, gloo",
        "paceline, shm",
    ]


@needs_shm
def test_the_benchmark_measures_and_saves_what_it_printed(tmp_path: Path) -> None:
    saved = tmp_path / "results.md"
    small = ["--ranks", "2", "--sizes", "4K", "--seconds", "0.2", "--no-mpi", "--no-ddp"]
    lines = run("benchmarks/collectives.py", "--quick", *small, "--save", str(saved), deadline=120)
    assert saved.read_text().splitlines() == lines
    assert lines[0].startswith("Machine: ")
    (cell,) = (line for line in lines if line.startswith("| 2 | 4 KiB |"))
    assert len(cell.split("|")) == len(lines[2].split("|"))
    assert "they raise after" in lines[-1]
