"""InternLM 2 and 3; the encoders of InternVL.

Facts of llama.cpp b11434, conversion/internlm.py, conversion/internvl.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json, optional_json
from quantkit.checkpoint.export.clip_metadata import ClipMetadata, without_null
from quantkit.checkpoint.expressions import TYPE_F32, concatenate, permute_heads, take
from quantkit.checkpoint.hf_encoders import (
    REMOTE_NOTE,
    USUAL_COUNTS,
    HfEncoders,
    add_token_ids,
    hidden_act,
    image_values,
    of_text_class,
)
from quantkit.checkpoint.mmproj import (
    Activation,
    Key,
    Mmproj,
    MmprojConfig,
    inverse_scale,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.models import llama, qwen
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Rename, Split, restore_rows
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.checkpoint.vocab.sentencepiece import Piece, read_model, sentencepiece_tokens, set_pieces
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import CONTROL, UNUSED, USER_DEFINED, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


@dataclass(frozen=True)
class SplitGroupedHeads(Rule):
    """Separate query heads, which are stored before the key and value that they share (InternLM2Model)."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith(".attention.wqkv.weight"):
            return None
        config, x = context.config, tensor.x
        heads, keys = config.number("num_attention_heads"), config.number("num_key_value_heads")
        per_group = heads // max(1, keys) + 2
        width = config.number("hidden_size") // max(1, heads)
        if not keys or heads % keys or width % 2 or x.shape[0] != keys * per_group * width:
            raise context.fail(
                tensor, f"its shape {list(x.shape)} does not match {heads} heads of {width}, {keys} of keys"
            )
        starts = [group * per_group * width for group in range(keys)]
        q = take(x, 0, *(range(start, start + (per_group - 2) * width) for start in starts))
        k, v = (
            take(x, 0, *(range(start + place * width, start + (place + 1) * width) for start in starts))
            for place in (per_group - 2, per_group - 1)
        )
        parts = (("q", permute_heads(q, heads)), ("k", permute_heads(k, keys)), ("v", v))
        return [replace(tensor, name=f"blk.{tensor.layer}.attn_{letter}.weight", x=part) for letter, part in parts]

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Store queries before the key and value that they share."""
        match = re.fullmatch(r"blk\.(\d+)\.attn_([qkv])\.weight", tensor.name)
        if match is None:
            return None
        name = f"model.layers.{match[1]}.attention.wqkv.weight"
        parts = context.gather(self, name, match[2], tensor, 3)
        if parts is None:
            return ()
        heads, keys = context.config.number("num_attention_heads"), context.config.number("num_key_value_heads")
        width, heads_per_key = context.config.number("hidden_size") // max(1, heads), heads // max(1, keys)
        rows = [parts[part].x.shape[0] for part in "qkv"]
        if not keys or heads % keys or rows != [heads * width, keys * width, keys * width]:
            raise context.fail(tensor, f"{rows} rows do not match {heads} heads of {width}, {keys} of keys")
        x = concatenate([restore_rows(parts["q"], heads), restore_rows(parts["k"], keys), parts["v"].x])
        starts = [(group * heads_per_key, heads + group, heads + keys + group) for group in range(keys)]
        runs = [(q * width, (q + heads_per_key) * width, k * width, v * width) for q, k, v in starts]
        order = [r for q, end, k, v in runs for r in (range(q, end), range(k, k + width), range(v, v + width))]
        return (replace(tensor, name=name, x=take(x, 0, *order)),)


def write_internlm3(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary in which the end of a turn ends a text (InternLM3Model)."""
    tokens = sentencepiece_tokens(v)
    set_pieces(v, tokens)
    special = special_tokens(v.folder, n_tokens=len(tokens))
    if "add_prefix_space" in v.tokenizer_config:
        v.keys.flag("tokenizer.ggml.add_space_prefix", v.tokenizer_config["add_prefix_space"])
    for number, entry in v.decoder_entries:
        if entry.get("special") and entry["content"] == "<|im_end|>" and "eos" in special.ids:
            special.ids["eos"] = number
    special.write(v.keys)


#: The end of a turn, which ends a text of chat models.
_TURN = "<|im_end|>"


def write_internlm2(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary whose added tokens replace pieces, or follow them (InternLM2Model)."""
    path = v.folder / "tokenizer.model"
    v.source = f"quantkit does not run SentencePiece, which {path.name} needs"
    model = read_model(path)
    size = v.config.get("vocab_size", len(model.pieces))
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= len(model.pieces):
        raise FormatError(
            f"{path}: has {len(model.pieces)} tokens, but vocab_size of config.json is {short(size)}", "QK-E114"
        )
    tokens = [_without_zero(piece) for piece in model.pieces[:size]]
    added = optional_json(v.folder / "added_tokens.json") or {}
    tokens += [Piece(text, -1000.0, USER_DEFINED) for text in added]
    end = None
    for number, text, special in _list_added(v):
        if number >= len(tokens):
            raise FormatError(
                f"{v.folder}: the added token {number} is outside the {len(tokens)} tokens of {path.name}", "QK-E114"
            )
        end = number if text == _TURN else end
        tokens[number] = Piece(text, -1000.0, CONTROL if special else USER_DEFINED)
    set_pieces(v, tokens)
    v.keys.flag("tokenizer.ggml.add_space_prefix", model.adds_prefix)
    special_of_all = special_tokens(v.folder, n_tokens=len(tokens))
    if end is not None:
        special_of_all.ids["eos"] = end
    special_of_all.write(v.keys)


def _without_zero(piece: Piece) -> Piece:
    """Return a piece with NUL replaced, which C cannot read; [UNUSED..] pieces become unused."""
    text = "\U0001f409" if piece.text == "\0" else piece.text
    return Piece(text, piece.score, UNUSED if piece.text.startswith("[UNUSED") else piece.type)


def _list_added(v: Vocabulary) -> Iterator[tuple[int, str, bool]]:
    for number, entry in v.decoder_entries:
        yield number, entry["content"], bool(entry.get("special"))
    if v.has("tokenizer.json"):
        for token in v.added_in_json:
            yield token.number, token.text, token.special


ARCHITECTURES: dict[str, Architecture] = {
    "InternLM3ForCausalLM": Architecture(
        "llama", rules=llama.ROPE_PERMUTED, keys=llama.LLAMA_KEYS, vocab=write_internlm3
    ),
    "InternLM2ForCausalLM": Architecture("internlm2", rules=(SplitGroupedHeads(),), vocab=write_internlm2),
}

CLASSES: dict[str, HfClass] = {
    "InternLM2ForCausalLM": HfClass(
        "internlm2",
        "model.tok_embeddings output "
        + add_prefix(LAYER, "attention_norm ffn_norm attention.wo feed_forward.w1 feed_forward.w2 feed_forward.w3"),
        kinds={f"*attn_{letter}": f"blk.*.attn_{letter}" for letter in "qkv"},
        defaults={"bias": False},
    ),
}


# --- Encoders of InternVL and Intern-S1 ------------------------------------------------------------------------------


def _use_first_size(config: MmprojConfig) -> None:
    """Use the first of sizes that are lists."""
    vision = config.vision.values
    for name in ("image_size", "patch_size"):
        if isinstance(vision.get(name), list):
            vision[name] = vision[name][0]


def _is_native(config: Config) -> bool:
    """Return whether the names are those of transformers, not those of the remote code (InternVLChatModel)."""
    return "llm_config" not in config.outer


@dataclass(frozen=True)
class _NameWeights(Rule):
    """Names parameters that are no module's as weights: the scales of layers, the embeddings of positions."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name.endswith(".weight") or not re.search(r"\.ls|\.lambda_|position_embedding", tensor.name):
            return None
        return (replace(tensor, name=f"{tensor.name}.weight"),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        name = re.sub(r"(\.ls\d|\.lambda_\d|position_embeddings?)\.weight$", r"\1", tensor.name)
        return None if name == tensor.name else (replace(tensor, name=name),)


def _tile_count(end: str, name: str) -> Key:
    """Return the row of a number of tiles, which older models lack."""

    def compute(config: MmprojConfig) -> int | None:
        count = config.model.number(name) if name in config.model else 0
        return count or None

    return Key(f".vision.preproc_{end}_tiles", compute)


MMPROJ: dict[str, Mmproj] = {
    "InternVisionModel": Mmproj(
        (
            projector("internvl"),
            layer_norm_epsilon("layer_norm_eps"),
            Activation(),
            inverse_scale("downsample_ratio", section="model"),
            _tile_count("min", "min_dynamic_patch"),
            _tile_count("max", "max_dynamic_patch"),
        ),
        tensors=r"^(vision_model|mlp|model\.vision_tower|model\.multi_modal_projector)",
        rules=(
            Rename(r"^model\.multi_modal_projector\.layer_norm\.", "mlp1.0.", when=_is_native),
            Rename(r"^model\.multi_modal_projector\.linear_1\.", "mlp1.1.", when=_is_native),
            Rename(r"^model\.multi_modal_projector\.linear_2\.", "mlp1.3.", when=_is_native),
            Rename(r"^vision_model", "vision_tower.vision_model"),
            _NameWeights(),
            Split(r"attn\.qkv\.", ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")),
        ),
        forced=((".position_embd.", TYPE_F32),),
        patch_config=_use_first_size,
    ),
}


# --- export ----------------------------------------------------------------------------------------------------------


def _set_internvl(meta: ClipMetadata, config: Json) -> None:
    """Describe InternViT, by the names of transformers and of the remote code."""
    scale, biased = meta.get(".vision.projector.scale_factor") or 2, meta.has("v.blk.0.attn_q.bias")
    normed = meta.has("v.blk.0.attn_q_norm.weight")
    vision = meta.counts(USUAL_COUNTS) | {
        "architectures": ["InternVisionModel"],
        "model_type": "internvl_vision",
        "hidden_act": hidden_act(meta),
        "layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
        "norm_type": "layer_norm" if meta.has("v.blk.0.ln1.bias") else "rms_norm",
        "num_channels": meta.shape("v.patch_embd.weight")[1],
    }
    vision |= {"attention_bias": biased, "qkv_bias": biased, "use_qk_norm": normed, "qk_normalization": normed}
    config |= {"vision_config": vision, "downsample_ratio": 1 / scale, "vision_feature_layer": -1, "select_layer": -1}
    tiles = {f"{end}_dynamic_patch": meta.get(f".vision.preproc_{end}_tiles") for end in ("min", "max")}
    config |= without_null(tiles)
    add_token_ids(meta, config, image_token_id="<IMG_CONTEXT>")


def _set_internvl_chat(meta: ClipMetadata, config: Json) -> None:
    _set_internvl(meta, config)
    config["vision_config"]["model_type"] = "intern_vit_6b"


def _internvl_preprocessor(meta: ClipMetadata) -> Json:
    size = meta.number(".vision.image_size")
    return image_values(meta, "GotOcr2ImageProcessorFast") | {"size": {"height": size, "width": size}}


def _internvl_chat_preprocessor(meta: ClipMetadata) -> Json:
    size = meta.number(".vision.image_size")
    return image_values(meta, "CLIPFeatureExtractor") | {"size": size, "crop_size": size}


_MLP_KINDS = {f"mm.model.mlp.{i}": f"mlp1.{i}" for i in (0, 1, 3)}
_REMOTE_NOTE = f"InternVLChatModel {REMOTE_NOTE}"
#: The classes of text models, and the ends of the names of their rows.
_TEXTS = {
    "Qwen2ForCausalLM": (qwen.CLASSES["Qwen2ForCausalLM"], ""),
    "Qwen3ForCausalLM": (qwen.CLASSES["Qwen3ForCausalLM"], "-Qwen3"),
    "Qwen3MoeForCausalLM": (qwen.CLASSES["Qwen3MoeForCausalLM"], "-Qwen3Moe"),
}
HF_ENCODERS: dict[str, HfEncoders] = {
    f"InternVLForConditionalGeneration{end}": HfEncoders(
        "internvl",
        of_text_class(text, "internvl", "model.language_model."),
        "model.vision_tower.embeddings.patch_embeddings model.vision_tower.embeddings.position_embeddings "
        "model.vision_tower.embeddings. model.vision_tower.encoder.layer.",
        _set_internvl,
        _internvl_preprocessor,
        _MLP_KINDS,
        text_class=name,
        architecture="InternVLForConditionalGeneration",
    )
    for name, (text, end) in _TEXTS.items()
} | {
    f"InternVLChatModel{end}": HfEncoders(
        "internvl",
        of_text_class(text, "internvl_chat", text_key="llm_config", note=_REMOTE_NOTE),
        "vision_tower.vision_model.embeddings. vision_tower.vision_model.encoder.layers.*.attn.proj "
        "vision_tower.vision_model.encoder.layers.*.norm vision_tower.vision_model.encoder.layers.",
        _set_internvl_chat,
        _internvl_chat_preprocessor,
        _MLP_KINDS,
        text_class=name,
        architecture="InternVLChatModel",
    )
    for name, (text, end) in (
        _TEXTS | {"InternLM2ForCausalLM": (CLASSES["InternLM2ForCausalLM"], "-InternLM2")}
    ).items()
}
