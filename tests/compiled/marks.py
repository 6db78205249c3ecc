"""What tests of compiled code need, or live with."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

COMPILER = os.environ.get("CXX") or "g++"


def _lacking() -> str:
    """What Inductor would not find here when it compiles C++; empty if all is there."""
    if shutil.which(COMPILER) is None:
        return f"a C++ compiler, and there is no {COMPILER} here"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h, which is not here (Debian: apt install python3-dev)"
    if shutil.which("openssl") is None:  # it hashes headers with it
        return "the command openssl, which is not here"
    return ""


needs_compiler = pytest.mark.skipif(bool(_lacking()), reason=f"Inductor needs {_lacking()}")
# torch's own, from Dynamo: it makes an object of every autograd.Function that it traces
no_instances = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
