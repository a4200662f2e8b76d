"""Muse Glimmer: text model, draft model and vision encoder.

Facts of llama.cpp b11434, conversion/muse_glimmer.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.draft import target_of
from quantkit.checkpoint.encoder_rules import NameInFile
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Constant, Expression, Shaped, Sum, take
from quantkit.checkpoint.key_rows import WINDOW, WINDOW_PATTERN, Computed, Copied, SetKeys, Where
from quantkit.checkpoint.mmproj import EncoderKey, Mmproj, MmprojConfig, layer_norm_epsilon, projector
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Transform, minus_one, permute_rows, plus_one
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short


@dataclass(frozen=True)
class AddQueryNorms(Rule):
    """Add norm weights for queries and keys, whose norms have no weights but scale queries."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        stem, separator, tail = tensor.name.partition(".self_attn.q_proj.")
        if not separator or tail != "weight" or tensor.layer is None:
            return None
        config, rows = context.config, tensor.x.shape[0]
        width, scale = config.number("head_dim"), float(config["qk_scale_factor"])
        if width < 1 or rows % width:
            raise FormatError(
                f"{config.path}: head_dim is {short(width)}, which does not divide the {rows} rows of {tensor.name}",
                "QK-E112",
            )
        norms = (("q", scale), ("k", 1.0))
        return (
            *(
                replace(tensor, name=f"{stem}.self_attn.{letter}_norm.weight", x=Constant((value,) * width))
                for letter, value in norms
            ),
            tensor,
        )

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Drop norms that only scale: config.json has their factor."""
        return () if tensor.name.endswith((".self_attn.q_norm.weight", ".self_attn.k_norm.weight")) else None


MUSE_RULES = (Transform(r"layernorm\.weight$", plus_one, minus_one), AddQueryNorms())


MUSE_KEYS: tuple[SetKeys, ...] = (
    Copied(".final_logit_softcapping", "final_logit_softcapping", "f32", required=True),
    Copied(".logit_scale", "output_multiplier", "f32", required=True),
    WINDOW,
    WINDOW_PATTERN,
)


def write_muse(v: Vocabulary) -> None:
    """Write a BPE vocabulary with the end of a turn (MuseGlimmerModel)."""
    write_bpe(v)
    if (end := next((number for number, text in v.by_id.items() if text == "<|eot|>"), None)) is not None:
        v.keys.u32("tokenizer.ggml.eot_token_id", end)


# --- its draft model, DFlash -----------------------------------------------------------------------------------------


def _has_window(config: Config) -> bool:
    return bool(config.get("sliding_window") and config.get("layer_types"))


DRAFT_KEYS: tuple[SetKeys, ...] = (
    Copied(".block_size", "block_size", required=True),
    Computed(".target_layers", lambda config: [layer + 1 for layer in config["target_layer_ids"]], "array"),
    Where(_has_window, (WINDOW, WINDOW_PATTERN)),
)


def write_draft_vocab(v: Vocabulary) -> None:
    """Write the target's vocabulary, and the token of masks (MuseGlimmerAssistantModel)."""
    target_of(v.config).write_vocab(v)
    if (mask := v.config.get("mask_token_id")) is not None:
        v.keys.u32("tokenizer.ggml.mask_token_id", mask)


ARCHITECTURES: dict[str, Architecture] = {
    "MuseGlimmerForConditionalGeneration": Architecture(
        "muse-glimmer", rules=(*llama.ROPE_PERMUTED, *MUSE_RULES), keys=MUSE_KEYS, vocab=write_muse
    ),
    "MuseGlimmerAssistantModel": Architecture("dflash", keys=DRAFT_KEYS, vocab=write_draft_vocab, draft=True),
}


def _set_query_scale(meta: ModelMetadata, config: Json) -> None:
    """Set the factor of queries; refuse norms that do more than scale."""
    factors: dict[str, set[float]] = {"q": {1.0}, "k": {1.0}}
    for letter in factors:
        names = [name for name in meta.model.tensors if name.endswith(f".attn_{letter}_norm.weight")]
        factors[letter] = {value for name in names for value in meta.values(name)} or {1.0}
    if len(factors["q"]) > 1 or factors["k"] != {1.0}:
        raise TypeNotSupported(
            f"{meta.path}: config.json of this class can only express norms that scale all queries by one number",
            "QK-E305",
        )
    config["qk_scale_factor"] = factors["q"].pop()


CLASSES: dict[str, HfClass] = {
    "MuseGlimmerForConditionalGeneration": HfClass(
        "muse_glimmer_text",
        add_prefix(
            LAYER, "self_attn.gate_proj post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"
        ),
        config_setters=(
            _set_query_scale,
            config_values.AddTower(
                {"num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
            ),
        ),
        renames=((r"^model\.", "model.language_model."),),
        outer_type="muse_glimmer",
    ),
}


# --- The vision encoder ----------------------------------------------------------------------------------------------


def _patch_vision(config: MmprojConfig) -> None:
    """Derive the nominal size of images, which have any."""
    vision = config.vision
    vision.values["image_size"] = (
        vision.number("pos_emb_height") * vision.number("patch_size") * vision.number("merge_size")
    )


def _permute_heads(tensor: Tensor, context: Context) -> Expression:
    assert isinstance(context.config, MmprojConfig)
    return permute_rows(tensor, context.config.vision.number("num_attention_heads"))


def _sum_frames(tensor: Tensor, context: Context) -> Expression:
    """Return the sum of convolutions over equal frames, [out, channels, height, width]."""
    assert isinstance(context.config, MmprojConfig)
    vision = context.config.vision
    frames, patch, out = vision.number("patch_temporal"), vision.number("patch_size"), tensor.x.shape[0]
    x = Shaped(tensor.x, (out, frames, 3, patch, patch))
    return Sum(tuple(Shaped(take(x, 1, range(i, i + 1)), (out, 3, patch, patch)) for i in range(frames)))


MMPROJ: dict[str, Mmproj] = {
    "MuseGlimmerForConditionalGeneration": Mmproj(
        (
            projector("muse-glimmer"),
            layer_norm_epsilon("layer_norm_eps"),
            EncoderKey(".vision.spatial_merge_size", "merge_size"),
        ),
        tensors=r"^model\.vision_(tower|adapter|projection)\.",
        rules=(
            Transform(r"\.attn\.[qk]_proj\.", _permute_heads, None),
            Transform(r"patch_embedder\.patch_embedding\.weight$", _sum_frames, None),
            NameInFile(r"^model\.vision_adapter\.fc1\.", "mm.0."),
            NameInFile(r"^model\.vision_adapter\.fc2\.", "mm.1."),
            NameInFile(r"^model\.vision_projection\.", "mm.2."),
        ),
        patch_config=_patch_vision,
    ),
}
