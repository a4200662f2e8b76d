"""Prediction layers (NextN, MTP): their recorded sums equal those of llama-imatrix --nextn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_delta_net
import test_indexer
import test_mla
import tiny_models
from click.testing import CliRunner
from peer_cache import program_answer
from refusals import refuses
from test_imatrix_collect import StopAfter, spoilt
from test_imatrix_zoo import TEXT, agree, with_tokenizer

from quantkit.cli import cli
from quantkit.errors import QuantkitError, TypeNotSupported
from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.formats.imatrix import read_imatrix
from quantkit.imatrix import ImatrixOptions, imatrix
from quantkit.model.arch import ARCHS
from quantkit.model.engine import load
from quantkit.model.nextn import build_nextn, nextn_layers
from zoo import draw, write_zoo

E, N_CTX = tiny_models.N_EMBD, 32
#: Tensors that a prediction layer may have of its own, or else takes the model's.
HEAD_SHAPES = {"embed_tokens": (E, 128), "shared_head_norm": (E,), "shared_head_head": (E, 128)}
FAMILIES = ("qwen35", "qwen35moe", "qwen3next", "deepseek2", "glm4moe", "deepseek32", "glm-dsa")


def joint(layer: int, n_embd: int, has_head: bool) -> tiny_models.Shapes:
    """Return the additional tensors of a prediction layer."""
    shapes: tiny_models.Shapes = {"eh_proj": (2 * n_embd, n_embd), "enorm": (n_embd,), "hnorm": (n_embd,)}
    if has_head:
        shapes |= {name: (n_embd, *ne[1:]) for name, ne in HEAD_SHAPES.items()}
    return {f"blk.{layer}.nextn.{name}.weight": ne for name, ne in shapes.items()}


def predicting(path: Path, arch: str, has_head: bool) -> Path:
    """Write a small model of an architecture with a prediction layer."""
    if arch == "glm4moe":
        return glm(path, has_head)
    if arch == "deepseek2":
        extra_shapes = test_mla.attention(2, True, True) | tiny_models.experts(2, 8, 32, 32) | joint(2, E, has_head)
        return test_mla.deepseek2(path, {"block_count": 3, "nextn_predict_layers": 1}, extra_shapes=extra_shapes)
    if arch in ("deepseek32", "glm-dsa"):
        extra_shapes = test_indexer.layer(4) | joint(4, E, has_head)
        # llama.cpp's prediction layer sees all keys, ours as many as the model's other layers do.
        changes = {"block_count": 5, "nextn_predict_layers": 1, "attention.indexer.top_k": N_CTX}
        return test_indexer.sparse(path, arch, changes, extra_shapes)
    extra_shapes = {"blk.4.attn_norm.weight": (E,), "blk.4.post_attention_norm.weight": (E,)}
    extra_shapes |= test_delta_net.attention("blk.4.", False) | joint(4, E, has_head)
    if arch == "qwen35":
        extra_shapes |= tiny_models.dense(4)
    else:
        extra_shapes |= tiny_models.experts(4, 8, 32, 40) | {"blk.4.ffn_gate_inp_shexp.weight": (E,)}
    return test_delta_net.qwen(path, arch, {"block_count": 5, "nextn_predict_layers": 1}, extra_shapes=extra_shapes)


def glm(path: Path, has_head: bool) -> Path:
    """Add a layer to the zoo's GLM, with the shapes of its last one."""
    with open_gguf(write_zoo("glm4moe-moe", path.with_suffix(".zoo"))) as source:
        n, n_embd = source.get("glm4moe.block_count"), source.get("glm4moe.embedding_length")
        shapes = {
            name.replace(f"blk.{n - 1}.", f"blk.{n}."): t.shape
            for name, t in source.tensors.items()
            if name.startswith(f"blk.{n - 1}.")
        }
        shapes |= joint(n, n_embd, has_head)
        # With sections llama.cpp's prediction layer, which knows none, ends the program.
        left_out = ("glm4moe.nextn_predict_layers", "glm4moe.rope.dimension_sections")
        fields = [f for key, f in source.fields.items() if key not in left_out]
        fields = [Field.of(f.key, n + 1, f.type) if f.key == "glm4moe.block_count" else f for f in fields]
        f32 = next(iter(source.tensors.values())).type
        data = [(t.name, t.shape, t.type, source.data(t).tobytes()) for t in source.tensors.values()]
        data += [(name, ne, f32, draw(name, ne, 1).tobytes()) for name, ne in shapes.items()]
        write_gguf(path, [*fields, Field.of("glm4moe.nextn_predict_layers", 1)], data)
    return path


def alone(source: Path, target: Path, *, trunk: bool) -> Path:
    """Write a model without its prediction layer, or that layer with what it shares with the model."""
    with open_gguf(source) as model:
        arch, layer = model.get("general.architecture"), f"blk.{nextn_layers(model)[0]}."
        changes = {f"{arch}.block_count": int(layer[4:-1]), f"{arch}.nextn_predict_layers": 0} if trunk else {}
        fields = [Field.of(key, changes[key], f.type) if key in changes else f for key, f in model.fields.items()]
        names = [n for n in model.tensors if not n.startswith("blk.") or n.startswith(layer) is not trunk]
        data = [(n, model.tensors[n].shape, model.tensors[n].type, model.data(n).tobytes()) for n in names]
        write_gguf(target, fields, data)
    return target


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_weight_of_a_prediction_layer_gets_an_entry(arch: str, tmp_path: Path) -> None:
    path, tokens = predicting(tmp_path / "model.gguf", arch, has_head=True), tiny_models.ids(4 * N_CTX)
    run: dict[str, Any] = {"tokens": tokens, "kv_type": "f32"}
    options = ImatrixOptions(n_ctx=N_CTX, n_batch=2 * N_CTX, overwrite=True)
    without = imatrix(path, (), tmp_path / "out.gguf", options=options, **run)
    assert without.coverage is not None
    assert any("use --nextn to record it" in note for note in without.notes)
    assert without.coverage.missing
    assert all(".nextn." in t.name or int(t.name.split(".")[1]) for t in without.coverage.missing)
    nextn = ImatrixOptions(n_ctx=N_CTX, n_batch=2 * N_CTX, overwrite=True, nextn=True)
    outcome = imatrix(path, (), tmp_path / "out.gguf", options=nextn, **run)
    assert outcome.coverage is not None
    assert not outcome.coverage.missing
    matrix = read_imatrix(tmp_path / "out.gguf")
    assert matrix.n_layer_nextn == 1
    assert matrix.entries.keys() - {t.name for t in without.coverage.missing} >= without.imatrix.entries.keys()  # type: ignore[union-attr]
    for name, entry in without.imatrix.entries.items():  # type: ignore[union-attr]
        assert np.array_equal(entry.sums, matrix.entries[name].sums), name
    head = next(e for name, e in matrix.entries.items() if "shared_head_head" in name)
    assert head.counts == [4 * (N_CTX - 1)]


def test_batches_below_a_chunk_and_threads_change_nothing(tmp_path: Path) -> None:
    path, tokens, outcome = (
        predicting(tmp_path / "model.gguf", "qwen35", has_head=False),
        tiny_models.ids(4 * N_CTX),
        [],
    )
    for n_batch, threads in ((N_CTX, 1), (4 * N_CTX, 2), (16, 2)):
        options = ImatrixOptions(n_ctx=N_CTX, n_batch=n_batch, nextn=True, overwrite=True)
        result = imatrix(path, (), tmp_path / "o.gguf", tokens=tokens, options=options, threads=threads, kv_type="f32")
        assert result.imatrix is not None
        outcome.append(result.imatrix.entries)
    for name, entry in outcome[0].items():
        for repeat in outcome[1:]:
            assert np.array_equal(entry.counts, repeat[name].counts)
            np.testing.assert_allclose(entry.sums, repeat[name].sums, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_resumed_run_and_one_without_a_bad_chunk_make_the_same_file(tmp_path: Path) -> None:
    path, tokens = predicting(tmp_path / "model.gguf", "glm4moe", has_head=False), tiny_models.ids(6 * N_CTX)
    bad = spoilt(path, tmp_path / "bad.gguf", "blk.2.nextn.hnorm.weight", 0, 1.0)  # the same, but another file
    run: dict[str, Any] = {"kv_type": "f32"}
    options = ImatrixOptions(n_ctx=N_CTX, n_batch=N_CTX, nextn=True, output_frequency=2)
    imatrix(path, (), tmp_path / "whole.gguf", tokens=tokens, options=options, **run)
    out = tmp_path / "out.gguf"
    with pytest.raises(KeyboardInterrupt):
        imatrix(path, (), out, tokens=tokens, options=options, watcher=StopAfter(5), **run)
    with refuses(QuantkitError, "QK-E409 out.gguf.state --overwrite --resume"):
        imatrix(bad, (), out, tokens=tokens, options=replace(options, resume=True), **run)
    imatrix(path, (), out, tokens=tokens, options=replace(options, resume=True), **run)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_a_chunk_that_fails_in_the_prediction_layer_is_skipped(tmp_path: Path) -> None:
    path, tokens = predicting(tmp_path / "model.gguf", "qwen35", has_head=True), tiny_models.ids(6 * N_CTX)
    tokens[tokens == 120] = 1
    tokens[3 * N_CTX + 5] = 120
    bad = spoilt(path, tmp_path / "bad.gguf", "blk.4.nextn.embed_tokens.weight", 120, np.nan)
    options = ImatrixOptions(n_ctx=N_CTX, n_batch=2 * N_CTX, nextn=True)
    outcome = imatrix(bad, (), tmp_path / "o.gguf", tokens=tokens, options=options)
    assert outcome.dropped == {3: "the input of blk.4.nextn.eh_proj.weight at position 5"}
    assert outcome.n_chunks == 5


@pytest.mark.peer
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("arch", FAMILIES)
def test_sums_are_those_of_llama_imatrix(arch: str, has_head: bool, tmp_path: Path, llama_bin: Path) -> None:
    model = with_tokenizer(predicting(tmp_path / "plain.gguf", arch, has_head), tmp_path / "model.gguf")
    (tmp_path / "text.txt").write_text(TEXT)
    expected = llama_imatrix(llama_bin, tmp_path, "-m", model, "--nextn")
    options = ImatrixOptions(n_ctx=N_CTX, n_batch=2 * N_CTX, nextn=True, process_output=True)
    if (arch, has_head) == ("qwen3next", False):
        # No row of it is an output then, and llama.cpp's Qwen3-Next continues with outputs only: no token for experts.
        expected.entries = {name: entry for name, entry in expected.entries.items() if entry.counts.any()}
        assert not any(name.startswith("blk.4.ffn_down") for name in expected.entries)
    compare(
        imatrix(model, [tmp_path / "text.txt"], tmp_path / "o.gguf", options=options, kv_type="f32").imatrix, expected
    )


@pytest.mark.peer
def test_a_prediction_layer_in_a_separate_file(tmp_path: Path, llama_bin: Path) -> None:
    full = with_tokenizer(predicting(tmp_path / "plain.gguf", "qwen35", True), tmp_path / "whole.gguf")
    trunk, draft = alone(full, tmp_path / "t.gguf", trunk=True), alone(full, tmp_path / "d.gguf", trunk=False)
    (tmp_path / "text.txt").write_text(TEXT)
    expected = llama_imatrix(llama_bin, tmp_path, "-m", trunk, "-md", draft)
    result = quantkit("-m", trunk, "-md", draft, "-f", tmp_path / "text.txt", "-o", tmp_path / "o.gguf", *NUMBERS)
    assert result.exit_code == 0, result.output
    assert "names no weight" not in result.output
    compare(read_imatrix(tmp_path / "o.gguf"), expected)
    for arguments, words in (
        (["-m", draft], "contains only a prediction layer"),
        (["-m", trunk, "-md", trunk], "-md needs a file that contains only a prediction layer"),
        (["-m", full, "-md", draft], "has its own prediction layer"),
    ):
        refused = quantkit(*arguments, "--nextn", "-f", tmp_path / "text.txt", "-o", tmp_path / "x.gguf", *NUMBERS)
        assert refused.exit_code != 0
        assert words in refused.output


NUMBERS = ("-c", N_CTX, "-b", N_CTX, "-t", 1, "-ctk", "f32", "--process-output")


def quantkit(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["imatrix", *map(str, arguments)])


def llama_imatrix(program: Path, folder: Path, *arguments: object) -> Any:
    out = folder / "theirs.gguf"
    command = [program / "llama-imatrix", "-f", folder / "text.txt", "-o", out, *arguments, *NUMBERS]
    command += ["-ctv", "f32", "-fa", "off"]
    output = program_answer(command, [out])
    assert output.code == 0, output.text[-4000:]
    return read_imatrix(out)


def compare(actual: Any, expected: Any) -> None:
    assert actual.n_layer_nextn == expected.n_layer_nextn == 1
    assert any(".nextn.eh_proj" in name for name in expected.entries)
    assert not expected.entries.keys() - actual.entries.keys()
    for name, entry in expected.entries.items():
        agree(name, actual.entries[name], entry, 1)


# ---------------------------------------------------------------- what cannot be


def test_an_unknown_prediction_layer_is_refused(tmp_path: Path) -> None:
    path = predicting(tmp_path / "model.gguf", "qwen35", has_head=False)
    for changes, refusal in (
        ({"qwen35.nextn_predict_layers": 2, "qwen35.block_count": 6}, "QK-E306 2"),
        ({"general.architecture": "qwen3"}, "QK-E306 bad.gguf"),
    ):
        with open_gguf(path) as source:
            fields = [Field.of(k, changes[k], f.type) if k in changes else f for k, f in source.fields.items()]
            if "general.architecture" in changes:
                fields = [replaced(f) for f in fields]
            data = [(t.name, t.shape, t.type, source.data(t).tobytes()) for t in source.tensors.values()]
        shapes = {"blk.5.nextn.enorm.weight": (E,)}
        data += [(name, ne, data[0][2], draw(name, ne, 1).tobytes()) for name, ne in shapes.items()]
        write_gguf(tmp_path / "bad.gguf", fields, data)
        with refuses(TypeNotSupported, refusal):
            load(tmp_path / "bad.gguf", build=build_nextn)


def replaced(field: Field) -> Field:
    """Return a field under another architecture's name."""
    return Field.of(field.key.replace("qwen35.", "qwen3."), field.value, field.type, field.item_type)


def test_a_model_without_one_gets_a_note(tmp_path: Path) -> None:
    model = test_delta_net.qwen(tmp_path / "m.gguf", "qwen35")
    options = ImatrixOptions(n_ctx=N_CTX, nextn=True)
    outcome = imatrix(model, (), tmp_path / "o.gguf", tokens=tiny_models.ids(2 * N_CTX), options=options)
    assert any("has no prediction layer" in note for note in outcome.notes)
    with refuses(QuantkitError, "QK-E105 m.gguf"):
        imatrix(model, (), tmp_path / "p.gguf", tokens=tiny_models.ids(64), draft=model, options=options)


def test_all_architectures_with_prediction_layers_are_tested() -> None:
    assert {name for name, arch in ARCHS.items() if arch.nextn} == set(FAMILIES)
