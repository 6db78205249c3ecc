"""No more hosts than MAX of ``--nnodes MIN:MAX`` have members; others wait for one to be lost."""

from paceline._members import Rules
from paceline._members.agents import AgentHello, Enlist, Enlisted, HostWaits
from paceline._members.journal import GivenNumbers, NoJournal
from paceline._members.service import Service

RULES = Rules(hosts=2, return_within=5.0)


def hello(service: Service, line: int, host: str, now: float = 0.0, **said) -> None:
    service.open(line)
    service.hear(line, AgentHello(host, 1, **said), now)


def numbers(service: Service, line: int) -> list[int]:
    return [w.member for n, w in service.take() if n == line and isinstance(w, Enlisted)]


def begun() -> Service:
    """Hosts a and b each have a member."""
    service = Service(RULES, 0.0)
    for line, host in ((1, "a"), (2, "b")):
        hello(service, line, host)
        service.hear(line, Enlist(), 0.0)
    service.take()
    return service


def test_a_host_beyond_the_most_waits_and_is_told_so() -> None:
    service = begun()
    hello(service, 3, "c")
    service.hear(3, Enlist(), 0.0)
    service.time(1.0)
    said = service.take()
    assert (3, HostWaits(2)) in said
    assert not [word for _, word in said if isinstance(word, Enlisted)]


def test_a_host_that_waits_is_taken_in_when_another_is_gone() -> None:
    service = begun()
    hello(service, 3, "c")
    service.hear(3, Enlist(), 0.0)
    service.closed(2, 1.0)
    service.time(1.0)
    assert numbers(service, 3) == []  # the member of b may live
    service.lose(1, "it was killed", 2.0)
    service.time(2.0)
    assert numbers(service, 3) == [2]
    hello(service, 4, "b", 3.0)
    assert (4, HostWaits(2)) in service.take()  # its place is taken


def test_a_host_that_has_members_connects_again_whenever_it_likes() -> None:
    service = begun()
    service.closed(2, 1.0)
    hello(service, 4, "b", 1.0, members={1: 100})
    assert not [word for _, word in service.take() if isinstance(word, HostWaits)]


def test_after_a_keeper_was_replaced_hosts_that_had_members_come_first() -> None:
    journal = NoJournal()
    journal.records = [GivenNumbers(2, 1)]
    service = Service(RULES, 0.0, journal)
    hello(service, 1, "c")
    assert (1, HostWaits(2)) in service.take()
    for line, host in ((2, "a"), (3, "b")):
        hello(service, line, host, 1.0, members={line - 2: 100 + line})
    service.time(5.0)
    assert not [word for _, word in service.take() if isinstance(word, HostWaits)]
    assert service.lines[1].hello is not None


def test_any_number_of_hosts_may_come_where_none_is_given() -> None:
    service = Service(Rules(), 0.0)
    for line in range(5):
        hello(service, line, f"host {line}")
        service.hear(line, Enlist(), 0.0)
        assert numbers(service, line) == [line]
