"""The table of checkpoints, continued: models with towers for images and sound, one or more of each class of --mmproj.

Text models have two layers or three, towers three, because the converter's map has as many indexes of projector layers
as a tower has layers. Bytes are what is compared: of the mmproj file in every type, and of the text model in one. Where
transformers has the class, it makes the checkpoint; stand-ins are of config.json and of the names that the converter's
map knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from checkpoint_table_decoders import (
    ATTENTION,
    CHAT,
    DENSE,
    EXPERTS,
    HEAD,
    HEAD_NORMS,
    LATENT,
    LATENT_ATTENTION,
    LLAMA,
    MIXTURE,
    NAMED,
    NORMS,
    SHARED,
    SIZES,
    VOCAB,
    decoder,
    gemma3n,
)
from checkpoint_table_mixtures import OTHERS

from checkpoint_table import Json, Row, bpe, spm

Shapes = dict[str, list[int]]

QWEN = bpe("qwen2", "<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|vision_start|>", "<|image_pad|>",
           cls="Qwen2Tokenizer", pad="<|endoftext|>", chat=CHAT)  # fmt: skip
GEMMA = spm("GemmaTokenizer", ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"), chat=CHAT)
GEMMA4 = spm("GemmaTokenizer", ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>"),
             chat=CHAT) | {"kind": "spm_bpe", "pieces": 640}  # fmt: skip
TEKKEN = bpe("tekken", "</s>", "<s>", "<unk>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", bos="<s>",
             unk="<unk>", start=True, chat=CHAT)  # fmt: skip
GLM = bpe("glm4", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
          "<|begin_of_image|>", pad="<|endoftext|>", chat=CHAT)  # fmt: skip

#: Text models have two layers.
NARROW = SIZES | {"num_hidden_layers": 2}
TEXT: Json = NARROW | LLAMA
MROPE: Json = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
MROPE_5: Json = {"rope_parameters": {
    "rope_type": "default", "rope_theta": 1e7, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
    "partial_rotary_factor": 0.5}}  # fmt: skip
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
QKV_BIASES = " self_attn.q_proj.bias!:64 self_attn.k_proj.bias!:32 self_attn.v_proj.bias!:32"


def shapes_in(prefix: str, names: str) -> Shapes:
    """Return names and shapes of text such as ``q_proj:64x64``: ``+`` after a shape adds a bias, a name that ends with
    ``!`` is whole, others lack ``.weight``."""
    tensors: Shapes = {}
    for entry in names.split():
        name, _, sizes = entry.rpartition(":")
        shape = [int(n) for n in sizes.rstrip("+").split("x")]
        tensors[prefix + (name[:-1] if name.endswith("!") else f"{name}.weight")] = shape
        if sizes.endswith("+"):
            tensors[f"{prefix}{name}.bias"] = shape[:1]
    return tensors


def text_of(
    layer: str = NORMS + ATTENTION + DENSE, *, layers: str = "0-1", body: str = "model.", head: str | None = ""
) -> Shapes:
    """Return a text model of two layers; ``body`` and ``head``: what its names begin with."""
    tensors = {name.replace("model.", body, 1): x for name, x in decoder({layers: layer}, head=False).items()}
    return tensors if head is None else tensors | {f"{head}lm_head.weight": [640, 64]}


def preprocessor(mean: Json, kind: str, **fields: Any) -> Json:
    """Return preprocessor_config.json."""
    return {"preprocessor_config.json": {"do_normalize": True, **mean, "image_processor_type": kind, **fields}}


def stand_in(name: str, model: str, config: Json, tensors: Shapes, files: Json | None = None, **fields: Any) -> Row:
    """Return a row of config.json and tensors."""
    args = {"architectures": [model]} | config | {"torch_dtype": "bfloat16"}
    return Row(name=name, model="", version=0, args=args, more=tensors, files=files or {}, **{"vocab": VOCAB} | fields)


def model(name: str, cls: str, version: int, args: Json, files: Json | None = None, **fields: Any) -> Row:
    """Return a row of which transformers makes the model."""
    return Row(name=name, model=cls, version=version, args=args, files=files or {}, **{"vocab": VOCAB} | fields)


_ROWS = {row.name: row for row in NAMED + OTHERS}


def on(
    name: str, base: str, config: Json, tensors: Shapes, files: Json | None = None, drop: str = "\n", **fields: Any
) -> Row:
    """Return a row of another table with towers; ``drop``: what the names of its tensors of towers begin with."""
    row = _ROWS[base]
    remaining = {key: shape for key, shape in row.more.items() if not key.startswith(tuple(drop.split()) or "\n")}
    changes: Json = {
        "runs": 0,
        "config": row.config | config,
        "more": remaining | tensors,
        "files": row.files | (files or {}),
    }
    return replace(row, name=name, **changes | fields)


# --- Qwen ------------------------------------------------------------------------------------------------------------

_QWEN2_BLOCKS = "norm1:64+ norm2:64+ attn.qkv:192x64+ attn.proj:64x64+ mlp.fc1:128x64+ mlp.fc2:64x128+"
_QWEN25_BLOCKS = (
    "norm1:64 norm2:64 attn.qkv:192x64+ attn.proj:64x64+ mlp.gate_proj:96x64+ mlp.up_proj:96x64+ mlp.down_proj:64x96+"
)
_QWEN_MERGER = "merger.mlp.0:256x256+ merger.mlp.2:64x256+ patch_embed.proj:64x3x2x4x4"
_QWEN2_VISION: Json = {
    "depth": 3, "embed_dim": 64, "mlp_ratio": 2, "num_heads": 4, "in_chans": 3, "hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": 2, "spatial_patch_size": 4, "temporal_patch_size": 2}  # fmt: skip
_QWEN25_VISION: Json = {
    "depth": 4, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "in_chans": 3,
    "out_hidden_size": 64, "patch_size": 4, "spatial_merge_size": 2, "spatial_patch_size": 4, "window_size": 32,
    "fullatt_block_indexes": [1, 3], "tokens_per_second": 2, "temporal_patch_size": 2}  # fmt: skip
_QWEN2_IMAGES = preprocessor(_CLIP, "Qwen2VLImageProcessor", min_pixels=3136, max_pixels=12845056, patch_size=4,
                             temporal_patch_size=2, merge_size=2, processor_class="Qwen2VLProcessor")  # fmt: skip
_QWEN3_IMAGES = preprocessor(
    _HALF, "Qwen2VLImageProcessorFast", size={"longest_edge": 16777216, "shortest_edge": 65536}, patch_size=8,
    temporal_patch_size=2, merge_size=2, processor_class="Qwen3VLProcessor")  # fmt: skip
_QWEN2_TEXT = text_of(NORMS + ATTENTION + QKV_BIASES + DENSE)
_QWEN3_VISION: Json = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8,
    "num_position_embeddings": 36, "spatial_merge_size": 2, "deepstack_visual_indexes": [0, 2]}  # fmt: skip
_QWEN3_TEXT: Json = NARROW | HEAD | {"rope_theta": 5000000.0, "rope_scaling": {
    "rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}}  # fmt: skip
_LINEAR: Json = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
_QWEN35_MIXTURE = MIXTURE | {"num_experts": 4, "shared_expert_intermediate_size": 32}

#: Projections of the text model.
_TEXT_MATRICES = r"language_model.*_proj\.weight$"

_QWEN_ROWS = (
    stand_in("mm-qwen2-vl", "Qwen2VLForConditionalGeneration", TEXT | MROPE | {
        "model_type": "qwen2_vl", "vision_config": _QWEN2_VISION, "vision_start_token_id": 579},
        _QWEN2_TEXT | shapes_in("visual.blocks.{0-2}.", _QWEN2_BLOCKS) | shapes_in("visual.", f"merger.ln_q:64+ {_QWEN_MERGER}"),
        _QWEN2_IMAGES, vocab=QWEN, shards=2),
    # Some fine-tunes have this class, and an image size. Rows of 48 and 80 values have no blocks of 32.
    stand_in("mm-qwen2-vl-model", "Qwen2VLModel", TEXT | MROPE | {
        "model_type": "qwen2_vl", "vision_config": _QWEN2_VISION | {
            "embed_dim": 48, "image_size": 448, "mlp_ratio": 1.6667}},
        _QWEN2_TEXT | shapes_in("visual.blocks.{0-2}.", "norm1:48+ norm2:48+ attn.qkv:144x48+ attn.proj:48x48+ mlp.fc1:80x48+"
                         " mlp.fc2:48x80+")
        | shapes_in("visual.", "merger.ln_q:48+ merger.mlp.0:192x192+ merger.mlp.2:64x192+ patch_embed.proj:48x3x2x4x4"),
        _QWEN2_IMAGES, vocab=QWEN, dtype="float16"),
    stand_in("mm-qwen2.5-vl", "Qwen2_5_VLForConditionalGeneration", TEXT | MROPE | {
        "model_type": "qwen2_5_vl", "rms_norm_eps": 1e-5, "vision_config": _QWEN25_VISION},
        _QWEN2_TEXT | shapes_in("visual.blocks.{0-3}.", _QWEN25_BLOCKS) | shapes_in("visual.", f"merger.ln_q:64 {_QWEN_MERGER}"),
        _QWEN2_IMAGES, vocab=QWEN, shards=2),
    # llama.cpp refuses full attention that is not periodic.
    stand_in("mm-qwen2.5-vl-irregular", "Qwen2_5_VLForConditionalGeneration", TEXT | MROPE | {
        "model_type": "qwen2_5_vl", "vision_config": _QWEN25_VISION | {"fullatt_block_indexes": [1, 2]}},
        _QWEN2_TEXT | shapes_in("visual.blocks.{0-3}.", _QWEN25_BLOCKS) | shapes_in("visual.", f"merger.ln_q:64 {_QWEN_MERGER}"),
        _QWEN2_IMAGES, vocab=QWEN),
    model("mm-qwen3-vl", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES, vocab=QWEN, shards=2),
    model("mm-qwen3-vl-moe", "Qwen3VLMoeForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT | MIXTURE | {"num_experts": 4, "rms_norm_eps": 1e-5},
        "vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": [1]}}, _QWEN3_IMAGES, vocab=QWEN, shards=2),
    # Rows of 256 values: k-quants.
    model("mm-qwen3-vl-wide", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION | {
            "hidden_size": 256, "intermediate_size": 512, "deepstack_visual_indexes": [1]}}, _QWEN3_IMAGES, vocab=QWEN),
    # No file says how images are normed.
    model("mm-qwen3-vl-bare", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION}, {}, vocab=QWEN),
    model("mm-qwen3-vl-f32", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES, vocab=QWEN, dtype="float32"),
    # The text model in FP8 beside plain towers.
    model("mm-qwen3-vl-fp8", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES, vocab=QWEN, shards=2,
        config={"quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "modules_to_not_convert": ["model.visual", "lm_head"]}},
        quantized={"method": "fp8", "block": [32, 32], "dtype": "BF16", "targets": r"language_model.*_proj\.weight$"}),
    # The towers in FP8, too.
    model("mm-qwen3-vl-fp8-towers", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES, vocab=QWEN,
        config={"quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "modules_to_not_convert": ["lm_head"]}},
        quantized={"method": "fp8", "block": [32, 32], "dtype": "BF16",
                   "targets": r"(_proj|attn\.(qkv|proj)|linear_fc[12])\.weight$"}),
    # The text model in NVFP4, and in int4 of three programs, beside plain towers.
    model("mm-qwen3-vl-nvfp4", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES | {
        "hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["model.visual*"]}}},
        vocab=QWEN, config={"quantization_config": {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.visual*", "lm_head"]}},
        quantized={"method": "nvfp4", "packed": False, "targets": _TEXT_MATRICES}),
    model("mm-qwen3-vl-int4", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES, vocab=QWEN,
        config={"quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*visual.*"], "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {
                    "num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, "strategy": "group",
                    "dynamic": False, "actorder": None, "block_structure": None},
                "input_activations": None, "output_activations": None}}}},
        quantized={"method": "packed", "bits": 4, "group": 32, "targets": _TEXT_MATRICES}),
    model("mm-qwen3-vl-gptq", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES, vocab=QWEN,
        config={"quantization_config": {
            "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
            "checkpoint_format": "gptq"}},
        quantized={"method": "gptq", "bits": 4, "group": 32, "targets": _TEXT_MATRICES}),
    model("mm-qwen3-vl-awq", "Qwen3VLForConditionalGeneration", 4, {
        "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES, vocab=QWEN,
        config={"quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
            "modules_to_not_convert": ["visual"]}},
        quantized={"method": "awq", "group": 32, "targets": _TEXT_MATRICES}),
    model("mm-qwen3.5", "Qwen3_5ForConditionalGeneration", 5, {
        "text_config": NARROW | HEAD | _LINEAR | MROPE_5, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES,
        vocab=QWEN | {"pre": "qwen35"}, options=("--no-nextn",), f32=(".A_log",)),
    model("mm-qwen3.5-moe", "Qwen3_5MoeForConditionalGeneration", 5, {
        "text_config": NARROW | HEAD | _LINEAR | MROPE_5 | _QWEN35_MIXTURE,
        "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES, vocab=QWEN | {"pre": "qwen35"}, options=("--no-nextn",),
        f32=(".A_log",), shards=3),
)  # fmt: skip


_QWEN25_OMNI_AUDIO: Json = {
    "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": 16,
    "n_window": 100, "output_dim": 64, "max_source_positions": 1500, "scale_embedding": False,
    "activation_function": "gelu"}  # fmt: skip
#: Layers of Whisper's encoder.
_WHISPER = (
    "self_attn.q_proj:64x64+ self_attn.k_proj:64x64 self_attn.v_proj:64x64+ self_attn.out_proj:64x64+"
    " self_attn_layer_norm:64+ final_layer_norm:64+ fc1:96x64+ fc2:64x96+"
)
_WHISPER_ENDS = "conv1:64x16x3+ conv2:64x64x3+"
_QWEN3_AUDIO = (
    "conv2d1:32x1x3x3+ conv2d2:32x32x3x3+ conv2d3:32x32x3x3+ conv_out:64x64 ln_post:64+ proj1:64x64+ proj2:64x64+"
)
_QWEN3_AUDIO_CONFIG = _QWEN25_OMNI_AUDIO | {"downsample_hidden_size": 32, "n_window_infer": 800, "conv_chunksize": 500}
_QWEN3_BLOCKS = "norm1:64+ norm2:64+ attn.qkv:192x64+ attn.proj:64x64+ mlp.linear_fc1:96x64+ mlp.linear_fc2:64x96+"
_QWEN3_TOWER = (
    shapes_in("visual.blocks.{0-2}.", _QWEN3_BLOCKS)
    | shapes_in("visual.", "patch_embed.proj:64x3x2x8x8+ pos_embed:36x64 merger.norm:64+ merger.linear_fc1:256x256+"
         " merger.linear_fc2:64x256+")
)  # fmt: skip
_WHISPER_FILES = {"preprocessor_config.json": {
    "chunk_length": 300, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "hop_length": 160,
    "n_fft": 400, "n_samples": 4800000, "nb_max_frames": 30000, "sampling_rate": 16000}}  # fmt: skip
_OMNI_FILES = {"preprocessor_config.json": _QWEN2_IMAGES["preprocessor_config.json"]
               | _WHISPER_FILES["preprocessor_config.json"] | {"processor_class": "Qwen2_5OmniProcessor"}}  # fmt: skip


def add_prefix(prefix: str, tensors: Shapes) -> Shapes:
    """Return tensors of a model in another: ``prefix`` before their names."""
    return {prefix + name: shape for name, shape in tensors.items()}


def _qwen3_omni(name: str, body: str, deepstack: bool = True) -> Row:
    vision = _QWEN3_VISION | {"model_type": "qwen3_omni_moe_vision_encoder"}
    vision |= {} if deepstack else {"deepstack_visual_indexes": []}
    audio = _QWEN3_AUDIO_CONFIG | {"model_type": "qwen3_omni_moe_audio_encoder", "encoder_layers": 3}
    config = _ROWS["qwen3-omni-moe"].args["thinker_config"] | {"vision_config": vision, "audio_config": audio}
    tensors = (
        shapes_in(f"{body}visual.blocks.{{0-2}}.", _QWEN3_BLOCKS)
        | shapes_in(f"{body}visual.", "patch_embed.proj:64x3x2x8x8+ pos_embed:36x64")
        | shapes_in(f"{body}visual.", "merger.ln_q:64+ merger.mlp.0:256x256+ merger.mlp.2:64x256+")
        | shapes_in(f"{body}visual.merger_list.{{0-1}}.", "ln_q:256+ mlp.0:256x256+ mlp.2:64x256+" if deepstack else "")
        | shapes_in("thinker.audio_tower.layers.{0-2}.", _WHISPER.replace("k_proj:64x64", "k_proj:64x64+"))
        | shapes_in("thinker.audio_tower.", _QWEN3_AUDIO)
    )
    return on(
        name, "qwen3-omni-moe", {"thinker_config": config}, tensors, _OMNI_FILES,
        "thinker.visual. thinker.audio_tower.", shards=2)  # fmt: skip


_CLEF_HEAD: Shapes = (
    {name: [] for name in ("prior_logit_scale", "joint_logit_scale", "residual_gate")}
    | shapes_in("", "type_embedding:3x64 hidden_norm:64+ memory_projection:64x64+ question_projection:64x64+"
         " option_question_projection:64x64+ global_projection:64x64+ option_context_projection:64x64+"
         " option_lexical_projection:64x64+ option_summary_norm:64+ field_norm:64+ option_norm:64+"
         " residual_scorer.0:32x64+ residual_scorer.3:1x32+")
    | shapes_in("evidence_layers.0.", "query_norm:64+ memory_norm:64+ attention.in_proj_weight!:192x64"
         " attention.in_proj_bias!:192 attention.out_proj:64x64+ feedforward_norm:64+ feedforward.0:96x64+"
         " feedforward.3:64x96+")
    | shapes_in("layers.{0-1}.", "norm1:64+ norm2:64+ norm3:64+ linear1:96x64+ linear2:64x96+"
         " {self_attn|multihead_attn}.in_proj_weight!:192x64 {self_attn|multihead_attn}.in_proj_bias!:192"
         " {self_attn|multihead_attn}.out_proj:64x64+")
)  # fmt: skip
_OMNI_ROWS = (
    # Its blocks store q, k and v apart.
    stand_in("mm-qwen2.5-omni", "Qwen2_5OmniModel", {
        "model_type": "qwen2_5_omni", "thinker_config": {
            "model_type": "qwen2_5_omni_thinker", "text_config": TEXT | MROPE | {"model_type": "qwen2_5_omni_text"},
            "vision_config": _QWEN25_VISION | {"model_type": "qwen2_5_omni_vision_encoder"},
            "audio_config": _QWEN25_OMNI_AUDIO | {"model_type": "qwen2_5_omni_audio_encoder"}}},
        add_prefix("thinker.", _QWEN2_TEXT | shapes_in("visual.blocks.{0-3}.", _QWEN25_BLOCKS.replace(
            "attn.qkv:192x64+", "attn.q:64x64+ attn.k:64x64+ attn.v:64x64+"))
            | shapes_in("visual.", f"merger.ln_q:64 {_QWEN_MERGER}") | shapes_in("audio_tower.layers.{0-1}.", _WHISPER)
            | shapes_in("audio_tower.", f"{_WHISPER_ENDS} ln_post:64+ proj:64x64+ audio_bos_eos_token:2x64"))
        | shapes_in("talker.", "codec_head:64x64") | shapes_in("token2wav.", "code2wav_dit_model.proj_out:64x64"), _OMNI_FILES,
        vocab=QWEN, shards=2),
    # The converter takes names of Qwen 3-VL's tower alone, real ones begin with thinker.
    _qwen3_omni("mm-qwen3-omni-moe", "model."),
    _qwen3_omni("mm-qwen3-omni-moe-thinker", "thinker."),
    # libmtmd refuses embeddings of images that are longer than those of sounds, which every deepstack makes.
    _qwen3_omni("mm-qwen3-omni-moe-flat", "model.", deepstack=False),
    stand_in("mm-qwen3-asr", "Qwen3ASRForConditionalGeneration", {
        "model_type": "qwen3_asr", "thinker_config": {
            "model_type": "qwen3_asr", "text_config": TEXT | HEAD | MROPE_5,
            "audio_config": _QWEN3_AUDIO_CONFIG | {"encoder_layers": 4}}},
        add_prefix("thinker.", text_of(NORMS + ATTENTION + HEAD_NORMS + DENSE) | shapes_in("audio_tower.layers.{0-3}.",
            _WHISPER.replace("k_proj:64x64", "k_proj:64x64+")) | shapes_in("audio_tower.", _QWEN3_AUDIO)), _WHISPER_FILES,
        vocab=QWEN),
    # The prompt's program beside a checkpoint of Qwen 3.5 tells it.
    model("mm-openjev", "Qwen3_5ForConditionalGeneration", 5, {
        "text_config": NARROW | HEAD | _LINEAR | MROPE_5, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES | {
        "helper": {"shim.py": "# the prompt\n"}}, vocab=QWEN | {"pre": "qwen35"}, f32=(".A_log",)),
    model("mm-clef", "Qwen3_5ForConditionalGeneration", 5, {
        "text_config": NARROW | HEAD | _LINEAR | MROPE_5, "vision_config": _QWEN3_VISION}, _QWEN3_IMAGES | {
        "joint_head_config.json": {"routing_layers": 1, "layers": 2, "heads": 4}},
        vocab=QWEN | {"pre": "qwen35"}, f32=(".A_log",), parts={"joint_head.safetensors": _CLEF_HEAD}),
    model("mm-qwen4-exp", "Qwen4ExpForConditionalGeneration", 5, {
        "text_config": NARROW | HEAD | _LINEAR | MROPE_5 | _QWEN35_MIXTURE | {
            "hc_count": 2, "hc_lowrank": 16, "ple_layer_ids": [1], "ple_embed_dim": 64, "ple_conv_kernel_size": 4,
            "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "split_ngram_parts": 4,
            "make_ngram_vocab_size_divisible_by": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4},
        "vision_config": {key: x for key, x in _QWEN3_VISION.items() if key != "deepstack_visual_indexes"}},
        _QWEN3_IMAGES, vocab=QWEN | {"pre": "qwen35"}, options=("--no-nextn",), f32=(".A_log",)),
    on("mm-exaone4.5", "exaone4.5", {"vision_config": _QWEN25_VISION | {
        "num_key_value_heads": 2, "model_type": "exaone4_5_vision"}}, shapes_in("model.visual.blocks.{0-3}.",
        _QWEN25_BLOCKS.replace("192x64", "128x64")) | shapes_in("model.visual.", f"merger.ln_q:64 {_QWEN_MERGER}"),
        _QWEN2_IMAGES, "model.visual. visual."),
    stand_in("mm-sarashina2-vision", "Sarashina2VisionForCausalLM", {
        "model_type": "sarashina2_vision", "text_config": TEXT | {"model_type": "llama"},
        "vision_config": _QWEN2_VISION | {"image_size": 224}},
        text_of(body="llm.model.", head="llm.") | shapes_in("visual.blocks.{0-2}.", _QWEN2_BLOCKS)
        | shapes_in("visual.", f"merger.ln_q:64+ {_QWEN_MERGER}") | shapes_in("", "norm:64+"), _QWEN2_IMAGES),
)  # fmt: skip

# --- Gemma -----------------------------------------------------------------------------------------------------------

#: Layers of SigLIP.
_SIGLIP = (
    "layer_norm1:64+ layer_norm2:64+ self_attn.q_proj:64x64+ self_attn.k_proj:64x64+ self_attn.v_proj:64x64+"
    " self_attn.out_proj:64x64+ mlp.fc1:96x64+ mlp.fc2:64x96+"
)
_SIGLIP_CONFIG: Json = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8}  # fmt: skip
_GEMMA_TEXT: Json = NARROW | HEAD | {"sliding_window": 8, "query_pre_attn_scalar": 16}
_GEMMA3_IMAGES = preprocessor(_HALF, "Gemma3ImageProcessor", image_seq_length=4, size={"height": 32, "width": 32})
_GEMMA3N_TEXT = gemma3n("", 2, 16, 32, 16, ["sliding_attention", "full_attention"], [0.0, 0.0])
_GEMMA3N_CONFORMER = (
    "attention.attn.q_proj:64x64 attention.attn.k_proj:64x64 attention.attn.v_proj:64x64"
    " attention.attn.per_dim_scale!:16 attention.attn.relative_position_embedding.pos_proj:64x64"
    " attention.post:64x64 attention.pre_attn_norm:64 attention.post_norm:64 norm:64"
    " ffw_layer_start.ffw_layer_1:256x64 ffw_layer_start.ffw_layer_2:64x256 ffw_layer_start.pre_layer_norm:64"
    " ffw_layer_start.post_layer_norm:64 ffw_layer_end.ffw_layer_1:256x64 ffw_layer_end.ffw_layer_2:64x256"
    " ffw_layer_end.pre_layer_norm:64 ffw_layer_end.post_layer_norm:64 lconv1d.depthwise_conv1d:64x1x5"
    " lconv1d.pre_layer_norm:64 lconv1d.conv_norm:64 lconv1d.linear_start:128x64 lconv1d.linear_end:64x64"
)
_MOBILE: Shapes = (
    shapes_in("model.vision_tower.timm_model.", "conv_stem.conv:32x3x3x3 conv_stem.conv.bias!:32 conv_stem.bn:32"
       " msfa.ffn.pw_exp.conv:64x64x1x1 msfa.ffn.pw_exp.bn:64 msfa.ffn.pw_proj.conv:64x64x1x1 msfa.ffn.pw_proj.bn:64"
       " msfa.norm:64")
    | shapes_in("model.vision_tower.timm_model.blocks.0.{0-1}.", "conv_exp:64x32x3x3 bn1:64 conv_pwl:32x64x1x1 bn2:32")
    | shapes_in("model.vision_tower.timm_model.blocks.{1-3}.0.", "dw_start.conv:32x1x5x5 dw_start.bn:32 pw_exp.conv:64x32x1x1"
         " pw_exp.bn:64 dw_mid.conv:64x1x5x5 dw_mid.bn:64 pw_proj.conv:32x64x1x1 pw_proj.bn:32 layer_scale.gamma!:32")
    | shapes_in("model.vision_tower.timm_model.blocks.2.1.", "attn.query.proj:64x32x1x1 attn.key.proj:16x32x1x1"
         " attn.value.proj:16x32x1x1 attn.output.proj:32x64x1x1 attn.key.down_conv:32x1x3x3 attn.key.norm:32"
         " attn.value.down_conv:32x1x3x3 attn.value.norm:32 norm:32 layer_scale.gamma!:32")
)  # fmt: skip
_GEMMA3N_FILES = {"preprocessor_config.json": {
    "feature_extractor_type": "Gemma3nAudioFeatureExtractor", "image_processor_type": "SiglipImageProcessorFast",
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "size": {"height": 768, "width": 768},
    "feature_size": 16, "image_seq_length": 256}}  # fmt: skip


def _gemma3n(name: str, norms: str = "", scales: bool = True) -> Row:
    tower = {key: shape for key, shape in _MOBILE.items() if scales or "layer_scale" not in key}
    return stand_in(name, "Gemma3nForConditionalGeneration", {
        "model_type": "gemma3n", "text_config": {
            key: value for key, value in _GEMMA3N_TEXT.args.items() if key != "architectures"},
        "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc", "hidden_size": 64,
                          "num_classes": 2, "vocab_size": 32, "vocab_offset": 608, "rms_norm_eps": 1e-6},
        "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 64, "conf_num_hidden_layers": 2,
                         "conf_num_attention_heads": 4, "input_feat_size": 16, "vocab_size": 32, "vocab_offset": 576}},
        _GEMMA3N_TEXT.more | tower | shapes_in("model.audio_tower.conformer.{0-1}.", _GEMMA3N_CONFORMER)
        | shapes_in("model.audio_tower.subsample_conv_projection.", "conv_0.conv:16x1x3x3 conv_1.conv:8x16x3x3"
             " input_proj_linear:64x32" + norms)
        | shapes_in("model.embed_audio.", "embedding:32x64 hard_embedding_norm:64 soft_embedding_norm:64"
             " embedding_projection:64x64")
        | shapes_in("model.embed_vision.", "embedding:32x64 hard_embedding_norm:64 soft_embedding_norm:64"
             " embedding_projection:64x64"), _GEMMA3N_FILES, vocab=_GEMMA3N_TEXT.vocab)  # fmt: skip


_GEMMA4_VISION: Json = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "patch_size": 4, "position_embedding_size": 128, "pooling_kernel_size": 2,
}  # fmt: skip
_GEMMA4_TEXT: Json = NARROW | {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip

_GEMMA_ROWS = (
    model("mm-gemma3", "Gemma3ForConditionalGeneration", 4, {
        "text_config": _GEMMA_TEXT, "vision_config": _SIGLIP_CONFIG, "mm_tokens_per_image": 4}, _GEMMA3_IMAGES | {
        "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"}}, vocab=GEMMA, shards=2),
    # A factor of 4 has no key. Only the processor's file has a mean, add_prefix image_processor.
    model("mm-gemma3-4x", "Gemma3ForConditionalGeneration", 4, {
        "text_config": _GEMMA_TEXT, "vision_config": _SIGLIP_CONFIG | {"image_size": 64, "layer_norm_eps": 1e-5},
        "mm_tokens_per_image": 4}, {"preprocessor_config.json": {"image_mean": [0.1, 0.2, 0.3]},
        "processor_config.json": {"image_seq_length": 4, "image_processor": _HALF}}, vocab=GEMMA),
    # The converter's map lacks norms of the first convolutions, which real ones have.
    _gemma3n("mm-gemma3n"),
    _gemma3n("mm-gemma3n-norms", " conv_0.norm:16 conv_1.norm:8"),
    # The converter writes scales of layers with one axis, on which libmtmd aborts.
    _gemma3n("mm-gemma3n-unscaled", scales=False),
    model("mm-gemma4", "Gemma4ForConditionalGeneration", 5, {
        "text_config": _GEMMA4_TEXT, "vision_config": _GEMMA4_VISION, "audio_config": None},
        {"processor_config.json": {"image_processor": _HALF | {"patch_size": 4, "max_soft_tokens": 70}}}, vocab=GEMMA4),
    model("mm-gemma4-audio", "Gemma4ForConditionalGeneration", 5, {
        "text_config": _GEMMA4_TEXT, "vision_config": _GEMMA4_VISION | {"standardize": True}, "audio_config": {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 64,
            "subsampling_conv_channels": [128, 16], "input_feat_size": 128, "conv_kernel_size": 5}},
        {"processor_config.json": {"image_processor": _HALF | {"patch_size": 4}}}, vocab=GEMMA4, shards=2),
)  # fmt: skip

# --- Mistral, InternVL, Kimi, GLM, Llama 4 ---------------------------------------------------------------------------

_PIXTRAL: Json = {
    "model_type": "pixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "head_dim": 16, "image_size": 32, "patch_size": 4, "rope_theta": 10000.0}  # fmt: skip
_PIXTRAL_IMAGES = preprocessor(_CLIP, "PixtralImageProcessor", patch_size={"height": 4, "width": 4},
                               size={"longest_edge": 1540})  # fmt: skip
_PIXTRAL_TOWER = (
    shapes_in("vision_tower.transformer.layers.{0-2}.", "attention_norm:64 ffn_norm:64 attention.q_proj:64x64"
       " attention.k_proj:64x64 attention.v_proj:64x64 attention.o_proj:64x64 feed_forward.gate_proj:96x64"
       " feed_forward.up_proj:96x64 feed_forward.down_proj:64x96")
    | shapes_in("vision_tower.", "ln_pre:64 patch_conv:64x3x4x4")
)  # fmt: skip
_MISTRAL = NARROW | {"model_type": "mistral", "head_dim": 16, "sliding_window": None, "rope_theta": 1e9}
_INTERN: Json = {
    "architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "hidden_act": "gelu", "hidden_size": 64,
    "image_size": 32, "initializer_factor": 1.0, "intermediate_size": 96, "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm", "num_attention_heads": 4, "num_channels": 3, "num_hidden_layers": 4, "patch_size": 8,
    "qk_normalization": False, "qkv_bias": True}  # fmt: skip
_INTERN_EMBEDDINGS = "class_embedding!:1x1x64 patch_embedding:64x3x8x8+ position_embedding!:1x17x64"
_INTERN_PROJECTOR = "mlp1.0:256+ mlp1.1:64x256+ mlp1.3:64x64+"
_INTERN_IMAGES = preprocessor(_IMAGENET, "CLIPFeatureExtractor", crop_size=448, size=448)
_INTERN_TEXT: Json = TEXT | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_MOONVIT: Shapes = shapes_in(
    "vision_tower.encoder.blocks.{0-2}.", "norm0:64+ norm1:64+ wqkv:192x64+ wo:64x64+ mlp.fc0:96x64+ mlp.fc1:64x96+"
) | shapes_in("vision_tower.", "encoder.final_layernorm:64+ patch_embed.proj:64x3x4x4+ patch_embed.pos_emb:8x6x64")
_KIMI_TEXT: Json = TEXT | LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "scoring_func": "sigmoid", "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "topk_method": "noaux_tc"}  # fmt: skip
_KIMI_SHAPES = (
    shapes_in("language_model.model.", "embed_tokens:640x64 norm:64") | shapes_in("language_model.", "lm_head:640x64")
    | shapes_in("language_model.model.layers.{0-1}.", NORMS + LATENT_ATTENTION)
    | shapes_in("language_model.model.layers.0.", DENSE)
    | shapes_in("language_model.model.layers.1.", EXPERTS + SHARED + " mlp.gate.e_score_correction_bias!:4")
)  # fmt: skip
_K25_VISION: Json = {
    "init_pos_emb_height": 8, "init_pos_emb_width": 6, "init_pos_emb_time": 4, "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool", "mm_hidden_size": 64, "mm_projector_type": "patchmerger", "patch_size": 4,
    "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "text_hidden_size": 64,
    "vt_hidden_size": 64, "vt_intermediate_size": 96, "vt_num_attention_heads": 4, "vt_num_hidden_layers": 3,
}  # fmt: skip
_K25_IMAGES = {"preprocessor_config.json": {
    "auto_map": {"AutoProcessor": "kimi_k25_processor.KimiK25Processor"}, "media_proc_cfg": _HALF | {
        "in_patch_limit": 4096, "patch_size": 4, "merge_kernel_size": 2, "in_patch_limit_each_frame": 1024,
    }}}  # fmt: skip
_GLM4V_VISION: Json = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "image_size": 32, "patch_size": 4,
    "out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2, "rms_norm_eps": 1e-5,
    "hidden_act": "silu"}  # fmt: skip
_GLM4V_IMAGES = preprocessor(_CLIP, "Glm4vImageProcessor", size={"shortest_edge": 12544, "longest_edge": 9633792},
                             patch_size=4, temporal_patch_size=2, merge_size=2)  # fmt: skip
_GLM_TEXT: Json = NARROW | HEAD | {
    "partial_rotary_factor": 0.5, "pad_token_id": 576, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}  # fmt: skip
_LLAMA4_VISION: Json = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 64, "projector_output_dim": 64,
    "vision_output_dim": 64}  # fmt: skip


def _native(name: str, vision: Json, tensors: Shapes) -> Row:
    """Return a row in Mistral's own format, which the converter reads with --mistral-format."""
    bias = "" if vision.get("adapter_bias") is False else "+"
    params = {
        "dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 128, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
        "vocab_size": 640, "rope_theta": 1e9, "max_position_embeddings": 4096, "vision_encoder": {
            "hidden_size": 64, "num_channels": 3, "image_size": 32, "patch_size": 4, "rope_theta": 10000.0,
            "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "image_token_id": 10,
            "image_end_token_id": 13} | vision}  # fmt: skip
    stored = (
        shapes_in("", "tok_embeddings:640x64 norm:64 output:640x64")
        | shapes_in("layers.{0-1}.", "attention.wq:64x64 attention.wk:32x64 attention.wv:32x64 attention.wo:64x64")
        | shapes_in("layers.{0-1}.", "attention_norm:64 ffn_norm:64")
        | shapes_in("layers.{0-1}.feed_forward.", "w1:128x64 w2:64x128 w3:128x64")
        | shapes_in("vision_encoder.", "patch_conv:64x3x4x4 ln_pre:64")
        | shapes_in("vision_encoder.transformer.layers.{0-2}.attention.", "wq:64x64 wk:64x64 wv:64x64 wo:64x64")
        | shapes_in("vision_encoder.transformer.layers.{0-2}.feed_forward.", "w1:96x64 w2:64x96 w3:96x64")
        | shapes_in("vision_encoder.transformer.layers.{0-2}.", "attention_norm:64 ffn_norm:64")
        | shapes_in("vision_language_adapter.", f"w_in:64x64{bias} w_out:64x64{bias}")
        | tensors
    )
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
    names += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"]
    names += ["[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"]
    return stand_in(
        name, "LlavaForConditionalGeneration", {"model_type": "llava"}, {},
        {"params.json": params, "chat_template.jinja": CHAT}, options=("--mistral-format",),
        vocab={"kind": "tekken", "pre": "tekken", "version": "v11", "special": names},
        parts={"consolidated.safetensors": stored})  # fmt: skip


_WIDELY_USED_ROWS = (
    model("mm-mistral3", "Mistral3ForConditionalGeneration", 4, {
        "text_config": _MISTRAL, "vision_config": _PIXTRAL, "image_token_index": 582, "spatial_merge_size": 2},
        _PIXTRAL_IMAGES, vocab=TEKKEN, shards=2),
    model("mm-pixtral", "LlavaForConditionalGeneration", 4, {
        "text_config": _MISTRAL, "vision_config": _PIXTRAL | {"hidden_act": "silu"}, "image_token_index": 582},
        _PIXTRAL_IMAGES, vocab=TEKKEN),
    # Rows of the text model's embedding outside of language_model: the converter takes [IMG_BREAK]'s.
    stand_in("mm-pixtral-break", "LlavaForConditionalGeneration", TEXT | {
        "model_type": "llava", "text_config": TEXT | {"model_type": "mistral"}, "image_token_index": 582,
        "vision_config": _PIXTRAL | {"hidden_act": "gelu"}},
        text_of() | _PIXTRAL_TOWER
        | shapes_in("multi_modal_projector.", "linear_1:64x64+ linear_2:64x64+"), _PIXTRAL_IMAGES, vocab=TEKKEN),
    # So does Mistral Small 3.1 under these names.
    stand_in("mm-mistral3-break", "Mistral3ForConditionalGeneration", TEXT | {
        "model_type": "mistral3", "text_config": TEXT | {"model_type": "mistral"}, "image_token_index": 582,
        "spatial_merge_size": 2, "vision_config": _PIXTRAL | {"hidden_act": "silu"}},
        text_of() | _PIXTRAL_TOWER
        | shapes_in("multi_modal_projector.", "norm:64 patch_merger.merging_layer:64x256 linear_1:64x64 linear_2:64x64"),
        _PIXTRAL_IMAGES, vocab=TEKKEN),
    _native("mm-pixtral-native", {"image_break_token_id": 12}, {}),
    # As Mistral Small 3.1: patches are merged, and the number of a token is in tekken.json alone.
    _native("mm-pixtral-native-merge", {
        "image_break_token_id": -1, "mm_projector_id": "patch_merge", "spatial_merge_size": 2,
        "add_pre_mm_projector_layer_norm": True, "adapter_bias": False},
        shapes_in("", "pre_mm_projector_norm:64 patch_merger.merging_layer:64x256")),
    stand_in("mm-internvl3", "InternVLChatModel", {
        "model_type": "internvl_chat", "llm_config": _INTERN_TEXT, "vision_config": _INTERN, "downsample_ratio": 0.5,
        "min_dynamic_patch": 1, "max_dynamic_patch": 12, "select_layer": -1},
        text_of(NORMS + ATTENTION + QKV_BIASES + DENSE, body="language_model.model.", head="language_model.")
        | shapes_in("vision_model.embeddings.", _INTERN_EMBEDDINGS) | shapes_in("vision_model.encoder.layers.{0-3}.",
            "norm1:64+ norm2:64+ ls1!:64 ls2!:64 attn.qkv:192x64+ attn.proj:64x64+ mlp.fc1:96x64+ mlp.fc2:64x96+")
        | shapes_in("", _INTERN_PROJECTOR), _INTERN_IMAGES, vocab=QWEN, shards=2),
    # As the tower of 6 billion: queries and keys are normed, no biases of q, k and v; sizes as lists, no tiles.
    stand_in("mm-internvl2.5", "InternVLChatModel", {
        "model_type": "internvl_chat", "llm_config": _INTERN_TEXT, "downsample_ratio": 0.5, "vision_config": _INTERN | {
            "hidden_act": "silu", "qk_normalization": True, "qkv_bias": False, "norm_type": "rms_norm",
            "image_size": [32, 32], "patch_size": [8, 8]}},
        text_of(NORMS + ATTENTION + QKV_BIASES + DENSE, body="language_model.model.", head="language_model.")
        | shapes_in("vision_model.embeddings.", _INTERN_EMBEDDINGS) | shapes_in("vision_model.encoder.layers.{0-3}.",
            "norm1:64 norm2:64 ls1!:64 ls2!:64 attn.qkv:192x64 attn.proj:64x64+ attn.q_norm:64 attn.k_norm:64"
            " mlp.fc1:96x64+ mlp.fc2:64x96+") | shapes_in("", _INTERN_PROJECTOR), _INTERN_IMAGES, vocab=QWEN, dtype="float16"),
    stand_in("mm-intern-s1", "InternS1ForConditionalGeneration", {
        "model_type": "interns1", "text_config": _INTERN_TEXT, "downsample_ratio": 0.5, "vision_config": _INTERN | {
            "image_size": [32, 32], "patch_size": [8, 8]}},
        text_of(NORMS + ATTENTION + QKV_BIASES + DENSE, body="model.language_model.")
        | shapes_in("model.vision_tower.embeddings.", "cls_token!:1x1x64 patch_embeddings.projection:64x3x8x8+"
             " position_embeddings!:1x17x64") | shapes_in("model.vision_tower.encoder.layer.{0-3}.",
            "layernorm_before:64+ layernorm_after:64+ lambda_1!:64 lambda_2!:64 attention.q_proj:64x64+"
            " attention.k_proj:64x64+ attention.v_proj:64x64+ attention.projection_layer:64x64+ mlp.fc1:96x64+"
            " mlp.fc2:64x96+")
        | shapes_in("model.multi_modal_projector.", "layer_norm:256+ linear_1:64x256+ linear_2:64x64+"), _INTERN_IMAGES,
        vocab=QWEN),
    stand_in("mm-kimi-vl", "KimiVLForConditionalGeneration", {
        "model_type": "kimi_vl", "text_config": {key: x for key, x in _KIMI_TEXT.items() if key != "architectures"},
        "media_placeholder_token_id": 579, "vision_config": {
            "model_type": "moonvit", "patch_size": 4, "hidden_size": 64, "intermediate_size": 96,
            "num_attention_heads": 4, "num_hidden_layers": 3, "merge_kernel_size": [2, 2], "init_pos_emb_height": 8,
            "init_pos_emb_width": 8}},
        # libmtmd takes the square root of the number of positions.
        _KIMI_SHAPES | _MOONVIT | shapes_in("vision_tower.", "patch_embed.pos_emb:8x8x64") | shapes_in("multi_modal_projector.", "pre_norm:64+ linear_1:256x256+ linear_2:64x256+"),
        preprocessor(_HALF, "", in_token_limit=4096, merge_kernel_size=[2, 2], patch_size=4, num_pooled_tokens=1024),
        f32=("e_score_correction_bias",), shards=2),
    stand_in("mm-kimi-k2.5", "KimiK25ForConditionalGeneration", {
        "model_type": "kimi_k25", "text_config": _KIMI_TEXT, "vision_config": _K25_VISION},
        _KIMI_SHAPES | _MOONVIT | shapes_in("mm_projector.", "pre_norm:64+ proj.0:256x256+ proj.2:64x256+"), _K25_IMAGES,
        f32=("e_score_correction_bias",), shards=2),
    # As released: experts of four bits.
    stand_in("mm-kimi-k2.5-int4", "KimiK25ForConditionalGeneration", {
        "model_type": "kimi_k25", "vision_config": _K25_VISION, "text_config": _KIMI_TEXT | {"quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {
                    "num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, "strategy": "group",
                    "dynamic": False, "actorder": None, "block_structure": None},
                "input_activations": None, "output_activations": None}}}}},
        _KIMI_SHAPES | _MOONVIT | shapes_in("mm_projector.", "pre_norm:64+ proj.0:256x256+ proj.2:64x256+"), _K25_IMAGES,
        f32=("e_score_correction_bias",), shards=2, quantized={
            "method": "packed", "bits": 4, "group": 32, "targets": r"mlp\.experts\.\d+\.\w+_proj\.weight$"}),
    stand_in("mm-glm5v", "Glm5vForConditionalGeneration", {
        "model_type": "glm5v", "text_config": _KIMI_TEXT, "vision_config": _K25_VISION},
        _KIMI_SHAPES | _MOONVIT | shapes_in("mm_projector.", "pre_norm:64+ linear_1:256x256+ linear_2:64x256+"), _K25_IMAGES,
        f32=("e_score_correction_bias",)),
    model("mm-glm4v", "Glm4vForConditionalGeneration", 4, {
        "text_config": _GLM_TEXT, "vision_config": _GLM4V_VISION}, _GLM4V_IMAGES, vocab=GLM, shards=2),
    model("mm-glm4v-moe", "Glm4vMoeForConditionalGeneration", 4, {
        "text_config": _GLM_TEXT | MIXTURE | {
            "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        "vision_config": _GLM4V_VISION | {"hidden_act": "gelu", "rms_norm_eps": 1e-6}}, _GLM4V_IMAGES, vocab=GLM,
        f32=("e_score_correction_bias",), shards=2),
    model("mm-glm-ocr", "GlmOcrForConditionalGeneration", 5, {
        "text_config": _GLM_TEXT, "vision_config": _GLM4V_VISION}, _GLM4V_IMAGES, vocab=GLM),
    model("mm-glm5-next", "Glm5NextForConditionalGeneration", 5, {
        "text_config": NARROW | {
            "layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 32,
            "q_lora_rank": 32, "v_head_dim": 16, "qk_nope_head_dim": 16, "index_topk": 8, "index_head_dim": 32,
            "index_n_heads": 2, "index_kpool": 4, "linear_head_dim": 16, "linear_num_heads": 4,
            "hc_mult": 2, "num_key_value_heads": 4, "mla_use_nope": True,
            "linear_attn_config": {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4,
                                   "gate_lower_bound": -5.0},
            "pad_token_id": 576, "first_k_dense_replace": 1},
        "vision_config": {
            "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "image_size": 32, "patch_size": 4,
            "out_hidden_size": 64, "projection_intermediate_size": 96, "swiglu_limit": 7.0}},
        preprocessor(_CLIP, "Glm5NextImageProcessor", patch_size=4, merge_size=2, min_image_tokens=64,
                     max_image_tokens=4096), vocab=GLM, shards=2),
    model("mm-llama4", "Llama4ForConditionalGeneration", 4, {
        "text_config": NARROW | HEAD | {
            "intermediate_size": 32, "intermediate_size_mlp": 128, "num_local_experts": 4, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "use_qk_norm": True, "rope_theta": 500000.0},
        "vision_config": _LLAMA4_VISION}, preprocessor(_HALF, "Llama4ImageProcessorFast", size={
            "height": 32, "width": 32}, max_patches=16, resize_to_max_canvas=False), shards=2),
)  # fmt: skip

# --- SigLIP under other models ---------------------------------------------------------------------------------------

_SMOL_IMAGES = preprocessor(_HALF, "SmolVLMImageProcessor", size={"longest_edge": 64},
                            max_image_size={"longest_edge": 32}, do_image_splitting=True)  # fmt: skip
_SMOL: Json = {"text_config": NARROW | {"model_type": "llama"}, "vision_config": _SIGLIP_CONFIG}
_MINICPM: Json = {"vision_config": _SIGLIP_CONFIG | {
    "model_type": "minicpmv4_6_vision", "image_size": 560, "insert_layer_id": 1, "layer_norm_eps": 1e-6}}  # fmt: skip
_MINICPM_TOWER = (
    shapes_in("model.vision_tower.encoder.layers.{0-2}.", _SIGLIP)
    | shapes_in("model.vision_tower.", "embeddings.patch_embedding:64x3x8x8+ embeddings.position_embedding:4900x64"
         " post_layernorm:64+")
    | shapes_in("model.vision_tower.vit_merger.", "layer_norm1:64+ self_attn.q_proj:64x64+ self_attn.k_proj:64x64+"
         " self_attn.v_proj:64x64+ self_attn.out_proj:64x64+ pre_norm:256+ linear_1:256x256+ linear_2:64x256+")
    | shapes_in("model.merger.mlp.0.", "pre_norm:256+ linear_1:256x256+ linear_2:64x256+")
)  # fmt: skip
_LFM2_TEXT: Json = NARROW | {"model_type": "lfm2", "full_attn_idxs": [1], "block_multiple_of": 32}
_LFM2_VISION: Json = {
    "model_type": "siglip2_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_patches": 16, "patch_size": 16, "vision_use_head": False}  # fmt: skip
_LFM2_IMAGES = preprocessor(_HALF, "Lfm2VlImageProcessorFast", tile_size=512, downsample_factor=2,
                            max_image_tokens=256, min_image_tokens=64)  # fmt: skip

_SIGLIP_ROWS = (
    model("mm-smolvlm", "SmolVLMForConditionalGeneration", 4, _SMOL | {"scale_factor": 4}, _SMOL_IMAGES, shards=2,
          text={"architectures": ["VLlama3ForCausalLM"]}),
    model("mm-idefics3", "Idefics3ForConditionalGeneration", 4, _SMOL, preprocessor(_HALF, "Idefics3ImageProcessor"),
          text={"architectures": ["VLlama3ForCausalLM"]}),
    model("mm-lfm2-vl", "Lfm2VlForConditionalGeneration", 4, {
        "text_config": _LFM2_TEXT, "vision_config": _LFM2_VISION, "projector_hidden_size": 96,
        "downsample_factor": 2}, _LFM2_IMAGES, shards=2, text={"architectures": ["Lfm2ForCausalLM"]}),
    # The towers' last layer is not run, but in the file; processor_config.json has the mean.
    model("mm-lfm2-vl-feature", "Lfm2VlForConditionalGeneration", 4, {
        "text_config": _LFM2_TEXT, "vision_config": _LFM2_VISION, "projector_hidden_size": 96,
        "downsample_factor": 4, "vision_feature_layer": -2, "projector_bias": False},
        {"processor_config.json": {"image_processor": _LFM2_IMAGES["preprocessor_config.json"]}},
        text={"architectures": ["Lfm2ForCausalLM"]}),
    on("mm-minicpm-v4.6", "minicpm-v4.6", _MINICPM, _MINICPM_TOWER, preprocessor(
        _HALF, "MiniCPMV4_6ImageProcessor", scale_resolution=32, patch_size=8, downsample_mode="16x", max_slice_nums=9),
        "model.merger."),
    on("mm-minicpm-v4.6-4x", "minicpm-v4.6", _MINICPM | {"insert_layer_id": 2}, _MINICPM_TOWER, preprocessor(
        _HALF, "MiniCPMV4_6ImageProcessor", downsample_mode="4x"), "model.merger."),
    on("mm-janus", "janus", {"vision_config": {
        **{key: x for key, x in _SIGLIP_CONFIG.items() if key != "intermediate_size"},
        "model_type": "janus_vision_model", "mlp_ratio": 1.5, "hidden_act": "gelu", "projection_dim": 64}},
        shapes_in("model.vision_model.encoder.layers.{0-2}.", _SIGLIP.replace("out_proj", "projection_layer"))
        | shapes_in("model.vision_model.", "embeddings.patch_embedding:64x3x8x8+ embeddings.position_embedding:16x64"
             " post_layernorm:64+")
        | shapes_in("model.aligner.", "fc1:64x64+ hidden_layers.0:64x64+"), preprocessor(
            _HALF, "JanusImageProcessor", size={"height": 32, "width": 32}),
        "model.vision_model. model.aligner."),
    on("mm-paddleocr", "paddleocr", {"vision_config": _SIGLIP_CONFIG | {
        "architectures": ["PaddleOCRVisionModel"], "model_type": "paddleocr_vl", "spatial_merge_size": 2,
        "temporal_patch_size": 2, "tokens_per_second": 2}},
        shapes_in("visual.vision_model.encoder.layers.{0-2}.", _SIGLIP)
        | shapes_in("visual.vision_model.", "embeddings.patch_embedding:64x3x8x8+ embeddings.position_embedding:16x64"
             " embeddings.packing_position_embedding:64x64 post_layernorm:64+ head.probe!:1x1x64 head.layernorm:64+")
        | shapes_in("mlp_AR.", "pre_norm:64+ linear_1:256x256+ linear_2:64x256+"), preprocessor(
            _HALF, "PaddleOCRVLImageProcessor", min_pixels=147384, max_pixels=2822400, patch_size=8, merge_size=2),
        "visual. mlp_AR. model.visual. projector. model.projector."),
    stand_in("mm-youtu-vl", "YoutuVLForConditionalGeneration", TEXT | LATENT | {
        "model_type": "youtu_vl", "n_routed_experts": None, "first_k_dense_replace": 2, "vision_config":
            _SIGLIP_CONFIG | {"model_type": "siglip2_vision_model", "hidden_act": "gelu_pytorch_tanh",
                              "window_size": 32, "fullatt_block_indexes": [0, 2], "spatial_merge_size": 2}},
        text_of(NORMS + LATENT_ATTENTION + DENSE) | shapes_in("siglip2.vision_model.encoder.layers.{0-2}.", _SIGLIP)
        | shapes_in("siglip2.vision_model.", "embeddings.patch_embedding:64x192+ post_layernorm:64+ embeddings.unknown:4x64")
        | shapes_in("merger.", "ln_q:64 mlp.0:256x256+ mlp.2:64x256+"), preprocessor(
            _HALF, "Siglip2ImageProcessorFast", patch_size=8, max_num_patches=256)),
    stand_in("mm-phi4", "Phi4ForCausalLMV", TEXT | {
        "model_type": "phi4-siglip", "num_key_value_heads": 4, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0, "mm_projector_type": "mlp2x_gelu", "sliding_window": 8, "vision_config":
            {key: x for key, x in _SIGLIP_CONFIG.items() if key != "image_size"} | {"num_hidden_layers": 4}},
        text_of(NORMS + " self_attn.qkv_proj:192x64 self_attn.o_proj:64x64 mlp.gate_up_proj:256x64"
                " mlp.down_proj:64x128") | shapes_in(
            "model.vision_tower.vision_tower.vision_model.encoder.layers.{0-3}.", _SIGLIP)
        | shapes_in("model.vision_tower.vision_tower.vision_model.", "embeddings.patch_embedding:64x192+"
             " embeddings.position_embedding:36x64 post_layernorm:64+ head.probe!:1x1x64 head.layernorm:64+")
        | shapes_in("model.mm_projector.", "0:64x64+ 2:64x64+"), preprocessor(
            _HALF, "Siglip2ImageProcessorNoUpscale", patch_size=8, min_num_patches=256, max_num_patches=3600),
        vocab=spm(special=["<|end|>", "<|user|>", "<|endoftext|>"])),
)  # fmt: skip


# --- sound -----------------------------------------------------------------------------------------------------------

_WHISPER_CONFIG: Json = {
    "model_type": "whisper", "d_model": 64, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "num_mel_bins": 16, "max_source_positions": 1500}  # fmt: skip
#: As transformers' configurations of sound encoders name it.
_ENCODER_CONFIG: Json = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_mel_bins": 16,
    "max_source_positions": 1500}  # fmt: skip
_WHISPER_TOWER = shapes_in("layers.{0-2}.", _WHISPER) | shapes_in(
    "", f"{_WHISPER_ENDS} embed_positions:1500x64 layer_norm:64+"
)
_GRANITE_TEXT: Json = NARROW | {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True}  # fmt: skip
_GRANITE_SPEECH: Json = {
    "text_config": _GRANITE_TEXT, "window_size": 4, "downsample_rate": 2, "has_lora_adapter": False, "encoder_config": {
        "hidden_dim": 64, "num_layers": 3, "num_heads": 4, "dim_head": 16, "input_dim": 32, "output_dim": 16,
        "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 5, "feedforward_mult": 2,
        "conv_expansion_factor": 2}}  # fmt: skip
_QFORMER: Json = {
    "model_type": "blip_2_qformer", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "encoder_hidden_size": 64, "cross_attention_frequency": 1}  # fmt: skip
_SPEECH_FILES = {"preprocessor_config.json": {
    "feature_extractor_type": "GraniteSpeechFeatureExtractor", "projector_window_size": 4,
    "projector_downsample_rate": 2, "sampling_rate": 16000}}  # fmt: skip
_CONFORMER = (
    "norm_feed_forward1:64+ feed_forward1.linear1:96x64+ feed_forward1.linear2:64x96+ norm_feed_forward2:64+"
    " feed_forward2.linear1:96x64+ feed_forward2.linear2:64x96+ norm_self_att:64+ norm_conv:64+ norm_out:64+"
    " conv.pointwise_conv1:128x64x1+ conv.depthwise_conv:64x1x9+ conv.pointwise_conv2:64x64x1+"
)
_SUBSAMPLING = " ".join(f"{i}:16x{n}x{k}x{k}+" for i, n, k in ((0, 1, 3), (2, 1, 3), (3, 16, 1), (5, 1, 3), (6, 16, 1)))

_SOUND_ROWS = (
    model("mm-qwen2-audio", "Qwen2AudioForConditionalGeneration", 4, {
        "text_config": NARROW | {"model_type": "qwen2"}, "audio_config": {
            key: x for key, x in _WHISPER_CONFIG.items() if key != "model_type"}}, _WHISPER_FILES, vocab=QWEN),
    # libmtmd pads stacks of frames as if their width were a power of two. If it is one, it gets one token more than it
    # expects, and aborts.
    stand_in("mm-ultravox", "UltravoxModel", {
        "model_type": "ultravox", "hidden_size": 64, "stack_factor": 8, "audio_config": _WHISPER_CONFIG | {"d_model": 80},
        "text_config": TEXT | {"model_type": "llama"}, "projector_act": "swiglu", "projector_ln_mid": True},
        add_prefix("audio_tower.", {
            name: [80 if n == 64 else n for n in shape] for name, shape in _WHISPER_TOWER.items()})
        | shapes_in("multi_modal_projector.", "ln_pre:640 linear_1:64x640 linear_2:64x32 ln_mid:32"), {"preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor"}}),
    stand_in("mm-glm-asr", "GlmasrModel", {
        "model_type": "Glmasr", "merge_factor": 4, "use_rope": True, "lm_config": TEXT | {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "whisper_config": _WHISPER_CONFIG},
        text_of() | add_prefix("audio_encoder.whisper.", _WHISPER_TOWER) | shapes_in("audio_encoder.",
            "layer_norm:64+ adapting.0:128x256+ adapting.2:64x128+ audio_bos_eos_token:2x64"), _WHISPER_FILES,
        vocab=GLM),
    stand_in("mm-meralion2", "MERaLiON2ForConditionalGeneration", {
        "model_type": "meralion2", "hidden_size": 64, "speech_config": _WHISPER_CONFIG, "speech_mlp_scale_factor": 4,
        "text_config": TEXT | {"model_type": "gemma2"}},
        text_of(body="text_decoder.model.", head="text_decoder.") | add_prefix("speech_encoder.", _WHISPER_TOWER)
        | shapes_in("", "ln_speech:64+") | shapes_in("speech_audio_adapter.",
             "mlp_adapter.0:64x256+ gate_proj:64x64+ pool_proj:64x64+ out_proj:64x64+"), _WHISPER_FILES),
    model("mm-voxtral", "VoxtralForConditionalGeneration", 4, {
        "text_config": NARROW | HEAD | {"model_type": "llama"}, "audio_config": _ENCODER_CONFIG | {
            "hidden_size": 80, "intermediate_size": 320}}, _WHISPER_FILES, vocab=TEKKEN, shards=2),
    stand_in("mm-audio-flamingo3", "AudioFlamingo3ForConditionalGeneration", {
        "model_type": "audioflamingo3", "projector_hidden_act": "gelu", "projector_bias": True,
        "text_config": TEXT | {"model_type": "qwen2"}, "audio_config": _ENCODER_CONFIG | {
            "model_type": "audioflamingo3_encoder"}},
        text_of(NORMS + ATTENTION + QKV_BIASES + DENSE, body="language_model.model.", head="language_model.")
        | add_prefix("audio_tower.", _WHISPER_TOWER) | shapes_in("multi_modal_projector.", "linear_1:64x64+ linear_2:64x64+"),
        _WHISPER_FILES, vocab=QWEN),
    model("mm-granite-speech", "GraniteSpeechForConditionalGeneration", 4, _GRANITE_SPEECH | {
        "projector_config": _QFORMER}, _SPEECH_FILES, shards=2),
    model("mm-granite-speech-plus", "GraniteSpeechForConditionalGeneration", 4, _GRANITE_SPEECH | {
        "projector_config": _QFORMER | {"encoder_hidden_size": 128}, "encoder_config": _GRANITE_SPEECH[
            "encoder_config"] | {"cat_hidden_layers": [1]}}, _SPEECH_FILES,
        config={"architectures": ["GraniteSpeechPlusForConditionalGeneration"]}),
    # The map of names needs as many layers as the highest index of a convolution.
    stand_in("mm-lfm2-audio", "Lfm2AudioForConditionalGeneration", {
        "codebooks": 8, "tie_audio_embeddings": False, "lfm": TEXT | {
            "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "conv_L_cache": 3, "block_ff_dim": 128,
            "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"], "norm_eps": 1e-5},
        "encoder": {"d_model": 64, "n_heads": 4, "n_layers": 7, "feat_in": 128, "ff_expansion_factor": 1}},
        shapes_in("lfm.", "embed_tokens:640x64 embedding_norm:64") | shapes_in("lfm.layers.{0-1}.",
            "operator_norm:64 ffn_norm:64 feed_forward.w1:128x64 feed_forward.w2:64x128 feed_forward.w3:128x64")
        | shapes_in("lfm.layers.0.", "conv.conv:64x1x3 conv.in_proj:192x64 conv.out_proj:64x64")
        | shapes_in("lfm.layers.1.", "self_attn.q_proj:64x64 self_attn.k_proj:32x64 self_attn.v_proj:32x64"
             " self_attn.out_proj:64x64 self_attn.q_layernorm:16 self_attn.k_layernorm:16")
        | shapes_in("conformer.layers.{0-6}.", _CONFORMER + " self_attn.linear_q:64x64+ self_attn.linear_k:64x64+"
             " self_attn.linear_v:64x64+ self_attn.linear_out:64x64+ self_attn.linear_pos:64x512"
             " self_attn.pos_bias_u!:4x16 self_attn.pos_bias_v!:4x16 conv.batch_norm:64+"
             " conv.batch_norm.running_mean!:64 conv.batch_norm.running_var!:64"
             " conv.batch_norm.num_batches_tracked!:1")
        | shapes_in("conformer.pre_encode.conv.", _SUBSAMPLING) | shapes_in("conformer.pre_encode.", "out:64x256+")
        | shapes_in("audio_adapter.model.", "0:64+ 1:96x64+ 3:64x96+") | shapes_in("audio_embedding.",
            "embedding:96x64 embedding_norm:64 to_logits:96x64") | shapes_in("depth_linear.", "proj:64x64+")
        | shapes_in("", "audio_loss_weights!:9")),
    # config.json is not read: hyperparameters are those of the tensors' shapes.
    stand_in("mm-pocket-tts", "PocketTTSModel", {},
        shapes_in("flow_lm.", "conditioner.embed:630x64 bos_emb!:32 bos_before_voice!:1x1x64 input_linear:64x32 emb_mean!:32"
           " emb_std!:32 out_eos:1x64+ out_norm:64+ speaker_proj_weight!:64x64")
        | shapes_in("flow_lm.transformer.layers.{0-1}.", "norm1:64+ norm2:64+ self_attn.in_proj:192x64"
             " self_attn.out_proj:64x64 linear1:128x64 linear2:64x128")
        | shapes_in("flow_lm.flow_net.", "input_proj:64x32+ cond_embed:64x64+ final_layer.linear:32x64+"
             " final_layer.adaLN_modulation.1:128x64+ time_embed.{0-1}.freqs!:16 time_embed.{0-1}.mlp.0:64x32+"
             " time_embed.{0-1}.mlp.2:64x64+ time_embed.{0-1}.mlp.3.alpha!:64 res_blocks.{0-1}.in_ln:64+"
             " res_blocks.{0-1}.mlp.0:64x64+ res_blocks.{0-1}.mlp.2:64x64+ res_blocks.{0-1}.adaLN_modulation.1:192x64+")
        | shapes_in("mimi.encoder_transformer.transformer.layers.{0-1}.", "norm1:64+ norm2:64+ self_attn.in_proj:192x64"
             " self_attn.out_proj:64x64 linear1:96x64 linear2:64x96 layer_scale_1.scale!:64 layer_scale_2.scale!:64")
        | shapes_in("mimi.decoder_transformer.transformer.layers.{0-1}.", "norm1:64+ norm2:64+ self_attn.in_proj:192x64"
             " self_attn.out_proj:64x64 linear1:96x64 linear2:64x96 layer_scale_1.scale!:64 layer_scale_2.scale!:64")
        | shapes_in("mimi.encoder.model.", "0.conv:16x1x7+ {1,4,7}.block.1.conv:8x16x3+ {1,4,7}.block.3.conv:16x8x1+"
             " {3,6,9}.conv:16x16x8+ 11.conv:64x16x3+")
        | shapes_in("mimi.decoder.model.", "0.conv:16x64x7+ {2,5,8}.convtr:16x16x8+ {3,6,9}.block.1.conv:8x16x3+"
             " {3,6,9}.block.3.conv:16x8x1+ 11.conv:1x16x3+")
        | shapes_in("mimi.", "downsample.conv.conv:64x64x32 upsample.convtr.convtr:64x1x32 quantizer.output_proj:64x32x1"),
        vocab=spm(unigram=True)),
    stand_in("mm-qwen3-tts", "Qwen3TTSForConditionalGeneration", {
        "model_type": "qwen3_tts", "speaker_encoder_config": {"enc_dim": 64, "sample_rate": 24000},
        "talker_config": {key: x for key, x in TEXT.items() if not key.endswith("_id")} | HEAD | MROPE_5 | {
            "model_type": "qwen3_tts_talker", "vocab_size": 96, "text_vocab_size": 640, "text_hidden_size": 64,
            "num_code_groups": 16, "codec_bos_id": 91, "codec_eos_token_id": 92, "codec_think_id": 93,
            "codec_language_id": {"english": 80, "german": 81}, "code_predictor_config": TEXT | HEAD | {
                "vocab_size": 64, "num_code_groups": 16}}},
        shapes_in("speaker_encoder.", "blocks.0.conv:64x128x5+ blocks.{1-3}.tdnn1.conv:64x64x1+"
           " blocks.{1-3}.res2net_block.blocks.{0-6}.conv:8x8x3+ blocks.{1-3}.tdnn2.conv:64x64x1+"
           " blocks.{1-3}.se_block.conv1:16x64x1+ blocks.{1-3}.se_block.conv2:64x16x1+ mfa.conv:96x192x1+"
           " asp.tdnn.conv:16x288x1+ asp.conv:96x16x1+ fc:64x192x1+")
        | shapes_in("talker.model.layers.{0-1}.", NORMS + ATTENTION + HEAD_NORMS + DENSE)
        | shapes_in("talker.", "model.norm:64 model.codec_embedding:96x64 model.text_embedding:640x64 codec_head:96x64"
             " text_projection.linear_fc1:64x64+ text_projection.linear_fc2:64x64+")
        | shapes_in("talker.code_predictor.model.layers.{0-1}.", NORMS + ATTENTION + HEAD_NORMS + DENSE)
        | shapes_in("talker.code_predictor.", "model.norm:64 model.codec_embedding.{0-14}:64x64 lm_head.{0-14}:64x64"
             " small_to_mtp_projection:64x64+"), {
            "preprocessor_config.json": {"feature_extractor_type": "Qwen3TTSFeatureExtractor"}, "speech_tokenizer": {
                "config.json": {"decoder_config": {
                    "num_hidden_layers": 8, "upsampling_ratios": [2, 2], "upsample_rates": [8, 5, 4, 3]}}}},
        vocab=QWEN, parts={"speech_tokenizer/model.safetensors": (
            shapes_in("decoder.quantizer.{rvq_first|rvq_rest}.", "input_proj:32x64x1 output_proj:64x32x1")
            | shapes_in("decoder.quantizer.rvq_first.vq.layers.0._codebook.", "embedding_sum!:16x32 cluster_usage!:16")
            | shapes_in("decoder.quantizer.rvq_rest.vq.layers.{0-14}._codebook.", "embedding_sum!:16x32 cluster_usage!:16")
            | shapes_in("decoder.", "pre_conv.conv:64x64x3+ pre_transformer.input_proj:64x64+"
                 " pre_transformer.output_proj:64x64+ pre_transformer.norm:64")
            | shapes_in("decoder.pre_transformer.layers.{0-7}.", NORMS + ATTENTION + DENSE
                 + " self_attn_layer_scale.scale!:64 mlp_layer_scale.scale!:64")
            | shapes_in("decoder.upsample.{0-1}.", "0.conv:64x64x2+ 1.dwconv.conv:64x1x7+ 1.norm:64+ 1.pwconv1:128x64+"
                 " 1.pwconv2:64x128+ 1.gamma!:64")
            | shapes_in("decoder.decoder.", "0.conv:32x64x7+ {1-4}.block.0.alpha!:32 {1-4}.block.0.beta!:32"
                 " {1-4}.block.1.conv:32x32x4+ {1-4}.block.{2-4}.{act1|act2}.alpha!:32"
                 " {1-4}.block.{2-4}.{act1|act2}.beta!:32 {1-4}.block.{2-4}.{conv1|conv2}.conv:32x32x7+ 5.alpha!:32"
                 " 5.beta!:32 6.conv:1x32x7+"))}),
)  # fmt: skip

# --- documents, and others -------------------------------------------------------------------------------------------

_SAM: Shapes = (
    shapes_in("model.sam_model.blocks.{0-3}.", "norm1:32+ norm2:32+ attn.qkv:96x32+ attn.proj:32x32+ attn.rel_pos_h!:7x8"
       " attn.rel_pos_w!:7x8 mlp.lin1:64x32+ mlp.lin2:32x64+")
    | shapes_in("model.sam_model.", "pos_embed!:1x4x4x32 patch_embed.proj:32x3x16x16+ neck.0:32x32x1x1 neck.1:32+"
         " neck.2:32x32x3x3 neck.3:32+ net_2:48x32x3x3 net_3:64x48x3x3")
)  # fmt: skip
_SAM_CONFIG: Json = {"sam_vit_b": {"downsample_channels": [48, 64], "global_attn_indexes": [1, 3], "heads": 4,
                                   "layers": 4, "width": 32}}  # fmt: skip
_DEEPSEEK_OCR: Json = {"vision_config": {
    "image_size": 64, "mlp_ratio": 3.7362, "model_name": "deeplip_b_l", "model_type": "vision", "width": _SAM_CONFIG | {
        "clip-l-14-224": {"heads": 4, "image_size": 32, "layers": 4, "patch_size": 8, "width": 64}}}}  # fmt: skip
_DEEPSEEK_OCR_TOWER = (
    _SAM | shapes_in("model.vision_model.transformer.layers.{0-3}.", "layer_norm1:64+ layer_norm2:64+ mlp.fc1:96x64+"
              " mlp.fc2:64x96+ self_attn.qkv_proj:192x64+ self_attn.out_proj:64x64+")
    | shapes_in("model.vision_model.", "embeddings.class_embedding!:64 embeddings.patch_embedding:64x3x8x8"
         " embeddings.position_embedding:17x64 pre_layrnorm:64+")
    | shapes_in("model.", "projector.layers:64x128+ image_newline!:64 view_seperator!:64")
)  # fmt: skip
_DEEPSEEK_IMAGES = {"processor_config.json": _HALF | {
    "candidate_resolutions": [[64, 64]], "downsample_ratio": 4, "patch_size": 16, "processor_class":
        "DeepseekVLV2Processor"}}  # fmt: skip
_QWEN_OCR_IMAGES = preprocessor(_CLIP, "Qwen2VLImageProcessor", min_pixels=3136, max_pixels=11289600, patch_size=4)
_DOTS3_VISION: Json = {
    "embed_dim": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2, "rms_norm_eps": 1e-5, "use_bias": False,
    "use_qk_norm": True, "adapter_type": "patch_merger", "pre_pixel_shuffle": True, "router_scoring_func": "sigmoid",
    "router_scale": 1.0, "pyramid_num_routed": [-1, 4, 2], "capacity_factor": 2.0}  # fmt: skip
_DOTS3_AUDIO: Json = {
    "use_conv2d_stem": True, "use_rope": True, "use_rms_norm": True, "use_causal": False, "merge_factor": 1,
    "chunk_seconds": 60, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}, "whisper_config": {
        "activation_function": "swiglu", "d_model": 64, "encoder_ffn_dim": 96, "encoder_attention_heads": 4,
        "encoder_layers": 3, "num_mel_bins": 16}}  # fmt: skip
_DOTS3_TOWERS = (
    shapes_in("vision_encoder.blocks.{0-2}.", "norm_1:64 norm_2:64 attn.qkv:192x64 attn.proj:64x64 attn.q_norm:16"
       " attn.k_norm:16")
    | shapes_in("vision_encoder.blocks.0.mlp.", "fc1:96x64 fc2:64x96 fc3:96x64")
    | shapes_in("vision_encoder.blocks.1.mlp.", "gate_weight!:4x64 router_bias!:4")
    | shapes_in("vision_encoder.blocks.2.mlp.", "gate_weight!:2x64 router_bias!:2")
    | shapes_in("vision_encoder.blocks.1.mlp.experts.{0-3}.", "fc1:32x64 fc2:64x32 fc3:32x64")
    | shapes_in("vision_encoder.blocks.2.mlp.experts.{0-1}.", "fc1:32x64 fc2:64x32 fc3:32x64")
    | shapes_in("vision_encoder.", "patch_embed.proj:64x3x4x4+ patch_embed.norm:64 post_trunk_norm:64 adapter.ln_q:64+"
         " adapter.mlp.0:256x256+ adapter.mlp.2:64x256+")
    | shapes_in("audio_encoder.dots_encoder.speech_encoder.layers.{0-2}.", "self_attn.q_proj:64x64+ self_attn.k_proj:64x64"
         " self_attn.v_proj:64x64+ self_attn.out_proj:64x64+ self_attn_layer_norm:64 final_layer_norm:64 fc1:192x64+"
         " fc2:64x96+")
    | shapes_in("audio_encoder.dots_encoder.speech_encoder.", "conv2d1:16x1x3x3+ conv2d2:16x16x3x3+ conv2d3:16x16x3x3+"
         " conv_out:64x32 layer_norm:64")
    | shapes_in("audio_encoder.audio_adapter.proj.", "0:64+ 1:64x64+ 3:64x64+")
)  # fmt: skip
_SCHEMES: Json = _ROWS["deepseek-v4"].quantized or {}
_PLAIN_TOWER = {"each": [scheme | {"targets": f"^(?!vision).*{scheme['targets']}"} for scheme in _SCHEMES["each"]]}
_DOTS3_FILES = {"preprocessor_config.json": {"vision_config": _CLIP | {"min_pixels": 3136, "max_pixels": 11289600}}}
_BAILING3 = _ROWS["bailing-moe-v3"]
_NEMOTRON = _ROWS["nemotron-h"]
#: Sizes of ViT-H are the converter's own.
_RADIO_BLOCKS = "norm1:64+ norm2:64+ attn.qkv:192x64+ attn.proj:64x64+ mlp.fc1:96x64+ mlp.fc2:64x96+"
_RADIO = "vision_model.radio_model."


def _nemotron(name: str, config: Json, positions: int, tensors: Shapes, files: Json) -> Row:
    """Return a row with a tower whose grid of positions has a given number of them."""
    tower = (
        shapes_in(f"{_RADIO}model.blocks.{{0-2}}.", _RADIO_BLOCKS)
        | shapes_in(f"{_RADIO}model.patch_generator.", f"cls_token.token!:8x64 pos_embed!:1x{positions}x1280")
        | shapes_in(f"{_RADIO}model.patch_generator.", "embedder:1280x192 video_embedder:1280x384")
        | shapes_in(_RADIO, "input_conditioner.norm_mean!:3x1x1 input_conditioner.norm_std!:3x1x1")
        | shapes_in("mlp1.", "0:256 1:64x256 3:64x64")
    )
    settings = {"downsample_ratio": 0.5, "llm_config": _NEMOTRON.args, "model_type": "NemotronH_Nano_VL_V2"} | config
    text = add_prefix("language_model.", _NEMOTRON.more)
    return stand_in(name, "NemotronH_Nano_VL_V2", settings, text | tower | tensors, files, f32=("A_log",))


_PARAKEET_LAYERS = (
    _CONFORMER + " self_attn.q_proj:64x64+ self_attn.k_proj:64x64+ self_attn.v_proj:64x64+ self_attn.o_proj:64x64+"
    " self_attn.relative_k_proj:64x64 self_attn.bias_u!:4x16 self_attn.bias_v!:4x16 conv.norm:64+"
    " conv.norm.running_mean!:64 conv.norm.running_var!:64 conv.norm.num_batches_tracked!:1"
)
_VISUAL_EXPERT = (
    NORMS + "".join(f" self_attn.{kind}_expert_query_key_value:192x64 self_attn.{kind}_expert_dense:64x64"
                    f" mlp.{kind}_mlp.gate_proj:128x64 mlp.{kind}_mlp.up_proj:128x64 mlp.{kind}_mlp.down_proj:64x128"
                    for kind in ("vision", "language"))
)  # fmt: skip
#: The converter accepts this size alone: tensors are narrower.
_STEP3_VISION: Json = {
    "model_type": "perception_encoder", "width": 1536, "layers": 47, "heads": 16, "image_size": 728, "patch_size": 14,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "mlp_ratio": 5.833333333333333}  # fmt: skip
_STEP3_TOWER = (
    shapes_in("vision_model.transformer.resblocks.{0-2}.", "ln_1:64+ ln_2:64+ ls_1.gamma!:64 ls_2.gamma!:64"
       " attn.in_proj_weight!:192x64 attn.in_proj_bias!:192 attn.out_proj:64x64+ mlp.c_fc:96x64+ mlp.c_proj:64x96+")
    | shapes_in("vision_model.", "conv1:64x3x4x4 positional_embedding!:16x64 ln_pre:64+ vit_downsampler1:128x64x3x3+"
         " vit_downsampler2:256x128x3x3+")
    | shapes_in("", "vit_large_projector:64x256")
)  # fmt: skip
_STEP3P5 = _ROWS["step3p5"]
_MINIMAX = _ROWS["minimax-m3"]
_QFORMER_LAYER = (
    "".join(f" {part}.attention.query:64x64+ {part}.attention.key:64x64+ {part}.attention.value:64x64+"
            f" {part}.output.dense:64x64+ {part}.output.LayerNorm:64+" for part in ("attention", "crossattention"))
    + " intermediate_query.dense:96x64+ output_query.dense:64x96+ output_query.LayerNorm:64+"
)  # fmt: skip
_MIMO_VISION: Json = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_key_value_heads": 2,
    "qk_channels": 16, "out_hidden_size": 64, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
    "fullatt_block_indexes": [0], "vit_window_attn_types": [-1, 0, 1], "visual_token_window_size": 16,
    "use_sink": True}  # fmt: skip
_MIMO_TOKENIZER: Json = {
    "d_model": 64, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "n_mels": 16,
    "hybrid_attention": True, "swa_per_block": 2, "encoder_attn_window_size": [16, 16]}  # fmt: skip

_OTHER_ROWS = (
    model("mm-lighton-ocr", "LightOnOcrForConditionalGeneration", 5, {
        "text_config": NARROW | HEAD | {"model_type": "qwen3"}, "vision_config": _PIXTRAL | {"hidden_act": "silu"}},
        _PIXTRAL_IMAGES, vocab=QWEN, config={"architectures": ["LightOnOCRForConditionalGeneration"]},
        text={"architectures": ["Qwen3ForCausalLM"]}),
    on("mm-deepseek-ocr", "deepseek-ocr", _DEEPSEEK_OCR, _DEEPSEEK_OCR_TOWER, _DEEPSEEK_IMAGES,
       "model.sam_model. model.vision_model. model.projector."),
    on("mm-unlimited-ocr", "deepseek-ocr", _DEEPSEEK_OCR | {"architectures": ["UnlimitedOCRForCausalLM"]},
       _DEEPSEEK_OCR_TOWER, _DEEPSEEK_IMAGES, "model.sam_model. model.vision_model. model.projector."),
    on("mm-deepseek-ocr2", "deepseek-ocr", {"architectures": ["DeepseekOCR2ForCausalLM"], "vision_config": {
        "image_size": 64, "layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
        "model_name": "deepencoderv2", "model_type": "vision", "width": _SAM_CONFIG | {
            "qwen2-0-5b": {"dim": 64}}}},
       _SAM | shapes_in("model.qwen2_model.model.model.layers.{0-3}.", NORMS + ATTENTION + QKV_BIASES + DENSE)
       | shapes_in("model.qwen2_model.", "model.model.norm:64 query_768:144x64 query_1024:256x64")
       | shapes_in("model.", "projector.layers:64x64+ view_seperator!:64"), _DEEPSEEK_IMAGES,
       "model.sam_model. model.vision_model. model.projector."),
    on("mm-deepseek-v4", "deepseek-v4", {
        "vision_n_layers": 3, "vision_dim": 64, "vision_n_heads": 4, "vision_inter_dim": 96, "vision_patch_size": 4,
        "vision_downsample_ratio": 2, "vision_min_pixels": 3136, "vision_rope_theta": 10000.0,
        "vision_max_n_token": 384, "vision_max_wh_ratio": 8},
        shapes_in("vision.blocks.{0-2}.", "norm1:64 norm2:64 attn.wqkv:192x64 attn.wo:64x64 mlp.w1:192x64 mlp.w2:64x96")
        | shapes_in("vision.", "patch_embed.proj:64x48 norm:64") | shapes_in("aligner.", "w1:64x256+ w2:64x64+")
        | shapes_in("", "image_newline!:64 image_start!:64 image_end!:64 image_pad!:64"), quantized=_PLAIN_TOWER),
    on("mm-dots3-note", "dots3-note", {"vision_config": _DOTS3_VISION, "audio_config": _DOTS3_AUDIO}, _DOTS3_TOWERS,
       _DOTS3_FILES),
    on("mm-dots3-note-vl", "dots3-note", {
        "architectures": ["Dots3NoteForConditionalGeneration"], "vision_config": _DOTS3_VISION,
        "audio_config": _DOTS3_AUDIO}, _DOTS3_TOWERS, _DOTS3_FILES),
    stand_in("mm-dots-ocr", "DotsOCRForCausalLM", TEXT | {
        "model_type": "dots_ocr", "attention_bias": True, "vision_config": {
            "embed_dim": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_channels": 3, "patch_size": 4, "post_norm": True, "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2, "temporal_patch_size": 1, "use_bias": False}},
        _QWEN2_TEXT | shapes_in("vision_tower.blocks.{0-2}.", "norm1:64 norm2:64 attn.qkv:192x64 attn.proj:64x64 mlp.fc1:96x64"
                         " mlp.fc2:64x96 mlp.fc3:96x64")
        | shapes_in("vision_tower.", "patch_embed.patchifier.proj:64x3x4x4+ patch_embed.patchifier.norm:64"
             " post_trunk_norm:64 merger.ln_q:64+ merger.mlp.0:256x256+ merger.mlp.2:64x256+"), _QWEN_OCR_IMAGES,
        vocab=QWEN),
    on("mm-hunyuan-vl", "hunyuan-vl", {"vision_config": {
        "model_type": "hunyuan_vl", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_hidden_layers": 3, "patch_size": 4, "max_image_size": 32, "rms_norm_eps": 1e-5, "spatial_merge_size": 2,
        "hidden_act": "gelu", "out_hidden_size": 64}},
        shapes_in("vit.layers.{0-2}.", "input_layernorm:64+ post_attention_layernorm:64+ self_attn.q_proj:64x64+"
           " self_attn.k_proj:64x64+ self_attn.v_proj:64x64+ self_attn.o_proj:64x64+ mlp.dense_h_to_4h:96x64+"
           " mlp.dense_4h_to_h:64x96+")
        | shapes_in("vit.", "embeddings.patch_embedding:64x3x4x4+ embeddings.position_embedding:65x64")
        | shapes_in("vit.perceive.", "before_rms:64 after_rms:64 proj.0:128x64x2x2+ proj.2:256x128x1x1+ mlp:64x256+"
             " image_newline!:256 image_begin!:64 image_end!:64 image_sep!:64"), preprocessor(
            _CLIP, "HunYuanVLImageProcessor", min_pixels=1024, max_pixels=4194304, patch_size=4), "vit."),
    on("mm-muse-glimmer", "muse-glimmer", {"vision_config": {
        "model_type": "muse_glimmer_vision", "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4,
        "num_attention_heads": 4, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96,
        "patch_temporal": 2, "merge_size": 2, "layer_norm_eps": 1e-5}},
        shapes_in("model.vision_tower.layers.{0-2}.", "norm1:64+ norm2:64+ attn.q_proj:64x64+ attn.k_proj:64x64+"
           " attn.v_proj:64x64+ attn.proj:64x64+ mlp.fc1:96x64+ mlp.fc2:64x96+")
        | shapes_in("model.vision_tower.", "patch_embedder.patch_embedding:64x96"
             " patch_embedder.position_embedding_table:16x64 ln_pre:64+ ln_post:64+")
        | shapes_in("model.", "vision_adapter.fc1:96x256 vision_adapter.fc2:96x96 vision_projection:64x96"), preprocessor(
            _HALF, "MuseGlimmerImageProcessor", patch_size=4, merge_size=2), "model.vision_tower."),
    stand_in("mm-bailing-moe-v3-vl", "BailingMoeV3VLForConditionalGeneration", {
        "model_type": "bailing_moe_v3_vl", "mrope_section": [4, 2, 2], "text_config": {
            key: x for key, x in _BAILING3.args.items() if key not in ("architectures", "model_type")} | {
            "mrope_section": [4, 2, 2]},
        "vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": [], "disable_merger_proj": True}},
        {name.replace("model.", "model.language_model.", 1): x for name, x in _BAILING3.more.items()}
        | shapes_in("model.visual.blocks.{0-2}.", _QWEN3_BLOCKS) | shapes_in("model.visual.",
             "patch_embed.proj:64x3x2x8x8 pos_embed:36x64 merger.norm:64+")
        | shapes_in("", "linear_proj.0:64x256+ linear_proj.2:64x64+"), _QWEN3_IMAGES, f32=_BAILING3.f32),
    _nemotron("mm-nemotron-nano-vl", {"force_image_size": 32, "vision_config": {"patch_size": 8}}, 64, {},
              preprocessor({}, "")),
    # Positions of a grid as large as the image's, and a tower for sound.
    _nemotron("mm-radio", {
        "force_image_size": 32, "vision_config": {"architectures": ["RADIOModel"], "patch_size": 8},
        "sound_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
                         "num_mel_bins": 128, "subsampling_factor": 8, "conv_kernel_size": 9}}, 16,
        shapes_in("sound_encoder.encoder.layers.{0-2}.", _PARAKEET_LAYERS)
        | shapes_in("sound_encoder.encoder.subsampling.layers.", _SUBSAMPLING)
        | shapes_in("sound_encoder.encoder.", "subsampling.linear:64x256+ feature_extractor.featurizer.fb!:1x128x33"
             " feature_extractor.featurizer.window!:64")
        | shapes_in("sound_projection.", "norm:64 linear1:96x64 linear2:64x96"), preprocessor(_CLIP, "")),
    stand_in("mm-cogvlm", "CogVLMForCausalLM", TEXT | {
        "num_key_value_heads": 4, "vision_config": {
            "dropout_prob": 0.0, "hidden_act": "gelu", "hidden_size": 64, "image_size": 32, "in_channels": 3,
            "intermediate_size": 96, "layer_norm_eps": 1e-6, "num_heads": 4, "num_hidden_layers": 3,
            "num_positions": 17, "patch_size": 8}},
        text_of(_VISUAL_EXPERT) | shapes_in("model.vision.transformer.layers.{0-2}.", "input_layernorm:64+"
            " post_attention_layernorm:64+ attention.query_key_value:192x64+ attention.dense:64x64+ mlp.fc1:96x64+"
            " mlp.fc2:64x96+")
        | shapes_in("model.vision.", "boi!:1x1x64 eoi!:1x1x64 patch_embedding.cls_embedding!:1x64"
             " patch_embedding.position_embedding:17x64 patch_embedding.proj:64x3x8x8+")
        | shapes_in("model.vision.linear_proj.", "linear_proj:64x64 norm1:64+ dense_h_to_4h:96x64 gate_proj:96x64"
             " dense_4h_to_h:64x96"), preprocessor(_CLIP, ""), vocab=spm()),
    stand_in("mm-step3-vl", "StepVLForConditionalGeneration", {
        "model_type": "step_robotics", "understand_projector_stride": 2, "vision_config": _STEP3_VISION,
        "text_config": TEXT | HEAD | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}},
        text_of(NORMS + ATTENTION + HEAD_NORMS + DENSE) | _STEP3_TOWER, vocab=QWEN),
    stand_in("mm-step3p7", "Step3p7ForConditionalGeneration", {
        "model_type": "step3p7", "understand_projector_stride": 2, "vision_config": _STEP3_VISION,
        "text_config": {key: x for key, x in _STEP3P5.args.items() if key != "architectures"}},
        _STEP3P5.more | _STEP3_TOWER, vocab=_STEP3P5.vocab, f32=_STEP3P5.f32),
    # A head has 80 values, as the converter requires.
    stand_in("mm-minimax-m3", "MiniMaxM3SparseForConditionalGeneration", {
        "model_type": "minimax_m3_vl", "text_config": {
            key: x for key, x in _MINIMAX.args.items() if key != "architectures"}, "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 160, "intermediate_size": 192, "num_attention_heads": 2,
            "num_hidden_layers": 3, "image_size": 32, "patch_size": 4, "layer_norm_eps": 1e-5,
            "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2}}},
        add_prefix("language_model.", _MINIMAX.more) | shapes_in("vision_tower.vision_model.encoder.layers.{0-2}.",
            "layer_norm1:160+ layer_norm2:160+ self_attn.q_proj:160x160+ self_attn.k_proj:160x160+"
            " self_attn.v_proj:160x160+ self_attn.out_proj:160x160+ mlp.fc1:192x160+ mlp.fc2:160x192+")
        | shapes_in("vision_tower.vision_model.", "embeddings.patch_embedding:160x3x2x4x4 pre_layrnorm:160+")
        | shapes_in("multi_modal_projector.", "linear_1:96x160+ linear_2:64x96+")
        | shapes_in("patch_merge_mlp.", "linear_1:96x256+ linear_2:64x96+"), preprocessor(
            _CLIP, "MiniMaxM3VLImageProcessor", patch_size=4, merge_size=2), vocab=_MINIMAX.vocab),
    stand_in("mm-granite4-vision", "Granite4VisionForConditionalGeneration", {
        "model_type": "granite4_vision", "text_config": _GRANITE_TEXT | {
            "num_hidden_layers": 4, "logits_scaling": 8.0}, "vision_config": _SIGLIP_CONFIG | {
            "model_type": "siglip_vision_model", "num_hidden_layers": 4}, "deepstack_layer_map": [[-1, 0], [0, 1]],
        "spatial_target_layers": [2, 3], "spatial_vision_layer": -2, "downsample_rate": "2/4",
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
        text_of(layers="0-3", body="model.language_model.")
        | shapes_in("model.vision_tower.vision_model.encoder.layers.{0-3}.", _SIGLIP)
        | shapes_in("model.vision_tower.vision_model.", "embeddings.patch_embedding:64x3x8x8+"
             " embeddings.position_embedding:16x64 post_layernorm:64+ head.probe!:1x1x64")
        | shapes_in("model.{layerwise_projectors|spatial_projectors}.{0-1}.qformer.encoder.layer.0.", _QFORMER_LAYER)
        | shapes_in("model.{layerwise_projectors|spatial_projectors}.{0-1}.", "image_positions!:1x16x64 query!:1x4x64"
             " out_linear:64x64+ norm:64+ qformer.layernorm:64+")
        | shapes_in("model.", "image_newline!:64"), preprocessor(_HALF, "Granite4VisionImageProcessor")),
    on("mm-mimo-v2", "mimo-v2", {
        "architectures": ["MiMoV2ForCausalLM"], "vision_config": _MIMO_VISION, "audio_config": {
            "audio_channels": 3, "group_size": 4, "input_local_layers": 2, "input_local_dim": 64}},
        shapes_in("visual.blocks.{0-2}.", _QWEN25_BLOCKS.replace("192x64", "128x64") + " attn.sinks!:4")
        | shapes_in("visual.", f"merger.ln_q:64 {_QWEN_MERGER}") | shapes_in("speech_embeddings.{0-2}.", "weight!:33x64")
        | shapes_in("audio_encoder.input_local_transformer.layers.{0-1}.",
             NORMS + " self_attn.q_proj:64x64+ self_attn.k_proj:64x64+ self_attn.v_proj:64x64+ self_attn.o_proj:64x64"
             + DENSE)
        | shapes_in("audio_encoder.", "input_local_transformer.norm:64 projection.mlp.0:96x256 projection.mlp.2:64x96"),
        preprocessor(_CLIP, "MiMoVLImageProcessor", min_pixels=3136, max_pixels=12845056) | {
            "audio_tokenizer": {"config.json": _MIMO_TOKENIZER}}, vocab=QWEN,
        parts={"audio_tokenizer/model.safetensors": (
            shapes_in("encoder.layers.{0-2}.", _WHISPER)
            | shapes_in("encoder.", "conv1:64x16x3+ conv2:64x64x3+ layer_norm:64+ down_sample_layer.0:64x64x2"
                 " down_sample_norm:64+")
            | shapes_in("encoder.quantizer.vq.layers.0._codebook.", "embed!:32x64 embed_avg!:32x64 cluster_size!:32 inited!:1")
            | shapes_in("encoder.quantizer.vq.layers.{1-2}._codebook.", "embed!:16x64 embed_avg!:16x64 cluster_size!:16")
            | shapes_in("decoder.", "conv1:64x64x3+"))}),
    # config.json has the tower's settings; tensors are named as Gemma 4's, without layers.
    model("mm-gemma4-unified", "Gemma4UnifiedForConditionalGeneration", 5, {
        "text_config": _GEMMA4_TEXT | {"num_kv_shared_layers": 0}, "vision_config": {
            "mm_embed_dim": 64, "output_proj_dims": 64, "patch_size": 4, "pooling_kernel_size": 3,
            "model_patch_size": 12, "mm_posemb_size": 128}, "audio_config": {"audio_embed_dim": 640}},
        {"processor_config.json": {"image_processor": _HALF | {"patch_size": 4}}}, vocab=GEMMA4,
        text={"moe_intermediate_size": None}),
)  # fmt: skip

TOWERS = _QWEN_ROWS + _OMNI_ROWS + _GEMMA_ROWS + _WIDELY_USED_ROWS + _SIGLIP_ROWS + _SOUND_ROWS + _OTHER_ROWS

# --- The only sizes that the converter accepts ----------------------------------------------------------------------

_BASES = {row.name: row for row in _OTHER_ROWS}


def _wide(name: str, base: str, config: Json, tensors: Shapes) -> Row:
    """Return a row of encoders alone with the published number and width of layers; their hidden layers have 32
    values."""
    row = _BASES[base]
    return replace(row, name=name, args=row.args | config, more=tensors, outtypes=("f16",), period=8191, shards=1)


_WIDE_STEP3 = (
    shapes_in("vision_model.transformer.resblocks.{0-46}.", "ln_1:1536+ ln_2:1536+ ls_1.gamma!:1536 ls_2.gamma!:1536"
       " attn.in_proj_weight!:4608x1536 attn.in_proj_bias!:4608 attn.out_proj:1536x1536+ mlp.c_fc:32x1536+"
       " mlp.c_proj:1536x32+")
    | shapes_in("vision_model.", "conv1:1536x3x91x91 positional_embedding!:64x1536 ln_pre:1536+"
         " vit_downsampler1:64x1536x3x3+ vit_downsampler2:96x64x3x3+")
    | shapes_in("", "vit_large_projector:64x96")
)  # fmt: skip
_WIDE_RADIO = (
    shapes_in(f"{_RADIO}model.blocks.{{0-31}}.", "norm1:1280+ norm2:1280+ attn.qkv:3840x1280+ attn.proj:1280x1280+"
       " mlp.fc1:32x1280+ mlp.fc2:1280x32+")
    | shapes_in(f"{_RADIO}model.patch_generator.", "cls_token.token!:8x1280 embedder:1280x192"
         " video_embedder:1280x384")
    | shapes_in("mlp1.", "0:5120 1:64x5120 3:64x64")
)  # fmt: skip
#: Patches of 91 pixels, 64 an image.
_WIDE_PATCHES: Json = {"vision_config": _STEP3_VISION | {"patch_size": 91}}

WIDE = (
    _wide("wide-step3-vl", "mm-step3-vl", _WIDE_PATCHES, _WIDE_STEP3),
    # The grid of positions is shrunk from eight patches by eight to the image's four by four. Filters of Mel bands are
    # those of 512 samples, as llama.cpp requires.
    _wide("wide-radio", "mm-radio", {},
          _WIDE_RADIO | shapes_in(f"{_RADIO}model.patch_generator.", "pos_embed!:1x64x1280")
          | {name: x for name, x in _BASES["mm-radio"].more.items() if name.startswith("sound_")}
          | shapes_in("sound_encoder.encoder.feature_extractor.featurizer.", "fb!:1x128x257 window!:400")),
)  # fmt: skip
