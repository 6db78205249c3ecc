"""Ranks that answer late because the machine is busy, where a test is about what they answer."""

from paceline.recorder import channel, events, listener, peers
from paceline.recorder import watch as watching
from paceline.recorder.account import Account
from paceline.recorder.comparing import Comparing
from paceline.recorder.watch import watch
from tests.waiting import until


def be_patient(seconds: float) -> None:
    """Let this process wait so long for what other ranks say, and for what they ask.

    And until they have heard what it says when it ends, it has read what they said when they ended,
    and its errors are explained.
    """
    watch.peers.patience = Comparing.patience = seconds
    listener.PATIENCE = peers.LEAVING = channel.TELLING = seconds
    peers.READING = watching.AT_EXIT = seconds


def await_line(board: events.Board | None, rank: int, words: str) -> None:
    """Wait until another rank of the group is at a line with these words in it."""
    assert board is not None

    def is_there() -> bool:
        said = watch.peers.hear(board, [rank])[rank]
        return isinstance(said, Account) and said.user is not None and words in said.user.text

    assert until(is_there), f"rank {rank} does not come to: {words}"
