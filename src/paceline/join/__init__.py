"""Training goes on when ranks have unequal amounts of data: Join, Joinable and JoinHook.

``protocol.py`` has the protocol; ``parting.py`` says what happens when a rank fails inside it.
"""

from .protocol import Join, Joinable, JoinConfig, JoinHook

__all__ = ["Join", "JoinConfig", "JoinHook", "Joinable"]
