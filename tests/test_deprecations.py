"""Nobody who imports or uses paceline hears that something of torch's is deprecated.

In fresh interpreters, where Python's warnings of that kind are errors; torch's C++ and its logs
warn on stderr, which is read.
"""

import re
import subprocess
import sys

IMPORT = "import paceline, paceline.testing, paceline.integrations"

USE = """
import torch, torch.distributed as dist, paceline
from torch import nn
from paceline import hooks, optim

def train(group):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    ddp = paceline.DistributedDataParallel(paceline.SyncBatchNorm.convert_sync_batchnorm(model),
                                           process_group=group)
    ddp.register_comm_hook(group, hooks.fp16_compress_hook)
    zero = optim.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, process_group=group)
    with paceline.Join([ddp]):
        for _ in range(2):
            ddp(torch.ones(3, 4)).sum().backward()
            optim.clip_grad_norm_(ddp.parameters(), 1.0)
            zero.step()
    group.all_gather_object({"rank": group.rank()})
    for other in (group.split([0]), group.reconfigure([0])):
        other.barrier()

for backend in ("gloo", "auto", "threads", "fake"):
    with paceline.new_group(backend, store=dist.HashStore(), rank=0, world_size=1) as group:
        train(group)
dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
train(dist.group.WORLD)
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = paceline.DistributedDataParallel(nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
paceline.install()
paceline.uninstall()
"""

COMPILE = """
import torch, torch.distributed as dist, paceline

def doubled(x, group):
    group.all_reduce(x)
    return x + group.size()

with paceline.new_group("gloo", store=dist.HashStore(), rank=0, world_size=1) as group:
    for backend in ("eager", "aot_eager"):
        torch.compile(doubled, backend=backend, fullgraph=True)(torch.ones(2), group)
"""


def warnings_of(script: str, *kinds: str) -> list[str]:
    """What a script says on stderr of deprecated things; it must end well, without ``kinds``."""
    errors = [part for kind in kinds for part in ("-W", f"error{kind}")]
    command = [sys.executable, *errors, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stderr.splitlines() if re.search("deprecat", line, re.I)]


DEPRECATED = ("::DeprecationWarning", "::PendingDeprecationWarning", "::FutureWarning")


def test_importing_paceline_warns_of_nothing() -> None:
    assert warnings_of(IMPORT, "") == []


def test_groups_wrappers_and_optimizers_use_nothing_deprecated() -> None:
    assert warnings_of(USE, *DEPRECATED) == []


def test_groups_inside_graphs_use_nothing_deprecated() -> None:
    assert warnings_of(COMPILE, *DEPRECATED) == []
