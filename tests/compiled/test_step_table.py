"""Training loops on two processes, in both of our ways: the verdicts of ``step_rows.py``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.testing import Meeting, spawn_ranks

from . import step_rows
from .ranks import Opener

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="measured with 2.13"),
]
STEP, WRAPPER, _ = step_rows.WAYS
MORE_GRAPHS = {
    (STEP, "accumulation"): "2 graphs",  # one that gathers, one that steps
    (STEP, "batches of any size"): "2 graphs",  # the second one is for all sizes
    (WRAPPER, "batches of any size"): "2 graphs",
    (STEP, "`register_hook` on a parameter"): step_rows.EAGER,
    (STEP, "`register_post_accumulate_grad_hook`"): step_rows.EAGER,
    (WRAPPER, "a full backward hook of a module"): "graph break, 0 graphs",
    (WRAPPER, "`register_hook` on a parameter"): "graph break, one graph",
    (WRAPPER, "`register_post_accumulate_grad_hook`"): "graph break, one graph",
}


def measured(meeting: Meeting, way: str) -> dict[str, str]:
    dist.init_process_group("gloo")
    try:
        return step_rows.measure(way, Opener(meeting))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("way", [STEP, WRAPPER])
def test_every_loop_ends_with_the_weights_of_eager_mode(way: str) -> None:
    for verdicts in spawn_ranks(2, measured, way, deadline=900):
        for title, found in verdicts.items():
            assert found == MORE_GRAPHS.get((way, title), "one graph"), title
