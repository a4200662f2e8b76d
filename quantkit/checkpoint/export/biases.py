"""Biases of the modules of transformers' classes, and the switches of config.json for them.

A file may have a bias beside any weight: llama.cpp adds it wherever it is. transformers ignores those that the class
does not make, and the model computes something else. Facts of transformers 4.57.6, of 5.18.0 where that lacks the
class (models/*/modeling_*.py; scripts/record_biases.py enters what those say in tests/data/biases.json).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quantkit.checkpoint.config import Json
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short

#: Switch -> names of modules that have a bias if it is true; "": whatever config.json says.
Biases = Mapping[str, str]

_QKV = "q_proj k_proj v_proj"
_OUT = "o_proj"
_GATED = "gate_proj up_proj down_proj"
_UNGATED = "up_proj down_proj"
_ATTENTION = {"attention_bias": f"{_QKV} {_OUT}"}
_ATTENTION_AND_MLP = {**_ATTENTION, "mlp_bias": _GATED}
_LATENT = {"attention_bias": f"q_a_proj kv_a_proj_with_mqa {_OUT}"}
_MAMBA = {"mamba_conv_bias": "conv1d", "mamba_proj_bias": "in_proj out_proj"}
_NORMS = "input_layernorm post_attention_layernorm norm"
_BERT = {"": "LayerNorm query key value dense"}
_DISTILBERT = "LayerNorm q_lin k_lin v_lin out_lin lin1 lin2 sa_layer_norm output_layer_norm"
_MODERN_BERT = {
    "attention_bias": "Wqkv Wo",
    "mlp_bias": "Wi Wo",
    "norm_bias": "norm attn_norm mlp_norm final_norm",
}


def _for_classes(biases: Biases, names: str) -> dict[str, Biases]:
    return dict.fromkeys(names.split(), biases)


#: By class. Of those that are not here transformers has no code, only their own repositories.
BIASES: dict[str, Biases] = {
    **_for_classes(
        {},
        "MixtralForCausalLM MistralForCausalLM Ministral3ForCausalLM Mistral3ForConditionalGeneration Phi3ForCausalLM "
        "Exaone4ForCausalLM MiniMaxM2ForCausalLM ExaoneMoeForCausalLM MiniMaxM3SparseForConditionalGeneration "
        "DbrxForCausalLM MptForCausalLM Exaone4_5_ForConditionalGeneration UMT5ForConditionalGeneration "
        "T5ForConditionalGeneration T5EncoderModel",
    ),
    **_for_classes(
        _ATTENTION,
        "Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration "
        "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForConditionalGeneration GemmaForCausalLM Gemma2ForCausalLM "
        "Gemma3ForCausalLM Gemma3TextModel Gemma3nForCausalLM Gemma4ForCausalLM Gemma4AssistantForCausalLM "
        "OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM GraniteMoeForCausalLM "
        "GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM CohereForCausalLM Cohere2ForCausalLM "
        "Cohere2MoeForCausalLM Dots1ForCausalLM HunYuanMoEV1ForCausalLM HunYuanDenseV1ForCausalLM "
        "HunYuanVLForConditionalGeneration Llama4ForCausalLM AfmoeForCausalLM LagunaForCausalLM MellumForCausalLM "
        "ApertusForCausalLM BitNetForCausalLM MuseGlimmerForConditionalGeneration",
    ),
    **_for_classes(
        _ATTENTION_AND_MLP,
        "LlamaForCausalLM LlamaBidirectionalModel GraniteForCausalLM GraniteSWAForCausalLM SmolLM3ForCausalLM "
        "HYV3ForCausalLM EuroBertModel Step3p7ForConditionalGeneration",
    ),
    **_for_classes({**_ATTENTION, "mlp_bias": _UNGATED}, "ArceeForCausalLM"),
    **_for_classes({"": _NORMS, **_ATTENTION, "mlp_bias": _UNGATED}, "NemotronForCausalLM Jais2ForCausalLM"),
    **_for_classes(
        {"attention_bias": _QKV}, "Glm4ForCausalLM Glm4MoeForCausalLM GlmForCausalLM MiMoV2FlashForCausalLM"
    ),
    **_for_classes({"": _QKV}, "Qwen2ForCausalLM Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration"),
    "ChameleonForConditionalGeneration": {"": "q_norm k_norm", **_ATTENTION_AND_MLP},
    "Qwen2MoeForCausalLM": {"qkv_bias": _QKV},
    "SeedOssForCausalLM": {"attention_bias": _QKV, "attention_out_bias": _OUT, "mlp_bias": _GATED},
    "GptOssForCausalLM": {**_ATTENTION, "": "router"},
    "PhimoeForCausalLM": {**_ATTENTION, "": _NORMS, "lm_head_bias": "lm_head"},
    "PhiForCausalLM": {"": f"{_QKV} dense fc1 fc2 q_layernorm k_layernorm input_layernorm final_layernorm lm_head"},
    "StableLmForCausalLM": {"": _NORMS, "use_qkv_bias": _QKV},
    "Starcoder2ForCausalLM": {"": _NORMS, "use_bias": f"{_QKV} {_OUT} c_fc c_proj"},
    **_for_classes({"use_bias": f"{_QKV} {_OUT} {_GATED}"}, "Ernie4_5ForCausalLM PaddleOCRVLForConditionalGeneration"),
    "Ernie4_5_MoeForCausalLM": {"use_bias": f"{_QKV} {_OUT} {_GATED} lm_head"},
    **_for_classes(_LATENT, "DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM KimiLinearForCausalLM"),
    **_for_classes({**_LATENT, "mlp_bias": _GATED}, "DeepseekV2ForCausalLM MiniCPM3ForCausalLM"),
    **_for_classes({**_LATENT, "": "k_norm"}, "DeepseekV32ForCausalLM GlmMoeDsaForCausalLM HYV4ForCausalLM"),
    "GraniteMoeHybridForCausalLM": {**_ATTENTION, **_MAMBA},
    "BambaForCausalLM": {**_ATTENTION_AND_MLP, **_MAMBA},
    "FalconH1ForCausalLM": {
        **_ATTENTION_AND_MLP,
        "mamba_conv_bias": "conv1d",
        "mamba_proj_bias": "in_proj",
        "projectors_bias": "out_proj",
    },
    "JambaForCausalLM": {**_MAMBA, "": "dt_proj"},
    "NemotronHForCausalLM": {
        "use_conv_bias": "conv1d",
        "use_bias": "in_proj out_proj",
        "mlp_bias": f"{_UNGATED} fc1_latent_proj fc2_latent_proj",
    },
    **_for_classes(
        {"": "dt_proj", "use_conv_bias": "conv1d", "use_bias": "in_proj out_proj"},
        "MambaForCausalLM FalconMambaForCausalLM",
    ),
    "Mamba2ForCausalLM": {"use_conv_bias": "conv1d", "use_bias": "in_proj out_proj"},
    **_for_classes({"conv_bias": "conv in_proj out_proj"}, "Lfm2ForCausalLM Lfm2Model Lfm2MoeForCausalLM"),
    **_for_classes({"": "ln_1 ln_2 ln_f c_attn c_proj c_fc"}, "GPT2LMHeadModel GPTBigCodeForCausalLM"),
    "GPTNeoXForCausalLM": {
        "": "dense_h_to_4h dense_4h_to_h input_layernorm post_attention_layernorm final_layer_norm",
        "attention_bias": "query_key_value dense",
    },
    "BloomForCausalLM": {
        "": "query_key_value dense dense_h_to_4h dense_4h_to_h input_layernorm post_attention_layernorm ln_f "
        "word_embeddings_layernorm"
    },
    "FalconForCausalLM": {
        "": "input_layernorm post_attention_layernorm ln_attn ln_mlp ln_f",
        "bias": "query_key_value dense dense_h_to_4h dense_4h_to_h",
    },
    **_for_classes(_BERT, "BertModel RobertaModel XLMRobertaModel"),
    **_for_classes(
        {"": f"{_BERT['']} out_proj"}, "RobertaForSequenceClassification XLMRobertaForSequenceClassification"
    ),
    "DistilBertModel": {"": _DISTILBERT},
    "DistilBertForSequenceClassification": {"": f"{_DISTILBERT} pre_classifier classifier"},
    "ModernBertModel": _MODERN_BERT,
    "ModernBertForSequenceClassification": {**_MODERN_BERT, "": "classifier", "classifier_bias": "dense"},
}


def set_biases(config: Json, architecture: str, tensors: Iterable[str], where: str) -> None:
    """Set the switches of a class' biases by the tensors that a checkpoint has.

    Args:
        config: what config.json says of the text model; it is changed.
        architecture: the class of transformers.
        tensors: their names in the checkpoint.
        where: the file that is exported, for messages.

    Raises:
        TypeNotSupported: the class makes no such bias, whatever config.json says.
    """
    modules = {name.removesuffix(".bias").rpartition(".")[2]: name for name in tensors if name.endswith(".bias")}
    biases = BIASES.get(architecture)
    if biases is None:
        return
    modules_with_bias = {module for names in biases.values() for module in names.split()}
    for module, name in modules.items():
        if module not in modules_with_bias:
            raise TypeNotSupported(
                f"{where}: {architecture} has no place for a bias beside {module}, and transformers would ignore "
                f"{short(name)}: the checkpoint would compute something else",
                "QK-E305",
            )
    config |= {switch: any(m in modules for m in names.split()) for switch, names in biases.items() if switch}
