"""Ranks with unequal data: the mean of means, the exact mean, and one process that has it all.

    python examples/uneven.py                    under a minute; draws uneven.png
    python examples/uneven.py --quick            a few seconds

A small model learns to guess the next byte of Python's standard library. A sample is one source
file, so no two batches hold as many bytes, and the shards are what a file system gives: rank 0 has
the first third of the files in the order of their paths, rank 1 the rest. The same training runs

(a) as torch's DistributedDataParallel does it inside Join: every rank's mean counts the same,
    however many bytes it is over, and a rank that has run out counts as zeros;
(b) with ``ddp.samples(bytes)``: the mean over all bytes of all ranks;
(c) in one process, which has in each step the batches of all ranks.

The curves are of files that nobody trained on. (b) lies on (c); (a) goes its own way.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toy import start

from paceline import DistributedDataParallel, Group, new_group

RANKS = 2
FILES_PER_BATCH = 4
LONGEST = 1500  # bytes of a file that are read
HELD_OUT = 10  # files, at most
CONTEXT = 8  # bytes that the model sees
WAYS = ("mean of means", "exact weights", "one process")

Curve = list[float]


# -- the data ---------------------------------------------------------------------------------


def load(files: int) -> list[Tensor]:
    """That many files of the standard library, in the order of their paths, as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(p for p in library.rglob("*.py") if "site-packages" not in p.parts)
    chosen = [found[i * len(found) // files] for i in range(files)]
    texts = [path.read_bytes()[:LONGEST] for path in chosen]
    return [torch.tensor(list(text)) for text in texts if len(text) > 1]


def shards(texts: Sequence[Tensor]) -> list[list[list[Tensor]]]:
    """The batches of each rank, in an order that is the same wherever they are made."""
    third = len(texts) // 3
    mixed = torch.Generator().manual_seed(0)
    found = []
    for part in (texts[:third], texts[third:]):
        order = torch.randperm(len(part), generator=mixed).split(FILES_PER_BATCH)
        found.append([[part[i] for i in batch] for batch in order])
    return found


def windows(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """For every byte the ones before it, and the byte itself."""
    befores = [nn.functional.pad(t[:-1], (CONTEXT - 1, 0)).unfold(0, CONTEXT, 1) for t in texts]
    return torch.cat(befores), torch.cat([t[1:] for t in texts])


# -- the training -----------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    embedding = nn.Embedding(256, 16)
    hidden = nn.Linear(16 * CONTEXT, 64)
    return nn.Sequential(embedding, nn.Flatten(), hidden, nn.Tanh(), nn.Linear(64, 256))


def train(
    model: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    held_out: tuple[Tensor, Tensor],
    count: Callable[[int], object] = lambda _: None,
) -> Curve:
    """The loss on the held-out files after every step; the loop is the same for all three ways."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    curve = []
    for batch in batches:
        befores, bytes_ = windows(batch)
        optimizer.zero_grad()
        count(len(bytes_))
        cross_entropy(model(befores), bytes_).backward()
        optimizer.step()
        with torch.no_grad():
            curve.append(cross_entropy(plain(held_out[0]), held_out[1]).item())
    return curve


def train_together(
    group: Group, batches: Sequence[Sequence[Tensor]], held_out: tuple[Tensor, Tensor], exact: bool
) -> Curve:
    ddp = DistributedDataParallel(make_model(), process_group=group)
    with ddp.join():  # ranks may run out at different times
        return train(ddp, batches, held_out, ddp.samples if exact else lambda _: None)


def train_alone(
    parts: Sequence[Sequence[Sequence[Tensor]]], held_out: tuple[Tensor, Tensor]
) -> Curve:
    steps = range(max(map(len, parts)))
    union = [[text for part in parts for batch in part[s : s + 1] for text in batch] for s in steps]
    return train(make_model(), union, held_out)


def one_rank(files: int, backend: str, save: Path) -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    texts = load(files)
    held_out = windows(texts[::10][:HELD_OUT])
    parts = shards([text for i, text in enumerate(texts) if i % 10])
    curves: dict[str, Curve] = {}
    with new_group(backend) as group:
        mine = parts[group.rank()]
        for way, exact in zip(WAYS, (False, True), strict=False):
            curves[way] = train_together(group, mine, held_out, exact)
        counts = group.all_gather_object([len(mine), sum(len(t) for b in mine for t in b)])
        longest = group.rank() == RANKS - 1
    if longest:  # it has trained to the end, so its curves are whole
        for rank, count in enumerate(counts):
            print("rank {}: {} batches, {:,} bytes".format(rank, *count))  # type: ignore[misc]
    curves[WAYS[2]] = train_alone(parts, held_out)  # on both, so that none ends long before
    if longest:
        report(curves, save)


# -- the result -------------------------------------------------------------------------------


def report(curves: dict[str, Curve], save: Path) -> None:
    steps = len(curves[WAYS[2]])
    print("step  " + "  ".join(f"{way:>13}" for way in WAYS))
    for step in sorted({0, *range(steps // 8, steps, max(steps // 8, 1)), steps - 1}):
        print(f"{step + 1:4}  " + "  ".join(f"{curves[way][step]:13.5f}" for way in WAYS))
    for way in WAYS[:2]:
        apart = max(abs(a - b) for a, b in zip(curves[way], curves[WAYS[2]], strict=True))
        print(f"{way}: at most {apart:.1e} from one process")
    try:
        draw(curves, save)
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
    else:
        print(f"drawn in {save}")


def draw(curves: dict[str, Curve], save: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    styles = {WAYS[0]: ("tab:red", "-"), WAYS[1]: ("tab:blue", "-"), WAYS[2]: ("black", ":")}
    for way in WAYS:
        color, line = styles[way]
        axes.plot(range(1, len(curves[way]) + 1), curves[way], line, color=color, label=way)
    axes.set_xlabel("step")
    axes.set_ylabel("loss on held-out files")
    axes.set_title("Two ranks with unequal data")
    axes.legend()
    figure.savefig(save, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on ranks that have unequal data.")
    parser.add_argument("--quick", action="store_true", help="fewer files")
    parser.add_argument("--save", type=Path, default=Path("uneven.png"), help="where to draw")
    parser.add_argument("--backend", default="auto", help="auto takes shm when all share a host")
    args = parser.parse_args()
    one_rank(120 if args.quick else 900, args.backend, args.save)


if __name__ == "__main__":
    start(main, RANKS)
