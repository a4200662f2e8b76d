from __future__ import annotations

import gguf
import pytest
from refusals import refuses

from quantkit.errors import TypeNotSupported
from quantkit.types import BY_ID, BY_NAME, OWN_IDS, REMOVED_IDS, ROWS, TYPES, TensorType, type_by_id, type_by_name

#: Types of the PyPI gguf enum, an independent copy of sizes (Q8_K is refused; its Q8_1 of 40 bytes is long gone).
GGUF = [t for t in gguf.GGMLQuantizationType if t.value in BY_ID and t.name not in ("Q8_K", "Q8_1")]


def test_ids_and_names_are_unique() -> None:
    assert len(BY_ID) == len(BY_NAME) - len(ROWS) == len(TYPES)
    assert [t.id for t in TYPES] == sorted(BY_ID)


@pytest.mark.parametrize("t", [*TYPES, *ROWS], ids=str)
def test_ids_of_neither_project_are_reserved(t: TensorType) -> None:
    assert (t.id in OWN_IDS) == (t.trees == "none")
    assert (t.is_in("mainline") or t.is_in("ik")) != (t.trees == "none")


@pytest.mark.parametrize("t", ROWS, ids=str)
def test_single_row_types_are_internal(t: TensorType) -> None:
    """No name of a user, no id of a file: they are what an interleaved type of the same size takes apart."""
    assert not t.in_files
    with refuses(TypeNotSupported, "QK-E301", t.name):
        type_by_name(t.name)
    with refuses(TypeNotSupported, "QK-E301"):
        type_by_id(t.id)
    interleaved = BY_NAME[t.name.replace("_ROW", "_R4")]
    assert (t.row_header, t.block, t.block_bytes) == (
        interleaved.row_header,
        interleaved.block,
        interleaved.block_bytes,
    )


@pytest.mark.parametrize("peer", GGUF, ids=lambda t: t.name)
def test_sizes_equal_ggufs(peer: gguf.GGMLQuantizationType) -> None:
    own_type = BY_ID[peer.value]
    assert own_type.name == peer.name
    assert (own_type.block, own_type.block_bytes) == gguf.GGML_QUANT_SIZES[peer]


@pytest.mark.parametrize("t", TYPES, ids=str)
def test_names_are_case_insensitive(t: TensorType) -> None:
    assert type_by_name(t.name.lower()) is type_by_name(t.ggml_name) is t


@pytest.mark.parametrize("t", [*TYPES, *ROWS], ids=str)
def test_table_rows_are_consistent(t: TensorType) -> None:
    n = 4 * t.block
    assert t.row_bytes(n) == t.row_header + 4 * t.block_bytes
    tail = 32 if t.name == "I2_S" else 0
    assert t.tensor_bytes((n, 3 * t.interleave, 2)) == 6 * t.interleave * t.row_bytes(n) + tail
    assert t.imatrix in ("ignored", "used", "required")
    assert t.trees in ("both", "mainline", "ik", "none")


@pytest.mark.parametrize("type_id", [-1, 15, 38, 43, 96, 200, 1 << 31, *REMOVED_IDS])
def test_unknown_type_ids_are_refused(type_id: int) -> None:
    with pytest.raises(TypeNotSupported):
        type_by_id(type_id)


def test_partial_blocks_are_refused() -> None:
    with refuses(TypeNotSupported, "QK-E303 256"):
        BY_NAME["Q4_K"].row_bytes(100)
    with refuses(TypeNotSupported, "QK-E303 4"):
        BY_NAME["Q4_K_R4"].tensor_bytes((256, 6))


def test_an_unknown_name_gets_a_hint() -> None:
    with refuses(TypeNotSupported, "QK-E301 Q4_K"):
        type_by_name("Q4K")
