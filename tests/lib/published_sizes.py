"""Checkpoints with the sizes of popular models, whose weights are holes: a header, and zeros without disk space.

The types of some tensors depend on widths: rows of 4304 values have no blocks of 32. Names, shapes and settings are
those of a checkpoint of the table with the sizes of the model's config.json; its vocabulary remains.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import checkpoints
from checkpoints import Description, Json, Shape, expand

Rules = list[tuple[str, Shape]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, for the checkpoint ``base``.

    ``rules``: patterns of names and shapes, of which the first that matches is used; 0 keeps a size. ``layers``: the
    beginning of the names of layers, and their number. ``layer_of``: the number of the layer that one is a copy of, by
    default the last. ``drop``: tensors that the model lacks.
    """

    base: str
    config: Json
    rules: Rules
    layers: dict[str, int]
    files: Json = field(default_factory=dict)
    layer_of: Callable[[str, int, int], int] = lambda _, number, n: min(number, n - 1)
    drop: str = r"\n"
    #: Whether the text model is of these sizes, too.
    text: bool = True


def text(hidden: int, feed_forward: int, queries: int, keys: int, head: int, prefix: str = "") -> Rules:
    """Return the shapes of a text model's tensors; ``queries``, ``keys``: rows of all heads."""
    shapes: Rules = [
        (r"\.q_proj\.weight", (queries, hidden)),
        (r"\.q_proj\.bias", (queries,)),
        (r"\.[kv]_proj\.weight", (keys, hidden)),
        (r"\.[kv]_proj\.bias", (keys,)),
        (r"\.o_proj\.weight", (hidden, queries)),
        (r"\.(gate|up)_proj\.weight", (feed_forward, hidden)),
        (r"\.down_proj\.weight", (hidden, feed_forward)),
        (r"\.[qk]_norm\.weight", (head,)),
        (r"embed_tokens\.weight|lm_head\.weight", (0, hidden)),
        (r"norm\.weight", (hidden,)),
    ]
    return [(rf"{prefix}.*(?:{pattern})$", shape) for pattern, shape in shapes]


def text_config(hidden: int, feed_forward: int, heads: int, keys: int, head: int, layers: int) -> Json:
    """Return the settings of a text model; ``keys``: heads of keys."""
    return {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head,
        "num_hidden_layers": layers,
    }


def siglip(prefix: str, width: int, feed_forward: int, positions: Shape, patch: int) -> Rules:
    """Return the shapes of SigLIP's tensors, and of encoders like it; ``positions``: without the width."""
    shapes: Rules = [
        (r"fc1\.weight", (feed_forward, width)),
        (r"fc1\.bias", (feed_forward,)),
        (r"fc2\.weight", (width, feed_forward)),
        (r"patch_embedding\.weight", (width, 3, patch, patch)),
        (r"position_embedding(\.weight)?", (*positions, width)),
        (r"(in_proj_|qkv\.)weight", (3 * width, width)),
        (r"(in_proj_|qkv\.)bias", (3 * width,)),
        (r"proj\.weight", (width, width)),
        (r"probe|class_embedding", (1, 1, width)),
        (r"norm\w*\.weight|bias|ls[12]", (width,)),
    ]
    return [(rf"{prefix}\..*(?:{pattern})$", shape) for pattern, shape in shapes]


_SO400M: Json = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}


def _qwen3_vl(sizes: tuple[int, int, int, int, int, int], vision: tuple[int, int, int], deepstack: list[int]) -> Sizes:
    hidden, feed_forward, heads, keys, head, layers = sizes
    width, inner, depth = vision
    visual: Rules = [
        (r"visual\..*attn\.qkv\.weight", (3 * width, width)),
        (r"visual\..*attn\.qkv\.bias", (3 * width,)),
        (r"visual\..*attn\.proj\.weight", (width, width)),
        (r"visual\..*mlp\.linear_fc1\.weight", (inner, width)),
        (r"visual\..*mlp\.linear_fc1\.bias", (inner,)),
        (r"visual\..*mlp\.linear_fc2\.weight", (width, inner)),
        (r"merger.*linear_fc1\.weight", (4 * width, 4 * width)),
        (r"merger.*linear_fc1\.bias|deepstack.*norm\.", (4 * width,)),
        (r"merger.*linear_fc2\.weight", (hidden, 4 * width)),
        (r"merger.*linear_fc2\.bias", (hidden,)),
        (r"patch_embed\.proj\.weight", (width, 3, 2, 16, 16)),
        (r"pos_embed\.weight", (2304, width)),
        (r"visual\.", (width,)),
    ]
    config: Json = {
        "text_config": text_config(*sizes),
        "vision_config": {
            **{"depth": depth, "hidden_size": width, "intermediate_size": inner, "num_heads": 16, "patch_size": 16},
            **{"out_hidden_size": hidden, "num_position_embeddings": 2304, "deepstack_visual_indexes": deepstack},
        },
    }
    return Sizes(
        "mm-qwen3-vl",
        config,
        visual + text(hidden, feed_forward, heads * head, keys * head, head),
        {
            "model.language_model.layers.": layers,
            "model.visual.blocks.": depth,
            "model.visual.deepstack_merger_list.": len(deepstack),
        },
        {"preprocessor_config.json": {"patch_size": 16}},
    )


def _gemma3(sizes: tuple[int, int, int, int, int, int]) -> Sizes:
    hidden, feed_forward, heads, keys, head, layers = sizes
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    return Sizes(
        "mm-gemma3",
        {
            "text_config": text_config(*sizes) | {"layer_types": kinds, "sliding_window": 1024},
            "vision_config": _SO400M | {"image_size": 896, "patch_size": 14},
            "mm_tokens_per_image": 256,
        },
        [("mm_input_projection", (1152, hidden)), ("mm_soft_emb_norm", (1152,))]
        + siglip("vision_tower", 1152, 4304, (4096,), 14)
        + text(hidden, feed_forward, heads * head, keys * head, head),
        {"language_model.model.layers.": layers, "vision_tower.vision_model.encoder.layers.": 27},
        {"preprocessor_config.json": {"image_seq_length": 256, "size": {"height": 896, "width": 896}}},
    )


def _pixtral(base: str, sizes: tuple[int, int, int, int, int, int], image: int) -> Sizes:
    hidden, feed_forward, heads, keys, head, layers = sizes
    return Sizes(
        base,
        {
            "text_config": text_config(*sizes),
            "vision_config": {
                **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
                **{"head_dim": 64, "image_size": image, "patch_size": 14 if base == "mm-mistral3" else 16},
            },
        },
        [
            (r"projector\.linear_1\.weight", (hidden, 1024)),
            (r"projector\.linear_2\.weight", (hidden, hidden)),
            (r"projector\.linear_\d\.bias", (hidden,)),
            (r"merging_layer", (1024, 4096)),
            (r"vision_tower\.patch_conv", (1024, 3, 14, 14) if base == "mm-mistral3" else (1024, 3, 16, 16)),
            (r"vision_tower.*[qkvo]_proj", (1024, 1024)),
            (r"vision_tower.*(gate|up)_proj", (4096, 1024)),
            (r"vision_tower.*down_proj", (1024, 4096)),
            (r"vision_tower|multi_modal_projector", (1024,)),
        ]
        + text(hidden, feed_forward, heads * head, keys * head, head),
        {"language_model.model.layers.": layers, "vision_tower.transformer.layers.": 24},
    )


def _internvl3(sizes: tuple[int, int, int, int, int, int]) -> Sizes:
    hidden, feed_forward, heads, keys, head, layers = sizes
    texts = {key: value for key, value in text_config(*sizes).items() if key != "head_dim"}
    return Sizes(
        "mm-internvl3",
        {
            "llm_config": texts,
            "vision_config": {
                **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
                **{"image_size": 448, "patch_size": 14},
            },
        },
        [
            (r"mlp1\.0\.", (4096,)),
            (r"mlp1\.1\.weight", (hidden, 4096)),
            (r"mlp1\.3\.weight", (hidden, hidden)),
            (r"mlp1\.", (hidden,)),
        ]
        + siglip("vision_model", 1024, 4096, (1, 1025), 14)
        + text(hidden, feed_forward, heads * head, keys * head, head),
        {"language_model.model.layers.": layers, "vision_model.encoder.layers.": 24},
    )


_KIMI_VL = Sizes(
    "mm-kimi-vl",
    {
        "text_config": {"hidden_size": 2048},
        "vision_config": _SO400M | {"patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64},
    },
    [
        (r"vision_tower.*(norm\d|wo|fc1|layernorm|patch_embed\.proj)\.bias|vision_tower.*norm\w*\.weight", (1152,)),
        (r"wqkv\.weight", (3456, 1152)),
        (r"wqkv\.bias", (3456,)),
        (r"wo\.weight", (1152, 1152)),
        (r"mlp\.fc0\.weight", (4304, 1152)),
        (r"mlp\.fc0\.bias", (4304,)),
        (r"mlp\.fc1\.weight", (1152, 4304)),
        (r"patch_embed\.proj\.weight", (1152, 3, 14, 14)),
        (r"pos_emb\.weight", (64, 64, 1152)),
        (r"projector\.pre_norm", (1152,)),
        (r"projector\.linear_1\.weight", (4608, 4608)),
        (r"projector\.linear_1\.bias", (4608,)),
        (r"projector\.linear_2\.weight", (2048, 4608)),
        (r"projector\.linear_2\.bias", (2048,)),
    ],
    {"vision_tower.encoder.blocks.": 27},
    {"preprocessor_config.json": {"patch_size": 14}},
    text=False,
)
_GLM = (4096, 10944, 96, 8, 128, 46)
_GLM_45V = Sizes(
    "mm-glm4v-moe",
    {
        "text_config": text_config(*_GLM) | {"moe_intermediate_size": 1408, "n_routed_experts": 128},
        "vision_config": {
            **{"depth": 24, "hidden_size": 1536, "intermediate_size": 10944, "num_heads": 12, "image_size": 336},
            **{"out_hidden_size": 4096, "patch_size": 14},
        },
    },
    [
        (r"visual\.blocks.*attn\.qkv", (4608, 1536)),
        (r"visual\.blocks.*attn\.proj", (1536, 1536)),
        (r"visual\.blocks.*(gate|up)_proj", (4096, 1536)),
        (r"visual\.blocks.*down_proj", (1536, 4096)),
        (r"visual\.downsample\.weight", (4096, 1536, 2, 2)),
        (r"visual\.embeddings", (576, 1536)),
        (r"visual\.merger\.proj", (4096, 4096)),
        (r"visual\.merger\.(gate|up)_proj", (10944, 4096)),
        (r"visual\.merger\.down_proj", (4096, 10944)),
        (r"visual\.(downsample|merger)", (4096,)),
        (r"visual\.patch_embed\.proj\.weight", (1536, 3, 2, 14, 14)),
        (r"visual\.", (1536,)),
        (r"experts.*(gate|up)_proj", (1408, 4096)),
        (r"experts.*down_proj", (4096, 1408)),
        (r"mlp\.gate\.weight", (128, 4096)),
        (r"e_score", (128,)),
        *text(4096, 10944, 12288, 1024, 128),
    ],
    {
        "model.language_model.layers.1.mlp.experts.": 128,
        "model.language_model.layers.": 46,
        "model.visual.blocks.": 24,
    },
    {"preprocessor_config.json": {"patch_size": 14}},
)
_SCOUT = (5120, 8192, 40, 8, 128, 48)
_LLAMA_4 = Sizes(
    "mm-llama4",
    {
        "text_config": text_config(*_SCOUT)
        | {
            **{"intermediate_size_mlp": 16384, "num_local_experts": 128, "moe_layers": list(range(1, 48, 2))},
            **{"layer_types": ["chunked_attention"] * 48, "no_rope_layers": [1] * 48},
        },
        "vision_config": {
            **{"hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16},
            **{"image_size": 336, "patch_size": 14, "projector_input_dim": 4096, "projector_output_dim": 4096},
            "vision_output_dim": 4096,
        },
    },
    [
        (r"projector\.linear_1", (5120, 4096)),
        (r"vision_model.*mlp\.fc1\.bias", (5632,)),
        (r"vision_adapter\.mlp\.fc1", (4096, 5632)),
        (r"vision_adapter\.mlp\.fc2", (4096, 4096)),
        (r"vision_model.*mlp\.fc1\.weight", (5632, 1408)),
        (r"vision_model.*mlp\.fc2\.weight", (1408, 5632)),
        (r"vision_model.*_proj\.weight", (1408, 1408)),
        (r"patch_embedding\.linear", (1408, 588)),
        (r"positional_embedding_vlm", (577, 1408)),
        (r"vision_model", (1408,)),
        (r"experts\.down_proj", (128, 8192, 5120)),
        (r"experts\.gate_up_proj", (128, 5120, 16384)),
        (r"router", (128, 5120)),
        (r"shared_expert\.(gate|up)_proj", (8192, 5120)),
        (r"shared_expert\.down_proj", (5120, 8192)),
        *text(5120, 16384, 5120, 1024, 128),
    ],
    {"language_model.model.layers.": 48, "vision_model.model.layers.": 34},
    layer_of=lambda prefix, number, n: number % 2 if prefix.startswith("language") else min(number, n - 1),
)
_SMOL = (2048, 8192, 32, 32, 64, 24)
_SMOLVLM2 = Sizes(
    "mm-smolvlm",
    {
        "text_config": text_config(*_SMOL),
        "vision_config": _SO400M | {"image_size": 384, "patch_size": 14},
        "scale_factor": 3,
    },
    [
        (r"modality_projection", (2048, 10368)),
        *siglip("vision_model", 1152, 4304, (729,), 14),
        *text(2048, 8192, 2048, 2048, 64),
    ],
    {"model.text_model.layers.": 24, "model.vision_model.encoder.layers.": 27},
)
_GEMMA_4_TEXT = (5376, 21504, 32, 16, 256, 60)
_KINDS = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(60)]
#: Numbers of layers with full attention, whose heads are twice as wide.
_FULL = "|".join(str(i) for i in range(5, 60, 6))
_GEMMA_4 = Sizes(
    "mm-gemma4",
    {
        "text_config": text_config(*_GEMMA_4_TEXT)
        | {"layer_types": _KINDS, "per_layer_config": {str(i): {"head_dim": 512} for i in range(5, 60, 6)}},
        "vision_config": _SO400M
        | {**{"num_key_value_heads": 16, "head_dim": 72, "patch_size": 16, "pooling_kernel_size": 3}}
        | {"position_embedding_size": 10240},
    },
    [
        (r"embedding_projection", (5376, 1152)),
        (r"vision_tower.*(gate|up)_proj", (4304, 1152)),
        (r"vision_tower.*down_proj", (1152, 4304)),
        (r"vision_tower.*[qk]_norm", (72,)),
        (r"vision_tower.*[qkvo]_proj", (1152, 1152)),
        (r"vision_tower.*input_proj", (1152, 768)),
        (r"position_embedding_table", (2, 10240, 1152)),
        (r"vision_tower", (1152,)),
        (r"layer_scalar", (1,)),
        (rf"layers\.({_FULL})\..*q_proj", (16384, 5376)),
        (rf"layers\.({_FULL})\..*[kv]_proj", (8192, 5376)),
        (rf"layers\.({_FULL})\..*o_proj", (5376, 16384)),
        (rf"layers\.({_FULL})\..*[qk]_norm", (512,)),
        *text(5376, 21504, 8192, 4096, 256),
    ],
    {"model.language_model.layers.": 60, "model.vision_tower.encoder.layers.": 27},
    layer_of=lambda prefix, number, n: int(number % 6 == 5) if "language" in prefix else min(number, n - 1),
)
PUBLISHED: dict[str, Sizes] = {
    "qwen3-vl-2b": replace(_qwen3_vl((2048, 6144, 16, 8, 128, 28), (1024, 4096, 24), [5, 11, 17]), drop=r"^lm_head"),
    "qwen3-vl-8b": _qwen3_vl((4096, 12288, 32, 8, 128, 36), (1152, 4304, 27), [8, 16, 24]),
    "qwen3-vl-32b": _qwen3_vl((5120, 25600, 64, 8, 128, 64), (1152, 4304, 27), [8, 16, 24]),
    "gemma-3-4b": _gemma3((2560, 10240, 8, 4, 256, 34)),
    "gemma-3-27b": _gemma3((5376, 21504, 32, 16, 128, 62)),
    "gemma-4-31b": _GEMMA_4,
    "mistral-small-3.2": _pixtral("mm-mistral3", (5120, 32768, 32, 8, 128, 40), 1540),
    "pixtral-12b": _pixtral("mm-pixtral", (5120, 14336, 32, 8, 128, 40), 1024),
    "internvl3-2b": _internvl3((1536, 8960, 12, 2, 128, 28)),
    "internvl3-8b": _internvl3((3584, 18944, 28, 4, 128, 28)),
    "internvl3-38b": _internvl3((5120, 27648, 40, 8, 128, 64)),
    "kimi-vl-a3b": _KIMI_VL,
    "glm-4.5v": _GLM_45V,
    "llama-4-maverick": _LLAMA_4,
    "smolvlm2-2.2b": _SMOLVLM2,
}


def describe_published(name: str) -> Description:
    """Return the description of a checkpoint with the sizes of a model."""
    sizes = PUBLISHED[name]
    base = checkpoints.describe(sizes.base)
    tensors = {tensor: shape for tensor, shape in expand(base.tensors) if not re.search(sizes.drop, tensor)}
    for prefix, count in sizes.layers.items():
        tensors = _with_layers(tensors, prefix, count, sizes.layer_of)
    return replace(
        base,
        name=name,
        config=_merged(base.config, sizes.config) | ({"tie_word_embeddings": True} if sizes.drop != r"\n" else {}),
        tensors={tensor: list(_shape(sizes, tensor, shape)) for tensor, shape in tensors.items()},
        files=_merged(base.files, {file: x for file, x in sizes.files.items() if file in base.files}),
        shards=1,
    )


def _shape(sizes: Sizes, name: str, shape: Shape) -> Shape:
    for pattern, new in sizes.rules:
        if re.search(pattern, name):
            return tuple(a or b for a, b in zip(new, shape, strict=True))
    if sizes.text:
        raise ValueError(f"{name}: no rule")
    return shape


def _with_layers(
    tensors: dict[str, Shape], prefix: str, count: int, layer_of: Callable[[str, int, int], int]
) -> dict[str, Shape]:
    layers: dict[int, dict[str, Shape]] = {}
    remaining: dict[str, Shape] = {}
    for name, shape in tensors.items():
        number, _, suffix = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdigit():
            layers.setdefault(int(number), {})[suffix] = shape
        else:
            remaining[name] = shape
    copies = ((i, layers[layer_of(prefix, i, len(layers))]) for i in range(count))
    return remaining | {f"{prefix}{i}.{suffix}": shape for i, layer in copies for suffix, shape in layer.items()}


def _merged(a: Json, b: Json) -> Json:
    """Return settings with changes, also to nested ones."""
    return a | {
        key: _merged(a[key], x) if isinstance(x, dict) and key in a and key != "per_layer_config" else x
        for key, x in b.items()
    }


def write_published(name: str, out: Path) -> Path:
    """Write the checkpoint as the directory out/name and return it; its weights are zeros without disk space."""
    description = describe_published(name)
    path = checkpoints.write_description(replace(description, tensors={}), out)
    header: Json = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, shape in description.tensors.items():
        nbytes = 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + offset)
    return path
