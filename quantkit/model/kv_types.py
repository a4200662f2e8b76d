"""Types of keys and values in caches: ``f16``, or ``K/V`` where keys and values have different ones.

Backends store f32, f16 and q8_0, the same type for both. All others are rounded to on the CPU, by llama.cpp's
quantize_row_*_ref and dequantize_row_*, and stored as f32: results are those of the type, memory is not saved.
"""

from __future__ import annotations

from quantkit.errors import RecipeError

#: Types that caches are stored in, with the bytes of a value.
STORED = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}
#: All types of llama.cpp's -ctk and -ctv.
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
#: Types without blocks of 32 values.
_FLOATS = ("f32", "f16", "bf16")


def split_kv_type(kv_type: str) -> tuple[str, str]:
    """Return the types of keys and values. Raises RecipeError."""
    k, _, v = kv_type.partition("/")
    for name in (k, v or k):
        if name not in KV_TYPES:
            raise RecipeError(f"unsupported cache type {name}: choose one of {', '.join(KV_TYPES)}", "QK-E203")
    return k, v or k


def join_kv_types(k: str, v: str) -> str:
    """Return the name of a cache with these types of keys and values."""
    return k if k == v else f"{k}/{v}"


def stored_type(kv_type: str) -> str:
    """Return the type in which a cache is stored."""
    return kv_type if kv_type in STORED else "f32"


def is_rounded(kv_type: str) -> bool:
    """Return whether values are rounded to a type that caches are not stored in."""
    return kv_type not in STORED


def has_blocks(kv_type: str) -> bool:
    """Return whether rows of the cache must be whole blocks of 32 values."""
    return any(name not in _FLOATS for name in split_kv_type(kv_type))
