"""Calls of a graph as the engine gets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.compiled import traced
from paceline.groups import Work
from paceline.groups.work import FINISHED


class Seen:
    """A group that keeps what it is given."""

    given: list[Tensor]

    def make_call(self, kind: str, given: list[Tensor], *_: Any, **__: Any) -> Work:
        self.given = given
        return FINISHED


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_call_that_goes_on_has_inputs_of_its_own(asynchronous: bool) -> None:
    """A graph may write to the memory of a tensor after the last line that reads it."""
    group, given = Seen(), torch.ones(2)
    rest = ("all_gather_single", "", -1, 0, [], [], traced.NO_TIMEOUT)
    traced._call(asynchronous, [given], [torch.empty(4)], *rest, group)
    assert torch.equal(group.given[0], given)
    assert (group.given[0].data_ptr() != given.data_ptr()) == asynchronous
