"""``show_imatrix``, ``diff_imatrix``, ``merge_imatrix`` and ``convert_imatrix``: the group's commands, on files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

import quantkit
from quantkit.errors import FormatError, RecipeError, ResourceError


@pytest.fixture
def matrix(data: Path) -> Path:
    return data / "tiny-moe-imatrix.gguf"


def test_show_lists_coverage_of_a_model(matrix: Path, tiny_moe: Path) -> None:
    alone, of_model = quantkit.show_imatrix(matrix), quantkit.show_imatrix(matrix, model=tiny_moe)
    assert not alone.coverage.of_model
    assert of_model.coverage.of_model
    assert not of_model.coverage.missing
    assert len(alone.statistics.tensors) == len(alone.imatrix.entries)
    output = quantkit.show_imatrix(matrix, model=tiny_moe, process_output=True).coverage
    assert [t.name for t in output.missing] == ["output.weight"]


def test_a_matrix_merged_with_itself_has_twice_the_tokens(matrix: Path, tmp_path: Path) -> None:
    double = quantkit.merge_imatrix([matrix, matrix], tmp_path / "double.gguf")
    assert double.path == tmp_path / "double.gguf"
    difference = quantkit.diff_imatrix(matrix, tmp_path / "double.gguf")
    assert max(t.figure for t in difference.tensors) < 1e-6
    assert all(t.tokens_b == 2 * (t.tokens_a or 0) for t in difference.tensors)
    assert not difference.only_a + difference.only_b


def test_without_an_output_nothing_is_written(matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    merged = quantkit.merge_imatrix([matrix])
    converted = quantkit.convert_imatrix(matrix, names="merged", fill="mean")
    assert (merged.path, converted.path) == (None, None)
    assert any("ffn_gate_up_exps" in name for name in converted.imatrix.entries)
    assert not list(tmp_path.iterdir())


def test_the_suffix_selects_the_format(matrix: Path, tmp_path: Path) -> None:
    dat = quantkit.convert_imatrix(matrix, tmp_path / "m.dat")
    assert dat.format == "dat"
    assert dat.notes
    reread = quantkit.read_imatrix(tmp_path / "m.dat")
    original = quantkit.read_imatrix(matrix)
    for name in reread.entries:
        assert np.allclose(reread.values(name), original.values(name), rtol=1e-6)
    explicit = quantkit.convert_imatrix(tmp_path / "m.dat", tmp_path / "x", format="dat", overwrite=True)
    assert quantkit.read_imatrix(tmp_path / "x").format == explicit.format == "dat"


def test_refusals(matrix: Path, tmp_path: Path, tiny_moe: Path) -> None:
    (tmp_path / "there.gguf").touch()
    with refuses(ResourceError, "QK-E402", "there.gguf"):
        quantkit.convert_imatrix(matrix, tmp_path / "there.gguf")
    with refuses(ResourceError, "QK-E403"):
        quantkit.merge_imatrix([matrix], matrix, overwrite=True)
    with refuses(FormatError, "QK-E118"):
        quantkit.show_imatrix(tiny_moe)
    with refuses(RecipeError, "QK-E202"):
        quantkit.merge_imatrix([])
