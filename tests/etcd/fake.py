"""An etcd in this process, whose answers can be lost and whose leases end when a test says so."""

import threading
from collections.abc import Callable, Mapping, Sequence

from paceline._etcd import Condition, KeptKey, Put
from paceline.errors import StoreLostError


class FakeEtcd:
    """What ``Etcd`` is, without a server. ``fault`` is asked before and after each call."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[KeptKey, int]] = {}  # with their lease
        self.leases: set[int] = set()
        self.revision = 1
        self.fault: Callable[[str, str], bool] = lambda call, when: False
        self.lock = threading.Lock()

    def grant(self, seconds: int) -> int:
        with self.lock:
            self._may_fail("grant", "before")
            self.revision += 1
            self.leases.add(self.revision)
            return self.revision

    def keep(self, lease: int) -> bool:
        with self.lock:
            self._may_fail("keep", "before")
            return lease in self.leases

    def revoke(self, lease: int) -> None:
        with self.lock:
            self._may_fail("revoke", "before")
            self.expire(lease)

    def expire(self, lease: int) -> None:
        """End a lease."""
        self.leases.discard(lease)
        self.keys = {k: kept for k, kept in self.keys.items() if kept[1] != lease}

    def read(self, *keys: str) -> dict[str, KeptKey]:
        with self.lock:
            self._may_fail("read", "before")
            return {key: self.keys[key][0] for key in keys if key in self.keys}

    def write(self, puts: Mapping[str, Put], conditions: Sequence[Condition]) -> int | None:
        with self.lock:
            self._may_fail("write", "before")
            done = self._write(puts, conditions)
            self._may_fail("write", "after")
            return done

    def _write(self, puts: Mapping[str, Put], conditions: Sequence[Condition]) -> int | None:
        if any(put.lease and put.lease not in self.leases for put in puts.values()):
            return None
        if not all(self._holds(one) for one in conditions):
            return None
        self.revision += 1
        for key, put in puts.items():
            before = self.keys.get(key)
            created = before[0].created if before else self.revision
            self.keys[key] = KeptKey(put.value, created, self.revision), put.lease
        return self.revision

    def _holds(self, condition: Condition) -> bool:
        kept = self.keys.get(condition.key)
        if condition.changed is not None:
            return condition.changed == (kept[0].changed if kept else 0)
        return condition.created == (kept[0].created if kept else 0)

    def _may_fail(self, call: str, when: str) -> None:
        if self.fault(call, when):
            raise StoreLostError("fake", f"{call} was lost {when} it was done")
