"""Which samples a rank gets, and which random numbers: samplers, shards of a global batch.

::

    sampler.py     DistributedSampler: an epoch dealt out to ranks, every sample once
    loader.py      ShardedLoader: an epoch in steps, a step in shards, for any number of ranks
    cutting.py     how an epoch is cut into these; pure
    shards.py      Shard, share_out: what a shard is called and who computes it; pure
    fetching.py    a shard's samples, from this process or from workers
    randomness.py  keyed_random: random numbers that follow from the shard alone
"""

from .loader import ShardedLoader, ShardedStep
from .randomness import keyed_random
from .sampler import DistributedSampler
from .shards import Shard, share_out

__all__ = [
    "DistributedSampler",
    "Shard",
    "ShardedLoader",
    "ShardedStep",
    "keyed_random",
    "share_out",
]
