"""Importance matrices as files: statistics, coverage, differences, merging, conversion, fills, and what peers make."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_cache import program_answer
from refusals import check_refused, refuses

from quantkit.calibration import sketch, sketch_of
from quantkit.cli import cli
from quantkit.errors import FormatError, QualityGate, RecipeError
from quantkit.formats.gguf import Field, open_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from quantkit.imatrix import (
    FILLS,
    apply_fill,
    convert,
    coverage,
    difference,
    expected_tensors,
    filled_experts,
    merge,
    raw,
    statistics,
    with_names,
    with_stats,
    without_fill,
)
from quantkit.merge import merge_imatrix_entries
from quantkit.types import BY_NAME, TensorType
from zoo import NAMES, ZOO, tensor_infos

N_EMBD, N_FF, N_EXPERT = 32, 16, 4
ARRAY = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tensor:
    """As much of a model's tensor as coverage asks about."""

    name: str
    shape: tuple[int, ...]
    type: TensorType = BY_NAME["BF16"]


def moe_tensors(layers: int = 2) -> list[Tensor]:
    tensors = [Tensor("token_embd.weight", (N_EMBD, 100)), Tensor("output.weight", (N_EMBD, 100))]
    for i in range(layers):
        tensors += [
            Tensor(f"blk.{i}.attn_norm.weight", (N_EMBD,), BY_NAME["F32"]),
            Tensor(f"blk.{i}.attn_q.weight", (N_EMBD, 64)),
            Tensor(f"blk.{i}.ffn_gate_inp.weight", (N_EMBD, N_EXPERT), BY_NAME["F32"]),
            Tensor(f"blk.{i}.ffn_gate_exps.weight", (N_EMBD, N_FF, N_EXPERT)),
            Tensor(f"blk.{i}.ffn_up_exps.weight", (N_EMBD, N_FF, N_EXPERT)),
            Tensor(f"blk.{i}.ffn_down_exps.weight", (N_FF, N_EMBD, N_EXPERT)),
        ]
    return tensors


def entry(x: ARRAY, routed: npt.NDArray[np.bool_] | None = None) -> ImatrixEntry:
    """Collect x [tokens, n], or per expert what was routed to it [tokens, experts]."""
    mask = np.ones((len(x), 1), bool) if routed is None else routed
    sums = np.stack([np.square(x[m]).sum(axis=0) for m in mask.T]).astype(np.float32)
    in_sum = np.stack([x[m].sum(axis=0) for m in mask.T]).astype(np.float32)
    return ImatrixEntry(sums, mask.sum(axis=0).astype(np.int64), in_sum)


@dataclass
class Run:
    """A calibration: its activations, and which experts they were routed to (never to the last ``empty`` ones)."""

    seed: int
    chunks: int = 2
    empty: int = 0
    layers: int = 2

    def activations(self) -> dict[str, tuple[ARRAY, npt.NDArray[np.bool_] | None]]:
        rng, tokens, rows = np.random.default_rng(self.seed), 256 * self.chunks, {}
        for i in range(self.layers):
            x, h = rng.normal(0.1, 1 + i, (tokens, N_EMBD)), rng.normal(0, 0.5, (tokens, N_FF))
            routed = rng.random((tokens, N_EXPERT)) < [0.5, 0.3, 0.2, 0.1]
            routed[:, N_EXPERT - self.empty :] = False
            rows |= {f"blk.{i}.{kind}.weight": (x, None) for kind in ("attn_q", "ffn_gate_inp")}
            rows |= {f"blk.{i}.ffn_{kind}_exps.weight": (x, routed) for kind in ("gate", "up")}
            rows[f"blk.{i}.ffn_down_exps.weight"] = (h, routed)
        return rows

    def imatrix(self) -> Imatrix:
        entries = {name: entry(*arguments) for name, arguments in self.activations().items()}
        return Imatrix(Path(f"run-{self.seed}"), entries, [f"text-{self.seed}"], self.chunks, 256)


def both(*runs: Run) -> Imatrix:
    """One run over the texts of all."""
    activations = [run.activations() for run in runs]
    entries = {}
    for name in activations[0]:
        routed = [g[name][1] for g in activations]
        mask = None if routed[0] is None else np.concatenate([r for r in routed if r is not None])
        entries[name] = entry(np.concatenate([g[name][0] for g in activations]), mask)
    datasets, chunks = [f"text-{run.seed}" for run in runs], sum(run.chunks for run in runs)
    return Imatrix(Path("both"), entries, datasets, chunks, 256)


def saved(path: Path, imatrix: Imatrix, kind: Any = "gguf") -> Imatrix:
    write_imatrix(path, imatrix, kind)
    return read_imatrix(path)


def assert_close(a: Imatrix, b: Imatrix, rel: float = 1e-6) -> None:
    assert (a.datasets, a.chunk_count, a.chunk_size) == (b.datasets, b.chunk_count, b.chunk_size)
    assert a.entries.keys() == b.entries.keys()
    for name, x in a.entries.items():
        y = b.entries[name]
        assert x.counts.tolist() == y.counts.tolist(), name
        np.testing.assert_allclose(x.sums, y.sums, rtol=rel)
        assert (x.in_sum is None) == (y.in_sum is None)
        if x.in_sum is not None and y.in_sum is not None:
            np.testing.assert_allclose(x.in_sum, y.in_sum, rtol=rel, atol=1e-4)


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["imatrix", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


# --- statistics ---


def test_statistics_equal_those_stored_by_llama_imatrix(data: Path) -> None:
    imatrix = read_imatrix(data / "tiny-moe-imatrix.gguf")
    result = statistics(imatrix)
    assert len(result.tensors) == 32
    for t in result.tensors:
        stored = imatrix.entries[t.name].stats
        assert stored is not None
        np.testing.assert_allclose(t.row(), stored, rtol=3e-7, equal_nan=True, err_msg=t.name)


def test_statistics_follow_their_definition() -> None:
    """Two tokens of (1, 0) and (3, 4): E[x] = (2, 2), E[x^2] = (5, 8)."""
    x = np.array([[1.0, 0.0], [3.0, 4.0]])
    matrix = Imatrix(Path("x"), {"blk.0.attn_q.weight": entry(x), "blk.1.attn_q.weight": entry(2 * x)}, ["t"], 1, 2)
    first, second = statistics(matrix).tensors
    assert (first.sum_sq, first.mean, first.std_deviation, first.elements) == (13, 2, 0, 2)
    share = np.array([5, 8]) / 13
    assert first.h_norm == pytest.approx(100 * -(share * np.log2(share)).sum(), rel=1e-6)
    assert math.isnan(first.gain)
    assert (second.gain, second.cossim, second.l2_dist) == (2, 1, pytest.approx(math.sqrt(8)))
    assert math.isnan(second.pearson)  # nothing varies
    layers = statistics(matrix).layers
    assert [(layer.label, layer.sum_sq) for layer in layers] == [("0", 13), ("1", 52)]


@pytest.mark.parametrize("layer", ["999999999", "9" * 21, "9" * 5000])
def test_any_layer_number_is_one_entry(layer: str) -> None:
    """Nothing counts up to it; a number that no layer has is none."""
    x = np.array([[1.0, 0.0], [3.0, 4.0]])
    entries = {f"blk.{n}.attn_q.weight": entry(x) for n in ("0", layer)}
    first, second = statistics(Imatrix(Path("x"), entries, ["t"], 1, 2)).tensors
    assert (first.name, first.layer) == ("blk.0.attn_q.weight", 0)
    assert (second.layer, second.pair.n) == ((int(layer), 2) if len(layer) < 10 else (None, 0))


def test_a_gap_between_layers_and_empty_entries_are_noted() -> None:
    entries = Run(1, layers=3).imatrix().entries
    entries = {n: e for n, e in entries.items() if not n.startswith("blk.1.")}
    none = ImatrixEntry(np.zeros((1, 4), np.float32), np.zeros(1, np.int64))
    result = statistics(Imatrix(Path("x"), {**entries, "blk.0.attn_k.weight": none}, [], 1, 8))
    assert result.layers == ()
    assert "blk.0.attn_k.weight: no tokens, no statistics" in result.notes
    assert any(note.startswith("layers are missing between 0 and 2") for note in result.notes)
    assert next(t for t in result.tensors if t.name == "blk.2.attn_q.weight").pair.n == N_EMBD


def awkward() -> dict[str, Imatrix]:
    """Matrices with everything the statistics treat apart: empty experts, output, prediction layers, no sums of x."""
    base = Run(3, empty=1, layers=4).imatrix()
    entries = dict(base.entries)
    entries["output.weight"] = entry(np.random.default_rng(9).normal(0, 2, (64, N_EMBD)))
    entries["blk.3.nextn.eh_proj.weight"] = entry(np.random.default_rng(8).normal(0, 2, (64, N_EMBD)))
    entries["blk.2.attn_a_very_long_name_that_does_not_fit.weight"] = entries["blk.0.attn_q.weight"]
    del entries["blk.1.attn_q.weight"]
    full = replace(base, entries=entries)
    mixed = {n: replace(e, in_sum=None) if "attn" in n else e for n, e in entries.items()}
    return {
        "nextn": replace(full, n_layer_nextn=1),
        "by-name": full,
        "mixed": replace(full, entries=mixed),
        "plain": replace(base, entries={n: replace(e, in_sum=None) for n, e in base.entries.items()}),
    }


def cells(text: str, left: int) -> list[list[str]]:
    """Return the rows of a table, numbers as they are printed; whichever way it draws its columns."""
    rows = [line.replace("|", " ").replace("nan%", "nan").split() for line in text.splitlines()]
    return [[c.rstrip("%").replace("nan", "-") for c in row] for row in rows if row[left : left + 1]]


def tables(output: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of the statistics of weights and of layers."""
    weights, _, layers = output.partition("layers")
    number = re.compile(r"\s*(\d+|-|mtp\d+)\s")
    return tuple(  # type: ignore[return-value]
        cells("\n".join(line for line in part.splitlines() if number.match(line)), 0) for part in (weights, layers)
    )


@pytest.mark.peer
@pytest.mark.parametrize("case", ["tiny-moe.gguf", "tiny-moe.dat", "ik.dat", *awkward()])
def test_show_prints_llama_imatrixs_figures(llama_bin: Path, data: Path, tmp_path: Path, case: str) -> None:
    references = {"tiny-moe.gguf": "tiny-moe-imatrix.gguf", "tiny-moe.dat": "tiny-moe-imatrix.dat"}
    path = data / {**references, "ik.dat": "tiny-moe-imatrix-ik.dat"}.get(case, "")
    if path == data:
        path = tmp_path / "x.gguf"
        write_imatrix(path, awkward()[case])
    command = [llama_bin / "llama-imatrix", "-m", "none", "--show-statistics", "--in-file", path]
    peer_output = program_answer(command).text
    output = run("show", "--per-tensor", path).output
    expected = tables(peer_output[peer_output.index("Computing tensor") :].replace("(", "\n("))
    actual_tables = tables(output[output.index("Statistics of weights") :])
    assert len(expected[0]) > 8
    assert len(expected[1]) >= 4
    for theirs_rows, our_rows in zip(expected, actual_tables, strict=True):
        assert len(theirs_rows) == len(our_rows)
        for a, b in zip(theirs_rows, our_rows, strict=True):
            assert a[0] == b[0]
            assert len(a) == len(b)
            for x, y in zip(a[1:], b[1:], strict=True):
                # A figure that lies on the edge between two roundings may be printed as either.
                assert x == y or abs(float(x) - float(y)) < 1.5e-4 * max(1, abs(float(x)) * 1e-2), (a, b)


# --- coverage ---


def test_complete_coverage(data: Path, tiny_moe: Path) -> None:
    with open_gguf(tiny_moe) as file:
        tensors, names = tuple(file.tensors.values()), set(file.tensors)
    for name in ("tiny-moe-imatrix.gguf", "tiny-moe-imatrix.dat", "tiny-moe-imatrix-ik.dat"):
        result = coverage(read_imatrix(data / name), tensors, arch="qwen3moe")
        assert (result.share, result.missing, result.strangers, result.aliased) == (1, (), (), ())
        assert {t.name for t in result.tensors} <= names
        assert sum(t.experts for t in result.tensors) == 3 * 4 * 8
    by_layer = coverage(read_imatrix(data / "tiny-moe-imatrix.gguf"), tensors, arch="qwen3moe").by_layer()
    assert [(g.name, g.expected, g.present, g.missing) for g in by_layer] == [(str(i), 8, 8, 0) for i in range(4)]
    assert by_layer[0].tokens_min == 15066


def test_entries_lost_by_fusion_use_the_other_half() -> None:
    """ik_llama.cpp's fused operations record the up tensor alone."""
    matrix = Run(1).imatrix()
    fused = {n: e for n, e in matrix.entries.items() if "gate_exps" not in n}
    result = coverage(replace(matrix, entries=fused), moe_tensors())
    assert result.missing == ()
    assert [t.name for t in result.aliased] == [f"blk.{i}.ffn_gate_exps.weight" for i in range(2)]
    assert {t.entry for t in result.aliased} == {f"blk.{i}.ffn_up_exps.weight" for i in range(2)}
    without = {n: e for n, e in fused.items() if "up_exps" not in n}
    result = coverage(replace(matrix, entries=without), moe_tensors())
    names = [f"blk.{i}.ffn_{half}_exps.weight" for i in range(2) for half in ("gate", "up")]
    assert [t.name for t in result.missing] == names
    assert result.share == (2 * (2 + 4)) / (2 * (2 + 12))
    assert {g.name: (g.expected, g.present, g.missing) for g in result.by_class()}["ffn_up_exps"] == (2, 0, 2)
    with refuses(QualityGate, "QK-E500 42.86 90 blk.0.ffn_gate_exps.weight"):
        result.check(0.9)
    result.check(0.42)


def test_experts_without_and_with_few_tokens() -> None:
    result = coverage(Run(2, empty=1).imatrix(), moe_tensors(), hardly=130)
    counts = Run(2, empty=1).imatrix().entries["blk.0.ffn_up_exps.weight"].counts
    t = next(t for t in result.tensors if t.name == "blk.0.ffn_up_exps.weight")
    assert (t.experts, t.never, t.hardly) == (4, 1, int(((counts > 0) & (counts < 130)).sum()))
    assert t.hardly > 0
    group = {g.name: g for g in result.by_class()}["ffn_up_exps"]
    assert (group.experts, group.never, group.tokens_min) == (8, 2, 0)
    assert result.share == 1 - 6 / 28


def test_zeros_are_reported(tmp_path: Path) -> None:
    matrix = Run(1).imatrix()
    for name, rows in (("blk.1.ffn_up_exps.weight", [2]), ("blk.0.attn_q.weight", [0])):
        sums = matrix.entries[name].sums.copy()
        sums[rows] = 1e-40
        matrix.entries[name] = replace(matrix.entries[name], sums=sums)
    write_imatrix(tmp_path / "x.gguf", matrix)
    out = run("show", tmp_path / "x.gguf").output
    assert (
        "entries of zeros only, which make a quantization unusable: 2\n"
        "  blk.0.attn_q.weight\n  blk.1.ffn_up_exps.weight: 1 of 4 experts\n"
    ) in out


def test_invalid_values_are_located() -> None:
    matrix = Run(1).imatrix()
    sums = matrix.entries["blk.1.ffn_up_exps.weight"].sums.copy()
    sums[2, 3], sums[3, 1], sums[3, 2] = np.nan, -1, np.inf
    matrix.entries["blk.1.ffn_up_exps.weight"] = replace(matrix.entries["blk.1.ffn_up_exps.weight"], sums=sums)
    for tensors in (None, moe_tensors()):
        result = coverage(matrix, tensors)
        bad = [t for t in result.tensors if t.bad_values]
        assert [(t.name, t.bad_values, t.bad_expert) for t in bad] == [("blk.1.ffn_up_exps.weight", 3, 2)]
        assert result.share < 1


def test_other_models_and_wrong_sizes() -> None:
    matrix = Run(1).imatrix()
    matrix.entries["blk.7.attn_q.weight"] = matrix.entries["blk.0.attn_q.weight"]
    matrix.entries["output.weight"] = matrix.entries["blk.0.attn_q.weight"]
    matrix.entries["blk.0.attn_q.weight"] = entry(np.ones((4, 8)))
    result = coverage(matrix, moe_tensors())
    assert [t.name for t in result.strangers] == ["blk.7.attn_q.weight"]
    assert [t.name for t in result.missing] == ["blk.0.attn_q.weight"]
    assert "has 8 values" in result.missing[0].notes[0]
    assert next(t for t in result.tensors if t.name == "output.weight").expected is None
    with_output = coverage(matrix, moe_tensors(), process_output=True)
    assert next(t for t in with_output.tensors if t.name == "output.weight").expected


def test_a_dat_has_no_token_counts(tmp_path: Path) -> None:
    result = coverage(saved(tmp_path / "x.dat", Run(2, empty=1).imatrix(), "dat"), moe_tensors())
    group = {g.name: g for g in result.by_class()}["ffn_down_exps"]
    assert (group.experts, group.never, group.tokens_min, group.tokens_median) == (8, 2, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_expected_entries_of_every_architecture(name: str) -> None:
    """All matrices but embeddings, output, convolutions and small ones (Gemma 3n, RWKV); peers record the same."""
    head = (ZOO / "headers" / f"{name}.head").read_bytes()
    tensors = [Tensor(t, tuple(ne)) for t, ne, _ in tensor_infos(head)]
    names = {t.name for t in expected_tensors(tensors, name.rpartition("-")[0])}
    matrices = {
        t.name for t in tensors if len(t.shape) > 1 and re.match(r"((enc\.)?blk\..*|output_hc_fn\.)weight$", t.name)
    }
    small = re.compile(  # never quantized
        r"ssm_conv1d|shortconv\.conv|_norm|attn_rel_b|indexer\.[qk]_proj|altup|laurel|tid2eid|compressor_ape|mix_(lerp|first|\w+_w\d|[wavg]\d)"
    )
    assert {n for n in matrices - names if not small.search(n)} == set()
    assert names <= matrices
    outputs = {t.name for t in expected_tensors(tensors, "", process_output=True)} - names
    assert outputs == ({"output.weight"} & {t.name for t in tensors} or {"token_embd.weight"})


# --- merging ---


@pytest.mark.parametrize("runs", [(Run(1),), (Run(1), Run(2, 3)), (Run(1, empty=2), Run(2, 1, empty=1), Run(3))])
def test_a_merge_equals_one_run_over_all_texts(runs: tuple[Run, ...]) -> None:
    assert_close(merge([r.imatrix() for r in runs]).imatrix, both(*runs))


@settings(max_examples=20, deadline=None)
@given(st.permutations([Run(1), Run(2, 1, 1), Run(3, 3, 2)]))
def test_order_and_grouping_do_not_matter(runs: list[Run]) -> None:
    a, b, c = (r.imatrix() for r in runs)
    assert_close(merge([a, b, c]).imatrix, merge([a, merge([b, c]).imatrix]).imatrix)
    one, two = merge([a, b, c]).imatrix, merge([c, b, a]).imatrix
    for name in one.entries:
        assert np.array_equal(one.entries[name].sums, two.entries[name].sums)


def test_merging_does_not_modify_its_inputs() -> None:
    a, b = Run(1).imatrix(), Run(1).imatrix()
    merge([a, Run(2).imatrix()])
    assert_close(a, b, 0)


def test_statistics_of_a_merge_are_recomputed() -> None:
    a, b = with_stats(Run(1).imatrix()), with_stats(Run(2).imatrix())
    matrix = merge([a, b]).imatrix
    row = matrix.entries["blk.1.attn_q.weight"].stats
    assert row is not None
    np.testing.assert_allclose(
        row,
        next(t for t in statistics(both(Run(1), Run(2))).tensors if t.name == "blk.1.attn_q.weight").row(),
        rtol=1e-4,
    )


def test_dat_files_are_weighted_by_calls(tmp_path: Path) -> None:
    a, b = Run(1, 2, empty=1), Run(2, 2)
    one = saved(tmp_path / "a.dat", a.imatrix(), "dat")
    result = merge([one, b.imatrix()])
    assert any("a .dat has no token counts: each call counts as 256 tokens" in note for note in result.notes)
    assert any("in_sum" in note for note in result.notes)
    down = result.imatrix.entries["blk.0.ffn_down_exps.weight"]
    expected = b.imatrix().entries["blk.0.ffn_down_exps.weight"]
    # Nothing was invented for the expert that the .dat has no tokens for ...
    assert down.counts[3] == expected.counts[3]
    np.testing.assert_allclose(down.sums[3], expected.sums[3], rtol=1e-6)
    # ... and dense weights, of which the .dat knows all, are as if it were a GGUF.
    want = both(a, b).entries["blk.0.attn_q.weight"]
    dense = result.imatrix.entries["blk.0.attn_q.weight"]
    assert dense.counts.tolist() == want.counts.tolist()
    np.testing.assert_allclose(dense.sums, want.sums, rtol=1e-6)


def test_two_dat_files_are_merged(tmp_path: Path) -> None:
    one = saved(tmp_path / "a.dat", Run(1).imatrix(), "dat")
    two = saved(tmp_path / "b.dat", Run(2, 4).imatrix(), "dat")
    matrix = merge([one, two], chunk_size=256).imatrix
    assert (matrix.datasets, matrix.chunk_count, matrix.chunk_size) == (["text-1", "text-2"], 6, 256)
    dense, want = matrix.entries["blk.1.attn_q.weight"], both(Run(1), Run(2, 4)).entries["blk.1.attn_q.weight"]
    assert dense.counts.tolist() == [6 * 256]
    np.testing.assert_allclose(dense.sums, want.sums, rtol=1e-6)
    assert matrix.entries["blk.1.ffn_up_exps.weight"].counts.size == N_EXPERT


def test_one_count_for_all_experts_is_divided(tmp_path: Path) -> None:
    """llama-imatrix makes such GGUF files of .dat files."""
    dat = saved(tmp_path / "a.dat", Run(1, empty=1).imatrix(), "dat")
    one_count = saved(tmp_path / "a.gguf", dat)
    assert one_count.entries["blk.0.ffn_up_exps.weight"].counts.size == 1
    merged_entry = merge([one_count, Run(2).imatrix()], chunk_size=512).imatrix.entries["blk.0.ffn_up_exps.weight"]
    assert merged_entry.counts[3] == Run(2).imatrix().entries["blk.0.ffn_up_exps.weight"].counts[3]


def test_different_shapes_name_the_tensor() -> None:
    a, b = Run(1).imatrix(), Run(2).imatrix()
    b.entries["blk.1.ffn_down_exps.weight"] = entry(np.ones((4, N_FF)), np.ones((4, 8), bool))
    with refuses(FormatError, "QK-E207 run-1 blk.1.ffn_down_exps.weight 4 16 run-2 8"):
        merge([a, b])
    b.entries["blk.1.ffn_down_exps.weight"] = entry(np.ones((4, 2 * N_FF)), np.ones((4, 4), bool))
    with refuses(FormatError, "QK-E207 blk.1.ffn_down_exps.weight 4 32 16"):
        merge([a, b])
    with refuses(RecipeError, "QK-E202"):
        merge([])


def test_entries_of_only_one_file_are_kept_and_noted() -> None:
    a, b = Run(1).imatrix(), Run(2).imatrix()
    del b.entries["blk.0.attn_q.weight"]
    result = merge([a, b])
    assert "blk.0.attn_q.weight: no entry in run-2" in result.notes
    assert np.array_equal(result.imatrix.entries["blk.0.attn_q.weight"].sums, a.entries["blk.0.attn_q.weight"].sums)


def test_chunks_of_different_sizes_are_weighted_by_tokens() -> None:
    a, b = Run(1, 2).imatrix(), replace(Run(2, 2).imatrix(), chunk_size=512)
    result = merge([a, b])
    assert (result.imatrix.chunk_count, result.imatrix.chunk_size) == (6, 256)
    assert "run-2: chunks of 512 tokens are counted as chunks of 256" in result.notes


def test_a_duplicate_file_is_noted(tmp_path: Path) -> None:
    one = saved(tmp_path / "a.gguf", Run(1).imatrix())
    assert any("tokens are counted twice" in note for note in merge([one, one]).notes)


def test_records_of_the_texts_are_joined() -> None:
    texts = [" ".join(np.random.default_rng(i).choice(["a", "b", "c", "d", "e"], 3000)) for i in range(2)]
    a, b = (replace(Run(i).imatrix(), extra=sketch(text).fields()) for i, text in enumerate(texts))
    result = merge([a, b])
    merged_sketch = sketch_of(result.imatrix)
    assert merged_sketch is not None
    assert merged_sketch.sha256 == (*sketch(texts[0]).sha256, *sketch(texts[1]).sha256)
    assert not result.notes
    merge_of_three = merge(
        [a, Run(3).imatrix(), replace(b, extra={**b.extra, "quantkit.x": Field.of("quantkit.x", 1)})]
    )
    assert "1 of 3 files have no record of their text: overlap checks do not cover it" in merge_of_three.notes
    assert "dropped keys that differ between the files: quantkit.x" in merge_of_three.notes


# --- conversion ---


def test_round_trip(tmp_path: Path) -> None:
    """What encoders see survives; counts are of the busiest expert, and zero where they were."""
    first = Run(5, empty=1).imatrix()
    one = saved(tmp_path / "a.gguf", first)
    dat = saved(tmp_path / "a.dat", convert(one, "dat").imatrix, "dat")
    result = convert(dat, "gguf", chunk_size=256)
    copy = saved(tmp_path / "b.gguf", result.imatrix)
    for name in one.entries:
        np.testing.assert_allclose(copy.values(name), one.values(name), rtol=3e-7)
        np.testing.assert_allclose(dat.values(name), one.values(name), rtol=3e-7)
        before, after = one.entries[name].counts, copy.entries[name].counts
        assert before.shape == after.shape
        assert ((before == 0) == (after == 0)).all()
        assert (after >= before).all()
    assert (copy.chunk_count, copy.chunk_size, copy.datasets) == (2, 256, ["text-5"])
    assert copy.stats_schema
    assert len(result.notes) == 1
    assert result.notes[0].startswith("a .dat has no token counts: each call counts as 256 tokens (--chunk-size)")


def test_data_lost_in_a_dat_are_noted() -> None:
    matrix = with_stats(replace(Run(1, empty=1).imatrix(), datasets=["a", "b"], n_layer_nextn=1))
    matrix.entries["blk.0.attn_k.weight"] = ImatrixEntry(np.zeros((1, 4), np.float32), np.zeros(1, np.int64))
    notes = convert(apply_fill(matrix, "mean"), "dat").notes
    assert notes[0] == (
        "lost, because a .dat file cannot store it: tokens per expert of 6 entries, chunk size, sums of activations "
        "(in_sum), statistics, all but the last of 2 datasets, quantkit.imatrix.fill, quantkit.imatrix.filled, "
        "number of prediction layers"
    )
    assert notes[1] == "omitted 1 entries without tokens: blk.0.attn_k.weight"
    assert convert(matrix, "dat").notes[2] == "filled experts without tokens with ones in 6 entries"
    assert convert(matrix, "gguf").notes == ()


def test_experts_of_a_dat_need_their_number(tmp_path: Path, tiny_moe: Path, data: Path) -> None:
    matrix = Run(1, empty=1).imatrix()
    entries = {n: e for n, e in matrix.entries.items() if "exps" in n}
    dat = saved(tmp_path / "x.dat", replace(matrix, entries=entries), "dat")
    assert (
        "the number of experts of blk.0.ffn_down_exps.weight is unknown (6 such entries)"
        in convert(dat, "gguf").notes[1]
    )
    result = convert(dat, "gguf", experts=dict.fromkeys(entries, N_EXPERT))
    assert len(result.notes) == 1
    assert result.imatrix.entries["blk.0.ffn_up_exps.weight"].counts[3] == 0
    with refuses(FormatError, "QK-E119 64 7"):
        raw(dat, experts={"blk.0.ffn_down_exps.weight": 7})
    path = tmp_path / "y.gguf"
    run("convert", "-m", tiny_moe, data / "tiny-moe-imatrix-ik.dat", path)
    assert read_imatrix(path).entries["blk.2.ffn_down_exps.weight"].sums.shape == (8, 256)


def test_zeros_of_iks_script_mean_no_tokens(tmp_path: Path) -> None:
    dat = saved(tmp_path / "x.dat", Run(1).imatrix(), "dat")
    sums = dat.entries["blk.0.ffn_up_exps.weight"].sums.copy()
    sums[0, :N_EMBD] = 0
    dat.entries["blk.0.ffn_up_exps.weight"] = replace(dat.entries["blk.0.ffn_up_exps.weight"], sums=sums)
    assert raw(dat).entries["blk.0.ffn_up_exps.weight"].counts[0] == 0


def test_names_of_merged_experts() -> None:
    matrix = with_stats(Run(1).imatrix())
    merged = with_names(matrix, "merged")
    assert sorted(n for n in merged.entries if "blk.0.ffn" in n) == [
        "blk.0.ffn_down_exps.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_up_exps.weight",
    ]  # fmt: skip
    separate = with_names(merged, "separate")
    assert_close(separate, matrix, 0)
    all_names = with_names(merged, "both")
    assert all_names.entries.keys() == merged.entries.keys() | matrix.entries.keys()
    assert all(e.stats is not None for e in all_names.entries.values())
    assert with_names(all_names, "merged").entries.keys() == merged.entries.keys()
    # An own name beats what another could give.
    entries = {**merged.entries, "blk.0.ffn_gate_exps.weight": entry(np.ones((2, N_EMBD)), np.ones((2, 4), bool))}
    entry_of_gate = with_names(replace(merged, entries=entries), "both").entries["blk.0.ffn_gate_exps.weight"]
    assert entry_of_gate.counts.tolist() == [2] * 4
    with refuses(RecipeError, "QK-E203 other"):
        with_names(matrix, "other")


# --- fills ---


def emptied(*experts: int) -> Imatrix:
    matrix = Run(6).imatrix()
    for name, e in matrix.entries.items():
        if "exps" in name:
            for array in (e.sums, e.counts, e.in_sum):
                assert array is not None
                array[list(experts)] = 0
    return matrix


@pytest.mark.parametrize("policy", FILLS)
def test_fills_are_recorded_and_reversible(tmp_path: Path, policy: str) -> None:
    before = emptied(1, 3)
    after = saved(tmp_path / "x.gguf", apply_fill(before, policy))
    assert_close(before, emptied(1, 3), 0)  # the given one is untouched
    if policy == "none":
        assert not after.extra
    else:
        assert after.extra["quantkit.imatrix.fill"].value == policy
        assert filled_experts(after) == {n: (1, 3) for n in before.entries if "exps" in n}
        assert after.entries["blk.0.ffn_up_exps.weight"].counts[[1, 3]].tolist() == [1, 1]
    assert_close(without_fill(after), before, 0)
    assert_close(merge([after, Run(7).imatrix()]).imatrix, merge([before, Run(7).imatrix()]).imatrix, 0)
    assert coverage(after).share == coverage(before).share < 1
    assert_close(apply_fill(apply_fill(after, "ones"), "none"), before, 0)


def test_values_of_a_fill() -> None:
    before = emptied(1, 2)
    e = before.entries["blk.0.ffn_down_exps.weight"]

    def values(policy: str) -> ARRAY:
        after = apply_fill(before, policy)
        return after.values("blk.0.ffn_down_exps.weight").reshape(N_EXPERT, -1)[[1, 2]].astype(np.float64)

    assert (values("ones") == 1).all()
    assert (values("none") == 1).all()
    np.testing.assert_allclose(
        values("mean"), np.tile((e.sums[0] + e.sums[3]) / (e.counts[0] + e.counts[3]), (2, 1)), rtol=1e-6
    )
    np.testing.assert_allclose(values("neighbour"), [e.sums[0] / e.counts[0], e.sums[3] / e.counts[3]], rtol=1e-6)
    between = apply_fill(emptied(1), "neighbour").values("blk.0.ffn_down_exps.weight").reshape(N_EXPERT, -1)
    assert np.array_equal(between[1], between[0])  # of two the lower one
    nothing = apply_fill(emptied(0, 1, 2, 3), "mean")
    assert filled_experts(nothing) == {}
    with refuses(RecipeError, "QK-E203 zeros"):
        apply_fill(before, "zeros")


def test_renaming_keeps_a_fill_and_its_record(tmp_path: Path) -> None:
    before = apply_fill(emptied(1), "neighbour")
    merged = with_names(before, "merged")
    assert filled_experts(merged)["blk.0.ffn_gate_up_exps.weight"] == (1,)
    assert_close(without_fill(with_names(merged, "separate")), emptied(1), 0)
    write_imatrix(tmp_path / "x.gguf", before)
    assert filled_experts(merge_imatrix_entries(tmp_path / "x.gguf")) == filled_experts(merged)


@pytest.mark.parametrize("line", ["blk.0.ffn_up_exps.weight: 9", "blk.9.x: 1", "blk.0.ffn_up_exps.weight: a", "x"])
def test_an_invalid_fill_record_is_refused(line: str) -> None:
    matrix = replace(Run(1).imatrix(), extra={"quantkit.imatrix.filled": Field.of("quantkit.imatrix.filled", [line])})
    with refuses(FormatError, "QK-E118 quantkit.imatrix.filled"):
        filled_experts(matrix)


# --- differences ---


def test_differences() -> None:
    a, b = Run(1).imatrix(), Run(1).imatrix()
    assert difference(a, b).beyond(0) == []
    e = b.entries["blk.1.ffn_up_exps.weight"]
    e.sums[2] *= 2
    del b.entries["blk.0.attn_q.weight"]
    result = difference(a, b)
    assert (result.only_a, result.only_b) == (("blk.0.attn_q.weight",), ())
    t = next(t for t in result.tensors if t.name == "blk.1.ffn_up_exps.weight")
    assert (t.worst, t.worst_relative, t.counts) == (2, pytest.approx(1), 0)
    assert 0 < t.relative < 1
    assert t.cosine < 1
    assert [r.split(":")[0] for r in result.beyond(0.5)] == ["blk.0.attn_q.weight", "blk.1.ffn_up_exps.weight"]
    assert difference(b, a).only_b == ("blk.0.attn_q.weight",)


def test_differences_of_counts_and_empty_experts() -> None:
    result = difference(Run(1, empty=1).imatrix(), Run(1).imatrix())
    t = next(t for t in result.tensors if "down" in t.name)
    assert (t.counts, t.one_sided, t.n_skipped, t.relative) == (1, 1, 1, 0)
    assert any("1 experts have tokens in one file only" in r for r in result.beyond(1))
    without_tokens = difference(Run(1).imatrix(), Run(1).imatrix(), min_tokens=10**6)
    assert all(t.note and math.isnan(t.relative) for t in without_tokens.tensors)
    assert len(without_tokens.beyond(1)) == len(without_tokens.tensors)


def test_nan_exceeds_every_limit() -> None:
    a, b = Run(1).imatrix(), Run(1).imatrix()
    b.entries["blk.0.attn_q.weight"].sums[0, 0] = np.nan
    assert difference(a, b).beyond(10) == ["blk.0.attn_q.weight: relative difference nan"]
    b.entries["blk.0.attn_q.weight"] = entry(np.ones((4, 8)))
    assert difference(a, b).beyond(10) == ["blk.0.attn_q.weight: 32 values of 1 experts and 8 of 1"]


def test_formats_compare(data: Path) -> None:
    gguf, dat = (read_imatrix(data / f"tiny-moe-imatrix.{kind}") for kind in ("gguf", "dat"))
    result = difference(gguf, dat)
    assert result.beyond(1e-6) == []
    assert all(t.tokens_a is None and t.counts is None for t in result.tensors)


# --- the command ---


def test_show(data: Path, tiny_moe: Path) -> None:
    out = run("show", "-m", tiny_moe, data / "tiny-moe-imatrix.gguf").output
    assert "coverage  100.00 %" in out
    assert "chunks    343 of 256 tokens" in out
    assert re.search(r"^ffn_down_exps +4 of 4 +32 +0 +0 +11150 +20865 +0$", out, re.MULTILINE)
    assert re.search(r"^ +3 +6120.4326 +1.08 +22.5226 +0.3834 +0.3827 +0.0211$", out, re.MULTILINE)
    assert "Statistics of weights" not in out
    assert max(map(len, run("show", "--per-tensor", data / "tiny-moe-imatrix.gguf").output.splitlines())) <= 130


def test_show_lists_missing_entries(data: Path, tmp_path: Path, tiny_moe: Path) -> None:
    imatrix = read_imatrix(data / "tiny-moe-imatrix.gguf")
    entries = {n: e for n, e in imatrix.entries.items() if "gate_exps" not in n and n != "blk.2.attn_v.weight"}
    write_imatrix(tmp_path / "x.gguf", replace(imatrix, entries=entries))
    result = run("show", "-m", tiny_moe, "--require-coverage", "100%", tmp_path / "x.gguf", code=3)
    assert "weights without an entry: 1\n  blk.2.attn_v.weight" in result.output
    assert (
        "weights that use the entry of another: 4\n  blk.0.ffn_gate_exps.weight: has no entry and uses that of"
        in result.output
    )
    check_refused(result.output, "QK-E500 99.14 100 blk.2.attn_v.weight")


def test_show_as_json(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "x.gguf", apply_fill(emptied(1), "mean"))
    output = json.loads(run("show", "--json", tmp_path / "x.gguf").output)
    assert (output["fill"], output["chunk_size"], output["coverage"]["of_model"]) == ("mean", 256, False)
    tensor = next(t for t in output["coverage"]["tensors"] if t["name"] == "blk.0.ffn_up_exps.weight")
    assert tensor["tokens"][1] == 0
    assert tensor["experts_never_hit"] == 1
    assert {layer["label"] for layer in output["statistics"]["layers"]} == {"0", "1"}
    assert output["statistics"]["tensors"][0]["gain"] == "nan"


def test_merge_command(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "a.gguf", Run(1).imatrix())
    write_imatrix(tmp_path / "b.gguf", Run(2).imatrix())
    out = run("merge", tmp_path / "a.gguf", tmp_path / "b.gguf", "-o", tmp_path / "c.gguf").output
    assert "10 entries, 4 chunks of 256 tokens" in out
    assert_close(read_imatrix(tmp_path / "c.gguf"), both(Run(1), Run(2)))
    rerun = run("merge", tmp_path / "a.gguf", "-o", tmp_path / "c.gguf", code=1).output
    assert "exists; choose another name, or use --overwrite" in rerun
    run("merge", tmp_path / "a.gguf", "-o", tmp_path / "c.dat", "--names", "merged")
    matrix = read_imatrix(tmp_path / "c.dat")
    assert matrix.format == "dat"
    assert "blk.0.ffn_gate_up_exps.weight" in matrix.entries


@pytest.mark.parametrize("kind", ["gguf", "dat"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_impossible_values_are_not_written(tmp_path: Path, value: float, kind: Any) -> None:
    good, bad, out = (tmp_path / f"{name}.{kind}" for name in ("good", "bad", "out"))
    matrix = Run(1).imatrix()
    write_imatrix(good, matrix, kind)
    matrix.entries["blk.1.ffn_up_exps.weight"].sums[1, 3] = value
    write_imatrix(bad, matrix, kind)
    for command in (
        ("merge", good, bad, "-o", out),
        ("convert", bad, out),
        ("--in-file", good, "--in-file", bad, "-o", out),
    ):
        check_refused(run(*command, code=1).output, "QK-E118 blk.1.ffn_up_exps.weight 35 128", bad)
        assert sorted(path.name for path in tmp_path.iterdir()) == [bad.name, good.name]
    with refuses(FormatError, "QK-E118", bad):
        merge_imatrix_entries(bad)
    assert run("show", bad).exit_code == 0  # which shows where
    assert run("diff", good, bad, "--fail-above", 0.01, code=1).exit_code == 1


def test_sums_of_activations_may_be_negative_but_must_be_finite(tmp_path: Path) -> None:
    matrix = Run(1).imatrix()
    in_sum = matrix.entries["blk.0.attn_q.weight"].in_sum
    assert in_sum is not None
    in_sum[0, 2] = -4
    assert_close(saved(tmp_path / "a.gguf", matrix), matrix, 0)
    in_sum[0, 2] = np.inf
    with refuses(FormatError, "QK-E118 blk.0.attn_q.weight 2 32"):
        saved(tmp_path / "b.gguf", matrix)


def test_convert_command(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "a.gguf", emptied(0))
    result = run("convert", tmp_path / "a.gguf", tmp_path / "a.dat")
    assert "note: lost, because a .dat file cannot store it: tokens per expert of 6 entries" in result.output
    result = run("convert", "--chunk-size", 256, "--fill", "neighbour", tmp_path / "a.dat", tmp_path / "b.gguf")
    assert "note: 6 experts without tokens filled in 6 entries" in result.output
    copy = read_imatrix(tmp_path / "b.gguf")
    assert copy.extra["quantkit.imatrix.fill"].value == "neighbour"
    rows = copy.values("blk.0.ffn_up_exps.weight").reshape(N_EXPERT, -1)
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-6)
    assert run("convert", tmp_path / "none", tmp_path / "c.dat", code=1).output.startswith("Error:")


def test_diff_command(data: Path, tmp_path: Path) -> None:
    path = data / "tiny-moe-imatrix.gguf"
    run("diff", path, data / "tiny-moe-imatrix-ik.dat")
    assert "all within 0.05" in run("diff", "--fail-above", 0.05, path, data / "tiny-moe-imatrix-ik.dat").output
    out = run("diff", "--fail-above", 1e-3, path, data / "tiny-moe-imatrix-ik.dat", code=1).output
    assert "beyond 0.001:" in out
    output = json.loads(run("diff", "--json", "--fail-above", 0, path, path).output)
    assert output["beyond"] == []
    assert output["tensors"][0]["cosine"] == pytest.approx(1)
    run("diff", path, tmp_path / "none", code=2)


def test_help_and_no_command() -> None:
    text = run("--help").output
    assert all(f"\n  {name} " in text for name in ("show", "diff", "merge", "convert"))
    for name in ("show", "diff", "merge", "convert"):
        assert f"quantkit imatrix {name}" in run(name, "--help").output


# --- peers ---


def llama(program: Path, *arguments: object, out: Path, libraries: Mapping[str, str] | None = None) -> str:
    """Run a program that writes the file ``out``, one of its words; return what it prints."""
    output = program_answer([program, *arguments], [out], libraries)
    assert output.code == 0, output.text[-4000:]
    return output.text


@pytest.fixture(scope="module")
def calibrated(llama_bin: Path, tiny_moe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of llama-imatrix over chunks 0-1, 2-5 and 0-5 of a text: first, second, whole."""
    folder = tmp_path_factory.mktemp("calibrated")
    for name, begin, n in (("first", 0, 2), ("second", 2, 4), ("whole", 0, 6)):
        text = data / "tiny-moe-evaluation.txt"
        options = ["-c", 256, "-b", 256, "-t", 1, "--no-ppl", "--chunk", begin, "--chunks", n]
        out = folder / f"{name}.gguf"
        llama(llama_bin / "llama-imatrix", "-m", tiny_moe, "-f", text, "-o", out, *options, out=out)
    return folder


@pytest.mark.peer
def test_merged_equals_a_run_of_llama_imatrix_over_both_texts(calibrated: Path) -> None:
    first, second, full = (read_imatrix(calibrated / f"{name}.gguf") for name in ("first", "second", "whole"))
    result = merge([first, second])
    assert result.notes == ()
    assert result.imatrix.chunk_count == full.chunk_count == 6
    assert difference(full, result.imatrix).beyond(1e-5) == []
    for name, e in full.entries.items():
        assert e.counts.tolist() == result.imatrix.entries[name].counts.tolist()


@pytest.mark.peer
def test_merging_writes_llama_imatrixs_bytes(llama_bin: Path, calibrated: Path, tmp_path: Path) -> None:
    files = [calibrated / "first.gguf", calibrated / "second.gguf"]
    arguments = [part for file in files for part in ("--in-file", file)]
    out = tmp_path / "theirs.gguf"
    llama(llama_bin / "llama-imatrix", "-m", "none", *arguments, "-o", out, out=out)
    run("merge", *files, "-o", tmp_path / "ours.gguf")
    expected, actual = read_imatrix(out), read_imatrix(tmp_path / "ours.gguf")
    assert (expected.datasets, expected.chunk_count, expected.stats_schema) == (actual.datasets, 6, actual.stats_schema)
    for name, e in expected.entries.items():
        f = actual.entries[name]
        assert np.array_equal(e.sums, f.sums)
        assert np.array_equal(e.counts, f.counts)
        assert e.in_sum is not None
        assert f.in_sum is not None
        assert np.array_equal(e.in_sum, f.in_sum)
        assert e.stats is not None
        assert f.stats is not None
        np.testing.assert_allclose(e.stats, f.stats, rtol=3e-7, equal_nan=True)


@pytest.mark.peer
def test_a_dat_has_llama_imatrixs_bytes(llama_bin: Path, calibrated: Path, tmp_path: Path) -> None:
    arguments = ("--in-file", calibrated / "second.gguf", "-c", 256, "--output-format", "dat")
    out = tmp_path / "theirs.dat"
    llama(llama_bin / "llama-imatrix", "-m", "none", *arguments, "-o", out, out=out)
    run("convert", calibrated / "second.gguf", tmp_path / "ours.dat")
    assert (tmp_path / "ours.dat").read_bytes() == out.read_bytes()


@pytest.fixture(scope="module")
def matrices(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files as every command writes them, of one importance matrix."""
    folder, source = tmp_path_factory.mktemp("written"), data / "tiny-moe-imatrix.gguf"
    run("convert", source, folder / "a.dat")
    run("convert", "--chunk-size", 256, folder / "a.dat", folder / "b.gguf")
    run("convert", "--fill", "mean", source, folder / "c.gguf")
    run("merge", source, source, "-o", folder / "d.gguf")
    run("merge", source, data / "tiny-moe-imatrix.dat", "-o", folder / "e.dat")
    return {name: folder / name for name in ("a.dat", "b.gguf", "c.gguf", "d.gguf", "e.dat")}


def tensors_of(path: Path) -> dict[str, bytes]:
    with open_gguf(path) as file:
        return {name: file.data(name).tobytes() for name in file.tensors}


def same_bytes(a: dict[str, bytes], b: dict[str, bytes]) -> float:
    """Return the share of bytes that are the same; rounding of the weights' last bit changes a block here and there."""
    x, y = (np.frombuffer(b"".join(v for _, v in sorted(d.items())), np.uint8) for d in (a, b))
    return float((x == y).mean())


@pytest.mark.peer
def test_llama_quantize_reads_the_output(
    llama_bin: Path, tiny_moe: Path, data: Path, tmp_path: Path, matrices: dict[str, Path]
) -> None:
    program, out, copy = llama_bin / "llama-quantize", tmp_path / "out.gguf", tmp_path / "copy.gguf"
    llama(program, "--imatrix", data / "tiny-moe-imatrix.gguf", tiny_moe, out, "Q3_K_M", 1, out=out)
    want = tensors_of(out)
    for name, path in matrices.items():
        output = llama(program, "--imatrix", path, tiny_moe, out, "Q3_K_M", 1, out=out)
        assert "did not find weights for blk" not in output
        share = same_bytes(want, tensors_of(out))
        assert share == 1 if name in ("c.gguf", "d.gguf") else share > 0.995, name
        output = llama(llama_bin / "llama-imatrix", "-m", "none", "--in-file", path, "-o", copy, out=copy)
        assert read_imatrix(copy).entries.keys() == read_imatrix(path).entries.keys()


@pytest.mark.peer
def test_ik_llama_quantize_reads_the_dat_output(
    ik_bin: Path, tiny_moe: Path, data: Path, tmp_path: Path, matrices: dict[str, Path]
) -> None:
    libraries = {"LD_LIBRARY_PATH": f"{ik_bin.parents[1]}/ik_llama_cpp_python.libs:{ik_bin.parent}/lib"}
    dat = data / "tiny-moe-imatrix.dat"
    assert matrices["a.dat"].read_bytes() == dat.read_bytes()
    outputs = []
    for path in (dat, matrices["e.dat"]):
        out = tmp_path / path.name
        arguments = ("--imatrix", path, tiny_moe, out, "Q3_K_S", 1)
        output = llama(ik_bin / "llama-quantize", *arguments, out=out, libraries=libraries)
        assert "did not find weights for blk" not in output
        outputs.append(tensors_of(out))
    assert difference(read_imatrix(dat), read_imatrix(matrices["e.dat"])).beyond(1e-7) == []
    # The last bit of a weight decides between equally good scales; ik's search meets many of them.
    assert same_bytes(*outputs) > 0.95
