"""Around every test of compiled code."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture(autouse=True)
def _nobody_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads leave behind which wrapper was in its forward; Dynamo asks for it."""
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)
