"""What agents and the keeper tell each other; an agent starts and watches the processes of a host.

An agent is connected to the socket that its ranks use, and its first word is :class:`AgentHello`.
All words are msgpack of these types, each with its length before it, as the ranks' are.
"""

from __future__ import annotations

import msgspec

from .words import Alive


class AgentHello(msgspec.Struct, frozen=True, tag=True):
    """The first word of each connection: the keeper may be another one than before."""

    host: str
    ranks: int  # that are to train here; processes beyond are spares
    members: dict[int, int] = {}
    """The processes that live here: their numbers and ids. Members that the keeper knows to be of
    this host and that are not among them are gone, and no number up to the largest is given."""
    gone: dict[int, str] = {}
    """Members whose ends it saw, the latest, in words: the last keeper may have died with them."""


class Enlist(msgspec.Struct, frozen=True, tag=True):
    """Give me the number of a process that I am about to start."""


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A member's process has ended."""

    member: int
    how: str  # in words: "it was killed by SIGKILL"
    failed: bool = True  # False: its program came to its end


class NoMore(msgspec.Struct, frozen=True, tag=True):
    """No process will be started here any more, for the reason given."""

    why: str


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    """A member is to leave after its step."""

    member: int
    why: str


class EndJob(msgspec.Struct, frozen=True, tag=True):
    """All members are to end, for the reason given."""

    why: str


AgentWord = AgentHello | Enlist | Gone | NoMore | Dismiss | EndJob  # …and Alive, which comes back


class Enlisted(msgspec.Struct, frozen=True, tag=True):
    """The number for the process that is about to be started; answers come in order."""

    member: int


class Formed(msgspec.Struct, frozen=True, tag=True):
    """The members of a roster have all said that they are ready."""

    number: int
    members: tuple[int, ...]  # in the order of their ranks
    waiting: tuple[int, ...] = ()  # members that are connected and in no roster
    gone: dict[int, str] = {}  # of the roster before, and why
    seconds: float = 0.0  # since the first of these was known to be gone
    steps: int = 0  # that are committed


class Fence(msgspec.Struct, frozen=True, tag=True):
    """End this member's process, since it has not been heard of; the answer is :class:`Gone`."""

    member: int
    why: str


class Over(msgspec.Struct, frozen=True, tag=True):
    """The job has ended; those that wait have been told."""

    why: str
    failed: bool


class HostWaits(msgspec.Struct, frozen=True, tag=True):
    """The job has as many hosts as it may; numbers come once one of them is gone."""

    most: int


KeeperWord = Enlisted | Formed | Fence | Over | HostWaits | Alive
