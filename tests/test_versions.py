"""Torch older and newer than what paceline was made for, and what ``make versions`` counts."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tomllib
import torch

from paceline import Group
from paceline._torch import versions
from paceline.errors import UnsupportedTorchError
from paceline.testing import run_ranks

from .versions import BEGIN, END, Outcome, saved, table

ROOT = Path(__file__).parents[1]


# -- which versions ---------------------------------------------------------------------------


def test_the_package_is_installed_with_the_versions_that_it_was_tested_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (range_,) = [text for text in project["dependencies"] if text.startswith("torch")]
    low, high = (tuple(map(int, v.split("."))) for v in re.findall(r"[\d.]+", range_))
    assert low == versions.OLDEST
    assert high == (versions.NEWEST[0], versions.NEWEST[1] + 1)
    assert range_ in (ROOT / "README.md").read_text()
    assert versions.is_tested(torch.__version__)


def test_a_release_is_read_from_any_build() -> None:
    for text in ("2.13.0+cpu", "2.13.0a0+git1234", "2.13"):
        assert versions.release_of(text) == (2, 13)
    assert [versions.is_tested(text) for text in ("2.9.1", "2.11.0", "2.15.3", "2.16.0a0")] == [
        False,
        True,
        True,
        False,
    ]


SCRIPT = """
import warnings
warnings.simplefilter("error")
import torch
torch.__version__ = "2.10.2"
try:
    import paceline
except ImportError as error:
    print(type(error).__name__, error)
torch.__version__ = "2.99.0"
current = torch._C._distributed_c10d._current_process_group
del torch._C._distributed_c10d._current_process_group
try:
    import paceline
except ImportError as error:
    print(type(error).__name__, error)
torch._C._distributed_c10d._current_process_group = current
import paceline
print("imported with", torch.__version__)
"""


def test_an_older_torch_is_refused_and_a_newer_one_is_named_where_the_import_fails() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    old, new, imported = ended.stdout.splitlines()
    assert old.startswith("UnsupportedTorchError paceline works with torch 2.11 and newer")
    assert "this is torch 2.10.2" in old
    assert "cannot be imported with torch 2.99.0: AttributeError" in new
    assert "_current_process_group" in new
    assert imported == "imported with 2.99.0"


def test_errors_in_a_tested_torch_are_left_alone() -> None:
    with pytest.raises(ImportError, match="no numpy") as caught, versions.blaming_untested():
        raise ImportError("no numpy")
    assert not isinstance(caught.value, UnsupportedTorchError)


def test_a_newer_torch_is_warned_of_once_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "IS_NEWER", True)
    monkeypatch.setattr(versions, "_told", False)

    def make_groups(group: Group) -> None:
        group.split([[0, 1], [2]])
        group.split([2, 1, 0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(3, make_groups)
    (told,) = [text for w in caught if "tested with torch" in (text := str(w.message))]
    assert f"tested with torch 2.11 to 2.15, and this is {torch.__version__}" in told


def test_ranks_other_than_the_first_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_told", False)
    versions.warn_of_newer(3)
    with pytest.warns(UserWarning, match="tested with torch"):
        versions.warn_of_newer(0)
    versions.warn_of_newer(0)  # warnings are errors in these tests


# -- the table ----------------------------------------------------------------------------------

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="one"/>
<testcase classname="tests.test_a" name="two"><failure message="no">no</failure></testcase>
<testcase classname="tests.test_a" name="three"><error message="no">no</error></testcase>
<testcase classname="tests.test_b" name="four"><skipped message="torch 2.15.0+cu132 has no a|b"/></testcase>
<testcase classname="tests.test_b" name="five"><skipped message="torch 2.13.0+cpu has no a|b"/></testcase>
<testcase classname="tests.test_b" name="six"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_tests_are_counted_and_skipped_ones_by_their_reasons() -> None:
    outcome = Outcome("2.15.0", seconds=600)
    outcome.take(REPORT)
    assert (outcome.passed, outcome.skipped) == (1, {"this torch has no a/b": 2, "no GPU": 1})
    shown = table([outcome, Outcome("2.13.0", passed=5)])
    assert "| 2.15.0 | 1 | 2 | 3 | 10 |" in shown
    assert "| 2.13.0 | 5 | 0 | 0 | 0 |" in shown
    assert "| this torch has no a/b | 2 | 0 |" in shown
    assert "- 2.15.0: `tests.test_a::three`" in shown


def test_a_table_replaces_what_was_between_the_marks() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = saved(page, "new")
    assert once == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert saved(once, "new") == once
    with pytest.raises(SystemExit):
        saved("no marks", "new")
