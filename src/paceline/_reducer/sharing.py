"""What ranks that share a GPU have to avoid."""

from __future__ import annotations

import os


def has_part_of_a_gpu() -> bool:
    """Whether MPS lets this process use a part of the GPU's processors only.

    Kernels of NCCL beside those of a compiled step then stand still after some steps: in a graph of
    torch's alone as well, with 100 / ranks percent each, seen on an H200 with NCCL 2.30 and driver
    580. With all buckets at the end they do not. Ranks that share a GPU gain nothing by sending
    earlier.
    """
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
    try:
        return 0.0 < float(share) < 100.0
    except ValueError:
        return False
