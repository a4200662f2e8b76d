"""BERT and its variants: DistilBERT, RoBERTa, XLM-R, Nomic, Jina and NeoBERT.

Facts of llama.cpp b11434, conversion/bert.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from quantkit.checkpoint.config import Config, Json, optional_json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Shaped, Transposed, Zeros, concatenate, take
from quantkit.checkpoint.key_rows import BASE, Always, Computed, Copied, SetKeys
from quantkit.checkpoint.pooling import set_pooling
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Drop, Rename, Transform, flatten_experts, flatten_transposed_experts
from quantkit.checkpoint.tensors import Context, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import set_token_types, write_bpe, write_wordpiece
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.checkpoint.vocab.unigram import write_nomic, write_xlm
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short

#: Used only for embeddings, so without heads and pooling layer.
STORED: tuple[Rule, ...] = (
    Rename(r"^bert\.", ""),
    Rename(r"\.gamma$", ".weight", foreign=True),
    Rename(r"\.beta$", ".bias", foreign=True),
    Drop(r"^embeddings\.position_ids$"),
    Drop(r"^pooler\.dense\.(weight|bias)$"),
    Drop(r"^cls\.(predictions|seq_relationship)"),
)

#: A classifier with labels has no layer before it.
HEAD = Rename(r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1", when=lambda config: bool(label_names(config)))


def _labels(config: Config) -> list[str]:
    return [text for _, text in sorted(label_names(config).items())]


LABELS = Computed(".classifier.output_labels", _labels, "array")
KEYS: tuple[SetKeys, ...] = (Always(".attention.causal", False, "flag"), set_pooling, LABELS)


#: The epsilon of DistilBERT's norms, which it does not store, comes first (DistilBertModel).
DISTIL_BASE: tuple[SetKeys, ...] = (Always(".attention.layer_norm_epsilon", 1e-12, "f32"), *BASE)


def cut_positions(config: Config) -> None:
    """Exclude positions without tokens from the context (RobertaModel)."""
    if "max_position_embeddings" in config:
        config.values["max_position_embeddings"] = config.number("max_position_embeddings") - position_offset(config)


def drop_unused_positions(tensor: Tensor, context: Context) -> Expression:
    return take(tensor.x, 0, range(min(position_offset(context.config), tensor.x.shape[0]), tensor.x.shape[0]))


def add_unused_positions(tensor: Tensor, context: Context) -> Expression:
    """Prepend the positions without tokens: zeros."""
    unused = position_offset(context.config)
    return concatenate([Zeros((unused, tensor.x.shape[1]), tensor.x.type), tensor.x]) if unused else tensor.x


POSITIONS = Transform(r"^embeddings\.position_embeddings\.weight$", drop_unused_positions, add_unused_positions)

#: Required settings of Nomic BERT, with experts or without.
_NOMIC = {
    "causal": False,
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
}


def prepare_nomic(config: Config) -> None:
    """Set the training context; refuse settings that llama.cpp does not support (NomicBertModel)."""
    if _is_unigram(config):
        cut_positions(config)
    experts = has_experts(config)
    supported = _NOMIC | {"activation_function": "gelu" if experts else "swiglu"}
    supported |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), experts)
    for key, value in supported.items():
        if config[key] != value:
            raise FormatError(f"{config.path}: {key} is {short(config[key])}; only {value} is supported", "QK-E305")
    positions, trained = config.number("n_positions"), config.get("max_trained_positions", 2048)
    if positions not in (2048, 8192) or trained != 2048:
        raise FormatError(
            f"{config.path}: n_positions is {positions} and max_trained_positions {short(trained)}; supported are "
            "2048 or 8192, and 2048",
            "QK-E305",
        )
    config.values["n_positions"] = 2048 if positions == 8192 else 512


NOMIC_STORED: tuple[Rule, ...] = (Drop(r"mlp\.experts\.bias"), *STORED)


def split_experts(tensor: Tensor, context: Context) -> Expression:
    number = context.config.number
    return Shaped(tensor.x, (number("num_local_experts", "num_experts"), number("n_inner"), number("n_embd")))


def split_transposed_experts(tensor: Tensor, context: Context) -> Expression:
    return Transposed(split_experts(tensor, context))


NOMIC_EXPERTS: tuple[Rule, ...] = (
    Transform(r"mlp\.experts\.mlp\.w1", split_experts, flatten_experts),
    Transform(r"mlp\.experts\.mlp\.w2", split_transposed_experts, flatten_transposed_experts),
    Rename(r"(mlp\.experts\.mlp\.w[12])$", r"\1.weight"),
)

NOMIC_EXPERT_KEYS: tuple[SetKeys, ...] = (
    Copied(".moe_every_n_layers", "moe_every_n_layers", required=True),
    Copied(".expert_used_count", "moe_top_k", required=True),
)


def _neo_width(config: Config) -> int:
    """Return NeoBERT's feed-forward width: 2/3 of intermediate_size."""
    return int(2 * config.number("intermediate_size") / 3)


def _set_neo_width(meta: ModelMetadata, config: Json) -> None:
    config["intermediate_size"] = -(-3 * meta.number(".feed_forward_length") // 2)


NEO_KEYS: tuple[SetKeys, ...] = (
    *KEYS,
    Computed(".feed_forward_length", _neo_width, inverse=_set_neo_width),
    Always(".rope.freq_base", 10000.0, "f32"),
    Always(".rope.scaling.type", "none", "text"),
    Copied(".attention.layer_norm_rms_epsilon", "norm_eps", "f32", default=1e-6),
    Always(".pooling_type", 2),
)


def prepare_xlm(config: Config) -> None:
    """Limit the positions of XLM-R; refuse its task adapters, each of which would need its own file."""
    if config.get("lora_adaptations"):
        raise TypeNotSupported(
            f"{config.path}: has adapters (lora_adaptations), which this version does not convert", "QK-E305"
        )
    cut_positions(config)


def label_names(config: Config) -> dict[Any, Any]:
    """Return the labels of a classifier; default labels count as none."""
    labels = config.get("id2label") or {}
    if not isinstance(labels, dict):
        raise FormatError(f"{config.path}: id2label is {short(labels)}, not an object", "QK-E112")
    first = labels.get(0, labels.get("0"))
    return {} if len(labels) == 2 and first == "LABEL_0" else labels


def position_offset(config: Config) -> int:
    """Return the number of the first position, after that of padding."""
    return 0 if config.get("pad_token_id") is None else 1 + config.number("pad_token_id")


def has_experts(config: Config) -> bool:
    """Return whether some layers have experts (Nomic BERT)."""
    return bool(config.get("moe_every_n_layers"))


def _is_unigram(config: Config) -> bool:
    model = (optional_json(config.path.parent / "tokenizer.json") or {}).get("model")
    return isinstance(model, dict) and model.get("type") == "Unigram"


def write_roberta(v: Vocabulary) -> None:
    """Write a BPE or WordPiece vocabulary (RobertaModel)."""
    if v.model_type == "BPE":
        write_bpe(v)
        set_token_types(v)
    else:
        write_wordpiece(v)


def write_jina_bert(v: Vocabulary) -> None:
    """Write BERT's or RoBERTa's vocabulary, depending on tokenizer_config.json (JinaBertV2Model)."""
    name = v.tokenizer_config.get("tokenizer_class")
    if name == "BertTokenizer":
        write_wordpiece(v)
        return
    split = v.json.get("pre_tokenizer") or {}
    if name != "RobertaTokenizer" or split.get("type") == "Whitespace":
        raise FormatError(
            f"{v.folder / 'tokenizer_config.json'}: its tokenizer is "
            f"{name!r}{' and splits at spaces' if name == 'RobertaTokenizer' else ''}; for this class, BertTokenizer "
            "and byte-level RobertaTokenizer are supported",
            "QK-E114",
        )
    write_bpe(v)
    v.keys.u32("tokenizer.ggml.token_type_count", 2)


BERT = Architecture("bert", stored=STORED, rules=(HEAD,), keys=KEYS, vocab=write_wordpiece)

_DISTIL_BERT = replace(
    BERT,
    stored=(Rename(r"^distilbert\.", ""), Drop(r"^vocab_"), *STORED),
    base=DISTIL_BASE,
)

_ROBERTA = replace(
    BERT,
    stored=(Rename(r"^roberta\.", ""), *STORED),
    rules=(POSITIONS, HEAD),
    vocab=write_roberta,
    patch_config=cut_positions,
)

_NOMIC_BERT = replace(BERT, arch="nomic-bert", stored=NOMIC_STORED, vocab=write_nomic, patch_config=prepare_nomic)

_NOMIC_BERT_MOE = replace(
    _NOMIC_BERT,
    arch="nomic-bert-moe",
    rules=(*NOMIC_EXPERTS, HEAD),
    keys=(*KEYS, *NOMIC_EXPERT_KEYS),
)

_JINA_BERT = replace(BERT, arch="jina-bert-v2", vocab=write_jina_bert)

_NEO_BERT = replace(
    BERT,
    arch="neo-bert",
    stored=(Drop(r"^decoder\."), Rename(r"^model\.", ""), *STORED),
    keys=NEO_KEYS,
)

_XLM = replace(_ROBERTA, vocab=write_xlm, patch_config=prepare_xlm)

ARCHITECTURES: dict[str, Architecture] = {
    "BertModel": BERT,
    "CamembertModel": BERT,
    "BertForMaskedLM": BERT,
    "BertForSequenceClassification": BERT,
    "DistilBertModel": _DISTIL_BERT,
    "DistilBertForMaskedLM": _DISTIL_BERT,
    "DistilBertForSequenceClassification": _DISTIL_BERT,
    "RobertaModel": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "NomicBertModel": replace(_NOMIC_BERT, dispatch=lambda config: _NOMIC_BERT_MOE if has_experts(config) else None),
    "JinaBertModel": _JINA_BERT,
    "JinaBertForMaskedLM": _JINA_BERT,
    "NeoBERT": _NEO_BERT,
    "NeoBERTLMHead": _NEO_BERT,
    "NeoBERTForSequenceClassification": _NEO_BERT,
    "XLMRobertaModel": _XLM,
    "XLMRobertaForSequenceClassification": _XLM,
}

_NO_POOLER_NOTE = (
    "GGUF files do not contain the pooling layer (pooler.dense): transformers initializes it randomly; embeddings "
)


_NO_POOLER_NOTE += "do not use it"


def is_wordpiece(meta: ModelMetadata) -> bool:
    """Return whether the vocabulary is WordPiece."""
    return bool(meta.model.get("tokenizer.ggml.model") == "bert")


def is_byte_level(meta: ModelMetadata) -> bool:
    return bool(meta.model.get("tokenizer.ggml.model") == "gpt2")


def is_unigram(meta: ModelMetadata) -> bool:
    return bool(meta.model.get("tokenizer.ggml.model") == "t5")


def has_labels(is_arch: Callable[[ModelMetadata], bool]) -> Callable[[ModelMetadata], bool]:
    return lambda meta: is_arch(meta) and meta.has("cls.output.weight")


def is_distil(meta: ModelMetadata) -> bool:
    """Return whether the file is DistilBERT, which has no token types."""
    return is_wordpiece(meta) and not meta.has("token_types.weight")


def set_label_names(meta: ModelMetadata, config: Json) -> None:
    """Name the labels of a classifier."""
    labels = meta.get(".classifier.output_labels")
    if labels:
        config |= {"id2label": dict(enumerate(labels)), "label2id": {text: i for i, text in enumerate(labels)}}
    config["type_vocab_size"] = meta.model.get("tokenizer.ggml.token_type_count") or 1


def refuse_classifier(meta: ModelMetadata, config: Json) -> None:
    """Refuse BERT's classifiers."""
    if meta.has("cls.output.weight"):
        raise TypeNotSupported(
            f"{meta.path}: a BERT classifier needs pooler.dense, which GGUF files do not contain: the checkpoint "
            "would give other results",
            "QK-E305",
        )


def add_unused_position_count(meta: ModelMetadata, config: Json) -> None:
    """Add the unused positions to max_position_embeddings: those up to the padding id (RoBERTa)."""
    pad = meta.model.get("tokenizer.ggml.padding_token_id")
    config["max_position_embeddings"] += 0 if pad is None else 1 + pad


_BERT_NAMES = (
    "embeddings.word_embeddings embeddings.LayerNorm embeddings.token_type_embeddings embeddings.position_embeddings "
    + add_prefix(
        "encoder.layer.*.",
        "attention.self.query attention.self.key attention.self.value attention.output.dense "
        "attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm",
    )
)


def _set_nomic_names(meta: ModelMetadata, config: Json) -> None:
    """Set Nomic BERT's own names, and those of transformers 5."""
    experts, context = meta.get(".expert_count") is not None, meta.number(".context_length")
    config |= {
        "n_positions": 2048 if context == 512 else 8192,
        "max_trained_positions": 2048,
        "causal": False,
        "prenorm": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "activation_function": "gelu" if experts else "swiglu",
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), experts),
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "hidden_act": "silu",
        "num_attention_heads": config["n_head"],
        "intermediate_size": config["n_inner"],
        "layer_norm_eps": config["layer_norm_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rotary_emb_base"]},
    }
    if is_unigram(meta):
        add_unused_position_count(meta, config)


def _make_unused_biases(meta: ModelMetadata) -> Iterable[Tensor]:
    """Restore the biases of experts, which llama.cpp omits, as zeros."""
    for layer in range(meta.number(".block_count")):
        if f"blk.{layer}.ffn_gate_inp.weight" in meta.model.tensors:
            zeros = Zeros((meta.number(".embedding_length"),))
            yield Tensor(f"encoder.layers.{layer}.mlp.experts.bias", zeros, layer)


def _rename_ungated(config: Config, name: str) -> str:
    """Rename the first matrix of layers without gates."""
    return name.replace(".mlp.fc11.", ".mlp.fc1.") if config.get("activation_function") == "gelu" else name


def _set_jina_names(meta: ModelMetadata, config: Json) -> None:
    """Set ALiBi; refuse models with other layers."""
    if any(meta.has(f"{name}.weight") for name in ("attn_norm_2", "attn_q_norm", "ffn_gate")):
        raise TypeNotSupported(
            f"{meta.path}: this version exports Jina BERT only with the layers of jina-embeddings-v2-base-en (the "
            "models for code have other norms)",
            "QK-E304",
        )
    config |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}


_ROBERTA_CLASS = HfClass(
    "roberta",
    _BERT_NAMES,
    config_setters=(set_label_names, add_unused_position_count),
    note=_NO_POOLER_NOTE,
    matches=is_byte_level,
)

_ROBERTA_LABELS_CLASS = replace(
    _ROBERTA_CLASS,
    names=f"{_ROBERTA_CLASS.names} classifier.dense",
    matches=has_labels(is_byte_level),
    renames=((r"^(?!classifier)", "roberta."), (r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1")),
    note="",
)

_DISTIL_CLASS = HfClass(
    "distilbert",
    "embeddings.word_embeddings embeddings.LayerNorm embeddings.position_embeddings "
    + add_prefix(
        "transformer.layer.*.",
        "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2 "
        "output_layer_norm",
    ),
    keys={
        ".block_count": "n_layers",
        ".feed_forward_length": "hidden_dim",
        ".attention.layer_norm_epsilon": "",
    },
    config_setters=(set_label_names,),
    matches=is_distil,
)

CLASSES: dict[str, HfClass] = {
    "DistilBertForSequenceClassification": replace(
        _DISTIL_CLASS,
        names=f"{_DISTIL_CLASS.names} pre_classifier",
        matches=has_labels(is_distil),
        renames=((r"^(?!(pre_)?classifier)", "distilbert."),),
    ),
    "DistilBertModel": _DISTIL_CLASS,
    "BertModel": HfClass(
        "bert",
        _BERT_NAMES,
        config_setters=(set_label_names, refuse_classifier),
        note=_NO_POOLER_NOTE,
        matches=is_wordpiece,
    ),
    "RobertaForSequenceClassification": _ROBERTA_LABELS_CLASS,
    "XLMRobertaForSequenceClassification": replace(
        _ROBERTA_LABELS_CLASS, model_type="xlm-roberta", matches=has_labels(is_unigram)
    ),
    "XLMRobertaModel": replace(_ROBERTA_CLASS, model_type="xlm-roberta", matches=is_unigram),
    "RobertaModel": _ROBERTA_CLASS,
    "NomicBertModel": HfClass(
        "nomic_bert",
        "embeddings.word_embeddings embeddings.token_type_embeddings emb_ln "
        + add_prefix(
            "encoder.layers.*.",
            "attn.Wqkv attn.out_proj norm1 norm2 mlp.fc11 mlp.fc12 mlp.fc2 mlp.router.layer mlp.experts.mlp.w1 "
            "mlp.experts.mlp.w2",
        ),
        keys={
            ".block_count": "n_layer",
            ".embedding_length": "n_embd",
            ".feed_forward_length": "n_inner",
            ".attention.head_count": "n_head",
            ".rope.freq_base": "rotary_emb_base",
            ".expert_count": "num_experts",
            ".attention.layer_norm_epsilon": "layer_norm_epsilon",
            ".moe_every_n_layers": "moe_every_n_layers",
            ".expert_used_count": "moe_top_k",
        },
        config_setters=(set_label_names, _set_nomic_names),
        synthetic=_make_unused_biases,
        rename_last=_rename_ungated,
        archs=("nomic-bert-moe",),
    ),
    "JinaBertModel": HfClass(
        "bert",
        "embeddings.word_embeddings embeddings.LayerNorm embeddings.token_type_embeddings "
        + add_prefix(
            "encoder.layer.*.",
            "attention.self.query attention.self.key attention.self.value attention.output.dense "
            "attention.output.LayerNorm mlp.gated_layers mlp.wo mlp.layernorm",
        ),
        config_setters=(set_label_names, _set_jina_names),
        note=_NO_POOLER_NOTE,
    ),
    "NeoBERT": HfClass(
        "neobert",
        "encoder layer_norm " + add_prefix("transformer_encoder.*.", "qkv wo ffn.w12 ffn.w3 attention_norm ffn_norm"),
        config_setters=(set_label_names,),
    ),
}
