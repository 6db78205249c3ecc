"""Optimizers that know of other ranks.

``rounds/rounds.py`` says how ranks train alone for a while and what they exchange.
"""

from .averagers import (
    ModelAverager,
    PeriodicModelAverager,
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from .clip import Gradients, clip_grad_norm_
from .hierarchical import HierarchicalModelAverager
from .in_backward import InBackward
from .post_local_sgd import PostLocalSGDOptimizer
from .rounds import DiLoCo, LocalSGD
from .scaler import GradScaler
from .zero import ZeroRedundancyOptimizer

__all__ = [
    "DiLoCo",
    "GradScaler",
    "Gradients",
    "HierarchicalModelAverager",
    "InBackward",
    "LocalSGD",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "clip_grad_norm_",
    "get_params_to_average",
]
