"""Codecs by themselves: what comes back, how close it is, what it takes, and chains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from paceline._exchange import ParamSpan, RowLayout
from paceline._exchange.codecs.sign import pack_bits, unpack_signs
from paceline._exchange.dither import noise
from paceline.errors import CodecSettingError, CodecStateError
from paceline.hooks import Bf16, Codec, Fp8, Fp16, Fp32, Int8, PowerSGD, RowCodec, Sign, TopK

MAKERS: dict[str, Callable[[], RowCodec]] = {
    "fp32": Fp32,
    "fp16": Fp16,
    "bf16": Bf16,
    "e4m3": lambda: Fp8("e4m3"),
    "e5m2": lambda: Fp8("e5m2"),
    "int8": Int8,
    "int8 nearest": lambda: Int8(64, stochastic=False),
    "sign": lambda: Sign(64),
    "topk": lambda: TopK(0.1, block=64),
    "topk | int8": lambda: TopK(0.2, block=64) | Int8(),
    "topk | fp16": lambda: TopK(0.2, block=64) | Fp16(),
    "topk | sign": lambda: TopK(0.2, block=64) | Sign(),
    "fp16 | int8": lambda: Fp16() | Int8(),
    "topk | bf16 | e4m3": lambda: TopK(0.2, block=64) | Bf16() | Fp8(),
}
# Of each row's largest number, the most that a number of the row can be off by.
BOUNDS = {
    "fp32": 0.0,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "e4m3": 2.0**-4,
    "e5m2": 2.0**-3,
    "int8": 1 / 127,
    "int8 nearest": 0.5001 / 127,
    "fp16 | int8": 1 / 127 + 2.0**-10,
}
every = pytest.mark.parametrize("kind", MAKERS)
numbers = st.floats(-1e6, 1e6, width=32)
shapes = st.sampled_from([(), (1,), (5,), (64,), (65,), (3, 50), (2, 3, 100), (300,)])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any size, with numbers of very different sizes, and with zeros."""
    shape = draw(shapes)
    seed, exponent = draw(st.integers(0, 2**31)), draw(st.integers(-60, 60))
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=source) * 2.0**exponent
    if draw(st.booleans()):
        values = values.square() * values.sign() / 2.0**exponent
    if draw(st.booleans()):
        values = values * (torch.rand(shape, generator=source) < 0.5)
    return values


def there_and_back(codec: Codec, tensor: Tensor) -> Tensor:
    return codec.decode(codec.encode(tensor))


# What comes back.


@every
@settings(max_examples=15, deadline=None, derandomize=True)
@given(tensor=tensors(), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_what_comes_back_has_the_shape_and_the_type_it_had(
    kind: str, tensor: Tensor, dtype: torch.dtype
) -> None:
    tensor = tensor.to(dtype)
    before = tensor.clone()
    found = there_and_back(MAKERS[kind](), tensor)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(tensor, before)
    assert found.isfinite().all()


@pytest.mark.parametrize("kind", BOUNDS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(tensor=tensors())
def test_no_number_is_off_by_more_than_a_share_of_its_rows_largest(
    kind: str, tensor: Tensor
) -> None:
    codec = MAKERS[kind]()
    off = (there_and_back(codec, tensor) - tensor).abs().flatten()
    flat = tensor.flatten()
    for start in range(0, len(flat), codec.block):
        row = slice(start, start + codec.block)
        allowed = BOUNDS[kind] * float(flat[row].abs().max()) * (1 + 1e-5) + 1e-30
        assert float(off[row].max()) <= allowed


@pytest.mark.parametrize("kind", ["fp16", "bf16", "e4m3", "e5m2"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(value=st.floats(2.0**-60, 2.0**60, width=32))
def test_floats_keep_their_digits_at_any_size(kind: str, value: float) -> None:
    tensor = torch.tensor([value, -value])
    assert_close(there_and_back(MAKERS[kind](), tensor), tensor, rtol=BOUNDS[kind], atol=0)


@every
@settings(max_examples=15, deadline=None, derandomize=True)
@given(tensor=tensors())
def test_encoding_loses_part_of_a_tensor_and_never_adds_to_it(kind: str, tensor: Tensor) -> None:
    left = tensor - there_and_back(MAKERS[kind](), tensor)
    assert float(left.norm()) <= float(tensor.norm()) * (1 + 1e-5)


@pytest.mark.parametrize("kind", sorted(set(MAKERS) - {"topk | sign", "sign", "fp16 | int8"}))
@settings(max_examples=15, deadline=None, derandomize=True)
@given(tensor=tensors())
def test_what_was_decoded_once_is_encoded_without_loss(kind: str, tensor: Tensor) -> None:
    codec = MAKERS[kind]()
    once = there_and_back(codec, tensor)
    # A largest number that was rounded up to a power of two costs the smallest ones a digit.
    near = 1e-4 * float(tensor.abs().max()) + 1e-30
    assert_close(there_and_back(codec, once), once, rtol=1e-4, atol=near)


@every
def test_equal_codecs_encode_equally(kind: str) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    a, b = MAKERS[kind](), MAKERS[kind]()
    for _ in range(3):
        one, two = a.encode(tensor), b.encode(tensor)
        assert one.parts.keys() == two.parts.keys()
        for name, part in one.parts.items():
            assert torch.equal(part.view(torch.uint8), two.parts[name].view(torch.uint8))


@every
def test_zeros_come_back_as_zeros(kind: str) -> None:
    assert torch.equal(there_and_back(MAKERS[kind](), torch.zeros(130)), torch.zeros(130))


@every
def test_rows_do_not_depend_on_their_neighbours(kind: str) -> None:
    codec = MAKERS[kind]()
    rows = torch.randn(6, codec.block, generator=torch.Generator().manual_seed(2))
    keys = torch.arange(6) * 77
    whole = codec.unpack(codec.pack(rows, keys), codec.block)
    order = torch.tensor([4, 1, 5])
    some = codec.unpack(codec.pack(rows[order], keys[order]), codec.block)
    assert torch.equal(some, whole[order])


@every
def test_adding_what_was_encoded_is_adding_what_comes_back(kind: str) -> None:
    codec = MAKERS[kind]()
    rows, other = torch.randn(2, 3, codec.block, generator=torch.Generator().manual_seed(3))
    parts = codec.pack(rows, torch.arange(3))
    decoded = codec.unpack(parts, codec.block)
    more, less = other.clone(), other.clone()
    codec.add_to(more, parts)
    codec.add_to(less, parts, subtract=True)
    assert torch.equal(more, other + decoded)
    assert torch.equal(less, other - decoded)


# NaN and infinity.


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 63, 128])
def test_what_is_not_finite_comes_back_so_in_its_place_and_spoils_its_row_at_most(
    kind: str, bad: float, at: int
) -> None:
    codec = MAKERS[kind]()
    tensor = torch.randn(1024, generator=torch.Generator().manual_seed(4))
    tensor[at] = bad
    found = there_and_back(codec, tensor)
    assert not found[at].isfinite()
    start = at // codec.block * codec.block
    others = torch.ones(1024, dtype=torch.bool)
    others[start : start + codec.block] = False
    assert found[others].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_matrix_with_what_is_not_finite_comes_back_so_and_the_next_one_does_not(
    bad: float,
) -> None:
    codec = PowerSGD(2)
    matrix = torch.randn(20, 30, generator=torch.Generator().manual_seed(5))
    spoilt = matrix.clone()
    spoilt[3, 4] = bad
    assert not there_and_back(codec, spoilt)[3, 4].isfinite()
    assert there_and_back(codec, matrix).isfinite().all()


def test_fp16_does_not_make_large_numbers_infinite_or_small_ones_zero() -> None:
    tensor = torch.tensor([1e30, 3e29, 1e28])
    assert_close(there_and_back(Fp16(), tensor), tensor, rtol=1e-3, atol=0)
    assert_close(
        there_and_back(Fp16(), tensor.reciprocal()), tensor.reciprocal(), rtol=1e-3, atol=0
    )


# Single codecs.


def test_rounding_is_right_on_average() -> None:
    codec = Int8(64)
    tensor = torch.linspace(-1, 1, 64) ** 3
    rows = tensor.repeat(2000, 1)
    draws = codec.unpack(codec.pack(rows, torch.arange(2000)), 64)
    assert draws.std(0)[1:-1].max() > 1e-3  # it does vary
    assert float((draws.mean(0) - tensor).abs().max()) < 5e-4  # a step is 8e-3


def test_noise_is_the_same_for_a_key_and_even_over_all() -> None:
    keys = torch.arange(4000) * 12345 - 2**40
    rows = noise(keys, 256)
    assert torch.equal(rows, noise(keys, 256))
    assert 0 < float(rows.min()) < float(rows.max()) < 1
    assert_close(rows.mean(), torch.tensor(0.5), atol=0.002, rtol=0)
    assert_close(rows.var(), torch.tensor(1 / 12), atol=0.002, rtol=0)
    assert len(rows[:, 0].unique()) > 1000


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.booleans(), min_size=13, max_size=13), min_size=1, max_size=5))
def test_bits_come_back_in_their_places(flags: list[list[bool]]) -> None:
    given_flags = torch.tensor(flags)
    packed = pack_bits(given_flags)
    assert packed.shape == (len(flags), 2)
    assert torch.equal(unpack_signs(packed)[:, :13] > 0, given_flags)


def test_sign_sends_the_mean_size_and_the_signs() -> None:
    found = there_and_back(Sign(8), torch.tensor([1.0, -2, 3, -4, 5, -6, 7, -8]))
    assert found.tolist() == [4.5, -4.5, 4.5, -4.5, 4.5, -4.5, 4.5, -4.5]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from([0.01, 0.1, 0.5, 1.0]))
def test_topk_keeps_the_largest_of_each_block_as_they_are(seed: int, ratio: float) -> None:
    tensor = torch.randn(4, 100, generator=torch.Generator().manual_seed(seed))
    found = there_and_back(TopK(ratio, block=100), tensor)
    for row, kept in zip(tensor, found, strict=True):
        chosen = kept != 0
        assert int(chosen.sum()) == max(1, round(100 * ratio))
        assert torch.equal(row[chosen], kept[chosen])
        if not chosen.all():
            assert row[chosen].abs().min() >= row[~chosen].abs().max()


def test_powersgd_gives_a_matrix_of_low_rank_back() -> None:
    a, b = torch.randn(40, 2), torch.randn(30, 2)
    matrix = a @ b.t()
    assert_close(there_and_back(PowerSGD(2), matrix), matrix, rtol=1e-3, atol=1e-3)


def test_powersgd_gets_closer_from_step_to_step_when_it_starts_warm() -> None:
    source = torch.Generator().manual_seed(6)
    values = 0.8 ** torch.arange(30.0)
    u, v = (torch.linalg.qr(torch.randn(n, 30, generator=source)).Q for n in (50, 30))
    matrix = u @ values.diag() @ v.t()
    codec = PowerSGD(4)
    off = [float((matrix - there_and_back(codec, matrix)).norm()) for _ in range(12)]
    best = float(values[4:].norm())
    assert off[-1] < off[0]
    assert off[-1] < 1.02 * best


def test_powersgd_sends_vectors_and_small_matrices_whole() -> None:
    codec = PowerSGD(4)
    for tensor in (torch.randn(100), torch.randn(5, 6), torch.randn(())):
        assert torch.equal(there_and_back(codec, tensor), tensor)


# What it takes.


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (Fp16(), 16 + 8 / 256),
        (Bf16(), 16),
        (Fp8(), 8 + 8 / 256),
        (Int8(), 8 + 32 / 256),
        (Sign(), 1 + 16 / 64),
        (TopK(0.01), 48 * 41 / 4096),
        (TopK(0.01) | Int8(), (24 * 41 + 32) / 4096),
        (TopK(0.01) | Fp16(), (32 * 41 + 8) / 4096),
    ],
    ids=repr,
)
def test_a_number_takes_so_many_bits(codec: Codec, bits: float) -> None:
    tensor = torch.randn(8 * 4096)
    assert codec.encode(tensor).nbytes * 8 == pytest.approx(bits * tensor.numel())


# Chains.


def test_the_second_codec_encodes_what_the_first_has_chosen() -> None:
    encoded = (TopK(0.5, block=8) | Int8()).encode(torch.arange(8.0))
    assert set(encoded.parts) == {"values.scale", "values.steps", "places"}
    assert encoded.parts["values.steps"].dtype == torch.int8
    assert sorted(encoded.parts["places"][0].tolist()) == [4, 5, 6, 7]


@pytest.mark.parametrize("first", [Int8(), Sign(), Fp8(), PowerSGD(2), TopK(0.1) | Int8()])
def test_nothing_can_follow_a_codec_that_leaves_no_numbers(first: Codec) -> None:
    with pytest.raises(CodecSettingError):
        first | Fp16()


def test_powersgd_follows_no_other() -> None:
    with pytest.raises(CodecSettingError, match="rows"):
        Fp16() | PowerSGD(2)


def test_codecs_are_equal_when_they_encode_alike() -> None:
    codecs = [make() for make in MAKERS.values()]
    for (i, a), (j, b) in itertools.product(enumerate(codecs), enumerate(codecs)):
        assert (a == b) == (i == j)
    assert {TopK(0.1) | Int8()} == {TopK(0.1) | Int8()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fp8("e3m4"),
        lambda: Int8(0),
        lambda: Int8(12),
        lambda: Sign(7),
        lambda: TopK(0),
        lambda: TopK(1.1),
        lambda: TopK(0.1, block=1 << 16),
        lambda: PowerSGD(0),
    ],
)
def test_bad_settings_are_refused_at_once(make: Callable[[], Codec]) -> None:
    with pytest.raises(CodecSettingError) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert caught.value.expected in str(caught.value)


# State.


@pytest.mark.parametrize("make", [Int8, lambda: PowerSGD(3)])
def test_a_codec_goes_on_from_its_state(make: Callable[[], Codec]) -> None:
    source = torch.Generator().manual_seed(7)
    first, second, third = torch.randn(3, 40, 30, generator=source)
    codec, resumed, fresh = make(), make(), make()
    codec.encode(first)
    codec.encode(second)
    resumed.load_state_dict(codec.state_dict())
    expected = there_and_back(codec, third)
    assert torch.equal(there_and_back(resumed, third), expected)
    assert not torch.equal(there_and_back(fresh, third), expected)


def test_a_codec_without_state_refuses_another_ones() -> None:
    class Plain(Codec):
        def encode(self, tensor):
            raise NotImplementedError

        decode = encode

    Plain().load_state_dict(Plain().state_dict())
    with pytest.raises(CodecStateError):
        Plain().load_state_dict(Int8().state_dict())


# Rows have the same owners and labels in every layout.


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.permutations(range(5)), st.integers(1, 5))
def test_labels_and_owners_of_rows_do_not_depend_on_the_bucket(
    order: list[int], ranks: int
) -> None:
    sizes = [100, 64, 7, 300, 65]

    def facts(numbers: list[int]) -> dict[int, list[tuple[int, int]]]:
        pieces = [ParamSpan(str(n), n, (sizes[n],), 0) for n in numbers]
        layout = RowLayout.of(pieces, 64, lambda piece: piece.numel >= 64)
        both = list(zip(layout.labels().tolist(), layout.owners(ranks).tolist(), strict=True))
        found, at = {}, 0
        for piece, count in zip(layout.large, layout.counts, strict=True):
            found[piece.number] = both[at : at + count]
            at += count
        return found

    assert facts(order) == facts(sorted(order))
    assert set(facts(order)) == {0, 1, 3, 4}
