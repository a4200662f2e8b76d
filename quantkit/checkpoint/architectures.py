"""The architectures that are converted: one row for each class of transformers.

A row says what the model is called in GGUF, by which rules its tensors change on the way (``tensors``), which keys
follow the base ones (``keys``), and what kind of vocabulary it has (``vocab.WRITERS``). Facts of llama.cpp b11434,
conversion/*.py. A class that is like another is a name of the same row; what rows cannot say is a function named in
them (families/).
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.families import deepseek, ernie, glm, hunyuan, llama, llama4, mistral, more_experts, qwen
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensors import Dropped, Experts, Renamed
from quantkit.errors import TypeNotSupported

_LLAMA = Architecture(
    "llama",
    stored=(Renamed(r"text_model\.", ""),),
    rules=(*llama.ROPE_PERMUTED, llama.MIXTRAL_EXPERTS),
    keys=llama.LLAMA_KEYS,
    vocab="llama",
    extra=llama.rope_factors,
)
_QWEN2 = Architecture("qwen2", keys=(qwen.set_pooling,), vocab="sentencepiece or bpe")
_QWEN3 = Architecture("qwen3", keys=(qwen.set_pooling,), vocab="sentencepiece or bpe")

_LATENT = Architecture(
    "deepseek2",
    stored=(Dropped(r"sam_model|qwen2_model"),),
    rules=(*deepseek.LATENT_RULES,),
    base=deepseek.set_latent_base,
    keys=(deepseek.set_latent_keys,),
    vocab="deepseek",
)
_DEEPSEEK = replace(_LATENT, rules=(deepseek.LaterLayersDropped(), *_LATENT.rules))
_MISTRAL_4 = replace(
    _LATENT,
    arch="mistral4",
    rules=(deepseek.TIED_OUTPUT, deepseek.LatentHeads(), Renamed(r"\.(down_proj|gate_up_proj)$", r".\1.weight")),
)
_MISTRAL_3 = replace(
    _LLAMA,
    arch="mistral3",
    keys=(*llama.LLAMA_KEYS, mistral.set_scaling),
    instead=lambda config: _MISTRAL_4 if config.get("model_type") == "mistral4" else None,
)
_GLM_4 = Architecture("glm4", rules=glm.ROPE_HALVES, keys=(glm.PartialRope(),), vocab="glm 4")
_GLM_4_MOE = Architecture("glm4moe", rules=(Experts(),), keys=glm.MOE_KEYS, vocab="glm", layers=deepseek.all_layers)
_ERNIE = Architecture("ernie4_5", stored=(ernie.RENAMED,), rules=ernie.FUSED, vocab="ernie")
_MINIMAX_M2 = Architecture("minimax-m2", rules=(more_experts.MINIMAX_EXPERTS,), keys=more_experts.MINIMAX_KEYS)

#: Class of transformers -> how it is converted.
ROWS: dict[str, Architecture] = {
    **dict.fromkeys(("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _LLAMA),
    "IQuestCoderForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen2MoeForCausalLM": Architecture("qwen2moe", rules=qwen.QWEN_EXPERTS, keys=qwen.EXPERT_WIDTHS),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", rules=qwen.QWEN_EXPERTS, keys=qwen.EXPERT_WIDTHS),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), _DEEPSEEK),
    **dict.fromkeys(("KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration"), _DEEPSEEK),
    **dict.fromkeys(("YoutuForCausalLM", "YoutuVLForConditionalGeneration"), _DEEPSEEK),
    "DeepseekV32ForCausalLM": replace(
        _LATENT,
        arch="deepseek32",
        keys=(*_LATENT.keys, deepseek.PREDICTING_LAYERS, *deepseek.INDEXER),
        vocab="deepseek 3.2",
        layers=deepseek.all_layers,
    ),
    "GlmMoeDsaForCausalLM": replace(
        _LATENT,
        arch="glm-dsa",
        keys=(
            *_LATENT.keys,
            glm.PartialRope(1.0, "qk_rope_head_dim"),
            deepseek.PREDICTING_LAYERS,
            *deepseek.INDEXER,
            glm.set_indexer_types,
        ),
        vocab="glm",
        layers=deepseek.all_layers,
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _LATENT,
        rules=(deepseek.LaterLayersDropped(unless_named=True), *_LATENT.rules),
        keys=(*_LATENT.keys, glm.set_predicting_layers),
        vocab="glm",
        layers=deepseek.all_layers,
    ),
    **dict.fromkeys(("Glm4ForCausalLM", "Glm4vForConditionalGeneration"), _GLM_4),
    "GlmOcrForConditionalGeneration": replace(
        _GLM_4, keys=(*_GLM_4.keys, deepseek.PREDICTING_LAYERS), layers=deepseek.all_layers
    ),
    **dict.fromkeys(("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"), _GLM_4_MOE),
    "SolarOpenForCausalLM": replace(_GLM_4_MOE, vocab="solar"),
    "MiniMaxM2ForCausalLM": _MINIMAX_M2,
    "BailingMoeV2ForCausalLM": Architecture(
        "bailingmoe2",
        stored=(Renamed(r"\.expert_bias$", ".expert_bias.bias"),),
        rules=(Experts(),),
        keys=more_experts.BAILING_KEYS,
        layers=deepseek.all_layers,
    ),
    "Dots1ForCausalLM": Architecture(
        "dots1", rules=qwen.QWEN_EXPERTS, keys=(*qwen.EXPERT_WIDTHS, *more_experts.DOTS_KEYS)
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "hunyuan-moe", rules=(deepseek.TIED_OUTPUT, Experts()), keys=hunyuan.MOE_KEYS, vocab="hunyuan moe"
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan-dense",
        rules=(deepseek.TIED_OUTPUT,),
        base=hunyuan.set_dense_base,
        keys=hunyuan.DENSE_KEYS,
        vocab="hunyuan",
    ),
    **dict.fromkeys(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), _ERNIE),
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE,
        arch="ernie4_5-moe",
        stored=(ernie.PREDICTING, ernie.RENAMED),
        rules=(ernie.EXPERTS,),
        keys=ernie.MOE_KEYS,
    ),
    "GptOssForCausalLM": Architecture(
        "gpt-oss",
        stored=(Renamed(r"(sinks.*)$", r"\1.weight"),),
        rules=more_experts.GPT_OSS_EXPERTS,
        keys=more_experts.GPT_OSS_KEYS,
    ),
    **dict.fromkeys(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        replace(
            _LLAMA,
            arch="llama4",
            rules=llama4.EXPERTS,
            keys=(*llama.LLAMA_KEYS, *llama4.KEYS),
            vocab="bpe",
            prepare=llama4.swap_widths,
        ),
    ),
    **dict.fromkeys(("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"), _MISTRAL_3),
}


def find_architecture(config: Config) -> Architecture:
    """Return the row of a configuration's class. Raises TypeNotSupported if there is none."""
    row = ROWS.get(config.architecture)
    if row is not None:
        return row.instead(config) or row
    near = get_close_matches(config.architecture, ROWS, 3)
    like = f"; there are {', '.join(near)}" if near else ""
    raise TypeNotSupported(
        f"{config.path}: {config.architecture} is not converted by this version{like}: `quantkit convert --list` shows "
        "all that are"
    )
