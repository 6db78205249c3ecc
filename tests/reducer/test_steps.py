"""Who is asked before an optimizer steps, while other threads come and go."""

from __future__ import annotations

import sys
import threading

import torch
from torch import nn

from paceline._reducer.steps import look_before_steps, stop_looking


class Looker:
    """Somebody who wants to look."""

    asked = 0

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        self.asked += 1


def test_owners_that_come_in_other_threads_disturb_no_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    mine, over, before = Looker(), threading.Event(), sys.getswitchinterval()
    look_before_steps(mine, Looker.look)

    def come_and_go() -> None:
        while not over.is_set():
            for one in [Looker() for _ in range(20)]:
                look_before_steps(one, Looker.look)

    others = [threading.Thread(target=come_and_go) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for other in others:
            other.start()
        for _ in range(500):
            optimizer.step()
    finally:
        over.set()
        for other in others:
            other.join()
        sys.setswitchinterval(before)
    assert mine.asked == 500
    stop_looking(mine)
