"""What is left of a collective that has failed: its error, and nothing of the engine.

gloo's connections and threads end with the last object that holds them. The collector is off here:
whatever holds itself would stay.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.distributed import Work as TorchWork

from paceline.groups.engine import Call
from paceline.groups.engines.torch_engine import TorchEngine
from paceline.groups.work import Together, Watcher, Work, Wrapped


class BrokenWork(TorchWork):
    """A work of torch's whose connection has broken."""

    def wait(self, timeout: object = None) -> bool:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def wrapped(inner: TorchWork) -> Work:
    return Wrapped(inner, (), Watcher("none"))


def together(inner: TorchWork) -> Work:
    return Together([inner], (), Watcher("none"))


@pytest.mark.parametrize("make", [wrapped, together])
def test_whoever_keeps_a_work_that_has_failed_holds_nothing_of_its_engine(
    make: Callable[[TorchWork], Work],
) -> None:
    inner = BrokenWork()
    held = weakref.ref(inner)
    work = make(inner)
    del inner
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            work.wait()
    assert held() is None
    assert not work.is_success()


class BrokenEngine(TorchEngine):
    """Every call of its group fails."""

    def start(self, call: Call) -> TorchWork:
        return wrapped(BrokenWork())


def test_an_engine_ends_with_its_group_though_a_call_has_failed() -> None:
    engine = BrokenEngine(ProcessGroup(0, 1), "broken", torch.device("cpu"))
    held = weakref.ref(engine)
    tensors = [torch.ones(1)]
    with pytest.raises(RuntimeError, match="closed by peer"):
        engine.run(Call("all_reduce", tensors, tensors, "sum"))
    del engine
    assert held() is None
