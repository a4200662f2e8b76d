"""More rows of the table of architectures: older decoders.

Facts of llama.cpp b11434, conversion/*.py; see architectures.py, which has the others.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.families import early, older, plamo, rwkv
from quantkit.checkpoint.families.llama import LLAMA_KEYS, ROPE_PERMUTED
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensors import Dropped, Renamed

_BLOOM = Architecture("bloom", rules=(Renamed(r"transformer\.", ""), *early.BY_HEAD), base=early.set_bloom_base)
_FALCON = Architecture("falcon", rules=early.BY_KEY, base=early.set_falcon_base)
_BAICHUAN = Architecture(
    "baichuan", rules=(older.PACKED, *older.XVERSE_RULES), keys=older.XVERSE_KEYS, vocab="sentencepiece"
)
_MPT = Architecture("mpt", base=older.set_mpt_base, vocab="mpt")
_PLAMO_2 = Architecture("plamo2", rules=plamo.PLAMO2_RULES, base=plamo.set_plamo2_base, vocab="plamo")
_PLAMO_3 = Architecture(
    "plamo3", rules=plamo.PLAMO3_RULES, keys=plamo.PLAMO3_KEYS, vocab="plamo 3", prepare=plamo.scale_rope
)
_RWKV_7 = Architecture("rwkv7", stored=rwkv.STORED_7, rules=(rwkv.Mixing7(),), base=rwkv.set_7_base, vocab="rwkv")

#: Class of transformers -> how it is converted.
OLDER: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        stored=(Dropped(r"\.attn\.(masked_)?bias$"),),
        rules=early.GPT2_RULES,
        base=early.set_gpt2_base,
    ),
    "GPTNeoXForCausalLM": Architecture("gptneox", rules=early.BY_HEAD, base=early.set_neox_base),
    **dict.fromkeys(("BloomForCausalLM", "BloomModel"), _BLOOM),
    **dict.fromkeys(("FalconForCausalLM", "RWForCausalLM"), _FALCON),
    "OrionForCausalLM": Architecture("orion", base=early.set_orion_base, vocab="sentencepiece"),
    "CodeShellForCausalLM": Architecture("codeshell", base=early.set_codeshell_base),
    "MiniCPMForCausalLM": Architecture(
        "minicpm",
        rules=ROPE_PERMUTED,
        keys=(early.set_minicpm_scales,),
        vocab="sentencepiece",
        extra=early.rope_factors,
    ),
    "MiniCPM3ForCausalLM": Architecture(
        "minicpm3", base=early.set_minicpm3_base, vocab="sentencepiece", extra=early.rope_factors
    ),
    "InternLM3ForCausalLM": Architecture("llama", rules=ROPE_PERMUTED, keys=LLAMA_KEYS, vocab="internlm 3"),
    "InternLM2ForCausalLM": Architecture("internlm2", rules=(older.GroupedHeads(),), vocab="internlm 2"),
    # convert_hf_to_gguf.py calls itself until it stops, where it means to name a tensor.
    **dict.fromkeys(("BaichuanForCausalLM", "BaiChuanForCausalLM"), _BAICHUAN),
    "XverseForCausalLM": Architecture("xverse", rules=older.XVERSE_RULES, keys=older.XVERSE_KEYS, vocab="xverse"),
    "QWenLMHeadModel": Architecture("qwen", vocab="qwen"),
    # transformers saves the second name, which convert_hf_to_gguf.py does not know.
    **dict.fromkeys(("MPTForCausalLM", "MptForCausalLM"), _MPT),
    "JAISLMHeadModel": Architecture(
        "jais",
        stored=older.JAIS_STORED,
        rules=older.JAIS_RULES,
        base=older.set_jais_base,
        early=(older.set_alibi,),
    ),
    "GPTRefactForCausalLM": Architecture(
        "refact", rules=older.REFACT_RULES, base=older.set_refact_base, vocab="refact"
    ),
    "RuGPT3XLForCausalLM": Architecture("gpt2", rules=(older.Fused(),)),
    "OpenELMForCausalLM": Architecture(
        "openelm",
        rules=older.ELM_RULES,
        base=older.set_elm_base,
        vocab="sentencepiece",
        prepare=older.name_layers,
    ),
    "PlamoForCausalLM": Architecture(
        "plamo", rules=plamo.PLAMO_RULES, base=plamo.set_plamo_base, vocab="sentencepiece"
    ),
    **dict.fromkeys(("Plamo2ForCausalLM", "PLaMo2ForCausalLM"), _PLAMO_2),
    **dict.fromkeys(("Plamo3ForCausalLM", "PLaMo3ForCausalLM"), _PLAMO_3),
    "Rwkv6ForCausalLM": Architecture("rwkv6", rules=(rwkv.Mixing6(),), base=rwkv.set_6_base, vocab="rwkv"),
    "RWKV6Qwen2ForCausalLM": Architecture(
        "rwkv6qwen2",
        rules=(rwkv.Mixing6(reordered=True),),
        base=rwkv.set_6_qwen_base,
        vocab="sentencepiece or bpe",
    ),
    **dict.fromkeys(("Rwkv7ForCausalLM", "RWKV7ForCausalLM"), _RWKV_7),
    "RwkvHybridForCausalLM": replace(_RWKV_7, arch="arwkv7", base=rwkv.set_7_hybrid_base, vocab="sentencepiece or bpe"),
}
