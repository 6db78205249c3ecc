"""Ranks that answer late because the machine is busy, where a test is about what they answer."""

from paceline.recorder import channel, listener, peers
from paceline.recorder.comparing import Comparing
from paceline.recorder.watch import watch


def be_patient(seconds: float) -> None:
    """Let this process wait so long for what other ranks say, and for what they ask.

    And until they have heard what it says when it ends.
    """
    watch.peers.patience = Comparing.patience = seconds
    listener.PATIENCE = peers.LEAVING = channel.TELLING = seconds
