"""``quantize --merge-lora``: GGUF adapters merged into a GGUF model, as llama-export-lora does, and encoded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from peer_cache import program_answer
from refusals import refuses

import checkpoints
from adapters import ADAPTERS, write_adapter
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError, TypeNotSupported
from quantkit.formats.gguf import Field, GGUFFile, open_gguf, write_gguf
from quantkit.kernels import dequantize
from quantkit.kernels import quantize as encode
from quantkit.kernels.cpu.low_rank import add_low_rank, strips
from quantkit.lora import convert_lora
from quantkit.pipeline.worker import Worker
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
from quantkit.types import BY_NAME

F32 = npt.NDArray[np.float32]
KEYS = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0}


def values(file: GGUFFile, name: str) -> F32:
    """Return a tensor's values, [rows, columns]; matrices follow each other."""
    t = file.tensors[name]
    return dequantize(file.data(name).reshape(-1, t.type.row_bytes(t.shape[0])), t.type, t.shape[0])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A model in F32 and an adapter of it, dense, with experts, and of token embeddings."""
    folder = tmp_path_factory.mktemp("models")
    files = {}
    for name in ("llama", "qwen3-moe", "llama-embedding"):
        adapter = ADAPTERS[name]
        base = checkpoints.write_checkpoint(adapter.base, folder / name)
        lora, model = folder / f"{name}-lora.gguf", folder / f"{name}.gguf"
        convert_lora(write_adapter(adapter, folder), lora, base=base)
        options = checkpoints.describe(adapter.base).convert_keywords()
        convert(base, model, None, ConvertOptions(**options, outtype="f32"))
        files[name] = model, lora
    return files


def merge(model: Path, out: Path, type_name: str, *adapters: object, **options: Any) -> None:
    merging = QuantizeOptions(merge_lora=tuple(map(str, adapters)), **options)
    quantize(model, out, type_name, merging, overwrite=True, threads=1)


@pytest.mark.peer
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "llama-embedding"])
@pytest.mark.parametrize("base", ["F32", "F16", "Q8_0"])
def test_copy_is_the_file_of_llama_export_lora(
    name: str, base: str, models: dict[str, tuple[Path, Path]], llama_bin: Path, tmp_path: Path
) -> None:
    """Types, file type and unchanged tensors are equal; merged values to the last bit of the sum over the rank."""
    model, lora = models[name]
    paths = [tmp_path / f"{part}.gguf" for part in ("base", "theirs", "actual")]
    quantize(model, paths[0], base)
    command = [llama_bin / "llama-export-lora", "-m", paths[0], "--lora-scaled", f"{lora}:0.7", "-o", paths[1]]
    answer = program_answer([*command, "-t", 1], [paths[1]], {"LD_LIBRARY_PATH": str(llama_bin)})
    assert not answer.code, answer.text
    merge(paths[0], paths[2], "COPY", f"{lora}:0.7")
    with open_gguf(lora) as adapter, open_gguf(paths[1]) as reference, open_gguf(paths[2]) as actual:
        changed = {t.removesuffix(".lora_a") for t in adapter.tensors if t.endswith(".lora_a")}
        assert reference.tensors.keys() == actual.tensors.keys() >= changed > set()
        assert reference.get("general.file_type") == actual.get("general.file_type") == 1
        differing = total = 0
        for tensor in actual.tensors.values():
            assert tensor.type is reference.tensors[tensor.name].type
            if tensor.name not in changed:
                assert np.array_equal(actual.data(tensor.name), reference.data(tensor.name))
                continue
            x, y = values(actual, tensor.name), values(reference, tensor.name)
            assert np.abs(x - y).max() <= (2e-7 if base == "F32" else np.abs(x).max() * 2.0**-10)
            differing, total = differing + int((x != y).sum()), total + x.size
        assert base == "F32" or differing <= total * 1e-4


@pytest.mark.parametrize("source", ["F32", "BF16", "Q4_K", "Q6_0_R4", "IQ3_S"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_values_are_encoded_once(source: str, name: str, models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Bytes are those of the decoded tensor with both products added, encoded: for all matrices of a tensor."""
    model, lora = models[name]
    base, out = tmp_path / "base.gguf", tmp_path / "out.gguf"
    quantize(model, base, source, QuantizeOptions(pure=True, ignore_imatrix_rules=True))
    merge(base, out, "Q4_0", lora, f"{lora}:-0.25", pure=True, allow_requantize=True)
    with open_gguf(lora) as adapter, open_gguf(base) as stored, open_gguf(out) as merged:
        alpha = np.float32(adapter.get("adapter.lora.alpha"))
        for a in list(adapter.tensors.values())[:6:2]:
            tensor = a.name.removesuffix(".lora_a")
            x, b = values(stored, tensor), values(adapter, f"{tensor}.lora_b")
            rank = b.shape[1]
            matrices = a.shape[2] if len(a.shape) > 2 else 1
            columns = values(adapter, a.name).reshape(matrices, rank, -1)
            for rows, part, factor in zip(
                x.reshape(matrices, -1, x.shape[1]), b.reshape(matrices, -1, rank), columns, strict=True
            ):
                for strength in (1, -0.25):
                    add_low_rank(rows, strips(factor), part, np.float32(strength) * alpha / np.float32(rank))
            assert merged.tensors[tensor].type.name == "Q4_0"
            assert np.array_equal(encode(x, "Q4_0").reshape(-1), merged.data(tensor))


def test_types_are_kept_with_like(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, lora = models["llama"]
    base, out = tmp_path / "base.gguf", tmp_path / "out.gguf"
    quantize(model, base, "Q4_K_M")
    merge(base, out, "LIKE", lora, like=base)
    with open_gguf(base) as a, open_gguf(out) as b, open_gguf(lora) as adapter:
        assert {t.name: t.type for t in a.tensors.values()} == {t.name: t.type for t in b.tensors.values()}
        for name in a.tensors:
            assert np.array_equal(a.data(name), b.data(name)) == (f"{name}.lora_a" not in adapter.tensors)
    plan = plan_quantize(base, out, "COPY", QuantizeOptions(merge_lora=(str(lora),)))
    assert any("21 of the merged tensors" in note and "Q4_K" in note for note in plan.notes)


def test_memory_and_interruptions_do_not_matter(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lora = models["qwen3-moe"]
    out, jobs, run, outputs = tmp_path / "x.gguf", 0, Worker.run, set()
    options = QuantizeOptions(merge_lora=(f"{lora}:0.5",))
    settings: tuple[Any, ...] = ({"threads": 1}, {"threads": 3, "max_ram": "4MiB"})
    for keywords in settings:
        quantize(model, out, "Q4_K_M", options, overwrite=True, **keywords)
        outputs.add(out.read_bytes())

    def stop(self: Worker, job: Any, tensor: Any) -> Any:
        nonlocal jobs
        jobs += 1
        if jobs > 20:
            raise KeyboardInterrupt
        return run(self, job, tensor)

    out.unlink()
    monkeypatch.setattr(Worker, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, out, "Q4_K_M", options, threads=1)
    monkeypatch.setattr(Worker, "run", run)
    for adapters in ((str(lora),), ()):
        with refuses(ResourceError, "QK-E409 x.gguf.journal"):
            quantize(model, out, "Q4_K_M", QuantizeOptions(merge_lora=adapters), resume=True)
    assert quantize(model, out, "Q4_K_M", options, resume=True).run.resumed > 0
    outputs.add(out.read_bytes())
    assert len(outputs) == 1
    with refuses(ResourceError, "QK-E403"):
        quantize(model, lora, "Q4_K_M", options, overwrite=True)


def write_lora(path: Path, keys: dict[str, Any], *shapes: tuple[str, tuple[int, ...]], fill: float = 0.5) -> Path:
    """Write an adapter with tensors of one value; keys that are None are missing."""
    f32 = BY_NAME["F32"]
    tensors = [(name, shape, f32, np.full(int(np.prod(shape)), fill, "<f4")) for name, shape in shapes]
    fields = [Field.of(key, value) for key, value in {**KEYS, **keys}.items() if value is not None]
    write_gguf(path, fields, tensors)
    return path


Q = "blk.0.attn_q.weight"


def pair_of(model: Path, name: str = Q, rank: int = 2) -> tuple[tuple[str, tuple[int, ...]], ...]:
    with open_gguf(model) as file:
        columns, rows = file.tensors[name].shape
    return (f"{name}.lora_a", (columns, rank)), (f"{name}.lora_b", (rank, rows))


def test_a_scale_of_zero_is_no_scale(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, out = models["llama"][0], tmp_path / "out.gguf"
    for alpha in (None, 0.0):
        lora = write_lora(tmp_path / "lora.gguf", {"adapter.lora.alpha": alpha}, *pair_of(model))
        merge(model, out, "COPY", f"{lora}:2")
        with open_gguf(model) as a, open_gguf(out) as b:
            assert np.array_equal(values(a, Q) + np.float32(2 * 0.5), values(b, Q))


@pytest.mark.parametrize(
    ("keys", "refusal"),
    [
        ({"general.type": "model"}, "QK-E117 general.type model"),
        ({"adapter.type": "control_vector"}, "QK-E117 adapter.type control_vector"),
        ({"general.architecture": "qwen2"}, "QK-E207 qwen2 llama"),
        ({"adapter.alora.invocation_tokens": [5, 6]}, "QK-E117 aLoRA"),
        ({"adapter.lora.alpha": float("nan")}, "QK-E117 adapter.lora.alpha"),
        ({"adapter.lora.alpha": "2"}, "QK-E117 adapter.lora.alpha"),
    ],
)
def test_metadata_that_is_refused(
    keys: dict[str, Any], refusal: str, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    model = models["llama"][0]
    lora = write_lora(tmp_path / "lora.gguf", keys, *pair_of(model))
    with refuses(FormatError, f"{refusal} lora.gguf"):
        plan_quantize(model, tmp_path / "out.gguf", "COPY", QuantizeOptions(merge_lora=(str(lora),)))


def test_tensors_that_are_refused(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, lora = models["llama"][0], tmp_path / "lora.gguf"
    (_, a), (_, b) = pair_of(model)
    wrong: tuple[tuple[str, Any, str], ...] = (
        ("blk.0.attn_q.weight", ((a[0] + 1, 2), b), "QK-E117 blk.0.attn_q.weight"),
        ("blk.0.attn_q.weight", (a, (3, b[1])), "QK-E117 blk.0.attn_q.weight"),
        ("blk.99.attn_q.weight", (a, b), "QK-E117 blk.99.attn_q.weight"),
        ("blk.0.attn_q.weight", (a, None), "QK-E117 blk.0.attn_q.weight.lora_b"),
        ("blk.0.attn_q.weight", ((*a, 2), (*b, 2)), "QK-E117 blk.0.attn_q.weight"),
    )
    for name, (first, second), refusal in wrong:
        shapes = [(f"{name}.lora_a", first), *([(f"{name}.lora_b", second)] if second else [])]
        write_lora(lora, {}, *shapes)
        with refuses(FormatError, refusal):
            plan_quantize(model, tmp_path / "out.gguf", "COPY", QuantizeOptions(merge_lora=(str(lora),)))
    write_lora(lora, {}, (Q, a))
    with refuses(FormatError, f"QK-E117 {Q}"):
        plan_quantize(model, tmp_path / "out.gguf", "COPY", QuantizeOptions(merge_lora=(str(lora),)))
    write_lora(lora, {}, *pair_of(model), fill=float("inf"))
    with refuses(FormatError, f"QK-E117 {Q}.lora_b"):
        merge(model, tmp_path / "out.gguf", "COPY", lora)
    assert not list(tmp_path.glob("out.gguf"))


def test_selections_that_are_refused(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, lora = models["llama"]
    refused: tuple[tuple[type[QuantkitError], str, QuantizeOptions], ...] = (
        (RecipeError, "QK-E203 --merge-lora", QuantizeOptions(merge_lora=(f"{lora}:0",))),
        (FormatError, "QK-E405|QK-E401 nothing.gguf", QuantizeOptions(merge_lora=("nothing.gguf",))),
        (FormatError, "QK-E117 convert-lora", QuantizeOptions(merge_lora=(str(tmp_path),))),
        (RecipeError, "QK-E201 --merge-lora --calibrate", QuantizeOptions(merge_lora=("x",), calibrate=(lora,))),
        (RecipeError, "QK-E201 --merge-lora --repack", QuantizeOptions(merge_lora=(str(lora),), repack=True)),
    )
    for kind, refusal, options in refused:
        with refuses(kind, refusal):
            plan_quantize(model, tmp_path / "out.gguf", "COPY", options)
    base = tmp_path / "i2s.gguf"
    t = BY_NAME["I2_S"]
    data = np.zeros(t.tensor_bytes((128, 32)), np.uint8)
    write_gguf(base, [Field.of("general.architecture", "llama")], [(Q, (128, 32), t, data)])
    write_lora(tmp_path / "l.gguf", {}, (f"{Q}.lora_a", (128, 2)), (f"{Q}.lora_b", (2, 32)))
    with refuses(TypeNotSupported, f"QK-E302 {Q} I2_S"):
        plan_quantize(base, tmp_path / "o.gguf", "COPY", QuantizeOptions(merge_lora=(str(tmp_path / "l.gguf"),)))


def test_the_command_line(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, lora = models["llama"]
    line = ["quantize", str(model), str(tmp_path / "x.gguf"), "Q8_0", "--merge-lora", f"{lora}:0.5"]
    result = CliRunner().invoke(cli, [*line, "--json"])
    assert result.exit_code == 0, result.output
    assert "merged into 21 tensors, scaled by 0.5" in result.stderr
    with open_gguf(tmp_path / "x.gguf") as file:
        assert "--merge-lora llama-lora.gguf:0.5" in str(file.get("quantkit.quantize.recipe"))
