"""Presets: names of TYPE in llama.cpp b11434 and ik_llama.cpp 8337e4cd3, and the project whose rules apply.

A *preset* (llama.cpp's ftype) is a base type and type rules, which are in type_rules.py. Names that both trees have
follow llama.cpp's rules unless --rules ik is given; ik_llama.cpp's own names follow its rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.errors import TypeNotSupported
from quantkit.kernels.interleave import plain_of
from quantkit.types import ALIASES as TYPE_ALIASES
from quantkit.types import BY_NAME, TYPES, TensorType

#: general.file_type of types that no preset gives (LLAMA_FTYPE_GUESSED).
FTYPE_UNKNOWN = 1024


@dataclass(frozen=True, slots=True)
class Preset:
    """A name for TYPE.

    ``ftype`` goes into general.file_type. ``base`` is None only for COPY. ``trees`` is "mainline", "ik", "both" or, of
    quantkit's own, "none". ``mixes`` is False for a plain tensor type, which every tensor gets.
    """

    name: str
    ftype: int
    base: TensorType | None
    trees: str
    description: str
    mixes: bool = True

    def __str__(self) -> str:
        return self.name


def _p(name: str, ftype: int, base: str | None, trees: str, description: str) -> Preset:
    return Preset(name, ftype, BY_NAME[base] if base else None, trees, description)


#: Every preset of llama.cpp b11434 and ik_llama.cpp 8337e4cd3, and NVFP4_MOE; aliases are in PRESET_ALIASES.
# fmt: off
PRESETS: tuple[Preset, ...] = (
    # name             ftype base       trees       in short
    _p("F32",          0,   "F32",      "both",     "full precision, for conversions and references"),
    _p("F16",          1,   "F16",      "both",     "half precision; large values overflow"),
    _p("BF16",         32,  "BF16",     "both",     "f32's range in 16 bits; the type of most checkpoints"),
    _p("Q8_0",         7,   "Q8_0",     "both",     "8.5 bpw, practically lossless"),
    _p("Q6_K",         18,  "Q6_K",     "both",     "6.6 bpw, very close to the original"),
    _p("Q5_K_M",       17,  "Q5_K",     "both",     "5.7 bpw, half of attn_v and ffn_down in Q6_K"),
    _p("Q5_K_S",       16,  "Q5_K",     "both",     "5.5 bpw, Q5_K except the output"),
    _p("Q5_1",         9,   "Q5_1",     "both",     "6 bpw, legacy format with a minimum per block"),
    _p("Q5_0",         8,   "Q5_0",     "both",     "5.5 bpw, legacy format"),
    _p("Q4_K_M",       15,  "Q4_K",     "both",     "4.8 bpw, half of attn_v and ffn_down in Q6_K; the usual choice"),
    _p("Q4_K_S",       14,  "Q4_K",     "both",     "4.6 bpw, Q5_K in the first layers' attn_v and ffn_down"),
    _p("Q4_1",         3,   "Q4_1",     "both",     "5 bpw, legacy format with a minimum per block"),
    _p("Q4_0",         2,   "Q4_0",     "both",     "4.5 bpw, legacy format, fast everywhere"),
    _p("IQ4_NL",       25,  "IQ4_NL",   "both",     "4.5 bpw, non-linear levels, rows of 32"),
    _p("IQ4_XS",       30,  "IQ4_XS",   "both",     "4.25 bpw, non-linear levels"),
    _p("Q3_K_L",       13,  "Q3_K",     "both",     "4.3 bpw, Q5_K in attn_v, attn_output and ffn_down"),
    _p("Q3_K_M",       12,  "Q3_K",     "both",     "3.9 bpw, Q4_K and Q5_K in attn_v, attn_output and ffn_down"),
    _p("Q3_K_S",       11,  "Q3_K",     "both",     "3.4 bpw, Q3_K except the output"),
    _p("IQ3_M",        27,  "IQ3_S",    "both",     "3.7 bpw, IQ3_S with Q4_K in attention and first ffn_down"),
    _p("IQ3_S",        26,  "IQ3_S",    "both",     "3.4 bpw grid quant"),
    _p("IQ3_XS",       22,  "IQ3_S",    "both",     "3.3 bpw, alternating IQ3_S and IQ3_XXS"),
    _p("IQ3_XXS",      23,  "IQ3_XXS",  "both",     "3.1 bpw grid quant; imatrix recommended"),
    _p("Q2_K",         10,  "Q2_K",     "both",     "2.6 bpw base, Q3_K and Q4_K in sensitive tensors"),
    _p("Q2_K_S",       21,  "Q2_K",     "both",     "2.6 bpw; imatrix recommended"),
    _p("IQ2_M",        29,  "IQ2_S",    "both",     "2.7 bpw, IQ2_S with IQ3_S and Q4_K; imatrix recommended"),
    _p("IQ2_S",        28,  "IQ2_XS",   "both",     "2.5 bpw, IQ2_XS with IQ3_S and Q4_K; imatrix recommended"),
    _p("IQ2_XS",       20,  "IQ2_XS",   "both",     "2.3 bpw grid quant; needs an imatrix"),
    _p("IQ2_XXS",      19,  "IQ2_XXS",  "both",     "2.1 bpw grid quant; needs an imatrix"),
    _p("IQ1_M",        31,  "IQ1_M",    "both",     "1.75 bpw; imatrix recommended"),
    _p("IQ1_S",        24,  "IQ1_S",    "both",     "1.56 bpw; needs an imatrix"),
    _p("COPY",         0,   None,       "both",     "every tensor unchanged, except those an option or rule matches"),
    _p("MXFP4_MOE",    38,  "MXFP4",    "mainline", "experts in MXFP4, everything else in Q8_0"),
    _p("TQ1_0",        36,  "TQ1_0",    "mainline", "1.7 bpw, for models trained with ternary weights"),
    _p("TQ2_0",        37,  "TQ2_0",    "mainline", "2.1 bpw, for models trained with ternary weights"),
    _p("Q1_0",         40,  "Q1_0",     "mainline", "1.1 bpw, one sign bit per weight"),
    _p("Q2_0",         41,  "Q2_0",     "mainline", "2.25 bpw, levels -1, 0, 1"),
    # quantkit only; llama.cpp has no number for it but that of files with experts of NVFP4
    _p("NVFP4_MOE",    39,  "NVFP4",    "none",     "experts in NVFP4, everything else in Q8_0"),
    # ik_llama.cpp only
    _p("MXFP4",        38,  "MXFP4",    "ik",       "4.25 bpw, 4-bit floats"),
    _p("MXFP4_R8",     351, "MXFP4_R8", "ik",       "MXFP4, 8 rows interleaved"),
    _p("Q6_0",         135, "Q6_0",     "ik",       "6.5 bpw, legacy format"),
    _p("Q8_KV",        149, "Q8_KV",    "ik",       "8 bpw, one scale per row"),
    _p("IQ1_BN",       136, "IQ1_BN",   "ik",       "1.6 bpw, for BitNet"),
    _p("IQ2_BN",       137, "IQ2_BN",   "ik",       "2 bpw, for BitNet"),
    _p("IQ1_KT",       156, "IQ1_KT",   "ik",       "1.75 bpw trellis"),
    _p("IQ2_KT",       151, "IQ2_KT",   "ik",       "2.1 bpw trellis"),
    _p("IQ3_KT",       152, "IQ3_KT",   "ik",       "3.1 bpw trellis"),
    _p("IQ4_KT",       153, "IQ4_KT",   "ik",       "4 bpw trellis"),
    _p("IQ2_K",        138, "IQ2_K",    "ik",       "2.4 bpw, non-linear levels"),
    _p("IQ2_KS",       147, "IQ2_KS",   "ik",       "2.2 bpw, non-linear levels, one scale per row"),
    _p("IQ2_KL",       155, "IQ2_KL",   "ik",       "2.7 bpw, pairs of levels"),
    _p("IQ3_K",        139, "IQ3_K",    "ik",       "3.4 bpw, non-linear levels"),
    _p("IQ3_KS",       154, "IQ3_KS",   "ik",       "3.2 bpw, non-linear levels, one scale per row"),
    _p("IQ3_KL",       146, "IQ3_K",    "ik",       "4 bpw, IQ3_K mixed with IQ4_KS and IQ5_K"),
    _p("IQ4_K",        140, "IQ4_K",    "ik",       "4.5 bpw, non-linear levels"),
    _p("IQ4_KS",       145, "IQ4_KS",   "ik",       "4.25 bpw, non-linear levels, one scale per row"),
    _p("IQ4_KSS",      148, "IQ4_KSS",  "ik",       "4 bpw, non-linear levels, one scale per row"),
    _p("IQ5_K",        141, "IQ5_K",    "ik",       "5.5 bpw, non-linear levels"),
    _p("IQ5_KS",       150, "IQ5_KS",   "ik",       "5.25 bpw, non-linear levels, one scale per row"),
    _p("IQ6_K",        142, "IQ6_K",    "ik",       "6.6 bpw, non-linear levels"),
    _p("Q4_0_4_4",     33,  "Q4_0_4X4", "ik",       "Q4_0, 4 rows interleaved by 4 (ARM)"),
    _p("Q4_0_4_8",     34,  "Q4_0_4X8", "ik",       "Q4_0, 4 rows interleaved by 8 (ARM)"),
    _p("Q4_0_8_8",     35,  "Q4_0_8X8", "ik",       "Q4_0, 8 rows interleaved by 8 (ARM)"),
    _p("Q4_0_R8",      202, "Q4_0_R8",  "ik",       "Q4_0, 8 rows interleaved"),
    _p("Q5_0_R4",      208, "Q5_0_R4",  "ik",       "Q5_0, 4 rows interleaved"),
    _p("Q6_0_R4",      335, "Q6_0_R4",  "ik",       "Q6_0, 4 rows interleaved"),
    _p("Q8_0_R8",      207, "Q8_0_R8",  "ik",       "Q8_0, 8 rows interleaved"),
    _p("Q2_K_R4",      210, "Q2_K_R4",  "ik",       "Q2_K, 4 rows interleaved"),
    _p("Q3_K_R4",      211, "Q3_K_R4",  "ik",       "Q3_K, 4 rows interleaved"),
    _p("Q4_K_R4",      214, "Q4_K_R4",  "ik",       "Q4_K, 4 rows interleaved"),
    _p("Q5_K_R4",      216, "Q5_K_R4",  "ik",       "Q5_K, 4 rows interleaved"),
    _p("Q6_K_R4",      218, "Q6_K_R4",  "ik",       "Q6_K, 4 rows interleaved"),
    _p("Q8_K_R8",      399, "Q8_K_R8",  "ik",       "8 bpw, super-blocks of 256, 8 rows interleaved"),
    _p("Q8_KV_R8",     398, "Q8_KV_R8", "ik",       "Q8_KV, 8 rows interleaved"),
    _p("IQ1_S_R4",     224, "IQ1_S_R4", "ik",       "1.5 bpw, 4 rows interleaved"),
    _p("IQ1_M_R4",     231, "IQ1_M_R4", "ik",       "1.75 bpw, 4 rows interleaved"),
    _p("IQ2_XXS_R4",   219, "IQ2_XXS_R4", "ik",     "IQ2_XXS, 4 rows interleaved"),
    _p("IQ2_XS_R4",    220, "IQ2_XS_R4", "ik",      "IQ2_XS, 4 rows interleaved"),
    _p("IQ2_M_R4",     229, "IQ2_S_R4", "ik",       "IQ2_M, 4 rows interleaved"),
    _p("IQ3_XXS_R4",   223, "IQ3_XXS_R4", "ik",     "IQ3_XXS, 4 rows interleaved"),
    _p("IQ3_S_R4",     226, "IQ3_S_R4", "ik",       "IQ3_S, 4 rows interleaved"),
    _p("IQ4_NL_R4",    225, "IQ4_NL_R4", "ik",      "IQ4_NL, 4 rows interleaved"),
    _p("IQ4_XS_R8",    230, "IQ4_XS_R8", "ik",      "IQ4_XS, 8 rows interleaved"),
    _p("IQ2_BN_R4",    337, "IQ2_BN_R4", "ik",      "IQ2_BN, 4 rows interleaved"),
    _p("IQ2_K_R4",     338, "IQ2_K_R4", "ik",       "IQ2_K, 4 rows interleaved"),
    _p("IQ3_K_R4",     339, "IQ3_K_R4", "ik",       "IQ3_K, 4 rows interleaved"),
    _p("IQ4_K_R4",     340, "IQ4_K_R4", "ik",       "IQ4_K, 4 rows interleaved"),
    _p("IQ5_K_R4",     341, "IQ5_K_R4", "ik",       "IQ5_K, 4 rows interleaved"),
    _p("IQ4_KS_R4",    345, "IQ4_KS_R4", "ik",      "IQ4_KS, 4 rows interleaved"),
    _p("IQ5_KS_R4",    350, "IQ5_KS_R4", "ik",      "IQ5_KS, 4 rows interleaved"),
    _p("BF16_R16",     232, "BF16_R16", "ik",       "BF16, 16 rows interleaved"),
)
# fmt: on

#: Names that both projects treat as another preset; they hide the tensor types of that name: Q4_K is Q4_K_M.
PRESET_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

#: general.file_type of types that do not name a preset.
_FTYPE_OF_TYPE = {"NVFP4": 39, "IQ2_S_R4": 229, "Q4_0_4X4": 33, "Q4_0_4X8": 34, "Q4_0_8X8": 35}

_BY_PRESET_NAME: dict[str, Preset] = {p.name: p for p in PRESETS}
#: The presets of each project by number; 0 is F32, not COPY.
_BY_NUMBER: dict[str, dict[int, Preset]] = {
    tree: {p.ftype: p for p in PRESETS if p.trees in (tree, "both") and p.name != "COPY"} for tree in ("mainline", "ik")
}
#: Names of type rules -> the program they come from.
RULES = ("mainline", "ik")
_RUNTIMES = {"mainline": "llama.cpp", "ik": "ik_llama.cpp"}


def is_target(t: TensorType) -> bool:
    """Return whether weights may have type ``t``: no integers, F64, activation formats or types absent from files."""
    return t.in_files and t.family not in ("integer", "activation") and t.name != "F64"


def check_target(t: TensorType) -> TensorType:
    """Return a type that weights may have. Raises TypeNotSupported for others."""
    if not is_target(t):
        raise TypeNotSupported(f"{t.name} is not a type for weights; `quantkit types` lists those that are", "QK-E301")
    return t


def preset_by_name(text: str, tree: str | None = None) -> Preset:
    """Return the preset for TYPE: a preset's name, alias or number, or any tensor type's name, in any case.

    Presets take precedence over tensor types (Q4_K is Q4_K_M, as in llama-quantize), and numbers have llama.cpp's
    meaning if they have one. With ``tree`` ("mainline" or "ik", --rules) names and numbers are those of that tree. The
    name of a tensor type that is no preset gives every tensor that type, without type rules. Raises TypeNotSupported
    for unknown names, and for those of the other project.
    """
    key = text.strip().upper()
    preset = _BY_PRESET_NAME.get(PRESET_ALIASES.get(key, key))
    if preset is None and key.isascii() and key.isdecimal():
        trees = (tree or "mainline", *RULES)
        preset = next((_BY_NUMBER[t][int(key)] for t in trees if int(key) in _BY_NUMBER[t]), None)
    if preset is None or (tree == "mainline" and preset.trees == "ik" and preset.name in BY_NAME):
        preset = _plain_type(key if preset is None else preset.name, text)
    if tree is not None and preset.trees not in (tree, "both", "none"):
        runtime, other_runtime = (_RUNTIMES[t] for t in (tree, preset.trees))
        raise TypeNotSupported(
            f"{preset} is a preset of {other_runtime}, and {runtime} has no rules for it; omit --rules {tree}",
            "QK-E301",
        )
    return preset


def rules_of(preset: Preset) -> str:
    """Return the tree whose rules apply to ``preset`` by default: "mainline" or "ik"."""
    return "ik" if preset.trees == "ik" else "mainline"


def _plain_type(key: str, text: str) -> Preset:
    t = BY_NAME.get(TYPE_ALIASES.get(key, key))
    if t is None:
        raise TypeNotSupported(f"unknown preset or tensor type {text!r}{_did_you_mean(key)}", "QK-E301")
    check_target(t)
    ftype = _FTYPE_OF_TYPE.get(t.name, FTYPE_UNKNOWN)
    if t.name in _BY_PRESET_NAME:  # an alias of a type, Q1_0_G128, whose name is a preset
        ftype = _BY_PRESET_NAME[t.name].ftype
    return Preset(t.name, ftype, t, t.trees, f"{t.name} for every tensor", mixes=False)


def _did_you_mean(key: str) -> str:
    import difflib

    names = [*_BY_PRESET_NAME, *PRESET_ALIASES, *(t.name for t in TYPES if is_target(t))]
    close = list(dict.fromkeys(difflib.get_close_matches(key, names, 3)))
    return f"; did you mean {' or '.join(close)}?" if close else "; `quantkit types` lists all types"


# --- fallbacks of rows that are not a multiple of the block
# ----------------------------------------------------------------------

#: llama.cpp's next smaller block (tensor_type_fallback). It has no entry for Q1_0 and NVFP4 and fails on them; quantkit
#: uses the closest types of 32. A fallback that does not fit either becomes F16.
FALLBACK: Mapping[str, str] = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "Q1_0"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "NVFP4": "IQ4_NL",
}
#: Types at which llama-quantize gives up instead of falling back.
FALLBACK_QUANTKIT = frozenset({"Q1_0", "NVFP4"})

#: ik's (change_type_if_necessary), by the type without its _R4 or _R8; those of BitNet and Q1_0, on which ik fails, are
#: quantkit's.
FALLBACK_IK: Mapping[str, str] = {
    **dict.fromkeys(("IQ4_K", "Q4_K", "IQ5_KS"), "Q5_0"),
    **dict.fromkeys(("IQ5_K", "Q5_K"), "Q6_0"),
    **dict.fromkeys(("IQ6_K", "Q6_K", "Q8_K"), "Q8_0"),
    **dict.fromkeys(("IQ1_BN", "IQ2_BN", "Q1_0"), "Q4_0"),
}


def without_interleaving(t: TensorType) -> TensorType:
    """Return the type of single rows that replaces an interleaved type: Q4_K for Q4_K_R4, Q8_0 for Q8_K_R8.

    As in ik (interleaved_properties); for IQ1_M_R4 it is IQ1_M, which has other values.
    """
    return plain_of(t) or BY_NAME["IQ1_M"]


#: ik's presets of interleaved types by the presets that --repack converts to them (repacked_ftype).
_REPACKED = {
    **{
        name: f"{name}_R4"
        for name in ("Q5_0", "Q6_0", "Q2_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_M", "IQ3_XXS", "IQ3_S")
        + ("IQ4_NL", "IQ2_BN", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ4_KS", "IQ5_KS")
    },
    **{f"{name}_{size}": f"{name}_R4" for name in ("Q3_K", "Q4_K", "Q5_K") for size in "SLM"},
    **{name: f"{name}_R8" for name in ("Q4_0", "Q8_0", "IQ4_XS", "Q8_KV")},
    "BF16": "BF16_R16",
}


def repacked_ftype(ftype: int, interleaved: bool) -> int:
    """Return general.file_type after rows were interleaved or de-interleaved; unchanged if it has no counterpart.

    ik uses the same number for all sizes of Q3_K, Q4_K and Q5_K; the inverse gives the medium one.
    """
    numbers = {
        _BY_PRESET_NAME[plain].ftype: _BY_PRESET_NAME[interleaved].ftype
        for plain, interleaved in _REPACKED.items()
        if plain in _BY_PRESET_NAME and interleaved in _BY_PRESET_NAME
    }
    return (numbers if interleaved else {interleaved: plain for plain, interleaved in numbers.items()}).get(
        ftype, ftype
    )


def next_type(t: TensorType, *, ik: bool = False) -> TensorType:
    """Return the fallback for ``t`` in ik_llama.cpp or llama.cpp if rows do not fit; it may not fit either."""
    stem = t.name.rsplit("_R", 1)[0]
    if t.trees == "mainline" or not (ik or t.trees == "ik"):
        name = FALLBACK.get(t.name, "F16")
    elif t.block <= 32:
        name = "F16"
    else:
        name = FALLBACK_IK.get(stem, "IQ4_NL")
    return BY_NAME[name]


def next_dividing(t: TensorType, n: int, *, ik: bool = False) -> TensorType:
    """Return the fallback of ``t`` for rows of ``n`` values: the next type, or F16 if that does not fit either."""
    fallback = next_type(t, ik=ik)
    return fallback if n % fallback.block == 0 else BY_NAME["F16"]
