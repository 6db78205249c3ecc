"""What is done to ``.grad`` of a bucket at once: in Python, and in C++ where that was built.

The tests marked slow build it, which takes up to a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline._reducer.bucket import Bucket
from paceline._reducer.passes import Before
from paceline._torch import sweep, sweep_build
from paceline.cli import main
from paceline.ddp.trained import Trained
from paceline.groups import Group
from paceline.testing import run_ranks

PYTHON, NATIVE = "python", "native"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield sweep_build.build()
    sweep.loaded.cache_clear()


@pytest.fixture(params=[PYTHON, pytest.param(NATIVE, marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    native = sweep.load(request.getfixturevalue("library")) if name == NATIVE else None
    monkeypatch.setattr(sweep, "loaded", lambda: native)
    return name


def alone(check: Callable[[Group], None]) -> None:
    run_ranks(1, check)


def bucket_of(group: Group, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Bucket:
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    return Bucket.allocate(0, range(len(params)), params, group)


def fill(bucket: Bucket) -> list[Tensor]:
    grads = [torch.randn_like(param) for param in bucket.params]
    for param, grad in zip(bucket.params, grads, strict=True):
        param.grad = grad.clone()
    return grads


# In both ways.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_all_gradients_of_a_bucket_go_in_and_come_back(
    way: str, dtype: torch.dtype, scale: float
) -> None:
    def check(group: Group) -> None:
        bucket = bucket_of(group, (2, 3), (), (0,), (5,), dtype=dtype)
        grads = fill(bucket)
        assert bucket.take_whole(scale)
        assert bucket.holding() == []
        assert all(map(torch.equal, bucket.views, [grad * scale for grad in grads]))
        bucket.give_back_all()
        assert all(p.grad is g for p, g in zip(bucket.params, bucket.grads, strict=True))
        assert bucket.holding() == [0, 1, 2, 3]

    alone(check)


def test_gradients_that_lie_otherwise_in_memory_arrive_as_they_are(way: str) -> None:
    def check(group: Group) -> None:
        bucket = bucket_of(group, (4, 3), (2, 2))
        wanted = fill(bucket)
        bucket.params[0].grad = wanted[0].t().contiguous().t()
        bucket.params[1].grad = torch.ones(1).expand(2, 2)
        assert bucket.take_whole(1.0)
        assert torch.equal(bucket.views[0], wanted[0])
        assert torch.equal(bucket.views[1], torch.ones(2, 2))

    alone(check)


def test_a_gradient_that_is_a_conjugate_view_arrives_as_its_value(way: str) -> None:
    def check(group: Group) -> None:
        bucket = bucket_of(group, (3,), (3,), dtype=torch.complex64)
        wanted = fill(bucket)
        bucket.params[0].grad = wanted[0].conj().resolve_conj().conj()
        assert bucket.params[0].grad.is_conj()
        assert bucket.take_whole(1.0)
        assert torch.equal(bucket.views[0], wanted[0])

    alone(check)


def test_nothing_is_moved_unless_all_gradients_have_come(way: str) -> None:
    def check(group: Group) -> None:
        bucket = bucket_of(group, (2,), (2,))
        fill(bucket)
        bucket.params[1].grad = None
        bucket.buffer.zero_()
        assert not bucket.take_whole(1.0)
        assert bucket.params[0].grad is not None
        assert not bucket.buffer.any()
        assert bucket.taken == set()

    alone(check)


def test_a_sparse_gradient_goes_the_longer_way(way: str) -> None:
    def check(group: Group) -> None:
        bucket = bucket_of(group, (3, 2), (2,))
        fill(bucket)
        bucket.params[0].grad = torch.eye(3, 2).to_sparse(1)
        bucket.take([0, 1], 1.0, plain=True)
        assert torch.equal(bucket.views[0], torch.eye(3, 2))

    alone(check)


def test_other_memory_under_a_view_is_seen_before_gradients_go_in(way: str) -> None:
    def check(group: Group) -> None:
        bucket = bucket_of(group, (3,), (2,))
        fill(bucket)
        bucket.take_whole(1.0)
        bucket.give_back_all()
        bucket.reset()
        assert bucket.params[0].grad is not None
        bucket.params[0].grad.data = torch.zeros(3)
        wanted = fill(bucket)
        assert bucket.take_whole(1.0)
        assert torch.equal(bucket.payload, torch.cat(wanted))

    alone(check)


def test_a_copy_into_a_view_counts_as_a_change_of_it(way: str) -> None:
    def check(group: Group) -> None:
        bucket = bucket_of(group, (3,))
        fill(bucket)
        before = bucket.views[0]._version
        bucket.take_whole(1.0)
        assert bucket.views[0]._version > before

    alone(check)


def test_what_was_held_before_a_pass_is_known(way: str) -> None:
    params = tuple(nn.Parameter(torch.zeros(2)) for _ in range(3))
    params[1].grad = torch.zeros(2)
    before = Before(params)
    assert before
    assert not before.came(params)
    params[1].grad.add_(1)
    assert before.came(params)
    assert not Before(params[::2])


def test_what_is_frozen_is_seen(way: str) -> None:
    model = nn.Linear(2, 2)
    trained = Trained(model, ())
    trained.place()
    assert not trained.changed
    model.bias.requires_grad_(False)
    assert trained.changed


def test_parameters_can_be_collected_with_their_bucket(way: str) -> None:
    import gc
    import weakref

    def check(group: Group) -> None:
        bucket = bucket_of(group, (3,))
        fill(bucket)
        bucket.take_whole(1.0)
        bucket.give_back_all()
        param = bucket.params[0]
        param.owner = bucket  # type: ignore[attr-defined]  # a cycle, which a program may make
        gone = weakref.ref(param)
        del bucket, param
        gc.collect()
        assert gone() is None

    alone(check)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_copies(way: str) -> None:
    def check(group: Group) -> None:
        bucket = bucket_of(group, (3,))
        fill(bucket)
        with _Counting() as counting:
            assert bucket.take_whole(1.0)
        assert any("copy_" in name for name in counting.seen)

    alone(check)


def _train(group: Group) -> list[Tensor]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
    random = torch.Generator().manual_seed(1)  # ranks are threads, and share torch's own
    for layer in layers[::2]:
        for param in layer.parameters():
            param.data.normal_(0, 0.3, generator=random)
    model = paceline.DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        with model.accumulate(2) if step > 2 else paceline.process_group(group):
            model(torch.full((4, 8), 0.1 * (step + group.rank()))).square().sum().backward()
        if step == 3:  # accumulated, and not to be dropped
            continue
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.slow
def test_training_gives_the_same_bits_with_and_without_the_native_part(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, taken = sweep.load(library), []

    class Counted:
        holding, trained, give = native.holding, native.trained, native.give

        @staticmethod
        def take(*arguments: Any) -> bool:
            taken.append(native.take(*arguments))
            return taken[-1]

    found = []
    for chosen in (None, Counted):
        monkeypatch.setattr(sweep, "loaded", lambda chosen=chosen: chosen)
        found.append(run_ranks(2, _train))
    assert any(taken)
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


# What was built, or not.


def test_without_a_library_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sweep.loaded.__wrapped__() is None


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file where the library would be, that is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = sweep.library()
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(b"no library")
    path.chmod(0o700)
    return path


def test_a_library_that_cannot_be_loaded_is_warned_of_and_not_used(
    broken: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger=sweep.__name__):
        assert sweep.loaded.__wrapped__() is None
    assert "paceline native" in caplog.text


@pytest.mark.parametrize("which", ["the library", "its folder"])
def test_a_library_that_others_may_write_to_is_not_opened(
    broken: Path, which: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "load", lambda _: pytest.fail("it was opened"))
    (broken if which == "the library" else broken.parent).chmod(0o777)
    with caplog.at_level(logging.WARNING, logger=sweep.__name__):
        assert sweep.loaded.__wrapped__() is None
    assert "other users" in caplog.text


def test_it_can_be_turned_off(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "load", lambda _: pytest.fail("it was opened"))
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert sweep.loaded.__wrapped__() is None


def test_another_torch_has_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sweep.library()
    monkeypatch.setattr(torch.version, "git_version", "another")
    assert sweep.library() != before


def test_a_library_that_does_something_else_is_refused() -> None:
    class Forgetful:
        holding = staticmethod(sweep.holding)
        trained = staticmethod(sweep.trained)
        give = staticmethod(sweep.give)

        @staticmethod
        def take(params: tuple[Tensor, ...], *_: object) -> bool:
            for param in params:
                param.grad = None
            return True

    with pytest.raises(RuntimeError, match="not used"):
        sweep_build.check(Forgetful())  # type: ignore[arg-type]


def test_what_cannot_be_built_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # neither a compiler nor ninja
    assert main(["native"]) == 2
    said = capsys.readouterr().err
    assert "cannot be built" in said
    assert "ninja" in said
    assert list(tmp_path.rglob("*.so")) == []


def test_what_was_built_can_be_removed(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["native", "--remove"]) == 0
    assert not broken.exists()
    assert main(["native", "--remove"]) == 0
    assert "Nothing is built" in capsys.readouterr().out
