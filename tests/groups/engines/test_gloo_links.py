"""Which sockets of this process are taken for gloo's, while others open and close theirs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from paceline._transport import Clock
from paceline.groups.engines.gloo.links import Links

_SOON = timedelta(seconds=60)


class _StoreWithAMoment:
    """A store that does something once this rank's ports are told and nothing is copied yet."""

    def __init__(self, moment: Callable[[], None]) -> None:
        self.store = HashStore()
        self.moment = moment

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)
        self.moment()


def _pair() -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    return listener, near, far


def test_a_connection_that_was_opened_meanwhile_is_cut() -> None:
    with Links.watch(HashStore(), 0, 1, Clock(_SOON)) as found:
        listener, near, far = _pair()
    found[0].cut()
    assert near.recv(1) == b""  # the end that was accepted at our port is shut down
    found[0].close()
    for each in (listener, near, far):
        each.close()


def test_a_socket_that_its_owner_closes_meanwhile_is_left_out() -> None:
    mine: list[socket.socket] = []

    def close_all() -> None:
        for each in mine:
            each.close()

    with Links.watch(_StoreWithAMoment(close_all), 0, 1, Clock(_SOON)) as found:
        mine += _pair()
    found[0].cut()
    found[0].close()


def test_a_number_that_became_another_connection_is_not_copied() -> None:
    other = _pair()
    mine: list[socket.socket] = []

    def replace_all() -> None:
        for each in mine:
            os.dup2(other[1].fileno(), each.fileno())

    with Links.watch(_StoreWithAMoment(replace_all), 0, 1, Clock(_SOON)) as found:
        mine += _pair()
    found[0].cut()
    other[1].send(b"x")
    assert other[2].recv(1) == b"x"
    found[0].close()
    for each in (*mine, *other):
        each.close()


def test_no_descriptor_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Links.watch(HashStore(), 0, 1, Clock(_SOON)) as found:
        pairs = _pair()
    found[0].close()
    for each in pairs:
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("text", ["Connection closed by peer [127.0.0.1]:29500"])
def test_the_ranks_of_an_address_are_found(text: str) -> None:
    links = Links([], [[("10.0.0.1", 1)], [("127.0.0.1", 2)]])
    assert links.ranks_in(text) == [1]
