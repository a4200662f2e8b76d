"""LoRA adapters: files with the bytes of convert_lora_to_gguf.py, scales of PEFT, and merged into a checkpoint."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from refusals import check_refused, refuses
from test_llama_perplexity import llama_perplexity
from test_patterns import ENDLESS

import adapters
import checkpoints
from adapters import ADAPTERS, Adapter, write_adapter, write_base
from gguf_digests import differences, digests
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.export import export
from quantkit.formats.gguf import open_gguf
from quantkit.formats.safetensors import read_header
from quantkit.kernels import dequantize
from quantkit.kernels.cpu.low_rank import add_low_rank, strips
from quantkit.lora import convert_lora, plan_convert_lora
from quantkit.options.export import ExportOptions
from quantkit.pipeline.worker import Worker
from quantkit.quantize import QuantizeOptions

F32 = npt.NDArray[np.float32]
EXPECTED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "lora-sha256.json").read_text())
LLAMA = ADAPTERS["llama"]


def read_all(path: Path) -> dict[str, F32]:
    """Return the tensors of a file, outermost dimension first."""
    tensors = {}
    with open_gguf(path) as file:
        for t in file.tensors.values():
            rows = file.data(t.name).reshape(int(np.prod(t.shape[1:])), -1)
            tensors[t.name] = dequantize(rows, t.type, t.shape[0]).reshape(t.shape[::-1])
    return tensors


def options_of(name: str, **options: Any) -> ConvertOptions:
    return ConvertOptions(**checkpoints.describe(name).convert_keywords(), **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint("llama", tmp_path_factory.mktemp("base"))


# --- files of adapters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED)
def test_the_bytes_are_the_references(name: str, tmp_path: Path) -> None:
    adapter, out = ADAPTERS[name], tmp_path / "out.gguf"
    assert adapters.digest(adapter) == EXPECTED[name]["adapter"]
    source, base = write_adapter(adapter, tmp_path / "a"), write_base(adapter, tmp_path / "b")
    wrong = {}
    for outtype in adapter.outtypes:
        convert_lora(source, out, base=base, outtype=outtype, overwrite=True)
        with open_gguf(out) as file:
            wrong[outtype] = differences(EXPECTED[name][outtype], digests(out), list(file.tensors))
            alpha = float(file.get("adapter.lora.alpha"))
    if adapter.scaled_alike:
        assert not any(wrong.values())
        return
    parts = set(wrong["f32"].split("; "))
    assert ("metadata differ" in parts) == bool(adapter.config.get("use_rslora"))
    assert all(part.endswith("lora_b differs") for part in parts - {"metadata differ"})
    assert alpha == pytest.approx(
        adapter.alpha * (adapter.rank**0.5 if adapter.config.get("use_rslora") else 1), rel=1e-7
    )


def test_every_adapter_has_an_expectation() -> None:
    assert {name for name, adapter in ADAPTERS.items() if adapter.outtypes} == set(EXPECTED)


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "llama-alora"])
def test_an_adapter_file_equals_the_merged_model(name: str, tmp_path: Path) -> None:
    """The runtime's addition, B @ A * alpha / rank, equals that of merging: names, rows and scales are right in
    both."""
    adapter = ADAPTERS[name]
    base = checkpoints.write_checkpoint(adapter.base, tmp_path)
    source, out = write_adapter(adapter, tmp_path / "a"), tmp_path / "out.gguf"
    convert_lora(source, out, base=base)
    paths = tmp_path / "base.gguf", tmp_path / "merged.gguf"
    convert(base, paths[0], None, options_of(adapter.base, outtype="f32"))
    convert(base, paths[1], None, options_of(adapter.base, outtype="f32", merge_lora=(str(source),)))
    plain, merged = map(read_all, paths)
    factors = read_all(out)
    with open_gguf(out) as file:
        alpha = float(file.get("adapter.lora.alpha"))
    changed = {
        name_of_factor.removesuffix(".lora_a") for name_of_factor in factors if name_of_factor.endswith(".lora_a")
    }
    assert plain.keys() == merged.keys()
    assert len(factors) == 2 * len(changed)
    for name_of_factor, x in plain.items():
        if name_of_factor not in changed:
            assert np.array_equal(x, merged[name_of_factor]), name_of_factor
            continue
        a, b = (factors[f"{name_of_factor}.lora_{letter}"].astype(np.float64) for letter in "ab")
        added = a @ b.swapaxes(-1, -2) if name_of_factor == "token_embd.weight" else b @ a
        assert np.abs(x + added * alpha / b.shape[-1] - merged[name_of_factor]).max() < 1e-6, name_of_factor
        assert np.abs(x - merged[name_of_factor]).max() > 1e-3


@pytest.mark.parametrize("name", ["llama-patterns", "llama-rslora-patterns"])
def test_only_weights_with_another_scale_change_b(name: str, tmp_path: Path) -> None:
    adapter, out = ADAPTERS[name], tmp_path / "out.gguf"
    convert_lora(write_adapter(adapter, tmp_path), out, base=write_base(adapter, tmp_path / "b"))
    tensors = read_all(out)
    default = adapter.alpha * (adapter.rank**0.5 if adapter.config.get("use_rslora") else 1.0)
    for module, (_, b) in adapters.factors(adapter).items():
        if module.endswith(("v_proj", "down_proj", "o_proj")):  # whose rows keep their order
            kind = {"v_proj": "attn_v", "down_proj": "ffn_down", "o_proj": "attn_output"}[module.rpartition(".")[2]]
            actual = tensors[f"blk.{module.split('.')[2]}.{kind}.weight.lora_b"]
            factor = adapters.scale_of(adapter, module) * adapters.rank_of(adapter, module) / default
            assert np.allclose(actual, b * np.float32(factor), rtol=1e-6, atol=0)
            assert abs(factor - 1) > 1e-9 or np.array_equal(actual, b)


def test_the_adapter_may_name_its_base(tmp_path: Path) -> None:
    base = write_base(LLAMA, tmp_path)
    plans = [
        plan_convert_lora(write_adapter(LLAMA, tmp_path / "named", str(base)), tmp_path / "x.gguf"),
        plan_convert_lora(write_adapter(LLAMA, tmp_path / "other"), tmp_path / "x.gguf", base=base),
    ]
    assert [[t.name for t in plan.tensors] for plan in plans][0] == [t.name for t in plans[1].tensors]
    with refuses(FormatError, "QK-E117 --base DIR"):
        plan_convert_lora(tmp_path / "other" / "llama")


@pytest.mark.parametrize(("name", "dtype"), [("llama", "F16"), ("qwen2", "BF16"), ("llama-small", "F16")])
def test_outtype_auto(name: str, dtype: str, tmp_path: Path) -> None:
    """That of the first matrix; the reference stops there."""
    adapter = ADAPTERS[name]
    source, base = write_adapter(adapter, tmp_path / "a"), write_base(adapter, tmp_path)
    assert {t.type.name for t in plan_convert_lora(source, base=base, outtype="auto").tensors} == {dtype}
    assert plan_convert_lora(source, base=base, outtype="auto").shards[0].path.parent == source


def test_the_name_of_the_output(tmp_path: Path) -> None:
    adapter = ADAPTERS["Llama-3.2-1B-lora-v0.2"]
    plan = plan_convert_lora(write_adapter(adapter, tmp_path), base=write_base(adapter, tmp_path / "b"))
    assert plan.shards[0].path.name == "Llama-3.2-1B-v0.2-F32-LoRA.gguf"


# --- merging ---------------------------------------------------------------------------------------------------------


def merged_with(base: Path, name: str, adapter_options: tuple[str, ...], out: Path, **run: Any) -> dict[str, F32]:
    convert(base, out, None, options_of(name, outtype="f32", merge_lora=adapter_options), overwrite=True, **run)
    return read_all(out)


def test_the_merge_adds_the_product(tmp_path: Path) -> None:
    """Against float64, for an architecture that leaves rows and columns as they are."""
    adapter = ADAPTERS["qwen2"]
    base, source = checkpoints.write_checkpoint("qwen2", tmp_path), write_adapter(adapter, tmp_path / "a")
    plain = merged_with(base, "qwen2", (), tmp_path / "x.gguf")
    for options, strength in (((f"{source}",), 1.0), ((f"{source}:-0.5",), -0.5), ((f"{source}", f"{source}:2"), 3.0)):
        merged = merged_with(base, "qwen2", options, tmp_path / "x.gguf")
        for module, name in (("self_attn.q_proj", "attn_q"), ("mlp.down_proj", "ffn_down"), ("mlp.up_proj", "ffn_up")):
            expected = plain[f"blk.1.{name}.weight"] + strength * adapters.delta(adapter, f"model.layers.1.{module}")
            assert np.abs(merged[f"blk.1.{name}.weight"] - expected).max() < 3e-7


@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(1, 1, 1), (1, 3, 2), (4, 16, 1), (5, 17, 3), (7, 40, 5), (33, 256, 8), (6, 20, 200)]
)
def test_values_are_summed_as_by_sgemm(rows: int, columns: int, rank: int) -> None:
    """A chain of multiply-adds that are rounded once, of half the rank if it is longer than 192."""
    random = np.random.default_rng(rows)
    shapes = (rows, columns), (rank, columns), (rows, rank)
    x, a, b = (random.standard_normal(shape, dtype=np.float32) for shape in shapes)
    total = np.zeros((rows, columns), np.float32)
    for block in np.array_split(np.arange(rank), 2 if rank > 192 else 1):
        chain = np.zeros((rows, columns))
        for k in block:  # products of float32 are exact in float64
            chain = (b[:, k : k + 1].astype(np.float64) * a[k] + chain).astype(np.float32).astype(np.float64)
        total += chain.astype(np.float32)
    expected = x + total * np.float32(1.7)
    add_low_rank(x, strips(a), b, np.float32(1.7))
    assert np.array_equal(x, expected)


QUANTIZED = ("llama-gptq", "llama-ct-int4-asym", "llama-fp8-e5m2", "llama-nvfp4", "llama-ct-int8")


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_decoded_before_the_merge(name: str, tmp_path: Path) -> None:
    adapter = replace(LLAMA, base=name)
    source = str(write_adapter(adapter, tmp_path / "a"))
    about = checkpoints.describe(name)
    base = checkpoints.write_description(about, tmp_path)
    decoded_base = checkpoints.write_description(checkpoints.decode_weights(about), tmp_path / "meant")
    actual = merged_with(base, name, (source,), tmp_path / "x.gguf")
    expected = merged_with(decoded_base, name, (source,), tmp_path / "x.gguf")
    assert actual.keys() - expected.keys() == set()
    changed = [
        name_of_weight
        for name_of_weight in expected
        if re.search(r"blk\.\d+\.(attn_[qkv]|attn_output|ffn_\w+)\.weight", name_of_weight)
    ]
    assert len(changed) >= len(adapters.modules(adapter))
    # NVFP4 is meant as code times both scales, in whatever order.
    assert all(
        np.abs(actual[name_of_weight] - expected[name_of_weight]).max() <= (name == "llama-nvfp4") * 1e-7
        for name_of_weight in changed
    )


def test_experts_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Some experts of a stack are changed, all of it becomes floats; other stacks stay the blocks they are."""
    name = "qwen3-moe-nvfp4"
    adapter = replace(ADAPTERS["qwen3-moe"], base=name, modules=r"layers\.1\.mlp\.experts\.[02]\.up_proj")
    base = checkpoints.write_checkpoint(name, tmp_path)
    out = tmp_path / "x.gguf"
    convert(base, out, None, options_of(name, merge_lora=(str(write_adapter(adapter, tmp_path / "a")),)))
    with open_gguf(out) as file:
        types = {t.name: t.type.name for t in file.tensors.values() if "_exps.weight" in t.name}
        assert "blk.1.ffn_up_exps.scale" not in file.tensors
    assert types.pop("blk.1.ffn_up_exps.weight") != "NVFP4"
    assert set(types.values()) == {"NVFP4"}


def test_one_pass_equals_merge_then_quantize(tmp_path: Path) -> None:
    """Against a checkpoint that holds the merged weights, as PEFT's merge_and_unload saves one."""
    adapter = ADAPTERS["qwen3"]
    base, source = checkpoints.write_checkpoint("qwen3", tmp_path / "b"), write_adapter(adapter, tmp_path / "a")
    merged_with(base, "qwen3", (str(source),), tmp_path / "merged.gguf")
    export(tmp_path / "merged.gguf", tmp_path / "merged", ExportOptions(outtype="f32", tokenizer=False))
    for file in base.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())
    quantize_options = QuantizeOptions(no_provenance=True)
    for folder, adapter_options in ((base, (str(source),)), (tmp_path / "merged", ())):
        options = options_of("qwen3", intermediate="none", merge_lora=adapter_options, model_name="x")
        convert(folder, tmp_path / f"{len(adapter_options)}.gguf", "Q4_K_M", options, quantize_options)
    with open_gguf(tmp_path / "0.gguf") as a, open_gguf(tmp_path / "1.gguf") as b:
        assert list(a.tensors) == list(b.tensors)
        assert all(a.data(name).tobytes() == b.data(name).tobytes() for name in a.tensors)


def test_memory_and_threads_do_not_matter(llama: Path, tmp_path: Path) -> None:
    adapter_options = (str(write_adapter(ADAPTERS["llama-small"], tmp_path)), str(write_adapter(LLAMA, tmp_path)))
    options = options_of("llama", merge_lora=adapter_options)
    settings: tuple[Any, ...] = ({"threads": 1}, {"threads": 3, "max_ram": "4MiB"}, {"threads": 2, "max_ram": "16MiB"})
    for type_name in (None, "Q4_K_M"):
        outputs = set()
        for run in settings:
            convert(llama, tmp_path / "x.gguf", type_name, options, overwrite=True, **run)
            outputs.add((tmp_path / "x.gguf").read_bytes())
        assert len(outputs) == 1


def test_another_adapter_is_not_resumed(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte in the middle of a factor, or another scale, is another output."""
    source, out, jobs, run = write_adapter(LLAMA, tmp_path), tmp_path / "x.gguf", 0, Worker.run

    def stop(self: Worker, job: Any, tensor: Any) -> Any:
        nonlocal jobs
        jobs += 1
        if jobs > 12:
            raise KeyboardInterrupt
        return run(self, job, tensor)

    monkeypatch.setattr(Worker, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(llama, out, None, options_of("llama", merge_lora=(str(source),)), threads=1)
    monkeypatch.setattr(Worker, "run", run)
    with refuses(ResourceError, "QK-E409 x.gguf.journal --resume --overwrite"):
        convert(llama, out, None, options_of("llama", merge_lora=(f"{source}:0.5",)), resume=True)
    with refuses(ResourceError, "QK-E409 x.gguf.journal --resume --overwrite"):
        convert(llama, out, None, options_of("llama"), resume=True)
    file, data = source / "adapter_model.safetensors", (source / "adapter_model.safetensors").read_bytes()
    middle = read_header(file)["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"]
    offset = middle.offset + middle.nbytes // 2 + 1
    file.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
    with refuses(ResourceError, "QK-E409 x.gguf.journal --resume --overwrite"):
        convert(llama, out, None, options_of("llama", merge_lora=(str(source),)), resume=True)
    file.write_bytes(data)
    assert convert(llama, out, None, options_of("llama", merge_lora=(str(source),)), resume=True).run.resumed > 0


def test_tied_embeddings(tmp_path: Path) -> None:
    """Merged they change the output, too, as in PEFT; a file of its own for them is not possible."""
    adapter = replace(ADAPTERS["llama-embedding"], base="llama-tied")
    base, source = checkpoints.write_checkpoint("llama-tied", tmp_path), write_adapter(adapter, tmp_path / "a")
    plan = plan_convert(base, tmp_path / "x.gguf", None, options_of("llama-tied", merge_lora=(str(source),)))
    assert any("both change" in note for note in plan.notes)
    with refuses(FormatError, "QK-E117 tie_word_embeddings --merge-lora"):
        plan_convert_lora(source, base=base)
    with refuses(FormatError, "QK-E117 adapter_model.safetensors lm_head.weight"):
        plan_convert(base, tmp_path / "x.gguf", None, options_of("llama-tied", merge_lora=(str(lm_head(tmp_path)),)))


def lm_head(tmp_path: Path) -> Path:
    return write_adapter(Adapter("head", "llama", "lm_head"), tmp_path / "heads")


# --- what is refused -------------------------------------------------------------------------------------------------


def edited(adapter: Adapter, path: Path, **config: Any) -> Path:
    """Write an adapter with other values in adapter_config.json."""
    source = write_adapter(adapter, path)
    (source / "adapter_config.json").write_text(json.dumps({**adapters.config(adapter), **config}))
    return source


def write_changed_adapter(adapter: Adapter, path: Path, tensors: Any) -> Path:
    """Write an adapter with tensors changed by the function ``tensors``."""
    source = write_adapter(adapter, path)
    tensors_by_name = {t[0].removeprefix("base_model.model."): t for t in adapters.tensors(adapter)}
    checkpoints.write_safetensors(source / "adapter_model.safetensors", list(tensors(tensors_by_name).values()))
    return source


def refusals(source: Path, llama: Path, refusal: str) -> None:
    """Both commands refuse an adapter in one line that names its directory."""
    merging = options_of("llama", merge_lora=(str(source),))
    with refuses(QuantkitError, refusal) as first:
        plan_convert_lora(source, base=llama)
    with refuses(QuantkitError, refusal) as second:
        plan_convert(llama, source.parent / "x.gguf", None, merging)
    for text in (first.value.message, second.value.message):
        assert str(source) in text
        assert "\n" not in text
        assert len(text) < 600


@pytest.mark.usefixtures("pattern_limit")
@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"peft_type": "IA3"}, "QK-E117 LORA"),
        ({"peft_type": None}, "QK-E117 LORA"),
        ({"lora_alpha": 0}, "QK-E117 0"),
        ({"lora_alpha": float("nan")}, "QK-E117 lora_alpha"),
        ({"lora_alpha": "16"}, "QK-E117 lora_alpha"),
        ({"lora_alpha": 10**400}, "QK-E117 lora_alpha"),
        ({"alpha_pattern": {"q_proj": 0}}, "QK-E117 0"),
        ({"alpha_pattern": ["q_proj"]}, "QK-E117 alpha_pattern ['q_proj']"),
        ({"rank_pattern": {"q_proj": "8"}}, "QK-E117 adapter_config.json"),
        ({"rank_pattern": {"q_proj": 16}}, "QK-E117 32 16"),
        ({"rank_pattern": {"(": 16}}, "QK-E205 13"),
        ({"rank_pattern": {ENDLESS: 16}}, "QK-E205"),
        ({"rank_pattern": {"a{999999999}": 16}}, "QK-E205 256"),
        ({"rank_pattern": {"x" * 10**6: 16}}, "QK-E205 65536"),
        ({"rank_pattern": {f"m{i}": 16 for i in range(5000)}}, "QK-E117 5000"),
        ({"r": 0}, "QK-E117 adapter_config.json"),
        ({"r": True}, "QK-E117 adapter_config.json"),
        ({"r": 16}, "QK-E117 32 16"),
        ({"use_dora": True}, "QK-E117 use_dora lora_magnitude_vector"),
        ({"use_qalora": True}, "QK-E117 QALoRA"),
        ({"use_rslora": "yes"}, "QK-E117 use_rslora yes"),
        ({"fan_in_fan_out": True}, "QK-E117 fan_in_fan_out"),
        ({"lora_bias": True}, "QK-E117 lora_bias merge_and_unload"),
        ({"modules_to_save": ["lm_head"]}, "QK-E117 modules_to_save"),
        ({"trainable_token_indices": [1]}, "QK-E117 trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "QK-E117 target_parameters"),
        ({"layer_replication": [[0, 2]]}, "QK-E117 layer_replication"),
        ({"init_lora_weights": "pissa"}, "QK-E117 path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "QK-E117 path_initial_model_for_weight_conversion"),
        ({"invocation_string": "<|start|>"}, "QK-E117 alora_invocation_tokens"),
    ],
    ids=str,
)
def test_adapters_with_more_than_factors_are_refused(
    llama: Path, tmp_path: Path, config: dict[str, Any], refusal: str
) -> None:
    refusals(edited(LLAMA, tmp_path, **config), llama, refusal)


Q = "model.layers.1.self_attn.q_proj"


def without(name: str) -> Any:
    """Return a change of the tensors of a file: one less."""
    return lambda tensors: {key: t for key, t in tensors.items() if key != name}


def with_tensor(name: str, shape: tuple[int, ...], dtype: str = "F32", replaced: str | None = None) -> Any:
    """Return a change: a tensor of zeros, more or in the place of another one."""
    size = int(np.prod(shape)) * {"F32": 4, "F16": 2, "I8": 1}[dtype]
    tensor = (f"base_model.model.{name}", dtype, shape, bytes(size))
    return lambda tensors: {key: t for key, t in tensors.items() if key not in (name, replaced)} | {name: tensor}


def renamed(prefix: str) -> Any:
    return lambda tensors: {
        key: (f"base_model.model.{key.replace(Q, prefix)}", *t[1:]) if Q in key else t for key, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (without(f"{Q}.lora_B.weight"), "QK-E117 base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"),
        (without(f"{Q}.lora_A.weight"), "QK-E117 base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"),
        (with_tensor(f"{Q}.lora_A.weight", (32, 128)), "QK-E117 model.layers.1.self_attn.q_proj.weight"),
        (
            with_tensor(f"{Q}.lora_B.weight", (256, 16)),
            "QK-E117 base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        ),
        (
            with_tensor(f"{Q}.lora_B.weight", (256, 32, 1)),
            "QK-E117 base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
        ),
        (
            with_tensor(f"{Q}.lora_B.weight", (256, 0)),
            "QK-E117 base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
        ),
        (
            with_tensor(f"{Q}.lora_B.weight", (256, 32), "I8"),
            "QK-E117 base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
        ),
        (with_tensor(f"{Q}.lora_magnitude_vector", (256,)), "QK-E117 use_dora"),
        (with_tensor(f"{Q}.lora_magnitude_vector.weight", (256,)), "QK-E117 use_dora"),
        (
            with_tensor(f"{Q}.lora_B.bias", (256,)),
            "QK-E117 base_model.model.model.layers.1.self_attn.q_proj.lora_B.bias",
        ),
        (
            with_tensor(f"{Q}.lora_B.default.weight", (256, 32)),
            "QK-E117 base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight",
        ),
        (
            with_tensor("model.layers.0.self_attn.q_proj.bias", (256,)),
            "QK-E117 base_model.model.model.layers.0.self_attn.q_proj.bias modules_to_save",
        ),
        (with_tensor("score.weight", (2, 256)), "QK-E117 base_model.model.score.weight modules_to_save"),
        (
            with_tensor("model.embed_tokens.base_layer.weight", (700, 256)),
            "QK-E117 base_model.model.model.embed_tokens.base_layer.weight",
        ),
        (renamed("model.layers.9.self_attn.q_proj"), "QK-E117 adapter_model.safetensors"),
        (renamed("model.layers.1.self_attn.other_proj"), "QK-E117 adapter_model.safetensors"),
        (renamed("visual.blocks.1.attn.q_proj"), "QK-E117 visual.blocks.1.attn.q_proj.weight"),
        (lambda tensors: {}, "QK-E117 lora_A lora_B"),
    ],
)
def test_tensors_of_wrong_shape_are_refused(llama: Path, tmp_path: Path, change: Any, refusal: str) -> None:
    refusals(write_changed_adapter(LLAMA, tmp_path, change), llama, refusal)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (with_tensor(f"{Q}.lora_A.weight", (32, 128)), "QK-E117 256 hidden_size"),
        (with_tensor("model.layers.0.self_attn.k_proj.lora_B.weight", (64, 32)), "QK-E117 2 64"),
        (with_tensor(f"{Q}.lora_B.weight", (250, 32)), "QK-E106 4"),
        (with_tensor("model.layers.2.mlp.down_proj.lora_B.weight", (512, 32)), "QK-E117 256"),
        (
            with_tensor("model.embed_tokens.base_layer.weight", (700, 256)),
            "QK-E117 base_model.model.model.embed_tokens.base_layer.weight",
        ),
        (renamed("model.layers.9.self_attn.q_proj"), "QK-E107 config.json"),
        (renamed("model.layers.1.self_attn.other_proj"), "QK-E107 model.layers.1.self_attn.other_proj.weight"),
    ],
)
def test_shapes_that_contradict_the_configuration(tmp_path: Path, change: Any, refusal: str) -> None:
    with refuses(FormatError, refusal):
        plan_convert_lora(write_changed_adapter(LLAMA, tmp_path, change), base=write_base(LLAMA, tmp_path / "b"))


@pytest.mark.parametrize(
    ("adapter", "refusal"),
    [
        (Adapter("latent", "deepseek-v2", "kv_b_proj"), "QK-E106 adapter_model.safetensors"),
        (
            Adapter("some", "qwen3-moe", r"experts\.[01]\.up_proj"),
            "QK-E105 model.layers.0.mlp.experts.0.up_proj.weight 2",
        ),
        (Adapter("bitnet", "bitnet", "q_proj"), "QK-E106 adapter_model.safetensors"),
        (Adapter("tied", "gemma2", "embed_tokens"), "QK-E117 tie_word_embeddings"),
        (
            replace(ADAPTERS["qwen3-moe"], name="ranks", config={"rank_pattern": {r"experts\.1\.up_proj": 4}}),
            "QK-E106 4 8",
        ),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_adapters_unsupported_by_llama_cpp_are_refused(adapter: Adapter, refusal: str, tmp_path: Path) -> None:
    """All of it can be merged."""
    source = write_adapter(adapter, tmp_path / "a")
    with refuses(FormatError, refusal):
        plan_convert_lora(source, base=write_base(adapter, tmp_path))
    base = checkpoints.write_checkpoint(adapter.base, tmp_path)
    plan_convert(base, tmp_path / "x.gguf", None, options_of(adapter.base, merge_lora=(str(source),)))


def test_copies_of_base_weights_are_skipped(llama: Path, tmp_path: Path) -> None:
    """PEFT saves the embeddings whole where factors are of them."""
    source = write_changed_adapter(LLAMA, tmp_path, with_tensor("model.embed_tokens.base_layer.weight", (640, 256)))
    for plan in (
        plan_convert_lora(source, base=llama),
        plan_convert(llama, tmp_path / "x.gguf", None, options_of("llama", merge_lora=(str(source),))),
    ):
        assert any("ignored copies of base weights" in note for note in plan.notes)


def test_an_invocation_cannot_be_merged(llama: Path, tmp_path: Path) -> None:
    source = write_adapter("llama-alora", tmp_path)
    with refuses(FormatError, "QK-E117"):
        plan_convert(llama, tmp_path / "x.gguf", None, options_of("llama", merge_lora=(str(source),)))
    for tokens in ([-1], ["a"], [True], "abc", [1 << 40]):
        wrong = edited(ADAPTERS["llama-alora"], tmp_path, alora_invocation_tokens=tokens)
        with refuses(FormatError, "QK-E117 adapter_config.json alora_invocation_tokens"):
            plan_convert_lora(wrong, base=llama)


def test_missing_or_truncated_files(llama: Path, tmp_path: Path) -> None:
    source = write_adapter(LLAMA, tmp_path)
    file, config = source / "adapter_model.safetensors", source / "adapter_config.json"
    data, text = file.read_bytes(), config.read_text()
    for size in (0, 4, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        refusals(source, llama, "QK-E103 adapter_model.safetensors")
    file.write_bytes(struct.pack("<Q", 1 << 62) + data[8:])
    refusals(source, llama, "QK-E103 adapter_model.safetensors")
    file.unlink()
    refusals(source, llama, "QK-E117 adapter_model.safetensors")
    (source / "adapter_model.bin").write_bytes(b"")
    refusals(source, llama, "QK-E117 PEFT")
    file.write_bytes(data)
    for content in ("", "[]", "{", text[:-3], "1" * 5000, '{"peft_type": "LORA"'):
        config.write_text(content)
        refusals(source, llama, "QK-E111 adapter_config.json")
    config.unlink()
    refusals(source, llama, "QK-E117 PEFT")
    with refuses(FormatError, "QK-E401"):
        plan_convert_lora(tmp_path / "nowhere", base=llama)


def test_changed_files_are_refused_or_read(llama: Path, tmp_path: Path) -> None:
    """Headers and configurations with bytes changed at random: a plan, or one of our errors."""
    adapter = Adapter("small", "llama", r"layers\.0\.self_attn\.[qk]_proj", rank=2)
    source = write_adapter(adapter, tmp_path)
    random = np.random.default_rng(5)
    for name, part in (("adapter_model.safetensors", slice(0, 900)), ("adapter_config.json", slice(None))):
        good = (source / name).read_bytes()
        refused = 0
        for _ in range(150):
            data = bytearray(good)
            for offset in random.integers(0, len(good[part]), random.integers(1, 5)):
                data[offset] = random.choice(bytearray(b'0123456789-[]{},:"enulltrufasA B')) if offset > 8 else offset
            (source / name).write_bytes(data)
            try:
                plan_convert_lora(source, base=llama)
            except QuantkitError as e:
                refused += 1
                assert len(e.message) < 1500  # noqa: PT017
        (source / name).write_bytes(good)
        assert refused > 20


@pytest.mark.parametrize("factor", ["A", "B"])
def test_a_nonfinite_value_names_the_adapter(llama: Path, tmp_path: Path, factor: str) -> None:
    """A NaN in a factor is no fault of the weight that it is added to."""
    name = f"{Q}.lora_{factor}.weight"

    def with_nan(tensors: Any) -> Any:
        full, dtype, shape, data = tensors[name]
        nan = np.full(1, np.nan, {"F32": np.float32, "F16": np.float16}.get(dtype, np.float32)).tobytes()
        return {**tensors, name: (full, dtype, shape, (b"\xc0\x7f" if dtype == "BF16" else nan) + data[len(nan) :])}

    source = write_changed_adapter(LLAMA, tmp_path, with_nan)
    with pytest.raises(FormatError) as e:
        convert(llama, tmp_path / "x.gguf", None, options_of("llama", merge_lora=(str(source),)))
    assert str(source / "adapter_model.safetensors") in e.value.message
    assert name in e.value.message
    assert not (tmp_path / "x.gguf").exists()


def test_incompatible_options(llama: Path, tmp_path: Path) -> None:
    source = str(write_adapter(LLAMA, tmp_path))
    for scale in ("0", "nan", "inf", "-inf"):
        with refuses(RecipeError, "QK-E203 0"):
            plan_convert(llama, tmp_path / "x.gguf", None, options_of("llama", merge_lora=(f"{source}:{scale}",)))
    with refuses(FormatError, "QK-E401"):
        plan_convert(llama, tmp_path / "x.gguf", None, options_of("llama", merge_lora=(f"{source}:half",)))
    with refuses(RecipeError, "QK-E201 --vocab-only"):
        plan_convert(llama, None, None, options_of("llama", vocab_only=True, merge_lora=(source,)))
    with refuses(RecipeError, "QK-E203 --outtype q4_0"):
        plan_convert_lora(source, base=llama, outtype="q4_0")


def test_inputs_are_never_replaced(llama: Path, tmp_path: Path) -> None:
    source = write_adapter(LLAMA, tmp_path)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        before = (source / file).read_bytes()
        with pytest.raises(ResourceError):
            convert_lora(source, source / file, base=llama, overwrite=True)
        with pytest.raises(ResourceError):
            convert(llama, source / file, None, options_of("llama", merge_lora=(str(source),)), overwrite=True)
        assert (source / file).read_bytes() == before
    for path in (*llama.glob("model*"), llama / "config.json"):
        before = path.read_bytes()
        with pytest.raises(ResourceError):
            convert_lora(source, path, base=llama, overwrite=True)
        assert path.read_bytes() == before


# --- the command line, and llama.cpp ---------------------------------------------------------------------------------


def test_command_lines(llama: Path, tmp_path: Path) -> None:
    source, out = write_adapter(LLAMA, tmp_path), tmp_path / "{ftype}.gguf"
    run = CliRunner()
    arguments = ["convert-lora", str(source), str(out), "--base", str(llama)]
    output = json.loads(run.invoke(cli, [*arguments, "--dry-run", "--json"]).stdout)
    assert not (tmp_path / "f32.gguf").exists()
    result = run.invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"][0]["bytes"] == (tmp_path / "f32.gguf").stat().st_size
    assert output["files"][0]["bytes"] == (tmp_path / "f32.gguf").stat().st_size
    assert digests(tmp_path / "f32.gguf")["sha256"] == EXPECTED["llama"]["f32"]["sha256"]
    rerun = run.invoke(cli, arguments)
    assert rerun.exit_code == 1
    check_refused(rerun.stderr, "QK-E402 f32.gguf --overwrite")
    for options, message in (
        (["--base-model-id", "a/b"], "--base DIR"),
        (["--outfile", "y.gguf"], "give one of them"),
    ):
        refused = run.invoke(cli, [*arguments, *options])
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.split())
    merging = ["convert", str(llama), str(tmp_path / "m.gguf"), "--pre", "llama-bpe", "--allow-other-ids"]
    result = run.invoke(cli, [*merging, "--merge-lora", f"{source}:0.5", "--merge-lora", str(source), "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("merged into 21 weights") == 2


@pytest.mark.peer
def test_llama_cpp_runs_an_adapter_like_the_merged_model(llama_bin: Path, data: Path, tmp_path: Path) -> None:
    """Perplexity with --lora is that of the merged model: attention, experts, rsLoRA, ranks by pattern."""
    script = Path(__file__).parents[2] / "scripts" / "make_tiny_checkpoint.py"
    base = tmp_path / "tiny-moe"
    subprocess.run([sys.executable, str(script), str(base)], check=True)
    shapes = {t.name: t.shape for path in sorted(base.glob("*.safetensors")) for t in read_header(path).values()}
    adapter = Adapter(
        "tuned",
        "tiny-moe",
        r"self_attn\.[qkvo]_proj|mlp\.experts\.\d+\.(gate|up|down)_proj",
        alpha=6,
        config={"use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 12}},
        shapes=shapes,
    )
    source, factors = write_adapter(adapter, tmp_path), tmp_path / "lora.gguf"
    convert_lora(source, factors, base=base)
    plain, merged = tmp_path / "plain.gguf", tmp_path / "merged.gguf"
    convert(base, plain, None, ConvertOptions(pre="gpt-2", outtype="f32"))
    convert(base, merged, None, ConvertOptions(pre="gpt-2", outtype="f32", merge_lora=(str(source),)))
    text = ("-f", data / "tiny-moe-evaluation.txt", "-c", 128, "--chunks", 4)
    logits = []
    for model, options in ((plain, ()), (plain, ("--lora", factors)), (merged, ())):
        printed = llama_perplexity(llama_bin, "Final estimate", "-m", model, *options, *text)
        match = re.search(r"Final estimate: PPL = ([\d.]+)", printed)
        assert match is not None
        logits.append(float(match[1]))
    assert logits[1] == pytest.approx(logits[2], rel=2e-4)
    assert abs(logits[0] / logits[2] - 1) > 1e-2
