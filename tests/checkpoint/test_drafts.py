"""Draft models are converted beside their targets to the bytes of convert_hf_to_gguf.py --target-model-dir."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from refusals import check_refused, refuses

import checkpoints
import zoo
from gguf_digests import differences, digests
from hidden_states import reads_hidden_states
from libllama import Libllama
from quantkit.checkpoint.draft import HIDDEN_STATES, LAST_HIDDEN_STATES
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.errors import FormatError, QuantkitError, TypeNotSupported
from quantkit.export import export
from quantkit.formats.gguf import open_gguf
from quantkit.inspect import inspect
from quantkit.lora import convert_lora
from quantkit.pipeline.runtimes import runtimes
from quantkit.quantize import QuantizeOptions, quantize

pytestmark = pytest.mark.usefixtures("services_in_process")

EXPECTED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/draft-sha256.json").read_text())
OUTTYPES = ("f32", "f16", "bf16", "q8_0", "auto")
CONVERTED = [name for name, row in EXPECTED.items() if "error" not in row["f32"]]
#: A draft of each architecture and kind, and Q4_K_M's fallbacks of narrow rows.
KINDS = {
    "eagle3": "EAGLE-3",
    "dflash-mask": "DFlash",
    "dflash2": "DFlash 2",
    "dspark-draft": "DSpark",
    "dspark-deepseek-v4": "DSpark",
}
_LAST = r"reads the output of layer \d+, the last of its target"
#: Drafts of which llama.cpp stops beside their targets: these have no hidden states, or not those after the last layer.
ABORTS = {
    **dict.fromkeys(
        ("dflash", "dflash2", "muse-glimmer-draft", "dspark-draft", "dspark-gemma4", "dspark-qwen3"), [_LAST]
    ),
    **dict.fromkeys(("eagle3-speculator", "dflash-mrope", "dspark-speculator"), ["reads no hidden states of qwen3vl"]),
}
#: Models of the zoo whose hidden states llama.cpp reads.
TARGETS = (
    *("bailingmoe3-moe", "deepseek4-moe", "gemma4-dense", "gpt-oss-moe", "hunyuan_vl-dense", "lfm2-dense"),
    *("lfm2moe-moe", "llama-dense", "mimo2-moe", "minimax-01-moe", "minimax-m2-moe", "muse-glimmer-dense"),
    *("nemotron_h-dense", "nemotron_h_moe-moe", "qwen3-dense", "qwen35moe-moe", "qwen3moe-moe", "qwen3next-moe"),
)
#: Targets of the tests whose own context llama.cpp cannot create (a division by 0), and others of the same width.
_STAND_INS = {"deepseek-v4": "maincoder"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


def options_of(name: str, folder: Path, **changes: Any) -> tuple[Path, ConvertOptions]:
    """Return a draft's checkpoint, and the options of its conversion beside its target."""
    description = checkpoints.describe(name)
    settings = description.convert_keywords()
    if description.target is not None:
        settings["target_model_dir"] = checkpoint(description.target, folder)
        settings["pre"] = checkpoints.describe(description.target).vocab.get("pre")
    return checkpoint(name, folder), ConvertOptions(**settings | changes)


@functools.cache
def checkpoint(name: str, folder: Path) -> Path:
    return checkpoints.write_checkpoint(name, folder)


@functools.cache
def converted(name: str, folder: Path) -> Path:
    """Return the file of a checkpoint in the type that is stored."""
    source, options = options_of(name, folder)
    return convert(source, folder / f"{name}.gguf", None, options).paths[0]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_bytes_are_the_references(name: str, folder: Path, tmp_path: Path) -> None:
    row, wrong = EXPECTED[name], {}
    for outtype in OUTTYPES:
        source, options = options_of(name, folder, outtype=outtype)
        if "error" in row[outtype]:
            with pytest.raises(QuantkitError) as raised:
                plan_convert(source, tmp_path, None, options)
            assert raised.value.code == "QK-E215"
            continue
        (path,) = convert(source, tmp_path, None, options, overwrite=True).paths
        with open_gguf(path) as file:
            difference = differences(row[outtype], digests(path), list(file.tensors))
        if difference or path.name != row[outtype]["file"]:
            wrong[outtype] = difference or path.name
    assert wrong == {}


@pytest.mark.parametrize("name", [name for name in KINDS if name != "dspark-deepseek-v4"])  # it is quantized already
def test_one_pass_quantizes_like_two(name: str, folder: Path, tmp_path: Path) -> None:
    source, options = options_of(name, folder)
    (two,) = quantize(converted(name, folder), tmp_path / "two.gguf", "Q4_K_M").paths
    (one,) = convert(source, tmp_path / "one.gguf", "Q4_K_M", options).paths
    assert [digests(one)[key] for key in ("infos", "tensors")] == [digests(two)[key] for key in ("infos", "tensors")]


@pytest.mark.peer
@pytest.mark.parametrize("name", KINDS)
def test_quantized_bytes_are_those_of_llama_quantize(name: str, folder: Path, tmp_path: Path, llama_bin: Path) -> None:
    source, out = converted(name, folder), tmp_path / "theirs.gguf"
    command = [llama_bin / "llama-quantize", "--allow-requantize", source, out, "Q4_K_M", "1"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"LD_LIBRARY_PATH": str(llama_bin)})
    (path,) = quantize(source, tmp_path / "ours.gguf", "Q4_K_M", QuantizeOptions(allow_requantize=True)).paths
    assert [digests(path)[key] for key in ("infos", "tensors")] == [digests(out)[key] for key in ("infos", "tensors")]
    target = checkpoints.describe(name).target or ""
    target_file = converted(_STAND_INS.get(target, target), folder)
    assert Libllama(llama_bin).load(path, target=target_file).runs


@pytest.mark.peer
@pytest.mark.parametrize("name", CONVERTED)
def test_a_draft_loads_beside_its_target(name: str, folder: Path, llama_bin: Path) -> None:
    """As llama-server opens them; the verdict of quantkit is the library's."""
    path, target = converted(name, folder), checkpoints.describe(name).target or ""
    target_file = converted(_STAND_INS.get(target, target), folder)
    loading = Libllama(llama_bin).load(path, target=target_file)
    assert (loading.loads, loading.runs) == (True, True), loading.complaint
    with open_gguf(path) as file:
        mainline, _ = runtimes(file.fields, [(t.name, t.type, t.shape) for t in file.tensors.values()])
    assert (mainline.loads, mainline.draft) == (True, True), mainline.problems


@pytest.mark.parametrize("name", CONVERTED)
def test_a_target_without_hidden_states_is_noted(name: str, folder: Path, tmp_path: Path) -> None:
    """llama-speculative-simple of b11434 aborts for these with "layer input tensor is null", and drafts for others."""
    source, options = options_of(name, folder)
    notes = [note for note in plan_convert(source, tmp_path, None, options).notes if "llama.cpp b11434" in note]
    patterns = ABORTS.get(name, [])
    assert len(notes) == len(patterns)
    assert all(re.search(pattern, note) for pattern, note in zip(patterns, notes, strict=True))


@pytest.mark.peer
@pytest.mark.parametrize("name", [*TARGETS, "gemma3-dense", "glm4-dense", "qwen2-dense", "qwen3vl-dense"])
def test_targets_are_those_of_llama_cpp(name: str, tmp_path: Path, llama_bin: Path) -> None:
    """The hidden states before the first layer, and after the last."""
    model = zoo.write_zoo(name, tmp_path / "model.gguf")
    with open_gguf(model) as file:
        arch = file.get("general.architecture")
        last = file.get(f"{arch}.block_count") - (file.get(f"{arch}.nextn_predict_layers") or 0)
    states = [reads_hidden_states(llama_bin, model, layer) for layer in (0, last)]
    assert states == [arch in HIDDEN_STATES, arch in LAST_HIDDEN_STATES]


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_inspect_shows_the_draft_and_its_target(name: str, kind: str, folder: Path) -> None:
    facts = {fact.label: fact for fact in inspect(converted(name, folder)).facts}
    config = checkpoints.describe(name).config
    assert facts["draft model"].value == kind
    assert facts["target embedding length"].value == (256 if name == "eagle3" else 64)
    layers = [layer for layer, _ in facts["target layers"].counts]
    settings = config.get("dflash_config", {})
    ids = settings.get("target_layer_ids") or config.get("dspark_target_layer_ids")
    assert layers == ([2, 1, 0] if ids is None else [layer + 1 for layer in ids])
    assert ("draft vocabulary" in facts) == ("draft_vocab_size" in config)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_the_engine_refuses_a_draft(folder: Path) -> None:
    text = folder / "text.txt"
    text.write_text("a text " * 99)
    result = run("perplexity", "-m", converted("dflash", folder), "-f", text)
    assert result.exit_code == 1
    check_refused(result.output, "QK-E306 dflash")


@pytest.mark.parametrize("name", ["eagle3", "dflash2", "dspark-draft"])
def test_a_draft_is_not_exported(name: str, folder: Path, tmp_path: Path) -> None:
    with refuses(TypeNotSupported, "QK-E304", "draft", "target"):
        export(converted(name, folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["eagle3", "dflash2", "dspark-draft"])
def test_a_lora_adapter_of_a_draft_is_merged(name: str, folder: Path, tmp_path: Path) -> None:
    """Into its checkpoint while that is converted, and as a GGUF file of its own."""
    source, options = options_of(name, folder, outtype="f32")
    module = next(x for x, _ in checkpoints.expand(checkpoints.describe(name).tensors) if "down_proj" in x)
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype("<f4") for shape in ((4, 128), (64, 4)))
    (adapter := tmp_path / "adapter").mkdir()
    factors = [
        (module.replace("weight", f"lora_{letter}.weight"), "F32", x.shape, x.tobytes())
        for letter, x in (("A", a), ("B", b))
    ]
    checkpoints.write_safetensors(adapter / "adapter_model.safetensors", factors)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    convert_lora(adapter, tmp_path / "lora.gguf", base=source)
    (plain,) = convert(source, tmp_path / "plain.gguf", None, options).paths
    (merged,) = convert(source, tmp_path / "merged.gguf", None, replace(options, merge_lora=(str(adapter),))).paths
    weight = "blk.0.ffn_down.weight"
    with open_gguf(plain) as before, open_gguf(merged) as after, open_gguf(tmp_path / "lora.gguf") as lora:
        assert set(lora.tensors) == {f"{weight}.lora_a", f"{weight}.lora_b"}
        assert [x for x in before.tensors if not np.array_equal(before.data(x), after.data(x))] == [weight]
        old, new = (file.data(weight).view("<f4").reshape(64, 128) for file in (before, after))
        np.testing.assert_allclose(new - old, 2 * b @ a, atol=2e-6)


def test_a_target_is_needed_by_drafts_alone(folder: Path, tmp_path: Path) -> None:
    draft, target, out = checkpoint("eagle3", folder), checkpoint("llama", folder), tmp_path / "x.gguf"
    check_refused(run("convert", draft, out).output, "QK-E215 --target-model-dir LlamaForCausalLMEagle3")
    check_refused(run("convert", target, out, "--target-model-dir", target).output, "QK-E215 --target-model-dir")
    check_refused(run("convert", target, out, "--dspark").output, "QK-E206 --dspark")
    check_refused(run("convert", draft, out, "--mtp", "--dspark").output, "QK-E201 --mtp --dspark")
    check_refused(run("convert", draft, out, "--target-model-dir", tmp_path / "no").output, "QK-E401")
    check_refused(run("convert", draft, out, "--target-model-dir", tmp_path).output, "QK-E101")
    drafts = ("--target-model-dir", checkpoint("dflash", folder))
    check_refused(run("convert", checkpoint("dflash", folder), out, *drafts).output, "QK-E207 DFlashDraftModel")
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "config", "target", "refusal"),
    [
        ("dflash", {}, {"num_hidden_layers": 1}, "QK-E207 2 1"),
        ("dflash", {}, {"hidden_size": 96}, "QK-E207 128 96"),
        ("eagle3-draft", {}, {"num_hidden_layers": 2}, "QK-E207 -1 2"),
        ("eagle3-draft", {}, {"vocab_size": 320}, "QK-E207 320"),
        ("eagle3-draft", {"num_hidden_layers": 2}, {}, "QK-E112 2"),
        ("eagle3-draft", {"draft_vocab_size": 99}, {}, "QK-E106 99 320"),
        ("dspark-qwen3", {"markov_head_type": "gated"}, {}, "QK-E305 gated"),
        ("dspark-qwen3", {"draft_vocab_size": 641}, {}, "QK-E112 641 640"),
        ("dspark-qwen3", {"draft_vocab_size": 320}, {}, "QK-E105 320 d2t"),
        ("dspark-gemma4", {"attention_k_eq_v": False}, {}, "QK-E305 attention_k_eq_v"),
        ("dspark-gemma4", {"layer_types": ["full_attention", "sliding_attention"]}, {}, "QK-E305 layer_types"),
        ("dspark-gemma4", {"rope_parameters": {"rope_type": "yarn"}}, {}, "QK-E305 rope_parameters"),
        ("dflash-mask", {"dflash_config": {"mask_token_id": 13, "target_layer_ids": [0, 2]}}, {}, "QK-E207 12 13"),
    ],
)
def test_what_no_runtime_runs_is_refused(
    name: str, config: dict[str, Any], target: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    draft = checkpoints.describe(name)
    assert draft.target is not None
    of_target = checkpoints.describe(draft.target)
    text = {**of_target.config.get("text_config", {}), **target}
    changed = of_target.config | target | ({"text_config": text} if "text_config" in of_target.config else {})
    folder = checkpoints.write_description(replace(of_target, name="target", config=changed), tmp_path)
    source = checkpoints.write_description(replace(draft, config=draft.config | config), tmp_path)
    pre = of_target.vocab.get("pre")
    settings = ConvertOptions(target_model_dir=folder, pre=pre, allow_other_ids=True)
    with refuses(QuantkitError, refusal):
        plan_convert(source, tmp_path / "x.gguf", None, settings)


def test_a_mask_may_be_in_any_shard_of_a_tied_target(folder: Path, tmp_path: Path) -> None:
    """The embeddings of the target are also its head, except the row of masks."""
    source, options = options_of("dflash-mask", folder, outtype="f32")
    description = checkpoints.describe("mimo-v2")
    config = description.config | {"tie_word_embeddings": True}
    target = checkpoints.write_description(replace(description, config=config, shards=3), tmp_path)
    (path,) = convert(source, tmp_path / "x.gguf", None, replace(options, target_model_dir=target)).paths
    with open_gguf(path) as file:
        data = [np.empty(file.tensors[name].nbytes, np.uint8) for name in ("token_embd.weight", "output.weight")]
        for out, name in zip(data, ("token_embd.weight", "output.weight"), strict=True):
            file.read(file.tensors[name], out, 0)
    embeddings, head = (out.view(np.float32).reshape(640, 64) for out in data)
    assert np.flatnonzero((embeddings != head).any(axis=1)).tolist() == [12]


def test_a_damaged_mask_is_an_error(folder: Path, tmp_path: Path) -> None:
    source, options = options_of("dflash-mask", folder)
    copy = Path(shutil.copytree(source, tmp_path / "draft"))
    mask = copy / "mask_embedding.pt"
    mask.write_bytes(mask.read_bytes()[:-99])
    with refuses(FormatError, "QK-E110", mask):
        plan_convert(copy, tmp_path / "x.gguf", None, options)
