"""``paceline run``: starts a script on several ranks, on one host or many.

A rank's process begins in ``script.py``, which is started by its path and imports none of this.
"""

from .command import run

__all__ = ["run"]
