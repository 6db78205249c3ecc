"""Who takes part in a job that ranks may leave and join.

``roster.py`` says what a rank of such a job sees of the others, and nothing about how they are
reached. ``council.py`` decides who trains together. ``in_process.py`` is for ranks that are
threads. ``keeper.py`` is the process that holds a council for others (``python -m
paceline._members``), ``client.py`` how a rank reaches it, ``agents.py`` what launchers and it tell
each other. ``terms.py`` says which host has the keeper, where that is decided in a store outside
the job. ``store_host.py`` answers the ranks of a run that stay the same. Importing any of it
does not import torch.
"""

from . import messages as messages
from .agents import (
    AgentHello,
    AgentWord,
    Dismiss,
    EndJob,
    Enlist,
    Enlisted,
    Fence,
    Formed,
    Gone,
    HostWaits,
    KeeperWord,
    NoMore,
    Over,
)
from .client import connect
from .council import Council, Rules
from .in_process import SharedCouncil, ThreadMember
from .roster import NOTHING, HowFar, Members, Roster, RosterChange
from .store_host import StoreHost
from .terms import RESIGNED, ChosenTerm, KeeperSeat, KeeperTerms, SeenTerms
from .words import Alive

__all__ = [
    "NOTHING",
    "RESIGNED",
    "AgentHello",
    "AgentWord",
    "Alive",
    "ChosenTerm",
    "Council",
    "Dismiss",
    "EndJob",
    "Enlist",
    "Enlisted",
    "Fence",
    "Formed",
    "Gone",
    "HostWaits",
    "HowFar",
    "KeeperSeat",
    "KeeperTerms",
    "KeeperWord",
    "Members",
    "NoMore",
    "Over",
    "Roster",
    "RosterChange",
    "Rules",
    "SeenTerms",
    "SharedCouncil",
    "StoreHost",
    "ThreadMember",
    "connect",
]
