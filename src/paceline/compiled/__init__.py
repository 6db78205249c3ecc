"""The path that torch.compile traces: groups, meshes and hooks inside a graph, and what it does.

Importing it makes ``torch.compile`` take groups (``UNAVAILABLE`` says why, where it cannot).
"""

from .explain import Planned, Schedule, explain
from .module_hooks import gradient_hook, hooks_of, keep_hooks, on_gradient, refuse_hooks
from .objects import offer_groups
from .settings import Settings
from .step import Step, train_step
from .wrapper_path import offer_forward

UNAVAILABLE = offer_groups()
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
