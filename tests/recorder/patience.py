"""Ranks that answer late because the machine is busy, where a test is about what they answer."""

from paceline.recorder import listener
from paceline.recorder.watch import watch


def be_patient(seconds: float) -> None:
    """Let this process wait so long for what other ranks say, and for what they ask."""
    watch.peers.patience = seconds
    listener.PATIENCE = seconds
