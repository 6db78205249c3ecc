"""The frame of the command line: its help, its version, and what it imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline as package
from paceline.cli.app import COMMANDS
from tests.cli.launches import paceline

HOME = Path(package.__file__).parent / "cli"


def test_help_lists_every_command_with_its_line(capsys) -> None:
    for words in (["--help"], ["-h"]):
        shown = paceline(capsys, *words, COLUMNS="120", TERM="dumb")
        assert (shown.code, shown.err) == (0, "")
        for name, line in COMMANDS.items():
            assert name in shown.out
            assert line in shown.out


def test_nothing_asked_shows_the_help_and_no_complaint(capsys) -> None:
    shown = paceline(capsys)
    assert "Usage" in shown.out + shown.err
    assert "paceline: " not in shown.err


def test_a_commands_help_has_its_options_and_no_broken_lines(capsys) -> None:
    shown = paceline(capsys, "run", "--help", COLUMNS="200", TERM="dumb")
    assert shown.code == 0
    assert "--drop-in" in shown.out
    assert "so scripts for torchrun run unchanged, and accepts torchrun's names" in shown.out
    assert "--standalone" not in shown.out


def test_the_version_is_the_packages(capsys) -> None:
    assert paceline(capsys, "--version").out == f"paceline {package.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["docter"], "No such command 'docter'"),
        (["--verbose"], "No such option: --verbose"),
        (["run", "--verbose", "x.py"], "No such option: --verbose"),
    ],
)
def test_a_misuse_is_told_in_one_line(capsys, words: list[str], said: str) -> None:
    shown = paceline(capsys, *words)
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith(f"paceline: {said}")
    assert shown.err.count("\n") == 1
    assert "--help" in shown.err
    assert "?." not in shown.err


def test_a_disk_that_is_full_is_told_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        child = subprocess.run(
            [sys.executable, "-m", "paceline", "bench"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert child.stderr == "paceline: its output could not be written: No space left on device.\n"
    assert child.returncode == 1


def test_every_command_is_a_function_named_like_its_file_or_folder() -> None:
    for name in COMMANDS:
        folder, file = HOME / name / "command.py", HOME / f"{name}.py"
        assert folder.exists() != file.exists()
        tree = ast.parse((folder if folder.exists() else file).read_text())
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_a_command_is_imported_only_when_it_is_asked_for() -> None:
    script = (
        "import sys, paceline.cli; paceline.cli.main(['run', '--help']);"
        "print([m for m in sys.modules if m in ('paceline.cli.demo', 'paceline.cli.run')])"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert child.stdout.splitlines()[-1] == "['paceline.cli.run']"


@pytest.mark.skipif(
    not hasattr(package, "_is_command_line"), reason="the package imports torch at once"
)
def test_the_help_does_not_wait_for_torch() -> None:
    script = (
        "import runpy, sys, atexit;"
        "atexit.register(lambda: print('torch' in sys.modules));"
        "sys.argv = ['paceline', '--help'];"
        "runpy.run_module('paceline', run_name='__main__')"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert child.stdout.splitlines()[-1] == "False"
    assert child.returncode == 0
