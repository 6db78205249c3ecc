"""The stores of several machines with a key: strangers at the port neither read nor write them."""

import contextlib
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from _paceline_store import store_at
from paceline._doors import SIDE_DOOR, JobKey, SideDoor
from paceline._members.frames import pack
from paceline._members.keys import AskKeys
from paceline.cli.run.machine_stores import LockedStores
from paceline.cli.run.plan import Launch
from tests.doors.ports import ports_here
from tests.doors.test_strangers import attacked, flood, garbage, half_handshakes

PATIENCE = timedelta(seconds=120)
ADDRESS = "127.0.0.7"


@pytest.fixture(scope="module")
def key() -> JobKey:
    return JobKey.make()


@pytest.fixture
def machines(tmp_path, monkeypatch, key):
    """Two machines that have met: the first keeps the stores."""
    key.write(tmp_path / "job.key")
    monkeypatch.setenv("PACELINE_STORE", "")
    monkeypatch.setenv(SIDE_DOOR, "")
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port = probe.getsockname()[1]
    plans = [Launch(1, 2, 2, n, ADDRESS, port, key=str(tmp_path / "job.key")) for n in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda plan: LockedStores(plan, PATIENCE), plans)
    yield first, second
    second.close()
    first.close()


def test_both_machines_and_their_ranks_have_the_same_keys(machines) -> None:
    first, second = machines
    first.store.set("a", "from the first")
    assert second.store.get("a") == b"from the first"
    assert second.store.add("n", 2) + first.store.add("n", 3) == 7
    first.begin(4)
    stores = []
    for machine in machines:
        machine.ranks_meet_at(4)
        stores.append(store_at(os.environ["PACELINE_STORE"], PATIENCE))
    stores[1].set("rank", "there")
    assert stores[0].get("rank") == b"there"
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        stores[1].wait(["never"], timedelta(milliseconds=50))


def test_the_stores_are_at_one_address_and_only_of_the_first_machine(machines) -> None:
    first, second = machines
    assert (first.hosts, second.hosts) == (True, False)
    packed = struct.unpack("<I", socket.inet_aton(ADDRESS))[0]
    mine = {place for place in ports_here() if place.startswith(f"{packed:08X}")}
    assert mine == {f"{packed:08X}:{first.port:04X}"}
    assert not any(place.endswith(f":{first.port:04X}") for place in ports_here() - mine)


def test_each_machine_has_a_side_door_for_its_ranks_that_leads_to_the_other(machines) -> None:
    doors = []
    for machine in machines:
        machine.ranks_meet_at(1)
        doors.append(SideDoor.of_launcher())
    assert doors[0].folder != doors[1].folder
    assert (doors[0].host, doors[0].port) == (ADDRESS, machines[0].port), "the one port"
    assert doors[1].host == "127.0.0.1", "the interface that leads to the first"
    assert f"0100007F:{doors[1].port:04X}" in ports_here()


def test_keys_are_neither_read_nor_written_without_the_key_file(machines) -> None:
    first, second = machines
    first.store.set("secret", "x")
    where = (ADDRESS, first.port)
    with pytest.raises(dist.DistError):
        dist.TCPStore(*where, None, False, timedelta(seconds=1), wait_for_workers=False)
    for op in ("set", "get", "delete"):
        with socket.create_connection(where, 10) as talk:
            values = (b"y",) if op == "set" else ()
            talk.sendall(pack(AskKeys(1, 0, op, ("secret",), values)))
            talk.settimeout(60)
            with contextlib.suppress(ConnectionError):
                assert talk.recv(100) == b""
    assert second.store.get("secret") == b"x"


@pytest.mark.parametrize("kind", [garbage, half_handshakes, flood])
def test_a_machine_is_not_held_up_by_strangers_who_come_in_crowds(machines, kind, key) -> None:
    """How long a key took is printed; that all came is what counts."""
    first, second = machines
    took = []
    with attacked(kind, (ADDRESS, first.port), key):
        for number in range(50):
            began = time.monotonic()
            assert second.store.add("n", 1) == number + 1
            took.append(time.monotonic() - began)
    print(f"{kind.__name__}: a key of the other machine came within {max(took):.4f} s")


def test_the_first_machines_end_is_told_to_the_others(machines) -> None:
    first, second = machines
    second.store.set("a", "b")
    first.close()
    with pytest.raises(dist.DistNetworkError, match="cannot be reached"):
        second.store.get("a")


def test_a_machine_that_leaves_closes_its_connections(machines) -> None:
    first, second = machines
    second.store.set("key", "value")
    lines = [line for stores in machines for line in stores.store.lines._free]
    assert lines
    second.close()
    first.close()
    assert {line.fileno() for line in lines} == {-1}
