"""Process groups as objects: made, passed, split, ended. See ``group.py`` for the interface."""

from torch.distributed import ProcessGroup, ReduceOp, Store

from .._torch.first_use import before_next_group
from .backends import (
    Availability,
    EngineBackend,
    ProcessGroupFactory,
    capabilities,
    register_backend,
)
from .engine import Call, Capabilities, Engine
from .factory import (
    current_process_group,
    group_or_default,
    group_to_call,
    new_group,
    process_group,
)
from .group import Group
from .options import GroupOptions
from .torch_init import quickest as quickest
from .torch_world import offer_barriers, offer_to_init_process_group, store_of
from .traffic import Traffic
from .work import FINISHED, Work

offer_to_init_process_group()
before_next_group(offer_barriers)

__all__ = [
    "FINISHED",
    "Availability",
    "Call",
    "Capabilities",
    "Engine",
    "EngineBackend",
    "Group",
    "GroupOptions",
    "ProcessGroup",
    "ProcessGroupFactory",
    "ReduceOp",
    "Store",
    "Traffic",
    "Work",
    "capabilities",
    "current_process_group",
    "group_or_default",
    "group_to_call",
    "new_group",
    "process_group",
    "register_backend",
    "store_of",
]
