"""``paceline bench``: which benchmarks there are, and what comes of running some."""

from pathlib import Path

import pytest
import typer

from paceline.cli import bench as command
from paceline.cli import main
from paceline.cli.bench import find_benchmarks, find_folder, question_in, read_benchmark

GOOD = '''"""Is one more than
nought?

    python benchmarks/good.py --save results.md      about a second
"""
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
print("1 > 0", args.quick)
if args.save:
    open(args.save, "w").write(f"Machine: this one, quick: {args.quick}")
'''
BAD = '''"""Does it work?"""
import argparse, sys
argparse.ArgumentParser().add_argument("--save")
sys.exit(3)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with two benchmarks and a module that is none."""
    place = tmp_path / "benchmarks"
    place.mkdir()
    (place / "good.py").write_text(GOOD)
    (place / "bad.py").write_text(BAD)
    (place / "report.py").write_text('"""What the benchmarks print."""\n')
    monkeypatch.setattr(command, "find_folder", lambda: place)
    return place


def test_the_checkouts_own_benchmarks_are_found_with_their_questions() -> None:
    folder = find_folder()
    assert folder == Path(__file__).parents[2] / "benchmarks"
    known = {one.name: one for one in find_benchmarks(folder)}
    assert {"collectives", "join", "step", "zero"} <= known.keys()
    assert not {"report", "wire_link", "chargpt"} & known.keys()
    assert known["step"].how_long == "about ten minutes"
    assert all(one.question.endswith("?") for one in known.values())


def test_a_question_may_go_over_two_lines() -> None:
    assert question_in("Is it\nso? It is.\n\nMore.") == "Is it so?"
    assert question_in("No question.\n\nReally?") == "No question."


def test_a_script_says_of_itself_what_it_takes(folder: Path) -> None:
    found = read_benchmark(folder / "good.py")
    assert found is not None
    assert (found.question, found.how_long) == ("Is one more than nought?", "about a second")
    assert found.has_quick
    assert read_benchmark(folder / "report.py") is None


def test_without_a_name_they_are_listed_and_none_runs(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench"]) == 0
    said = capfd.readouterr().out
    assert "Is one more than nought?" in said
    assert "1 > 0" not in said


def test_a_run_is_shown_and_saved_by_the_machines_name(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "good", "--quick", "--save"]) == 0
    assert "1 > 0 True" in capfd.readouterr().out
    (saved,) = (folder / "results").iterdir()
    assert saved.name.startswith("good-")
    assert saved.name.endswith("-cores-quick.md")
    assert saved.read_text() == "Machine: this one, quick: True"


def test_one_that_fails_does_not_stop_the_others_and_the_code_is_1(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "all"]) == 1
    said = capfd.readouterr().out
    assert "with code 3" in said
    assert "1 > 0 False" in said
    assert not (folder / "results").exists()


def test_an_unknown_name_is_told_what_there_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "best"]) == 2
    assert "no benchmark is called 'best'; there is bad, good." in capsys.readouterr().err


def test_one_that_needs_an_environment_of_its_own_runs_there_or_says_how_to_make_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    usual = "python benchmarks/good.py"
    (folder / "other.py").write_text(GOOD.replace(usual, ".venv-other/bin/python other.py"))
    found = read_benchmark(folder / "other.py")
    assert found is not None
    assert found.lacks == ".venv-other"
    assert command._choose({"other": found}, ["all"]) == []
    assert "it is left out" in capfd.readouterr().err
    with pytest.raises(typer.Exit):
        command._choose({"other": found}, ["other"])
    assert "other needs .venv-other, which `make bench-other`" in capfd.readouterr().err
    found.python.parent.mkdir(parents=True)
    found.python.write_text("#!/bin/sh\necho ran there\n")
    found.python.chmod(0o755)
    command._run(found, False, None)
    assert "ran there" in capfd.readouterr().out


def test_outside_a_checkout_it_says_where_the_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_folder", lambda: None)
    assert main(["bench"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "clone the repository, run `make setup` there" in said
