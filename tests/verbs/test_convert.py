"""The verb convert: outputs and refusals; the reference's bytes are tested elsewhere."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses
from tiny_checkpoints import bf16, moe_arrays, moe_config, write_checkpoint, write_safetensors

import checkpoints
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError, TypeNotSupported
from quantkit.formats.gguf import open_gguf
from quantkit.kernels import dequantize
from quantkit.pipeline.worker import Worker
from quantkit.quantize import QuantizeOptions, quantize

PRE = ConvertOptions(pre="gpt-2")
PLAIN = QuantizeOptions(no_provenance=True)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "Small-Moe", shards=3)


def values(path: Path, name: str) -> np.ndarray:
    with open_gguf(path) as file:
        info = file.tensors[name]
        return dequantize(file.data(name), info.type, info.shape[0]).reshape(info.shape[::-1])


def test_experts_are_stacked(moe: Path, tmp_path: Path) -> None:
    convert(moe, tmp_path / "x.gguf", None, PRE)
    arrays = moe_arrays()
    with open_gguf(tmp_path / "x.gguf") as file:
        down = file.tensors["blk.1.ffn_down_exps.weight"]
        assert (down.shape, down.type.name) == ((256, 256, 4), "BF16")
        stacked = [arrays[f"model.layers.1.mlp.experts.{e}.down_proj.weight"].tobytes() for e in range(4)]
        assert file.data(down).tobytes() == b"".join(stacked)
        assert file.tensors["blk.0.ffn_gate_inp.weight"].type.name == "F32"
        assert file.get("general.name") == "Small Moe"
        assert file.get("qwen3moe.expert_count") == 4
        assert file.get("tokenizer.ggml.tokens")[-1] == "<|end|>"
        assert file.get("tokenizer.ggml.eos_token_id") == 95
        names = [n for n in file.tensors if n.startswith("blk.0.ffn") and "exps" in n]
        assert names == [f"blk.0.ffn_{w}_exps.weight" for w in ("down", "gate", "up")]


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K_M", "Q6_K"])
@pytest.mark.parametrize("intermediate", ["auto", "f16", "f32"])
def test_one_pass_equals_two_programs(moe: Path, tmp_path: Path, type_name: str, intermediate: str) -> None:
    one, between, two = (tmp_path / name for name in ("one.gguf", "between.gguf", "two.gguf"))
    convert(moe, one, type_name, replace(PRE, intermediate=intermediate), PLAIN)
    convert(moe, between, None, replace(PRE, outtype=intermediate))
    quantize(between, two, type_name, PLAIN)
    assert one.read_bytes() == two.read_bytes()


def test_merged_experts_and_splits(moe: Path, tmp_path: Path) -> None:
    options = replace(PLAIN, merge_up_gate=True, split_max_size="300K")
    one = convert(moe, tmp_path / "one.gguf", "Q4_K_M", PRE, options).paths
    convert(moe, tmp_path / "between.gguf", None, PRE)
    two = quantize(tmp_path / "between.gguf", tmp_path / "two.gguf", "Q4_K_M", options).paths
    assert len(one) == len(two) > 2
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    with open_gguf(one[0]) as file:
        assert file.tensors["blk.0.ffn_gate_up_exps.weight"].shape == (256, 512, 4)


def test_without_an_intermediate_values_are_rounded_once(tmp_path: Path) -> None:
    arrays = {name: (x.astype(np.uint32) << 16).view(np.float32) * 1.001 for name, x in moe_arrays().items()}
    folder = write_checkpoint(tmp_path / "f32", arrays=arrays)
    for intermediate in ("none", "f32", "bf16"):
        out = tmp_path / f"{intermediate}.gguf"
        convert(folder, out, "Q8_0", replace(PRE, intermediate=intermediate), PLAIN)
    tensors = {p: open_gguf(tmp_path / f"{p}.gguf").data("blk.0.attn_q.weight") for p in ("none", "f32", "bf16")}
    assert (tensors["none"] == tensors["f32"]).all()
    assert (tensors["none"] != tensors["bf16"]).any()


def test_memory_and_threads_do_not_matter(moe: Path, tmp_path: Path) -> None:
    outputs = []
    for threads, ram in ((1, "16M"), (3, "512M")):
        out = tmp_path / f"{threads}.gguf"
        convert(moe, out, "Q4_K_M", PRE, PLAIN, threads=threads, max_ram=ram)
        outputs.append(out.read_bytes())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("type_name", [None, "Q4_K_M"])
def test_an_interrupted_run_is_resumed(
    moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_name: str | None
) -> None:
    full, out, jobs = tmp_path / "whole.gguf", tmp_path / "out.gguf", 0
    convert(moe, full, type_name, PRE, PLAIN if type_name else None)
    run = Worker.run

    def stop(self: Worker, job: Any, tensor: Any) -> Any:
        nonlocal jobs
        jobs += 1
        if jobs > 12:
            raise KeyboardInterrupt
        return run(self, job, tensor)

    monkeypatch.setattr(Worker, "run", stop)
    rules = PLAIN if type_name else None
    with pytest.raises(KeyboardInterrupt):
        convert(moe, out, type_name, PRE, rules, threads=1)
    monkeypatch.setattr(Worker, "run", run)
    assert not out.exists()
    result = convert(moe, out, type_name, PRE, rules, resume=True, threads=1)
    assert result.run.resumed > 0
    assert out.read_bytes() == full.read_bytes()


def test_another_source_is_not_resumed(tmp_path: Path) -> None:
    a, b = (write_checkpoint(tmp_path / name / "M", arrays=moe_arrays(i)) for i, name in enumerate("ab"))
    plans = [plan_convert(folder, tmp_path / "x.gguf", None, PRE).fingerprint for folder in (a, b)]
    assert plans[0] != plans[1]


@pytest.mark.parametrize(
    ("options", "n"),
    [
        (replace(PRE, split_max_tensors=10), 3),
        (replace(PRE, split_max_size="1M"), 7),
        (replace(PRE, split_max_tensors=1000, no_tensor_first_split=True), 2),
        (replace(PRE, split_max_tensors=1000), 1),
    ],
)
def test_splits(moe: Path, tmp_path: Path, options: ConvertOptions, n: int) -> None:
    paths = convert(moe, tmp_path / "x.gguf", None, options).paths
    convert(moe, tmp_path / "whole.gguf", None, PRE)
    with open_gguf(paths[0]) as split, open_gguf(tmp_path / "whole.gguf") as full:
        assert len(paths) == n
        assert list(split.tensors) == list(full.tensors)
        assert all(split.data(name).tobytes() == full.data(name).tobytes() for name in full.tensors)
        first = sum(t.shard == 0 for t in split.tensors.values())
        assert (first == 0) == options.no_tensor_first_split


def test_the_name_of_the_output(moe: Path, tmp_path: Path) -> None:
    assert plan_convert(moe, None, None, PRE).shards[0].path == moe / "Small-Moe-4x839K-BF16.gguf"
    assert plan_convert(moe, tmp_path, "Q4_K_M", PRE).shards[0].path == tmp_path / "Small-Moe-4x839K-Q4_K_M.gguf"
    assert plan_convert(moe, tmp_path / "a-{ftype}.gguf", None, PRE).shards[0].path == tmp_path / "a-bf16.gguf"


def write_broken(tmp_path: Path, config: dict[str, Any] | None = None, **arrays: Any) -> Path:
    changed = {k: v for k, v in {**moe_arrays(), **arrays}.items() if v is not None}
    return write_checkpoint(tmp_path / "broken", config, changed)


def test_an_internal_type_is_refused(moe: Path, tmp_path: Path) -> None:
    with refuses(RecipeError, "QK-E203 --outtype q4_0 bf16"):
        plan_convert(moe, tmp_path / "x.gguf", None, replace(PRE, outtype="q4_0"))


_EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("arrays", "refusal"),
    [
        ({"model.more.weight": np.zeros((2, 2), np.uint16)}, "QK-E107 model.more.weight"),
        ({_EXPERT: None}, f"QK-E105 {_EXPERT} num_experts"),
        ({_EXPERT: np.zeros((128, 256), np.uint16)}, f"QK-E106 {_EXPERT}"),
        ({"model.norm.weight": np.zeros((2, 1, 1, 1, 2), np.uint16)}, "QK-E305 model.norm.weight"),
        ({"model.norm.weight": np.zeros((0,), np.uint16)}, "QK-E305 model.norm.weight"),
    ],
)
def test_tensors_of_wrong_shape_are_refused(tmp_path: Path, arrays: dict[str, Any], refusal: str) -> None:
    with refuses(FormatError, refusal, "model.safetensors"):
        plan_convert(write_broken(tmp_path, **arrays), tmp_path / "x.gguf", None, PRE)


def test_nonfinite_values_are_refused(tmp_path: Path) -> None:
    bad = bf16(np.full((256, 256), np.nan, np.float32))
    arrays: dict[str, Any] = {_EXPERT: bad}
    folder = write_broken(tmp_path, None, **arrays)
    for type_name in (None, "Q4_K_M"):
        with refuses(FormatError, "QK-E108 ffn_up_exps"):
            convert(folder, tmp_path / "x.gguf", type_name, PRE)
        assert not list(tmp_path.glob("x.gguf*"))


@pytest.mark.parametrize(
    ("changes", "error", "refusal"),
    [
        ({"architectures": ["Nonsense"]}, TypeNotSupported, "QK-E304 --list"),
        ({"architectures": "Qwen3MoeForCausalLM"}, FormatError, "QK-E112 Qwen3MoeForCausalLM"),
        ({"num_hidden_layers": "2"}, FormatError, "QK-E112 num_hidden_layers"),
        ({"num_hidden_layers": 1 << 30}, FormatError, "QK-E112 config.json"),
        ({"num_experts": None}, FormatError, "QK-E112 moe_num_primary_experts num_local_experts"),
        ({"num_experts": -1}, FormatError, "QK-E112 num_experts"),
        ({"vocab_size": 10}, FormatError, "QK-E112|QK-E114 vocab_size"),
        ({"vocab_size": 1 << 40}, FormatError, "QK-E112|QK-E114 vocab_size"),
        ({"rope_scaling": [1]}, FormatError, "QK-E112 rope_scaling"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": 7}}, FormatError, "QK-E112 mrope_section 7"),
        ({"rms_norm_eps": "small"}, FormatError, "QK-E112 qwen3moe.attention.layer_norm_rms_epsilon FLOAT32"),
        ({"scoring_func": "dice"}, FormatError, "QK-E305 dice"),
        ({"quantization_config": {"quant_method": "magic"}}, TypeNotSupported, "QK-E300 magic"),
    ],
)
def test_inconsistent_configurations_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[QuantkitError], refusal: str
) -> None:
    with refuses(error, refusal) as e:
        plan_convert(write_broken(tmp_path, moe_config(**changes)), tmp_path / "x.gguf", None, PRE)
    assert "config.json" in e.value.message or "tokenizer.json" in e.value.message


@pytest.mark.parametrize(
    ("name", "within", "changes", "refusal"),
    [
        # A stored layer stands for all that predict: a number alone would make a million tensors.
        (
            *("exaone4.5", "text_config", {"mtp_share_layers": True, "num_nextn_predict_layers": 1 << 16}),
            "QK-E112 num_nextn_predict_layers 65536",
        ),
        ("chameleon", "", {"num_attention_heads": (1 << 24) + 1}, "QK-E106 16777217"),
        ("step3p5", "", {"partial_rotary_factors": [4294967296.0, 1.0, 1.0, 0.5, 0.5]}, "QK-E112 4294967296.0"),
        ("dbrx", "ffn_config", {"ffn_hidden_size": "x" * 5000}, "QK-E112 ffn_hidden_size"),
        ("mamba", "", {"intermediate_size": "x" * 5000}, "QK-E305 config.json 64"),
        ("muse-glimmer", "text_config", {"head_dim": (1 << 24) - 1}, "QK-E112 head_dim 16777215 64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_counting_needs_no_memory(
    tmp_path: Path, name: str, within: str, changes: dict[str, Any], refusal: str
) -> None:
    """Found by scripts/fuzz_checkpoint.py --all."""
    checkpoint = checkpoints.write_checkpoint(name, tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    (config[within] if within else config).update(changes)
    (checkpoint / "config.json").write_text(json.dumps(config))
    with refuses(FormatError, refusal) as e:
        plan_convert(checkpoint, tmp_path / "x.gguf", None, PRE)
    assert len(e.value.message) < 500


def test_incompatible_options(moe: Path, tmp_path: Path) -> None:
    for type_name, options, settings in (
        (None, replace(PRE, intermediate="none"), None),
        (None, PRE, QuantizeOptions(pure=True)),
        ("Q4_K_M", replace(PRE, outtype="f16"), None),
        ("Q4_K_M", PRE, QuantizeOptions(keep_split=True)),
    ):
        with pytest.raises(RecipeError):
            plan_convert(moe, tmp_path / "x.gguf", type_name, options, settings)


def test_inputs_are_never_replaced(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        with refuses(ResourceError, "QK-E403"):
            convert(folder, folder / name, None, PRE, overwrite=True)


def test_command_line(moe: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(cli, ["convert", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    rows = [line.split() for line in run("--list").splitlines()]
    assert {name: tuple(row) for name, *row in rows}["Qwen3MoeForCausalLM"] == ("qwen3moe",)
    assert ["InternVisionModel", "internvl"] in rows
    out = tmp_path / "x.gguf"
    plan = json.loads(run(moe, out, "q4_k_m", "--pre", "gpt-2", "--dry-run", "--json"))
    assert not out.exists()
    output = json.loads(run(moe, out, "q4_k_m", "--pre", "gpt-2", "--json"))
    assert plan["files"] == output["files"] == [{"path": str(out), "bytes": out.stat().st_size}]
    run(moe, tmp_path / "y.gguf", "--outtype", "q8_0", "--pre", "gpt-2", "--split-max-size", "1M", "--model-name", "Me")
    with open_gguf(next(tmp_path.glob("y-00001*"))) as file:
        assert file.get("general.name") == "Me"
        assert file.tensors["output.weight"].type.name == "Q8_0"


def test_fused_experts_are_the_same(moe: Path, tmp_path: Path) -> None:
    arrays = moe_arrays()
    for i in range(2):
        p = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            np.stack([arrays.pop(f"{p}{e}.{w}_proj.weight") for e in range(4)]) for w in ("gate", "up", "down")
        )
        arrays |= {f"{p}gate_up_proj": np.concatenate([gate, up], 1), f"{p}down_proj": down}
    fused = write_checkpoint(tmp_path / "fused" / moe.name, arrays=arrays)
    for folder, name in ((moe, "a"), (fused, "b")):
        convert(folder, tmp_path / f"{name}.gguf", None, PRE)
    a, b = (open_gguf(tmp_path / f"{name}.gguf") for name in "ab")
    assert set(a.tensors) == set(b.tensors)
    assert all(a.data(name).tobytes() == b.data(name).tobytes() for name in a.tensors)


def test_a_truncated_file_is_refused(moe: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with refuses(FormatError, "QK-E103 model.safetensors model.layers.1.mlp.experts.3.down_proj.weight"):
        plan_convert(folder, tmp_path / "x.gguf", None, PRE)
    write_safetensors(path, {"model.embed_tokens.weight": np.zeros((96, 256), np.float32)})
    plan = plan_convert(folder, tmp_path / "y.gguf", None, replace(PRE, allow_incomplete=True))
    assert plan.title == "F16"  # nothing is 16 bits wide, and that is the reference's guess


def test_killed_runs_are_resumed(moe: Path, tmp_path: Path) -> None:
    """kill -9 while a process converts, twice; then it ends with the bytes of an undisturbed run."""
    convert(moe, tmp_path / "whole.gguf", "Q4_K_M", PRE, PLAIN)
    out, rng = tmp_path / "out.gguf", random.Random(11)
    command = [sys.executable, "-m", "quantkit", "convert", str(moe), str(out), "Q4_K_M", "--pre", "gpt-2"]
    command += ["--no-provenance", "-j", "1"]
    for resume in ([], ["--resume"]):
        process = subprocess.Popen([*command, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.3, 2))
        process.kill()
        process.wait()
        if out.exists():  # it was faster
            break
    if not out.exists():
        subprocess.run([*command, "--resume"], check=True, capture_output=True)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not list(tmp_path.glob("out.gguf.*"))


def test_tiny_moe_round_trips(tmp_path: Path) -> None:
    """The checkpoint made of tiny-moe's GGUF file converts to its tensors and keys."""
    script, data = (Path(__file__).parents[2] / name for name in ("scripts/make_tiny_checkpoint.py", "tests/data"))
    subprocess.run([sys.executable, str(script), str(tmp_path / "tiny-moe")], check=True)
    convert(tmp_path / "tiny-moe", tmp_path / "x.gguf", None, PRE)
    with open_gguf(tmp_path / "x.gguf") as converted, open_gguf(data / "tiny-moe-bf16.gguf") as file:
        assert set(converted.tensors) == set(file.tensors)
        assert all(converted.data(name).tobytes() == file.data(name).tobytes() for name in file.tensors)
        keys = [key for key in file.fields if key.startswith(("qwen3moe.", "tokenizer."))]
        assert {key: converted.get(key) for key in keys} == {key: file.get(key) for key in keys}
