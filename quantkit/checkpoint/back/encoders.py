"""More rows of the table of classes (``classes``): encoders, which make embeddings or tell labels.

Facts of transformers 4.57.6; of remote code (Nomic BERT, Jina BERT, NeoBERT) what llama.cpp (b11434,
src/models/bert.cpp and others) does of its files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace

from quantkit.checkpoint.back import derived as d
from quantkit.checkpoint.back.rules import Backward, undone
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.back.spelling import Json, Spelling, spelled
from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Zeros
from quantkit.checkpoint.families import t5
from quantkit.checkpoint.tensors import Tensor
from quantkit.errors import TypeNotSupported

_POOLED = "no file holds the layer that pools (pooler.dense): transformers makes one of random numbers; embeddings "
_POOLED += "do not use it"


def pooling_files(said: Said) -> dict[str, bytes]:
    """Return the files by which sentence-transformers, and `quantkit convert`, know how tokens become one embedding."""
    kind = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}.get(said.get(".pooling_type") or 0)
    if kind is None:
        return {}
    pooling: Json = {"word_embedding_dimension": said.number(".embedding_length")}
    pooling |= {f"pooling_mode_{name}": name == kind for name in ("cls_token", "mean_tokens", "lasttoken")}
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(parts)
    ]
    return {
        name: (json.dumps(value, indent=2) + "\n").encode()
        for name, value in (("modules.json", modules), ("1_Pooling/config.json", pooling))
    }


def _words(said: Said) -> bool:
    """Tell files whose tokens are pieces of words, as BERT's, not RoBERTa's."""
    return bool(said.model.get("tokenizer.ggml.model") == "bert")


def _bytes(said: Said) -> bool:
    return bool(said.model.get("tokenizer.ggml.model") == "gpt2")


def _pieces(said: Said) -> bool:
    return bool(said.model.get("tokenizer.ggml.model") == "t5")


def _labelled(of: Callable[[Said], bool]) -> Callable[[Said], bool]:
    return lambda said: of(said) and said.has("cls.output.weight")


def _distilled(said: Said) -> bool:
    """Tell files of DistilBERT, which knows no first and second text."""
    return _words(said) and not said.has("token_types.weight")


def _labels(said: Said, config: Json) -> None:
    """Name the labels of a classifier."""
    found = said.get(".classifier.output_labels")
    if found:
        config |= {"id2label": dict(enumerate(found)), "label2id": {text: i for i, text in enumerate(found)}}
    config["type_vocab_size"] = said.model.get("tokenizer.ggml.token_type_count") or 1


def _no_classifier(said: Said, config: Json) -> None:
    """Refuse BERT's classifiers."""
    if said.has("cls.output.weight"):
        raise TypeNotSupported(
            f"{said.where}: a classifier of BERT computes labels of what pooler.dense makes of the first token, and no "
            "file holds that: it would be another model"
        )


def _positions(said: Said, config: Json) -> None:
    """Count the positions, too, that no token has: those before and of what fills texts up (RoBERTa)."""
    pad = said.model.get("tokenizer.ggml.padding_token_id")
    config["max_position_embeddings"] += 0 if pad is None else 1 + pad


# --- BERT, DistilBERT, RoBERTa ---------------------------------------------------------------------------------------

_BERT_NAMES = (
    "embeddings.word_embeddings embeddings.LayerNorm embeddings.token_type_embeddings embeddings.position_embeddings "
    + spelled(
        "encoder.layer.*.",
        "attention.self.query attention.self.key attention.self.value attention.output.dense "
        "attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm",
    )
)
_BERT = Spelling("bert", _BERT_NAMES, derived=(_labels, _no_classifier), note=_POOLED, when=_words)
_ROBERTA = Spelling("roberta", _BERT_NAMES, derived=(_labels, _positions), note=_POOLED, when=_bytes)
_XLM = replace(_ROBERTA, model_type="xlm-roberta", when=_pieces)
_ROBERTA_LABELS = replace(
    _ROBERTA,
    names=f"{_ROBERTA.names} classifier.dense",
    when=_labelled(_bytes),
    renamed=((r"^(?!classifier)", "roberta."), (r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1")),
    note="",
)
_DISTIL = Spelling(
    "distilbert",
    "embeddings.word_embeddings embeddings.LayerNorm embeddings.position_embeddings "
    + spelled(
        "transformer.layer.*.",
        "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2 "
        "output_layer_norm",
    ),
    keys={
        **{".block_count": "n_layers", ".embedding_length": "dim", ".feed_forward_length": "hidden_dim"},
        **{".attention.head_count": "n_heads", ".attention.layer_norm_epsilon": ""},
    },
    derived=(_labels,),
    when=_distilled,
)

# --- Nomic BERT, Jina BERT, NeoBERT ----------------------------------------------------------------------------------


def _trained(said: Said, config: Json) -> None:
    """Say what Nomic BERT is, by its own names and by those of transformers 5."""
    experts, context = said.get(".expert_count") is not None, said.number(".context_length")
    config |= {
        **{"n_positions": 2048 if context == 512 else 8192, "max_trained_positions": 2048},
        **{"causal": False, "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False},
        **{"rotary_emb_scale_base": None, "activation_function": "gelu" if experts else "swiglu"},
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), experts),
        **{"hidden_size": config["n_embd"], "num_hidden_layers": config["n_layer"], "hidden_act": "silu"},
        **{"num_attention_heads": config["n_head"], "intermediate_size": config["n_inner"]},
        **{"layer_norm_eps": config["layer_norm_epsilon"]},
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rotary_emb_base"]},
    }
    if _pieces(said):
        _positions(said, config)


def _unused_biases(said: Said) -> Iterable[Tensor]:
    """Make the biases of experts, which llama.cpp leaves out, of zeros."""
    for layer in range(said.number(".block_count")):
        if f"blk.{layer}.ffn_gate_inp.weight" in said.model.tensors:
            zeros = Zeros((said.number(".embedding_length"),))
            yield Tensor(f"encoder.layers.{layer}.mlp.experts.bias", zeros, layer)


def _one_matrix(config: Config, name: str) -> str:
    """Layers without gates call their first matrix otherwise than those with."""
    return name.replace(".mlp.fc11.", ".mlp.fc1.") if config.get("activation_function") == "gelu" else name


_NOMIC = Spelling(
    "nomic_bert",
    "embeddings.word_embeddings embeddings.token_type_embeddings emb_ln "
    + spelled(
        "encoder.layers.*.",
        "attn.Wqkv attn.out_proj norm1 norm2 mlp.fc11 mlp.fc12 mlp.fc2 mlp.router.layer mlp.experts.mlp.w1 "
        "mlp.experts.mlp.w2",
    ),
    keys={
        **{".block_count": "n_layer", ".embedding_length": "n_embd", ".feed_forward_length": "n_inner"},
        **{".attention.head_count": "n_head", ".rope.freq_base": "rotary_emb_base", ".expert_count": "num_experts"},
        **{".attention.layer_norm_epsilon": "layer_norm_epsilon", ".attention.layer_norm_rms_epsilon": "rms_norm_eps"},
        **{".moe_every_n_layers": "moe_every_n_layers", ".expert_used_count": "moe_top_k"},
    },
    derived=(_labels, _trained),
    tensors=_unused_biases,
    last=_one_matrix,
    archs=("nomic-bert-moe",),
)


def _first_jina(said: Said, config: Json) -> None:
    """Say that there are no tables of positions; refuse models whose layers are others."""
    if any(said.has(f"{name}.weight") for name in ("attn_norm_2", "attn_q_norm", "ffn_gate")):
        raise TypeNotSupported(
            f"{said.where}: a Jina BERT whose layers are not those of jina-embeddings-v2-base-en (the models for code "
            "have other norms) is not exported by this version"
        )
    config |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}


_JINA = Spelling(
    "bert",
    "embeddings.word_embeddings embeddings.LayerNorm embeddings.token_type_embeddings "
    + spelled(
        "encoder.layer.*.",
        "attention.self.query attention.self.key attention.self.value attention.output.dense "
        "attention.output.LayerNorm mlp.gated_layers mlp.wo mlp.layernorm",
    ),
    derived=(_labels, _first_jina),
    note=_POOLED,
)


def _two_in_one(said: Said, config: Json) -> None:
    """Say how wide layers are before a third of that is taken away (NeoBERT)."""
    width = said.number(".feed_forward_length")
    config["intermediate_size"] = -(-3 * width // 2)


_NEO = Spelling(
    "neobert",
    "encoder layer_norm " + spelled("transformer_encoder.*.", "qkv wo ffn.w12 ffn.w3 attention_norm ffn_norm"),
    keys={".attention.layer_norm_rms_epsilon": "norm_eps", ".rope.freq_base": ""},
    derived=(_labels, _two_in_one),
)

# --- ModernBERT, EuroBERT --------------------------------------------------------------------------------------------


def _biases(said: Said, config: Json) -> None:
    """Say which biases there are, and which tokens a classifier looks at."""
    config |= {
        "attention_bias": said.some(".attn_qkv.bias"),
        "mlp_bias": said.some(".ffn_up.bias"),
        "norm_bias": said.some("_norm.bias"),
        "classifier_bias": said.has("cls.bias"),
    }
    if (kind := said.get(".classifier.pooling_type")) in (1, 2):
        config["classifier_pooling"] = ("mean", "cls")[kind - 1]


_MODERN = Spelling(
    "modernbert",
    "embeddings.tok_embeddings embeddings.norm final_norm head.dense head.norm "
    + spelled("layers.*.", "attn.Wqkv attn.Wo mlp.Wi mlp.Wo attn_norm mlp_norm"),
    keys={
        **{".rope.freq_base": "global_rope_theta", ".rope.freq_base_swa": "local_rope_theta"},
        **{".attention.layer_norm_rms_epsilon": "norm_eps", ".attention.layer_norm_epsilon": "layer_norm_eps"},
    },
    otherwise={"reference_compile": False},
    derived=(_labels, _biases),
)
_EURO = Spelling(
    "eurobert",
    "embed_tokens norm "
    + spelled(
        "layers.*.",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj "
        "input_layernorm post_attention_layernorm",
    ),
    derived=(d.as_parameters,),
    biases=("attention_bias", "mlp_bias"),
)

# --- T5 --------------------------------------------------------------------------------------------------------------


@undone.register
def _(rule: t5.Shared, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    return None


def _gates(said: Said, config: Json) -> None:
    """Say whether feed forward has gates, and which parts there are."""
    both = said.arch == "t5"
    gated = any(name.endswith(".ffn_gate.weight") for name in said.model.tensors)
    config |= {"feed_forward_proj": "gated-gelu" if gated else "relu", "is_encoder_decoder": both}
    if both and config.get("num_decoder_layers") is None:
        config["num_decoder_layers"] = config["num_layers"]


def _gated_name(config: Config, name: str) -> str:
    """The matrix beside gates is called otherwise than one alone."""
    gated = config.get("feed_forward_proj") == "gated-gelu"
    return name.replace(".DenseReluDense.wi.", ".DenseReluDense.wi_1.") if gated else name


_T5 = Spelling(
    "t5",
    "shared encoder.final_layer_norm",
    keys={
        **{".context_length": "n_positions", ".embedding_length": "d_model", ".feed_forward_length": "d_ff"},
        **{".block_count": "num_layers", ".decoder_block_count": "num_decoder_layers"},
        **{".attention.head_count": "num_heads", ".attention.key_length": "d_kv"},
        **{".attention.layer_norm_epsilon": "layer_norm_epsilon", ".attention.layer_norm_rms_epsilon": ""},
        **{".attention.relative_buckets_count": "relative_attention_num_buckets"},
        **{".decoder_start_token_id": "decoder_start_token_id"},
    },
    derived=(_gates,),
    last=_gated_name,
)


def _every_layer(said: Said) -> bool:
    """Tell files whose layers each have biases of relative positions (UMT5)."""
    return "enc.blk.1.attn_rel_b.weight" in said.model.tensors


#: Class of transformers -> how it spells.
ENCODERS: dict[str, Spelling] = {
    "DistilBertForSequenceClassification": replace(
        _DISTIL,
        names=f"{_DISTIL.names} pre_classifier",
        when=_labelled(_distilled),
        renamed=((r"^(?!(pre_)?classifier)", "distilbert."),),
    ),
    "DistilBertModel": _DISTIL,
    "BertModel": _BERT,
    "RobertaForSequenceClassification": _ROBERTA_LABELS,
    "XLMRobertaForSequenceClassification": replace(_ROBERTA_LABELS, model_type="xlm-roberta", when=_labelled(_pieces)),
    "XLMRobertaModel": _XLM,
    "RobertaModel": _ROBERTA,
    "NomicBertModel": _NOMIC,
    "JinaBertModel": _JINA,
    "NeoBERT": _NEO,
    "ModernBertForSequenceClassification": replace(
        _MODERN, when=lambda said: said.has("cls.output.weight"), renamed=((r"^(?!classifier|head)", "model."),)
    ),
    "ModernBertModel": _MODERN,
    "EuroBertModel": _EURO,
    "UMT5ForConditionalGeneration": replace(_T5, model_type="umt5", when=_every_layer),
    "T5ForConditionalGeneration": _T5,
    "T5EncoderModel": _T5,
}
