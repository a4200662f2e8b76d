"""Qwen 4 (experimental): Qwen 3.5 with hyper-connections, sparse attention, and embeddings of n-grams in one layer.

Facts of llama.cpp b11434, conversion/qwen4exp.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Stored, concatenate
from quantkit.checkpoint.key_rows import Computed, Copied, SetKeys, Where
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import qwen3_next
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import Drop, Rename, Split, Transform, plus_one
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor, read_checkpoint

#: The integers of the hash of n-grams: ends of the names of tensors -> keys.
_HASH = {
    "ple_embedding.layer_multipliers": ".ple.layer_multipliers",
    "ple_embedding.ngram_heads_offsets": ".ple.head_offsets",
    "ple_embedding.ngram_heads_vocab_sizes": ".ple.head_vocab_sizes",
}
#: Larger lists of them are damaged: they have a number for each head, or n-gram.
_MAX_HASH = 1 << 16
_SHARD = re.compile(r"\.ngram_embedding\.shard_(\d{1,6})(\.weight)?$")
#: A value of the configuration: whether the file has the embeddings of n-grams; only the main model has them.
_HAS_NGRAMS = "has_ngram_embeddings"


def _inspect(config: Config, names: Collection[str]) -> None:
    qwen3_next.count_mtp_layers(config, names)
    config.values[_HAS_NGRAMS] = any(_SHARD.search(name) for name in names)


def _has_ngrams(config: Config) -> bool:
    return bool(config["ple_layer_ids"]) and bool(config[_HAS_NGRAMS])


def _ratios(config: Config) -> list[int]:
    """Return the compression of each layer's attention, 0 for linear attention; MTP layers are compressed too."""
    ratio, kinds = config.number("indexer_compress_ratio"), config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != config.layers:
        raise FormatError(f"{config.path}: layer_types is not a list of {config.layers} kinds", "QK-E112")
    n_mtp = qwen3_next.layers_with_mtp(config) - config.layers
    return [ratio if kind == "full_attention" else 0 for kind in kinds] + [ratio] * n_mtp


def _end(config: Config) -> int:
    """Return the token that ends n-grams: the last of several EOS tokens."""
    end = config.get("eos_token_id")
    end = end[-1] if isinstance(end, list) and end else end
    if type(end) is not int:
        raise FormatError(
            f"{config.path}: eos_token_id is {short(end)}; n-grams end at this token, so it is required", "QK-E112"
        )
    return end


def _find_tensor(config: Config, pattern: str) -> StoredTensor:
    """Return the first stored tensor whose name matches."""
    shards = read_checkpoint(config.path.parent, allow_incomplete=True)
    tensor = next((t for shard in shards for name, t in shard.items() if re.search(pattern, name)), None)
    if tensor is None:
        raise FormatError(f"{config.path.parent}: has no tensor whose name ends with {pattern.rstrip('$')}", "QK-E105")
    return tensor


def _row_width(config: Config) -> int:
    return _find_tensor(config, _SHARD.pattern).shape[-1]


def _write_hash(keys: Keys, config: Config) -> None:
    """Write the integers of the hash, of up to 45 bits, which no float32 holds."""
    for end, key in _HASH.items():
        tensor = _find_tensor(config, f"{re.escape(end)}$")
        if tensor.dtype not in ("I64", "I32") or tensor.n_values > _MAX_HASH:
            raise FormatError(
                f"{tensor.path}: tensor {short(tensor.name)} is {tensor.dtype} {list(tensor.shape)}, not a list of "
                "integers",
                "QK-E106",
            )
        values = Stored(tensor).raw(0, tensor.n_values).tolist()
        if min(values, default=0) < 0:
            raise FormatError(f"{tensor.path}: tensor {short(tensor.name)}: a number is negative", "QK-E106")
        keys.wide_counts(key, values)


_NGRAM_KEYS: tuple[SetKeys, ...] = (
    Computed(".ple.layers", lambda config: [layer - 1 for layer in config["ple_layer_ids"]], "array"),
    Copied(".ple.ngram_size", "ngram_size", required=True),
    Copied(".ple.heads_per_ngram", "heads_per_ngram", required=True),
    Copied(".ple.conv_kernel", "ple_conv_kernel_size", required=True),
    Computed(".ple.eos_token_id", _end),
    Copied(".ple.image_token_id", "image_token_id"),
    Computed(".embedding_length_per_layer_input", _row_width),
    _write_hash,
)

_KEYS: tuple[SetKeys, ...] = (
    *qwen3_next.NEXT_KEYS,
    qwen3_next.set_sections,
    Copied(".hyper_connection.count", "hc_count", required=True),
    Copied(".hyper_connection.low_rank", "hc_lowrank", required=True),
    Copied(".attention.indexer.head_count", "indexer_n_heads", required=True),
    Copied(".attention.indexer.key_length", "indexer_head_dim", required=True),
    Copied(".attention.indexer.top_k", "indexer_budget", required=True),
    Computed(".attention.compress_ratios", _ratios, "array"),
    Where(_has_ngrams, _NGRAM_KEYS),
)


@dataclass(frozen=True)
class _JoinShards(OneWayRule):
    """Joins the parts of the embeddings of n-grams, by their numbers."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = _SHARD.search(tensor.name)
        if match is None:
            return None
        count = context.config.number("split_ngram_parts")
        parts = context.gather(self, "n-grams", match[1], tensor, count)
        if parts is None:
            return ()
        shards = [parts[number].x for number in sorted(parts, key=int)]
        if any(len(x.shape) != 2 or x.shape[1] != shards[0].shape[-1] for x in shards):
            raise context.fail(tensor, "the parts of the embeddings of n-grams differ in width")
        return (replace(tensor, x=concatenate(shards), name_in_file="per_layer_token_embd.weight"),)

    def missing(self, waiting: Collection[str], place: int | str, context: Context) -> str:
        """Return the number of parts in config.json."""
        return f"{context.config.path} has split_ngram_parts {context.config['split_ngram_parts']}"


@dataclass(frozen=True)
class _JoinProjections(OneWayRule):
    """Joins an MTP layer's projections of the embedding and of the hidden state, by columns."""

    names = ("nextn_fc_embedding", "nextn_fc_hidden")

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.fullmatch(r"(model\.layers\.\d+)\.(nextn_fc_embedding|nextn_fc_hidden)\.weight", tensor.name)
        if match is None:
            return None
        parts = context.gather(self, match[1], match[2], tensor, 2)
        if parts is None:
            return ()
        embedding, hidden = (parts[name].x for name in self.names)
        if len(embedding.shape) != 2 or embedding.shape[:1] != hidden.shape[:1]:
            raise context.fail(tensor, "fc_embedding and fc_hidden of the MTP layer differ in rows")
        return (replace(tensor, name=f"{match[1]}.eh_proj.weight", x=concatenate((embedding, hidden), 1)),)


def _index_rows(config: Config) -> tuple[int, int]:
    """Return the rows of the indexer's queries and of its keys."""
    width = config.number("indexer_head_dim")
    return config.number("indexer_n_heads") * width, config.get("indexer_kv_heads", 1) * width


_QWEN4: Architecture = replace(
    qwen3_next.QWEN35_MOE,
    arch="qwen4exp",
    stored=(
        Rename(r"^mtp\.(fc_embedding|fc_hidden)\.", r"mtp.nextn_\1."),
        Rename(r"^mtp\.hyper_connection_mixer\.", "mtp.nextn_hc_head."),
        *qwen3_next.QWEN35_MOE.stored,
    ),
    rules=(
        Drop("|".join(rf"{re.escape(end)}$" for end in _HASH)),
        _JoinShards(),
        _JoinProjections(),
        Split(
            r"\.indexer\.index_qk_proj\.weight$",
            (".index_q_proj.weight", ".index_k_proj.weight"),
            sizes=_index_rows,
        ),
        Transform(r"\.ple\.norm_(key|query|conv)\.weight$", plus_one, None),
        *qwen3_next.QWEN35_MOE.rules,
    ),
    keys=_KEYS,
    inspect_tensors=_inspect,
)

ARCHITECTURES: dict[str, Architecture] = {
    "Qwen4ExpForConditionalGeneration": _QWEN4,
    "Qwen4ExpForCausalLM": _QWEN4,
}
