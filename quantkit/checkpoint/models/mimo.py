"""MiMo V2, text model and encoders.

Facts of llama.cpp b11434, conversion/mimo.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.encoder_rules import (
    ForceType,
    NameInFile,
    SplitFrames,
    StackNumbered,
    add_axes,
    part_tensors,
    read_part,
)
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import TYPE_F32, Expression, Stored, Zeros, concatenate, stack
from quantkit.checkpoint.key_rows import WINDOW, Copied, KeyGroup, SetKeys, rotary_width
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.mmproj import (
    PIXELS,
    USE_SILU,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.nextn import subtract_nextn_layers
from quantkit.checkpoint.row import LAYER, Architecture, HfClass
from quantkit.checkpoint.rules import STACK_GATE_FIRST, Rename, Transform
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor, layer_of
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short

STORED = (Rename(r"(attention_sink(?!.*\.weight$).*)$", r"\1.weight"),)
#: Prediction layers (MTP) of all releases; their configurations lack the number.
_MTP = 3


def layers_with_mtp(config: Config) -> int:
    """Return the number of layers, including prediction layers (MTP)."""
    return config.layers + _MTP


@dataclass(frozen=True)
class RenameMtpLayers(Rule):
    """Rename mtp.* to layers after the last."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        before, separator, name = tensor.name.partition("model.mtp.layers.")
        if before or not separator:
            return None
        number, _, tail = name.partition(".")
        if not number.isdecimal() or int(number) >= _MTP:
            raise context.fail(tensor, f"expected {_MTP} prediction layers (MTP)")
        return (replace(tensor, name=f"model.layers.{context.config.layers + int(number)}.{tail}"),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", tensor.name)
        number = -1 if match is None else int(match[1]) - context.config.layers
        return None if match is None or number < 0 else (replace(tensor, name=f"model.mtp.layers.{number}.{match[2]}"),)


def refuse_sharded(config: Config, names: Collection[str]) -> None:
    """Refuse tensors stored in parts for several devices, with scales per part, which the generic rules misread."""
    quantization = config.get("quantization_config") or {}
    if any(name.endswith("qkv_proj.weight_scale_inv") for name in names):
        raise TypeNotSupported(f"{config.path}: float8 qkv_proj split over several devices is not supported", "QK-E305")
    if isinstance(quantization, dict) and quantization.get("store_dtype") == "mxfp4":
        raise TypeNotSupported(
            f"{config.path}: MXFP4 experts of this model are not supported by this version", "QK-E305"
        )


def refuse_settings(keys: Keys, config: Config) -> None:
    """Refuse sliding-window layers with heads of another width or number, and unknown routers."""
    for name in ("head_dim", "num_attention_heads", "v_head_dim"):
        if config[f"swa_{name}"] != config[name]:
            raise FormatError(f"{config.path}: swa_{name} differs from {name}", "QK-E112")
    if config["topk_method"] != "noaux_tc":
        raise FormatError(f"{config.path}: topk_method is not noaux_tc", "QK-E305")


def _set_layers(keys: Keys, config: Config) -> None:
    slides = [*config["hybrid_layer_pattern"], *[1] * _MTP][: keys.layers]
    full, sliding = config["num_key_value_heads"], config["swa_num_key_value_heads"]
    keys.array(".attention.head_count_kv", [sliding if slide == 1 else full for slide in slides])
    WINDOW(keys, config)
    keys.array(".attention.sliding_window_pattern", slides)


def _set_nextn(keys: Keys, config: Config) -> None:
    if keys.layers > config.layers:
        keys.u32(".nextn_predict_layers", _MTP)


KEYS: tuple[SetKeys, ...] = (
    refuse_settings,
    _set_layers,
    Copied(".attention.value_length", "v_head_dim", required=True),
    Copied(".expert_count", "n_routed_experts", required=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    rotary_width(None, lambda config: config.number("head_dim")),
    Copied(".attention.layer_norm_rms_epsilon", "layernorm_epsilon", "f32", default=1e-5),
    Copied(".attention.value_scale", "attention_value_scale", "f32"),
    KeyGroup(_set_nextn, subtract_nextn_layers),
)

_MIMO_2 = Architecture(
    "mimo2",
    stored=(*STORED, RenameMtpLayers()),
    rules=(STACK_GATE_FIRST,),
    keys=KEYS,
    layers=layers_with_mtp,
    inspect_tensors=refuse_sharded,
    nextn=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "MiMoV2FlashForCausalLM": _MIMO_2,
    "MiMoV2ForCausalLM": _MIMO_2,
}


def set_hybrid_windows(meta: ModelMetadata, config: Json) -> None:
    """Set heads of layers with and without a window (MiMo V2)."""
    slides = (meta.flags(".attention.sliding_window_pattern") or [])[: config["num_hidden_layers"]]
    heads = config["num_key_value_heads"]
    of_kind = dict(zip(slides, heads, strict=False)) if isinstance(heads, list) else {}
    kv_heads = {item: of_kind.get(item, max(heads) if isinstance(heads, list) else heads) for item in (False, True)}
    config |= {
        "hybrid_layer_pattern": [int(slide) for slide in slides],
        "num_key_value_heads": kv_heads[False],
        "swa_num_key_value_heads": kv_heads[True],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
    }


CLASSES: dict[str, HfClass] = {
    "MiMoV2FlashForCausalLM": HfClass(
        "mimo_v2_flash",
        f"{LAYER}self_attn.attention_sink_bias",
        keys={
            ".rope.freq_base_swa": "swa_rope_theta",
            ".attention.sliding_window": "sliding_window",
        },
        defaults={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
        config_setters=(set_hybrid_windows,),
        renames=((r"(\.attention_sink_bias)\.weight$", r"\1"),),
    ),
}


# --- The encoders of MiMo-V2.5 --------------------------------------------------------------------------------------

#: The folder of the audio encoder, and its names of MmprojModel's settings.
_TOKENIZER = "audio_tokenizer"
_AUDIO_NAMES = {
    "hidden_size": "d_model",
    "intermediate_size": "encoder_ffn_dim",
    "num_attention_heads": "encoder_attention_heads",
}
_CODEBOOK = re.compile(r"^encoder\.quantizer\.vq\.layers\.(\d+)\._codebook\.embed$")
#: The decoder, and statistics of training.
_UNUSED = re.compile(r"^decoder\.|_codebook\.(cluster_size|embed_avg|inited)$")


def _read_tokenizer(config: Config) -> Json:
    return {**config.outer, _TOKENIZER: read_part(config.path.parent / _TOKENIZER)}


def _patch_encoders(config: MmprojConfig) -> None:
    vision, audio = config.vision.values, config.audio.values
    vision.setdefault("image_size", 560)
    vision["num_attention_heads"] = config.vision.number("num_heads")
    vision["num_hidden_layers"] = vision.get("depth", 28)
    audio |= {name: config.audio.number(stored) for name, stored in _AUDIO_NAMES.items()}


def _codebooks(config: Config) -> list[Expression]:
    """Return the codebooks of the audio encoder, [codes, width] each."""
    stored = part_tensors(config.path.parent / _TOKENIZER)
    books = {int(match[1]): Stored(t) for name, t in stored.items() if (match := _CODEBOOK.match(name))}
    where = config.path.parent / _TOKENIZER
    if not books or sorted(books) != list(range(len(books))):
        raise FormatError(f"{where}: has the codebooks {short(sorted(books))}, not all from 0 on", "QK-E105")
    ordered = [books[i] for i in range(len(books))]
    if any(len(book.shape) != 2 or book.shape[1] != ordered[0].shape[-1] for book in ordered):
        raise FormatError(f"{where}: its codebooks are {short([book.shape for book in ordered])}", "QK-E106")
    return [*ordered]


def _tokenizer_tensors(config: MmprojConfig) -> Iterator[Tensor]:
    """Yield the tensors of the audio encoder; its codebooks, filled up with zeros, are one."""
    for name, tensor in part_tensors(config.path.parent / _TOKENIZER).items():
        if not _UNUSED.search(name) and not _CODEBOOK.match(name):
            yield Tensor(name, Stored(tensor), layer_of(name))
    books = _codebooks(config)
    codes = max(book.shape[0] for book in books)
    padded = [
        concatenate([book, Zeros((codes - book.shape[0], book.shape[1]), book.type)]) if book.shape[0] < codes else book
        for book in books
    ]
    yield Tensor("a.rvq.codebook.weight", stack(padded), None, name_in_file="a.rvq.codebook.weight")


def _window_pattern(config: MmprojConfig) -> list[int]:
    """Return -1 for layers of the audio encoder with full attention, 0 for those with a window."""
    layers, period = config.audio.number("encoder_layers"), config.audio.get("swa_per_block", 1)
    if not config.audio.get("hybrid_attention") or not isinstance(period, int) or period <= 1:
        return [-1] * layers
    return [0 if layer % period < period - 1 else -1 for layer in range(layers)]


def _window(config: MmprojConfig) -> int:
    windows = config.audio["encoder_attn_window_size"]
    if not isinstance(windows, list) or not windows or type(windows[0]) is not int:
        raise FormatError(f"{config.path}: encoder_attn_window_size is {short(windows)}, not a list", "QK-E112")
    return windows[0]


def _of_audio_config(name: str) -> Callable[[Config], int]:
    """Return the function that returns a count of config.json's audio_config."""

    def count(config: Config) -> int:
        assert isinstance(config, MmprojConfig)
        return config.model.with_values(config.model.table("audio_config")).number(name)

    return count


MMPROJ: dict[str, Mmproj] = {
    "MiMoV2ForCausalLM": Mmproj(
        (
            projector("mimovl", "clip.vision.projector_type"),
            USE_SILU,
            EncoderKey(".vision.attention.head_count_kv", "num_key_value_heads", default=8),
            EncoderKey(".vision.spatial_merge_size", "spatial_merge_size"),
            EncoderKey(".vision.window_size", "visual_token_window_size", default=-1),
            Key(".vision.wa_pattern_mode", lambda config: config.vision.get("vit_window_attn_types") or None, "array"),
            layer_norm_epsilon("rms_norm_eps", 1e-6),
            *PIXELS,
            projector("mimo_audio", "clip.audio.projector_type"),
            EncoderKey(".audio.num_mel_bins", "n_mels", section="audio"),
            layer_norm_epsilon("layer_norm_eps", 1e-5, section="audio"),
            Key(".audio.rvq.num_quantizers", lambda config: len(_codebooks(config))),
            Key(".audio.rvq.codebook_size", lambda config: [book.shape[0] for book in _codebooks(config)], "array"),
            Key(".audio.wa_pattern_mode", _window_pattern, "array"),
            Key(".audio.window_size", _window),
            Key(".audio.local_block_count", _of_audio_config("input_local_layers")),
            Key(".audio.local_group_size", _of_audio_config("group_size")),
        ),
        tensors=r"^(visual|speech_embeddings|audio_encoder)\.",
        rules=(
            SplitFrames(r"^visual\.patch_embed\.proj\.weight$"),
            StackNumbered(
                r"^speech_embeddings\.(\d+)\.weight$",
                "mm.a.code_embd.weight",
                _of_audio_config("audio_channels"),
                TYPE_F32,
            ),
            Transform(r"conv[12]\.bias", add_axes(0, 1), None),
            NameInFile(r"^audio_encoder\.projection\.mlp\.0\.weight$", "mm.a.mlp.1.weight"),
            NameInFile(r"^audio_encoder\.projection\.mlp\.2\.weight$", "mm.a.mlp.2.weight"),
            ForceType(r"encoder\.(conv|down_sample_layer).*\.weight$|^a\.rvq\.codebook", TYPE_F32),
        ),
        audio=True,
        audio_config=lambda outer: outer[_TOKENIZER],
        patch_config=_patch_encoders,
        read_config=_read_tokenizer,
        synthetic=_tokenizer_tensors,
        files=(f"{_TOKENIZER}/config.json",),
    ),
}
