"""Who is started when, without a process."""

from paceline.cli.run.elastic.places import HostSize, Places
from paceline.cli.run.verdict import RankEnding


def host(ranks: int, spares: int = 0, restarts: int | None = None, began: bool = True) -> Places:
    """With all places filled by members 0, 1, …, which have taken part."""
    found = Places(HostSize(ranks, spares, restarts))
    for number in range(found.due(0.0)):
        found.start(number)
    if began:
        found.took_part(found.living)
    return found


def kill(found: Places, number: int, now: float = 1.0) -> None:
    found.end(number, RankEnding(-9, now), failed=True)


def test_at_first_all_places_are_filled() -> None:
    assert Places(HostSize(3, 2)).due(0.0) == 5
    assert host(3, 2).seats == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    assert host(3, 2).due(0.0) == 0


def test_a_member_that_took_part_is_replaced_at_once_in_its_place() -> None:
    found = host(3)
    kill(found, 1)
    assert found.due(1.0) == 1
    assert found.start(3) == 1
    assert (found.restarts, found.due(1.0)) == (1, 0)


def test_a_member_that_ended_well_is_not_replaced() -> None:
    found = host(2)
    for number in (0, 1):
        found.end(number, RankEnding(0, 1.0), failed=False)
        assert found.due(5.0) == 0
    assert found.over


def test_restarts_are_counted_and_end() -> None:
    found = host(2, restarts=1)
    kill(found, 0)
    kill(found, 1)
    assert found.due(1.0) == 1
    found.start(2)
    assert found.due(1.0) == 0
    assert found.exhausted == "all 1 of --max-restarts are used"
    assert not found.over  # member 2 runs


def test_a_first_start_is_no_restart_even_after_a_loss() -> None:
    found = Places(HostSize(3, max_restarts=0))
    found.start(0)
    found.took_part({0})
    kill(found, 0)
    assert found.due(1.0) == 2


def test_members_that_never_take_part_are_replaced_ever_later_and_not_for_ever() -> None:
    found = host(1)
    waits, now, number = [], 0.0, 1
    kill(found, 0)
    found.start(number)
    while not found.exhausted:
        kill(found, number, now)
        start = now
        while not found.due(now) and not found.exhausted:
            now += 0.01
        waits.append(round(now - start, 1))
        if not found.exhausted:
            number += 1
            found.start(number)
    assert waits == [0.1, 0.2, 0.4, 0.0]
    assert found.exhausted == "the last 4 processes ended before they took part"


def test_where_nobody_ever_took_part_each_place_is_tried_once() -> None:
    found = host(3, began=False)
    for number in range(3):
        assert not found.exhausted
        kill(found, number)
    assert found.exhausted == "the last 3 processes ended before they took part"


def test_restarts_that_were_asked_for_are_done_even_so() -> None:
    found = host(1, restarts=3, began=False)
    for number in range(3):
        kill(found, number, 10.0 * number)
        assert found.due(10.0 * number + 9)
        found.start(number + 1)
    kill(found, 3, 100.0)
    assert found.exhausted == "all 3 of --max-restarts are used"


def test_one_that_takes_part_shows_that_the_program_is_well() -> None:
    found = host(2)
    for number in range(2, 20):
        kill(found, min(found.living), float(number))
        found.start(number)
        found.took_part({number}, number)
    assert not found.exhausted
    assert found.vain == 0


def test_losses_without_a_step_between_them_end_it() -> None:
    found, number = host(2), 2
    while not found.exhausted:
        kill(found, min(found.living), float(number * 20))
        if found.due(number * 20 + 10.0):
            found.start(number)
            found.took_part({number}, 0)
            number += 1
    assert found.exhausted == "9 members were lost while no step was committed"


def test_nobody_is_started_once_it_is_closed() -> None:
    found = host(2)
    kill(found, 0)
    found.close()
    assert found.due(100.0) == 0
    assert not found.over
    kill(found, 1)
    assert found.over


def test_spares_and_replacements_are_not_among_the_first_ranks() -> None:
    found = Places(HostSize(2, 1))
    assert (found.due(0.0), found.first_ranks) == (3, 2)
    found.start(0)
    found.start(1)
    assert (found.due(0.0), found.first_ranks) == (1, 0)
    kill(found, 0)
    assert found.first_ranks == 0
