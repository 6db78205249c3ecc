"""The election of a keeper, against a store in this process that loses questions and answers."""

import random
import threading
from contextlib import suppress
from time import monotonic

import pytest

from paceline._members import ChosenTerm, HowFar, KeeperSeat, KeeperTerms, Roster
from paceline._members.agents import AgentHello, Enlist, Enlisted
from paceline._members.council import Rules
from paceline._members.service import Service
from paceline._members.terms import SHARE, TermRight
from paceline.errors import StoreLostError, TermOverError
from tests.etcd.fake import FakeEtcd

ME = KeeperSeat("", 0, "host", "10.0.0.1", 29400)
SECONDS = 60  # of a lease; it ends when a test says so


@pytest.fixture
def store() -> FakeEtcd:
    return FakeEtcd()


def terms_of(store: FakeEtcd) -> KeeperTerms:
    return KeeperTerms(store, "paceline/job")  # type: ignore[arg-type]


def chosen(store: FakeEtcd) -> ChosenTerm:
    terms = terms_of(store)
    found = terms.take(terms.look(), ME, SECONDS)
    assert found is not None
    return found


def right_of(store: FakeEtcd) -> TermRight:
    return TermRight(terms_of(store), chosen(store))


def roster(number: int, *members: int) -> Roster:
    return Roster(number, members, tuple(HowFar(3, why="said") for _ in members))


def test_of_many_hosts_at_once_one_takes_the_seat(store) -> None:
    seen = terms_of(store).look()
    found: list[ChosenTerm | None] = []
    hosts = [
        threading.Thread(target=lambda: found.append(terms_of(store).take(seen, ME, SECONDS)))
        for _ in range(16)
    ]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join(60)
    assert len(found) == 16
    assert len([one for one in found if one is not None]) == 1
    assert len(store.leases) == 1  # the others have given theirs back


def test_a_seat_that_somebody_has_is_not_taken(store) -> None:
    chosen(store)
    terms = terms_of(store)
    assert terms.take(terms.look(), ME, SECONDS) is None


def test_the_next_term_knows_the_numbers_and_the_roster(store) -> None:
    first = right_of(store)
    first.write(5, 2, roster(2, 0, 3))
    first.close()
    second = right_of(store)
    assert (second.state.next_member, second.state.last_roster) == (5, 2)
    assert second.state.roster is not None
    assert second.state.roster.members == (0, 3)
    assert second.state.roster.steps == 3
    assert second.state.term == first.state.term + 1
    assert second.state.job == first.state.job
    second.close()


def test_a_job_that_has_ended_is_not_gone_on_with(store) -> None:
    first = right_of(store)
    first.write(5, 2, None)
    first.end("it is finished", well=True)
    first.close()
    second = right_of(store)
    assert (second.state.next_member, second.state.last_roster) == (0, 0)
    assert second.state.job != first.state.job
    assert second.state.term > first.state.term
    second.close()


def test_a_keeper_whose_lease_has_ended_writes_nothing_whatever_its_clock_says(store) -> None:
    mine = chosen(store)
    old = TermRight(terms_of(store), mine)
    store.expire(mine.lease)
    new = right_of(store)
    new.write(8, 4, None)
    with pytest.raises(TermOverError, match="another keeper was chosen"):
        old.write(9, 5, roster(5, 1))
    state = terms_of(store).look().state
    assert state is not None
    assert (state.next_member, state.last_roster) == (8, 4)
    with pytest.raises(TermOverError):
        old.check()
    old.close()
    new.close()


def test_a_keeper_that_cannot_renew_its_lease_stops_before_it_ends(store) -> None:
    right = right_of(store)
    assert right.until <= monotonic() + SHARE * SECONDS
    store.fault = lambda call, when: True
    right._until = monotonic() + 0.3
    with pytest.raises(TermOverError, match="could not be renewed"):
        right.write(1, 0, None)  # tried again until the time is over
    with pytest.raises(TermOverError):
        right.check()
    store.fault = lambda call, when: False
    right.close()


def test_a_keeper_that_was_given_a_lease_which_is_over_decides_nothing(store) -> None:
    mine = chosen(store)
    store.expire(mine.lease)
    with pytest.raises(TermOverError, match="its lease has ended"):
        TermRight(terms_of(store), mine)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_whose_answer_is_lost_is_made_once(store, when) -> None:
    right = right_of(store)
    lost = iter([True])
    store.fault = lambda call, at: call == "write" and at == when and next(lost, False)
    right.write(7, 3, None)
    right.write(8, 3, None)
    state = terms_of(store).look().state
    assert state is not None
    assert (state.next_member, state.last_roster) == (8, 3)
    right.close()


def test_a_late_write_of_a_killed_keeper_of_the_same_term_does_not_undo_a_later_one(store) -> None:
    mine = chosen(store)
    killed = TermRight(terms_of(store), mine)
    again = TermRight(terms_of(store), mine)  # started by its agent in its place
    again.write(2, 1, roster(1, 0, 1))
    with pytest.raises(TermOverError):
        killed.write(2, 1, roster(1, 0))
    state = terms_of(store).look().state
    assert state is not None
    assert state.roster is not None
    assert state.roster.members == (0, 1)
    again.close()
    killed.close()


@pytest.mark.parametrize("seed", range(6))
def test_no_number_is_ever_given_twice_however_keepers_change(store, seed, monkeypatch) -> None:
    monkeypatch.setattr("paceline._members.terms.RETRY", 0.001)
    dice = random.Random(seed)
    store.fault = lambda call, when: dice.random() < 0.2
    keepers: list[tuple[ChosenTerm, TermRight]] = []
    given: list[int] = []
    for _ in range(60):
        with suppress(StoreLostError, TermOverError):
            terms = terms_of(store)
            seen = terms.look()
            if seen.seat is None:
                mine = terms.take(seen, ME, SECONDS)
                if mine is not None:
                    keepers.append((mine, TermRight(terms, mine)))
            elif dice.random() < 0.2:
                with store.lock:
                    store.expire(dice.choice(sorted(store.leases)))
        if keepers:
            _, right = dice.choice(keepers)  # also one that does not know yet that it is over
            with suppress(TermOverError):
                right.write(right.state.next_member + 1, 0, None)
                given.append(right.state.next_member)
    store.fault = lambda call, when: False
    for _, right in keepers:
        right.close()
    assert len(given) > 5
    assert given == sorted(set(given))


def test_a_service_says_no_number_that_it_could_not_write(store) -> None:
    mine = chosen(store)
    right = TermRight(terms_of(store), mine)
    service = Service(Rules(), 0.0, right=right)
    service.open(1)
    service.hear(1, AgentHello("host", 2), 0.0)
    service.hear(1, Enlist(), 0.0)
    assert (1, Enlisted(0)) in service.take()
    store.expire(mine.lease)
    with pytest.raises(TermOverError):
        service.hear(1, Enlist(), 0.0)
    assert not [word for _, word in service.take() if isinstance(word, Enlisted)]
    right.close()
