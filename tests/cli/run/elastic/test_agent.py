"""``paceline run --elastic`` with real processes; a keeper that lets everybody in at once."""

import errno
import os
import select
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline._members.agents import Formed
from paceline._members.words import Alive
from paceline.cli.run.elastic.agent import AgentLimits, AgentPhase, ElasticAgent, MemberStart
from paceline.cli.run.elastic.places import HostSize, Places
from paceline.cli.run.elastic.process import MemberProcess
from paceline.cli.run.screen import OutputReader
from paceline.cli.run.verdict import RankEnding
from tests.cli.run.elastic.member import MEMBER


def test_members_run_and_their_lines_carry_their_numbers(run) -> None:
    ended = run("print('hello', flush=True); wait_for(0, 1, 2)", "--nproc", 2, "--spares", 1)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[0] hello", "[1] hello", "[2] hello"]
    assert "no process joined" not in ended.err


def test_a_member_finds_its_place_and_no_rank_of_another_launch(run) -> None:
    ended = run(
        "print(os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'], 'RANK' in os.environ,"
        " os.stat(os.path.dirname(os.environ['PACELINE_MEMBERS'])).st_mode & 0o777, flush=True)\n"
        "wait_for(0, 1)",
        *("--nproc", 2),
    )
    assert sorted(ended.out.splitlines()) == [f"[{n}] {n} 2 False {0o700}" for n in (0, 1)]


def test_one_that_is_killed_is_told_and_replaced_in_its_place_and_the_job_ends_well(run) -> None:
    ended = run(
        """
print("in place", os.environ["LOCAL_RANK"], flush=True)
if me == 0:
    wait_for(1)
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(2)
""",
        *("--nproc", 2),
    )
    assert ended.code == 0, ended.err
    assert "[2] in place 0" in ended.out
    assert (
        "member 0 is lost: it was killed by SIGKILL (out of memory? see dmesg); 1 member of this "
        "host is left; another is started" in ended.err
    )


def test_one_that_is_killed_is_told_before_it_has_ended(run, monkeypatch) -> None:
    """Its memory may take seconds to be freed; here it takes until the others know."""
    ending = MemberProcess.ending
    monkeypatch.setattr(
        MemberProcess,
        "ending",
        lambda self: None if self.number == 0 and not self.told else ending(self),
    )
    ended = run(
        """
if me == 0:
    wait_for(1)
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(2)
""",
        *("--nproc", 2),
    )
    assert ended.code == 0, ended.err
    assert "member 0 is lost: it was killed by SIGKILL" in ended.err


@pytest.mark.parametrize(
    ("script", "signal_of_death"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL),
        ("threading.Thread(target=os.abort).start(); threading.Event().wait()", signal.SIGABRT),
        ("os._exit(3)", 0),
    ],
)
def test_a_process_that_ends_says_which_signal_ends_it(script, signal_of_death) -> None:
    command = ["-c", f"import os, signal, threading; {script}"]
    process = MemberStart(command, dict(os.environ)).start(0, 0)
    try:
        assert select.select([process.ended], [], [], 60)[0]
        assert process.dying_of() == signal_of_death
    finally:
        process.kill()
        process.wait()
        process.close()
        for pipe in process.pipes.values():
            os.close(pipe)


def test_a_process_that_lives_or_is_stopped_is_not_dying() -> None:
    process = MemberStart(["-c", "import time; time.sleep(600)"], dict(os.environ)).start(0, 0)
    try:
        assert process.dying_of() == 0
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process.dying_of() == 0
    finally:
        process.kill()
        process.wait()
        process.close()
        for pipe in process.pipes.values():
            os.close(pipe)


def test_what_a_member_left_running_is_killed_with_it(run, tmp_path) -> None:
    ended = run(
        """
import subprocess
if me == 0:
    child = subprocess.Popen(["sleep", "600"])
    open(os.path.join(folder, "child"), "w").write(str(child.pid))
    os._exit(3)
wait_for(2)
""",
        *("--nproc", 2),
    )
    assert ended.code == 0, ended.err
    child = int((tmp_path / "child").read_text())
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_stopped_member_is_ended_and_replaced(run) -> None:
    ended = run(
        """
if me == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    mark("went on")
wait_for(2)
""",
        *("--nproc", 2, "--stopped-after", 0.3),
    )
    assert ended.code == 0, ended.err
    assert "member 1 is ended: it was stopped for 0.3 s" in ended.err
    assert "member 1 is lost: it was stopped for 0.3 s" in ended.err


def test_a_member_that_was_stopped_for_a_moment_goes_on(run, tmp_path) -> None:
    ended = run(
        """
import subprocess
if me == 1:
    here = f"/proc/{os.getpid()}/status"
    runs = f"test -e {here} && ! grep -q '^State:.T' {here}"
    waking = f"while {runs}; do sleep 0.01; done; sleep 0.3; kill -CONT {os.getpid()}"
    subprocess.Popen(waking, shell=True, start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    mark("went on")
wait_for("went on")
""",
        *("--nproc", 2, "--stopped-after", 60),
    )
    assert ended.code == 0, ended.err
    assert "lost" not in ended.err


def test_the_keeper_may_be_killed_and_stopped(run) -> None:
    ended = run(
        """
if me == 0:
    wait_for(1)
    first = keeper()
    os.kill(first, signal.SIGKILL)
    second = keeper(unless=first)
    os.kill(second, signal.SIGSTOP)
    keeper(unless=second)
    mark("third")
    os.kill(os.getpid(), signal.SIGKILL)
wait_for("third", 2)
""",
        *("--nproc", 2),
    )
    assert ended.code == 0, ended.err
    assert "the process that keeps the roster was replaced 2 times" in ended.err
    assert "member 0 is lost: it was killed by SIGKILL" in ended.err


def test_a_script_that_always_fails_ends_with_the_first_failure(run, tmp_path) -> None:
    ended = run("raise ValueError(f'no {me}')", "--nproc", 2, "--max-restarts", 3)
    assert ended.code == 1
    assert {path.name for path in tmp_path.iterdir() if path.name.isdigit()} == set("01234")
    assert "lost members are no longer replaced: all 3 of --max-restarts" in ended.err
    assert "failed first: ValueError: no" in ended.err


def test_an_import_that_always_fails_is_not_tried_for_ever(run, tmp_path) -> None:
    tried = tmp_path / "tried"
    tried.mkdir()
    script = f"#!\nimport os\nopen('{tried}/' + str(os.getpid()), 'x')\nimport is_not_there"
    ended = run(script, "--nproc", 2)
    assert ended.code == 1
    assert len(list(tried.iterdir())) in (2, 3)  # one more where the first was seen to end early
    assert "the last 2 processes ended before they took part" in ended.err
    assert "failed first: ModuleNotFoundError" in ended.err


@pytest.mark.parametrize("ends", ["raise ValueError(os.environ['RANK'])", "pass"])
def test_a_script_that_never_joins_is_told_what_it_lacks(run, ends) -> None:
    ended = run(f"#!\nimport os\n{ends}", "--nproc", 2)
    assert "no process joined the job: a script for --elastic gets its group from" in ended.err


def test_a_replacement_that_cannot_start_does_not_end_those_who_train(run) -> None:
    ended = run(
        """#!
import os
if int(os.environ["PACELINE_MEMBER"]) > 1:
    open(os.path.dirname(__file__) + "/tried " + os.environ["PACELINE_MEMBER"], "x").close()
    import is_not_there
"""
        + MEMBER
        + """
if me == 0:
    wait_for(1)
    os._exit(7)
wait_for("tried 2", "tried 3")
""",
        *("--nproc", 2, "--max-restarts", 2),
    )
    assert ended.code == 0, ended.err
    assert "member 0 is lost: it ended with exit code 7" in ended.err


def test_a_process_that_cannot_be_started_is_tried_again(run, monkeypatch) -> None:
    starts = []

    def start(self, number: int, seat: int) -> MemberProcess:
        starts.append(number)
        if number == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(self, number, seat)

    real = MemberStart.start
    monkeypatch.setattr(MemberStart, "start", start)
    ended = run("wait_for(0, 2)", "--nproc", 2)
    assert ended.code == 0, ended.err
    assert starts[:3] == [0, 1, 2]
    assert "member 1: it could not be started (Too many open files)" in ended.err


def test_ranks_that_are_shown_are_those_of_the_roster(run, tmp_path, monkeypatch) -> None:
    ask = OutputReader.show
    asked = tmp_path / "asked"

    def show(self, ranks) -> None:
        ask(self, ranks)
        (tmp_path / "asked.next").write_text(str(*ranks))
        (tmp_path / "asked.next").rename(asked)

    monkeypatch.setattr(OutputReader, "show", show)
    ended = run(
        """
def wait_until_shown(member):
    wait_for("asked")
    while open(os.path.join(folder, "asked")).read() != str(member):
        time.sleep(0.002)
if me == 0:
    wait_for(1)
    wait_until_shown(0)
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if me == 2:
    wait_until_shown(1)
    print("out", flush=True)
    while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))):
        time.sleep(0.002)
    mark("read")
if me == 1:
    wait_for("read")
    print("out", flush=True)
""",
        *("--nproc", 2, "--show", 0),
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["[0] last words", "[1] out"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--spares", -1), "--spares is -1"),
        (("--min-ranks", 0), "--min-ranks is 0"),
        (("--min-ranks", 3), "--min-ranks is 3, and 2 ranks are started"),
        (("--stopped-after", 0), "--stopped-after is 0"),
        (("--heartbeat", "nan"), "--heartbeat is nan"),
        (("--ray", "local"), "--ray does not"),
    ],
)
def test_options_that_cannot_be_are_refused(run, options, words) -> None:
    ended = run("", "--nproc", 2, *options)
    assert ended.code == 2
    assert words in " ".join(ended.err.split())


def test_nothing_is_left(run, tmp_path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ended = run("if me == 0: os._exit(1)\nwait_for(2)", "--nproc", 2)
    assert ended.code == 0, ended.err
    assert len(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.glob("paceline-run-*"))


class Link:
    """A connection to a keeper that has said ``words``."""

    connected = True

    def __init__(self, *words: object) -> None:
        self.words, self.said = list(words), list[object]()

    def heard(self) -> list[object]:
        words, self.words = self.words, []
        return words

    def say(self, word: object) -> None:
        self.said.append(word)

    def flush(self) -> None:
        pass


def agent_of(tmp_path: Path, link: Link, limits: AgentLimits) -> ElasticAgent:
    """One that looks when it is told to, and has started nobody."""
    keeper = SimpleNamespace(look=lambda now: "", over=None, pause=0.1, serves_others=False)
    keeper.unheard = lambda seconds: TimeoutError(f"nothing was heard for {seconds:g} s")
    places = Places(HostSize(ranks=0))
    return ElasticAgent("host", places, None, limits, keeper, link, OutputReader(), tmp_path)


def test_a_launcher_that_gets_no_turn_does_not_blame_the_keeper(tmp_path) -> None:
    agent = agent_of(tmp_path, Link(), AgentLimits(keeper_within=4.0))
    began = time.monotonic()
    agent._look(began)
    agent._look(began + 30.0)  # such as one that was stopped by hand
    with pytest.raises(TimeoutError, match="nothing was heard for 4 s"):
        for tick in range(60):  # it asks, and nobody answers
            agent._look(began + 30.0 + tick / 10)


def test_members_that_go_on_are_heard_of_before_the_job_is_found_to_be_finished(tmp_path) -> None:
    agent = agent_of(tmp_path, Link(Formed(2, (1, 2), ())), AgentLimits())
    agent.story.members, agent.places.seats[1] = (0, 1), 0
    agent.places.endings[0] = RankEnding(-signal.SIGKILL, 0.0)
    agent.processes[1] = leaves = MemberStart(["-c", "pass"], dict(os.environ)).start(1, 0)
    agent._selector.register(leaves.ended, select.POLLIN)
    assert select.select([leaves.ended], [], [], 60)[0]
    agent._look(time.monotonic())
    assert 1 in agent.places.endings
    assert agent.story.members == (1, 2)
    assert agent.phase is AgentPhase.RUNNING
    assert agent.over is None


def test_a_job_is_not_found_to_be_finished_before_a_new_keeper_has_said_a_word(tmp_path) -> None:
    link = Link()
    link.connected, link.fileno = False, select.epoll().fileno
    link.connect = lambda hello: vars(link).update(connected=True) or True
    agent = agent_of(tmp_path, link, AgentLimits())
    agent.story.members = (0, 1)
    agent.places.endings.update({0: RankEnding(-signal.SIGKILL, 0.0), 1: RankEnding(0, 0.0)})
    began = time.monotonic()
    agent._look(began)
    agent._look(began)
    assert agent.over is None
    link.words.append(Alive())
    agent._look(began)
    assert agent.over is not None
