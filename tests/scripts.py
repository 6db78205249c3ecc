"""Scripts of this repository, run as a user runs them or, which is quicker, in forked ranks."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.testing import Meeting, spawn_ranks

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: str) -> list[str]:
    """What the script printed, line by line; it must end well."""
    command = [sys.executable, str(ROOT / script), *arguments]
    # Without the variables of a launcher: the scripts start their own ranks.
    env = {name: os.environ[name] for name in os.environ if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def on_ranks(ranks: int, script: str, *arguments: str) -> list[str]:
    """What all ranks of the script printed, rank by rank, under a launcher's variables."""
    said = spawn_ranks(ranks, _as_script, str(ROOT / script), arguments)
    return [line for lines in said for line in lines]


def _as_script(meeting: Meeting, script: str, arguments: Sequence[str]) -> list[str]:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(script, run_name="__main__")
    return said.getvalue().splitlines()
