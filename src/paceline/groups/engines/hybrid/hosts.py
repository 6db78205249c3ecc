"""Which ranks share a host, and the gloo groups between hosts, for the hybrid engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed import Work as TorchWork

from ...._transport import Clock
from ...engine import Call
from ..gloo.engine import GlooEngine, open_gloo
from ..gloo.links import Links


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group by host, seen from one of them."""

    components: Sequence[Sequence[int]]
    rank: int

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """(host, place on it) of each rank, in the order of ranks."""
        found = {r: (h, i) for h, ranks in enumerate(self.components) for i, r in enumerate(ranks)}
        return dict(sorted(found.items()))

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.places[self.rank][0]

    @property
    def place(self) -> int:
        """This rank's place on its host, which is its rank in the host's shared memory."""
        return self.places[self.rank][1]

    @property
    def here(self) -> Sequence[int]:
        """The ranks of this host."""
        return self.components[self.host]

    @property
    def elsewhere(self) -> list[int]:
        """The ranks of all other hosts."""
        return [r for r, (host, _) in self.places.items() if host != self.host]

    @cached_property
    def order(self) -> list[int]:
        """All ranks, host after host."""
        return [r for ranks in self.components for r in ranks]

    @cached_property
    def equal(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return len({len(ranks) for ranks in self.components}) == 1

    def stripe(self, place: int) -> list[int]:
        """The ranks at ``place`` of every host."""
        return [ranks[place] for ranks in self.components]


@dataclass(frozen=True)
class Gloo:
    """The gloo groups of one rank: of all ranks, and of its stripe, if it has one."""

    everyone: GlooEngine
    stripe: GlooEngine
    links: Links

    @classmethod
    def open(cls, store: Store, hosts: Hosts, clock: Clock) -> Gloo:
        """Connect to the others; every rank of a group on several hosts calls it."""

        def join(name: str, rank: int, size: int) -> GlooEngine:
            left, cpu = timedelta(seconds=clock.left()), torch.device("cpu")
            inner = open_gloo(PrefixStore(name, store), rank, size, left, cpu)
            return GlooEngine(inner, cpu)

        size, place = len(hosts.places), hosts.place
        with Links.watch(PrefixStore("links", store), hosts.rank, size, clock) as links:
            everyone = stripe = join("everyone", hosts.rank, size)
            if place == 0 or hosts.equal:
                stripe = join(f"stripe/{place}", hosts.host, len(hosts.components))
        return cls(everyone, stripe, links[0])

    def send(self, data: Tensor, rank: int, tag: int) -> TorchWork:
        """Start sending ``data``."""
        return self.everyone.start(Call("send", [data], root=rank, tag=tag))

    def recv(self, data: Tensor, rank: int, tag: int) -> TorchWork:
        """Start receiving into ``data``."""
        return self.everyone.start(Call("recv", (), [data], root=rank, tag=tag))

    def close(self) -> None:
        """Leave the groups."""
        for engine in {self.everyone, self.stripe}:
            engine.shutdown()
        self.links.close()
