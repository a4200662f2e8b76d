"""Adapters of models with encoders: text in the model's file, encoders in the mmproj file, nothing lost in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from refusals import refuses
from test_lora import options_of, with_tensor, write_changed_adapter

import adapters
import checkpoints
from adapters import ADAPTERS, Adapter, write_adapter
from quantkit.checkpoint import OpenOptions
from quantkit.checkpoint.open_mmproj import open_mmproj
from quantkit.cli import cli
from quantkit.convert import convert_mmproj, plan_convert, plan_mmproj
from quantkit.errors import FormatError
from quantkit.formats.gguf import open_gguf
from quantkit.lora import plan_convert_lora

F32 = npt.NDArray[np.float32]
TOWERS = ("qwen2.5-vl-towers", "qwen3-vl-towers", "gemma3-towers")
#: The first name of a module of an encoder, as in the checkpoint.
STARTS = ("visual.", "model.visual.", "vision_tower.", "multi_modal_projector.")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: checkpoints.write_checkpoint(ADAPTERS[name].base, folder) for name in TOWERS}


def encoder_modules(adapter: Adapter) -> list[str]:
    return [module for module, _ in adapters.modules(adapter) if module.startswith(STARTS)]


def encoder_tensors(base: Path, *sources: tuple[Path, float]) -> dict[str, list[F32]]:
    """Return the tensors of an mmproj file in F32, those that one of the checkpoint becomes together."""
    opened = open_mmproj(base, OpenOptions(outtype="f32", adapters=sources, allow_incomplete=True))
    values: dict[str, list[F32]] = {}
    for tensor in opened.converted.values():
        x = np.empty(int(np.prod(tensor.info.shape)), np.float32)
        if tensor.info.type.name == "F32":
            opened.read(tensor.info, x.view(np.uint8), 0)
            part = next(tensor.expr.parts()).name
            values.setdefault(part, []).append(x.reshape(tensor.info.shape[::-1]))
    return values


@pytest.mark.parametrize("name", TOWERS)
def test_the_encoders_change_by_the_products(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Against float64; q, k and v of one matrix are split after the merge."""
    adapter, source = ADAPTERS[name], write_adapter(ADAPTERS[name], tmp_path)
    plain, merged = encoder_tensors(bases[name]), encoder_tensors(bases[name], (source, -0.5))
    changed = {f"{module}.weight": adapters.delta(adapter, module) for module in encoder_modules(adapter)}
    assert len(changed) > 3
    assert plain.keys() == merged.keys() >= changed.keys()
    for weight, parts in plain.items():
        before, after = np.concatenate(parts), np.concatenate(merged[weight])
        if weight in changed:
            assert np.abs(after - (before - 0.5 * changed[weight])).max() < 1e-6, weight
        else:
            assert np.array_equal(before, after), weight


@pytest.mark.parametrize("name", TOWERS)
def test_notes_name_what_another_file_has(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter, source, out = ADAPTERS[name], write_adapter(ADAPTERS[name], tmp_path), tmp_path / "x.gguf"
    options = options_of(adapter.base, merge_lora=(str(source),))
    total, n = len(adapters.modules(adapter)), len(encoder_modules(adapter))
    text = plan_convert(bases[name], out, None, options).notes
    assert any(f"merged into {total - n} weights" in note for note in text)
    assert any(f"{n} tensors belong to the encoders" in note and "--mmproj" in note for note in text)
    for type_name in ("f16", "Q8_0"):
        encoders = plan_mmproj(bases[name], out, type_name, options).notes
        assert any(f"merged into {n} weights" in note for note in encoders)
        assert any(f"{total - n} tensors belong to the text model" in note for note in encoders)
    factors = plan_convert_lora(source, out, base=bases[name])
    assert len(factors.tensors) == 2 * (total - n)
    assert any(f"{n} tensors belong to the encoders" in note and "left out" in note for note in factors.notes)


def test_one_run_writes_both(bases: dict[str, Path], tmp_path: Path) -> None:
    name = "qwen3-vl-towers"
    source = write_adapter(ADAPTERS[name], tmp_path)
    line = ["convert", str(bases[name]), str(tmp_path / "x.gguf"), "--pre", "qwen2", "--allow-other-ids"]
    line += ["--allow-incomplete", "--mmproj", str(tmp_path / "mm.gguf"), "--mmproj-type", "f32"]
    result = CliRunner().invoke(cli, [*line, "--merge-lora", str(source)])
    assert result.exit_code == 0, result.output
    convert_mmproj(bases[name], tmp_path / "plain.gguf", "f32")
    with open_gguf(tmp_path / "mm.gguf") as merged, open_gguf(tmp_path / "plain.gguf") as plain:
        changed = {t for t in plain.tensors if not np.array_equal(plain.data(t), merged.data(t))}
    assert changed >= {"v.blk.0.attn_qkv.weight", "v.blk.1.attn_out.weight", "mm.0.weight"}


def test_whole_tensors_and_strangers(bases: dict[str, Path], tmp_path: Path) -> None:
    """A trained merger replaces the base's; a weight of neither part, or missing from the base, is an error."""
    name, out = "qwen2.5-vl-towers", tmp_path / "x.gguf"
    adapter, base = ADAPTERS[name], bases[name]
    saved = write_changed_adapter(adapter, tmp_path / "a", with_tensor("model.visual.merger.ln_q.weight", (64,)))
    values = encoder_tensors(base, (saved, 1.0))
    assert not np.concatenate(values["base_model.model.model.visual.merger.ln_q.weight"]).any()
    text = plan_convert(base, out, None, options_of(adapter.base, merge_lora=(str(saved),)))
    assert any("tensors belong to the encoders" in note for note in text.notes)
    for module, refusal in (
        ("strange.q_proj", "QK-E117 strange.q_proj.weight"),
        ("visual.blocks.99.attn.proj", "QK-E117 99"),
    ):
        stranger = write_changed_adapter(
            adapter,
            tmp_path / module,
            lambda tensors, module=module: with_tensor(f"{module}.lora_A.weight", (8, 64))(
                with_tensor(f"{module}.lora_B.weight", (64, 8))(tensors)
            ),
        )
        options = options_of(adapter.base, merge_lora=(str(stranger),))
        with refuses(FormatError, refusal):
            plan_convert(base, out, None, options) if "strange" in module else plan_mmproj(base, out, "f16", options)


def test_an_adapter_of_encoders_alone(bases: dict[str, Path], tmp_path: Path) -> None:
    name = "qwen3-vl-towers"
    adapter = replace(ADAPTERS[name], name="encoders", modules=r"visual\.blocks\.\d+\.attn\.qkv")
    source = write_adapter(adapter, tmp_path)
    with refuses(FormatError, "QK-E117 encoders"):
        plan_convert_lora(source, tmp_path / "x.gguf", base=bases[name])
    plan = plan_mmproj(bases[name], tmp_path / "x.gguf", "f16", options_of(adapter.base, merge_lora=(str(source),)))
    assert any(f"merged into {len(adapters.modules(adapter))} weights" in note for note in plan.notes)
