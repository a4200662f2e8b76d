from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from refusals import refuses

from quantkit.cli import cli
from quantkit.compare import Comparison, compare
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field, open_gguf, split_fields, split_path, write_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from quantkit.kernels import dequantize
from quantkit.progress import Progress
from quantkit.types import BY_NAME, TensorType
from small_models import llama_fields

#: The module: `quantkit.compare` names its function.
compare_module = importlib.import_module("quantkit.compare")

Tensor = tuple[tuple[int, ...], str, npt.NDArray[Any]]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def write(path: Path, tensors: Mapping[str, Tensor], fields: Sequence[Field] | None = None) -> Path:
    tensors_of_file = [(name, shape, BY_NAME[t], x.tobytes()) for name, (shape, t, x) in tensors.items()]
    write_gguf(path, llama_fields() if fields is None else fields, tensors_of_file)
    return path


def normal(*shape: int, seed: int = 1) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32)


def f32(x: npt.NDArray[np.float32]) -> Tensor:
    return x.shape[::-1], "F32", x


def random_q8_0(rows: int, n: int, seed: int) -> Tensor:
    """Return any valid Q8_0 bytes: small scales, random levels."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, n // 32, 34), np.uint8)
    blocks[..., :2] = rng.uniform(0.001, 0.01, (rows, n // 32, 1)).astype(np.float16).view(np.uint8)
    return (n, rows), "Q8_0", blocks


@pytest.fixture
def pair(tmp_path: Path) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Path, Path]]:
    def make(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[Path, Path]:
        return write(tmp_path / "a.gguf", a), write(tmp_path / "b.gguf", b)

    return make


Pair = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Path, Path]]


# --- identical ---


def test_a_file_is_identical_to_itself(tiny_moe: Path) -> None:
    result = run(tiny_moe, tiny_moe)
    assert result.exit_code == 0
    assert "metadata: 24 keys are the same, 0 changed, 0 added, 0 removed" in result.output
    assert "tensors: 51 in both files: 51 identical" in result.output
    assert result.output.endswith("the models are identical\n")
    assert "rel. error" not in result.output


def test_split_and_single_files_compare_as_models(tmp_path: Path) -> None:
    tensors = {f"blk.{i}.ffn_up.weight": f32(normal(8, 64, seed=i)) for i in range(3)}
    single = write(tmp_path / "single.gguf", dict(reversed(tensors.items())))
    for i, (name, tensor) in enumerate(tensors.items()):
        fields = [*(llama_fields() if i == 0 else ()), *split_fields(i, 3, 3)]
        write(split_path(tmp_path / "split", i, 3), {name: tensor}, fields)
    shard = split_path(tmp_path / "split", 1, 3)
    assert compare(single, shard).identical
    assert compare(shard, single).identical
    result = run(single, shard)
    assert result.exit_code == 0
    assert "split-00001-of-00003.gguf and 2 more shards" in result.output


def test_trailing_ones_of_a_shape_are_ignored(pair: Pair) -> None:
    x = normal(1, 1, 64)
    assert compare(*pair({"a": f32(x)}, {"a": f32(x[0])})).identical


# --- metadata ---


def with_fields(path: Path, **values: Any) -> Path:
    return write(path, {}, [Field.of(k.replace("__", "."), v) for k, v in values.items()])


def test_differing_metadata(tmp_path: Path) -> None:
    text = "x" * 3000
    a = with_fields(tmp_path / "a", same=1, gone="was", t=1, s="one", long=text + "A" + text, f=0.5, n=[1, 2, 3, 4])
    b = with_fields(tmp_path / "b", same=1, new=True, t=-1, s="two", long=text + "B" + text, f=0.25, n=[1, 5, 3])
    comparison = compare(a, b)
    assert [(d.key, d.kind) for d in comparison.metadata or ()] == [
        ("gone", "removed"),
        *((key, "changed") for key in ("t", "s", "long", "f", "n")),
        ("new", "added"),
    ]
    result = run(a, b)
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    for line in (
        "metadata: 1 keys are the same, 5 changed, 1 added, 1 removed",
        "changed t: UINT32 1 -> INT32 -1",
        'changed s: "one" -> "two"',
        "changed f: 0.5 -> 0.25",
        "changed n: 4 items -> 3 items; 1 of 3 items differ, the first is [1]: 2 -> 5",
        "added new: true",
        "removed gone: was",
    ):
        assert line in lines
    changed = next(line for line in lines if line.startswith("changed long"))
    assert "xxxxA" in changed
    assert "xxxxB" in changed
    assert "(from character 3000; 6001 and 6001 characters)" in changed


def test_a_value_of_another_type_is_a_change(tmp_path: Path) -> None:
    a = with_fields(tmp_path / "a", k=np.uint32(7), nan=math.nan)
    b = with_fields(tmp_path / "b", k=np.int32(7), nan=math.nan)
    assert [d.key for d in compare(a, b).metadata or ()] == ["k"]


def test_keys_can_be_ignored(tmp_path: Path) -> None:
    a = with_fields(tmp_path / "a", general__name="a", quantkit__x=1)
    b = with_fields(tmp_path / "b", general__name="b")
    assert run(a, b, "--ignore-metadata", r"^quantkit\.").exit_code == 1
    result = run(a, b, "--ignore-metadata", r"^quantkit\.", "--ignore-metadata", "name$")
    assert result.exit_code == 0
    assert "0 removed, 2 ignored" in result.output


def test_metadata_or_tensors_only(tmp_path: Path) -> None:
    x = f32(normal(4, 32))
    a = write(tmp_path / "a", {"a": x}, [Field.of("k", 1)])
    b = write(tmp_path / "b", {"a": x}, [Field.of("k", 2)])
    c = write(tmp_path / "c", {"a": f32(normal(4, 32, seed=2))}, [Field.of("k", 1)])
    tensors, metadata = run(a, b, "--tensors-only"), run(a, c, "--metadata-only")
    assert (tensors.exit_code, metadata.exit_code) == (0, 0)
    assert tensors.output.endswith("the tensors are identical\n")
    assert metadata.output.endswith("the metadata is identical\n")
    assert run(a, b, "--metadata-only").output.endswith("the metadata differs\n")
    assert run(a, c, "--tensors-only").output.endswith("the tensors differ\n")
    assert "metadata" not in json.loads(run(a, b, "--tensors-only", "--json").output)


# --- tensors ---


def test_missing_tensors_and_shapes(pair: Pair) -> None:
    x = normal(4, 64)
    a, b = pair(
        {"blk.0.ffn_gate_exps.weight": f32(x), "blk.0.ffn_up_exps.weight": f32(x), "s": f32(x)},
        {"blk.0.ffn_gate_up_exps.weight": f32(np.concatenate([x, x])), "s": f32(x.reshape(8, 32))},
    )
    comparison = compare(a, b)
    assert [t.name for t in comparison.only_a] == ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"]
    assert [t.name for t in comparison.only_b] == ["blk.0.ffn_gate_up_exps.weight"]
    assert [(t.difference, t.note, t.error) for t in comparison.tensors or ()] == [("shape", "the shapes differ", None)]
    result = run(a, b)
    assert result.exit_code == 1
    assert "only in A: 2" in result.output
    assert "s: 64 x 4 F32 -> 32 x 8 F32" in result.output


def test_long_lists_are_truncated_without_per_tensor(pair: Pair) -> None:
    a, b = pair({f"t{i:02}": f32(normal(1, 4)) for i in range(20)}, {"x": f32(normal(1, 4))})
    assert "and 9 more (--per-tensor lists all)" in run(a, b).output
    assert "t19" not in run(a, b).output
    assert "t19" in run(a, b, "--per-tensor").output


def test_a_difference_in_the_last_byte_is_found(pair: Pair) -> None:
    x = normal(1100, 257)
    y = x.copy()
    y[-1, -1] += 0.5
    comparison = compare(*pair({"a": f32(x)}, {"a": f32(y)}))
    (only,) = comparison.tensors or ()
    assert only.difference == "bytes"
    assert only.error is not None
    assert only.error.largest == pytest.approx(0.5)
    assert only.error.relative == pytest.approx(0.5 / np.linalg.norm(x.astype(np.float64)), rel=1e-6)


def expected(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32], w: npt.NDArray[Any] | float = 1.0) -> float:
    a, b = x.astype(np.float64), y.astype(np.float64)
    return math.sqrt((w * (a - b) ** 2).sum() / (w * a * a).sum())


@pytest.mark.parametrize("n", [32, 96, 1024, 2080])
def test_the_error_of_another_type(pair: Pair, n: int) -> None:
    x = normal(7, n)
    quantized = random_q8_0(7, n, seed=n)
    y = dequantize(quantized[2].reshape(7, -1), "Q8_0", n)
    a, b = pair({"blk.0.ffn_up.weight": f32(x)}, {"blk.0.ffn_up.weight": quantized})
    comparison = compare(a, b)
    (only,) = comparison.tensors or ()
    assert only.difference == "type"
    assert only.error is not None
    assert only.error.relative == pytest.approx(expected(x, y), rel=1e-12)
    assert only.error.largest == np.abs(y - x).max()
    assert only.error.weighted_relative is None
    assert comparison.classes[0].types == "F32 -> Q8_0"
    reverse = (compare(b, a).tensors or ())[0].error
    assert reverse is not None
    assert reverse.relative == pytest.approx(expected(y, x), rel=1e-12)


@pytest.fixture
def imatrix(tmp_path: Path) -> Path:
    """Importance of two experts and of a dense tensor."""
    rng = np.random.default_rng(5)
    entries = {
        "blk.0.ffn_up_exps.weight": ImatrixEntry(rng.uniform(0.1, 9, (2, 512)).astype(np.float32), np.array([3, 5])),
        "blk.0.attn_q.weight": ImatrixEntry(rng.uniform(0.1, 9, (1, 512)).astype(np.float32), np.array([8])),
    }
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, Imatrix(path, entries, ["text"], 1, 8))
    return path


@pytest.mark.parametrize("piece", [1 << 17, 256])
def test_the_weighted_error(pair: Pair, imatrix: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A piece of 256 cuts every row in two.
    monkeypatch.setattr(compare_module, "_PIECE", piece)
    x, y = normal(2, 5, 512), normal(2, 5, 512, seed=2)
    a, b = pair(
        {"blk.0.ffn_up_exps.weight": f32(x), "blk.0.attn_q.weight": f32(x[0]), "output.weight": f32(x[1])},
        {"blk.0.ffn_up_exps.weight": f32(y), "blk.0.attn_q.weight": f32(x[0]), "output.weight": f32(y[1])},
    )
    comparison = compare(a, b, imatrix=imatrix)
    experts, dense, output = comparison.tensors or ()
    w = read_imatrix(imatrix).values("blk.0.ffn_up_exps.weight").reshape(2, 1, 512).astype(np.float64)
    assert dense.identical
    assert experts.error is not None
    assert experts.error.relative == pytest.approx(expected(x, y), rel=1e-12)
    assert experts.error.weighted_relative == pytest.approx(expected(x, y, w), rel=1e-12)
    assert output.error is not None
    assert output.error.weighted_relative is None
    assert comparison.total is not None
    assert comparison.total.error is not None
    # The total's weighted error is that of the tensors with importance; its plain error that of all that differ.
    assert comparison.total.error.weighted_relative == experts.error.weighted_relative
    assert comparison.total.error.relative == pytest.approx(
        expected(np.concatenate([x, x[1:]]), np.concatenate([y, y[1:]])), rel=1e-12
    )
    text = run(a, b, "--imatrix", imatrix)
    assert "weighted" in text.output
    assert "entries for 1 of the 2 tensors with an error" in text.output


def test_an_imatrix_of_another_model(pair: Pair, imatrix: Path) -> None:
    a, b = pair({"other.weight": f32(normal(2, 64))}, {"other.weight": f32(normal(2, 64, seed=2))})
    with refuses(FormatError, "QK-E119 imatrix.gguf 2 blk.0.attn_q.weight"):
        compare(a, b, imatrix=imatrix)


def test_rows_longer_than_a_piece_without_importance(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "_PIECE", 256)
    monkeypatch.setattr(compare_module, "_CHUNK", 1000)
    x, quantized = normal(3, 800), random_q8_0(3, 800, seed=3)
    y = dequantize(quantized[2].reshape(3, -1), "Q8_0", 800)
    error = (compare(*pair({"a.weight": f32(x)}, {"a.weight": quantized})).tensors or ())[0].error
    assert error is not None
    assert error.relative == pytest.approx(expected(x, y), rel=1e-12)


def test_threads_do_not_change_the_result(tiny_moe: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.gguf"
    with open_gguf(tiny_moe) as file:
        tensors = [(t.name, t.shape, t.type, np.array(file.data(t))) for t in file.tensors.values()]
        for _, _, _, data in tensors:
            data[::1001] ^= 1
        write_gguf(changed, file.fields.values(), tensors)

    def result(threads: int) -> list[Any]:
        return [t.error for t in compare(tiny_moe, changed, threads=threads).tensors or ()]

    assert result(1) == result(5)
    assert None not in result(2)


def bits_of(t: TensorType, shape: tuple[int, ...], fill: int) -> Tensor:
    return shape, t.name, np.full(t.tensor_bytes(shape), fill, np.uint8)


@pytest.mark.parametrize(
    ("name", "note"),
    [("I32", "no decoder for I32"), ("F64", "no decoder for F64")],
)
def test_undecodable_types_are_reported(pair: Pair, name: str, note: str) -> None:
    t = BY_NAME[name]
    a, b = pair({"a": bits_of(t, (256, 4), 1)}, {"a": bits_of(t, (256, 4), 2)})
    assert [(x.difference, x.note, x.error) for x in compare(a, b).tensors or ()] == [("bytes", note, None)]
    assert f"no error for 1: {note}" in run(a, b).output
    assert compare(a, a).identical


def test_no_error_decodes_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "_measure", None)
    a, b = pair({"a": f32(normal(2, 64))}, {"a": f32(normal(2, 64, seed=2))})
    result = run(a, b, "--no-error")
    assert result.exit_code == 1
    assert "rel. error" not in result.output


def test_nan_and_zeros(pair: Pair) -> None:
    zero, nan = np.zeros((2, 64), np.float32), normal(2, 64)
    nan[1, 5] = np.nan
    a, b = pair(
        {"z": f32(zero), "m": f32(zero), "n": f32(normal(2, 64))}, {"z": f32(zero + 1), "m": f32(-zero), "n": f32(nan)}
    )
    result = run(a, b, "--json")
    assert result.exit_code == 1
    errors = {t["name"]: t["error"] for t in json.loads(result.output)["tensors"]}
    assert errors["z"]["relative"] == "inf"
    assert errors["m"]["relative"] == 0
    assert (errors["n"]["relative"], errors["n"]["largest"]) == ("nan", "nan")
    assert json.loads(result.output)["total"]["error"]["largest"] == "nan"
    assert run(a, b, "--per-tensor").exit_code == 1


def test_a_shrinking_file_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair({"a": f32(normal(64, 64))}, {"a": f32(normal(64, 64))})
    opened = compare_module.open_gguf

    def open_then_cut(path: Path) -> Any:
        file = opened(path)
        with open(path, "r+b") as handle:
            handle.truncate(5000)
        return file

    monkeypatch.setattr(compare_module, "open_gguf", open_then_cut)
    with refuses(FormatError, "QK-E103 5000"):
        compare(a, b)


def test_progress_ends_at_the_total(pair: Pair) -> None:
    x, y = normal(600, 1024), normal(600, 1024)
    y[300, 7] = 1
    calls: list[Progress] = []
    tensors = {"a": f32(x), "q": random_q8_0(4, 64, 1), "s": f32(x)}
    compare(*pair(tensors, {"a": f32(y), "q": f32(normal(4, 64)), "s": f32(x)}), progress=calls.append)
    assert calls[-1].current == calls[-1].total > 0
    assert [now.current for now in calls] == sorted(now.current for now in calls)


# --- the command ---


def test_usage(tiny_moe: Path, tmp_path: Path) -> None:
    assert run(tiny_moe).exit_code == 2
    assert run(tiny_moe, tiny_moe, "--metadata-only", "--tensors-only").exit_code == 2
    assert run(tiny_moe, tiny_moe, "--metadata-only", "--tensors", "x").exit_code == 2
    assert run(tiny_moe, tiny_moe, "--tensors", "nothing").exit_code == 2
    assert run(tiny_moe, tiny_moe, "--ignore-metadata", "(").exit_code == 2
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    for files in ((tiny_moe, path), (path, tiny_moe), (tiny_moe, tmp_path / "none")):
        result = run(*files)
        assert result.exit_code == 2
        assert result.output.startswith("Error: ")
        assert len(result.output.splitlines()) == 1
    with refuses(RecipeError, "QK-E214"):
        compare(tiny_moe, tiny_moe, metadata=False, tensors=False)


def test_json_and_per_tensor(pair: Pair) -> None:
    x = normal(2, 64)
    a, b = pair({"blk.0.attn_q.weight": f32(x), "n": f32(x)}, {"blk.0.attn_q.weight": f32(x * 2), "n": f32(x)})
    output = json.loads(run(a, b, "--json").output)
    assert output["identical"] is False
    assert [(t["name"], t["differs_in"]) for t in output["tensors"]] == [("blk.0.attn_q.weight", "bytes"), ("n", None)]
    assert output["classes"][0]["error"] == {
        "relative": 1.0,
        "largest": float(np.abs(x).max()),
        "weighted_relative": None,
    }
    assert output["total"]["identical"] == 1
    lines = [" ".join(line.split()) for line in run(a, b, "--per-tensor").output.splitlines()]
    assert f"blk.0.attn_q.weight F32 bytes 100.000 % {np.abs(x).max():.3g}" in lines
    assert "n F32 identical" in lines
    assert f"attn_q F32 1 0 100.000 % {np.abs(x).max():.3g} 512 B 512 B" in lines


def test_only_some_tensors(pair: Pair) -> None:
    x = normal(2, 64)
    a, b = pair({"a": f32(x), "b": f32(x)}, {"a": f32(x), "b": f32(x + 1)})
    assert run(a, b, "--tensors", "^a$").exit_code == 0
    comparison: Comparison = compare(a, b, tensors="b")
    assert [t.name for t in comparison.tensors or ()] == ["b"]
