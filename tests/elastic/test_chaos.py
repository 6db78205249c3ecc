"""A part of ``make chaos``."""

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_a_killed_rank_and_a_killed_keeper_change_no_bit(engine: str) -> None:
    words = ["--engines", engine, "--faults", "rank", "keeper", "--steps", "400"]
    command = [sys.executable, str(CHAOS), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| *all of it* | {engine} | | | same bits |" in done.stdout
