"""More rows of the table of architectures: classes that came after those, many of them not run by model/.

Facts of llama.cpp b11434, conversion/*.py; see architectures.py, which has the others.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.encoders import ENCODERS
from quantkit.checkpoint.families import (
    bailing,
    cohere,
    deepseek,
    deepseek4,
    dots3,
    ernie,
    gemma,
    glm,
    granite,
    hunyuan,
    hunyuan4,
    hybrids,
    kimi,
    laguna,
    lfm,
    llama,
    mamba,
    mimo,
    minimax,
    mixtures,
    more_experts,
    others,
    qwen,
    seeing,
    step,
    talkie,
)
from quantkit.checkpoint.families.llama import LLAMA_KEYS, ROPE_PERMUTED, rope_factors, set_rope_width
from quantkit.checkpoint.families.others import exaone4_rope
from quantkit.checkpoint.older import OLDER
from quantkit.checkpoint.row import Always, Architecture, Copied
from quantkit.checkpoint.tensors import Changed, Dropped, Experts, Renamed, plus_one

#: A bias of the router is stored without an ending.
_ROUTER_BIAS = Renamed(r"\.expert_bias$", ".expert_bias.bias")
#: Of the order in which LlamaModel's children have them.
_GATE_FIRST = Experts(weights=("gate_proj", "up_proj", "down_proj"))
_EXPERT_WIDTH = Copied(".expert_feed_forward_length", "moe_intermediate_size")

_EXAONE_MOE = Architecture(
    "exaone-moe",
    rules=(others.LayersBehind(), Experts()),
    keys=(*others.EXAONE4_KEYS, *others.EXAONE_MOE_KEYS),
    layers=deepseek.all_layers,
    extra=exaone4_rope,
)
_GROVE_MOE = Architecture(
    "grovemoe",
    rules=(
        Dropped(r"\.expert_bias$"),
        Experts(
            name="model.layers.{layer}.mlp.chunk_experts.{expert}.{weight}.weight",
            merged="model.layers.{layer}.mlp.chunk_experts.{weight}.weight",
            marked=r"chunk_experts\.\d+\.",
            shared=2,
        ),
        Experts(),
    ),
    keys=(_EXPERT_WIDTH, *qwen.GROVE_KEYS),
)
_STEP = Architecture(
    "step35",
    stored=step.STORED,
    rules=step.RULES,
    keys=step.KEYS,
    layers=deepseek.all_layers,
    prepare=step.split_theta,
    extra=step.rope_factors,
    nextn=True,
)
_MIMO_2 = Architecture(
    "mimo2",
    stored=(*mimo.STORED, mimo.LayersAhead()),
    rules=(_GATE_FIRST,),
    keys=mimo.KEYS,
    layers=mimo.layers_with_ahead,
    look=mimo.refuse_sharded,
    nextn=True,
)
_MINIMAX_M3 = Architecture("minimax-m3", rules=minimax.M3_RULES, keys=minimax.M3_KEYS)
_DOTS_3 = Architecture(
    "dots3note",
    stored=dots3.STORED,
    rules=dots3.RULES,
    base=dots3.set_base,
    keys=dots3.KEYS,
    vocab="dots 3",
    layers=deepseek.all_layers,
    look=dots3.look,
    nextn=True,
)
_KIMI_LINEAR = Architecture(
    "kimi-linear", rules=kimi.LINEAR_RULES, base=kimi.set_single_base, keys=kimi.LINEAR_KEYS, vocab="kimi linear"
)
_BAILING_V3 = Architecture(
    "bailingmoe3",
    stored=bailing.V3_STORED,
    rules=bailing.V3_RULES,
    base=kimi.set_single_base,
    keys=bailing.V3_KEYS,
    layers=deepseek.all_layers,
    nextn=True,
)
_QWEN2_VL = Architecture("qwen2vl", stored=qwen.UNWRAPPED, vocab="sentencepiece or bpe")
_GRANITE_SWA = Architecture(
    "granite_swa",
    stored=(granite.SINKS, granite.OTHER_PARTS),
    rules=ROPE_PERMUTED,
    keys=granite.WINDOW_KEYS,
    vocab="llama",
    prepare=granite.without_head_dim,
    extra=rope_factors,
)
_CHAT_GLM = Architecture("chatglm", stored=(Renamed(r"^transformer\.", ""),), base=glm.set_chat_base, vocab="chatglm")
_LFM_2 = Architecture("lfm2", stored=lfm.STORED, rules=(lfm.CONVOLUTIONS,), base=lfm.set_hybrid_base, keys=lfm.KEYS)
_MAMBA = Architecture("mamba", rules=mamba.MAMBA_RULES, base=mamba.set_mamba_base, vocab="mamba 1")
_NEMOTRON_H_MOE = Architecture(
    "nemotron_h_moe",
    stored=mamba.NEMOTRON_STORED,
    rules=mamba.NEMOTRON_RULES,
    keys=mamba.NEMOTRON_KEYS,
    vocab="nemotron h",
    layers=mamba.layers_with_ahead,
    prepare=mamba.prepare_nemotron,
    nextn=True,
)
_LLAMA = Architecture(
    "llama",
    stored=(Renamed(r"text_model\.", ""),),
    rules=(*ROPE_PERMUTED, llama.MIXTRAL_EXPERTS),
    keys=LLAMA_KEYS,
    vocab="llama",
    extra=rope_factors,
)
_LLADA_MOE = Architecture("llada-moe", rules=(Experts(),), keys=others.LLADA_MOE_KEYS)
_GEMMA_3N = Architecture(
    "gemma3n",
    stored=gemma.GEMMA3N_STORED,
    rules=gemma.GEMMA3N_RULES,
    keys=gemma.GEMMA3N_KEYS,
    vocab="gemma 3n",
)
_MINIMAX_M1 = Architecture("minimax-01", rules=minimax.M1_RULES, keys=minimax.M1_KEYS, vocab="minimax m1")

_GROK = Architecture("grok", rules=mixtures.GROK_RULES, keys=mixtures.GROK_KEYS, vocab="sentencepiece or bpe")
_SARVAM = Architecture(
    "bailingmoe2",
    stored=(mixtures.SARVAM_STORED, _ROUTER_BIAS),
    rules=(Experts(),),
    keys=(*more_experts.BAILING_KEYS, set_rope_width),
    layers=deepseek.all_layers,
)

_CHAMELEON = Architecture(
    "chameleon",
    stored=seeing.CHAMELEON_STORED,
    rules=(*ROPE_PERMUTED, *seeing.CHAMELEON_RULES),
    keys=(seeing.set_swin_norm,),
)
_LFM_2_EMBEDDING = replace(
    _LFM_2,
    rules=(*lfm.BARE, lfm.CONVOLUTIONS),
    keys=lfm.EMBEDDING_KEYS,
    extra=lfm.dense_layer,
    early=(lfm.set_dense_width,),
)

#: Class of transformers -> how it is converted.
NAMED: dict[str, Architecture] = {
    "ArcticForCausalLM": Architecture(
        "arctic", rules=(*ROPE_PERMUTED, llama.MIXTRAL_EXPERTS), keys=LLAMA_KEYS, vocab="arctic"
    ),
    "DbrxForCausalLM": Architecture("dbrx", rules=mixtures.DBRX_RULES, base=mixtures.set_dbrx_base),
    **dict.fromkeys(("GrokForCausalLM", "Grok1ForCausalLM"), _GROK),
    "DeciLMForCausalLM": Architecture(
        "deci",
        rules=mixtures.DECI_RULES,
        base=mixtures.set_deci_base,
        keys=LLAMA_KEYS,
        vocab="deci",
        extra=rope_factors,
    ),
    **dict.fromkeys(("ChameleonForCausalLM", "ChameleonForConditionalGeneration"), _CHAMELEON),
    "JanusForConditionalGeneration": replace(_LLAMA, stored=(seeing.JANUS_PARTS, *_LLAMA.stored)),
    "LlamaBidirectionalModel": replace(_LLAMA, arch="llama-embed"),
    "MuseGlimmerForConditionalGeneration": Architecture(
        "muse-glimmer", rules=(*ROPE_PERMUTED, *seeing.MUSE_RULES), keys=seeing.MUSE_KEYS, vocab="muse"
    ),
    "HunYuanVLForConditionalGeneration": Architecture(
        "hunyuan_vl",
        rules=(deepseek.TIED_OUTPUT,),
        base=hunyuan.set_dense_base,
        keys=seeing.HUNYUAN_KEYS,
        vocab="hunyuan",
        prepare=seeing.name_rope,
    ),
    "LLaDAModelLM": Architecture("llada", rules=ROPE_PERMUTED, keys=others.LLADA_KEYS, vocab="llada"),
    "DreamModel": Architecture("dream", keys=(qwen.set_pooling, *others.DIFFUSION_KEYS), vocab="dream"),
    **dict.fromkeys(("Lfm2Model", "Lfm2BidirectionalModel", "Lfm2BidirectionalForMaskedLM"), _LFM_2_EMBEDDING),
    "DeepseekV4ForCausalLM": Architecture(
        "deepseek4",
        stored=deepseek4.STORED,
        rules=deepseek4.RULES,
        keys=deepseek4.KEYS,
        vocab="deepseek 4",
        early=(deepseek4.TEMPLATE,),
        arrange=deepseek4.arrange,
    ),
    "MapleForCausalLM": Architecture("maple", rules=(Experts(),), keys=mixtures.MAPLE_KEYS),
    **dict.fromkeys(("SarvamMoEForCausalLM", "modeling_sarvam_moe.SarvamMoEForCausalLM"), _SARVAM),
    "NemotronHPuzzleForCausalLM": Architecture(
        "nemotron_h_moe",
        stored=mamba.PUZZLE_STORED,
        rules=mamba.NEMOTRON_RULES,
        keys=mamba.PUZZLE_KEYS,
        vocab="nemotron h",
        prepare=mamba.prepare_puzzle,
    ),
    "DeepseekForCausalLM": Architecture(
        "deepseek", rules=(*ROPE_PERMUTED, Experts()), keys=deepseek.FIRST_KEYS, vocab="sentencepiece or bpe"
    ),
    "BailingMoeForCausalLM": Architecture(
        "bailingmoe",
        rules=(bailing.QUERY_KEY_VALUE, *ROPE_PERMUTED, Experts()),
        keys=(set_rope_width, *bailing.FIRST_KEYS),
        prepare=bailing.refuse_normed_head,
    ),
    "Cohere2MoeForCausalLM": Architecture(
        "cohere2moe", rules=(cohere.NoBias(), Experts()), keys=cohere.COHERE2_MOE_KEYS, layers=deepseek.all_layers
    ),
    **dict.fromkeys(("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"), _EXAONE_MOE),
    **dict.fromkeys(("GroveMoeForCausalLM", "modeling_grove_moe.GroveMoeForCausalLM"), _GROVE_MOE),
    "AfmoeForCausalLM": Architecture(
        "afmoe",
        stored=(_ROUTER_BIAS,),
        rules=(_GATE_FIRST,),
        keys=(
            *LLAMA_KEYS,
            Copied(".expert_shared_count", "num_shared_experts"),
            _EXPERT_WIDTH,
            Copied(".leading_dense_block_count", "num_dense_layers"),
            Copied(".expert_weights_norm", "route_norm", "flag"),
            Copied(".expert_weights_scale", "route_scale", "f32"),
            Copied(".attention.sliding_window", "sliding_window"),
        ),
        vocab="llama",
        extra=rope_factors,
    ),
    "HYV3ForCausalLM": Architecture(
        "hy_v3",
        stored=(Renamed(r"(\.layers\.\d+)\.final_layernorm\.", r"\1.shared_head.norm."),),
        rules=(Experts(),),
        keys=(*hunyuan.V3_KEYS, glm.set_predicting_layers),
        layers=deepseek.all_layers,
        nextn=True,
    ),
    "SmallThinkerForCausalLM": Architecture(
        "smallthinker",
        rules=(
            Experts(
                weights=("down", "gate", "up"),
                name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
                merged="model.layers.{layer}.block_sparse_moe.experts.{weight}.weight",
            ),
        ),
        keys=others.SMALL_THINKER_KEYS,
    ),
    **dict.fromkeys(("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), _STEP),
    **dict.fromkeys(("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"), _MIMO_2),
    **dict.fromkeys(("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"), _MINIMAX_M3),
    "HYV4ForCausalLM": Architecture(
        "hy_v4",
        stored=hunyuan4.STORED,
        rules=hunyuan4.RULES,
        base=hunyuan4.set_base,
        keys=hunyuan4.KEYS,
        vocab="deepseek",
        prepare=hunyuan4.prepare,
    ),
    **dict.fromkeys(("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration", "Dots3NoteTextForCausalLM"), _DOTS_3),
    "LagunaForCausalLM": Architecture("laguna", rules=(_GATE_FIRST,), keys=laguna.KEYS, vocab="laguna"),
    **dict.fromkeys(("KimiLinearForCausalLM", "KimiLinearModel"), _KIMI_LINEAR),
    "BailingMoeV3ForCausalLM": _BAILING_V3,
    "BailingMoeV3VLForConditionalGeneration": replace(
        _BAILING_V3,
        stored=(Dropped(r"^linear_proj"), *bailing.V3_STORED),
        keys=(*bailing.V3_KEYS, bailing.set_sections),
    ),
    **dict.fromkeys(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), _QWEN2_VL),
    **dict.fromkeys(("Qwen2VLModel", "Qwen2_5OmniModel"), _QWEN2_VL),
    "Qwen3OmniMoeForConditionalGeneration": Architecture(
        "qwen3vlmoe",
        stored=qwen.UNWRAPPED,
        rules=qwen.VL_EXPERTS,
        keys=(*qwen.EXPERT_WIDTHS, Always(".n_deepstack_layers", 0)),
        vocab="omni",
    ),
    "GraniteSWAForCausalLM": _GRANITE_SWA,
    "GraniteMoeSWAForCausalLM": replace(
        _GRANITE_SWA,
        rules=(*granite.WINDOW_EXPERTS, *ROPE_PERMUTED),
        keys=(
            *granite.WINDOW_KEYS,
            Copied(".expert_shared_feed_forward_length", "shared_intermediate_size", unless_zero=True),
        ),
    ),
    "MellumForCausalLM": Architecture("mellum", rules=(Experts(),), keys=(_EXPERT_WIDTH, others.set_mellum_window)),
    "MaincoderForCausalLM": Architecture("maincoder", keys=(Copied(".rope.dimension_count", "head_dim"),)),
    "PanguEmbeddedForCausalLM": Architecture(
        "pangu-embedded",
        rules=(deepseek.TIED_OUTPUT,),
        keys=(Copied(".vocab_size", "vocab_size", needed=True), others.set_pangu_heads),
        vocab="ernie",
    ),
    **dict.fromkeys(("GlmForCausalLM", "ChatGLMModel", "ChatGLMForConditionalGeneration"), _CHAT_GLM),
    **dict.fromkeys(("Lfm2ForCausalLM", "LFM2ForCausalLM"), _LFM_2),
    "Lfm2MoeForCausalLM": replace(
        _LFM_2,
        arch="lfm2moe",
        stored=(_ROUTER_BIAS,),
        rules=(lfm.CONVOLUTIONS, lfm.EXPERTS),
        keys=lfm.MOE_KEYS,
    ),
    "ApertusForCausalLM": Architecture(
        "apertus",
        rules=(others.Activations(),),
        keys=LLAMA_KEYS,
        vocab="llama",
        early=(others.set_activations,),
        extra=rope_factors,
    ),
    "TalkieForCausalLM": Architecture("talkie", rules=talkie.RULES, keys=talkie.KEYS, early=(talkie.set_gain,)),
    "NemotronForCausalLM": Architecture(
        "nemotron", rules=(Changed(r"norm\.weight$", plus_one),), keys=(others.set_nemotron,), vocab="nemotron"
    ),
    "Jais2ForCausalLM": Architecture("jais2", keys=(set_rope_width,)),
    "KimiK3ForConditionalGeneration": Architecture(
        "kimi-k3",
        stored=kimi.K3_STORED,
        rules=kimi.K3_RULES,
        base=kimi.set_single_base,
        keys=kimi.K3_KEYS,
        vocab="kimi k3",
    ),
    **dict.fromkeys(("MambaForCausalLM", "MambaLMHeadModel", "FalconMambaForCausalLM"), _MAMBA),
    "Mamba2ForCausalLM": Architecture(
        "mamba2", stored=mamba.MAMBA2_STORED, rules=mamba.MAMBA2_RULES, base=mamba.set_mamba2_base, vocab="mamba"
    ),
    "NemotronHForCausalLM": replace(
        _NEMOTRON_H_MOE,
        arch="nemotron_h",
        instead=lambda config: _NEMOTRON_H_MOE if mamba.has_experts(config) else None,
    ),
    **dict.fromkeys(("LlavaForConditionalGeneration", "VoxtralForConditionalGeneration"), _LLAMA),
    "VLlama3ForCausalLM": replace(_LLAMA, prepare=lambda config: config.values.setdefault("num_attention_heads", 32)),
    "LlamaModel": replace(_LLAMA, rules=(*qwen.BARE, *_LLAMA.rules)),
    "Sarashina2VisionForCausalLM": replace(
        _LLAMA, stored=(Dropped(r"^norm\."), Renamed(r"^llm\.", ""), *_LLAMA.stored)
    ),
    "NanbeigeForCausalLM": replace(_LLAMA, arch="nanbeige", keys=(*LLAMA_KEYS, others.set_loops)),
    "RND1": Architecture("rnd1", rules=qwen.QWEN_EXPERTS, keys=(*qwen.EXPERT_WIDTHS, *others.DIFFUSION_KEYS)),
    **dict.fromkeys(("LLaDAMoEModel", "LLaDAMoEModelLM"), _LLADA_MOE),
    "PLMForCausalLM": Architecture("plm", keys=(others.set_plm_heads,)),
    "Spark2_5ForCausalLM": Architecture(
        "spark2_5", rules=(Renamed(r"\.self_attn\.q_k_v_proj\.", ".self_attn.qkv_proj."),), keys=(others.set_spark,)
    ),
    "Exaone4_5_ForConditionalGeneration": Architecture(
        "exaone4",
        rules=(Dropped(r"^mtp\.", when=lambda config: not deepseek.predicting_layers(config)), others.LayersBehind()),
        keys=(*others.EXAONE4_KEYS, glm.set_predicting_layers),
        layers=deepseek.all_layers,
        extra=exaone4_rope,
    ),
    "PaddleOCRVLForConditionalGeneration": Architecture(
        "paddleocr", stored=(ernie.RENAMED,), rules=ernie.FUSED, vocab="ernie"
    ),
    "FalconH1ForCausalLM": Architecture(
        "falcon-h1",
        stored=hybrids.FALCON_STORED,
        rules=hybrids.FALCON_RULES,
        base=hybrids.set_falcon_base,
        keys=hybrids.FALCON_KEYS,
        prepare=hybrids.check_order,
    ),
    "JambaForCausalLM": Architecture("jamba", rules=hybrids.JAMBA_RULES, base=hybrids.set_jamba_base, vocab="jamba"),
    **dict.fromkeys(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), _GEMMA_3N),
    **dict.fromkeys(("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"), _MINIMAX_M1),
    **OLDER,
    **ENCODERS,
}
