"""ik_llama.cpp's type rules: rules and order of 8337e4cd3, src/llama-quantize.cpp llama_tensor_get_type.

A tensor belongs to the first branch whose text its name contains. The texts are broad, which affects the bytes:
"attn_k" is also in attn_kv_b, "attn_q" in attn_qkv (so ik's rules for attn_qkv itself are never reached, and are
omitted), "ffn_gate" in ffn_gate_up_exps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from quantkit.pipeline.facts import TensorLike
from quantkit.pipeline.type_rules import (
    GQA,
    GQA_2,
    GQA_E,
    TIED_OUTPUT,
    Reason,
    Rows,
    Table,
    TypeRules,
    always,
    for_presets,
    holds,
)
from quantkit.types import TensorType


class Branch(NamedTuple):
    """A category: the tensors with one of ``texts`` in their name, where ``condition`` holds."""

    category: str
    texts: tuple[str, ...]
    condition: str = "always"


_ATTN_V, _ATTN_OUTPUT = Branch("attn_v", ("attn_v.weight",)), Branch("attn_output", ("attn_output.weight",))
_FFN_DOWN = Branch("ffn_down", ("ffn_down",))
_MOE_K, _MOE_Q = (Branch(f"attn_{x}", (f"attn_{x}",), "8+ experts") for x in "kq")
_QKV = Branch("attn_qkv", ("attn_qkv.weight",))
#: The branches of most presets.
GENERIC = (
    _ATTN_V, Branch("attn_k", ("attn_k",)), Branch("attn_q", ("attn_q",)), _FFN_DOWN, _ATTN_OUTPUT,
    Branch("ffn_gate", ("ffn_gate",)), Branch("ffn_up", ("ffn_up",)),
)  # fmt: skip
_FIRST_FFN = Branch("ffn of layer 0", ("blk.0.ffn_down", "blk.0.ffn_gate", "blk.0.ffn_up"), "8+ experts")
_SHARED = Branch("shared experts", ("_shexp.weight",))
#: Presets of one and two bits.
LOW_BIT = (_ATTN_V, _MOE_K, _MOE_Q, _QKV, _FFN_DOWN, _ATTN_OUTPUT)
LOW_BIT_SHARED = (_ATTN_V, _MOE_K, _FIRST_FFN, _MOE_Q, _QKV, _SHARED, _FFN_DOWN, _ATTN_OUTPUT)

_TINY = "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_KS IQ2_XXS_R4 IQ2_XS_R4"
_SMALL = "IQ2_S IQ2_M IQ2_M_R4"
_ONE_R4 = "IQ1_S_R4 IQ1_M_R4"

#: The branches of the presets that do not have GENERIC ones.
BRANCHES: Mapping[str, tuple[Branch, ...]] = {
    **dict.fromkeys(f"{_TINY} {_SMALL}".split(), LOW_BIT),
    **dict.fromkeys(f"{_ONE_R4} IQ2_KT".split(), LOW_BIT_SHARED),
}
#: Presets that count ffn_down tensors, even if with experts that differs from the number of layers.
COUNTED_DOWN = frozenset(f"{_TINY} {_SMALL}".split())
#: The class options that ik applies in the presets of BRANCHES.
RESPECTED_OPTION = {LOW_BIT: "attn_output", LOW_BIT_SHARED: "ffn_down"}

#: output.weight, or the embedding that serves as both: Q6_K unless a row here applies or the base is in OUTPUT_KEPT.
OUTPUT: Table = {
    **for_presets(
        "IQ1_S IQ1_S_R4 IQ1_M IQ1_M_R4 IQ1_KT IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ2_M_R4 IQ2_K IQ2_K_R4 IQ2_KS IQ2_KL IQ2_KT "
        "IQ3_XXS IQ3_XXS_R4 IQ3_K IQ3_K_R4 IQ3_KS IQ3_KT",
        (("tied", "IQ4_K"), ("always", "Q5_K")),
    ),
    **for_presets("IQ2_XXS_R4 IQ2_XS_R4", (("tied", "IQ4_K_R4"), ("always", "Q5_K_R4"))),
    **for_presets("IQ3_S IQ3_S_R4 IQ3_M IQ3_KL IQ4_XS IQ4_KS IQ4_KS_R4 IQ4_KSS", (("tied", "IQ5_K"),)),
}
OUTPUT_AS_BASE = frozenset({"Q8_0", "Q8_0_R8", "IQ6_K", "Q6_K_R4", "Q8_K_R8", "Q8_KV", "Q8_KV_R8"})

#: token_embd.weight where there is an output.weight, and per_layer_token_embd.weight.
TOKEN_EMBD: Table = {
    **for_presets("IQ1_S IQ1_S_R4 IQ1_M IQ1_M_R4 IQ2_XXS IQ2_XXS_R4 IQ2_XS IQ2_XS_R4", always("Q2_K")),
    **for_presets("IQ2_S IQ2_M IQ2_M_R4 IQ3_XXS IQ3_KT", always("IQ3_S")),
    "IQ3_XXS_R4": always("IQ3_K"),
    **for_presets("IQ1_BN IQ2_BN IQ2_BN_R4", always("IQ4_NL")),
}

ATTN_V: Table = {
    **for_presets(_TINY, ((GQA_E, "IQ4_K"), ("2+ heads per KV head or 2+ experts", "IQ3_K"), ("always", "Q2_K"))),
    **for_presets(_SMALL, ((GQA_E, "IQ4_K"), ("2+ heads per KV head or 2+ experts", "IQ3_K"), ("always", "IQ3_S"))),
    **for_presets(_ONE_R4, ((GQA_E, "IQ4_K_R4"), (GQA_2, "IQ3_K_R4"), ("always", "Q2_K_R4"))),
    "IQ2_KT": ((GQA_E, "IQ4_K"), (GQA_2, "IQ3_K"), ("always", "Q2_K")),
    "Q2_K": ((GQA, "Q4_K"), ("always", "Q3_K")),
    "Q2_K_S": ((GQA, "Q4_K"),),
    "Q2_K_R4": ((GQA, "Q4_K_R4"),),
    "IQ2_K": ((GQA_2, "IQ4_K"), ("always", "IQ3_K")),
    "IQ2_K_R4": ((GQA_2, "IQ4_K_R4"), ("always", "IQ3_K_R4")),
    "IQ2_KL": ((GQA_2, "IQ4_KS"),),
    "IQ3_XXS": ((GQA, "Q4_K"), (GQA_2, "IQ3_K"), ("no imatrix", "IQ3_S")),
    "IQ3_XXS_R4": ((GQA, "Q4_K_R4"), (GQA_2, "IQ3_K_R4"), ("no imatrix", "IQ3_K_R4")),
    "IQ3_KT": ((GQA, "IQ4_K"), ("always", "IQ3_K")),
    **for_presets("IQ3_XS IQ3_S IQ3_K", ((GQA_2, "IQ4_K"),)),
    **for_presets("IQ3_S_R4 IQ3_K_R4", ((GQA_2, "IQ4_K_R4"),)),
    "IQ3_KS": ((GQA_2, "IQ4_KS"),),
    **for_presets("IQ3_M IQ3_KL", ((GQA_2, "IQ5_K"), ("always", "IQ4_K"))),
    "Q3_K_M": (("first 2", "Q5_K"), ("always", "Q4_K")),
    "Q3_K_L": always("Q5_K"),
    "IQ4_KT": ((GQA, "IQ5_K"), ("always", "IQ4_K")),
    **for_presets("IQ4_NL IQ4_NL_R4 IQ4_XS IQ4_XS_R8 IQ4_KS IQ4_KSS IQ4_K IQ4_K_R4", ((GQA_2, "IQ5_K"),)),
    "IQ4_KS_R4": ((GQA_2, "IQ5_K_R4"),),
    **for_presets("Q4_K_M Q5_K_M", (("favoured layer", "Q6_K"),)),
    **for_presets("Q4_K_S Q4_K_R4", (("first 4", "Q5_K"),)),
    "Q5_K_S": (("8B or 70B and 128k tokens", "Q6_K"), ("always", "Q5_K")),
    "IQ5_K": (("8B or 70B and 128k tokens", "IQ6_K"), ("always", "IQ5_K")),
    "IQ5_KS": (("8B or 70B and 128k tokens", "IQ6_K"), ("always", "IQ5_KS")),
}
#: attn_v by base type: of a 70B model; and with 4 heads per KV head, where no row of ATTN_V applies.
ATTN_V_70B: Mapping[str, str] = {"Q3_K": "Q5_K", "Q4_K": "Q5_K", "IQ3_K": "IQ5_K"}
ATTN_V_STEP: Mapping[str, str] = {
    **dict.fromkeys(("Q2_K", "IQ3_XXS"), "IQ3_S"),
    **dict.fromkeys(("Q2_K_R4", "IQ3_XXS_R4"), "IQ3_K_R4"),
    **dict.fromkeys(("Q3_K", "IQ3_S"), "Q4_K"),
    **dict.fromkeys(("Q3_K_R4", "IQ3_S_R4"), "Q4_K_R4"),
    **dict.fromkeys(("IQ2_KL", "IQ3_KS"), "IQ4_KS"),
    "IQ3_K": "IQ4_K",
    **dict.fromkeys(("Q4_K", "IQ4_XS", "IQ4_XS_R8", "IQ4_NL", "IQ4_NL_R4"), "Q5_K"),
    **dict.fromkeys(("IQ4_K", "IQ4_KS"), "IQ5_K"),
    "Q5_K": "Q6_K",
    **dict.fromkeys(("IQ5_K", "IQ5_KS"), "IQ6_K"),
}

#: In presets of GENERIC branches, attn_v and attn_k are Q8_0 with 4 experts or more, regardless of the preset.
EXPERTS_Q8_0 = ("attn_v", "attn_k")

_Q5_K_WITH_EXPERTS = (
    "Q2_K Q2_K_R4 IQ2_K IQ2_K_R4 Q3_K_S Q3_K_M Q3_K_R4 IQ3_XXS IQ3_XXS_R4 IQ3_XS IQ3_S IQ3_S_R4 IQ3_M IQ3_K IQ3_K_R4 "
    "IQ3_KS IQ3_KL IQ3_KT Q4_K_S Q4_K_M Q4_K_R4 IQ4_NL IQ4_NL_R4 IQ4_XS IQ4_XS_R8 IQ4_K IQ4_K_R4 IQ4_KS IQ4_KS_R4 "
    "IQ4_KSS IQ5_KS IQ5_KS_R4"
)
_WITH_EXPERTS = ("4+ experts", "Q5_K")
_FEW_EXPERTS = "under 4 experts"
_FIRST_8TH = "first 8th, no imatrix"

#: The other categories.
TABLES: Mapping[str, Table] = {
    "attn_v": ATTN_V,
    "attn_k": {
        **for_presets(f"{_TINY} {_SMALL} IQ2_KT", always("Q4_K")),
        **for_presets(_ONE_R4, always("Q4_K_R4")),
        "IQ3_XS": always("IQ3_XXS"),
        **for_presets("IQ3_XXS IQ3_XXS_R4", always("IQ2_S")),
    },
    "attn_q": {
        **for_presets(f"{_TINY} {_SMALL} IQ2_KT", always("Q4_K")),
        **for_presets(_ONE_R4, always("Q4_K_R4")),
        "IQ3_XS": always("IQ3_XXS"),
        **for_presets("IQ3_XXS IQ3_XXS_R4", always("IQ2_S")),
        "Q5_K_S": (("8B or 70B and 128k tokens", "Q4_K"),),
        "IQ5_K": (("8B or 70B and 128k tokens", "IQ4_K"),),
        "IQ5_KS": (("8B or 70B and 128k tokens", "IQ4_KS"),),
    },
    "attn_qkv": {
        **for_presets(_TINY, always("IQ2_K")),
        **for_presets(_SMALL, always("IQ3_XXS")),
        **for_presets(_ONE_R4, always("IQ2_K_R4")),
        "IQ2_KT": always("IQ3_K"),
    },
    "ffn of layer 0": {**for_presets(_ONE_R4, always("IQ3_K_R4")), "IQ2_KT": always("IQ3_K")},
    "shared experts": {**for_presets(_ONE_R4, always("IQ4_K_R4")), "IQ2_KT": always("IQ4_K")},
    "ffn_down": {
        **for_presets(_TINY, (("first 8th", "Q2_K"),)),
        **for_presets(_SMALL, (("first 8th", "IQ3_S"),)),
        **for_presets(_ONE_R4, (("first 8th", "Q2_K_R4"),)),
        "IQ2_KT": (("first 8th", "IQ3_K"),),
        "Q2_K": always("Q3_K"),
        "Q2_K_S": (("first 8th", "Q4_K"),),
        "Q2_K_R4": (("first 8th", "Q4_K_R4"),),
        "IQ3_XXS": ((_FIRST_8TH, "Q4_K"), ("no imatrix", "Q3_K")),
        "IQ3_XXS_R4": ((_FIRST_8TH, "Q4_K_R4"), ("no imatrix", "IQ3_K_R4")),
        "IQ3_KT": ((_FIRST_8TH, "IQ4_K"), ("no imatrix", "IQ3_K")),
        "IQ3_M": (("first 8th", "IQ4_K"), ("4+ experts, favoured layer", "IQ4_K")),
        "IQ3_KL": (("favoured layer", "IQ4_KS"),),
        "Q3_K_M": (("first 16th", "Q5_K"), ("always", "Q4_K")),
        "Q3_K_L": always("Q5_K"),
        **for_presets("IQ4_NL IQ4_NL_R4 IQ4_XS IQ4_XS_R8 IQ4_KS IQ4_KSS", ((_FIRST_8TH, "Q5_K"),)),
        "IQ4_KS_R4": ((_FIRST_8TH, "Q5_K_R4"),),
        **for_presets("Q4_K_S Q4_K_R4", (("first 8th", "Q5_K"),)),
        **for_presets("Q4_K_M Q5_K_M", (("favoured layer", "Q6_K"),)),
        "Q4_0": (("first 8th, imatrix", "Q4_1"),),
        "Q5_0": (("first 8th, imatrix", "Q5_1"),),
        "Q4_0_R8": (("first 8th, imatrix", "IQ4_NL_R4"),),
    },
    "attn_output": {
        **for_presets(f"{_TINY} {_SMALL} IQ2_KT {_Q5_K_WITH_EXPERTS}", (_WITH_EXPERTS,)),
        **for_presets("IQ1_S IQ1_M", (_WITH_EXPERTS, ("always", "IQ2_K"))),
        **for_presets(_SMALL, (_WITH_EXPERTS, ("always", "IQ3_S"))),
        **for_presets(_ONE_R4, (("4+ experts", "Q5_K_R4"), ("always", "IQ2_K_R4"))),
        "IQ2_KT": (_WITH_EXPERTS, ("always", "IQ3_K")),
        "Q2_K": (_WITH_EXPERTS, ("always", "Q3_K")),
        "IQ2_K": (_WITH_EXPERTS, ("always", "IQ3_K")),
        **for_presets("IQ2_K_R4 IQ3_XXS_R4", (_WITH_EXPERTS, ("always", "IQ3_K_R4"))),
        "IQ2_KL": (("4+ experts", "IQ4_KS"),),
        "IQ3_XXS": (_WITH_EXPERTS, ("always", "IQ3_S")),
        "IQ3_KT": (_WITH_EXPERTS, (GQA, "IQ3_K")),
        "IQ3_M": (_WITH_EXPERTS, ("always", "IQ4_K")),
        "IQ3_KL": (_WITH_EXPERTS, ("always", "IQ4_KS")),
        "Q3_K_M": (_WITH_EXPERTS, ("always", "Q4_K")),
        "Q3_K_L": ((_FEW_EXPERTS, "Q5_K"),),
    },
    **dict.fromkeys(
        ("ffn_gate", "ffn_up"),
        {"IQ3_XS": (("middle 6 8ths", "IQ3_XXS"),), "IQ3_KL": (("favoured layer", "IQ4_KS"),)},
    ),
}
#: Exceptions for falcon; its attn_output has no other rows in presets of GENERIC branches.
FALCON: Mapping[str, Table] = {
    "ffn_down": {
        "Q3_K_M": (("first 16th", "Q5_K"), ("favoured layer", "Q4_K")),
        "Q3_K_L": always("Q4_K"),
        "Q4_K_M": (("first 16th", "Q6_K"), ("favoured layer", "Q5_K")),
        **for_presets("Q4_K_S Q4_K_R4", ()),
    },
    "attn_output": {"Q3_K_L": always("Q4_K")},
}


def class_of(name: str) -> str | None:
    """Return the class option that ik applies to the tensor ``name`` ("attn_k" for --attn-k-type), or None."""
    return next((b.category for b in GENERIC if any(text in name for text in b.texts)), None)


def respects_option(preset: str, option: str) -> bool:
    """True if ik applies the class ``option`` ("attn_k") in ``preset``: low-bit presets ignore most."""
    return option != "attn_qkv" and (preset not in BRANCHES or RESPECTED_OPTION[BRANCHES[preset]] == option)


class IkTypeRules(TypeRules):
    """ik's tables, applied to every tensor that is not kept, including those decided by options or rules."""

    __slots__ = ()

    def choose(self, t: TensorLike) -> tuple[TensorType, Reason]:
        if t.name == ("output.weight" if self.facts.has_output else "token_embd.weight"):
            return self._output(t)
        if t.name in ("token_embd.weight", "per_layer_token_embd.weight"):
            return self.from_rows(TOKEN_EMBD.get(self.preset.name, ()), "embeddings", self.place(""))
        branches = BRANCHES.get(self.preset.name, GENERIC)
        place = self.place("")
        for branch in branches:
            if any(text in t.name for text in branch.texts) and holds(branch.condition, place):
                return self._layer(t, branch.category, generic=branches is GENERIC)
        return self.keep_base()

    def _output(self, t: TensorLike) -> tuple[TensorType, Reason]:
        subject = self.output_name()
        if self.output_type is not None:
            return self.output_type, TIED_OUTPUT
        if self.facts.arch == "falcon" or t.shape[0] % 256:
            return self.give("Q8_0", subject)
        default_rows = always(self.base.name) if self.base.name in OUTPUT_AS_BASE else always("Q6_K")
        rows = (*OUTPUT.get(self.preset.name, ()), *default_rows)
        target, _ = self.from_rows(rows, subject, self.place(""))
        return self.keep_base() if target == self.base else self.give(target.name, subject)

    def _layer(self, t: TensorLike, category: str, *, generic: bool) -> tuple[TensorType, Reason]:
        by_count = category == "attn_v" or self.preset.name in COUNTED_DOWN
        place = self.place(category, None if by_count else t.name)
        self.count(category)
        if generic and category in EXPERTS_Q8_0 and holds("4+ experts", place):
            return self.give("Q8_0", f"{category}, 4+ experts")
        if generic and category == "attn_v" and self.facts.is_70b:
            type_name = ATTN_V_70B.get(self.base.name)
            return self.give(type_name, "attn_v of a 70B model") if type_name else self.keep_base()
        rows = self._rows(category, generic=generic)
        if generic and category == "attn_v" and (step := self._step()):
            rows = (*rows, (GQA, step))
        return self.from_rows(rows, category, place)

    def _rows(self, category: str, *, generic: bool) -> Rows:
        table, preset = TABLES[category], self.preset.name
        if generic and self.facts.arch == "falcon" and category in FALCON:
            falcon = FALCON[category]
            return falcon.get(preset, table.get(preset, ()) if category == "ffn_down" else ())
        return table.get(preset, ())

    def _step(self) -> str | None:
        if self.facts.arch == "dflash-draft" and self.preset.name in ("Q4_K_M", "Q5_K_M"):
            return None
        return ATTN_V_STEP.get(self.base.name)
