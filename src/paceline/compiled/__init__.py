"""The path that torch.compile traces: groups, meshes and hooks inside a graph, and what it does.

``torch.compile`` takes groups from the first one on that is made, if it can (``UNAVAILABLE`` says
why not); importing this tells torch nothing.
"""

from .._torch import opaque
from .._torch.first_use import before_next_group, catch_up
from . import wire
from .explain import Planned, Schedule, explain
from .module_hooks import gradient_hook, hooks_of, keep_hooks, on_gradient, refuse_hooks
from .objects import offer_groups
from .settings import Settings
from .step import Step, train_step
from .wrapper_path import offer_forward

UNAVAILABLE = opaque.missing()
before_next_group(wire.define_operators)
before_next_group(offer_groups)
catch_up()
offer_forward()

__all__ = [
    "UNAVAILABLE",
    "Planned",
    "Schedule",
    "Settings",
    "Step",
    "explain",
    "gradient_hook",
    "hooks_of",
    "keep_hooks",
    "on_gradient",
    "refuse_hooks",
    "train_step",
]
