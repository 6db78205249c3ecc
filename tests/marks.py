"""What tests of several folders need; where it is missing they are skipped and say why."""

from __future__ import annotations

import pytest

from paceline.groups import capabilities

SHM = capabilities()["shm"]
USUAL = "shm" if SHM.available else "gloo"  # what ``auto`` picks for ranks of one host

needs_shm = pytest.mark.skipif(not SHM.available, reason=SHM.reason)
