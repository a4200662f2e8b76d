"""A researcher's own type, of neither tree: what CONTRIBUTING.md says makes it, and no runtime is said to load it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from refusals import refuses

from quantkit.cli import cli
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import TensorInfo, open_gguf
from quantkit.kernels import formats, reference
from quantkit.kernels.cpu.encode import legacy as encoders
from quantkit.kernels.cpu.unpack import legacy as unpackers
from quantkit.kernels.cuda.encode.pipeline import can_decode, can_encode
from quantkit.model.backends.cuda.weights import Weights
from quantkit.pipeline.presets import preset_by_name
from quantkit.types import BY_ID, BY_NAME, OWN_IDS, TensorType
from small_models import llama_tensors, write_model


@pytest.fixture
def own_type(monkeypatch: pytest.MonkeyPatch) -> TensorType:
    """Register a type with the blocks of Q4_0, in the places that CONTRIBUTING.md names, but for CUDA."""
    t = TensorType(OWN_IDS[0], "R4_0", "r4_0", 32, 18, 0, 1, "legacy", "none", "used", "", "f16@0")
    monkeypatch.setitem(BY_NAME, t.name, t)
    monkeypatch.setitem(BY_ID, t.id, t)
    monkeypatch.setitem(formats.FORMATS, t.name, formats.Format(t, "legacy", "q8_0"))
    for module, verb in ((reference, "decode"), (encoders, "encode"), (unpackers, "unpack")):
        monkeypatch.setattr(module, f"{verb}_r4_0", getattr(module, f"{verb}_q4_0"), raising=False)
    return t


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("rules", [(), ("--rules", "ik")], ids=["", "ik"])
def test_no_runtime_loads_it(own_type: TensorType, tmp_path: Path, rules: tuple[str, ...]) -> None:
    source, out, twin = write_model(tmp_path / "s.gguf", llama_tensors(1)), tmp_path / "o.gguf", tmp_path / "t.gguf"
    output = json.loads(run("quantize", "--json", *rules, source, out, own_type))
    assert any("R4_0" in note and "no runtime" in note for note in output["notes"])
    summary = json.loads(run("inspect", "--json", out))
    for runtimes in (output["runtimes"], summary["runtimes"]):
        assert {name: verdict["loads"] for name, verdict in runtimes.items()} == {
            "llama.cpp": False,
            "ik_llama.cpp": False,
        }
        assert {tuple(verdict["unknown_types"]) for verdict in runtimes.values()} == {("R4_0",)}
    run("quantize", *rules, source, twin, "--pure", "Q4_0")
    with open_gguf(out) as file, open_gguf(twin) as twin_file:
        name = "blk.0.ffn_down.weight"
        assert file.tensors[name].type is own_type
        assert bytes(file.data(file.tensors[name])) == bytes(twin_file.data(twin_file.tensors[name]))


def test_it_belongs_to_no_project(own_type: TensorType) -> None:
    assert not own_type.is_in("mainline")
    assert not own_type.is_in("ik")
    assert preset_by_name("r4_0", "ik").base is own_type


def test_without_a_cuda_kernel_the_cpu_encodes_it(own_type: TensorType) -> None:
    assert not can_decode(own_type)
    assert not can_encode(own_type)


def test_gpus_refuse_it_in_a_model(own_type: TensorType) -> None:
    with refuses(TypeNotSupported, "QK-E302 CUDA"):
        Weights(None, None, None).place([_Op(TensorInfo("blk.0.attn_q.weight", (32, 1), own_type, 18, 0, 0))])  # type: ignore[arg-type,list-item]


class _Op:
    """An operation with one matrix."""

    def __init__(self, tensor: object) -> None:
        self.tensor = tensor

    def matrices(self) -> list[_Op]:
        return [self]
