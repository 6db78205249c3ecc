"""What goes in comes out, what does not is named, and no bytes do harm."""

import collections
import contextlib
import dataclasses
import enum
import math
import struct
import warnings
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from paceline._transport.codec import MAX_DEPTH, MAX_DIMS, decode, encode
from paceline.errors import CodecError

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)

hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([*DTYPES, torch.qint8])
    | st.sampled_from(["cpu", "cpu:1", "cuda", "cuda:3", "meta"]).map(torch.device)
    | st.lists(st.integers(-1, 2**63 - 1), max_size=3).map(torch.Size),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
objects = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
    ),
    max_leaves=20,
)


def canon(obj: Any) -> Any:
    """Write ``obj`` so that equal text means same types, same order, same bits of every float."""
    if isinstance(obj, float):
        return "float", struct.pack("<d", obj).hex()
    if isinstance(obj, int):
        return type(obj).__name__, hex(obj)
    if isinstance(obj, complex):
        return "complex", canon(obj.real), canon(obj.imag)
    if isinstance(obj, dict):
        return "dict", [(canon(k), canon(v)) for k, v in obj.items()]
    if isinstance(obj, set | frozenset):
        return type(obj).__name__, sorted((canon(item) for item in obj), key=repr)
    if isinstance(obj, list | tuple):
        return type(obj).__name__, [canon(item) for item in obj]
    if isinstance(obj, torch.Tensor):
        return "tensor", obj.dtype, list(obj.shape), bits(obj)
    return type(obj).__name__, repr(obj)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def refused(obj: object) -> str:
    with pytest.raises(CodecError) as caught:
        encode(obj)
    return caught.value.what


def malformed(raw: object) -> str:
    with pytest.raises(CodecError) as caught:
        decode(msgspec.msgpack.encode(raw))
    return caught.value.what


# What is carried.


@given(objects)
@example({(1, ("a", frozenset({2j}))): [], True: {0}, 1.5: (), "": {}})
@example([-0.0, math.inf, -math.inf, math.nan, complex(math.nan, -0.0)])
@example([2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**5000])
@example("\ud800 as in a file name")
def test_nested_objects_come_back_the_same(obj: object) -> None:
    data = encode(obj)
    assert repr(canon(decode(data))) == repr(canon(obj))
    assert repr(canon(decode(memoryview(bytearray(data))))) == repr(canon(obj))


def test_a_bytearray_comes_back_as_bytes() -> None:
    assert canon(decode(encode([bytearray(b"ab")]))) == canon([b"ab"])


def test_the_bits_of_a_nan_are_kept() -> None:
    (odd,) = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))
    assert canon(decode(encode(odd))) == canon(odd)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back_the_same(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    size = math.prod(shape) * dtype.itemsize
    # bool has two valid bytes only.
    pattern = [i % 2 if dtype is torch.bool else i * 37 % 256 for i in range(size)]
    tensor = torch.tensor(pattern, dtype=torch.uint8).view(dtype).reshape(shape)
    back = decode(encode(tensor))
    assert type(back) is torch.Tensor
    assert (back.dtype, back.shape, bits(back)) == (dtype, tensor.shape, pattern)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(12)[::5],
        torch.ones(1).expand(3, 2),
        torch.arange(6).reshape(1, 1, 6).permute(2, 0, 1),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,  # a negative view
    ],
    ids=["transposed", "strided", "expanded", "permuted", "conj", "neg"],
)
def test_views_come_back_as_their_values(tensor: torch.Tensor) -> None:
    back = decode(encode(tensor))
    assert torch.equal(back, tensor)
    assert back.is_contiguous()
    assert not back.is_conj()
    assert not back.is_neg()


def test_a_tensor_in_a_graph_comes_back_plain() -> None:
    leaf = torch.ones(2, requires_grad=True)
    back = decode(encode({"leaf": leaf, "inner": leaf * 2}))
    assert [t.requires_grad for t in back.values()] == [False, False]
    assert torch.equal(back["inner"], torch.full((2,), 2.0))


def test_decoded_tensors_own_their_memory() -> None:
    data = bytearray(encode([torch.zeros(4), torch.zeros(4)]))
    first, second = decode(data)
    first += 1
    data[:] = bytes(len(data))
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [0.0] * 4
    assert not first._is_view()
    assert first.untyped_storage().nbytes() == 16
    first.untyped_storage().resize_(32)  # not borrowed from the bytes


def test_no_warning_comes_from_any_dtype() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(encode([torch.zeros(4, dtype=torch.uint8).view(torch.complex32)]))


# What is refused, and where it sits.


class Color(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    left: int
    right: int


class Text(str):
    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Point:
    x: int = 0


@pytest.mark.parametrize(
    ("obj", "name"),
    [
        (Color.RED, f"{__name__}.Color"),
        (Pair(1, 2), f"{__name__}.Pair"),
        (Text("a"), f"{__name__}.Text"),
        (Point(), f"{__name__}.Point"),
        (collections.OrderedDict(), "collections.OrderedDict"),
        (object(), "object"),
        (memoryview(b""), "memoryview"),
        (len, "builtin_function_or_method"),
        (torch.nn.Parameter(torch.zeros(1)), "torch.nn.parameter.Parameter"),
    ],
)
def test_a_type_that_is_not_carried_exactly_is_refused_by_name(obj: object, name: str) -> None:
    assert refused(obj) == f"an object of type {name}"
    assert refused({"a": [0, 1, 2, obj]}) == f"at ['a'][3]: an object of type {name}"


def test_a_numpy_scalar_is_refused_by_name() -> None:
    numpy = pytest.importorskip("numpy")
    assert refused({"a": [numpy.float64(1)]}) == "at ['a'][0]: an object of type numpy.float64"


def test_what_sits_in_a_key_or_a_set_is_found_there() -> None:
    point = Point(3)
    assert refused([{(1, point): 0}]).startswith("at [0]<key (1, Point(x=3))>[1]: ")
    shown = ("at [of type int]: ", "at [<int instance with roughly")  # the second: Python 3.14
    assert refused({10**5000: point}).startswith(shown)
    assert refused({"s": {point}}).startswith("at ['s']<element Point(x=3)>: ")


def test_a_long_way_is_shortened() -> None:
    obj: object = Point()
    for _ in range(50):
        obj = {"k" * 1000: obj}
    assert len(refused(obj)) < 600


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.eye(2).to_sparse(), "a torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), "a meta tensor"),
        (torch.zeros(1, dtype=torch.uint8).view([1] * (MAX_DIMS + 1)), "a 65-dimensional tensor"),
    ],
    ids=["sparse", "meta", "dims"],
)
def test_a_tensor_that_is_more_than_its_bytes_is_refused(tensor: torch.Tensor, what: str) -> None:
    assert refused([tensor]) == f"at [0]: {what}"


@pytest.mark.filterwarnings("ignore")  # torch has deprecated quantized tensors, nested are new
def test_quantized_and_nested_tensors_are_refused() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(2), 0.5, 0, torch.qint8)
    assert refused(quantized) == "a torch.qint8 tensor"
    assert refused(torch.nested.nested_tensor([torch.zeros(2)])) == "a nested tensor"


def test_a_subclass_of_tensor_is_refused() -> None:
    class Tagged(torch.Tensor):
        pass

    assert refused(torch.zeros(1).as_subclass(Tagged)).endswith("<locals>.Tagged")


# Depth.


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {0: x}, lambda x: {x: 0}]
)
def test_depth_is_bounded_and_the_bound_is_the_same_both_ways(wrap: Any) -> None:
    obj: object = wrap(0)
    for _ in range(MAX_DEPTH - 1):
        try:
            obj = wrap(obj)
        except TypeError:  # a dict is no key
            return
    assert repr(decode(encode(obj))) == repr(obj)
    assert "nested deeper than 100 levels" in refused(wrap(obj))


def test_a_tensor_may_sit_in_the_innermost_list() -> None:
    obj: object = torch.zeros(2)
    for _ in range(MAX_DEPTH):
        obj = [obj]
    back: Any = decode(encode(obj))
    while type(back) is list:
        (back,) = back
    assert torch.equal(back, torch.zeros(2))


def test_an_object_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop += [loop, loop]
    assert "in itself" in refused(loop)
    ring: dict[str, object] = {}
    ring["ring"] = [ring]
    assert "in itself" in refused(ring)


@pytest.mark.parametrize("opening", [b"\x91", b"\x92\x00", b"\x81\x00", b"\x92\x01"])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 100_000])
def test_a_nesting_bomb_is_refused(opening: bytes, depth: int) -> None:
    with pytest.raises(CodecError):
        decode(opening * depth + b"\xc0")


# Bytes that are not of our making.


@given(st.binary(max_size=200))
def test_random_bytes_decode_or_raise_a_codec_error(data: bytes) -> None:
    with contextlib.suppress(CodecError):
        decode(data)


sample = encode(
    [
        {"a": (1, 2.5, None, True), (1, 2): {3, "x"}, b"k": 2**100, "\udc80": 1j},
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        [torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), frozenset({1.5})],
    ]
)


@given(st.lists(st.tuples(st.integers(0, len(sample) - 1), st.integers(0, 255)), max_size=4))
def test_mutated_bytes_decode_or_raise_a_codec_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(sample)
    for position, value in changes:
        data[position] = value
    with contextlib.suppress(CodecError):
        decode(data)


def test_every_single_changed_byte_decodes_or_raises_a_codec_error() -> None:
    for position in range(len(sample)):
        for value in {0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xFF, sample[position] ^ 1}:
            data = bytearray(sample)
            data[position] = value
            with contextlib.suppress(CodecError):
                decode(data)


def test_every_truncation_and_trailing_byte_raises() -> None:
    for length in range(len(sample)):
        with pytest.raises(CodecError):
            decode(sample[:length])
    with pytest.raises(CodecError):
        decode(sample + b"\x00")


@pytest.mark.parametrize(
    "claim",
    [
        "dd ffffffff",
        "df ffffffff",
        "db ffffffff",
        "c6 ffffffff",
        "c9 ffffffff 06",
        "c9 ffffffff 01",
    ],
)
def test_a_huge_claimed_length_is_refused_before_memory_is_taken(claim: str) -> None:
    with pytest.raises(CodecError):
        decode(bytes.fromhex(claim))
    with pytest.raises(CodecError):
        decode(bytes.fromhex("92 00") * 50 + bytes.fromhex(claim) * 50)


F32 = Ext(4, b"float32")


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"a": 1},
        [],
        [99],
        ["a"],
        [[0]],
        [None],
        Ext(0, b""),
        Ext(100, b"x"),
        Ext(-1, b"\0\0\0\1"),  # MessagePack's time stamp
        Ext(3, b"short"),
        Ext(4, b"float99"),
        Ext(4, b"nn"),
        Ext(4, b"\xff"),
        Ext(5, b"os.system"),
        Ext(5, b""),
        [2, 1, 1],
        [2, [0]],
        [3, [4]],
        [4, 1],
        [4, 1, 1, 2, 3],
        [4, [0], 1],
        [5, 1.5],
        [5, True],
        [5, "a"],
        [5, 2**63],
        [6],
        [6, F32],
        [6, "float32", Ext(6, bytes(4)), 1],
        [6, F32, bytes(4), 1],
        [6, F32, Ext(6, bytes(4)), 2],
        [6, F32, Ext(6, bytes(4)), 2**62, 2**62],
        [6, F32, Ext(6, b""), 0, 2**62, 2**62],
        [6, F32, Ext(6, bytes(4)), -1],
        [6, F32, Ext(6, bytes(4)), -1, -1],
        [6, F32, Ext(6, bytes(4)), True],
        [6, F32, Ext(6, bytes(4)), 1.0],
        [6, F32, Ext(6, bytes(4)), *[1] * (MAX_DIMS + 1)],
        [6, F32, Ext(6, bytes(3))],
        [6, F32, [6, F32, Ext(6, bytes(4)), 1], 1],
        [6, Ext(4, b"qint8"), Ext(6, bytes(4)), 4],
        [6, [0], Ext(6, bytes(4)), 4],
    ],
)
def test_well_formed_messagepack_that_is_not_ours_is_refused(raw: object) -> None:
    assert malformed(raw).startswith("malformed bytes: ")


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(CodecError):
        decode(b"\xa2\xff\xff")
