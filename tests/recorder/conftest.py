"""A file of tests begins without what tests of other files have left in this process."""

from __future__ import annotations

import pytest

from paceline import recorder
from paceline.recorder import events


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> None:
    recorder.finish_explaining(60)
    events.forget()
