"""``paceline run --ranks-per-gpu`` with real ranks on a real GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .machine import here

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SCRIPT = """
import os, torch, torch.distributed as dist, paceline
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
model = paceline.DistributedDataParallel(torch.nn.Linear(2, 1).cuda(), device_ids=[local])
x = torch.full((1, 2), 1.0 + dist.get_rank(), device="cuda")
model(x).sum().backward()
print(dist.get_rank(), model.module.weight.grad.tolist(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_script_for_several_gpus_runs_on_one(ranks: int, tmp_path: Path) -> None:
    if here().backend != "nccl":
        pytest.skip(here().why)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--nproc", str(ranks)]
    ended = subprocess.run(
        [*command, "--ranks-per-gpu", str(ranks), str(script)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    mean = sum(range(1, ranks + 1)) / ranks
    for rank in range(ranks):
        assert f"{rank} [[{mean}, {mean}]]" in ended.stdout
    assert f"{ranks} ranks on each GPU over NCCL" in ended.stderr
