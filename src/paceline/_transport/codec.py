"""Objects as bytes, without pickle: reading them runs nothing, whoever wrote them.

The bytes are MessagePack. What MessagePack has, stands for itself; a leaf that it lacks is an
extension (:class:`_Ext`), and a container is an array that begins with its tag (:class:`_Tag`)::

    (1, {"a": 2j})                ->  [TUPLE, 1, [DICT, "a", Ext(COMPLEX, ...)]]
    torch.zeros(2, 3)             ->  [TENSOR, Ext(DTYPE, "float32"), Ext(BYTES, ...), 2, 3]

Types are matched exactly. An enum is an int to ``isinstance``, but would come back as one that has
lost its name; so what is not carried whole is refused, and the error says where it sits.
"""

from __future__ import annotations

import ctypes
import math
import reprlib
import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from paceline.errors import CodecError

__all__ = ["MAX_DEPTH", "MAX_DIMS", "decode", "encode"]

MAX_DEPTH = 100  # containers within containers; also what stops at an object that holds itself
MAX_DIMS = 64  # of a tensor; most of torch's operations take no more

_BAD_BYTES = "They were truncated or changed, or not written by paceline's codec."


class _Ext:
    """Leaves that MessagePack lacks. The numbers are the format: add, never renumber."""

    INT = 1  # beyond 64 bits
    TEXT = 2  # a str that is not valid UTF-8, such as a file name may be
    COMPLEX = 3
    DTYPE = 4
    DEVICE = 5
    BYTES = 6  # a tensor's memory


class _Tag:
    """First item of every array: what the items after it make. Add, never renumber."""

    LIST = 0
    TUPLE = 1
    SET = 2
    FROZENSET = 3
    DICT = 4  # all keys, then all values
    SIZE = 5
    TENSOR = 6  # dtype, memory, shape…


def encode(obj: object) -> bytes:
    """Return ``obj`` as bytes for :func:`decode`.

    Tensors are copied, from whatever device and without their autograd history.
    """
    path: _Path = []
    try:
        return msgspec.msgpack.encode(_pack(obj, path))
    except _RefusedError as refused:
        raise CodecError(f"{_where(path)}{refused}") from None
    except (ValueError, RecursionError) as error:  # over 4 GiB in one piece; a full stack
        raise CodecError(f"{_where(path)}{error}") from error


def decode(data: bytes | bytearray | memoryview) -> object:
    """Return the object that :func:`encode` was given; tensors are on the CPU and own their memory.

    Whatever ``data`` holds, this takes memory in proportion to its length and raises nothing but
    :class:`~paceline.errors.CodecError`.
    """
    try:
        return _unpack(_decoder.decode(data), MAX_DEPTH + 1)  # a tensor in the last one is an array
    except Exception as error:  # of many kinds, as there are many ways to be malformed
        raise CodecError(f"malformed bytes: {error}", _BAD_BYTES) from error


class _RefusedError(Exception):
    """What is wrong with an object; the caller knows where it sits."""


# Objects to MessagePack.

# How to print each step from the outermost object to the current one, and its index or key.
_Path = list[tuple[str, object]]


def _where(path: _Path) -> str:
    steps = [form.format(_show(key)) for form, key in path[:10]]
    return f"at {''.join(steps)}{'…' if len(path) > 10 else ''}: " if steps else ""


def _show(key: object) -> str:
    try:
        return reprlib.repr(key)
    except ValueError:  # an int of more than 4300 digits
        return f"of type {_name(type(key))}"


def _pack(item: object, path: _Path) -> object:
    kind = type(item)
    if kind in _PLAIN:
        return item
    if kind not in _PACKERS:
        raise _RefusedError(f"an object of type {_name(kind)}")
    return _PACKERS[kind](item, path)


def _pack_each(form: str, keys: Iterable[object], items: Iterable[Any], path: _Path) -> list[Any]:
    if len(path) == MAX_DEPTH:
        raise _RefusedError(f"nested deeper than {MAX_DEPTH} levels, or in itself")
    packed = []
    path.append(("", None))
    for key, item in zip(keys, items, strict=True):
        path[-1] = (form, key)  # stays there if the item is refused
        packed.append(_pack(item, path))
    path.pop()
    return packed


def _pack_sequence(items: list[Any] | tuple[Any, ...], path: _Path) -> object:
    return [_TAGS[type(items)], *_pack_each("[{}]", range(len(items)), items, path)]


def _pack_set(items: set[Any] | frozenset[Any], path: _Path) -> object:
    return [_TAGS[type(items)], *_pack_each("<element {}>", items, items, path)]


def _pack_dict(items: dict[Any, Any], path: _Path) -> object:
    keys = _pack_each("<key {}>", items, items, path)
    return [_Tag.DICT, *keys, *_pack_each("[{}]", items, items.values(), path)]


def _pack_int(item: int, _: _Path) -> object:
    if -(2**63) <= item < 2**64:
        return item
    return Ext(_Ext.INT, item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True))


def _pack_str(item: str, _: _Path) -> object:
    try:
        item.encode()
    except UnicodeEncodeError:
        return Ext(_Ext.TEXT, item.encode("utf-8", "surrogatepass"))
    return item


def _pack_tensor(tensor: Tensor, _: _Path) -> object:
    refusal = _refusal(tensor)
    if refusal:
        raise _RefusedError(f"{refusal} tensor")
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = whole.numel() * whole.element_size()
    # Not whole.numpy(): numpy lacks bfloat16. The bytes() copies at once.
    memory = bytes((ctypes.c_char * size).from_address(whole.data_ptr())) if size else b""
    dtype = Ext(_Ext.DTYPE, _DTYPE_NAMES[whole.dtype].encode())
    return [_Tag.TENSOR, dtype, Ext(_Ext.BYTES, memory), *whole.shape]


def _refusal(tensor: Tensor) -> str:
    """Name what of a tensor would be lost; empty if nothing would."""
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout}"
    if tensor.is_nested:
        return "a nested"
    if tensor.is_meta:
        return "a meta"
    if tensor.dim() > MAX_DIMS:
        return f"a {tensor.dim()}-dimensional"
    if tensor.dtype not in _TENSOR_DTYPES:
        return f"a {tensor.dtype}"
    return ""


def _name(kind: type) -> str:
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return home + kind.__qualname__


# MessagePack to objects.


def _unpack(raw: object, depth: int) -> object:
    if not isinstance(raw, list):
        if type(raw) not in _LEAVES:  # a map or a time stamp
            raise ValueError(f"a {_name(type(raw))}, which the codec never writes")
        return raw
    if depth == 0:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    tag, *parts = raw
    if tag not in _BUILDERS:
        raise ValueError(f"an unknown tag {reprlib.repr(tag)}")
    return _BUILDERS[tag]([_unpack(part, depth - 1) for part in parts])


def _build_set(parts: list[Any]) -> set[Any]:
    built = set(parts)
    if len(built) != len(parts):
        raise ValueError("an element twice in a set")
    return built


def _build_dict(parts: list[Any]) -> dict[Any, Any]:
    half = len(parts) // 2
    built = dict(zip(parts[:half], parts[half:], strict=True))
    if len(built) != half:
        raise ValueError("a key twice in a dict")
    return built


def _build_size(parts: list[Any]) -> torch.Size:
    if not all(type(part) is int and -(2**63) <= part < 2**63 for part in parts):
        raise ValueError("a size that is not of 64-bit integers")  # torch checks too late
    return torch.Size(parts)


def _build_tensor(parts: list[Any]) -> Tensor:
    dtype, memory, *shape = parts
    if dtype not in _TENSOR_DTYPES:
        raise ValueError(f"a tensor of dtype {reprlib.repr(dtype)}")
    if type(memory) is not Tensor or memory.dtype is not torch.uint8 or memory.dim() != 1:
        raise ValueError("a tensor without its memory")
    if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise ValueError(f"a tensor of shape {reprlib.repr(shape)}")
    if math.prod(max(n, 1) for n in shape) >= 2**63:  # its strides would overflow, even if empty
        raise ValueError(f"a tensor of shape {reprlib.repr(shape)}")
    if math.prod(shape) * dtype.itemsize != len(memory):
        raise ValueError(f"a tensor of shape {reprlib.repr(shape)} in {len(memory)} bytes")
    return memory.view(dtype).reshape(shape).data  # .data: not a view of another tensor


def _read_memory(data: memoryview) -> Tensor:
    storage = torch.UntypedStorage.from_buffer(data, dtype=torch.uint8)  # copies
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _read_dtype(data: memoryview) -> torch.dtype:
    name = str(data, "ascii")
    if name not in _DTYPES:
        raise ValueError(f"a dtype {reprlib.repr(name)} that torch {torch.__version__} lacks")
    return _DTYPES[name]


_READERS: dict[int, Callable[[memoryview], object]] = {
    _Ext.INT: lambda data: int.from_bytes(data, "little", signed=True),
    _Ext.TEXT: lambda data: str(data, "utf-8", "surrogatepass"),
    _Ext.COMPLEX: lambda data: complex(*struct.unpack("<dd", data)),
    _Ext.DTYPE: _read_dtype,
    _Ext.DEVICE: lambda data: torch.device(str(data, "ascii")),
    _Ext.BYTES: _read_memory,
}


def _read(code: int, data: memoryview) -> object:
    if code not in _READERS:
        raise ValueError(f"an unknown extension {code}")
    return _READERS[code](data)


_decoder = msgspec.msgpack.Decoder(ext_hook=_read)


# What is carried.

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# A quantized tensor is more than its bytes: scales and zero points come with it.
_TENSOR_DTYPES = {d for name, d in _DTYPES.items() if not name.startswith(("qint", "quint"))}

_PLAIN = {type(None), bool, float, bytes, bytearray}
_LEAVES = _PLAIN | {int, complex, str, torch.dtype, torch.device, Tensor}

_TAGS: dict[type, int] = {
    list: _Tag.LIST,
    tuple: _Tag.TUPLE,
    torch.Size: _Tag.SIZE,
    set: _Tag.SET,
    frozenset: _Tag.FROZENSET,
}

_PACKERS: dict[type, Callable[[Any, _Path], object]] = {
    int: _pack_int,
    str: _pack_str,
    complex: lambda item, _: Ext(_Ext.COMPLEX, struct.pack("<dd", item.real, item.imag)),
    torch.dtype: lambda item, _: Ext(_Ext.DTYPE, _DTYPE_NAMES[item].encode()),
    torch.device: lambda item, _: Ext(_Ext.DEVICE, str(item).encode()),
    list: _pack_sequence,
    tuple: _pack_sequence,
    torch.Size: _pack_sequence,
    set: _pack_set,
    frozenset: _pack_set,
    dict: _pack_dict,
    Tensor: _pack_tensor,
}

_BUILDERS: dict[int, Callable[[list[Any]], object]] = {
    _Tag.LIST: list,
    _Tag.TUPLE: tuple,
    _Tag.SET: _build_set,
    _Tag.FROZENSET: lambda parts: frozenset(_build_set(parts)),
    _Tag.DICT: _build_dict,
    _Tag.SIZE: _build_size,
    _Tag.TENSOR: _build_tensor,
}
