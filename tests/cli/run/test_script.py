"""A rank's script runs as ``python script.py`` would have run it."""

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.run import script
from paceline.cli.run.launch import BOOTSTRAP

ABOUT_ITSELF = """
import __main__, json, os, pickle, sys, multiprocessing

def square(x):
    return x * x

class Thing:
    pass

if __name__ == "__main__":
    squares = []
    if __spec__ is None or __spec__.name != "pack.__main__":  # which Python itself cannot spawn
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            squares = pool.map(square, [1, 2, 3])
    print(json.dumps({
        "argv": sys.argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "spec": None if __spec__ is None else __spec__.name,
        "doc": __doc__,
        "names": sorted(n for n in vars(__main__) if not n.startswith("__")),
        "squares": squares,
        "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
        "main": sys.modules["__main__"] is __main__,
    }))
"""


def python(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | {"RANK": "1"} | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def both(cwd: Path, *command: str) -> list[subprocess.CompletedProcess[str]]:
    """The same command under python itself and under the bootstrap."""
    return [python(*command, cwd=cwd), python(str(BOOTSTRAP), *command, cwd=cwd)]


def test_a_script_sees_what_it_would_see_alone_and_its_functions_can_be_sent(tmp_path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "script.py").write_text(ABOUT_ITSELF)
    alone, ranked = both(tmp_path, "sub/script.py", "--lr", "1", "-m", "--", "x")
    assert json.loads(alone.stdout)["squares"] == [1, 4, 9], alone.stderr
    assert json.loads(ranked.stdout) == json.loads(alone.stdout)
    assert (ranked.stderr, ranked.returncode) == ("", 0)


def test_a_module_sees_what_it_would_see_alone(tmp_path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tool.py").write_text(ABOUT_ITSELF)
    (package / "__main__.py").write_text(ABOUT_ITSELF)
    for name in ("pack.tool", "pack"):
        alone, ranked = both(tmp_path, "-m", name, "-v")
        assert json.loads(alone.stdout)["squares"] == ([1, 4, 9] if "." in name else [])
        assert json.loads(ranked.stdout) == json.loads(alone.stdout)


def test_a_module_that_is_not_there_is_named(tmp_path) -> None:
    alone, ranked = both(tmp_path, "-m", "nowhere.at_all")
    assert ranked.returncode == alone.returncode == 1
    assert "No module named nowhere.at_all" in ranked.stderr
    assert "Traceback" not in ranked.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit()",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('in words')",
        "import sys; sys.exit(256)",
        "import os; os._exit(4)",
        "def f():\n    raise ValueError('two\\nlines')\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
        "def f(:\n    pass",
        "import sys\nsys.excepthook = lambda *a: print('my own', a[1])\nraise ValueError('x')",
        "import atexit\natexit.register(print, 'last')\nprint('first')",
    ],
)
def test_a_script_ends_as_it_would_alone(tmp_path, text: str) -> None:
    (tmp_path / "script.py").write_text(text)
    alone, ranked = both(tmp_path, "script.py")
    assert (ranked.stdout, ranked.stderr) == (alone.stdout, alone.stderr)
    assert ranked.returncode == alone.returncode


AFTERWARDS = """
import atexit, os, sys

class NoWords(Exception):
    def __str__(self):
        raise ValueError("none")

atexit.register(lambda: print(type(sys.last_value).__name__, sys.stdout.line_buffering))
if (child := os.fork()) == 0:
    sys.exit(3)  # which is not the rank's end
os.waitpid(child, 0)
print(os.listdir(os.environ["PACELINE_NOTES"]) if "PACELINE_NOTES" in os.environ else "alone")
raise NoWords
"""


def test_who_asks_at_exit_finds_the_error_though_it_has_no_words_and_a_child_ended_before(
    tmp_path,
) -> None:
    (tmp_path / "script.py").write_text(AFTERWARDS)
    notes = tmp_path / "notes"
    notes.mkdir()
    ranked = python(str(BOOTSTRAP), "script.py", cwd=tmp_path, PACELINE_NOTES=str(notes))
    assert ranked.stdout.splitlines()[-2:] == ["[]", "NoWords False"]
    assert "run_script" not in ranked.stderr
    note = json.loads((notes / "rank-1.json").read_text())
    assert (note["kind"], note["message"]) == ("NoWords", "")
    alone = python(str(BOOTSTRAP), "script.py", cwd=tmp_path)
    assert alone.stdout.splitlines()[-2:] == ["alone", "NoWords True"], "lines, for srun to carry"


def test_a_failure_is_written_down_and_the_first_rank_prints_it(tmp_path) -> None:
    (tmp_path / "script.py").write_text("def f():\n    raise ValueError('bad')\nf()")
    first = python(str(BOOTSTRAP), "script.py", cwd=tmp_path, PACELINE_NOTES=str(tmp_path))
    then = python(str(BOOTSTRAP), "script.py", cwd=tmp_path, PACELINE_NOTES=str(tmp_path), RANK="2")
    assert first.stderr.endswith("ValueError: bad\n")
    assert then.stderr == ""
    notes = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (1, 2)]
    assert [note["place"] for note in notes] == ["script.py:2", "script.py:2"]
    assert notes[0]["traceback"] == first.stderr
    assert "run_script" not in first.stderr
    assert notes[0]["when"] < notes[1]["when"]


def test_what_another_rank_has_caused_is_written_down_and_not_printed(tmp_path) -> None:
    (tmp_path / "script.py").write_text(
        "class PeerDiedError(RuntimeError): pass\nraise PeerDiedError('rank 0 died')"
    )
    ended = python(str(BOOTSTRAP), "script.py", cwd=tmp_path, PACELINE_NOTES=str(tmp_path))
    assert ended.stderr == ""
    assert json.loads((tmp_path / "rank-1.json").read_text())["consequence"] is True
    assert not (tmp_path / "first").exists()


def test_a_rank_whose_launcher_is_gone_does_not_start(tmp_path) -> None:
    (tmp_path / "script.py").write_text("print('here')")
    ended = python(str(BOOTSTRAP), "script.py", cwd=tmp_path, PACELINE_LAUNCHER="1")
    assert (ended.stdout, ended.returncode) == ("", 137)


FAILS_IN_A_WORKER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        raise ValueError(f"sample {index} is bad")

for batch in DataLoader(Samples(), num_workers=1):
    pass
"""


def test_an_error_of_a_data_loaders_worker_is_told_by_its_cause_and_line(tmp_path) -> None:
    (tmp_path / "train.py").write_text(FAILS_IN_A_WORKER)
    notes = tmp_path / "notes"
    notes.mkdir()
    python(str(BOOTSTRAP), "train.py", cwd=tmp_path, PACELINE_NOTES=str(notes))
    note = json.loads((notes / "rank-1.json").read_text())
    assert note["kind"] == "ValueError"
    assert note["message"] == "sample 0 is bad (in DataLoader worker process 0)"
    assert note["place"] == "train.py:9"


def test_an_ordinary_message_stays_as_it_is() -> None:
    assert script.cause_in_worker("ValueError", "Caught cold in winter.") == (
        "Caught cold in winter.",
        "",
    )
    assert doctest.testmod(script).failed == 0
