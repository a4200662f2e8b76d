"""pipeline/importance: lookup, aliases, filters, refusals, and the report."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from peer_cache import program_answer
from refusals import refuses

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import open_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from quantkit.pipeline.importance import ALIASES, Importance, check_importance, importance_requirement
from quantkit.types import TYPES, TensorType, type_by_name


def entry(n_mat: int, n: int, *, start: float = 2, counts: list[int] | None = None) -> ImatrixEntry:
    sums = np.arange(start, start + n_mat * n, dtype=np.float32).reshape(n_mat, n)
    return ImatrixEntry(sums, np.array(counts or [1] * n_mat))


def matrix(**entries: ImatrixEntry) -> Imatrix:
    """An imatrix of layer 0; keyword ffn_up is blk.0.ffn_up.weight."""
    return Imatrix(Path("calib.gguf"), {f"blk.0.{kind}.weight": e for kind, e in entries.items()}, ["text"], 1, 1)


def blk(kind: str) -> str:
    return f"blk.0.{kind}.weight"


# --- lookup ---


@pytest.mark.parametrize("kind", ["gguf", "dat"])
def test_exact_names_of_a_real_model(data: Path, tiny_moe: Path, kind: str) -> None:
    imatrix = read_imatrix(data / f"tiny-moe-imatrix.{kind}")
    importance = Importance(imatrix)
    model = open_gguf(tiny_moe)
    matrices = {name: t for name, t in model.tensors.items() if len(t.shape) > 1 and "norm" not in name}
    finds = [importance.lookup(name, t.shape) for name, t in matrices.items()]
    for item in finds:
        shape = matrices[item.tensor].shape
        if item.entry is None:
            assert item.tensor in ("token_embd.weight", "output.weight")
            assert item.weights is None
            continue
        assert (item.entry, item.alias, item.notes, item.ones) == (item.tensor, None, (), 0)
        weights = item.weights
        assert weights is not None
        assert weights.dtype == np.float32
        assert weights.flags.c_contiguous
        assert weights.flags.aligned
        assert weights.shape == (shape[2] if len(shape) == 3 else 1, shape[0])
        assert np.array_equal(weights.reshape(-1), imatrix.values(item.tensor))
    coverage = importance.coverage(model.tensors, finds)
    assert (len(coverage.used), coverage.unused, coverage.n_matching) == (32, (), 32)
    assert coverage.lines()[0].endswith(": 32 of 32 entries used, 2 tensors quantized without importance")
    coverage.check()


def test_experts_are_rows() -> None:
    result = Importance(matrix(ffn_down_exps=entry(3, 4, counts=[1, 2, 0]))).lookup(blk("ffn_down_exps"), (4, 9, 3))
    assert result.weights is not None
    assert result.weights.tolist() == [[2, 3, 4, 5], [3, 3.5, 4, 4.5], [1, 1, 1, 1]]
    assert result.ones == 1
    assert result.notes == ("1 of 3 experts received no calibration token: all their columns are weighted equally",)


@pytest.mark.parametrize("value", [0, 1e-39])
def test_zeros_are_named(value: float) -> None:
    """An encoder to which no weight counts writes zeros; the bytes stay the reference's, but a note says so."""
    zeros = replace(original := entry(3, 4), sums=original.sums * np.array([[1], [value / 5], [1]], np.float32))
    dense = ImatrixEntry(np.full((1, 4), value, np.float32), np.array([1]))
    importance = Importance(matrix(ffn_down_exps=zeros, attn_q=dense))
    finds = [importance.lookup(blk("ffn_down_exps"), (4, 9, 3)), importance.lookup(blk("attn_q"), (4, 9))]
    coverage = importance.coverage([item.tensor for item in finds], finds)
    assert coverage.odd == tuple(finds)
    experts, summary = coverage.lines()[1:]
    assert "entry blk.0.ffn_down_exps.weight is all zero for 1 of 3 experts" in experts
    assert "entry blk.0.attn_q.weight is all zero, " in summary
    assert summary.endswith("--exclude-weights blk.0.attn_q.weight")


def test_experts_without_tokens_are_detected_in_a_dat(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "x.dat", matrix(ffn_down_exps=entry(3, 4, counts=[0, 7, 0])), "dat")
    importance = Importance(read_imatrix(tmp_path / "x.dat"))
    result = importance.lookup(blk("ffn_down_exps"), (4, 9, 3))
    assert result.ones == 2
    assert importance.coverage([result.tensor], [result]).odd == (result,)


def test_groups_of_rows() -> None:
    """DeepSeek V4's output matrix multiplies groups of heads, which are its rows' and no dimension of their own."""
    groups = Importance(matrix(attn_output_a=entry(3, 4)))
    result = groups.lookup(blk("attn_output_a"), (4, 6))
    assert result.n_mat == 3
    assert result.weights is not None
    assert result.weights.shape == (3, 4)
    with refuses(FormatError, "QK-E119 12"):
        groups.lookup(blk("attn_output_a"), (4, 7))


def test_heads_of_mla_and_a_fourth_dimension() -> None:
    importance = Importance(matrix(attn_k_b=entry(1, 12)))
    for shape in ((4, 5, 3), (2, 5, 3, 2), (12, 5), (12,)):
        result = importance.lookup(blk("attn_k_b"), shape)
        assert result.weights is not None
        assert result.weights.reshape(-1).tolist() == list(range(2, 14))
        assert result.weights.shape[1] == shape[0]


@pytest.mark.parametrize(
    ("shape", "needs"),
    [((8, 9), "8 x 1 = 8"), ((4, 9, 8), "4 x 8 = 32"), ((2, 9), "2 x 1 = 2")],
)
def test_wrong_sizes_are_refused_never_broadcast(shape: tuple[int, ...], needs: str) -> None:
    importance = Importance(matrix(ffn_up=entry(1, 4)))
    with refuses(FormatError, "QK-E119 calib.gguf blk.0.ffn_up.weight 4", needs):
        importance.lookup(blk("ffn_up"), shape)


@pytest.mark.parametrize("name", ["token_embd.weight", "per_layer_token_embd.weight"])
def test_token_embeddings_of_another_size_get_no_importance(name: str) -> None:
    result = Importance(Imatrix(Path("x"), {name: entry(1, 4)})).lookup(name, (8, 100))
    assert (result.entry, result.weights) == (None, None)
    assert "has 4 values" in result.notes[0]
    assert Importance(Imatrix(Path("x"), {name: entry(1, 8)})).lookup(name, (8, 100)).weights is not None


def test_pruned_layers_use_their_old_numbers() -> None:
    imatrix = Imatrix(Path("x"), {"blk.7.ffn_up.weight": entry(1, 4), "blk.3.ffn_up.weight": entry(1, 4, start=90)})
    names = {f"blk.3.{kind}.weight": f"blk.7.{kind}.weight" for kind in ("ffn_up", "ffn_gate")}
    importance = Importance(imatrix, original_names=names)
    up, gate = (importance.lookup(f"blk.3.{kind}.weight", (4, 9)) for kind in ("ffn_up", "ffn_gate"))
    assert (up.entry, gate.entry) == ("blk.7.ffn_up.weight", "blk.7.ffn_up.weight")
    assert (up.alias, gate.tensor) == (None, "blk.3.ffn_gate.weight")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_negative_and_nonfinite_importances_are_refused(bad: float) -> None:
    spoilt = entry(1, 4)
    spoilt.sums[0, 2] = bad
    imatrix = matrix(ffn_up=spoilt, ffn_down=entry(1, 4))
    with refuses(FormatError, "QK-E118 calib.gguf blk.0.ffn_up.weight 2"):
        Importance(imatrix)
    assert Importance(imatrix, exclude=["ffn_up"]).lookup(blk("ffn_down"), (4, 9)).entry == blk("ffn_down")


def test_missing_data_of_an_expert_are_not_replaced() -> None:
    spoilt = entry(2, 4, counts=[0, 1])
    spoilt.sums[0] = np.nan
    assert Importance(matrix(ffn_up_exps=spoilt)).lookup(blk("ffn_up_exps"), (4, 9, 2)).ones == 1


# --- aliases ---


@pytest.mark.parametrize("alias", ALIASES, ids=lambda a: f"{a.kind}-from-{a.source}")
def test_every_alias(alias: object) -> None:
    kind, source = alias.kind, alias.source  # type: ignore[attr-defined]
    experts = 3 if kind.endswith("_exps") else 1
    importance = Importance(matrix(**{source: entry(experts, 4)}))
    shape = (4, 9, 3) if experts == 3 else (4, 9)
    result = importance.lookup(blk(kind), shape)
    assert (result.entry, result.alias) == (blk(source), alias)
    assert result.weights is not None
    assert result.weights.tolist() == entry(experts, 4).sums.tolist()
    quality = "exact" if alias.exact else "approximate"  # type: ignore[attr-defined]
    assert result.notes[0].startswith(f"has no entry and uses that of {blk(source)} ({quality}: ")
    assert result in importance.coverage([blk(kind)], [result]).aliased


def test_only_attention_over_the_compressed_cache_is_approximate() -> None:
    assert {a.kind for a in ALIASES if not a.exact} == {"attn_v_b", "attn_kv_b"}


def test_the_exact_name_comes_first_then_the_merged_one() -> None:
    entries = {"ffn_up_exps": entry(2, 4, start=10), "ffn_gate_up_exps": entry(2, 4, start=50)}
    importance = Importance(matrix(**entries))
    assert importance.lookup(blk("ffn_up_exps"), (4, 9, 2)).alias is None
    assert importance.lookup(blk("ffn_gate_exps"), (4, 9, 2)).entry == blk("ffn_gate_up_exps")
    assert importance.lookup("blk.1.ffn_gate_exps.weight", (4, 9, 2)).entry is None  # another layer's data


def test_an_alias_of_wrong_size_is_skipped_and_reported() -> None:
    # attn_v_b of 3 heads; the entry of attn_kv_b has one row: ik_llama.cpp stops here, broadcasting would be a guess
    result = Importance(matrix(attn_kv_b=entry(1, 4))).lookup(blk("attn_v_b"), (4, 9, 3))
    assert result.entry is None
    assert "cannot use blk.0.attn_kv_b.weight" in result.notes[0]
    assert "has 4 values, not 4 x 3 = 12" in result.notes[0]
    both = matrix(ffn_gate_up_exps=entry(1, 4), ffn_up_exps=entry(2, 4))
    assert Importance(both).lookup(blk("ffn_gate_exps"), (4, 9, 2)).entry == blk("ffn_up_exps")


@pytest.mark.parametrize("name", ["blk.0.ffn_gate.bias", "blk.0.ffn_gate_inp.weight", "blk.0.cross_attn_q.weight"])
def test_tensors_without_an_alias(name: str) -> None:
    imatrix = matrix(ffn_up=entry(1, 4), ffn_up_exps=entry(1, 4), attn_qkv=entry(1, 4))
    result = Importance(imatrix).lookup(name, (4, 9))
    assert (result.entry, result.notes) == (None, ("no entry in the importance matrix",))


@pytest.mark.parametrize("halves", ["ffn_up_exps", "ffn_gate_exps"])
def test_merged_and_unmerged_on_a_real_matrix(data: Path, halves: str) -> None:
    """Gate, up and merged tensors have one importance: what the aliases rest on, shown on llama.cpp's data."""
    imatrix = read_imatrix(data / "tiny-moe-imatrix.gguf")
    dropped = "ffn_gate_exps" if halves == "ffn_up_exps" else "ffn_up_exps"
    full = imatrix.values("blk.2." + dropped + ".weight").reshape(8, 256)
    del imatrix.entries[f"blk.2.{dropped}.weight"]
    importance = Importance(imatrix)
    for name in (dropped, "ffn_gate_up_exps"):
        result = importance.lookup(f"blk.2.{name}.weight", (256, 512, 8))
        assert result.weights is not None
        assert np.array_equal(result.weights, full)


# --- filters ---


def test_filters_are_substrings_and_repeatable() -> None:
    imatrix = matrix(ffn_up=entry(1, 4), ffn_down=entry(1, 4), attn_q=entry(1, 4))
    assert Importance(imatrix, include=["ffn_up", "attn"]).names == (blk("ffn_up"), blk("attn_q"))
    assert Importance(imatrix, exclude=["ffn_up", "attn"]).names == (blk("ffn_down"),)
    assert Importance(imatrix).n_entries == 3
    result = Importance(imatrix, exclude=["attn"]).lookup(blk("attn_q"), (4, 9))
    assert result.notes == ("excluded from the importance matrix by --exclude-weights",)


def test_filters_are_mutually_exclusive() -> None:
    with refuses(RecipeError, "QK-E201 --include-weights --exclude-weights"):
        Importance(matrix(ffn_up=entry(1, 4)), include=["a"], exclude=["b"])


def test_unmatched_filters_are_reported() -> None:
    imatrix = matrix(ffn_up=entry(1, 4))
    assert Importance(imatrix, exclude=["ffn", "nope"]).notes == (
        "--exclude-weights 'nope' matches none of the 1 entries of calib.gguf",
        "the filters exclude every entry: all tensors are quantized without importance",
    )
    importance = Importance(imatrix, include=["nope"])
    assert importance.notes[0] == "--include-weights 'nope' matches none of the 1 entries of calib.gguf"
    assert importance.n_entries == 0
    coverage = importance.coverage([blk("ffn_up")], [importance.lookup(blk("ffn_up"), (4, 9))])
    coverage.check()
    assert importance.notes[0] in coverage.lines()


def test_a_filtered_tensor_gets_no_alias() -> None:
    imatrix = matrix(ffn_up_exps=entry(2, 4), ffn_gate_exps=entry(2, 4))
    importance = Importance(imatrix, exclude=["ffn_up_exps"])
    assert importance.lookup(blk("ffn_up_exps"), (4, 9, 2)).entry is None
    assert importance.lookup(blk("ffn_gate_exps"), (4, 9, 2)).entry == blk("ffn_gate_exps")
    fused = matrix(ffn_up_exps=entry(2, 4))  # as ik_llama.cpp's fused operations leave it
    assert Importance(fused, exclude=["ffn_gate"]).lookup(blk("ffn_gate_exps"), (4, 9, 2)).entry is None
    assert Importance(fused, include=["ffn_up"]).lookup(blk("ffn_gate_exps"), (4, 9, 2)).entry is None


# --- rules ---

NEEDY = [t for t in TYPES if t.imatrix == "required" or t.needs_imatrix]


def test_missing_importance_of_prediction_layers_has_advice() -> None:
    result = Importance(matrix(ffn_up=entry(1, 4))).lookup("blk.46.ffn_up.weight", (4, 9))
    with refuses(RecipeError, "QK-E212 --nextn --tensor-type"):
        check_importance(result, "blk.46.ffn_up.weight", type_by_name("IQ2_XXS"), predicts=True)
    with pytest.raises(RecipeError) as e:
        check_importance(result, "blk.46.ffn_up.weight", type_by_name("IQ2_XXS"))
    assert "--nextn" not in e.value.message


@pytest.mark.parametrize("target", TYPES, ids=str)
def test_rules_of_both_projects(target: TensorType) -> None:
    why = importance_requirement(blk("ffn_up"), target)
    assert (why is not None) == (target in NEEDY)
    lifted = importance_requirement(blk("ffn_up"), target, ignore_rules=True)
    assert (lifted is not None) == (target.imatrix == "required")
    for name in ("token_embd.weight", "per_layer_token_embd.weight", "output.weight"):
        assert (importance_requirement(name, target) is not None) == (target.imatrix == "required")


@pytest.mark.parametrize("target", TYPES, ids=str)
def test_rules_of_ik(target: TensorType) -> None:
    """src: is_very_low_bpw_quant, which lacks IQ3_XXS and does not exempt per-layer embeddings."""
    low = re.fullmatch(r"(IQ1_[SM]|IQ2_(XXS|XS|S))(_R4)?|IQ[12]_KT", target.name) is not None
    for name in (blk("ffn_up"), "per_layer_token_embd.weight"):
        assert (importance_requirement(name, target, ik=True) is not None) == low
    for name in ("token_embd.weight", "output.weight"):
        assert (importance_requirement(name, target, ik=True) is not None) == (target.imatrix == "required")


def test_q2_k_in_a_q2_k_s_file() -> None:
    q2_k = type_by_name("Q2_K")
    assert importance_requirement(blk("ffn_up"), q2_k, preset="Q2_K") is None
    assert "Q2_K_S" in str(importance_requirement(blk("ffn_up"), q2_k, preset="Q2_K_S"))
    assert importance_requirement(blk("ffn_up"), q2_k, preset="Q2_K_S", ignore_rules=True) is None
    assert importance_requirement(blk("ffn_up"), type_by_name("Q4_K"), preset="Q2_K_S") is None


def test_the_refusal_names_the_tensor_and_its_type() -> None:
    result = Importance(matrix(ffn_down=entry(1, 4))).lookup(blk("ffn_up"), (4, 9))
    iq2_s, iq2_xxs = type_by_name("IQ2_S"), type_by_name("IQ2_XXS")
    with refuses(RecipeError, "QK-E212 blk.0.ffn_up.weight IQ2_S"):
        check_importance(result, result.tensor, iq2_s)
    check_importance(result, result.tensor, iq2_s, ignore_rules=True)
    with refuses(RecipeError, "QK-E212 --imatrix IQ2_XXS --ignore-imatrix-rules"):
        check_importance(None, result.tensor, iq2_xxs, ignore_rules=True)
    rerun = Importance(matrix(ffn_up=entry(1, 4))).lookup(blk("ffn_up"), (4, 9))
    check_importance(rerun, rerun.tensor, iq2_xxs)


# --- coverage ---


def test_coverage_lists_unknown_missing_and_aliased_entries() -> None:
    imatrix = matrix(ffn_up=entry(1, 4), attn_q=entry(1, 4), ssm_in=entry(1, 4), ffn_gate_inp=entry(1, 4))
    importance = Importance(imatrix)
    finds = [importance.lookup(blk(kind), (4, 9)) for kind in ("ffn_up", "ffn_gate", "ffn_down")]
    coverage = importance.coverage([*(f.tensor for f in finds), blk("ffn_gate_inp"), blk("attn_qkv")], finds)
    assert coverage.used == (blk("ffn_up"),)
    # the router is in the model though not quantized; attn_q would have served attn_qkv
    assert coverage.unused == (blk("ssm_in"),)
    assert [item.tensor for item in coverage.without] == [blk("ffn_down")]
    assert [item.tensor for item in coverage.aliased] == [blk("ffn_gate")]
    coverage.check()
    assert coverage.lines() == [
        "importance matrix calib.gguf: 1 of 4 entries used, 2 not needed, 1 of tensors that this model does not have, "
        "1 tensors quantized without importance",
        "blk.0.ssm_in.weight: the importance matrix has this entry, but the model has no such tensor",
        "blk.0.ffn_down.weight: no entry in the importance matrix",
        "blk.0.ffn_gate.weight: has no entry and uses that of blk.0.ffn_up.weight (exact: the same input)",
    ]


def test_the_matrix_of_another_model_is_refused() -> None:
    importance = Importance(matrix(ffn_up=entry(1, 4)))
    coverage = importance.coverage(["enc.blk.0.ffn_up.weight"], [importance.lookup("enc.blk.0.ffn_up.weight", (4, 9))])
    with refuses(FormatError, "QK-E119 1 blk.0.ffn_up.weight"):
        coverage.check()


# --- peer ---


@pytest.mark.peer
@pytest.mark.parametrize("name", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "Q2_K"])
def test_llama_quantize_refuses_the_same_types(llama_bin: Path, tiny_moe: Path, tmp_path: Path, name: str) -> None:
    command = [llama_bin / "llama-quantize", "--tensor-type", f"blk.0.ffn_up_exps={name}", tiny_moe, tmp_path / "x"]
    output = program_answer([*command, "Q8_0", "2"])
    refused = importance_requirement(blk("ffn_up_exps"), type_by_name(name), preset="Q8_0") is not None
    assert (output.code != 0) == refused
    assert ("requires an imatrix" in output.text) == refused


@pytest.mark.peer
def test_llama_quantize_refuses_the_same_sizes(llama_bin: Path, tiny_moe: Path, data: Path, tmp_path: Path) -> None:
    imatrix = read_imatrix(data / "tiny-moe-imatrix.gguf")
    name = "blk.1.ffn_up_exps.weight"
    full_entry = imatrix.entries[name]
    imatrix.entries[name] = ImatrixEntry(full_entry.sums[:1], full_entry.counts[:1])  # one row for eight experts
    write_imatrix(tmp_path / "short.gguf", imatrix)
    command = [
        llama_bin / "llama-quantize",
        "--imatrix",
        tmp_path / "short.gguf",
        tiny_moe,
        tmp_path / "x",
        "Q4_K",
        "2",
    ]
    output = program_answer(command)
    assert output.code != 0
    assert "imatrix size 256 is different from tensor size 2048" in output.text
    with refuses(FormatError, "QK-E119 256 8 2048"):
        Importance(read_imatrix(tmp_path / "short.gguf")).lookup(name, (256, 256, 8))
