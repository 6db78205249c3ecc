"""``make gpu``: the tests that want a GPU, over NCCL if it takes several ranks on one."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from . import machine

TESTS = (
    "tests/gpu",
    "tests/ddp/test_gpu.py",
    "tests/hooks/test_gpu.py",
    "tests/recorder/test_gpu.py",
    "tests/compiled/test_gpu.py",
)
NO_GPU = """make gpu: torch sees no GPU here, so nothing was tested.
torch {version} was built {built}. With a GPU, install a build of torch for it; without one,
`make test` runs tests/gpu on the CPU, but for what needs CUDA."""


def main(arguments: list[str]) -> int:
    """Run them and return pytest's status; 2 where there is no GPU."""
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        print(NO_GPU.format(version=torch.__version__, built=built), file=sys.stderr)
        return 2
    here = machine.here()
    if here.backend == "nccl" and here.count < 2:  # tests outside of tests/gpu look at it
        os.environ[machine.SHARING] = "1"
    return int(pytest.main([*TESTS, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
