"""The kernels' registry of types: one record per type that can be decoded.

``quantkit.types`` describes the bytes on disk; a record here, the kernels for them. CONTRIBUTING.md, "Add a type",
lists the places of a type. Records do not state whether a type has an unpacker, an encoder, or one with ik_llama.cpp's
search: the functions exist or not. Everything else follows: commands, activation formats, products, embeddings, the
traits of the CUDA struct (generated.py), checks of files, tests, scripts. Optional and by name: a specialized dot
product (cpu/matmul/type_dots.py, cuda/unpack/dot_forms.cuh).

A *unit* is 256 values, which an unpacker unpacks at once. *Row headers*: rows of a type with ``row:f32@0`` (or f16) in
``scales`` begin with a scale for the whole row. Unpackers and reference decoders see blocks only: code that walks a row
reads the scale once and applies it, so types without one pay nothing. Products multiply it by a *gain* in two trellis
types, as all products of ik_llama.cpp do (iqk_gemm_ktquants.cpp) and its dequantize_row_* do not: fitted to weighted
squares, such coarse levels are too small on average.

*Interleaved types* (_R4, _R8, _R16) need no record, only their layout (interleave.py): everything is computed on their
base type, whose bytes they contain interleaved. Files never contain the base types of IQ1_S_R4 and IQ1_M_R4
(``types.ROWS``).
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.kernels.interleave import base_of, layout_of
from quantkit.types import BY_NAME, TensorType

#: Values unpacked at once.
UNIT = 256


@dataclass(frozen=True, slots=True)
class Format:
    """Properties of a type that kernels depend on."""

    type: TensorType
    #: The file that implements it in cpu/encode, cpu/unpack and cuda/unpack.
    family: str
    #: The format of its activations (cpu/matmul/activations.py): llama.cpp's, or ik_llama.cpp's if only that has the
    #: type.
    activations: str
    #: Values that share a scale, and a minimum: 16, 32 or more; 1 for floats.
    span: int = 32
    #: Whether it has minimums: value = scale * level - minimum.
    mins: bool = False
    #: Whether levels may be negative; products of unsigned levels need no offset.
    signed: bool = True
    #: The factor by which products, but not the decoder, multiply the scale of a row.
    row_scale_gain: float = 1.0
    #: CUDA, one or two rows: each value of x takes a register, its byte four times over (ik_dot_forms.cuh).
    byte_replicated: bool = False
    #: CUDA, many rows: bytes of a level times its scale, 0 if not folded; AS_F16 if it is a half (folded.cuh).
    folded_scale_bytes: int = 0
    #: CUDA, one row: tensor cores multiply tiles of 16 rows of weights (tile_forms.cuh).
    tiles: bool = False
    #: CUDA: words of the grid of levels.
    grid: int = 0
    #: CUDA, few rows: parts of 32 values per lane and step (dot_forms.cuh).
    blocks_per_lane: int = 1
    #: CUDA, one row: the number of rows of weights that the registers hold besides it, if fewer than its bits allow
    #: (mat_vec.py).
    max_rows_in_registers: int = 0
    #: CUDA: two types with the same name here can share a launch: the same activations, little shared memory.
    launch_group: str = ""

    @property
    def is_float(self) -> bool:
        """Whether values are plain numbers that need no unpacking."""
        return self.type.block == 1

    @property
    def unit_bytes(self) -> int:
        """Bytes of 256 values in a row."""
        return UNIT // self.type.block * self.type.block_bytes

    @property
    def align(self) -> int:
        """The alignment of every block, at most 16, if rows are aligned to it."""
        bits = self.type.block_bytes | self.type.row_header | 16
        return bits & -bits

    @property
    def ik_encoder(self) -> bool:
        """Whether llama.cpp and ik_llama.cpp both encode it, with different searches."""
        return _is_defined("encode", self, "_ik")


#: The project whose encoder is reproduced; the two differ in some common types (``Format.ik_encoder``), and in their
#: interleaved types.
ENCODERS = ("mainline", "ik")
#: A third encoder, of Q4_0 alone: levels -7 .. 7, as with ik_llama.cpp's --symmetric-q40.
SYMMETRIC = "symmetric"
#: A third encoder, of NVFP4 alone: rows are divided by a scale of the tensor, and scales of blocks are searched.
SCALED = "scaled"

#: ``planes`` of a type whose levels become half floats.
FOLDED_TO_F16 = 16


def _format(name: str, family: str, activations: str, **fields: Any) -> Format:
    if name not in BY_NAME:
        raise LookupError(f"{name} has a record here, but no row in quantkit/types.py: see CONTRIBUTING.md, Add a type")
    return Format(BY_NAME[name], family, activations, **fields)


_MINS: dict[str, Any] = {"mins": True, "signed": False}

#: Every type with kernels, by name; fields not given have ``Format``'s defaults.
FORMATS: dict[str, Format] = {
    f.type.name: f
    for f in (
        _format("F32", "floats", "f32", span=1),
        _format("F16", "floats", "f16", span=1),
        _format("BF16", "floats", "bf16", span=1),
        _format("Q4_0", "legacy", "q8_0"),
        _format("Q4_1", "legacy", "q8_1", **_MINS),
        _format("Q5_0", "legacy", "q8_0"),
        _format("Q5_1", "legacy", "q8_1", **_MINS),
        _format("Q8_0", "legacy", "q8_0"),
        _format("Q6_0", "legacy", "q8_2"),
        _format("Q8_KV", "legacy", "q8_kv"),
        _format("Q2_K", "k_quants", "q8_k", **_MINS, span=16, folded_scale_bytes=1, launch_group="K"),
        _format("Q3_K", "k_quants", "q8_k", span=16, folded_scale_bytes=1, launch_group="K"),
        _format("Q4_K", "k_quants", "q8_k", **_MINS, launch_group="K"),
        _format("Q5_K", "k_quants", "q8_k", **_MINS, launch_group="K"),
        _format("Q6_K", "k_quants", "q8_k", span=16, folded_scale_bytes=2, launch_group="K"),
        _format("IQ1_S", "i_quants", "q8_k", grid=2048, blocks_per_lane=2),
        _format("IQ1_M", "i_quants", "q8_k", span=16, folded_scale_bytes=2, grid=2048, blocks_per_lane=2),
        _format("IQ1_S_ROW", "i_quants", "q8_0", grid=2048),
        _format("IQ1_M_ROW", "i_quants", "q8_0", span=16, folded_scale_bytes=FOLDED_TO_F16, grid=2048),
        _format("IQ2_XXS", "i_quants", "q8_k", grid=256, blocks_per_lane=2),
        _format("IQ2_XS", "i_quants", "q8_k", span=16, folded_scale_bytes=2, grid=512, blocks_per_lane=2),
        _format("IQ2_S", "i_quants", "q8_k", span=16, folded_scale_bytes=2, grid=1024, blocks_per_lane=2),
        _format("IQ3_XXS", "i_quants", "q8_k", grid=256, blocks_per_lane=2),
        _format("IQ3_S", "i_quants", "q8_k", grid=512, blocks_per_lane=2),
        _format("IQ4_NL", "i_quants", "q8_0"),
        _format("IQ4_XS", "i_quants", "q8_k", launch_group="K"),
        _format("TQ1_0", "ternary", "q8_k", folded_scale_bytes=1, blocks_per_lane=2),
        _format("TQ2_0", "ternary", "q8_k", folded_scale_bytes=1, blocks_per_lane=2),
        _format("Q2_0", "ternary", "q8_0"),
        _format("Q1_0", "legacy", "q8_0"),
        _format("MXFP4", "fp4", "q8_0"),
        _format("NVFP4", "fp4", "q8_0", span=16, folded_scale_bytes=FOLDED_TO_F16),
        _format("IQ1_BN", "bitnet", "q8_k64", blocks_per_lane=2, max_rows_in_registers=4),
        _format("IQ2_BN", "bitnet", "q8_k64", blocks_per_lane=2),
        _format("IQ2_K", "ik_quants", "q8_k", span=16, folded_scale_bytes=2, launch_group="K"),
        _format("IQ3_K", "ik_quants", "q8_k", span=16, folded_scale_bytes=2, launch_group="K"),
        _format("IQ4_K", "ik_quants", "q8_k", span=16, folded_scale_bytes=2, launch_group="K"),
        _format("IQ5_K", "ik_quants", "q8_k", span=16, folded_scale_bytes=2, launch_group="K"),
        _format("IQ6_K", "ik_quants", "q8_k", span=16, folded_scale_bytes=2, launch_group="K"),
        _format("IQ2_KS", "ik_quants", "q8_k", launch_group="K"),
        _format("IQ3_KS", "ik_quants", "q8_k", launch_group="K"),
        _format("IQ4_KS", "ik_quants", "q8_k", launch_group="K"),
        _format("IQ5_KS", "ik_quants", "q8_k", launch_group="K"),
        _format("IQ4_KSS", "ik_quants", "q8_k", launch_group="K"),
        _format("IQ2_KL", "ik_quants", "q8_k", blocks_per_lane=2, launch_group="K"),
        _format("IQ1_KT", "trellis", "q8_2", byte_replicated=True, tiles=True),
        _format("IQ2_KT", "trellis", "q8_2", row_scale_gain=1.05, byte_replicated=True, tiles=True),
        _format("IQ3_KT", "trellis", "q8_2", row_scale_gain=1.01, tiles=True),
        _format("IQ4_KT", "trellis", "q8_2", byte_replicated=True),
    )
}

#: Those with blocks of levels, and so with an unpacker.
BLOCK_TYPES: tuple[TensorType, ...] = tuple(f.type for f in FORMATS.values() if not f.is_float)


#: Interleaved types whose encoder starts from values, not from the rows of a base type.
INTERLEAVED_ENCODERS = ("Q8_K_R8", "Q8_K_R16")


#: Matches the definition of an encoder or an unpacker at the beginning of a line.
_DEFINITION = re.compile(r"^(?:def )?((?:encode|unpack)_\w+)\b", re.MULTILINE)


@cache
def _definitions(verb: str, family: str) -> frozenset[str]:
    """Return the names that a family's file defines; importing it would load the compiler."""
    path = Path(__file__).parent / "cpu" / verb / f"{family}.py"
    return frozenset(_DEFINITION.findall(path.read_text(encoding="utf-8")) if path.is_file() else ())


def _is_defined(verb: str, spec: Format, suffix: str = "") -> bool:
    """Return whether ``encode_<type>`` or ``unpack_<type>`` is in its family's file, or was added to the module."""
    name = f"{verb}_{spec.type.name.lower()}{suffix}"
    module = sys.modules.get(f"quantkit.kernels.cpu.{verb}.{spec.family}")
    return name in _definitions(verb, spec.family) or hasattr(module, name)


def has_decoder(t: TensorType) -> bool:
    """Return whether rows of type ``t`` can be decoded and multiplied: an interleaved type as its base type."""
    spec = FORMATS.get(base_of(t).name)
    return spec is not None and (spec.is_float or _is_defined("unpack", spec))


def has_encoder(t: TensorType) -> bool:
    """Return whether rows can be encoded as type ``t``."""
    base = base_of(t)
    if t.name in INTERLEAVED_ENCODERS:
        return True
    if base is not t and not layout_of(t).is_exact:
        return False
    return base.name in FORMATS and _is_defined("encode", FORMATS[base.name])


def format_of(t: TensorType, function: str = "decoder") -> Format:
    """Return the record of type ``t``. Raises TypeNotSupported, naming the missing ``function``, if there is none."""
    exists = has_encoder if function == "encoder" else has_decoder
    if t.name not in FORMATS or not exists(t):
        raise TypeNotSupported(f"no {function} for {t.name} in this version; see `quantkit types`", "QK-E302")
    return FORMATS[t.name]


def activation_format(t: TensorType) -> str:
    """Return the format of activations that weights of type ``t`` multiply."""
    return format_of(t).activations


def check_encoder(encoder: str | None) -> None:
    """Raise RecipeError unless ``encoder`` is one of ENCODERS, or None."""
    if encoder is not None and encoder not in ENCODERS:
        raise RecipeError(f"unknown encoder {encoder!r}: choose {' or '.join(ENCODERS)}", "QK-E203")


def encoder_for(t: TensorType, encoder: str | None = None) -> str:
    """Return the encoder of type ``t``, one of ENCODERS: that of its project, or ``encoder`` if there are two.

    The default for a common type is llama.cpp's, but that of an interleaved type is ik_llama.cpp's. SYMMETRIC and
    SCALED are third ones, each of one type.
    """
    base = base_of(t)
    if encoder == SCALED:
        return SCALED if t.name == "NVFP4" else encoder_for(t)
    if encoder == SYMMETRIC:
        return SYMMETRIC if base.name == "Q4_0" else encoder_for(t)
    check_encoder(encoder)
    native = "ik" if t.trees == "ik" else "mainline"
    two = base.trees == "both" and t.name not in INTERLEAVED_ENCODERS
    if base is t:
        two = t.name in FORMATS and FORMATS[t.name].ik_encoder
    return encoder if encoder is not None and two else native


def cpu_function(verb: str, t: TensorType, variant: str | None = None) -> Callable[..., Any]:
    """Return ``encode_<type>``, of the search ``variant``, or ``unpack_<type>``; raise TypeNotSupported if none."""
    spec = format_of(t, "encoder" if verb == "encode" else "unpacker")
    if verb == "unpack" and spec.is_float:
        raise TypeNotSupported(f"{t.name} has no blocks to unpack")
    module = importlib.import_module(f"quantkit.kernels.cpu.{verb}.{spec.family}")
    suffix = ""
    if verb == "encode" and (spec.ik_encoder or variant == SCALED):
        search = encoder_for(t, variant)
        suffix = "" if search == "mainline" else f"_{search}"
    return getattr(module, f"{verb}_{t.name.lower()}{suffix}")  # type: ignore[no-any-return]
