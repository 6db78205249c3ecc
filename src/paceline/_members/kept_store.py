"""A torch store whose keys lie with the keeper, one for each roster."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from _paceline_store import AskingStore, checked

from .keys import KeyOp, KeysAnswer
from .questions import Questions


class KeptStore(AskingStore):
    """Where the members of a roster find what others left for them.

    Every call raises ``DistStoreError`` as soon as the roster is over, also one that waits.
    """

    def __init__(self, roster: int, questions: Questions):
        super().__init__()
        self._roster = roster
        self._questions = questions

    def clone(self) -> Store:
        """Give a store of the same keys; any thread may use either."""
        return self

    def ask(
        self,
        op: KeyOp,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        number: int = 0,
        timeout: timedelta | None = None,
    ) -> KeysAnswer:
        """Ask the keeper."""
        seconds = self.seconds_for(op, timeout)
        answer = self._questions.ask(self._roster, op, keys, values, number, seconds)
        found: KeysAnswer = checked(answer, keys, seconds, f"store of roster {self._roster}: ")
        return found
