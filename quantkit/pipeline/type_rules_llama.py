"""llama.cpp's type rules: rules and order of b11434, src/llama-quant.cpp llama_tensor_get_type_impl."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.pipeline.facts import ATTN_V_LIKE, TensorLike, category
from quantkit.pipeline.type_rules import GQA, GQA_E, TIED_OUTPUT, Reason, Table, TypeRules, always, for_presets
from quantkit.types import TensorType

#: The presets whose layers follow LOW_BIT instead of the tables after it.
LOW_BIT_PRESETS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")

#: output.weight, or the embedding that serves as both: Q6_K unless listed here or kept at Q8_0.
OUTPUT_Q5_K = frozenset({*LOW_BIT_PRESETS, "IQ3_XXS"})

#: token_embd.weight and per_layer_token_embd.weight where there is an output.weight.
TOKEN_EMBD: Mapping[str, str] = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), "Q2_K"),
    **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "IQ3_S"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "Q4_K"),
}

#: The presets of one and two bits.
LOW_BIT: Mapping[str, Table] = {
    "attn_v": {
        **for_presets("IQ1_S IQ1_M IQ2_XXS IQ2_XS", ((GQA_E, "Q4_K"), ("always", "Q2_K"))),
        **for_presets("IQ2_S IQ2_M", ((GQA_E, "Q4_K"), ("always", "IQ3_S"))),
    },
    "attn_k": dict.fromkeys(LOW_BIT_PRESETS, (("8 experts", "Q4_K"),)),
    "ffn_down": {
        **for_presets("IQ1_S IQ1_M IQ2_XXS IQ2_XS", (("first 8th", "Q2_K"),)),
        **for_presets("IQ2_S IQ2_M", (("first 8th", "IQ3_S"),)),
    },
    "attn_output": {
        **for_presets("IQ1_S IQ1_M", (("8 experts", "Q5_K"), ("always", "IQ2_XXS"))),
        **for_presets("IQ2_XXS IQ2_XS", (("8 experts", "Q5_K"),)),
        **for_presets("IQ2_S IQ2_M", (("8 experts", "Q5_K"), ("always", "IQ3_S"))),
    },
}

#: attn_v, attn_qkv and attn_kv_b: small under GQA, and sensitive.
ATTN_V: Table = {
    "Q2_K": ((GQA, "Q4_K"), ("always", "Q3_K")),
    "Q2_K_S": ((GQA, "Q4_K"),),
    "IQ3_XXS": ((GQA, "Q4_K"), ("no imatrix", "IQ3_S")),
    "IQ3_XS": ((GQA, "Q4_K"),),
    "IQ3_S": ((GQA, "Q4_K"),),
    "IQ3_M": always("Q4_K"),
    "Q3_K_M": (("first 2", "Q5_K"), ("always", "Q4_K")),
    "Q3_K_L": always("Q5_K"),
    "IQ4_NL": ((GQA, "Q5_K"),),
    "IQ4_XS": ((GQA, "Q5_K"),),
    "Q4_K_S": (("first 4", "Q5_K"),),
    "Q4_K_M": (("favoured layer", "Q6_K"),),
    "Q5_K_M": (("favoured layer", "Q6_K"),),
}
#: In 70B models attn_v is an eighth of attn_q: these larger types cost almost nothing.
ATTN_V_70B: Mapping[str, str] = {"Q3_K": "Q5_K", "Q4_K": "Q5_K"}

#: attn_k and attn_q; in models of 8 experts attn_k and attn_v are Q8_0.
ATTN_K_Q: Table = {"IQ3_XS": always("IQ3_XXS"), "IQ3_XXS": always("IQ2_S")}

FFN_DOWN: Table = {
    "Q2_K": always("Q3_K"),
    "Q2_K_S": (("first 8th", "Q4_K"),),
    "IQ3_XXS": (("first 8th, no imatrix", "Q4_K"), ("no imatrix", "Q3_K")),
    "IQ3_M": (("first 8th", "Q4_K"), ("8 experts, favoured layer", "Q4_K")),
    "Q3_K_M": (("first 16th", "Q5_K"), ("always", "Q4_K")),
    "Q3_K_L": always("Q5_K"),
    "IQ4_NL": (("first 8th, no imatrix", "Q5_K"),),
    "IQ4_XS": (("first 8th, no imatrix", "Q5_K"),),
    "Q4_0": (("first 8th, imatrix", "Q4_1"),),
    "Q5_0": (("first 8th, imatrix", "Q5_1"),),
    "Q4_K_S": (("first 8th", "Q5_K"),),
    "Q4_K_M": (("favoured layer", "Q6_K"),),
    "Q5_K_M": (("favoured layer", "Q6_K"),),
}
FFN_DOWN_FALCON: Table = {
    **FFN_DOWN,
    "Q3_K_M": (("first 16th", "Q5_K"), ("favoured layer", "Q4_K")),
    "Q3_K_L": always("Q4_K"),
    "Q4_K_S": (),
    "Q4_K_M": (("first 16th", "Q6_K"), ("favoured layer", "Q5_K"), ("always", "Q4_K")),
}

ATTN_OUTPUT: Table = {
    "Q2_K": (("8 experts", "Q5_K"), ("always", "Q3_K")),
    "IQ3_XXS": (("8 experts", "Q5_K"), ("always", "IQ3_S")),
    "Q3_K_M": (("8 experts", "Q5_K"), ("always", "Q4_K")),
    "IQ3_M": (("8 experts", "Q5_K"), ("always", "Q4_K")),
    "Q3_K_L": (("not 8 experts", "Q5_K"),),
    **for_presets("IQ3_XS Q3_K_S IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ4_XS", (("8 experts", "Q5_K"),)),
}
ATTN_OUTPUT_FALCON: Table = {"Q3_K_L": always("Q4_K")}

#: ffn_gate and ffn_up.
FFN_GATE_UP: Table = {"IQ3_XS": (("middle 6 8ths", "IQ3_XXS"),)}

#: Never below Q8_0 in glm5-next.
_Q8_0_GLM5_NEXT = ("attn_q_a", "attn_q_b", "nextn.eh_proj")


#: Presets that give experts their base type, and Q8_0 to everything else; llama.cpp has the first.
EXPERT_PRESETS = frozenset({"MXFP4_MOE", "NVFP4_MOE"})


class LlamaTypeRules(TypeRules):
    """llama.cpp's tables, applied only to tensors that nothing else decides, because others do not count as layers."""

    __slots__ = ()

    def choose(self, t: TensorLike) -> tuple[TensorType, Reason]:
        preset, cat = self.preset.name, category(t.name)
        if self.facts.arch == "glm5-next" and any(text in t.name for text in _Q8_0_GLM5_NEXT):
            return self.give("Q8_0", "minimum in glm5-next")
        if cat == "output" or (cat == "token_embd" and not self.facts.has_output):
            return self._output(t)
        if preset in EXPERT_PRESETS:
            return self._experts_alone(t, cat)
        if cat == "token_embd":
            type_name = TOKEN_EMBD.get(preset)
            return self.give(type_name, "embeddings") if type_name else self.keep_base()
        if preset in LOW_BIT_PRESETS:
            return self._low_bit(cat)
        return self._layer(t, cat)

    def _output(self, t: TensorLike) -> tuple[TensorType, Reason]:
        preset, subject = self.preset.name, self.output_name()
        if self.output_type is not None:  # only tied embeddings get here with this option
            return self.output_type, TIED_OUTPUT
        if self.facts.arch == "falcon" or preset in EXPERT_PRESETS or t.shape[0] % self.base.block:
            return self.give("Q8_0", subject)
        if preset in OUTPUT_Q5_K:
            return self.give("Q5_K", subject)
        return self.keep_base() if self.base.name == "Q8_0" else self.give("Q6_K", subject)

    def _experts_alone(self, t: TensorLike, cat: str) -> tuple[TensorType, Reason]:
        # MLA projections also have three dimensions, so bailingmoe3's experts are recognized by name.
        is_stacked = len(t.shape) > 2 and t.shape[2] > 1
        if is_stacked and (self.facts.arch != "bailingmoe3" or cat.startswith("ffn_")):
            return self.give(self.base.name, "experts")
        return self.give("Q8_0", "all but experts")

    def _low_bit(self, cat: str) -> tuple[TensorType, Reason]:
        cat = "attn_v" if cat in ATTN_V_LIKE else cat
        place = self.place(cat)
        # ffn_down is counted by tensors here, even if with experts that differs from the number of layers.
        if cat in ("attn_v", "ffn_down"):
            self.count(cat)
        return self.from_rows(LOW_BIT.get(cat, {}).get(self.preset.name, ()), cat, place)

    def _layer(self, t: TensorLike, cat: str) -> tuple[TensorType, Reason]:
        falcon = self.facts.arch == "falcon"
        if cat in ATTN_V_LIKE:
            return self._attn_v()
        if cat == "attn_k" and self.facts.n_expert == 8:
            return self.give("Q8_0", "attn_k, 8 experts")
        if cat in ("attn_k", "attn_q"):
            return self._from_table(ATTN_K_Q, cat)
        if cat == "attn_output":
            return self._from_table(ATTN_OUTPUT_FALCON if falcon else ATTN_OUTPUT, cat)
        if cat == "ffn_down":
            return self._from_table(FFN_DOWN_FALCON if falcon else FFN_DOWN, cat, t.name)
        if cat in ("ffn_gate", "ffn_up"):
            return self._from_table(FFN_GATE_UP, cat, t.name)
        return self.keep_base()

    def _attn_v(self) -> tuple[TensorType, Reason]:
        target, reason = self._from_table(ATTN_V, "attn_v")
        if self.facts.n_expert == 8:
            return self.give("Q8_0", "attn_v, 8 experts")
        if self.facts.is_70b and target.name in ATTN_V_70B:
            return self.give(ATTN_V_70B[target.name], "attn_v of a 70B model")
        return target, reason

    def _from_table(self, table: Table, cat: str, name: str | None = None) -> tuple[TensorType, Reason]:
        place = self.place(cat, name)
        self.count(cat)
        return self.from_rows(table.get(self.preset.name, ()), cat, place)
