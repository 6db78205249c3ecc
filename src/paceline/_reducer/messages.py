"""Messages of failed ranks, left in the group's store where only the header is read.

On a device ranks learn from a header, a pass later, that one of them could not go on. By then that
rank may have gone, so they cannot ask it. It leaves its words where the ranks of the group met; if
they met nowhere, or the recorder is off, there are none.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from ..groups import Group

_LONGEST = 4000  # characters of a message
_PATIENCE = timedelta(seconds=5)


def leave(group: Group, model: int, number: int, text: str) -> None:
    """Say why this rank cannot go on in its pass of that number."""
    store = _store_of(group)
    if store is not None:
        with contextlib.suppress(Exception):  # the first error is the user's
            store.set(_key(group, model, number, group.rank()), text[:_LONGEST])


def left(group: Group, model: int, number: int) -> dict[int, str]:
    """What ranks said of a pass, as far as they did."""
    store, found = _store_of(group), dict[int, str]()
    for rank in range(group.size()) if store is not None else ():
        with contextlib.suppress(Exception):
            key = _key(group, model, number, rank)
            if store.check([key]):
                store.wait([key], _PATIENCE)
                found[rank] = store.get(key).decode(errors="replace")
    return found


def _key(group: Group, model: int, number: int, rank: int) -> str:
    name = "" if group.board is None else group.board.name
    return f"paceline/trouble/{name}/{model}/{number}/{rank}"


def _store_of(group: Group) -> Any:
    return None if group.board is None else group.board.store()
