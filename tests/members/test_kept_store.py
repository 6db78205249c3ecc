"""A store that lies with the keeper does what torch's stores do."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from paceline._members import HowFar, Rules, SharedCouncil
from paceline._members.keys import AskKeys, Keys

SHORT = timedelta(seconds=0.3)  # for what does not come
MINUTE = timedelta(seconds=60)  # for what does


@pytest.fixture
def kept() -> Iterator[Store]:
    with SharedCouncil(Rules()) as council:
        member = council.join()
        member.meet(HowFar(), 60)
        assert member.ready(1)
        yield member.store(1)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        kinds = [dist.QueueEmptyError, dist.DistStoreError, ValueError, TypeError, AttributeError]
        return next((kind for kind in kinds if isinstance(error, kind)), error)


def everything(store: Store) -> dict[str, Any]:
    """What a store answers to the same questions."""

    def in_vain(call: Callable[[], Any]) -> Any:
        """What it answers in the end to one that asks for what does not come."""
        store.set_timeout(SHORT)
        try:
            return call()
        finally:
            store.set_timeout(MINUTE)

    store.set_timeout(MINUTE)
    listed = hasattr(Store, "list_keys")  # not in every torch
    base = set(store.list_keys()) if listed else set()  # TCPStore has a key of its own
    asked: list[tuple[str, Callable[[], Any]]] = [
        ("get a key that is not there", lambda: in_vain(lambda: store.get("no"))),
        ("wait for a key that is not there", lambda: in_vain(lambda: store.wait(["no"]))),
        ("wait for it so long", lambda: store.wait(["no"], SHORT)),
        ("wait for nothing", lambda: store.wait([])),
        ("set and get", lambda: (store.set("s", "text"), store.get("s"))),
        ("zeros in it", lambda: (store.set("z", "a\0b"), store.get("z"))),
        ("nothing in it", lambda: (store.set("e", ""), store.get("e"))),
        ("add to nothing", lambda: store.add("n", 5)),
        ("add less", lambda: store.add("n", -7)),
        ("the sum as text", lambda: store.get("n")),
        ("add to a number with more", lambda: (store.set("t", " 12ab"), store.add("t", 1))),
        ("add too much", lambda: (store.set("b", str(2**63 - 1)), store.add("b", 1))),
        ("compare with a key that is not there", lambda: store.compare_set("c", "x", "y")),
        ("it is still not there", lambda: store.check(["c"])),
        ("compare with nothing", lambda: store.compare_set("c", "", "y")),
        ("compare with another", lambda: store.compare_set("c", "z", "q")),
        ("compare with what is there", lambda: store.compare_set("c", "y", "q")),
        ("compare with nothing, and there is", lambda: store.compare_set("c", "", "r")),
        ("delete", lambda: store.delete_key("c")),
        ("delete again", lambda: store.delete_key("c")),
        ("check nothing", lambda: store.check([])),
        ("check several", lambda: (store.check(["s", "n"]), store.check(["s", "no"]))),
        ("append", lambda: (store.append("a", "1"), store.append("a", "2"), store.get("a"))),
        ("several at once", lambda: store.multi_set(["x", "y"], ["1", "2"])),
        ("get several", lambda: store.multi_get(["y", "x"])),
        ("one is not there", lambda: in_vain(lambda: store.multi_get(["y", "no"]))),
        ("a queue", lambda: (store.queue_push("q", "1"), store.queue_push("q", "2"))),
        ("how long it is", lambda: store.queue_len("q")),
        ("a queue is there", lambda: (store.check(["q"]), store.wait(["q"]))),
        ("from it", lambda: (store.queue_pop("q"), store.queue_pop("q"), store.queue_len("q"))),
        ("from an empty one", lambda: store.queue_pop("q", False)),
        ("wait for an empty one", lambda: in_vain(lambda: store.queue_pop("q"))),
        ("an empty one is not there", lambda: store.check(["q"])),
        ("the keys", lambda: listed and sorted(set(store.list_keys()) - base)),
        ("more of them", lambda: store.num_keys() - len(base)),
        ("a barrier of one", lambda: store.barrier("barrier", 1, MINUTE)),
        ("a value that is none", lambda: store.set("i", 1)),
        ("what it can", lambda: store.has_extended_api()),
        ("how long it waits", lambda: store.timeout),
    ]
    return {name: outcome(call) for name, call in asked}


def test_it_answers_as_torchs_hash_store_does(kept: Store) -> None:
    assert everything(kept) == everything(dist.HashStore())


def test_it_answers_as_torchs_tcp_store_does(kept: Store) -> None:
    tcp = dist.TCPStore("127.0.0.1", 0, 1, True)
    theirs, ours = everything(tcp), everything(kept)
    # TCPStore counts a key that it does not list.
    assert theirs.pop("more of them") >= ours.pop("more of them")
    assert ours == theirs


def test_a_number_cannot_be_added_to_a_word_and_the_store_goes_on(kept: Store) -> None:
    kept.set("w", "word")  # torch's TCPStore loses its connection here
    with pytest.raises(ValueError, match="word"):
        kept.add("w", 1)
    assert kept.get("w") == b"word"


def test_what_no_other_rank_delays_is_not_cut_short(kept: Store) -> None:
    kept.set_timeout(timedelta(microseconds=1))
    kept.set("k", "v")
    assert kept.check(["k"])
    assert kept.add("n", 2) == 2
    with pytest.raises(dist.DistStoreError):
        kept.wait(["no"])


def test_cpp_uses_it_through_a_prefix(kept: Store) -> None:
    prefix = PrefixStore("a", PrefixStore("b", kept))
    prefix.set("k", "v")
    assert kept.get("b/a/k") == b"v"
    assert prefix.get("k") == b"v"
    assert prefix.add("n", 2) == 2
    assert prefix.check(["k", "n"])
    assert prefix.compare_set("k", "v", "w") == b"w"
    prefix.append("k", "x")
    assert prefix.multi_get(["k", "n"]) == [b"wx", b"2"]
    prefix.multi_set(["l"], ["m"])
    assert prefix.num_keys() == 3
    assert prefix.delete_key("l")
    prefix.wait(["k"], MINUTE)
    prefix.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match="300ms"):
        prefix.get("no")


def test_gloo_opens_a_group_over_it(kept: Store) -> None:
    from torch.distributed import ProcessGroupGloo

    def open_rank(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(PrefixStore("g", kept), rank, 2, MINUTE)

    groups: dict[int, ProcessGroupGloo] = {}
    threads = [threading.Thread(target=open_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(groups) == [0, 1]


def test_one_that_waits_gets_what_another_leaves(kept: Store) -> None:
    got = []
    waiter = threading.Thread(target=lambda: got.append(kept.get("later")))
    waiter.start()
    kept.set("later", b"here")
    waiter.join(60)
    assert got == [b"here"]


def test_whoever_waits_is_freed_when_a_member_of_the_roster_is_lost() -> None:
    with SharedCouncil(Rules(first=2)) as council:
        one, other = council.join(), council.join()
        meeting = threading.Thread(target=other.meet, args=(HowFar(), 60))
        meeting.start()
        assert one.meet(HowFar(), 60).members == (0, 1)
        meeting.join(60)
        errors: list[Exception] = []

        def wait() -> None:
            started.set()
            try:
                one.store(1).get("address of rank 1")
            except dist.DistStoreError as error:
                errors.append(error)

        started = threading.Event()
        waiter = threading.Thread(target=wait)
        waiter.start()
        started.wait(60)
        council.kill(1)
        waiter.join(120)
        assert "roster 1 is given up: member 1 (killed by SIGKILL)" in str(errors[0])
        with pytest.raises(dist.DistStoreError):
            one.store(1).set("late", "x")
        one.meet(HowFar(why="lost"), 60)
        assert one.store(2).num_keys() == 0


def test_keys_have_a_limit_in_bytes() -> None:
    keys = Keys(1, quota=100)
    answers = [
        keys.ask(0, AskKeys(n, 1, "set", ("k",), (bytes(n),)))[0].answer for n in (90, 99, 100, 99)
    ]
    assert [answer.error for answer in answers] == ["", "", "full", ""]
    (freed,) = keys.ask(0, AskKeys(5, 1, "delete", ("k",)))
    assert freed.answer.number == 1
    assert keys.ask(0, AskKeys(6, 1, "push", ("q",), (bytes(100),)))[0].answer.error == ""
    assert keys.ask(0, AskKeys(7, 1, "append", ("a",), (b"1",)))[0].answer.error == "full"
