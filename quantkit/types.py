"""The table of tensor types: every id, name, size and rule of llama.cpp and ik_llama.cpp, written once.

Two runtimes read GGUF files: llama.cpp (*mainline*, b11434) and ik_llama.cpp (*ik*, 8337e4cd3). A row of
``TYPES`` describes one of their types; enums, help texts, size estimates and tests all follow from it.

A tensor of type t with n values per row has ``t.row_header + n / t.block * t.block_bytes`` bytes per row. An
*interleaved* type interleaves the bytes of 4, 8 or 16 rows, their headers first, so only whole groups of rows can be
addressed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.errors import TypeNotSupported


@dataclass(frozen=True, slots=True)
class TensorType:
    """One type of tensor data.

    ``imatrix`` says how the encoder treats an importance matrix: "ignored", "used" (if there is one) or "required"
    (ggml aborts without it). ``needs_imatrix`` names the trees ("mainline+ik") whose llama-quantize refuses the type
    without one. ``trees`` are those that have the type: "both", "mainline", "ik", or "none" for a user-defined type,
    with an id of ``OWN_IDS``. ``scales`` lists a block's float fields as kind@offset, those of a row's header as
    row:kind@offset; they must be finite.
    """

    id: int
    name: str
    #: The exact spelling that the runtimes print and that ik's --custom-q requires; none of ``ROWS``.
    ggml_name: str
    #: Values per block, and bytes per block.
    block: int
    block_bytes: int
    #: Bytes at the start of each row (ik: a scale for the whole row).
    row_header: int
    #: Number of rows whose bytes are interleaved.
    interleave: int
    family: str
    trees: str
    imatrix: str
    needs_imatrix: str
    scales: str

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Pickle by name, so that a type is a single object in other processes as well: code compares with ``is``."""
        return _by_name, (self.name,)

    @property
    def bpw(self) -> float:
        """Bits per weight without row headers, as both trees print it."""
        return 8 * self.block_bytes / self.block

    @property
    def is_quantized(self) -> bool:
        """True for all but plain floats and integers (ggml_is_quantized)."""
        return self.block > 1

    @property
    def in_files(self) -> bool:
        """False for types that files do not contain: Q8_K, whose size differs between the trees, and ``ROWS``."""
        return self.id != 15 and bool(self.ggml_name)

    @property
    def fields(self) -> tuple[tuple[bool, str, int], ...]:
        """The fields of ``scales``: whether it belongs to the row, its kind, and its byte offset in the row header or
        block."""
        split = [field.partition("@") for field in self.scales.split()]
        return tuple((kind.startswith("row:"), kind.removeprefix("row:"), int(offset)) for kind, _, offset in split)

    @property
    def row_scale(self) -> str:
        """The kind, f32 or f16, of the row scale that precedes each row; "" if there is none."""
        return next((kind for of_row, kind, _ in self.fields if of_row), "")

    def is_in(self, tree: str) -> bool:
        """Return whether a tree, "mainline" or "ik", has the type."""
        return self.trees in (tree, "both")

    def row_bytes(self, n: int) -> int:
        """Return the bytes of one row of ``n`` values; ``n`` must be a multiple of the block."""
        if n % self.block:
            raise TypeNotSupported(
                f"{self.name} has blocks of {self.block} values; a row of {n} is not a multiple", "QK-E303"
            )
        return self.row_header + n // self.block * self.block_bytes

    def row_values(self, nbytes: int) -> int:
        """Return the values of a row of ``nbytes`` bytes, the inverse of ``row_bytes``."""
        blocks, excess = divmod(nbytes - self.row_header, self.block_bytes)
        if excess or blocks < 1:
            head = f"{self.row_header} bytes and " if self.row_header else ""
            raise TypeNotSupported(
                f"a row of {self.name} is {head}blocks of {self.block_bytes} bytes; {nbytes} bytes are not a multiple",
                "QK-E303",
            )
        return blocks * self.block

    def tensor_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor of ggml shape ``shape`` (ne order, innermost first); of a scalar it is ()."""
        row, rows = self.row_bytes(shape[0] if shape else 1), math.prod(shape[1:])
        if self.interleave > 1 and (shape[1] if len(shape) > 1 else 1) % self.interleave:
            raise TypeNotSupported(
                f"{self.name} interleaves {self.interleave} rows; the rows of shape {list(shape)} are not a multiple",
                "QK-E303",
            )
        if 0 in shape:
            return 0
        # I2_S alone ends a tensor with one scale in 32 bytes: kernels/tensor_scale.py.
        return rows * row + (32 if self.name == "I2_S" else 0)


T = TensorType

#: Every type of both projects, by id.
# fmt: off
TYPES: tuple[TensorType, ...] = (
    # id  name           ggml name      block bytes header interleave family       trees        imatrix     refused
    # without, finite fields
    T(0,   "F32",        "f32",        1,   4,   0,  1,  "float",       "both",     "ignored",  "", "f32@0"),
    T(1,   "F16",        "f16",        1,   2,   0,  1,  "float",       "both",     "ignored",  "", "f16@0"),
    T(2,   "Q4_0",       "q4_0",       32,  18,  0,  1,  "legacy",      "both",     "used",     "", "f16@0"),
    T(3,   "Q4_1",       "q4_1",       32,  20,  0,  1,  "legacy",      "both",     "used",     "", "f16@0 f16@2"),
    T(6,   "Q5_0",       "q5_0",       32,  22,  0,  1,  "legacy",      "both",     "used",     "", "f16@0"),
    T(7,   "Q5_1",       "q5_1",       32,  24,  0,  1,  "legacy",      "both",     "used",     "", "f16@0 f16@2"),
    T(8,   "Q8_0",       "q8_0",       32,  34,  0,  1,  "legacy",      "both",     "ignored",  "", "f16@0"),
    T(9,   "Q8_1",       "q8_1",       32,  36,  0,  1,  "activation",  "both",     "ignored",  "", ""),
    T(10,  "Q2_K",       "q2_K",       256, 84,  0,  1,  "k_quant",     "both",     "used",     "", "f16@80 f16@82"),
    T(11,  "Q3_K",       "q3_K",       256, 110, 0,  1,  "k_quant",     "both",     "used",     "", "f16@108"),
    T(12,  "Q4_K",       "q4_K",       256, 144, 0,  1,  "k_quant",     "both",     "used",     "", "f16@0 f16@2"),
    T(13,  "Q5_K",       "q5_K",       256, 176, 0,  1,  "k_quant",     "both",     "used",     "", "f16@0 f16@2"),
    T(14,  "Q6_K",       "q6_K",       256, 210, 0,  1,  "k_quant",     "both",     "used",     "", "f16@208"),
    T(15,  "Q8_K",       "q8_K",       256, 296, 0,  1,  "activation",  "both",     "ignored",  "", ""),
    T(16,  "IQ2_XXS",    "iq2_xxs",    256, 66,  0,  1,  "i_quant",     "both",     "required", "mainline+ik", "f16@0"),
    T(17,  "IQ2_XS",     "iq2_xs",     256, 74,  0,  1,  "i_quant",     "both",     "required", "mainline+ik", "f16@0"),
    T(18,  "IQ3_XXS",    "iq3_xxs",    256, 98,  0,  1,  "i_quant",     "both",     "used",     "mainline", "f16@0"),
    T(19,  "IQ1_S",      "iq1_s",      256, 50,  0,  1,  "i_quant",     "both",     "required", "mainline+ik", "f16@0"),
    T(20,  "IQ4_NL",     "iq4_nl",     32,  18,  0,  1,  "i_quant",     "both",     "used",     "", "f16@0"),
    T(21,  "IQ3_S",      "iq3_s",      256, 110, 0,  1,  "i_quant",     "both",     "used",     "", "f16@0"),
    T(22,  "IQ2_S",      "iq2_s",      256, 82,  0,  1,  "i_quant",     "both",     "used",     "mainline+ik", "f16@0"),
    T(23,  "IQ4_XS",     "iq4_xs",     256, 136, 0,  1,  "i_quant",     "both",     "used",     "", "f16@0"),
    T(24,  "I8",         "i8",         1,   1,   0,  1,  "integer",     "both",     "ignored",  "", ""),
    T(25,  "I16",        "i16",        1,   2,   0,  1,  "integer",     "both",     "ignored",  "", ""),
    T(26,  "I32",        "i32",        1,   4,   0,  1,  "integer",     "both",     "ignored",  "", ""),
    T(27,  "I64",        "i64",        1,   8,   0,  1,  "integer",     "both",     "ignored",  "", ""),
    T(28,  "F64",        "f64",        1,   8,   0,  1,  "float",       "both",     "ignored",  "", "f64@0"),
    T(29,  "IQ1_M",      "iq1_m",      256, 56,  0,  1,  "i_quant",     "both",     "used",     "mainline+ik", "nibbles@48"),
    T(30,  "BF16",       "bf16",       1,   2,   0,  1,  "float",       "both",     "ignored",  "", "bf16@0"),
    T(31,  "Q4_0_4X4",   "q4_0_4x4",   32,  18,  0,  4,  "interleaved", "ik",       "ignored",  "", ""),
    T(32,  "Q4_0_4X8",   "q4_0_4x8",   32,  18,  0,  4,  "interleaved", "ik",       "ignored",  "", ""),
    T(33,  "Q4_0_8X8",   "q4_0_8x8",   32,  18,  0,  8,  "interleaved", "ik",       "ignored",  "", ""),
    T(34,  "TQ1_0",      "tq1_0",      256, 54,  0,  1,  "ternary",     "mainline", "ignored",  "", "f16@52"),
    T(35,  "TQ2_0",      "tq2_0",      256, 66,  0,  1,  "ternary",     "mainline", "ignored",  "", "f16@64"),
    T(36,  "I2_S",       "i2_s",       4,   1,   0,  1,  "bitnet",      "ik",       "ignored",  "", ""),
    T(39,  "MXFP4",      "mxfp4",      32,  17,  0,  1,  "fp4",         "both",     "ignored",  "", "e8m0@0"),
    T(40,  "NVFP4",      "nvfp4",      64,  36,  0,  1,  "fp4",         "mainline", "ignored",  "", "ue4m3@0 ue4m3@1 ue4m3@2 ue4m3@3"),
    T(41,  "Q1_0",       "q1_0_g128",  128, 18,  0,  1,  "binary",      "both",     "ignored",  "", "f16@0"),
    T(42,  "Q2_0",       "q2_0",       64,  18,  0,  1,  "ternary",     "mainline", "ignored",  "", "f16@0"),
    T(97,  "Q8_0_X4",    "q8_0_x4",    32,  34,  0,  1,  "activation",  "ik",       "ignored",  "", ""),
    T(98,  "Q8_1_X4",    "q8_1_x4",    32,  36,  0,  1,  "activation",  "ik",       "ignored",  "", ""),
    T(99,  "Q8_2_X4",    "q8_2_x4",    32,  36,  0,  1,  "activation",  "ik",       "ignored",  "", ""),
    T(133, "Q6_0",       "q6_0",       32,  26,  0,  1,  "legacy",      "ik",       "used",     "", "f16@0"),
    T(134, "IQ1_BN",     "iq1_bn",     64,  13,  2,  1,  "bitnet",      "ik",       "ignored",  "", "row:f16@0"),
    T(135, "IQ2_BN",     "iq2_bn",     64,  16,  4,  1,  "bitnet",      "ik",       "ignored",  "", "row:f32@0"),
    T(136, "Q8_K64",     "q8_K64",     64,  68,  0,  1,  "activation",  "ik",       "ignored",  "", ""),
    T(137, "IQ2_K",      "iq2_k",      256, 76,  0,  1,  "ik_quant",    "ik",       "used",     "", "f16@0"),
    T(138, "IQ3_K",      "iq3_k",      256, 110, 0,  1,  "ik_quant",    "ik",       "used",     "", "f16@0"),
    T(139, "IQ4_K",      "iq4_k",      256, 144, 0,  1,  "ik_quant",    "ik",       "used",     "", "f16@0"),
    T(140, "IQ5_K",      "iq5_k",      256, 176, 0,  1,  "ik_quant",    "ik",       "used",     "", "f16@0"),
    T(141, "IQ6_K",      "iq6_k",      256, 212, 0,  1,  "ik_quant",    "ik",       "used",     "", "f16@0"),
    T(144, "IQ4_KS",     "iq4_ks",     256, 136, 4,  1,  "ik_quant",    "ik",       "used",     "", "row:f32@0"),
    T(145, "IQ2_KS",     "iq2_ks",     256, 70,  2,  1,  "ik_quant",    "ik",       "used",     "", "row:f16@0"),
    T(146, "IQ4_KSS",    "iq4_kss",    256, 128, 4,  1,  "ik_quant",    "ik",       "used",     "", "row:f32@0"),
    T(147, "Q8_K16",     "q8_K16",     64,  64,  20, 1,  "activation",  "ik",       "ignored",  "", ""),
    T(148, "Q8_K32",     "q8_K32",     256, 296, 0,  1,  "activation",  "ik",       "ignored",  "", ""),
    T(149, "Q8_KR8",     "q8_KR8",     256, 296, 0,  1,  "activation",  "ik",       "ignored",  "", ""),
    T(150, "Q8_K128",    "q8_K128",    128, 140, 0,  1,  "activation",  "ik",       "ignored",  "", ""),
    T(151, "Q8_KV",      "q8_KV",      32,  32,  8,  1,  "legacy",      "ik",       "ignored",  "", "row:f32@0"),
    T(152, "IQ5_KS",     "iq5_ks",     256, 168, 4,  1,  "ik_quant",    "ik",       "used",     "", "row:f32@0"),
    T(153, "IQ2_KT",     "iq2_kt",     256, 68,  4,  1,  "trellis",     "ik",       "used",     "ik", "row:f32@0"),
    T(154, "IQ3_KT",     "iq3_kt",     256, 100, 4,  1,  "trellis",     "ik",       "used",     "", "row:f32@0"),
    T(155, "IQ4_KT",     "iq4_kt",     256, 128, 4,  1,  "trellis",     "ik",       "used",     "", "row:f32@0"),
    T(156, "IQ3_KS",     "iq3_ks",     256, 102, 2,  1,  "ik_quant",    "ik",       "used",     "", "row:f16@0"),
    T(157, "IQ2_KL",     "iq2_kl",     256, 86,  2,  1,  "ik_quant",    "ik",       "used",     "", "row:f16@0"),
    T(158, "IQ1_KT",     "iq1_kt",     256, 56,  4,  1,  "trellis",     "ik",       "used",     "ik", "row:f32@0"),
    T(202, "Q4_0_R8",    "q4_0_r8",    32,  18,  0,  8,  "interleaved", "ik",       "used",     "", ""),
    T(206, "Q5_0_R4",    "q5_0_r4",    32,  22,  0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(208, "Q8_0_R8",    "q8_0_r8",    32,  34,  0,  8,  "interleaved", "ik",       "ignored",  "", ""),
    T(210, "Q2_K_R4",    "q2_k_r4",    256, 84,  0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(211, "Q3_K_R4",    "q3_k_r4",    256, 110, 0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(212, "Q4_K_R4",    "q4_k_r4",    256, 144, 0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(213, "Q5_K_R4",    "q5_k_r4",    256, 176, 0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(214, "Q6_K_R4",    "q6_k_r4",    256, 210, 0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(216, "IQ2_XXS_R4", "iq2_xxs_r4", 256, 66,  0,  4,  "interleaved", "ik",       "used",     "ik", ""),
    T(217, "IQ2_XS_R4",  "iq2_xs_r4",  256, 74,  0,  4,  "interleaved", "ik",       "used",     "ik", ""),
    T(218, "IQ3_XXS_R4", "iq3_xxs_r4", 256, 98,  0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(219, "IQ1_S_R4",   "iq1_s_r4",   32,  6,   2,  4,  "interleaved", "ik",       "used",     "ik", ""),
    T(220, "IQ4_NL_R4",  "iq4_nl_r4",  32,  18,  0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(221, "IQ3_S_R4",   "iq3_s_r4",   256, 110, 0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(222, "IQ2_S_R4",   "iq2_s_r4",   256, 82,  0,  4,  "interleaved", "ik",       "used",     "ik", ""),
    T(223, "IQ4_XS_R8",  "iq4_xs_r8",  256, 136, 0,  8,  "interleaved", "ik",       "used",     "", ""),
    T(229, "IQ1_M_R4",   "iq1_m_r4",   32,  7,   2,  4,  "interleaved", "ik",       "used",     "ik", ""),
    T(230, "BF16_R16",   "bf16_r16",   1,   2,   0,  16, "interleaved", "ik",       "ignored",  "", ""),
    T(233, "Q6_0_R4",    "q6_0_r4",    32,  26,  0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(335, "IQ2_BN_R4",  "iq2_bn_r4",  64,  16,  4,  4,  "interleaved", "ik",       "ignored",  "", ""),
    T(337, "IQ2_K_R4",   "iq2_k_r4",   256, 76,  0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(338, "IQ3_K_R4",   "iq3_k_r4",   256, 110, 0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(339, "IQ4_K_R4",   "iq4_k_r4",   256, 144, 0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(340, "IQ5_K_R4",   "iq5_k_r4",   256, 176, 0,  4,  "interleaved", "ik",       "used",     "", ""),
    T(344, "IQ4_KS_R4",  "iq4_ks_r4",  256, 136, 4,  4,  "interleaved", "ik",       "used",     "", ""),
    T(352, "IQ5_KS_R4",  "iq5_ks_r4",  256, 168, 4,  4,  "interleaved", "ik",       "used",     "", ""),
    T(353, "MXFP4_R8",   "mxfp4_r8",   32,  17,  0,  8,  "interleaved", "ik",       "ignored",  "", ""),
    T(397, "Q8_K_R16",   "q8_k_r16",   256, 258, 0,  16, "interleaved", "ik",       "ignored",  "", ""),
    T(398, "Q8_KV_R8",   "q8_KV_r8",   32,  32,  4,  8,  "interleaved", "ik",       "ignored",  "", ""),
    T(399, "Q8_K_R8",    "q8_k_r8",    256, 258, 0,  8,  "interleaved", "ik",       "ignored",  "", ""),
)

#: Single rows of types that are interleaved by definition. Files and users never have them: kernels work on them, and
#: kernels/interleave.py interleaves four. Neither project has their ids.
ROWS: tuple[TensorType, ...] = (
    T(1219,"IQ1_S_ROW", "",           32,  6,   2,  1,  "i_quant",     "ik",       "used",     "ik", "row:f16@0"),
    T(1229,"IQ1_M_ROW", "",           32,  7,   2,  1,  "i_quant",     "ik",       "used",     "ik", "row:f16@0"),
)
# fmt: on

#: Ids that neither project uses, for a researcher's own types, whose ``trees`` are "none".
OWN_IDS = range(10_000, 11_000)

#: Ids of removed types, which readers must reject.
REMOVED_IDS = {4: "Q4_2", 5: "Q4_3", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 142: "IQ2_TN", 143: "IQ1_TN"}

#: Other spellings of a name.
ALIASES = {"Q1_0_G128": "Q1_0", "Q4_0_4_4": "Q4_0_4X4", "Q4_0_4_8": "Q4_0_4X8", "Q4_0_8_8": "Q4_0_8X8"}

BY_ID: dict[int, TensorType] = {t.id: t for t in TYPES}
#: By name, including ``ROWS``; users may give only those that ``type_by_name`` returns.
BY_NAME: dict[str, TensorType] = {t.name: t for t in (*TYPES, *ROWS)}


def _by_name(name: str) -> TensorType:
    return BY_NAME[name]


def has_type(name: str) -> bool:
    """Return whether ``type_by_name`` accepts a name."""
    key = name.strip().upper()
    t = BY_NAME.get(ALIASES.get(key, key))
    return t is not None and t not in ROWS


def type_by_name(name: str) -> TensorType:
    """Return the type called ``name``, in any case. Raises TypeNotSupported with similar names."""
    key = name.strip().upper()
    if not has_type(name):
        import difflib

        close = difflib.get_close_matches(key, [t.name for t in TYPES], 3)
        hint = f"; did you mean {' or '.join(close)}?" if close else "; `quantkit types` lists all types"
        raise TypeNotSupported(f"unknown tensor type {name[:100]!r}{hint}", "QK-E301")
    return BY_NAME[ALIASES.get(key, key)]


def type_by_id(type_id: int) -> TensorType:
    """Return the type of GGUF id ``type_id``. Raises TypeNotSupported for removed and unknown ids, and Q8_K."""
    t = BY_ID.get(type_id)
    if t is not None and t.in_files:
        return t
    if t is not None:
        raise TypeNotSupported(
            "type id 15 (Q8_K) has two sizes, 292 bytes in llama.cpp and 296 in ik_llama.cpp; files must not contain "
            "it",
            "QK-E301",
        )
    if type_id in REMOVED_IDS:
        raise TypeNotSupported(
            f"type id {type_id} ({REMOVED_IDS[type_id]}) was removed from llama.cpp and ik_llama.cpp", "QK-E301"
        )
    raise TypeNotSupported(f"type id {type_id} is unknown to llama.cpp b11434 and ik_llama.cpp 8337e4cd3", "QK-E301")
