"""Training that goes on: ranks may be lost, leave and join between and within steps.

``loop.py`` says how a step is committed or done again; ``crew.py`` how members meet; ``state.py``
what makes up a rank's state, ``handing.py`` how it comes to another rank, ``saves.py`` how it is
saved.
"""

from .alone import group
from .entry import job
from .forked import note_fork as note_fork  # for processes that members are forked from
from .loop import Job
from .step import JobStep

__all__ = ["Job", "JobStep", "group", "job"]
