"""NVFP4 with scales of tensors: the error, the bytes in any order of jobs, llama.cpp's logits, damaged scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from refusals import refuses

import quantkit
import zoo
from libllama import Libllama, nmse
from quantkit import QuantizeOptions
from quantkit.errors import FormatError, QuantkitError, RecipeError, TypeNotSupported
from quantkit.formats.gguf import Field, ValueType, open_gguf, open_model, write_gguf
from quantkit.kernels import dequantize
from quantkit.kernels import quantize as encode
from quantkit.model.engine import load
from quantkit.pipeline.folded_source import read_scales, scale_of
from quantkit.pipeline.gpu.choice import cpu_reason
from quantkit.pipeline.scaled_source import LARGEST
from quantkit.pipeline.worker import Worker
from quantkit.quantize import plan_quantize
from quantkit.sensitivity.encode import Encoder, Encoding, Pair, groups_of
from quantkit.types import BY_NAME
from small_models import llama_fields, llama_tensors, tensor_bytes, write_model

F32 = npt.NDArray[np.float32]
NVFP4, FLOAT = BY_NAME["NVFP4"], BY_NAME["F32"]
PLAIN = QuantizeOptions(tensor_scales=False)
MOE = "qwen3moe-moe"


def write(path: Path, weights: dict[str, F32], fields: list[Field] | None = None) -> Path:
    """Write a llama of one layer in F32 whose matrices are zero, except these."""
    data = []
    for name, (shape, _) in llama_tensors(1).items():
        x = weights.get(name, np.zeros(shape[::-1], np.float32))
        data.append((name, shape, FLOAT, np.ascontiguousarray(x, np.float32).tobytes()))
    data += [(name, x.shape[::-1], FLOAT, x.tobytes()) for name, x in weights.items() if name not in llama_tensors(1)]
    write_gguf(path, llama_fields(1) if fields is None else fields, data)
    return path


def values(path: Path, name: str) -> F32:
    """Return the values of a tensor, times its scale if the file has one."""
    with open_model(path) as file:
        tensor = file.tensors[name]
        rows = np.frombuffer(bytes(file.data(tensor)), np.uint8).reshape(-1, tensor.type.row_bytes(tensor.shape[0]))
        x: F32 = dequantize(rows, tensor.type, tensor.shape[0])
        scale = scale_of(file, tensor)
        if scale is not None:
            scales = read_scales(file, tensor, scale)
            x = x * np.repeat(scales, len(x) // len(scales))[:, None]
        return x.reshape(tensor.shape[::-1])


def error(x: F32, y: F32) -> float:
    """Return the relative error of y."""
    difference = y.astype(np.float64) - x
    return float(np.sqrt((difference**2).sum() / (x.astype(np.float64) ** 2).sum()))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.write_zoo(MOE, tmp_path_factory.mktemp("zoo") / "moe.gguf")


# ---------------------------------------------------------------- the error


@pytest.mark.parametrize("std", [0.2, 0.02, 0.005, 0.0005])
@pytest.mark.parametrize("tails", [None, 3])
def test_the_error_is_small_for_all_sizes_of_weights(std: float, tails: int | None, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((256, 256)) if tails is None else rng.standard_t(tails, (256, 256))
    x = (x * std).astype(np.float32)
    model = write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": x})
    quantkit.quantize(model, tmp_path / "q.gguf", "NVFP4")
    quantkit.quantize(model, tmp_path / "plain.gguf", "NVFP4", PLAIN)
    scaled, plain = (error(x, values(tmp_path / f"{name}.gguf", "blk.0.attn_q.weight")) for name in ("q", "plain"))
    assert scaled < 0.084
    assert plain > (0.12 if std < 0.01 and tails is None else scaled)


def test_the_importance_matrix_decides_where_the_error_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    name = "blk.0.ffn_up.weight"
    x = (rng.standard_normal((512, 256)) * 0.01).astype(np.float32)
    model = write(tmp_path / "m.gguf", {name: x})
    importance = np.where(np.arange(256) % 4 == 0, 1, 1e-3).astype(np.float32)
    shape = (256, 1)
    write_gguf(
        tmp_path / "imatrix.gguf",
        [
            Field.of("general.type", "imatrix"),
            Field.of("imatrix.chunk_count", 1),
            Field.of("imatrix.chunk_size", 512),
            Field.of("imatrix.datasets", ["x"], ValueType.ARRAY, ValueType.STRING),
        ],
        [
            (f"{name}.in_sum2", shape, FLOAT, (importance * 512).tobytes()),
            (f"{name}.counts", (1, 1), FLOAT, np.array([512], np.float32).tobytes()),
        ],
    )
    quantkit.quantize(model, tmp_path / "q.gguf", "NVFP4")
    with_matrix = QuantizeOptions(imatrix=tmp_path / "imatrix.gguf")
    quantkit.quantize(model, tmp_path / "w.gguf", "NVFP4", with_matrix)
    plain, weighted = (error(x[:, ::4], values(tmp_path / f"{file}.gguf", name)[:, ::4]) for file in "qw")
    assert weighted < 0.85 * plain


def test_measured_errors_are_of_the_values_not_of_the_divided_rows(tmp_path: Path) -> None:
    x = (np.random.default_rng(9).standard_normal((256, 256)) * 0.003).astype(np.float32)
    model = write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": x})
    result = quantkit.quantize(model, tmp_path / "q.gguf", "NVFP4", measure_error=True)
    sums = result.run.sums["blk.0.attn_q.weight"]
    assert sums.square == pytest.approx((x.astype(np.float64) ** 2).sum(), rel=1e-4)
    y = values(tmp_path / "q.gguf", "blk.0.attn_q.weight")
    assert sums.error == pytest.approx(((y.astype(np.float64) - x) ** 2).sum(), rel=1e-4)


# ---------------------------------------------------------------- the plan


def test_every_expert_has_a_scale_of_its_own(moe: Path, tmp_path: Path) -> None:
    plan = plan_quantize(moe, tmp_path / "q.gguf", "NVFP4")
    names = [t.name for t in plan.tensors]
    quantkit.quantize(moe, tmp_path / "q.gguf", "NVFP4")
    with open_gguf(moe) as source, open_gguf(tmp_path / "q.gguf") as file:
        n = int(source.get("qwen3moe.expert_count"))
        weight = source.tensors["blk.0.ffn_up_exps.weight"]
        scale = file.tensors["blk.0.ffn_up_exps.scale"]
        assert names.index(scale.name) == names.index(weight.name) + 1
        assert (scale.shape, scale.type.name) == ((n,), "F32")
        largest = np.abs(source.data(weight).view(np.float32).reshape(n, -1)).max(axis=1)
        steps = np.log2(file.data(scale).view(np.float32) / (largest / np.float32(LARGEST))) * 8
        assert np.abs(steps - np.rint(steps)).max() < 1e-3
        assert set(np.rint(steps)) <= set(range(8))
        assert file.tensors["blk.0.attn_q.scale"].shape == (1,)
        assert "token_embd.scale" not in file.tensors
        assert "blk.0.ffn_gate_inp.scale" not in file.tensors


def test_without_scales_the_bytes_are_the_reference_encoders(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", llama_tensors())
    quantkit.quantize(model, tmp_path / "q.gguf", "NVFP4", PLAIN)
    source, actual = tensor_bytes(model), tensor_bytes(tmp_path / "q.gguf")
    assert actual.keys() == source.keys()
    for name, (shape, type_name) in llama_tensors().items():
        if len(shape) > 1:
            x = np.frombuffer(source[name][1], np.float16 if type_name == "F16" else np.float32).astype(np.float32)
            assert actual[name] == ("NVFP4", encode(x.reshape(-1, shape[0]), NVFP4).tobytes())


@pytest.mark.parametrize(
    ("arch", "name", "extra", "reason"),
    [
        ("llama", "token_embd.weight", {}, "llama"),
        ("no-such-arch", "blk.0.attn_q.weight", {}, "no-such-arch"),
        ("llama", "blk.0.ffn_up.weight", {"blk.0.ffn_up.bias": np.ones(512, np.float32)}, "bias"),
        ("llama", "blk.0.attn_q.weight", {"blk.0.attn_q.scale": np.ones(1, np.float32)}, "the model has one"),
    ],
)
def test_weights_without_a_scale_say_why(
    arch: str, name: str, extra: dict[str, F32], reason: str, tmp_path: Path
) -> None:
    fields = [Field.of("general.architecture", arch), *llama_fields(1)[1:]]
    model = write(tmp_path / "m.gguf", extra, fields)
    options = QuantizeOptions(allow_incomplete=True)
    plan = plan_quantize(model, tmp_path / "q.gguf", "NVFP4", options)
    tensor = next(t for t in plan.tensors if t.name == name)
    assert tensor.parts[0].scale is None
    assert reason in tensor.reason
    assert any(note.startswith("QK-W008") and reason in note for note in plan.notes)


def test_gpus_leave_divided_rows_to_the_cpu(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", {})
    plan = plan_quantize(model, tmp_path / "q.gguf", "NVFP4")
    parts = [part for tensor in plan.tensors for part in tensor.parts if part.scale is not None]
    assert len(parts) == 8
    assert all(cpu_reason(part) for part in parts)


# ---------------------------------------------------------------- the run


def test_bytes_do_not_depend_on_threads_memory_or_shards(moe: Path, tmp_path: Path) -> None:
    quantkit.quantize(moe, tmp_path / "a.gguf", "NVFP4", threads=1)
    quantkit.quantize(moe, tmp_path / "b.gguf", "NVFP4", threads=3, max_ram="8M")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    size = math.ceil((tmp_path / "a.gguf").stat().st_size / 3)
    result = quantkit.quantize(moe, tmp_path / "c.gguf", "NVFP4", QuantizeOptions(split_max_size=size))
    assert len(result.paths) > 2
    with open_model(result.paths[0]) as shards, open_gguf(tmp_path / "a.gguf") as file:
        assert {n: bytes(shards.data(t)) for n, t in shards.tensors.items()} == {
            n: bytes(file.data(t)) for n, t in file.tensors.items()
        }


def test_an_interrupted_run_resumes(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantkit.quantize(moe, tmp_path / "a.gguf", "NVFP4")
    run, count = Worker.run, 0

    def fail_later(self: Worker, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count > 12:
            raise KeyboardInterrupt
        return run(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", fail_later)
        with pytest.raises(KeyboardInterrupt):
            quantkit.quantize(moe, tmp_path / "b.gguf", "NVFP4", threads=1)
    resumed = quantkit.quantize(moe, tmp_path / "b.gguf", "NVFP4", threads=1, resume=True)
    assert resumed.run.resumed
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_the_cache_distinguishes_rows_by_the_scale_that_divides_them(tmp_path: Path) -> None:
    """The largest weight of the last row changes the scale, and so the bytes of all others."""
    x = (np.random.default_rng(3).standard_normal((256, 256)) * 0.01).astype(np.float32)
    for name, largest in (("a", 1.0), ("b", 1.7)):
        x[-1, -1] = largest
        model = write(tmp_path / f"{name}.gguf", {"blk.0.attn_q.weight": x})
        result = quantkit.quantize(model, tmp_path / f"{name}-cached.gguf", "NVFP4", cache=tmp_path / "cache")
        quantkit.quantize(model, tmp_path / f"{name}-again.gguf", "NVFP4", cache=tmp_path / "cache")
        quantkit.quantize(model, tmp_path / f"{name}-new.gguf", "NVFP4")
        new = (tmp_path / f"{name}-new.gguf").read_bytes()
        assert (tmp_path / f"{name}-cached.gguf").read_bytes() == (tmp_path / f"{name}-again.gguf").read_bytes() == new
        assert result.run.cache is not None


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    x = np.zeros((256, 256), np.float32)
    x[200, 3] = np.nan
    model = write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": x})
    with refuses(FormatError, "QK-E108 blk.0.attn_q.weight"):
        quantkit.quantize(model, tmp_path / "q.gguf", "NVFP4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]


# ---------------------------------------------------------------- runtimes


def _write_plain(name: str, path: Path) -> Path:
    """Write a model of the zoo without the scales and biases that it has beside its weights."""
    with open_gguf(zoo.write_zoo(name, path.with_suffix(".all"))) as file:
        tensors = [t for t in file.tensors.values() if not t.name.endswith(("_norm.bias", "scale")) or "norm" in t.name]
        tensors = [t for t in tensors if not t.name.endswith(("ffn_up.bias", "ffn_gate.bias", "ffn_down.bias"))]
        data = [(t.name, t.shape, t.type, file.data(t).tobytes()) for t in tensors]
        write_gguf(path, list(file.fields.values()), data)
    return path


@pytest.mark.peer
@pytest.mark.parametrize("name", [MOE, "qwen35moe-moe", "llama-dense"])
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path, llama_bin: Path) -> None:
    """Scales of experts, shared experts, delta nets, dense layers and of the output."""
    model = _write_plain(name, tmp_path / "m.gguf")
    quantkit.quantize(model, tmp_path / "q.gguf", "NVFP4")
    tokens = zoo.expected(name)[0]
    logits = Libllama(llama_bin).logits(tmp_path / "q.gguf", tokens)
    assert nmse(load(tmp_path / "q.gguf", kv_type="f32").forward(tokens), logits) < 2e-5
    assert 0 < nmse(load(model, kv_type="f32").forward(tokens), logits) < 0.1


# ---------------------------------------------------------------- files with scales


@pytest.mark.parametrize("target", ["F32", "Q8_0"])
def test_other_types_are_of_the_values_times_their_scale(moe: Path, target: str, tmp_path: Path) -> None:
    quantkit.quantize(moe, tmp_path / "q.gguf", "NVFP4")
    quantkit.quantize(tmp_path / "q.gguf", tmp_path / "x.gguf", target, QuantizeOptions(allow_requantize=True))
    with open_gguf(tmp_path / "x.gguf") as file:
        assert not [name for name in file.tensors if name.endswith(".scale")]
    for name in ("blk.0.ffn_down_exps.weight", "blk.1.attn_k.weight", "output.weight"):
        x, y = values(tmp_path / "q.gguf", name), values(tmp_path / "x.gguf", name)
        assert (x == y).all() if target == "F32" else error(x, y) < 0.01


def test_a_copy_keeps_the_scales(moe: Path, tmp_path: Path) -> None:
    quantkit.quantize(moe, tmp_path / "q.gguf", "NVFP4")
    quantkit.quantize(tmp_path / "q.gguf", tmp_path / "c.gguf", "COPY")
    assert tensor_bytes(tmp_path / "c.gguf") == tensor_bytes(tmp_path / "q.gguf")


def _with_scale(path: Path, shape: tuple[int, ...], scale: Any, type_name: str = "F32") -> Path:
    """Write a llama whose attn_q is NVFP4 with a scale."""
    data = []
    for name, (dims, _) in llama_tensors(1).items():
        x = np.ones(dims[::-1], np.float32)
        t = NVFP4 if name == "blk.0.attn_q.weight" else FLOAT
        data.append((name, dims, t, encode(x, t).tobytes() if t is NVFP4 else x.tobytes()))
    raw = np.asarray(scale, np.float16 if type_name == "F16" else np.float32).tobytes()
    write_gguf(path, llama_fields(1), [*data, ("blk.0.attn_q.scale", shape, BY_NAME[type_name], raw)])
    return path


@pytest.mark.parametrize(
    ("shape", "scale", "type_name", "refusal"),
    [
        ((1,), [np.nan], "F32", "QK-E108 nan"),
        ((1,), [np.inf], "F32", "QK-E108 inf"),
        ((1,), [0.0], "F32", "QK-E108 0.0"),
        ((1,), [-1.0], "F32", "QK-E108"),
        ((3,), [1.0, 1.0, 1.0], "F32", "QK-E106 3"),
        ((1,), [1.0], "F16", "QK-E106 F16"),
    ],
)
def test_damaged_scales_are_refused(
    shape: tuple[int, ...], scale: list[float], type_name: str, refusal: str, tmp_path: Path
) -> None:
    model = _with_scale(tmp_path / "m.gguf", shape, scale, type_name)
    options = QuantizeOptions(allow_requantize=True, allow_incomplete=True)
    with refuses(QuantkitError, refusal, "blk.0.attn_q.scale"):
        quantkit.quantize(model, tmp_path / "q.gguf", "Q8_0", options)
    assert not (tmp_path / "q.gguf").exists()


def test_merging_experts_needs_values_without_scales(moe: Path, tmp_path: Path) -> None:
    quantkit.quantize(moe, tmp_path / "q.gguf", "NVFP4")
    with refuses(RecipeError, "QK-E211 blk.0.ffn_up_exps.scale"):
        quantkit.quantize(tmp_path / "q.gguf", tmp_path / "c.gguf", "COPY", QuantizeOptions(merge_up_gate=True))


# ---------------------------------------------------------------- other commands


def test_compare_multiplies_by_the_scales(moe: Path, tmp_path: Path) -> None:
    quantkit.quantize(moe, tmp_path / "q.gguf", "NVFP4")
    comparison = quantkit.compare(moe, tmp_path / "q.gguf")
    errors = {t.name: t.error for t in comparison.tensors if t.error is not None}
    for name in ("blk.0.ffn_down_exps.weight", "blk.1.attn_k.weight"):
        expected = error(values(moe, name), values(tmp_path / "q.gguf", name))
        assert errors[name].relative == pytest.approx(expected, rel=1e-4)


def test_experts_alone_are_nvfp4(moe: Path, tmp_path: Path) -> None:
    plan = plan_quantize(moe, tmp_path / "q.gguf", "NVFP4_MOE")
    types = {t.name: t.type.name for t in plan.tensors if len(t.shape) > 1 and "gate_inp" not in t.name}
    assert {name for name, t in types.items() if t == "NVFP4"} == {name for name in types if "_exps" in name}
    assert {t for name, t in types.items() if "_exps" not in name} == {"Q8_0"}
    assert not [note for note in plan.notes if "QK-W008" in note]
    assert {f.key: f.value for f in plan.fields}["general.file_type"] == 39


def test_stitched_tensors_bring_their_scales(moe: Path, tmp_path: Path) -> None:
    quantkit.quantize(moe, tmp_path / "q.gguf", "NVFP4")
    for base, part in ((moe, tmp_path / "q.gguf"), (tmp_path / "q.gguf", moe)):
        quantkit.stitch(base, tmp_path / "s.gguf", {r"ffn_up_exps\.weight": part}, overwrite=True)
        actual, of_part, of_base = (tensor_bytes(path) for path in (tmp_path / "s.gguf", part, base))
        assert {n: data for n, data in actual.items() if "ffn_up_exps" in n} == {
            n: data for n, data in of_part.items() if "ffn_up_exps" in n
        }
        assert {n: data for n, data in actual.items() if "ffn_up_exps" not in n} == {
            n: data for n, data in of_base.items() if "ffn_up_exps" not in n
        }


def test_pruned_experts_keep_their_scales(moe: Path, tmp_path: Path) -> None:
    quantkit.quantize(moe, tmp_path / "q.gguf", "NVFP4")
    numbers = [0, 2, 3, 7]
    experts = dict.fromkeys(range(2), numbers)
    quantkit.prune_experts(tmp_path / "q.gguf", tmp_path / "p.gguf", experts=experts)
    name = "blk.0.ffn_up_exps.weight"
    assert (values(tmp_path / "p.gguf", name) == values(tmp_path / "q.gguf", name)[numbers]).all()


def test_sensitivities_are_of_values_times_their_scales(moe: Path, tmp_path: Path) -> None:
    """Encoded rows without their scale would be hundreds of times too large, and so would be the divergence."""
    encoding = Encoding()
    pairs = [Pair(group, NVFP4) for group in groups_of(moe, encoding, "class") if "_exps" in group.name]
    encoder = Encoder(moe, pairs, encoding, 1, 1 << 29, None)
    quantkit.quantize(moe, tmp_path / "q.gguf", "NVFP4")
    for pair in pairs:
        for name, (info, data) in encoder.encode(pair, tmp_path).data.items():
            assert info.type is FLOAT
            assert (
                np.asarray(data).view(np.float32).reshape(info.shape[::-1]) == values(tmp_path / "q.gguf", name)
            ).all()
    with refuses(TypeNotSupported, "QK-E302 NVFP4"):
        groups_of(tmp_path / "q.gguf", encoding, "class")
