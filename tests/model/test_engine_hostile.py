"""Models with inconsistent tensors are refused before anything runs, because kernels do not check addresses.

Every tensor of several models in turn gets another shape, its bytes cut or filled up accordingly. Nothing may crash,
and where the shape matters, the error names a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses
from sparse_gguf import Info, write_hollow

from quantkit.errors import QuantkitError, RecipeError
from quantkit.formats.gguf import Field, GGUFFile, open_gguf
from quantkit.model.engine import load
from quantkit.types import BY_NAME, TensorType

MODELS = ("gpt-oss-moe", "deepseek2-moe", "qwen3next-moe", "gemma4-dense", "gemma4-moe", "starcoder-dense")
MODELS += ("gemma3n-dense", "spark2_5-dense", "bitnet-dense")
Shape = tuple[int, ...]

CHANGES: dict[str, Callable[[Shape], Shape]] = {
    "one row less": lambda s: (*s[:-1], s[-1] - 1),
    "one row more": lambda s: (*s[:-1], s[-1] + 1),
    "half as long rows": lambda s: (s[0] // 2, *s[1:]),
    "twice as long rows": lambda s: (s[0] * 2, *s[1:]),
    "turned around": lambda s: s[::-1],
    "one dimension more": lambda s: (*s, 2),
    "a single value": lambda s: (1,),
}


#: Bytes of a tensor beyond which it stays zeros: what chooses rows or experts, and all vectors, are smaller.
LARGE = 1 << 18


def write_changed(
    path: Path, opened: GGUFFile, fields: Iterable[Field], infos: Sequence[Info], arrays: dict[str, Any]
) -> None:
    """Write a model with the small tensors of another, and with ``arrays`` ones."""
    small = {t.name: opened.data(t) for t in opened.tensors.values() if t.nbytes <= LARGE}
    write_hollow(path, fields, infos, small | arrays)


def changed(source: Path, path: Path, name: str, shape: Shape, t: TensorType | None = None) -> None:
    with open_gguf(source) as opened:
        old = opened.tensors[name]
        kind = t or old.type
        infos = [(n, i.shape, i.type) if n != name else (n, shape, kind) for n, i in opened.tensors.items()]
        data = np.resize(opened.data(old), kind.row_bytes(shape[0]) * math.prod(shape[1:]))
        write_changed(path, opened, opened.fields.values(), infos, {name: data})


def names(path: Path) -> Iterator[tuple[str, Shape]]:
    """Yield one tensor of every kind and shape, not of the first layer."""
    shapes = set[tuple[str, Shape]]()
    with open_gguf(path) as opened:
        for info in opened.tensors.values():
            kind = re.sub(r"^blk\.\d+", "blk", info.name), info.shape
            if not info.name.startswith("blk.0.") and kind not in shapes:
                shapes.add(kind)
                yield info.name, info.shape


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("change", CHANGES)
def test_other_shapes_are_refused_or_harmless(
    zoo: Callable[[str], Path], tmp_path: Path, model: str, change: str
) -> None:
    refused = 0
    for name, shape in names(zoo(model)):
        changed_shape = CHANGES[change](shape)
        if changed_shape == shape or min(changed_shape) < 1:
            continue
        changed(zoo(model), tmp_path / "x.gguf", name, changed_shape)
        try:
            with load(tmp_path / "x.gguf", kv_type="f32") as opened:
                opened.forward([1, 2, 3])
        except QuantkitError:
            refused += 1
    assert refused > 4


@pytest.mark.parametrize("type_name", ["I32", "I8"])
def test_weights_of_types_without_products_are_refused(
    zoo: Callable[[str], Path], tmp_path: Path, type_name: str
) -> None:
    changed(zoo("llama-dense"), tmp_path / "x.gguf", "blk.1.ffn_up.weight", (256, 512), BY_NAME[type_name])
    with refuses(QuantkitError, "QK-E302 blk.1.ffn_up.weight"):
        load(tmp_path / "x.gguf")


OF_GPT_OSS = [
    ("attention.head_count", 3),
    ("attention.head_count_kv", 3),
    ("attention.key_length", 7),
    ("rope.dimension_count", 63),
    ("rope.dimension_count", 128),
    ("expert_used_count", 9),
    ("expert_used_count", 0),
    ("expert_count", 7),
    ("expert_group_count", 3),
    ("embedding_length", 128),
    ("block_count", 3),
    ("block_count", 1 << 30),
    ("block_count", "two"),
    ("rope.freq_base", "big"),
    ("attention.layer_norm_rms_epsilon", float("nan")),
    ("attention.head_count", [4]),
    ("attention.head_count_kv", [2]),
]
OF_GEMMA4 = [
    *(("attention.shared_kv_layers", n) for n in (1, 3, 5, 6, 7, -1, 1 << 31)),
    *(("embedding_length_per_layer_input", n) for n in (0, -256, 255, 512, 1 << 40)),
    ("attention.key_length", 0),
    ("attention.key_length", 64),
    ("attention.key_length_swa", 128),
    ("attention.key_length_swa", -64),
    ("attention.sliding_window", 0),
    ("attention.sliding_window_pattern", [True] * 6),
    ("attention.sliding_window_pattern", [True] * 5),
    ("attention.sliding_window_pattern", [False, True, True, False, True, False]),
    ("rope.dimension_count", 256),
    ("rope.dimension_count_swa", 66),
    ("block_count", 5),
    ("block_count", 1 << 30),
    ("final_logit_softcapping", "high"),
]


#: Keys that begin with a point have no architecture before them.
OF_OTHERS = [
    *(("nanbeige-looped", "num_loops", n) for n in (0, -1, 171, 1 << 40, "two")),
    *(("apertus-dense", ".xielu.alpha_n", n) for n in ([0.5, 0.5], "much", ["a"] * 3, float("nan"))),
    *(("gemma3n-dense", "block_count", n) for n in (7, 1 << 30)),
    *(("gemma3n-dense", "embedding_length_per_layer_input", n) for n in (0, 128, -1)),
    ("gemma3n-dense", "embedding_length", 64),
    ("spark2_5-dense", "attention.sliding_window_pattern", [True]),
]


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [*(("gpt-oss-moe", *case) for case in OF_GPT_OSS), *(("gemma4-dense", *case) for case in OF_GEMMA4), *OF_OTHERS],
)
def test_inconsistent_metadata_are_refused(
    zoo: Callable[[str], Path], tmp_path: Path, model: str, key: str, value: int
) -> None:
    with open_gguf(zoo(model)) as opened:
        full = key[1:] if key.startswith(".") else f"{model.rpartition('-')[0]}.{key}"
        fields = [Field.of(full, value) if f.key == full else f for f in opened.fields.values()]
        infos = [(t.name, t.shape, t.type) for t in opened.tensors.values()]
        write_changed(tmp_path / "x.gguf", opened, fields, infos, {})
    with pytest.raises(QuantkitError):
        load(tmp_path / "x.gguf").forward([1, 2, 3])


def test_a_sequence_longer_than_the_position_embeddings_is_refused(zoo: Callable[[str], Path]) -> None:
    with load(zoo("starcoder-dense")) as model:
        with refuses(RecipeError, "QK-E203 512"):
            model.session(513)
        session = model.session(512, n_seq=2)
        session.decode([1] * 512, 1)
        with refuses(QuantkitError, "QK-E203 512"):
            session.decode([1], 1)


def test_a_q8_0_cache_of_odd_heads_is_refused(zoo: Callable[[str], Path]) -> None:
    with load(zoo("llama-dense")) as model:
        for bad in ("q4_9", "f16/x", "x"):
            with refuses(RecipeError, "QK-E203 q8_0"):
                model.session(8, kv_type=bad)
        with refuses(RecipeError, "QK-E203 1"):
            model.session(0)
