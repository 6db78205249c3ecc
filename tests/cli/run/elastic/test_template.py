"""Members that are forked from a process with torch in it; here from one with a stand-in for torch.

The stand-in is imported at once. Jobs with the real one: ``test_faults.py``.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli.run.elastic import launch, template
from paceline.cli.run.elastic.strays import Strays
from paceline.cli.run.elastic.template import Template, TemplatePhase
from tests.waiting import until

TORCH = """
from types import SimpleNamespace as optim_or_nn
optim = optim_or_nn(AdamW=list)
nn = optim_or_nn(Parameter=float)
zeros = get_num_threads = abs
"""
MEMBER = "import os, sys; print(os.environ['PACELINE_MEMBER'], os.getppid(), sys.argv[1:])\n"


@pytest.fixture
def libraries(tmp_path) -> Path:
    """A folder with what a template imports."""
    folder = tmp_path / "libraries"
    for name, text in {
        "torch": TORCH,
        "paceline": "",
        "paceline/data": "",
        "paceline/elastic": "def note_fork(): pass",
    }.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    return folder


@pytest.fixture
def start(tmp_path, libraries, monkeypatch):
    """Start a template of members that run a script; returns when it has come as far as it can."""
    monkeypatch.setattr(template, "_ANSWER", 60.0)
    adopts, begun = Strays(), []

    def begin(body: str) -> Template:
        adopts.adopt()
        (tmp_path / "member.py").write_text(body)
        command = [str(tmp_path / "member.py"), "argument"]
        env = {**os.environ, "PYTHONPATH": str(libraries)}
        begun.append(Template(command, env, tmp_path / "log"))
        wait_for(begun[-1])
        return begun[-1]

    yield begin
    for found in begun:
        found.end()
    adopts.close()


def wait_for(found: Template) -> None:
    assert until(lambda: found.prepare(time.monotonic()))


def forked(found: Template, member: int) -> tuple[str, int]:
    """What a member writes, and how it ends."""
    reads, writes = os.pipe()
    process = found.fork({"PACELINE_MEMBER": str(member)}, writes, writes)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    ending = os.waitid(os.P_PID, process.pid, os.WEXITED)
    assert ending is not None
    return said, ending.si_status


def test_a_member_is_forked_and_is_a_child_of_this_process(start) -> None:
    found = start(MEMBER)
    assert found.phase is TemplatePhase.READY
    assert [forked(found, n) for n in (3, 4)] == [
        (f"{n} {os.getpid()} ['argument']\n", 0) for n in (3, 4)
    ]


def test_a_member_has_a_session_and_random_numbers_of_its_own(start) -> None:
    found = start("import os, random; print(os.getsid(0) == os.getpid(), random.random())")
    (first, _), (second, _) = forked(found, 0), forked(found, 1)
    assert first.startswith("True ")
    assert second.startswith("True ")
    assert first != second


def test_how_a_member_fails_is_seen_and_others_are_forked_after_it(start) -> None:
    found = start("import os; os._exit(int(os.environ['PACELINE_MEMBER']))")
    assert [forked(found, n)[1] for n in (7, 0)] == [7, 0]


def test_a_template_that_was_killed_is_started_again_until_that_is_in_vain(start) -> None:
    found = start(MEMBER)
    for _ in range(template._TIMES):
        assert found.phase is TemplatePhase.READY
        assert found._process is not None
        os.kill(found._process.pid, signal.SIGKILL)
        with pytest.raises(OSError):
            forked(found, 0)
        wait_for(found)
    assert found.phase is TemplatePhase.GIVEN_UP


def test_a_template_that_has_been_of_use_is_started_again_however_often_it_is_killed(start) -> None:
    found = start(MEMBER)
    for number in range(template._TIMES + 1):
        assert found.phase is TemplatePhase.READY
        assert forked(found, number)[1] == 0
        assert found._process is not None
        os.kill(found._process.pid, signal.SIGKILL)
        with pytest.raises(OSError):
            forked(found, number)
        wait_for(found)


def test_a_template_that_does_not_answer_starts_nobody(start, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(template, "_ANSWER", 0.05)
    found = start(f"open({str(tmp_path / 'ran')!r}, 'x')")
    assert found._process is not None
    os.kill(found._process.pid, signal.SIGSTOP)
    reads, writes = os.pipe()
    with os.fdopen(reads) as pipe:
        with pytest.raises(OSError):
            found.fork({}, writes, writes)
        os.close(writes)
        assert pipe.read() == ""  # nobody is left that could write
    assert not (tmp_path / "ran").exists()


def test_a_template_that_is_stopped_is_replaced(start) -> None:
    found = start(MEMBER)
    stopped = found._process
    assert stopped is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
    wait_for(found)
    assert stopped.poll() is not None
    assert forked(found, 3) == (f"3 {os.getpid()} ['argument']\n", 0)


def test_nothing_is_forked_from_a_process_that_uses_a_gpu(start, libraries, capsys) -> None:
    opens = "import os; os.readlink = lambda path: '/dev/nvidia0'"
    (libraries / "paceline/data/__init__.py").write_text(opens)
    assert start(MEMBER).phase is TemplatePhase.GIVEN_UP
    assert "not forked: an import has opened /dev/nvidia0" in capsys.readouterr().err


def test_nobody_waits_for_ever_for_imports_that_go_on_and_are_of_use_later(
    start, libraries, tmp_path, monkeypatch
) -> None:
    waits = (
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.002)"
    )
    (libraries / "torch/__init__.py").write_text(f"{waits}\n{TORCH}")
    monkeypatch.setattr(template, "_WITHIN", 0.0)
    found = start(MEMBER)
    assert found.phase is TemplatePhase.IMPORTING
    imports = found._process
    (tmp_path / "go").write_text("")
    assert until(lambda: found.prepare(time.monotonic()) and found.phase is TemplatePhase.READY)
    assert found._process is imports
    assert forked(found, 3) == (f"3 {os.getpid()} ['argument']\n", 0)


def test_a_template_that_is_stopped_in_its_imports_is_replaced(
    start, libraries, tmp_path, monkeypatch
) -> None:
    stops = f"import os, signal\nif not os.path.exists({str(tmp_path / 'was')!r}):"
    stops += f"\n  open({str(tmp_path / 'was')!r}, 'x')\n  os.kill(os.getpid(), signal.SIGSTOP)"
    (libraries / "torch/__init__.py").write_text(f"{stops}\n{TORCH}")
    found = start(MEMBER)
    assert found.phase is TemplatePhase.READY
    assert forked(found, 3) == (f"3 {os.getpid()} ['argument']\n", 0)


def test_an_import_that_fails_is_given_up(start, libraries) -> None:
    (libraries / "torch/__init__.py").write_text("import is_not_there")
    assert start(MEMBER).phase is TemplatePhase.GIVEN_UP


def test_what_a_killed_member_has_left_does_not_stay_as_a_zombie() -> None:
    strays = Strays()
    strays.adopt()
    try:
        text = (
            "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as member:
            assert member.stdout is not None
            child = int(member.stdout.readline())
            member.kill()
        strays.left_by(member.pid)
        os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while Path(f"/proc/{child}").exists():
            strays.look()
            assert time.monotonic() < deadline
    finally:
        strays.close()


@pytest.fixture
def with_libraries(libraries, monkeypatch) -> None:
    """Launchers have a template that imports what is in ``libraries``."""

    def begin(command, environment, log) -> Template:
        return Template(command, {**environment, "PYTHONPATH": str(libraries)}, log)

    monkeypatch.setattr(launch, "Template", begin)


@pytest.mark.usefixtures("with_libraries")
def test_one_in_anothers_place_is_forked(run) -> None:
    ended = run(
        """
print("torch" in sys.modules, os.environ["LOCAL_RANK"], flush=True)
if me == 0:
    wait_for(1)
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(2)
if me == 2:
    sys.exit("the end")
wait_for(3)
""",
        *("--nproc", 2, "--warm"),
    )
    assert "[2] True 0" in ended.out, ended.err
    assert "[0] False 0" in ended.out
    assert "member 2 is lost: it ended with: the end (at member.py" in ended.err


@pytest.mark.usefixtures("with_libraries")
def test_spares_are_forked_so_that_a_first_loss_finds_all_imports_done(run) -> None:
    ended = run(
        """
print("torch" in sys.modules, os.environ["LOCAL_RANK"], flush=True)
wait_for(0, 1, 2)
""",
        *("--nproc", 2, "--spares", 1, "--warm"),
    )
    found = sorted(re.findall(r"(True|False) (\d)", ended.out))
    assert found == [("False", "0"), ("False", "1"), ("True", "2")], ended.err
