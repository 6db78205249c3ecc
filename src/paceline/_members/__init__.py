"""Who takes part in a job that ranks may leave and join: the words that are used for it.

``roster.py`` says what a rank of such a job sees of the others, and nothing about how they are
reached; ``agents.py`` has what launchers and the process that keeps the roster tell each other.
"""

from .agents import (
    AgentHello,
    AgentWord,
    EndJob,
    Enlist,
    Enlisted,
    Fence,
    Formed,
    Gone,
    KeeperWord,
    NoMore,
    Over,
)
from .roster import HowFar, Members, Roster, RosterChange

__all__ = [
    "AgentHello",
    "AgentWord",
    "EndJob",
    "Enlist",
    "Enlisted",
    "Fence",
    "Formed",
    "Gone",
    "HowFar",
    "KeeperWord",
    "Members",
    "NoMore",
    "Over",
    "Roster",
    "RosterChange",
]
