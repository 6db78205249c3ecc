"""What the user wraps: DistributedDataParallel, and the form without a wrapper."""

from .buffers import _BufferCommHookLocation
from .in_graph import forward_in_graph, wrapper_numbered
from .logging_data import dump_environment
from .mixed_precision import _MixedPrecision
from .parallelize import parallelize, replica_of
from .replica import Replica
from .sync_batchnorm import SyncBatchNorm
from .wrapper import DistributedDataParallel, is_strict, set_strict

__all__ = [
    "DistributedDataParallel",
    "Replica",
    "SyncBatchNorm",
    "_BufferCommHookLocation",
    "_MixedPrecision",
    "dump_environment",
    "forward_in_graph",
    "is_strict",
    "parallelize",
    "replica_of",
    "set_strict",
    "wrapper_numbered",
]
