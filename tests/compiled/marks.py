"""What tests of compiled code need, or live with."""

from __future__ import annotations

import os
import shutil

import pytest

COMPILER = os.environ.get("CXX") or "g++"

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None,
    reason=f"Inductor needs a C++ compiler, and there is no {COMPILER} here",
)
# torch's own, from Dynamo: it makes an object of every autograd.Function that it traces
no_instances = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
