"""Jobs that ranks may leave and join: starts members one by one, and others for those lost.

torch's agent (``../agent.py``) starts all ranks again when one has failed. Here each process is a
member of its own: when it ends, the others are told at once and go on, and another is started.

- ``places.py`` decides, without a process or a socket, who is started when;
- ``process.py`` is one member's process, ``keeper.py`` the one that holds the roster, ``link.py``
  the connection to it;
- ``agent.py`` runs all of them; ``story.py`` tells what became of the job.
"""

from .launch import Elastic, launch_elastic

__all__ = ["Elastic", "launch_elastic"]
