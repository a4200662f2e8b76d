"""The table of checkpoints, continued: encoders, which make embeddings (quantkit/checkpoint/models/bert.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from checkpoint_table_decoders import named, of, written

from checkpoint_table import Json, bpe, spm

_KINDS = ("unk", "sep", "pad", "cls", "mask")


def wordpiece(cls: str = "BertTokenizer", config: Json | None = None, **more: Any) -> Json:
    """Return a WordPiece vocabulary."""
    given = {"tokenizer_class": cls} | {f"{kind}_token": f"[{kind.upper()}]" for kind in _KINDS} | (config or {})
    return {"kind": "wordpiece", "pre": "jina-v2-en", "config": given} | more


_WORDS = wordpiece(config={"do_lower_case": True})
_BYTES = bpe("roberta-bpe", "</s>", "<s>", "<unk>", "<pad>", "<mask>", cls="RobertaTokenizer", bos="<s>", unk="<unk>",
             pad="<pad>", split=False,
             config={"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"})  # fmt: skip
_MEAN: Json = {
    "1_Pooling": {"config.json": '{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}'},
    "modules.json": '[{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},'
    ' {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]\n',
}
_CLS = _MEAN | {"1_Pooling": {"config.json": '{"pooling_mode": "cls"}'}}
_DISTIL = {"dim": 64, "hidden_dim": 128, "n_layers": 3, "n_heads": 4}
_MODERN = {"pad_token_id": 579, "bos_token_id": 577, "eos_token_id": 576, "cls_token_id": 577, "sep_token_id": 576}
_NOMIC: Json = {
    **{"model_type": "nomic_bert", "n_positions": 8192, "n_embd": 64, "n_inner": 128, "n_layer": 3, "n_head": 4},
    **{"activation_function": "swiglu", "causal": False, "qkv_proj_bias": False, "mlp_fc1_bias": False},
    **{"mlp_fc2_bias": False, "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False},
    **{"rotary_emb_scale_base": None, "rotary_emb_base": 1000, "layer_norm_epsilon": 1e-12, "type_vocab_size": 2},
    **{"max_trained_positions": 2048},
}
_EMBEDDINGS = "embeddings.word_embeddings:640x64 embeddings.token_type_embeddings:2x64"
_NORM = " {0}:64 {0}.bias!:64"
_NOMIC_LAYER = " attn.Wqkv:192x64 attn.out_proj:64x64" + _NORM.format("norm1") + _NORM.format("norm2")
_GLU = " mlp.fc11:128x64 mlp.fc12:128x64 mlp.fc2:64x128"
_XLM: Json = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_UNIGRAM: Json = {
    "kind": "unigram",
    "config": {"tokenizer_class": "XLMRobertaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>",
               "cls_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
               "clean_up_tokenization_spaces": True},
}  # fmt: skip
_T5: Json = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
_T5_PIECES = spm("T5Tokenizer", ("<pad>", "</s>", "<unk>"), unigram=True, file="spiece.model",
                 config={"extra_ids": 0})  # fmt: skip
_START = {"decoder_start_token_id": 0}

#: Classes whose keys have fewer heads than their queries.
_GROUPED = {"eurobert"}

_ROWS = (
    named("bert", "BertModel", {}, version=4, vocab=_WORDS, files=_MEAN),
    named("bert-masked", "BertForMaskedLM", {}, version=4, files={"README.md": "---\ntags: [test]\n---\n"},
          vocab=wordpiece(list=True, config={"do_lower_case": False, "strip_accents": False})),
    named("bert-classifier", "BertForSequenceClassification", {"id2label": {0: "no", 1: "perhaps", 2: "yes"}},
          version=4, vocab=wordpiece(special=["[E1]"], user=["<url>", "##x"])),
    named("distilbert", "DistilBertModel", _DISTIL, version=4, vocab=wordpiece("DistilBertTokenizer"), files=_CLS),
    named("distilbert-classifier", "DistilBertForSequenceClassification",
          _DISTIL | {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}}, version=4, vocab=wordpiece("DistilBertTokenizer")),
    named("roberta", "RobertaModel", {"max_position_embeddings": 514}, version=4, vocab=_BYTES, files=_MEAN),
    named("roberta-classifier", "RobertaForSequenceClassification", {"num_labels": 1, "max_position_embeddings": 66},
          version=4, vocab=_BYTES),
    written("nomic-bert", "NomicBertModel", _NOMIC, of("", _EMBEDDINGS + _NORM.format("emb_ln"))
            | of("encoder.layers.{0-2}.", _NOMIC_LAYER + _GLU), vocab=_WORDS, files=_MEAN),
    written("nomic-bert-moe", "NomicBertModel", _NOMIC | {
        "n_positions": 2048, "activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True,
        "mlp_fc2_bias": True, "moe_every_n_layers": 2, "moe_top_k": 2, "num_experts": 4},
        of("", _EMBEDDINGS + _NORM.format("emb_ln"))
        | of("encoder.layers.{0-2}.", _NOMIC_LAYER + " attn.Wqkv.bias!:192 attn.out_proj.bias!:64")
        | of("encoder.layers.{0,2}.", " mlp.fc1:128x64 mlp.fc1.bias!:128 mlp.fc2:64x128 mlp.fc2.bias!:64")
        | of("encoder.layers.1.", " mlp.router.layer:4x64 mlp.experts.mlp.w1!:512x64 mlp.experts.mlp.w2!:512x64"
             " mlp.experts.bias!:64"), vocab=_WORDS, files=_MEAN),
    written("jina-bert", "JinaBertForMaskedLM", {"model_type": "bert", "position_embedding_type": "alibi"},
            of("bert.", _EMBEDDINGS + _NORM.format("embeddings.LayerNorm"))
            | of("bert.encoder.layer.{0-2}.", "attention.self.query:64x64 attention.self.query.bias!:64"
                 " attention.self.key:64x64 attention.self.key.bias!:64 attention.self.value:64x64"
                 " attention.self.value.bias!:64 attention.output.dense:64x64 attention.output.dense.bias!:64"
                 + _NORM.format("attention.output.LayerNorm") + _NORM.format("mlp.layernorm")
                 + " mlp.gated_layers:256x64 mlp.wo:64x128 mlp.wo.bias!:64")
            | of("", "cls.predictions.transform.dense:64x64"), vocab=_WORDS, files=_MEAN),
    written("neobert", "NeoBERT", {
        "model_type": "neobert", "norm_eps": 1e-5, "vocab_size": 640, "intermediate_size": 192},
        of("model.", "encoder:640x64 layer_norm:64")
        | of("model.transformer_encoder.{0-2}.", "qkv:192x64 wo:64x64 ffn.w12:256x64 ffn.w3:64x128 attention_norm:64"
             " ffn_norm:64"), vocab=_WORDS),
    named("modernbert", "ModernBertModel", _MODERN | {"local_attention": 64, "reference_compile": False}, version=4,
          config={"layer_norm_eps": 1e-5}, vocab=_BYTES | {"pre": "modern-bert"}, files=_CLS),
    named("modernbert-classifier", "ModernBertForSequenceClassification",
          _MODERN | {"id2label": {0: "a", 1: "b", 2: "c"}, "reference_compile": False, "classifier_pooling": "mean"},
          version=4, vocab=_BYTES | {"pre": "mmbert", "user": ["  ", "   "]}),
    written("eurobert", "EuroBertModel", {"model_type": "eurobert", "head_dim": 16, "pad_token_id": 3},
            of("", "embed_tokens:640x64 norm:64") | of("layers.{0-2}.", "input_layernorm:64 mlp.gate_proj:128x64"
            " post_attention_layernorm:64 self_attn.q_proj:64x64 self_attn.k_proj:32x64 self_attn.v_proj:32x64"
            " self_attn.o_proj:64x64 mlp.up_proj:128x64 mlp.down_proj:64x128"), files=_MEAN),
    named("xlm-roberta", "XLMRobertaModel", _XLM, version=4, vocab=spm("XLMRobertaTokenizer", unigram=True,
          file="sentencepiece.bpe.model", config={"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}),
          files=_CLS),
    named("xlm-roberta-classifier", "XLMRobertaForSequenceClassification", _XLM | {"num_labels": 1}, version=4,
          vocab=_UNIGRAM),
    written("nomic-bert-xlm", "NomicBertModel", _NOMIC | {
        "n_positions": 2048, "activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True,
        "mlp_fc2_bias": True, "moe_every_n_layers": 2, "moe_top_k": 2, "num_experts": 4, "pad_token_id": 1},
        of("", _EMBEDDINGS + _NORM.format("emb_ln"))
        | of("encoder.layers.{0-2}.", _NOMIC_LAYER + " attn.Wqkv.bias!:192 attn.out_proj.bias!:64")
        | of("encoder.layers.{0,2}.", " mlp.fc1:128x64 mlp.fc1.bias!:128 mlp.fc2:64x128 mlp.fc2.bias!:64")
        | of("encoder.layers.1.", " mlp.router.layer:4x64 mlp.experts.mlp.w1!:512x64 mlp.experts.mlp.w2!:512x64"
             " mlp.experts.bias!:64"), vocab=_UNIGRAM, files=_MEAN),
    named("camembert", "CamembertModel", _XLM, version=4, vocab=_UNIGRAM | {"pre": "jina-v2-en"}),
    named("t5", "T5ForConditionalGeneration", _T5, version=4, vocab=_T5_PIECES, config=_START),
    named("mt5", "MT5ForConditionalGeneration", _T5 | {"tie_word_embeddings": False}, version=4, shards=2,
          vocab=_T5_PIECES | {"file": "tokenizer.model", "added": ["<extra_id_0>"]}, config=_START),
    named("umt5", "UMT5ForConditionalGeneration", _T5 | {"feed_forward_proj": "gated-gelu"}, version=4,
          vocab=_T5_PIECES, config=_START | {"n_positions": 512}),
    named("t5-encoder", "T5EncoderModel", _T5, version=4, vocab=_T5_PIECES, files=_MEAN),
)  # fmt: skip

#: llama.cpp reads the number of key heads from the file, also of classes whose heads all have keys; Nomic's base of
#: rope has a name of its own.
ENCODERS = tuple(
    row if row.name in _GROUPED else replace(row, drop=("num_key_value_heads", *["rope_theta"] * ("nomic" in row.name)))
    for row in _ROWS
)
