"""The encoding record of every action; modules after the plan read it and import no registry of types."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from quantkit import pipeline
from quantkit.formats.gguf import TensorInfo
from quantkit.kernels.formats import SYMMETRIC
from quantkit.pipeline.encoding import PIECE, TILE, Action, RowEncoding, encoding_of
from quantkit.pipeline.feedback import UniformInputs
from quantkit.types import BY_NAME

#: A row, and rows that make whole groups of all interleaved types.
N, ROWS = 256, 16


def encoding(source: str, target: str, encoder: str = "", *, feedback: bool = False) -> RowEncoding:
    t = BY_NAME[source]
    info = TensorInfo("blk.0.ffn_up.weight", (N, ROWS), t, t.tensor_bytes((N, ROWS)), 0, 0)
    return encoding_of(info, BY_NAME[target], N, UniformInputs(N, 1) if feedback else None, encoder)


@pytest.mark.parametrize(
    ("source", "target", "action"),
    [
        ("Q4_K", "Q4_K", Action.COPY),
        ("Q4_K", "Q4_K_R4", Action.REPACK),
        ("Q4_K_R4", "Q4_K", Action.REPACK),
        ("I2_S", "IQ2_BN", Action.REPACK),
        ("I2_S", "Q8_0", Action.ENCODE),
        ("BF16", "Q4_K_R4", Action.ENCODE),
        ("Q8_0", "Q8_K_R8", Action.ENCODE),
    ],
)
def test_the_action_of_rows(source: str, target: str, action: Action) -> None:
    record = encoding(source, target)
    assert record.action is action
    assert bool(record.encoder) == (action is Action.ENCODE)
    assert record.has_tensor_scale == (source == "I2_S")
    assert record.is_cached == (action is Action.ENCODE)
    assert not record.missing


def test_feedback_encodes_instead_of_copying() -> None:
    assert encoding("Q8_0", "Q8_0").action is Action.COPY
    record = encoding("Q8_0", "Q8_0", feedback=True)
    assert (record.action, record.has_feedback, record.is_cached) == (Action.ENCODE, True, False)
    assert not encoding("BF16", "TQ1_0", feedback=True).has_feedback  # its levels are not chosen one by one
    assert encoding("BF16", "IQ3_XXS", feedback=True).grouping is not None
    assert encoding("BF16", "Q4_K", feedback=True).grouping is None


@pytest.mark.parametrize(
    ("target", "encoder", "expected", "search", "encoder_type"),
    [
        ("Q4_K", "", "mainline", "", "Q4_K"),
        ("Q4_K", "ik", "ik", "ik", "Q4_K"),
        ("Q4_K_R4", "", "ik", "ik", "Q4_K"),
        ("Q4_K_R4", "mainline", "mainline", "", "Q4_K"),
        ("IQ4_KS", "mainline", "ik", "", "IQ4_KS"),
        ("IQ1_S_R4", "", "ik", "", "IQ1_S_ROW"),
        ("Q8_K_R8", "", "ik", "", "Q8_K_R8"),
        ("Q4_0", SYMMETRIC, SYMMETRIC, SYMMETRIC, "Q4_0"),
    ],
)
def test_the_encoder_and_the_type_of_its_rows(
    target: str, encoder: str, expected: str, search: str, encoder_type: str
) -> None:
    record = encoding("BF16", target, encoder)
    assert (record.encoder, record.search, record.encoder_type.name) == (expected, search, encoder_type)
    assert record.is_unusual == (expected != encoding("BF16", target).encoder)
    assert record.is_interleaved == (record.target.interleave > 1)


def test_pieces_are_whole_groups() -> None:
    assert (encoding("BF16", "Q4_K").group, encoding("BF16", "Q4_K").piece) == (1, PIECE // N)
    assert encoding("Q4_0_R8", "Q8_K_R16").group == 16
    info = TensorInfo("w", (1 << 20, ROWS), BY_NAME["BF16"], 2 << 24, 0, 0)
    assert encoding_of(info, BY_NAME["Q4_K_R4"], 1 << 20).piece == 4
    assert encoding_of(info, BY_NAME["Q4_K"], 1 << 20, UniformInputs(256, 1)).piece == TILE


@pytest.mark.parametrize(
    ("source", "target", "missing"), [("BF16", "I32", "encoder for I32"), ("I32", "Q8_0", "decoder for I32")]
)
def test_a_missing_function_is_in_the_record(source: str, target: str, missing: str) -> None:
    assert encoding(source, target).missing == missing


def test_a_tail_is_copied_with_its_rows() -> None:
    assert encoding("Q4_0_R8", "Q4_0_R8").has_plain_rows
    assert not encoding("I2_S", "I2_S").has_plain_rows
    t = BY_NAME["F16"]
    padded = TensorInfo("w", (N, 2), t, 4 * N, 0, 0)
    assert encoding_of(padded, t, N).has_plain_rows
    assert not encoding_of(replace(padded, nbytes=4 * N + 32), t, N).has_plain_rows


#: Modules of ``pipeline`` that choose types, or decide about those that were chosen, and the digest of a type's code.
DECIDE = {"cache/keys", "choose", "encoding", "feedback", "lora_source", "presets", "repack", "scaled_source"}
REGISTRIES = {f"quantkit.kernels.{name}" for name in ("formats", "interleave", "levels")}


def test_modules_after_the_plan_import_no_registry_of_types() -> None:
    folder = Path(*pipeline.__path__)
    asking = set()
    for path in folder.rglob("*.py"):
        modules = {n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        if modules & REGISTRIES:
            asking.add(path.relative_to(folder).with_suffix("").as_posix())
    assert asking <= DECIDE
