"""Paceline: data-parallel training for PyTorch.

::

    errors.py      every error we raise
    groups/        process groups as objects; documented in groups/group.py
    _transport/    moves bytes: shared memory, how ranks meet, objects without pickle
    testing.py     ranks as threads and as processes, for your own tests
"""

from . import errors, groups
from .groups import (
    Group,
    ProcessGroup,
    ProcessGroupFactory,
    ReduceOp,
    Store,
    Work,
    current_process_group,
    new_group,
    process_group,
    register_backend,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "Group",
    "ProcessGroup",
    "ProcessGroupFactory",
    "ReduceOp",
    "Store",
    "Work",
    "__version__",
    "current_process_group",
    "errors",
    "groups",
    "new_group",
    "process_group",
    "register_backend",
]
