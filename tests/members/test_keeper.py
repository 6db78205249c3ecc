"""Members of a keeper that is a process of its own, which may be killed."""

import os
import queue
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline._members import HowFar, RosterChange, client, connect
from paceline._members.client import SocketMember
from paceline._members.frames import pack
from paceline._members.words import Enrol, ProcessId
from paceline.errors import JobEndedError, KeeperLostError, MembershipError
from tests.waiting import until

from .keepers import WITHIN, KeeperAt, descriptors, meet, on_threads, ready


def test_members_meet_and_share_keys_and_hear_of_one_that_closes() -> None:
    with KeeperAt("--first", "3") as keeper:
        members = keeper.begin(3)
        assert [member.me for member in members] == [0, 1, 2]
        members[0].store(1).set("key", "value")
        assert members[2].store(1).get("key") == b"value"
        heard: queue.Queue[RosterChange] = queue.Queue()
        members[0].listen(heard.put)
        members[1].close()
        change = heard.get(timeout=300)
        assert (change.kind, list(change.members)) == ("lost", [1])
        assert meet([members[0], members[2]], 5, "lost").members == (0, 2)


def test_the_folder_and_the_socket_are_this_users_alone() -> None:
    with KeeperAt() as keeper:
        keeper.join()
        path = Path(keeper.path)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_keeper_starts_without_torch() -> None:
    program = (
        "import sys; from paceline._members.keeper import Keeper; print('torch' in sys.modules)"
    )
    lazy = f"import sys; sys.argv = ['paceline']; {program}"
    said = subprocess.run([sys.executable, "-c", lazy], capture_output=True, text=True, timeout=300)
    assert said.stdout == "False\n", said.stderr


def test_a_roster_in_use_goes_on_with_the_next_keeper() -> None:
    with KeeperAt("--first", "2") as keeper:
        members = keeper.begin(2)
        members[0].store(1).set("before", "1")
        members[0].store(1).add("count", 2)
        keeper.replace()
        assert members[1].store(1).get("before") == b"1"
        assert members[1].store(1).add("count", 1) == 3
        assert meet(members, 4).number == 2
        assert ready(members, 2) == [True, True]


def test_a_meeting_goes_on_with_the_next_keeper() -> None:
    with KeeperAt("--first", "2") as keeper:
        members = keeper.begin(2)
        keeper.prepare()
        first = threading.Thread(target=members[0].meet, args=(HowFar(3, why="lost"), WITHIN))
        heard: queue.Queue[RosterChange] = queue.Queue()
        members[1].listen(heard.put)
        first.start()
        assert heard.get(timeout=300).kind == "lost"  # so the keeper knows that one has come
        keeper.replace()
        assert members[1].meet(HowFar(3, why="lost"), WITHIN).members == (0, 1)
        first.join(120)


def test_one_that_waits_for_a_key_waits_on_with_the_next_keeper() -> None:
    with KeeperAt("--first", "2") as keeper:
        members = keeper.begin(2)
        got: list[bytes] = []
        waiter = threading.Thread(target=lambda: got.append(members[0].store(1).get("later")))
        waiter.start()
        members[1].store(1).set("another", "x")
        keeper.replace()
        members[1].store(1).set("later", "here")
        waiter.join(120)
        assert got == [b"here"]


def test_a_sum_is_added_once_however_often_the_keeper_is_killed() -> None:
    with KeeperAt("--first", "2") as keeper:
        members = keeper.begin(2)

        def add_many(member: SocketMember) -> None:
            for _ in range(300):
                member.store(1).add("sum", 1)

        adding = [threading.Thread(target=add_many, args=(member,)) for member in members]
        for thread in adding:
            thread.start()
        kills = 0
        while any(thread.is_alive() for thread in adding) and kills < 4:
            keeper.prepare()
            before = int(members[0].store(1).get("sum")) if kills else 0
            with suppress(dist.DistStoreError):
                members[0].store(1).wait([f"sum past {before}"], _millis(30))
            keeper.replace()
            kills += 1
        for thread in adding:
            thread.join(120)
        assert kills >= 1
        assert members[0].store(1).get("sum") == b"600"


def _millis(n: int):
    from datetime import timedelta

    return timedelta(milliseconds=n)


def test_one_that_comes_when_the_job_is_finished_hears_so_at_the_meeting() -> None:
    with KeeperAt() as keeper, socket.socket(socket.AF_UNIX) as other:
        (member,) = keeper.begin(1)
        other.connect(keeper.path)  # the keeper stays as long as somebody it knows does
        other.sendall(pack(Enrol(ProcessId("elsewhere", 1))))
        assert other.recv(1)
        member.leave("it has finished", finished=True)
        late = keeper.join()
        with pytest.raises(JobEndedError) as caught:
            late.meet(HowFar(), WITHIN)
        assert caught.value.well


def test_a_number_is_not_given_again_by_the_next_keeper() -> None:
    with KeeperAt() as keeper:
        first = keeper.join()
        first.leave()
        keeper.replace()
        assert keeper.join().me == first.me + 1


def test_without_a_keeper_a_member_ends_within_its_deadline() -> None:
    with KeeperAt("--first", "2") as keeper:
        keeper.join()  # so it listens
        member = keeper.join(within=8)
        keeper.kill()
        begun = time.monotonic()
        with pytest.raises(KeeperLostError, match="nobody has answered"):
            member.meet(HowFar(), 600)
        assert time.monotonic() - begun < 300, "not at the timeout of ten minutes"


def test_connecting_where_nobody_listens_ends_within_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(KeeperLostError):
        SocketMember(str(tmp_path / "nobody"), keeper_within=0.2)


def test_connections_to_keepers_that_die_while_they_are_greeted_are_closed(monkeypatch) -> None:
    made: list[socket.socket] = []

    def reach(_path: str, _timeout: float) -> socket.socket:
        if len(made) == 3:
            raise RuntimeError("enough")
        here, there = socket.socketpair()
        there.close()
        made.append(here)
        return here

    monkeypatch.setattr(client, "connect_private", reach)
    with pytest.raises(KeeperLostError, match="enough"):
        SocketMember("nowhere", keeper_within=60.0)
    assert {one.fileno() for one in made} == {-1}


def test_without_a_launcher_there_is_nothing_to_connect_to(monkeypatch) -> None:
    monkeypatch.delenv("PACELINE_MEMBERS", raising=False)
    assert connect() is None


def test_a_process_that_is_killed_is_lost_at_once() -> None:
    with KeeperAt("--first", "2") as keeper:
        spawn = get_context("spawn")
        enrolled = spawn.Event()
        other = spawn.Process(target=meet_and_wait, args=(keeper.path, enrolled), daemon=True)
        other.start()
        member = keeper.join()
        assert enrolled.wait(300)  # it imports torch first
        roster = member.meet(HowFar(), 60)
        assert member.ready(roster.number)
        heard: queue.Queue[RosterChange] = queue.Queue()
        member.listen(heard.put)
        begun = time.monotonic()
        other.kill()
        change = heard.get(timeout=300)
        assert change.kind == "lost"
        assert list(change.members.values()) == ["its process has ended"]
        assert time.monotonic() - begun < 20, "not at the heartbeat of a minute"
        other.join(60)


def meet_and_wait(path: str, enrolled: Event) -> None:
    member = SocketMember(path)
    enrolled.set()
    member.ready(member.meet(HowFar(), 60).number)
    threading.Event().wait(300)


def test_a_forked_child_is_no_member_and_keeps_nothing_open() -> None:
    with KeeperAt() as keeper:
        (member,) = keeper.begin(1)
        store = member.store(1)
        said, says = os.pipe()
        child = os.fork()
        if child == 0:
            answers = []
            for call in (lambda: member.meet(HowFar(), 5), lambda: store.get("x")):
                try:
                    call()
                    answers.append("went on")
                except MembershipError as error:
                    answers.append("fork" if "fork of process" in error.why else "?")
            member.close()
            os.write(says, ",".join(answers).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(said, 100) == b"fork,fork"
        os.close(said), os.close(says)
        store.set("x", "still a member")
        assert store.get("x") == b"still a member"


def test_nothing_is_left_of_members_that_have_left() -> None:
    with KeeperAt("--first", "2") as keeper:
        keeper.begin(1 + 1)[0].leave()
        before = descriptors(), threading.active_count()
        for _ in range(5):
            member = keeper.join()
            member.listen(print)
            member.leave()
        assert until(lambda: descriptors() <= before[0] and threading.active_count() <= before[1])


def test_many_members_meet_again_and_again() -> None:
    with KeeperAt("--first", "8") as keeper:
        members = keeper.begin(8)
        for steps in range(5):
            assert meet(members, steps).steps == steps
        assert on_threads(*(lambda m=m: m.store(6).add("n", 1) for m in members)) is not None
        assert members[0].store(6).get("n") == b"8"
