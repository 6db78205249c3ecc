"""A small GPT over characters, and the text it learns: the Python standard library's own source.

    python benchmarks/chargpt.py        trains it on one process for 300 steps and prints the loss

Several benchmarks and tests train this one, so that their losses can be compared. The model and the
text are those of ``paceline demo``; the sizes here are smaller.
"""

from __future__ import annotations

import time

import torch

from paceline.cli.demo.gpt import Block, CharGPT, loss_of
from paceline.cli.demo.text import VOCAB, Batch, batches, load_text

__all__ = ["VOCAB", "Batch", "Block", "CharGPT", "batches", "load_text", "loss_of"]


def main(steps: int = 300) -> None:
    torch.manual_seed(0)
    model = CharGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    began, recent = time.perf_counter(), []
    for step, batch in zip(range(1, steps + 1), batches(), strict=False):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        recent.append(float(loss.detach()))
        if step % 50 == 0:
            seconds = time.perf_counter() - began
            print(f"step {step:4d}  loss {sum(recent[-50:]) / 50:.3f}  {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
