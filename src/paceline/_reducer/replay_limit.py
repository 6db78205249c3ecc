"""ReplayLimit: ends a replay that would never end by itself.

When a rank does not come, the others' collectives wait on the device. torch's watchdog sees to that
for calls that were made, and knows nothing of those inside a CUDA graph. So a thread looks whether
replays come to their end; after the group's timeout it ends the group, which frees the device, and
the next step raises.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ..errors import CollectiveTimeoutError
from ..groups import Group
from ..recorder import events
from .header import Kept, Mailbox

if TYPE_CHECKING:
    from .reducer import Reducer

log = logging.getLogger(__name__)
_limits: weakref.WeakKeyDictionary[Mailbox, ReplayLimit] = weakref.WeakKeyDictionary()


class ReplayLimit:
    """Looks after the replays of one reducer; it knows the group and the mailbox only."""

    def __init__(self, group: Group, mailbox: Mailbox) -> None:
        self._group, self._mailbox = weakref.ref(group), weakref.ref(mailbox)
        self._latest: weakref.ref[Kept] | None = None
        self._began = 0.0
        self._thread: threading.Thread | None = None

    def begins(self) -> None:
        """A replay is being started: what is kept of the one before is about to be written anew."""
        self._began = time.monotonic()

    def started(self, kept: Kept) -> None:
        """A replay runs that has ended when ``kept`` has come."""
        self._latest, self._began = weakref.ref(kept), time.monotonic()
        if self._thread is None and not kept.is_completed():
            self._thread = threading.Thread(target=self._look, name="paceline-replays", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while True:
            group = self._group()
            if group is None or self._mailbox() is None:
                return
            limit = group.timeout.total_seconds()
            del group
            time.sleep(min(1.0, limit / 10))
            kept = None if self._latest is None else self._latest()
            late = time.monotonic() - self._began > limit
            if kept is not None and late and not kept.is_completed():
                self.end(kept, limit)
                return

    def end(self, kept: Kept, limit: float) -> None:
        """Free the device; whoever reads what it left gets the error instead."""
        group, mailbox = self._group(), self._mailbox()
        if group is None or mailbox is None:
            return
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        number = 0 if kept.entry is None else kept.entry.sequence
        error = CollectiveTimeoutError(group.rank(), "a replayed step", number, others, limit)
        mailbox.lost = error
        if kept.entry is not None:
            events.failed(kept.entry, error)
        log.error("%s", error)
        group.abort()


def limit_of(reducer: Reducer) -> ReplayLimit:
    """The one of a reducer."""
    mailbox = reducer.mailbox
    if mailbox not in _limits:
        _limits[mailbox] = ReplayLimit(reducer.group, mailbox)
    return _limits[mailbox]
