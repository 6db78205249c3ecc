"""What the user wraps: DistributedDataParallel, and the form without a wrapper."""

from .buffers import _BufferCommHookLocation
from .in_graph import forward_in_graph, wrapper_numbered
from .logging_data import dump_environment
from .mixed_precision import _MixedPrecision
from .replica import Replica
from .replicate import Replicate, Replicated, ReplicateState, replicate
from .shard_replica import ShardReplica as ShardReplica
from .stand_in import derived_from_torch as derived_from_torch
from .stand_in import made_by_torch as made_by_torch
from .stand_in import stand_for_torchs as stand_for_torchs
from .strictness import is_strict, set_strict
from .sync_batchnorm import SyncBatchNorm
from .wrapper import DistributedDataParallel

__all__ = [
    "DistributedDataParallel",
    "Replica",
    "Replicate",
    "ReplicateState",
    "Replicated",
    "SyncBatchNorm",
    "_BufferCommHookLocation",
    "_MixedPrecision",
    "dump_environment",
    "forward_in_graph",
    "is_strict",
    "replicate",
    "set_strict",
    "wrapper_numbered",
]
