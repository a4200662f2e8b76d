"""Draft models, which guess tokens by the hidden states of a target: what they read of the target's checkpoint.

EAGLE-3 (``models/llama.py``), DFlash and DSpark (``models/qwen.py``). Facts of llama.cpp b11434 (--target-model-dir of
convert_hf_to_gguf.py; src/models/eagle3.cpp and dflash.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.expressions import PIECE, Expression, Stored, read_f32, size_of
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.quantized.scheme import DecodedTensors
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor, read_checkpoint
from quantkit.types import TensorType, type_by_name

_I64 = type_by_name("I64")
#: Architectures of which llama.cpp b11434 reads the hidden states before each layer (t_layer_inp in src/models/*.cpp),
#: and those of which it reads the states after the last layer, too. EAGLE-3 reads these as the input of the head.
HIDDEN_STATES = frozenset(
    (
        *("bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama"),
        *("llama-embed", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h"),
        *("nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp"),
    )
)
LAST_HIDDEN_STATES = frozenset(("deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"))
#: The table of a reduced vocabulary: what to add to the number of each of its tokens for that in the target.
IDS = "d2t"


@dataclass(frozen=True)
class Target:
    """The checkpoint of the model that a draft guesses for."""

    folder: Path
    #: With the defaults of transformers' classes.
    config: Config
    #: config.json as it is.
    raw: Json
    #: Writes the keys of its vocabulary, as for a model of its class.
    write_vocab: Callable[[Vocabulary], None]
    #: Its architecture in GGUF.
    arch: str

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor by its name in the files. Raises FormatError if it is absent."""
        shards = read_checkpoint(self.folder, allow_incomplete=True)
        tensor = next((shard[name] for shard in shards if name in shard), None)
        if tensor is None:
            raise FormatError(f"{self.folder}: has no tensor {name}, which the draft model shares", "QK-E105")
        return tensor


class DraftConfig(Config):
    """The configuration of a draft model, with its target."""

    def __init__(self, config: Config, target: Target) -> None:
        super().__init__(config.path, config.outer)
        self.target = target


def target_of(config: Config) -> Target:
    """Return the target of a draft model."""
    assert isinstance(config, DraftConfig)
    return config.target


def merge_layer_config(config: Config) -> None:
    """Move the settings of the layers to the root: files of vLLM's speculators have them in an object."""
    if "transformer_layer_config" in config:
        config.replace_values({**config.values, **config.table("transformer_layer_config")})


@dataclass(frozen=True)
class TargetIds:
    """The table of a reduced vocabulary as the target's tokens: int64, in one dimension."""

    x: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return (size_of(self.x),)

    @property
    def type(self) -> TensorType:
        return _I64

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        ids = out.view(np.int64)
        for position in range(0, ids.size, PIECE):
            piece = ids[position : position + PIECE]
            first = start + position
            if isinstance(self.x, Stored) and self.x.tensor.dtype not in ("F32", "F16", "BF16"):
                piece[...] = self.x.raw(first, piece.size)
            else:
                piece[...] = read_f32(self.x, first, piece.size)
            piece += np.arange(first, first + piece.size)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


@dataclass(frozen=True)
class WriteTargetIds(OneWayRule):
    """Writes the table ``d2t`` with the target's tokens. ``size``: the number of these, by the configuration."""

    size: Callable[[Config], int]

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name != IDS:
            return None
        x, size = TargetIds(tensor.x), self.size(context.config)
        ids = np.empty(size_of(x), np.int64)
        x.read(0, ids.view(np.uint8))
        expected = context.config.get("draft_vocab_size")
        if expected and ids.size != expected:
            raise context.fail(
                tensor, f"has {ids.size} tokens, but draft_vocab_size of config.json is {short(expected)}"
            )
        wrong = ids[(ids < 0) | (ids >= size)]
        if wrong.size:
            raise context.fail(
                tensor, f"has the token {wrong[0]}, but the target has {size}: it is another model's", "QK-E207"
            )
        if np.unique(ids).size < ids.size:
            raise context.fail(tensor, "has one token twice")
        return (replace(tensor, x=x, name_in_file=IDS),)


def put_ids_last(weights: DecodedTensors, config: Config) -> DecodedTensors:
    """Return the tensors with the table of a reduced vocabulary after all others."""
    tensors = dict(weights.tensors)
    ids = {IDS: tensors.pop(IDS)} if IDS in tensors else {}
    return replace(weights, tensors=tensors | ids)


def check_target(config: DraftConfig, keys: Keys, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise FormatError if no runtime runs a draft beside its target: layers that this lacks, or another width.

    ``shapes``: of the tensors of the file, outermost first.
    """
    target, draft_width = config.target.config, config.number("hidden_size")
    width, count, layers = target.number("hidden_size", "n_embd", "dim"), target.layers, _layers_read(keys)
    wrong = next((layer for layer in layers if not 0 <= layer <= count), None)
    if wrong is not None:
        raise _mismatch(config, f"reads the hidden state of layer {wrong}, but the target has {count} layers")
    columns = shapes.get("fc.weight", (0, 0))[-1]
    if layers and columns != len(layers) * width:
        raise _mismatch(
            config, f"reads {columns} values of {len(layers)} layers (fc.weight), but the target's have {width} each"
        )
    if draft_width != width and "token_embd.weight" not in shapes:
        raise _mismatch(config, f"has {draft_width} values per token and no embeddings, but the target's have {width}")


def target_notes(config: DraftConfig, keys: Keys) -> list[str]:
    """Return a note on a draft that llama.cpp converts and loads, but stops at as soon as it drafts."""
    arch, count, layers = config.target.arch, config.target.config.layers, _layers_read(keys)
    if layers and arch not in HIDDEN_STATES:
        return [f"llama.cpp b11434 reads no hidden states of {arch} models: it stops when it drafts for this target"]
    if count in layers and keys.arch != "eagle3" and arch not in LAST_HIDDEN_STATES:
        return [
            f"the draft reads the output of layer {count - 1}, the last of its target, which llama.cpp b11434 does not "
            f"provide for {arch} models: it stops when it drafts"
        ]
    return []


def _layers_read(keys: Keys) -> list[int]:
    """Return the layers of the target whose inputs a draft reads; their number for the output of the last."""
    field = keys.fields.get(f"{keys.arch}.target_layers")
    return [] if field is None else list(field.value)


def _mismatch(config: DraftConfig, problem: str) -> FormatError:
    return FormatError(
        f"{config.path.parent}: the draft {problem}: {config.target.folder} is not its target; use --allow-incomplete "
        "to convert it anyway",
        "QK-E207",
    )
