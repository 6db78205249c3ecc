"""Groups that others wrote in Python, as torch lets one do."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from paceline import DistributedDataParallel as DDP


class LonelyWork(dist.Work):
    def __init__(self, result: list[Tensor], group: "Lonely") -> None:
        super().__init__()
        self._result = result
        self._group = group

    def wait(self, timeout: Any = None) -> bool:
        self._group.waits += 1
        return True

    def get_future(self) -> Future[list[Tensor]]:
        self._group.futures += 1
        future: Future[list[Tensor]] = Future()
        future.set_result(self._result)
        return future


class Lonely(dist.ProcessGroup):
    """A group of one rank that has the three methods DDP needs."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.waits = self.futures = 0
        self.calls: list[str] = []

    def _done(self, name: str, tensors: list[Tensor]) -> LonelyWork:
        self.calls.append(name)
        return LonelyWork(tensors, self)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> LonelyWork:
        return self._done("broadcast", tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> LonelyWork:
        for output, given in zip(outputs[0], inputs, strict=True):
            output.copy_(given)
        return self._done("allgather", outputs[0])

    def allreduce(self, tensors: list[Tensor], opts: Any) -> LonelyWork:
        return self._done("allreduce", tensors)

    def getSize(self) -> int:
        return 1

    def getRank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return "lonely"


@pytest.mark.parametrize("views", [True, False])
def test_a_group_written_in_python_is_asked_for_every_pass(views: bool) -> None:
    group = Lonely()
    model = nn.Linear(1, 1)
    plain = nn.Linear(1, 1)
    plain.load_state_dict(model.state_dict())
    ddp = DDP(model, process_group=group, gradient_as_bucket_view=views)
    for _ in range(3):
        ddp.zero_grad()
        plain.zero_grad()
        ddp(torch.ones(1)).sum().backward()
        plain(torch.ones(1)).sum().backward()
        assert [p.grad for p in model.parameters()] == [p.grad for p in plain.parameters()]
    assert group.calls.count("allreduce") == 3
    assert group.waits >= 3
    assert group.futures >= 3
