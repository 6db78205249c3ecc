"""Codecs: what gradients look like while they travel. ``codec.py`` says what a codec is."""

from .cast import Bf16, Fp8, Fp16, Fp32
from .codec import Chain, Codec, Encoded, Encodes, RowCodec, as_codec, is_codec
from .int8 import Int8
from .powersgd import PowerSGD
from .sign import Sign
from .topk import TopK

__all__ = [
    "Bf16",
    "Chain",
    "Codec",
    "Encoded",
    "Encodes",
    "Fp8",
    "Fp16",
    "Fp32",
    "Int8",
    "PowerSGD",
    "RowCodec",
    "Sign",
    "TopK",
    "as_codec",
    "is_codec",
]
