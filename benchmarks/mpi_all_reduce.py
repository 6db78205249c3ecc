"""How long does OpenMPI's all-reduce take, called through mpi4py?

``collectives.py`` starts it under mpirun, one run for each size, and reads the JSON that rank 0
prints. On its own:

    mpirun -np 2 python -m mpi4py benchmarks/mpi_all_reduce.py 4194304 2      bytes, seconds

``-m mpi4py`` because with it a rank that fails ends the others; they would wait for it for ever. A
file of its own because these ranks then need not import torch.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mpi4py import MPI


def measure(size: int, seconds: float) -> list[float]:
    """Seconds per call on ``size`` bytes, from the first rank's start to the last one's end."""
    comm = MPI.COMM_WORLD
    tensor = np.full(size // 4, float(comm.rank + 1), dtype=np.float32)
    comm.Allreduce(MPI.IN_PLACE, tensor)
    assert (tensor == comm.size * (comm.size + 1) / 2).all()
    tensor.fill(0)
    starts, ends = [], []
    until = time.perf_counter() + seconds
    while comm.bcast(len(starts) < 3 or time.perf_counter() < until):
        comm.Barrier()
        starts.append(time.perf_counter())
        comm.Allreduce(MPI.IN_PLACE, tensor)
        ends.append(time.perf_counter())
    first, last = np.array(starts), np.array(ends)
    comm.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
    comm.Allreduce(MPI.IN_PLACE, last, MPI.MAX)
    return [float(span) for span in last - first]


if __name__ == "__main__":
    spans = measure(int(sys.argv[1]), float(sys.argv[2]))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"library": MPI.Get_library_version().split(",")[0], "spans": spans}))
