"""Who takes part in a job that ranks may leave and join: the words that are used for it.

``roster.py`` says what a rank of such a job sees of the others, and nothing about how they are
reached.
"""

from .roster import HowFar, Members, Roster, RosterChange

__all__ = ["HowFar", "Members", "Roster", "RosterChange"]
