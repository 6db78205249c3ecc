"""The text that the demo learns: the Python standard library's own source, one number a character.

It needs no download and is the same on every run of one Python version: all modules, sorted by
path, without their tests. Ranks draw from one sequence of batches, so that two ranks with a batch
of 8 see what one rank with a batch of 16 sees.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

VOCAB = 128  # ASCII; any other byte is read as 127
NEWLINE = ord("\n")
SKIPPED = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})
TABLES = "encodings"  # code pages: long tables of numbers, which no reader would call Python
HELD_OUT = 20  # every so-manieth file is never trained on


@dataclass(frozen=True)
class Batch:
    """Characters, and for each of them the one that follows."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        """How many sequences it has."""
        return len(self.inputs)

    def split(self, size: int) -> list[Batch]:
        """Its sequences in batches of at most ``size``."""
        parts = zip(self.inputs.split(size), self.targets.split(size), strict=True)
        return [Batch(inputs, targets) for inputs, targets in parts]


@dataclass(frozen=True)
class Corpus:
    """What is learned from, and what shows how much was learned: other files."""

    training: Tensor
    held_out: Tensor


def sources() -> Iterator[Path]:
    """The library's modules, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(root).parts):
            yield path


@lru_cache(maxsize=4)
def load_text(limit_bytes: int = 4 << 20) -> Tensor:
    """The first ``limit_bytes`` of the library's source, one number below ``VOCAB`` for each."""
    return _numbers(sources(), limit_bytes)


@lru_cache(maxsize=1)
def load_library() -> Corpus:
    """The whole library: most files for training, some held out."""
    files = [path for path in sources() if TABLES not in path.parts]
    held_out = files[HELD_OUT // 2 :: HELD_OUT]
    training = [path for path in files if path not in set(held_out)]
    return Corpus(_numbers(training), _numbers(held_out))


def _numbers(paths: Iterable[Path], limit_bytes: int = 1 << 30) -> Tensor:
    text = bytearray()
    for path in paths:
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise FileNotFoundError("this Python has no standard library source to learn from")
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).clamp(max=VOCAB - 1)


def batches(
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    *,
    batch_size: int = 8,
    context: int = 64,
    limit_bytes: int = 4 << 20,
    text: Tensor | None = None,
) -> Iterator[Batch]:
    """This rank's share of an endless sequence of batches; ``batch_size`` is that of one rank.

    They are of ``text``, or of the first ``limit_bytes`` of the library.
    """
    text = load_text(limit_bytes) if text is None else text
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (world * batch_size,), generator=generator)
        yield cut(text, starts[rank::world], context)


def cut(text: Tensor, starts: Tensor, context: int) -> Batch:
    """The stretches of ``context`` characters that begin at ``starts``."""
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def to_numbers(text: str) -> Tensor:
    """Text as one row of numbers."""
    return torch.tensor([[min(byte, VOCAB - 1) for byte in text.encode()]])


def to_text(numbers: Iterable[int]) -> str:
    """Numbers as text; what is no character becomes a question mark."""
    plain = {NEWLINE, *range(32, 127)}
    return "".join(chr(number) if number in plain else "?" for number in numbers)
