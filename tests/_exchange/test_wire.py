"""Messages of bytes."""

from __future__ import annotations

import pytest
import torch

from paceline._exchange.wire import Frame


@pytest.mark.parametrize("shapes", [[(3,), (2, 2)], [(0,), (5,)], [(1,)], [()]])
def test_messages_come_back_as_what_they_were(shapes: list[tuple[int, ...]]) -> None:
    kinds = [torch.uint8, torch.float64, torch.bfloat16]
    pairs = [(shape, kind) for shape in shapes for kind in kinds]
    sent = {str(at): torch.full(shape, 7, dtype=kind) for at, (shape, kind) in enumerate(pairs)}
    frame = Frame.of(sent)
    (message,) = frame.room(1, torch.device("cpu"))
    frame.write(message, sent)
    found = frame.read(message)
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
