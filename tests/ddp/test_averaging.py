"""The switch behind no_sync and accumulate; without any ranks."""

from __future__ import annotations

import pytest

from paceline.ddp.averaging import AveragingSwitch
from paceline.errors import ModuleArgumentError


def test_a_forward_inside_no_sync_speaks_for_its_backward_pass_outside() -> None:
    averaging = AveragingSwitch()
    with averaging.no_sync():
        averaging.note_forward()
        assert not averaging.now()
    assert not averaging.now()
    averaging.note_forward()
    assert averaging.now()


def test_nested_no_sync_and_errors_leave_it_as_it_was() -> None:
    averaging = AveragingSwitch()
    with pytest.raises(KeyError), averaging.no_sync():
        with averaging.no_sync():
            pass
        assert not averaging.on
        raise KeyError
    assert averaging.on


def test_every_last_micro_step_is_averaged_and_one_that_fails_is_not_counted() -> None:
    averaging = AveragingSwitch()
    seen = []
    for step in range(6):
        first = averaging.is_first_of(3)
        with averaging.accumulate(3) as last:
            seen.append((first, last, averaging.on))
        if step == 2:
            with pytest.raises(KeyError), averaging.accumulate(3):
                raise KeyError
    assert seen == [(True, False, False), (False, False, False), (False, True, True)] * 2


def test_less_than_one_micro_step_is_refused() -> None:
    with pytest.raises(ModuleArgumentError, match="at least one"), AveragingSwitch().accumulate(0):
        pass
