"""Backward passes that compiled functions call, once failures are waited for as on a GPU."""

import pytest
import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as compilations_of
from torch.autograd import Variable

from paceline._torch import autograd

needs_strategies = pytest.mark.skipif(
    not hasattr(eval_frame, "set_code_exec_strategy"), reason="this torch cannot be told to skip"
)


@needs_strategies
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
def test_dynamo_does_not_trace_what_waits_for_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Variable, "_execution_engine", Variable._execution_engine)
    autograd.wait_for_failures()
    model = nn.Linear(3, 3)

    @torch.compile(backend="eager")
    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).sum()
        loss.backward()
        return loss.detach()

    for _ in range(2):
        step(torch.ones(2, 3))
    engine = type(Variable._execution_engine)
    assert engine.__module__ == autograd.__name__
    for function in (engine.run_backward, autograd._BackwardCall.__init__):
        assert compilations_of(function.__code__) == []
    torch._dynamo.reset()
