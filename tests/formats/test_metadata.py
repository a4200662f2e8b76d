from __future__ import annotations

from typing import Any

import pytest
from refusals import refuses

from quantkit.errors import RecipeError
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.override import parse_override
from quantkit.pipeline.metadata import Metadata, prune_metadata, prune_names


@pytest.mark.parametrize(
    ("text", "type_", "value"),
    [
        ("a.b=int:5", ValueType.UINT32, 5),
        ("a.b=int:-5", ValueType.INT32, -5),
        ("a.b=int:0x10", ValueType.UINT32, 16),
        ("a.b=float:0.5", ValueType.FLOAT32, 0.5),
        ("a.b=bool:true", ValueType.BOOL, True),
        ("a.b=str:x=y:z", ValueType.STRING, "x=y:z"),
        ("a.b=u8:255", ValueType.UINT8, 255),
        ("a.b=i64:-1", ValueType.INT64, -1),
        ("a.b=f64:1", ValueType.FLOAT64, 1.0),
    ],
)
def test_overrides(text: str, type_: ValueType, value: Any) -> None:
    field = parse_override(text)
    assert (field.key, field.type, field.value) == ("a.b", type_, value)


@pytest.mark.parametrize("text", ["a", "a=5", "a=int:x", "a=bool:1", "a=what:1", "=int:5", "a=u8:256", "a=float:"])
def test_invalid_overrides_are_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_override(text)


def test_a_set_key_moves_to_the_end() -> None:
    metadata = Metadata([Field.of("a", 1), Field.of("b", 2)])
    metadata.set(Field.of("a", 3))
    metadata.replace(Field.of("b", 4))
    assert [(f.key, f.value) for f in metadata.fields()] == [("b", 4), ("a", 3)]


def test_layers_are_renumbered() -> None:
    names = ["token_embd.weight", *(f"blk.{i}.x" for i in range(4))]
    assert prune_names(names, [0, 2]) == {
        "token_embd.weight": "token_embd.weight",
        "blk.1.x": "blk.0.x",
        "blk.3.x": "blk.1.x",
    }
    assert prune_names(names, []) == {n: n for n in names}


@pytest.mark.parametrize("layers", [[4], [0, 1, 2, 3]])
def test_impossible_prunings_are_refused(layers: list[int]) -> None:
    with refuses(RecipeError, "QK-E203 --prune-layers"):
        prune_names([f"blk.{i}.x" for i in range(4)], layers)


def test_per_layer_metadata_is_pruned() -> None:
    metadata = Metadata(
        [
            Field.of("llama.block_count", 4),
            Field.of("llama.attention.head_count_kv", [1, 2, 3, 4]),
            Field.of("llama.rope.dimension_sections", [1, 2, 3]),
            Field.of("llama.leading_dense_block_count", 2),
            Field.of("llama.nextn_predict_layers", 1),
            Field.of("tokenizer.ggml.scores", [1.0, 2.0, 3.0, 4.0]),
        ]
    )
    notes = prune_metadata(metadata, "llama", [1, 3])
    values = {f.key: f.value for f in metadata.fields()}
    assert values["llama.block_count"] == 2
    assert values["llama.attention.head_count_kv"] == [1, 3]
    assert values["llama.rope.dimension_sections"] == [1, 2, 3]
    assert values["llama.leading_dense_block_count"] == 1
    assert values["llama.nextn_predict_layers"] == 0
    assert len(values["tokenizer.ggml.scores"]) == 4
    assert len(notes) == 3
