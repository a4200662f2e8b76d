"""ModernBERT and EuroBERT.

Facts of llama.cpp b11434, conversion/bert.py.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import VOCAB_SIZE, Always, Copied, SetKeys
from quantkit.checkpoint.models import bert
from quantkit.checkpoint.pooling import set_pooling
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Rename
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.tokenizer import NORMAL, USER_DEFINED, Vocabulary

MODERN_KEYS: tuple[SetKeys, ...] = (
    Copied(".attention.sliding_window", "local_attention", required=True),
    Copied(".attention.sliding_window_pattern", "global_attn_every_n_layers"),
    Always(".rope.scaling.type", "none", "text"),
    VOCAB_SIZE,
    Copied(".hidden_activation", "hidden_activation", "text"),
)

EURO_KEYS: tuple[SetKeys, ...] = (
    Always(".attention.causal", False, "flag"),
    Always(".rope.scaling.type", "none", "text"),
    set_pooling,
)


def write_modern_bert(v: Vocabulary) -> None:
    """Write a BPE vocabulary with tokens before, between and after texts (ModernBertModel)."""
    for kind in ("bos", "eos", "sep"):
        v.keys.flag(f"tokenizer.ggml.add_{kind}_token", True)
    write_bpe(v)
    if v.pre_name == "mmbert":
        _normal_spaces(v)


def _normal_spaces(v: Vocabulary) -> None:
    """Make added tokens of spaces normal tokens, because they are never recognized in a text."""
    tokens, types = (list(v.keys.fields[f"tokenizer.ggml.{key}"].value) for key in ("tokens", "token_type"))
    for i, text in enumerate(tokens):
        if types[i] == USER_DEFINED and text and not text.strip(" "):
            tokens[i], types[i] = "\u2581" * len(text), NORMAL
    v.keys.array("tokenizer.ggml.tokens", tokens)
    v.keys.array("tokenizer.ggml.token_type", types)


def write_euro_bert(v: Vocabulary) -> None:
    """Write a BPE vocabulary without BOS (EuroBertModel)."""
    v.keys.flag("tokenizer.ggml.add_bos_token", False)
    write_bpe(v)


MODERN_BERT = replace(
    bert.BERT,
    arch="modern-bert",
    stored=(Rename(r"^model\.", ""), *bert.STORED),
    keys=(*bert.KEYS, *MODERN_KEYS),
    vocab=write_modern_bert,
)

_EURO_BERT = Architecture("eurobert", stored=(Rename(r"^model\.", ""),), keys=EURO_KEYS, vocab=write_euro_bert)

ARCHITECTURES: dict[str, Architecture] = {
    "ModernBertModel": MODERN_BERT,
    "ModernBertForMaskedLM": MODERN_BERT,
    "ModernBertForSequenceClassification": MODERN_BERT,
    "EuroBertModel": _EURO_BERT,
    "JinaEmbeddingsV5Model": _EURO_BERT,
}


def _set_biases(meta: ModelMetadata, config: Json) -> None:
    """Set whether the classifier has a bias, and its pooling."""
    config |= {
        "classifier_bias": meta.has("cls.bias"),
    }
    if (kind := meta.get(".classifier.pooling_type")) in (1, 2):
        config["classifier_pooling"] = ("mean", "cls")[kind - 1]


_MODERN_CLASS = HfClass(
    "modernbert",
    "embeddings.tok_embeddings embeddings.norm final_norm head.dense head.norm "
    + add_prefix("layers.*.", "attn.Wqkv attn.Wo mlp.Wi mlp.Wo attn_norm mlp_norm"),
    keys={
        ".rope.freq_base": "global_rope_theta",
        ".rope.freq_base_swa": "local_rope_theta",
    },
    defaults={"reference_compile": False},
    config_setters=(bert.set_label_names, _set_biases),
)

CLASSES: dict[str, HfClass] = {
    "ModernBertForSequenceClassification": replace(
        _MODERN_CLASS,
        matches=lambda meta: meta.has("cls.output.weight"),
        renames=((r"^(?!classifier|head)", "model."),),
    ),
    "ModernBertModel": _MODERN_CLASS,
    "EuroBertModel": HfClass(
        "eurobert",
        "embed_tokens norm "
        + add_prefix(
            "layers.*.",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj "
            "mlp.down_proj input_layernorm post_attention_layernorm",
        ),
        config_setters=(config_values.set_rope_parameters,),
    ),
}
