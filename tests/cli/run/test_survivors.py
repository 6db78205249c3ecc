"""Ranks that recover from another's failure go on; those that do not are ended."""

import itertools
import os
import signal

import pytest

from paceline.cli.run import verdict
from paceline.cli.run.survivors import (
    Losses,
    Outlook,
    Survivor,
    read_survivors,
    tell_lost,
    tell_missing,
)
from paceline.groups import launcher
from paceline.groups.launcher import going_on, tell_left
from tests.cli.launches import Ended, fork, paceline
from tests.cli.run.test_machines import free_port
from tests.cli.run.test_run import by_rank
from tests.marks import needs_shm

# -- pure ---------------------------------------------------------------------------------------


def survivor(rank: int, *without: int, done: bool = True) -> Survivor:
    return Survivor(rank, without, tuple({0, 1, 2, 3} - {*without}), done)


def look(losses: Losses, failed, running, *survivors: Survivor, now: float = 0.0) -> Outlook:
    return losses.look(failed, running, {s.rank: s for s in survivors}, now)


def test_without_a_failure_all_is_good_whoever_was_left_behind() -> None:
    losses = Losses(2.0)
    assert look(losses, [], [0, 1], survivor(0, 1)) is Outlook.GOOD
    assert losses.lost == {}


def test_a_failure_that_nobody_answers_in_time_is_hopeless() -> None:
    losses = Losses(2.0)
    assert look(losses, [1], [0], now=10.0) is Outlook.OPEN
    assert look(losses, [1], [0], now=11.9) is Outlook.OPEN
    assert look(losses, [1], [0], now=12.0) is Outlook.HOPELESS
    assert look(Losses(2.0), [1], []) is Outlook.HOPELESS  # nobody is left to answer


def test_who_has_begun_to_recover_is_waited_for_and_who_has_recovered_goes_on() -> None:
    losses = Losses(2.0)
    about_to = survivor(0, 1, done=False)
    assert look(losses, [1], [0, 2], about_to, now=0.0) is Outlook.OPEN
    assert look(losses, [1], [0, 2], about_to, now=99.0) is Outlook.OPEN
    assert look(losses, [1], [0, 2], survivor(0, 1), now=100.0) is Outlook.GOOD
    assert losses.lost[1].rank == 0


def test_the_patience_counts_anew_when_an_attempt_to_recover_has_failed() -> None:
    losses = Losses(2.0)
    look(losses, [1], [0], now=0.0)
    look(losses, [1], [0], survivor(0, 1, done=False), now=1.5)
    assert look(losses, [1], [0], now=50.0) is Outlook.OPEN
    assert look(losses, [1], [0], now=52.0) is Outlook.HOPELESS


def test_a_recovery_from_one_rank_does_not_answer_the_failure_of_another() -> None:
    losses = Losses(2.0)
    assert look(losses, [3], [0, 1, 2], survivor(0, 3)) is Outlook.GOOD
    assert look(losses, [3, 2], [0, 1], survivor(0, 3), now=5.0) is Outlook.OPEN
    assert look(losses, [3, 2], [0, 1], survivor(0, 3), now=7.0) is Outlook.HOPELESS


def test_who_has_failed_itself_answers_nothing() -> None:
    assert look(Losses(0.0), [0, 1], [2], survivor(0, 1)) is Outlook.HOPELESS


def test_a_rank_that_left_its_group_is_not_one_that_was_left_behind() -> None:
    losses = Losses(2.0)
    ahead, left = survivor(0, 1), Survivor(1, (), (), True)
    assert losses.left_behind([0, 1], {0: ahead}) == []  # not before the others have ended
    assert losses.left_behind([1], {0: ahead}) == [1]
    assert losses.left_behind([1], {0: ahead, 1: left}) == []
    assert losses.left_behind([2], {0: ahead}) == []
    assert losses.left_behind([], {0: ahead}) == []


def test_losses_are_told_in_one_line() -> None:
    by = Survivor(0, (2,), (0, 1), True)
    said = tell_lost(2, 3, "it was killed by SIGKILL", by)
    assert said == "rank 2 of 3 is lost: it was killed by SIGKILL; ranks 0, 1 go on without it"
    alone = tell_lost(1, 2, "", Survivor(0, (1,), (0,), True))
    assert alone == "rank 1 of 2 is lost; rank 0 goes on without it"
    assert tell_missing([2], 3, well=True) == (
        "the others have finished without rank 2 of 3, which was lost"
    )
    assert tell_missing([2, 1], 3, well=False) == (
        "the others went on for a while without ranks 1, 2 of 3, which were lost"
    )


# -- notes --------------------------------------------------------------------------------------


def test_a_rank_says_that_it_recovers_that_it_has_and_takes_it_back_if_not(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PACELINE_NOTES", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    with going_on(0, [0, 1, 2], [0, 2]):
        assert read_survivors(tmp_path) == {0: Survivor(0, (1,), (0, 2), False)}
    assert read_survivors(tmp_path) == {0: Survivor(0, (1,), (0, 2), True)}
    with pytest.raises(ValueError, match="nobody came"), going_on(0, [0, 2], [0]):
        assert read_survivors(tmp_path) == {0: Survivor(0, (1, 2), (0,), False)}
        raise ValueError("nobody came")
    assert read_survivors(tmp_path) == {0: Survivor(0, (1,), (0, 2), True)}
    tell_left(0)
    assert read_survivors(tmp_path) == {0: Survivor(0, (), (), True)}


def test_where_no_launcher_reads_there_are_no_notes(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("PACELINE_NOTES", raising=False)
    with going_on(0, [0, 1], [0]):
        pass
    monkeypatch.setenv("PACELINE_NOTES", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    with going_on(3, [2, 3], [3]):  # ranks as threads: not the launcher's
        pass
    monkeypatch.setenv("PACELINE_NOTES", str(tmp_path / "gone"))
    with going_on(0, [0, 1], [0]):  # the launcher is gone: that is no reason to stop
        pass
    assert list(tmp_path.iterdir()) == []


# -- processes ----------------------------------------------------------------------------------

TRAIN = """
import os, signal, sys
from datetime import timedelta
import torch, paceline

group = paceline.new_group(timeout=timedelta(seconds=120))
rank = group.rank()
ddp = paceline.DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)

def step():
    ddp(torch.ones(3, 4)).sum().backward()
    return ddp.module.weight.grad.sum().item()

try:
    while True:
        step()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
except RuntimeError as error:
    print("lost", type(error).__name__, flush=True)
group.reconfigure([0, 1])
ddp = paceline.DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
steps = 0
total = torch.ones(1)
while total.item():  # both stop in the same step
    step()
    steps += 1
    total = torch.tensor([float(steps < 4 or not os.path.exists(sys.argv[1]))])
    group.allreduce([total]).wait()
print("trained on", group.size(), flush=True)
group.shutdown()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.parametrize(
    "backend", [pytest.param("shm", marks=needs_shm), pytest.param("gloo", marks=pytest.mark.slow)]
)
def test_survivors_of_a_killed_rank_train_on_and_the_run_ends_well(
    script, capsys, backend, monkeypatch, tmp_path
) -> None:
    patience, enough = 600.0, tmp_path / "enough"  # until then the survivors train on
    look, looks = Losses.look, itertools.count(1)

    def look_later(losses: Losses, failed, running, survivors, now: float) -> Outlook:
        """Once they have recovered, the patience passes between two looks."""
        if any(survivor.done for survivor in survivors.values()):
            now += patience * (number := next(looks))
            if number == 3:  # two have passed, and nobody was ended
                enough.touch()
        return look(losses, failed, running, survivors, now)

    monkeypatch.setattr(Losses, "look", look_later)
    monkeypatch.setattr(verdict, "LONE", 0.0)  # nobody waits for one that was lost
    words = ["--nproc", 3, "--backend", backend, "--patience", patience, "--max-restarts", 1]
    ended = paceline(capsys, "run", *words, script, enough)
    assert ended.code == 0, ended.err
    said = by_rank(ended.out)
    assert [said[rank][-1] for rank in (0, 1)] == ["trained on 2"] * 2
    killed = "it was killed by SIGKILL (out of memory? see dmesg)"
    told = [line for line in ended.err.splitlines() if line.startswith("paceline:")]
    earlier = ("paceline: rank 0 ended 0 s ago", "paceline: rank 1 ended 0 s ago")  # than the other
    assert [line for line in told if not line.startswith(earlier)] == [
        f"paceline: rank 2 of 3 is lost: {killed}; ranks 0, 1 go on without it",
        "paceline: the others have finished without rank 2 of 3, which was lost",
    ]


# Ranks without torch, which say that they recover as groups do.
LIGHT = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("launcher", {launcher.__file__!r})
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)
notes, rank = os.environ["PACELINE_NOTES"], int(os.environ["RANK"])
"""
FAILS_LATER = """
if rank == 2:
    os.symlink(f"/proc/{os.getpid()}", notes + "/process")
    raise ValueError("of its own")
while not os.path.lexists(notes + "/process") or os.path.exists(notes + "/process"):
    time.sleep(0.01)  # until it has ended, and was told to be the first
with launcher.going_on(rank, [0, 1, 2], [0, 1]):
    pass
if rank == 0:
    while os.path.exists(notes + "/first"):  # until the launcher has told that rank 2 is lost
        time.sleep(0.01)
    raise KeyError("later")
"""
GIVES_UP = """
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    with launcher.going_on(rank, [0, 1, 2], [0, 1]):
        raise OSError("no group came of it")
except OSError:
    signal.pause()
"""
HANGS = """
if rank == 1:
    print(os.getpid(), flush=True)
    open(notes + "/up", "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)
while not os.path.exists(notes + "/up"):
    time.sleep(0.01)
with launcher.going_on(0, [0, 1], [0]):
    pass
"""


def run_light(capsys, tmp_path, text: str, *words: object) -> Ended:
    (tmp_path / "light.py").write_text(LIGHT + text)
    return paceline(capsys, "run", *words, tmp_path / "light.py")


def test_a_failure_after_a_recovery_is_the_runs_failure_with_its_traceback(
    capsys, tmp_path
) -> None:
    ended = run_light(capsys, tmp_path, FAILS_LATER, "--nproc", 3, "--patience", 60)
    assert ended.code == 1
    assert "rank 2 of 3 is lost: ValueError: of its own (at light.py" in ended.err
    assert "the others went on for a while without rank 2 of 3, which was lost" in ended.err
    assert "rank 0 of 3 failed first: KeyError: 'later'" in ended.err
    assert ended.err.count("KeyError: 'later'") == 3, "once by itself, once told, once at the end"


def test_survivors_that_do_not_recover_are_ended_and_start_again(capsys, tmp_path) -> None:
    words = ["--nproc", 3, "--patience", 0.2, "--grace", 600, "--max-restarts", 1]
    ended = run_light(capsys, tmp_path, GIVES_UP, *words)
    assert ended.code == 128 + signal.SIGKILL
    assert "rank 2 of 3 failed first: it was killed by SIGKILL" in ended.err
    assert "ranks 0, 1 then was stopped" in ended.err
    assert ended.err.count("all ranks start again") == 1


def test_a_rank_that_hangs_and_was_left_behind_is_ended_when_the_others_have(
    tmp_path, capsys
) -> None:
    ended = run_light(capsys, tmp_path, HANGS, "--nproc", 2, "--grace", 0.1)
    assert (ended.code, "went on without rank 1" in ended.err) == (0, True), ended.err
    with pytest.raises(ProcessLookupError):
        os.kill(int(by_rank(ended.out)[1][0]), 0)


def test_a_machine_whose_ranks_go_on_without_those_of_another_ends_well(tmp_path) -> None:
    (tmp_path / "light.py").write_text(
        LIGHT
        + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        + "with launcher.going_on(0, [0, 1], [0]): pass\n"
    )
    words = ["run", "--nnodes", 2, "--key", "none", "--nproc", 1, "--master-addr", "127.0.0.1"]
    words += ["--master-port", free_port(), "--patience", 60, "--node-rank"]
    launched = [fork(*words, number, tmp_path / "light.py") for number in (0, 1)]
    (_, err0), (_, err1) = [each.communicate(timeout=300) for each in launched]
    assert (launched[0].returncode, launched[1].returncode) == (0, 128 + signal.SIGKILL), err0
    assert "rank 1 of 2 failed first: it was killed by SIGKILL" in err1
    assert "failed" not in err0


def test_a_machine_whose_ranks_do_not_go_on_hears_of_anothers_failure(tmp_path) -> None:
    (tmp_path / "light.py").write_text(
        LIGHT + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()"
    )
    words = ["run", "--nnodes", 2, "--key", "none", "--nproc", 1, "--patience", 0.2]
    words += ["--master-addr", "127.0.0.1", "--master-port", free_port(), "--node-rank"]
    launched = [fork(*words, number, tmp_path / "light.py") for number in (0, 1)]
    (_, err0), (_, err1) = [each.communicate(timeout=300) for each in launched]
    assert "rank 1 of 2 failed first: it was killed by SIGKILL" in err0
    assert "rank 1 of 2 failed first: it was killed by SIGKILL" in err1
