"""The benchmark of lost hosts: it finds its cases."""

import subprocess
import sys
from pathlib import Path

import pytest

HOSTS = Path(__file__).parents[1] / "benchmarks" / "chaos_hosts.py"


@pytest.mark.slow
def test_the_benchmark_of_lost_hosts_finds_its_cases() -> None:
    found = subprocess.run(
        [sys.executable, str(HOSTS), "--collect-only"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
