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
from quantkit.checkpoint.families import (
    bitnet,
    cohere,
    deepseek,
    ernie,
    gemma,
    glm,
    granite,
    hunyuan,
    llama,
    llama4,
    mistral,
    more_experts,
    others,
    phi,
    qwen,
    qwen_next,
    seeing,
)
from quantkit.checkpoint.named import NAMED
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensors import Dropped, Experts, Renamed
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short

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
_QWEN3_MOE = Architecture("qwen3moe", rules=qwen.QWEN_EXPERTS, keys=qwen.EXPERT_WIDTHS)
_QWEN3_VL = Architecture(
    "qwen3vl", stored=qwen.UNWRAPPED, keys=(qwen.set_pooling, qwen.set_deepstack), vocab="sentencepiece or bpe"
)
_QWEN3_VL_MOE = Architecture(
    "qwen3vlmoe", stored=qwen.UNWRAPPED, rules=qwen.VL_EXPERTS, keys=(*qwen.EXPERT_WIDTHS, qwen.set_deepstack)
)
_QWEN3_NEXT = Architecture(
    "qwen3next",
    stored=(qwen_next.LayersAhead(),),
    rules=qwen_next.NEXT_RULES,
    keys=qwen_next.NEXT_KEYS,
    layers=qwen_next.layers_with_ahead,
    look=qwen_next.count_layers_ahead,
    nextn=True,
)
_QWEN35 = replace(
    _QWEN3_NEXT, arch="qwen35", rules=qwen_next.TILED_RULES, keys=(*qwen_next.NEXT_KEYS, qwen_next.set_sections)
)
_QWEN35_MOE = replace(_QWEN35, arch="qwen35moe")
_GEMMA = Architecture(
    "gemma", stored=(gemma.TIED_HEAD,), rules=(gemma.NORMS,), base=gemma.set_gemma_keys, vocab="gemma 1"
)
_GEMMA2 = replace(_GEMMA, arch="gemma2", keys=gemma.GEMMA2_KEYS, vocab="gemma")
_GEMMA3 = Architecture("gemma3", rules=(gemma.TOKENS, gemma.NORMS), keys=(gemma.set_gemma3_keys,), vocab="gemma")
_GEMMA4 = Architecture(
    "gemma4",
    stored=gemma.GEMMA4_STORED,
    rules=gemma.GEMMA4_RULES,
    keys=gemma.GEMMA4_KEYS,
    vocab="gemma 4",
    extra=gemma.gemma4_rope,
)
_GEMMA4_ASSISTANT = replace(_GEMMA4, arch="gemma4-assistant", stored=gemma.ASSISTANT_STORED, keys=gemma.ASSISTANT_KEYS)
_PHI3 = Architecture("phi3", base=phi.set_phi3_keys, vocab="phi", early=(phi.set_rope_attention,), extra=phi.long_rope)
_PHIMOE = replace(_PHI3, arch="phimoe", rules=(phi.PHI_EXPERTS,), keys=phi.PHIMOE_KEYS)
_OLMO = Architecture("olmo", rules=llama.ROPE_PERMUTED, keys=(others.set_olmo_norms,))
_OLMO2 = Architecture("olmo2", keys=(others.set_every_fourth,))
_GRANITE = replace(
    _LLAMA,
    arch="granite",
    stored=(granite.OTHER_PARTS,),
    rules=llama.ROPE_PERMUTED,
    keys=granite.GRANITE_KEYS,
    prepare=granite.without_head_dim,
)
_GRANITE_MOE = replace(_GRANITE, arch="granitemoe", rules=granite.MOE_RULES, keys=granite.MOE_KEYS)
_GRANITE_HYBRID: Architecture = replace(
    _GRANITE_MOE,
    arch="granitehybrid",
    stored=(granite.DT_BIAS, granite.OTHER_PARTS),
    rules=(*granite.MAMBA_RULES, *granite.MOE_RULES),
    keys=granite.HYBRID_KEYS,
    vocab="mamba",
    prepare=granite.prepare_hybrid,
    instead=lambda config: replace(_GRANITE_HYBRID, arch=granite.hybrid_arch(config)),
)
_EXAONE = Architecture("exaone", keys=(others.set_exaone_rope,), extra=llama.rope_factors)
_EXAONE4 = Architecture("exaone4", keys=others.EXAONE4_KEYS, extra=others.exaone4_rope)
_STABLELM = Architecture("stablelm", rules=(others.HeadNorms(),), base=others.set_stablelm_keys)
_BITNET = Architecture("bitnet", rules=bitnet.BITNET_RULES, keys=(bitnet.set_linear,), vocab="sentencepiece or bpe")

_LATENT = Architecture(
    "deepseek2",
    stored=(Dropped(r"sam_model|qwen2_model"),),
    rules=(*deepseek.LATENT_RULES,),
    base=deepseek.set_latent_base,
    keys=(deepseek.set_latent_keys,),
    vocab="deepseek",
)
_DEEPSEEK_OCR = replace(
    _LATENT,
    arch="deepseek2-ocr",
    rules=(deepseek.LaterLayersDropped(), *_LATENT.rules),
    base=seeing.set_ocr_base,
    keys=(deepseek.set_whole_keys,),
    early=(seeing.OCR_TEMPLATE,),
)
_DEEPSEEK = replace(
    _LATENT,
    rules=_DEEPSEEK_OCR.rules,
    instead=lambda config: _DEEPSEEK_OCR if seeing.reads_text(config) else None,
)
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
_GLM_4_MOE = Architecture(
    "glm4moe", rules=(Experts(),), keys=glm.MOE_KEYS, vocab="glm", layers=deepseek.all_layers, nextn=True
)
_ERNIE = Architecture("ernie4_5", stored=(ernie.RENAMED,), rules=ernie.FUSED, vocab="ernie")
_MINIMAX_M2 = Architecture("minimax-m2", rules=(more_experts.MINIMAX_EXPERTS,), keys=more_experts.MINIMAX_KEYS)

#: Class of transformers -> how it is converted.
ROWS: dict[str, Architecture] = {
    **dict.fromkeys(("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _LLAMA),
    "IQuestCoderForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN2,
    **dict.fromkeys(("KORMoForCausalLM", "DotsOCRForCausalLM", "Qwen2AudioForConditionalGeneration"), _QWEN2),
    "AudioFlamingo3ForConditionalGeneration": _QWEN2,
    "Qwen2Model": replace(_QWEN2, rules=qwen.BARE),
    "Qwen3ForCausalLM": _QWEN3,
    "StepVLForConditionalGeneration": _QWEN3,
    "Qwen3Model": replace(_QWEN3, rules=qwen.BARE),
    "Qwen2MoeForCausalLM": Architecture("qwen2moe", rules=qwen.QWEN_EXPERTS, keys=qwen.EXPERT_WIDTHS),
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL_MOE,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _QWEN35),
    **dict.fromkeys(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), _QWEN35_MOE),
    "MiniCPMV4_6ForConditionalGeneration": replace(
        _QWEN35,
        stored=(Dropped(r"^(mtp|model\.merger\.)"), *_QWEN35.stored),
        look=lambda config, names: qwen_next.count_layers_ahead(config, ()),
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    **dict.fromkeys(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _GEMMA3),
    **dict.fromkeys(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), _GEMMA4),
    "Gemma3TextModel": replace(_GEMMA3, arch="gemma-embedding", keys=(*_GEMMA3.keys, qwen.set_pooling)),
    "Gemma4UnifiedForConditionalGeneration": replace(_GEMMA4, keys=gemma.UNIFIED_KEYS),
    **dict.fromkeys(("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), _GEMMA4_ASSISTANT),
    "PhiForCausalLM": Architecture("phi2", base=phi.set_phi2_keys),
    **dict.fromkeys(("Phi3ForCausalLM", "Phi4ForCausalLMV"), _PHI3),
    # transformers saves the second name, which convert_hf_to_gguf.py does not know.
    **dict.fromkeys(("PhiMoEForCausalLM", "PhimoeForCausalLM"), _PHIMOE),
    **dict.fromkeys(("OlmoForCausalLM", "OLMoForCausalLM"), _OLMO),
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _OLMO2),
    "OlmoeForCausalLM": Architecture("olmoe", rules=(Experts(),), keys=(others.set_epsilon,)),
    "GraniteForCausalLM": _GRANITE,
    **dict.fromkeys(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _GRANITE_MOE),
    **dict.fromkeys(("GraniteMoeHybridForCausalLM", "BambaForCausalLM"), _GRANITE_HYBRID),
    "CohereForCausalLM": Architecture("command-r", keys=cohere.COHERE_KEYS, prepare=cohere.use_longest),
    "Cohere2ForCausalLM": Architecture("cohere2", rules=(cohere.NoBias(),), keys=cohere.COHERE2_KEYS),
    "SmolLM3ForCausalLM": replace(_LLAMA, arch="smollm3"),
    "ArceeForCausalLM": replace(_LLAMA, arch="arcee", keys=(*llama.LLAMA_KEYS, qwen.set_pooling)),
    "SeedOssForCausalLM": Architecture("seed_oss"),
    "ExaoneForCausalLM": _EXAONE,
    "Exaone4ForCausalLM": _EXAONE4,
    "GPTBigCodeForCausalLM": Architecture("starcoder", base=others.set_starcoder_keys),
    "Starcoder2ForCausalLM": Architecture("starcoder2"),
    **dict.fromkeys(("StableLmForCausalLM", "StableLMEpochForCausalLM", "LlavaStableLMEpochForCausalLM"), _STABLELM),
    **dict.fromkeys(("BitNetForCausalLM", "BitnetForCausalLM"), _BITNET),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), _DEEPSEEK),
    **dict.fromkeys(("DeepseekOCRForCausalLM", "UnlimitedOCRForCausalLM"), _DEEPSEEK_OCR),
    **dict.fromkeys(("KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration"), _DEEPSEEK),
    **dict.fromkeys(("YoutuForCausalLM", "YoutuVLForConditionalGeneration"), _DEEPSEEK),
    "DeepseekV32ForCausalLM": replace(
        _LATENT,
        arch="deepseek32",
        keys=(*_LATENT.keys, deepseek.PREDICTING_LAYERS, *deepseek.INDEXER),
        vocab="deepseek 3.2",
        layers=deepseek.all_layers,
        nextn=True,
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
        nextn=True,
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _LATENT,
        rules=(deepseek.LaterLayersDropped(unless_named=True), *_LATENT.rules),
        keys=(*_LATENT.keys, glm.set_predicting_layers),
        vocab="glm",
        layers=deepseek.all_layers,
        nextn=True,
    ),
    **dict.fromkeys(("Glm4ForCausalLM", "Glm4vForConditionalGeneration"), _GLM_4),
    "GlmOcrForConditionalGeneration": replace(
        _GLM_4, keys=(*_GLM_4.keys, deepseek.PREDICTING_LAYERS), layers=deepseek.all_layers
    ),
    **dict.fromkeys(("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"), _GLM_4_MOE),
    "SolarOpenForCausalLM": replace(_GLM_4_MOE, vocab="solar", nextn=False),
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
    **NAMED,
}


def find_architecture(config: Config) -> Architecture:
    """Return the row of a configuration's class. Raises TypeNotSupported if there is none."""
    row = ROWS.get(config.architecture)
    if row is not None:
        return row.instead(config) or row
    near = get_close_matches(config.architecture, ROWS, 3)
    like = f"; there are {', '.join(near)}" if near else ""
    raise TypeNotSupported(
        f"{config.path}: the class {short(config.architecture)} is not converted by this version{like}: "
        "`quantkit convert --list` shows all that are"
    )
