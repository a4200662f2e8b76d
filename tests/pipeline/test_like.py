"""``--like FILE``: the types of an existing file, tensor by tensor, and an error where that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from refusals import check_refused, refuses
from tiny_checkpoints import moe_arrays, write_checkpoint

from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import open_gguf
from quantkit.merge import merge_up_gate
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
from small_models import llama_fields, llama_tensors, tensor_bytes, write_model

EXACT: dict[str, Any] = {"no_provenance": True}
PRE = ConvertOptions(pre="gpt-2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "llama.gguf", llama_tensors())


def moe(path: Path) -> Path:
    tensors = llama_tensors(1)
    tensors |= {f"blk.0.ffn_{part}_exps.weight": ((256, 64, 3), "F16") for part in ("gate", "up")}
    tensors["blk.0.ffn_down_exps.weight"] = ((64, 256, 3), "F16")
    return write_model(path, tensors, llama_fields(1))


def types(path: Path) -> dict[str, str]:
    return {name: kind for name, (kind, _) in tensor_bytes(path).items()}


def like(source: Path, pattern: Path, out: Path, **options: Any) -> dict[str, str]:
    quantize(source, out, "LIKE", QuantizeOptions(like=pattern, **options), overwrite=True)
    return types(out)


@pytest.mark.parametrize("preset", ["Q4_K_M", "IQ4_KS", "Q4_K_R4", "Q8_0"])
def test_the_file_equals_its_presets(llama: Path, tmp_path: Path, preset: str) -> None:
    """Every byte, whatever tree the preset is of, as one file or in shards."""
    pattern, out = tmp_path / "p.gguf", tmp_path / "o.gguf"
    quantize(llama, pattern, preset, QuantizeOptions(**EXACT))
    like(llama, pattern, out, **EXACT)
    assert out.read_bytes() == pattern.read_bytes()
    split = quantize(llama, tmp_path / "s.gguf", preset, QuantizeOptions(split_max_size=300_000)).paths
    assert len(split) > 2
    like(llama, split[1], out, **EXACT)
    assert out.read_bytes() == pattern.read_bytes()


def test_a_recipes_file_is_a_valid_reference(llama: Path, tmp_path: Path) -> None:
    """Norms and all; options and rules come first, but a rule for all does not reach norms."""
    pattern, out = tmp_path / "p.gguf", tmp_path / "o.gguf"
    rules = ("attn_q=Q5_0", "blk.1.ffn_down=IQ4_NL")
    quantize(llama, pattern, "Q4_0", QuantizeOptions(tensor_type=rules, output_tensor_type="Q8_0"))
    assert like(llama, pattern, out) == types(pattern)
    with open_gguf(out) as file:
        assert file.get("general.file_type") == 2
        assert file.get("quantkit.quantize.recipe").splitlines() == ["--like p.gguf"]
    actual = like(llama, pattern, out, tensor_type=(".*=Q6_K",), leave_output_tensor=True)
    assert actual["output_norm.weight"] == "F32"
    assert actual["output.weight"] == "F16"
    assert {actual[name] for name in actual if "norm" not in name and name != "output.weight"} == {"Q6_K"}


def test_experts_may_be_merged_in_only_one_file(tmp_path: Path) -> None:
    source, separate, out = moe(tmp_path / "m.gguf"), tmp_path / "apart.gguf", tmp_path / "o.gguf"
    quantize(source, separate, "Q4_0", QuantizeOptions(tensor_type=("ffn_down_exps=Q5_1",)))
    merged, merged_source = tmp_path / "merged.gguf", tmp_path / "ms.gguf"
    merge_up_gate(separate, merged)
    merge_up_gate(source, merged_source)
    assert like(source, merged, out) == types(separate)
    assert like(merged_source, separate, out) == types(merged) == like(source, separate, out, merge_up_gate=True)
    assert like(merged_source, merged, out, split_up_gate=True) == types(separate)
    torn = tmp_path / "torn.gguf"
    quantize(source, torn, "Q4_0", QuantizeOptions(tensor_type=("ffn_up_exps=Q5_1",)))
    with refuses(QuantkitError, "QK-E211 --like torn.gguf blk.0.ffn_gate_exps.weight"):
        like(source, torn, out, merge_up_gate=True)
    assert like(source, torn, out) == types(torn)


def test_pruned_layers_may_be_missing_in_the_reference(llama: Path, tmp_path: Path) -> None:
    full, less, out = tmp_path / "w.gguf", tmp_path / "l.gguf", tmp_path / "o.gguf"
    quantize(llama, full, "Q4_0", QuantizeOptions(tensor_type=("blk.1.=Q5_1",)))
    quantize(llama, less, "Q8_0", QuantizeOptions(prune_layers=(0,)))
    assert like(llama, full, out, prune_layers=(0,))["blk.0.attn_q.weight"] == "Q5_1"
    assert like(llama, less, out, prune_layers=(0,))["blk.0.attn_q.weight"] == "Q8_0"


def test_differences_are_an_error_or_a_note(llama: Path, tmp_path: Path) -> None:
    pattern, out = tmp_path / "p.gguf", tmp_path / "o.gguf"
    quantize(llama, pattern, "Q4_0")

    def notes_of(tensors: dict[str, tuple[tuple[int, ...], str]], options: QuantizeOptions | None = None) -> list[str]:
        source = write_model(tmp_path / "m.gguf", tensors)
        return list(plan_quantize(source, out, "LIKE", options or QuantizeOptions(like=pattern)).notes)

    with_gate = llama_tensors() | {"blk.1.attn_gate.weight": ((256, 256), "F16")}
    with refuses(QuantkitError, "QK-E207 blk.1.attn_gate.weight"):
        notes_of(with_gate)
    rule = QuantizeOptions(like=pattern, tensor_type=("attn_gate=Q4_0",))
    assert not notes_of(with_gate, rule)
    fewer = llama_tensors()
    del fewer["output.weight"]
    assert [note for note in notes_of(fewer) if "also has output.weight, which" in note]
    with refuses(QuantkitError, "QK-E207 256 64 96"):
        notes_of(llama_tensors(vocab=96))
    with refuses(QuantkitError, "QK-E207 qwen3"):
        plan_quantize(
            write_model(tmp_path / "q.gguf", llama_tensors(), llama_fields(general__architecture="qwen3")),
            out, "LIKE", QuantizeOptions(like=pattern),
        )  # fmt: skip
    with refuses(QuantkitError, "QK-E209 token_embd.weight Q4_0 Q5_1"):
        like(pattern, llama_like(tmp_path, llama), out)
    with refuses(QuantkitError, "QK-E403 p.gguf"):  # the pattern is not replaced
        quantize(llama, pattern, "LIKE", QuantizeOptions(like=pattern), overwrite=True)


def llama_like(folder: Path, source: Path) -> Path:
    quantize(source, folder / "q5.gguf", "Q5_1")
    return folder / "q5.gguf"


def run(command: str, *args: object) -> Result:
    return CliRunner().invoke(cli, [command, *map(str, args)])


def test_the_command_needs_no_type(llama: Path, tmp_path: Path) -> None:
    pattern, out = tmp_path / "p.gguf", tmp_path / "o.gguf"
    quantize(llama, pattern, "Q5_K_M")
    assert run("quantize", "--like", pattern, llama, out).exit_code == 0
    assert types(out) == types(pattern)
    assert "ggml-model-Q5_K_M.gguf: " in run("quantize", "--dry-run", "--like", pattern, llama).stdout
    check_refused(run("quantize", "--like", pattern, llama, out, "Q4_0").stderr, "QK-E201 Q4_0")
    check_refused(run("quantize", "--pure", "--like", pattern, llama, out).stderr, "QK-E201 --pure --like")
    check_refused(run("quantize", llama, out, "LIKE").stderr, "QK-E202 --like")


def test_a_checkpoint_accepts_a_reference_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "in", arrays=moe_arrays())
    pattern, out = tmp_path / "p.gguf", tmp_path / "o.gguf"
    convert(folder, pattern, "Q5_0", PRE, QuantizeOptions(**EXACT))
    convert(folder, out, "LIKE", PRE, QuantizeOptions(like=pattern, **EXACT))
    assert out.read_bytes() == pattern.read_bytes()
    result = run("convert", "--pre", "gpt-2", "--like", pattern, "--merge-up-gate", folder, tmp_path / "m.gguf")
    assert result.exit_code == 0, result.output
    merged = types(tmp_path / "m.gguf")
    assert merged["blk.0.ffn_gate_up_exps.weight"] == "Q5_0"
    assert {name: t for name, t in merged.items() if "gate_up" not in name}.items() < types(pattern).items()
    result = run("convert", "--pre", "gpt-2", "--dry-run", "--like", pattern, folder, "Q8_0")
    check_refused(result.output, "QK-E201 Q8_0")
