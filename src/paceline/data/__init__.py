"""Which samples a rank gets, and which random numbers: samplers, shards of a global batch.

::

    sampler.py     DistributedSampler: an epoch dealt out to ranks, every sample once
    shards.py      Shard, share_out: the parts of a global batch and who computes which; pure
    randomness.py  keyed_random: random numbers that follow from the shard alone
"""

from .randomness import keyed_random
from .sampler import DistributedSampler
from .shards import Shard, share_out

__all__ = ["DistributedSampler", "Shard", "keyed_random", "share_out"]
