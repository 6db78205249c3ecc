"""Programs as others write them, under torch and under paceline: the same losses, line by line.

Five kinds, each in the style of a public one and none of them aware of paceline. ``make programs``
runs them; what they print has six digits, and sums over two ranks are the same bits in any order.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = sorted(
    path.stem for path in HERE.glob("*.py") if not path.stem.startswith(("test", "_"))
)
NUMBER = re.compile(r"-?\d+\.\d+")

pytestmark = pytest.mark.slow


def run(name: str, *options: str) -> tuple[list[str], str]:
    """The lines that rank 0 printed, and what was said on stderr."""
    command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", "--threads", "1", *options]
    ran = subprocess.run(
        [*command, str(HERE / f"{name}.py")], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stdout.splitlines() if line.startswith("[0] ")], ran.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_the_same_numbers_under_torch_and_under_paceline(name: str) -> None:
    torchs, _ = run(name)
    ours, said = run(name, "--drop-in")
    assert "opened paceline's engine shm" in said
    assert len(torchs) >= 3
    assert any(NUMBER.search(line) for line in torchs)
    assert ours == torchs


def test_five_kinds_of_programs_are_here() -> None:
    assert PROGRAMS == ["gan", "gpt", "imagenet", "ppo", "trainer"]
