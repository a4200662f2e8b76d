"""Qwen 1 to 3, their mixtures of experts, and the text models of their vision and audio models.

Facts of llama.cpp b11434, conversion/qwen.py, conversion/qwen3vl.py, conversion/qwenvl.py.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import Always, Computed, Copied
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.pooling import set_pooling
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Rename, Split, StackExperts, Transform, transpose, transpose_stored
from quantkit.checkpoint.vocab.bpe import write_bpe, write_sentencepiece_or_bpe
from quantkit.checkpoint.vocab.special import SpecialTokens
from quantkit.checkpoint.vocab.tiktoken import QWEN, write_ranks
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError

#: Experts stored as one tensor, with gate and up together.
SPLIT_FUSED_EXPERTS = (
    Rename(r"(mlp\.experts\.down_proj)$", r"\1.weight"),
    Split(
        r"mlp\.experts\.gate_up_proj(\.weight)?$", ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"), -2
    ),
)

#: Experts of Qwen and similar models: one tensor per expert, or one for all.
STACK_EXPERTS = (*SPLIT_FUSED_EXPERTS, StackExperts())

EXPERT_WIDTHS = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size", "count"),
    Copied(".expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)

#: Prefix of the tensors of Qwen 3 Omni's text model.
UNWRAP_TEXT = (Rename(r"thinker\.", ""),)
#: The layers whose outputs Qwen3-VL's vision tower adds to the text model, unless the configuration names them.
_DEEPSTACK = (8, 16, 24)


def _deepstack_layers(config: Config) -> int:
    """Return the number of vision features that the first layers add."""
    vision = config.get("vision_config") or {}
    layers = vision.get("deepstack_visual_indexes", _DEEPSTACK) if isinstance(vision, dict) else None
    if not isinstance(layers, (list, tuple)):
        raise FormatError(
            f"{config.path}: vision_config does not list the layers of deepstack_visual_indexes", "QK-E112"
        )
    return len(layers)


DEEPSTACK = Computed(".n_deepstack_layers", _deepstack_layers)

#: Experts of Qwen3-VL are stored transposed: [expert, in, out].
VL_EXPERTS = (
    Transform(r"mlp\.experts\.(down_proj|gate_up_proj)(\.weight)?$", transpose, transpose_stored),
    *STACK_EXPERTS,
)


def write_omni(v: Vocabulary) -> None:
    """Write a BPE vocabulary with the end of a turn as BOS and EOS (Qwen3OmniMoeTextModel)."""
    write_bpe(v)
    _end_turns(v)


#: ChatML without tools, which ASR's own chat template is not.
_CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_asr(v: Vocabulary) -> None:
    """Write a vocabulary with ChatML as its template and the end of a turn as BOS and EOS (Qwen3ASRTextModel)."""
    write_sentencepiece_or_bpe(v)
    v.keys.text("tokenizer.chat_template", _CHATML)
    _end_turns(v)


def _end_turns(v: Vocabulary) -> None:
    """Set <|im_end|> as BOS and EOS."""
    number = next((number for number, entry in v.decoder_entries if entry["content"] == "<|im_end|>"), None)
    if number is not None:
        v.keys.u32("tokenizer.ggml.bos_token_id", number)
        v.keys.u32("tokenizer.ggml.eos_token_id", number)


def write_qwen(v: Vocabulary) -> None:
    """Write tiktoken ranks; BOS and EOS default to one token (TextModel._set_vocab_qwen)."""

    def complete(special: SpecialTokens, ids: dict[str, int]) -> None:
        end = ids["<|endoftext|>"]
        for kind in ("unk",) if special.ids else ("bos", "eos", "unk"):
            special.set(kind, end)

    write_ranks(v, QWEN, complete)


_QWEN2 = Architecture("qwen2", keys=(set_pooling,), vocab=write_sentencepiece_or_bpe)
QWEN3 = Architecture("qwen3", keys=(set_pooling,), vocab=write_sentencepiece_or_bpe)

_QWEN2_VL = Architecture("qwen2vl", stored=UNWRAP_TEXT, vocab=write_sentencepiece_or_bpe)

ARCHITECTURES: dict[str, Architecture] = {
    "Qwen2ForCausalLM": _QWEN2,
    "KORMoForCausalLM": _QWEN2,
    "DotsOCRForCausalLM": _QWEN2,
    "Qwen2AudioForConditionalGeneration": _QWEN2,
    "AudioFlamingo3ForConditionalGeneration": _QWEN2,
    "Qwen2Model": replace(_QWEN2, rules=llama.BARE_NAMES),
    "Qwen3ForCausalLM": QWEN3,
    "StepVLForConditionalGeneration": QWEN3,
    "Qwen3Model": replace(QWEN3, rules=llama.BARE_NAMES),
    "Qwen2MoeForCausalLM": Architecture("qwen2moe", rules=STACK_EXPERTS, keys=EXPERT_WIDTHS),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", rules=STACK_EXPERTS, keys=EXPERT_WIDTHS),
    "Qwen3VLForConditionalGeneration": Architecture(
        "qwen3vl", stored=UNWRAP_TEXT, keys=(set_pooling, DEEPSTACK), vocab=write_sentencepiece_or_bpe
    ),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        "qwen3vlmoe", stored=UNWRAP_TEXT, rules=VL_EXPERTS, keys=(*EXPERT_WIDTHS, DEEPSTACK)
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2VLModel": _QWEN2_VL,
    "Qwen2_5OmniModel": _QWEN2_VL,
    "Qwen3OmniMoeForConditionalGeneration": Architecture(
        "qwen3vlmoe",
        stored=UNWRAP_TEXT,
        rules=VL_EXPERTS,
        keys=(*EXPERT_WIDTHS, Always(".n_deepstack_layers", 0)),
        vocab=write_omni,
    ),
    "Qwen3ASRForConditionalGeneration": Architecture(
        "qwen3vl", stored=UNWRAP_TEXT, keys=(set_pooling, Always(".n_deepstack_layers", 0)), vocab=write_asr
    ),
    "QWenLMHeadModel": Architecture("qwen", vocab=write_qwen),
}


def add_qwen2_tower(meta: ModelMetadata, config: Json) -> None:
    """Describe a vision tower, which files of text models lack, as small as possible (Qwen2-VL)."""
    width = meta.number(".embedding_length")
    config["vision_config"] = {"depth": 1, "num_heads": 2} | (
        {"embed_dim": 64, "hidden_size": width}
        if config["model_type"] == "qwen2_vl"
        else {"hidden_size": 64, "intermediate_size": 64, "out_hidden_size": width, "fullatt_block_indexes": [0]}
    )
    config.setdefault("rope_scaling", {})


SHARED_EXPERT_NAMES = " ".join(f"model.layers.*.mlp.shared_expert.{w}_proj" for w in ("gate", "up", "down"))
_LAYER = "transformer.h.*."


def _set_qwen1_names(meta: ModelMetadata, config: Json) -> None:
    """Set the values that only Qwen 1 has names for."""
    config |= {
        "seq_length": meta.number(".context_length"),
        "kv_channels": meta.head_width,
        "no_bias": True,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        "scale_attn_weights": True,
    }


_VL_CLASS = HfClass(
    "qwen3_vl",
    config_setters=(config_values.interleave_sections, config_values.add_deepstack_tower),
    renames=((r"^model\.", "model.language_model."),),
)

_QWEN_2_VL_CLASS = HfClass("qwen2_vl", config_setters=(add_qwen2_tower,))

CLASSES: dict[str, HfClass] = {
    "Qwen2ForCausalLM": HfClass("qwen2"),
    "Qwen3ForCausalLM": HfClass("qwen3"),
    "Qwen2MoeForCausalLM": HfClass(
        "qwen2_moe",
        SHARED_EXPERT_NAMES,
        defaults={"norm_topk_prob": False},
        config_setters=(config_values.set_dense_layers,),
    ),
    "Qwen3MoeForCausalLM": HfClass(
        "qwen3_moe", defaults={"norm_topk_prob": True}, config_setters=(config_values.set_dense_layers,)
    ),
    "Qwen3VLForConditionalGeneration": replace(_VL_CLASS, model_type="qwen3_vl_text", outer_type="qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": replace(
        _VL_CLASS,
        model_type="qwen3_vl_moe_text",
        defaults={"norm_topk_prob": True},
        config_setters=(
            config_values.set_dense_layers,
            config_values.interleave_sections,
            config_values.add_deepstack_tower,
        ),
        fused=True,
        outer_type="qwen3_vl_moe",
    ),
    "Qwen2VLForConditionalGeneration": _QWEN_2_VL_CLASS,
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN_2_VL_CLASS, model_type="qwen2_5_vl"),
    "QWenLMHeadModel": HfClass(
        "qwen",
        "transformer.wte transformer.ln_f "
        + add_prefix(_LAYER, "ln_1 ln_2 attn.c_attn attn.c_proj mlp.w1 mlp.w2 mlp.c_proj"),
        keys={
            ".rope.freq_base": "rotary_emb_base",
            ".attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        config_setters=(_set_qwen1_names,),
    ),
}
