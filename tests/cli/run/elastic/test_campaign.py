"""How a host stands in an election, without a server, a keeper or a clock."""

import pytest

from paceline._members import KeeperSeat, KeeperTerms
from paceline._members.terms import TermRight
from paceline.cli.run.elastic.campaign import Campaign
from paceline.errors import StoreLostError
from tests.etcd.fake import FakeEtcd

SECONDS = 60  # of a lease; it ends when a test says so


@pytest.fixture
def store() -> FakeEtcd:
    return FakeEtcd()


def host(store: FakeEtcd, name: str) -> Campaign:
    """A host that looks when it is told to."""
    terms = KeeperTerms(store, "paceline/job")  # type: ignore[arg-type]
    return Campaign(terms, KeeperSeat("", 0, name, f"address of {name}", 1), SECONDS)


def test_the_first_host_has_the_keeper_and_the_second_follows_it(store) -> None:
    a, b = host(store, "a"), host(store, "b")
    assert a.standing.mine is not None
    assert b.standing.seat is not None
    assert (b.standing.seat.host, b.standing.seat.term) == ("a", 1)


def test_another_host_takes_the_seat_when_its_lease_has_ended(store) -> None:
    a, b = host(store, "a"), host(store, "b")
    assert a.standing.mine is not None
    store.expire(a.standing.mine.lease)
    b.look()
    a.look()
    assert b.standing.mine is not None
    assert b.standing.mine.term == 2
    assert a.standing.mine is None
    assert a.standing.seat is not None
    assert a.standing.seat.host == "b"


def test_a_host_that_ends_leaves_its_seat_to_another_at_once(store) -> None:
    a, b = host(store, "a"), host(store, "b")
    a.close()
    b.look()
    assert b.standing.mine is not None


def test_a_host_whose_keeper_may_not_decide_any_more_gives_the_seat_up(store) -> None:
    a = host(store, "a")
    a.look()
    assert a.standing.mine is not None
    a.resign(1)
    a.look()
    assert a.standing.mine is None
    a.look()
    assert a.standing.mine is not None
    assert a.standing.mine.term == 2


def test_a_host_hears_from_the_store_that_the_job_has_ended(store) -> None:
    a, b = host(store, "a"), host(store, "b")
    assert a.standing.mine is not None
    right = TermRight(KeeperTerms(store, "paceline/job"), a.standing.mine)  # type: ignore[arg-type]
    right.end("it is finished", well=True)
    right.close()
    b.look()
    assert b.standing.over is not None
    assert not b.standing.over.failed
    assert b.standing.mine is None  # it does not begin the job again


def test_a_host_that_was_away_while_the_job_was_begun_again_is_left_behind(store) -> None:
    a, b = host(store, "a"), host(store, "b")
    assert a.standing.mine is not None
    right = TermRight(KeeperTerms(store, "paceline/job"), a.standing.mine)  # type: ignore[arg-type]
    right.end("it failed", well=False)
    right.close()
    host(store, "c")
    b.look()
    assert b.standing.left_behind


def test_a_host_that_never_reached_the_store_says_so(store) -> None:
    store.fault = lambda call, when: True
    with pytest.raises(StoreLostError):
        host(store, "a")


def test_a_host_keeps_its_standing_while_the_store_does_not_answer(store) -> None:
    a, b = host(store, "a"), host(store, "b")
    before = (a.standing, b.standing)
    store.fault = lambda call, when: True
    for one in (a, b):
        with pytest.raises(StoreLostError):
            one.look()
    assert (a.standing, b.standing) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_seat_that_was_taken_without_an_answer_is_free_when_its_lease_ends(store, when) -> None:
    lost = iter([True])
    store.fault = lambda call, at: call == "write" and at == when and next(lost, False)
    with pytest.raises(StoreLostError):
        host(store, "a")
    for lease in list(store.leases):
        store.expire(lease)
    assert host(store, "b").standing.mine is not None
