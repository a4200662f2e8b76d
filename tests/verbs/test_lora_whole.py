"""Adapters with more than factors, merged while converting: DoRA, modules_to_save, trained biases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from refusals import refuses
from test_lora import Q, edited, options_of, with_tensor, without, write_changed_adapter

import adapters
import checkpoints
from adapters import MERGED, write_adapter
from quantkit.checkpoint import OpenOptions, open_checkpoint
from quantkit.convert import convert, plan_convert
from quantkit.errors import FormatError, RecipeError
from quantkit.lora import plan_convert_lora

F32 = npt.NDArray[np.float32]
SAMPLES = dict(np.load(Path(__file__).parents[1] / "data" / "lora-peft.npz"))
DORA, SAVED = MERGED["llama-dora"], MERGED["seed-oss-dora-saved"]
V = "model.layers.1.self_attn.v_proj"


def merged(base: Path, name: str, *sources: tuple[Path, float]) -> dict[str, F32]:
    """Return the tensors of a checkpoint with adapters merged, in F32, by their names in the checkpoint."""
    options = OpenOptions(outtype="f32", adapters=sources, **checkpoints.describe(name).convert_keywords())
    opened = open_checkpoint(base, options)
    values = {}
    for tensor in opened.converted.values():
        x = np.empty(tensor.info.nbytes // 4, np.float32)
        opened.read(tensor.info, x.view(np.uint8), 0)
        values[tensor.source_name] = x.reshape(tensor.info.shape[::-1])
    return values


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: checkpoints.write_checkpoint(name, folder) for name in ("llama", "seed-oss", "llama-tied")}


@pytest.mark.parametrize("name", MERGED)
def test_values_are_those_of_peft(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Rows and, of embeddings, columns are rescaled; whole tensors are equal; PEFT's own sums are less exact."""
    adapter = MERGED[name]
    values = merged(bases[adapter.base], adapter.base, (write_adapter(adapter, tmp_path), 1.0))
    expected = {key.split("/")[1]: x for key, x in SAMPLES.items() if key.startswith(f"{name}/")}
    assert expected.keys() == {f"{module}.weight" for module, _ in adapters.modules(adapter)} | set(
        adapters.saved_tensors(adapter)
    )
    for weight, y in expected.items():
        if adapter.base == "llama" and weight.endswith(("q_proj.weight", "k_proj.weight")):
            continue  # whose rows the conversion moves
        x = adapters.sample(values[weight])
        if weight in adapters.saved_tensors(adapter):
            assert np.array_equal(x, y), weight
        assert np.abs(x - y).max() <= 1e-6 * np.abs(y).max(), weight


def test_adapters_are_merged_in_order(bases: dict[str, Path], tmp_path: Path) -> None:
    """A whole tensor replaces what was merged before; lengths are those of the weight with all earlier products."""
    plain = adapters.Adapter("plain", "llama", rf"{V}|lm_head|embed_tokens".replace(".", r"\."), rank=4)
    first, second = write_adapter(plain, tmp_path), write_adapter(DORA, tmp_path)
    both = merged(bases["llama"], "llama", (first, 0.5), (second, 1.0))
    reverse = merged(bases["llama"], "llama", (second, 1.0), (first, 0.5))
    base = merged(bases["llama"], "llama")[f"{V}.weight"].astype(np.float64)
    x = base + 0.5 * adapters.delta(plain, V) + adapters.delta(DORA, V)
    lengths = adapters.magnitudes(DORA)[V][:, None]
    assert np.abs(both[f"{V}.weight"] - x / np.linalg.norm(x, axis=1)[:, None] * lengths).max() < 1e-6
    x = base + adapters.delta(DORA, V)
    x = x / np.linalg.norm(x, axis=1)[:, None] * lengths + 0.5 * adapters.delta(plain, V)
    assert np.abs(reverse[f"{V}.weight"] - x).max() < 1e-6


def test_threads_and_memory_do_not_matter(bases: dict[str, Path], tmp_path: Path) -> None:
    source, out, outputs = write_adapter(DORA, tmp_path), tmp_path / "x.gguf", set()
    for run in ({"threads": 1}, {"threads": 3, "max_ram": "4MiB"}):
        options = options_of("llama", merge_lora=(str(source),))
        convert(bases["llama"], out, "Q8_0", options, overwrite=True, **run)  # type: ignore[arg-type]
        outputs.add(out.read_bytes())
    assert len(outputs) == 1


def test_a_file_of_factors_cannot_express_them(bases: dict[str, Path], tmp_path: Path) -> None:
    for adapter, value in ((DORA, "DoRA"), (replace(SAVED, config={}), "modules_to_save")):
        with refuses(FormatError, f"QK-E117 {value} --merge-lora"):
            plan_convert_lora(write_adapter(adapter, tmp_path), base=bases[adapter.base])


def changed(adapter: adapters.Adapter, path: Path, change: Any) -> Path:
    """Write a DoRA with changed tensors."""
    return write_changed_adapter(adapter, path, change)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (without(f"{Q}.lora_magnitude_vector"), f"QK-E117 {Q}.weight"),
        (with_tensor(f"{Q}.lora_magnitude_vector", (255,)), f"QK-E117 base_model.model.{Q}.lora_magnitude_vector"),
        (
            with_tensor("lm_head.lora_magnitude_vector", (640,)),
            "QK-E117 base_model.model.lm_head.lora_magnitude_vector",
        ),
        (
            with_tensor(f"{Q}.lora_magnitude_vector.weight", (256,)),
            f"QK-E117 base_model.model.{Q}.lora_magnitude_vector.weight",
        ),
        (with_tensor("lm_head.weight", (641, 256)), "QK-E117 base_model.model.lm_head.weight 640"),
        (with_tensor("model.norm.weight", (256,), "I8"), "QK-E117 base_model.model.model.norm.weight"),
        (with_tensor("visual.norm.weight", (256,)), "QK-E117 visual.norm.weight"),
    ],
)
def test_tensors_that_are_refused(change: Any, refusal: str, bases: dict[str, Path], tmp_path: Path) -> None:
    source = changed(DORA, tmp_path, change)
    with refuses(FormatError, refusal):
        plan_convert(bases["llama"], tmp_path / "x.gguf", None, options_of("llama", merge_lora=(str(source),)))


def test_settings_that_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    source = write_adapter(DORA, tmp_path)
    with refuses(RecipeError, "QK-E201 DoRA :0.5"):
        plan_convert(bases["llama"], None, None, options_of("llama", merge_lora=(f"{source}:0.5",)))
    source = edited(DORA, tmp_path / "b", modules_to_save=["lm_head"])
    with refuses(FormatError, "QK-E117 modules_to_save"):
        plan_convert(bases["llama"], None, None, options_of("llama", merge_lora=(str(source),)))
    tied = replace(DORA, name="tied", base="llama-tied", modules="q_proj", saved=r"embed_tokens\.weight")
    with refuses(FormatError, "QK-E117 tie_word_embeddings"):
        options = options_of("llama-tied", merge_lora=(str(write_adapter(tied, tmp_path)),))
        plan_convert(bases["llama-tied"], None, None, options)


def test_values_that_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    """A magnitude that is not finite, and a row of zeros, which has no direction."""
    infinite = np.full(256, np.inf, "<f4").tobytes()
    name = f"{Q}.lora_magnitude_vector"

    def change(tensors: Any) -> Any:
        return {**tensors, name: (*tensors[name][:3], infinite)}

    source, out = changed(DORA, tmp_path / "a", change), tmp_path / "x.gguf"
    with refuses(FormatError, f"QK-E117 base_model.model.{name}"):
        convert(bases["llama"], out, None, options_of("llama", merge_lora=(str(source),)))
    zeros = tmp_path / "zeros"
    zeros.mkdir()
    base = checkpoints.write_checkpoint("llama", zeros)
    for file in base.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if f"{V}.weight" in header:
            begin, _ = header[f"{V}.weight"]["data_offsets"]
            data[8 + length + begin : 8 + length + begin + 2 * 256] = bytes(2 * 256)
            file.write_bytes(data)
    b = f"{V}.lora_B.weight"
    source = changed(DORA, tmp_path / "c", lambda tensors: {**tensors, b: (*tensors[b][:3], bytes(len(tensors[b][3])))})
    with refuses(FormatError, f"QK-E117 base_model.model.{V}.lora_magnitude_vector 0"):
        convert(base, out, None, options_of("llama", merge_lora=(str(source),)))
    assert not out.exists()
