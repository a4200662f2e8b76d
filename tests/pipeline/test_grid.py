"""--keep-grid: types follow the grid of the weights, blocks on it are exact, and results say how many."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses

import quantkit
from covariances import write_covariances
from grids import F32, as_stored, gaussian, qat_weights
from quantkit import QuantizeOptions
from quantkit.cli import cli
from quantkit.cook import config_from, cook, plan_cook
from quantkit.errors import RecipeError
from quantkit.formats.gguf import open_gguf, write_gguf
from quantkit.inspect import inspect
from quantkit.kernels import dequantize
from quantkit.kernels import quantize as encode
from quantkit.pipeline.exactness import GRID_EXACT, GRID_TENSORS, exact_tensors
from quantkit.pipeline.gpu.choice import cpu_reason
from quantkit.quantize import plan_quantize
from quantkit.types import BY_NAME
from small_models import llama_fields, llama_tensors, tensor_bytes

KEEP = QuantizeOptions(keep_grid=True)
#: Types whose files come back from F16 and F32 byte for byte, apart from ties of sign.
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


def write(path: Path, type_name: str, weights: dict[str, F32] | None = None) -> Path:
    """Write a llama of Gaussian weights in a float type; ``weights``: other ones, by name."""
    data = []
    for number, (name, (shape, _)) in enumerate(llama_tensors(1).items()):
        t = BY_NAME["F32" if len(shape) == 1 else type_name]
        x = (weights or {}).get(name, gaussian(math.prod(shape[1:]), shape[0], number))
        data.append((name, shape, t, encode(np.ascontiguousarray(x, np.float32), t).tobytes()))
    write_gguf(path, llama_fields(1), data)
    return path


def matrices() -> dict[str, tuple[int, int]]:
    """Return rows and columns of the matrices."""
    return {name: (shape[1], shape[0]) for name, (shape, _) in llama_tensors(1).items() if len(shape) == 2}


def qat_model(path: Path, type_name: str = "BF16") -> Path:
    """Write a model with all matrices on Q4_0's grid."""
    weights = {
        name: qat_weights(*shape, 7, 32, type_name, seed) for seed, (name, shape) in enumerate(matrices().items())
    }
    return write(path, type_name, weights)


def run(*arguments: Any) -> Any:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def blocks_that_differ(a: Path, b: Path) -> tuple[int, int]:
    """Return the number of blocks that differ, and that of all blocks."""
    differ = total = 0
    first, second = tensor_bytes(a), tensor_bytes(b)
    for name, (type_name, data) in first.items():
        assert second[name][0] == type_name
        blocks = [
            np.frombuffer(d, np.uint8).reshape(-1, BY_NAME[type_name].block_bytes) for d in (data, second[name][1])
        ]
        differ += int((blocks[0] != blocks[1]).any(axis=1).sum())
        total += len(blocks[0])
    return differ, total


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K_M"])
def test_tensors_on_a_grid_get_its_type_and_are_exact(tmp_path: Path, type_name: str) -> None:
    model = qat_model(tmp_path / "m.gguf")
    result = quantkit.quantize(model, tmp_path / "q.gguf", type_name, KEEP, threads=2)
    assert {t.type.name for t in result.plan.tensors if len(t.shape) == 2} == {"Q4_0"}
    tensors = exact_tensors(result.plan, result.run.sums)
    assert {t.name for t in tensors} == set(matrices())
    assert all(t.exact == t.values for t in tensors)
    stored, source = tensor_bytes(tmp_path / "q.gguf"), tensor_bytes(model)
    for name, (_, n) in matrices().items():
        data = np.frombuffer(stored[name][1], np.uint8).reshape(-1, BY_NAME["Q4_0"].row_bytes(n))
        y = as_stored(dequantize(data, "Q4_0", n), "BF16")
        x = dequantize(np.frombuffer(source[name][1], np.uint8).reshape(len(data), -1), "BF16", n)
        assert (x == y).all()


def test_tensors_off_the_grid_are_as_without_the_option(tmp_path: Path) -> None:
    """One tensor lies on a grid, a third of the rows of another: no other tensor changes."""
    x = gaussian(512, 256, 9)
    x[::3] = qat_weights(171, 256, 7, 32, "BF16", 3)
    weights = {"blk.0.attn_q.weight": qat_weights(256, 256, -8, 128, "BF16"), "blk.0.ffn_up.weight": x}
    model = write(tmp_path / "m.gguf", "BF16", weights)
    result = quantkit.quantize(model, tmp_path / "a.gguf", "Q4_0", KEEP, threads=2)
    quantkit.quantize(model, tmp_path / "b.gguf", "Q4_0", threads=2)
    exact = {t.name: t.exact / t.values for t in exact_tensors(result.plan, result.run.sums)}
    assert exact == {"blk.0.attn_q.weight": 1, "blk.0.ffn_up.weight": pytest.approx(171 / 512)}
    a, b = tensor_bytes(tmp_path / "a.gguf"), tensor_bytes(tmp_path / "b.gguf")
    assert {name for name in a if a[name] != b[name]} <= weights.keys()
    rows = [np.frombuffer(f["blk.0.ffn_up.weight"][1], np.uint8).reshape(512, -1) for f in (a, b)]
    equal = (rows[0] == rows[1]).all(axis=1)
    assert equal[np.arange(512) % 3 != 0].all()
    assert not equal[::3].any()


def test_a_larger_grid_stays_as_asked_with_a_note(tmp_path: Path) -> None:
    x = dequantize(encode(gaussian(256, 256), "Q8_0"), "Q8_0", 256)
    model = write(tmp_path / "m.gguf", "F32", {"blk.0.attn_q.weight": x})
    plan = plan_quantize(model, tmp_path / "q.gguf", "Q4_K", KEEP)
    tensor = next(t for t in plan.tensors if t.name == "blk.0.attn_q.weight")
    assert (tensor.type.name, tensor.keeps_grid) == ("Q4_K", False)
    assert any("Q8_0" in note and "blk.0.attn_q.weight" in note for note in plan.notes)


@pytest.mark.parametrize("source", ["F16", "F32", "BF16"])
@pytest.mark.parametrize("type_name", TYPES)
def test_files_come_back(tmp_path: Path, type_name: str, source: str) -> None:
    """File to float to the same type: all weights exact; bytes differ where numbers leave a choice."""
    first, floats, second = (tmp_path / name for name in ("a.gguf", "f.gguf", "b.gguf"))
    pure = QuantizeOptions(pure=True, allow_requantize=True, no_provenance=True)
    quantkit.quantize(write(tmp_path / "m.gguf", "F32"), first, type_name, pure, threads=2)
    quantkit.quantize(first, floats, source, pure, threads=2)
    options = QuantizeOptions(pure=True, keep_grid=True, no_provenance=True)
    result = quantkit.quantize(floats, second, type_name, options, threads=2)
    tensors = exact_tensors(result.plan, result.run.sums)
    share = sum(t.exact for t in tensors) / sum(t.values for t in tensors)
    differ, total = blocks_that_differ(first, second)
    if source != "BF16":
        assert share == 1
        assert differ <= sum(t.ambiguous_blocks for t in tensors) <= 0.3 * total
        assert differ == 0 or type_name in ("Q3_K", "Q6_K")
    else:  # a scale has 3 bits more than BF16 keeps
        assert share >= 0.97


def test_a_dry_run_and_inspect_name_the_grid(tmp_path: Path) -> None:
    model, plain = qat_model(tmp_path / "m.gguf"), write(tmp_path / "p.gguf", "BF16")
    assert "100 % of the weights lie on Q4_0's grid" in inspect(model).grid
    assert run("inspect", model, "--json")["grid"] == inspect(model).grid
    assert inspect(model, header_only=True).grid == ""
    assert inspect(plain).grid == ""
    lines = run("quantize", "--dry-run", "--json", model, tmp_path / "q.gguf", "Q4_K_M")
    assert "--keep-grid" in lines["grid"]
    assert run("quantize", "--dry-run", "--json", plain, tmp_path / "q.gguf", "Q4_K_M")["grid"] is None
    silent = run("quantize", "--dry-run", "--json", "--keep-grid", model, tmp_path / "q.gguf", "Q4_K_M")
    assert silent["grid"] is None
    summary = run("quantize", "--json", "--keep-grid", model, tmp_path / "q.gguf", "Q4_K_M")
    assert {(t["type"], t["exact"] == t["values"]) for t in summary["exact"]} == {("Q4_0", True)}


def test_a_file_and_its_report_record_the_exact_weights(tmp_path: Path) -> None:
    x = gaussian(512, 256, 9)
    x[::4] = qat_weights(128, 256, 7, 32, "BF16", 3)
    model = write(tmp_path / "m.gguf", "BF16", {"blk.0.ffn_up.weight": x})
    out = tmp_path / "q.gguf"
    quantkit.quantize(model, out, "Q4_0", KEEP, threads=2)
    with open_gguf(out) as file:
        assert (file.get(GRID_TENSORS), file.get(GRID_EXACT)) == (["blk.0.ffn_up.weight"], [128 * 256])
    assert quantkit.quantize(model, out, "Q4_0", KEEP, resume=True).run.was_complete
    assert f"{128 * 256} of {512 * 256} in 1 tensors" in CliRunner().invoke(cli, ["inspect", str(out)]).output
    report = quantkit.report([out], tmp_path / "r.html")
    (file,) = report.files
    assert {m.name: m.exact for m in file.matrices if m.exact is not None} == {"blk.0.ffn_up.weight": 128 * 256}
    assert file.exact == (128 * 256, 512 * 256)
    quantkit.quantize(model, out, "Q4_0", QuantizeOptions(keep_grid=True, no_provenance=True), overwrite=True)
    with open_gguf(out) as file:
        assert file.get(GRID_EXACT) is None


def test_nothing_on_a_grid_is_noted(tmp_path: Path) -> None:
    plan = plan_quantize(write(tmp_path / "m.gguf", "BF16"), tmp_path / "q.gguf", "Q4_0", KEEP)
    assert not any(t.keeps_grid for t in plan.tensors)
    assert any("--keep-grid has no effect" in note for note in plan.notes)


def test_the_cache_and_resume_know_the_option(tmp_path: Path) -> None:
    model = qat_model(tmp_path / "m.gguf")
    pure = QuantizeOptions(pure=True, no_provenance=True)
    keep = QuantizeOptions(pure=True, keep_grid=True, no_provenance=True)
    shares = []
    for name, options in (("a", pure), ("b", keep), ("c", keep)):
        result = quantkit.quantize(
            model, tmp_path / f"{name}.gguf", "Q4_0", options, cache=tmp_path / "cache", threads=2
        )
        shares.append([t.exact == t.values for t in exact_tensors(result.plan, result.run.sums)])
    a, b, c = (tensor_bytes(tmp_path / f"{name}.gguf") for name in "abc")
    assert a != b
    assert b == c
    assert shares == [[], [True] * len(matrices()), [True] * len(matrices())]
    plans = [plan_quantize(model, tmp_path / "d.gguf", "Q4_0", options) for options in (pure, keep)]
    assert plans[0].fingerprint != plans[1].fingerprint


def test_gpus_leave_these_tensors_to_the_cpu(tmp_path: Path) -> None:
    plan = plan_quantize(qat_model(tmp_path / "m.gguf"), tmp_path / "q.gguf", "Q4_0", KEEP)
    reasons = {cpu_reason(part) for t in plan.tensors if t.keeps_grid for part in t.parts}
    assert len(reasons) == 1
    assert "--keep-grid" in str(reasons.pop())


def test_a_block_of_which_numbers_do_not_tell_the_sign_is_counted(tmp_path: Path) -> None:
    """The first block has its largest magnitude with both signs, the second, too, but a zero has the scale's sign."""
    x = np.tile(np.arange(-8, 8, dtype=np.float32) / 64, (256, 16))
    x[0, :32] = np.float32(1 / 64)
    x[0, :2] = np.float32(7 / 64), np.float32(-7 / 64)
    x[0, 32:64] = x[0, :32]
    x[0, 40] = 0
    model = write(tmp_path / "m.gguf", "F32", {"blk.0.attn_q.weight": x})
    result = run("quantize", "--json", "--keep-grid", "--pure", model, tmp_path / "q.gguf", "Q4_0")
    blocks = {t["name"]: (t["exact"] == t["values"], t["ambiguous_blocks"]) for t in result["exact"]}
    assert blocks == {"blk.0.attn_q.weight": (True, 1)}


def test_types_of_a_file_are_refused(tmp_path: Path) -> None:
    with refuses(RecipeError, "QK-E201 keep-grid", "like"):
        options = QuantizeOptions(keep_grid=True, like=tmp_path / "x")
        plan_quantize(tmp_path / "m.gguf", tmp_path / "q.gguf", "LIKE", options)


def test_a_cook_keeps_grids_unless_told_not_to(tmp_path: Path) -> None:
    off = {"run": False}
    settings: dict[str, Any] = {"model": str(qat_model(tmp_path / "m.gguf")), "targets": "Q4_K_M", "threads": 2}
    settings |= {"output": "out", "name": "m", "imatrix": off, "check": off, "report": off}
    plan = plan_cook(config_from(settings, "cook.toml", tmp_path))
    assert any("Q4_0" in note and "keep_grid" in note for note in plan.notes)
    cook(config_from(settings, "cook.toml", tmp_path))
    stored = tensor_bytes(tmp_path / "out/m-Q4_K_M.gguf")
    assert {stored[name][0] for name in matrices()} == {"Q4_0"}
    settings["quantize"] = {"keep_grid": False}
    cook(config_from(settings, "cook.toml", tmp_path))
    stored = tensor_bytes(tmp_path / "out/m-Q4_K_M.gguf")
    assert "Q4_K" in {stored[name][0] for name in matrices()}


def test_tensors_wholly_on_a_grid_have_no_feedback(tmp_path: Path) -> None:
    """They are exact; a tensor that lies on one in part, and all others, are rounded as without the option."""
    x = gaussian(512, 256, 9)
    x[::3] = qat_weights(171, 256, 7, 32, "BF16", 3)
    weights = {"blk.0.attn_q.weight": qat_weights(256, 256, 7, 32, "BF16"), "blk.0.ffn_up.weight": x}
    model = write(tmp_path / "m.gguf", "BF16", weights)
    names = dict.fromkeys((*weights, "blk.0.attn_k.weight"), (5000.0,))
    feedback = QuantizeOptions(feedback=write_covariances(tmp_path / "cov.gguf", names))
    result = quantkit.quantize(model, tmp_path / "a.gguf", "Q4_0", replace(feedback, keep_grid=True), threads=2)
    quantkit.quantize(model, tmp_path / "b.gguf", "Q4_0", feedback, threads=2)
    exact = {t.name: t.exact == t.values for t in exact_tensors(result.plan, result.run.sums)}
    assert exact == {"blk.0.attn_q.weight": True}
    a, b = tensor_bytes(tmp_path / "a.gguf"), tensor_bytes(tmp_path / "b.gguf")
    assert {name for name in a if a[name] != b[name]} == {"blk.0.attn_q.weight"}
    rounded = {t.name for t in result.plan.tensors for part in t.parts if part.inputs is not None}
    assert rounded >= {"blk.0.ffn_up.weight", "blk.0.attn_k.weight"}
    assert "blk.0.attn_q.weight" not in rounded
