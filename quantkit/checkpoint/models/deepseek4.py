"""DeepSeek V4 and its draft model: own tensor names, experts in 4 bits, layers whose experts a table selects.

Facts of llama.cpp b11434, conversion/deepseek.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import TYPE_BF16, TYPE_F32, Expression, Stored
from quantkit.checkpoint.key_rows import WINDOW, Always, Computed, Copied, SetKeys
from quantkit.checkpoint.models import deepseek
from quantkit.checkpoint.policy import TYPE_Q8_0
from quantkit.checkpoint.quantized.scheme import DecodedTensors
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Drop, Rename, StackExperts
from quantkit.checkpoint.tensor_names import file_name
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor, layer_of
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType, type_by_name

_I32 = type_by_name("I32")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
#: Prediction layers (MTP): convert_hf_to_gguf.py converts them with --mtp, quantkit does not.
STORED = (Drop(r"^(aligner\.|image_|mtp\.)"),)


@dataclass(frozen=True)
class ExpertTable:
    """A table of expert numbers, which remain integers."""

    x: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def type(self) -> TensorType:
        return _I32

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        values = out.view(np.int32)
        values[...] = self.x.raw(start, values.size)

    def parts(self) -> Iterator[StoredTensor]:
        yield self.x.tensor


def reorder_tensors(weights: DecodedTensors, config: Config) -> DecodedTensors:
    """Put tables first, then experts by the numbers of their layers."""
    tables = {name: x for name, x in weights.tensors.items() if name.endswith(".ffn.gate.tid2eid")}
    first = dict(sorted(weights.first.items(), key=lambda item: layer_of(item[0]) or 0))
    first = dict(sorted(tables.items(), key=lambda item: layer_of(item[0]) or 0)) | first
    return replace(weights, tensors={n: x for n, x in weights.tensors.items() if n not in tables}, first=first)


#: Name -> kind and suffix: outside of layers, and in them.
MODEL_NAMES = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
}

LAYER_NAMES = {
    **{
        f"hc_{block}_{part}": f"hc_{block}_{part}.weight"
        for block in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    **{
        f"attn.{indexer}compressor.{name}": f"{kind}_compressor_{part}.weight"
        for indexer, kind in (("", "attn"), ("indexer.", "indexer"))
        for name, part in (("ape", "ape"), ("wkv.weight", "kv"), ("wgate.weight", "gate"), ("norm.weight", "norm"))
    },
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.bias_vl": "exp_probs_b_vl.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    **{
        f"ffn.{part}.{name}{end}": f"ffn_{kind}_{kinds}.weight"
        for part, kinds, end in (("shared_experts", "shexp", ".weight"), ("experts", "exps", ""))
        for name, kind in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
}


@dataclass(frozen=True)
class RenameTensors(OneWayRule):
    """Names tensors by this file's tables, and types them by their storage. ``names``: of those outside of layers."""

    names: Mapping[str, str]

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"layers\.(\d{1,5})\.(.+)$", tensor.name)
        if match is None:
            name = self.names.get(tensor.name)
        elif match[2] == "ffn.gate.bias" and int(match[1]) < context.config.number("num_hash_layers"):
            return ()  # these layers select experts by a table, without scores
        else:
            name = LAYER_NAMES.get(match[2])
            name = None if name is None else file_name("*" + name, int(match[1]))
        if name is None:
            return None
        if tensor.name.endswith(".tid2eid") and isinstance(tensor.x, Stored):
            return (replace(tensor, x=ExpertTable(tensor.x), name_in_file=name, file_type=_I32),)
        return (replace(tensor, name_in_file=name, file_type=_type_of(tensor.x)),)


def _type_of(x: Expression) -> TensorType | None:
    """Return the type that a tensor of floats has in every file."""
    part = next(iter(x.parts()))
    if part.dtype in _FLOAT8 and len(x.shape) > 1:
        return TYPE_Q8_0
    return {"F32": TYPE_F32, "BF16": TYPE_BF16}.get(part.dtype) if x.type.block == 1 else None


_STACK_EXPERTS = StackExperts(
    weights=("w1", "w2", "w3"),
    name="layers.{layer}.ffn.experts.{expert}.{weight}.weight",
    merged="layers.{layer}.ffn.experts.{weight}",
)
RULES = (_STACK_EXPERTS, RenameTensors(MODEL_NAMES))


def _limits(config: Config) -> list[float]:
    return [config["swiglu_limit"]] * config.get(_STAGES, config.layers)


def _set_swiglu_limit(meta: ModelMetadata, config: Json) -> None:
    """Set the clamp of experts."""
    limits = meta.get(".swiglu_clamp_exp")
    config["swiglu_limit"] = limits[0] if isinstance(limits, list) else limits


#: The key under which the number of a draft's layers is held, which config.json lacks.
_STAGES = "dspark_stages"


def _width(config: Config) -> int:
    return config.number("hidden_size") * config.number("hc_mult")


_WIDTH = Computed(".embedding_length_out", _width)
#: The file type of experts stored in 4 bits (MXFP4).
_FILE_TYPE = Always("general.file_type", 38)

KEYS: tuple[SetKeys, ...] = (
    Copied(".rope.dimension_count", "qk_rope_head_dim", required=True),
    Copied(".attention.q_lora_rank", "q_lora_rank", required=True),
    WINDOW,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".expert_shared_count", "n_shared_experts", required=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", required=True),
    Computed(".swiglu_clamp_exp", _limits, "array", inverse=_set_swiglu_limit),
    Computed(".swiglu_clamp_shexp", _limits, "array"),
    *deepseek.INDEXER,
    Copied(".attention.output_group_count", "o_groups", required=True),
    Copied(".attention.output_lora_rank", "o_lora_rank", required=True),
    Copied(".attention.compress_ratios", "compress_ratios", "array", required=True),
    Copied(".attention.compress_rope_freq_base", "compress_rope_theta", "f32", required=True),
    Copied(".hyper_connection.count", "hc_mult", required=True),
    Copied(".hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters", required=True),
    Copied(".hyper_connection.epsilon", "hc_eps", "f32", required=True),
    Copied(".hash_layer_count", "num_hash_layers", required=True),
    _WIDTH,
    _FILE_TYPE,
)

#: It comes before all other keys, as where the reference sets a built-in template.
TEMPLATE = Always("tokenizer.chat_template", "-", "text")


def write_deepseek4(v: Vocabulary) -> None:
    """Write a BPE vocabulary. Without a chat template, the reference writes one of llama.cpp, quantkit none
    (DeepseekV4Model)."""
    write_bpe(v)
    template = v.keys.fields.get("tokenizer.chat_template")
    if template is not None and template.value == "-":
        v.keys.remove("tokenizer.chat_template")


# --- DSpark: the draft model among the tensors -----------------------------------------------------------------------

#: Tensors of the draft outside of its layers, by their names there.
_DSPARK_NAMES = {
    "main_proj.weight": "fc.weight",
    "main_norm.weight": "enc.output_norm.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    **{name: MODEL_NAMES[name] for name in ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")},
}
_ROOT = "|".join(re.escape(name) for name in (*_DSPARK_NAMES, "main_proj.scale"))


def _count_stages(config: Config, names: Collection[str]) -> None:
    """Count the layers of the draft, in which attention is not compressed and scores select experts."""
    numbers = [int(match[1]) for name in names if (match := re.match(rf"mtp\.(\d{{1,5}})\.(?!({_ROOT})$)", name))]
    if not numbers:
        raise FormatError(f"{config.path.parent}: has no draft model (DSpark), no tensors mtp.*", "QK-E206")
    stages = 1 + max(numbers)
    config.values |= {_STAGES: stages, "compress_ratios": [0] * stages, "num_hash_layers": 0}


def write_dspark(v: Vocabulary) -> None:
    """Write the target's vocabulary, and the token of masks (DeepseekV4DSparkModel)."""
    write_deepseek4(v)
    v.keys.u32("tokenizer.ggml.mask_token_id", v.config["dspark_noise_token_id"])


_DSPARK = Architecture(
    "dflash",
    stored=(
        Drop(r"^(?!mtp\.)|\.ffn\.gate\.(bias_vl|tid2eid)$"),
        Rename(rf"^mtp\.\d+\.({_ROOT})$", r"\1"),
        Rename(r"^mtp\.", "layers."),
    ),
    rules=(_STACK_EXPERTS, RenameTensors(_DSPARK_NAMES)),
    keys=(
        *(key for key in KEYS if key is not _WIDTH),
        Copied(".block_size", "dspark_block_size", required=True),
        Computed(".target_layers", lambda config: [layer + 1 for layer in config["dspark_target_layer_ids"]], "array"),
    ),
    vocab=write_dspark,
    first_keys=(TEMPLATE,),
    reorder=reorder_tensors,
    inspect_tensors=_count_stages,
    layers=lambda config: config.number(_STAGES),
    draft=True,
)


ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekV4ForCausalLM": Architecture(
        "deepseek4",
        stored=STORED,
        rules=RULES,
        keys=KEYS,
        vocab=write_deepseek4,
        first_keys=(TEMPLATE,),
        reorder=reorder_tensors,
        dspark=_DSPARK,
    ),
    "DeepseekV4DSparkModel": _DSPARK,
}

CLASSES: dict[str, HfClass] = {
    "DeepseekV4ForCausalLM": HfClass(
        "deepseek_v4",
        kinds={
            **{kind: name for name, kind in MODEL_NAMES.items()},
            **{f"*{kind}": f"layers.*.{name}" for name, kind in LAYER_NAMES.items()},
        },
        keys={
            ".expert_count": "n_routed_experts",
            # transformers uses the other name for the width of experts
            ".feed_forward_length": "dense_intermediate_size",
        },
        note="GGUF files of this architecture have no prediction layers (MTP); `quantkit convert` omits them",
    ),
}
