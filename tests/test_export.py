"""The verb export: converted again, what it writes is the same model; what it cannot say is refused."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_tensor_scale as i2_s
from drawn_checkpoints import write_checkpoint

import checkpoints
from quantkit.checkpoint.back import open_export
from quantkit.checkpoint.back.encoded import encoded_tensors
from quantkit.checkpoint.expressions import read_f32
from quantkit.checkpoint.expressions import size_of as size_of_tensor
from quantkit.convert import ConvertOptions, convert
from quantkit.errors import FormatError, QuantkitError, ResourceError, TypeNotSupported
from quantkit.export import ExportOptions, export, plan_export
from quantkit.formats.gguf import Field, open_gguf
from quantkit.formats.safetensors import read_checkpoint
from quantkit.kernels import dequantize
from quantkit.pipeline.planned import PlannedTensor
from quantkit.quantize import QuantizeOptions, quantize, size_of

PRE = ConvertOptions(pre="gpt-2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    convert(write_checkpoint(folder / "Small-Moe", shards=3), folder / "x.gguf", None, PRE)
    return folder / "x.gguf"


@pytest.mark.parametrize("max_shard_size", ["5GB", "300K"])
def test_there_and_back(model: Path, tmp_path: Path, max_shard_size: str) -> None:
    export(model, tmp_path / "back", ExportOptions(max_shard_size=max_shard_size))
    convert(tmp_path / "back", tmp_path / "y.gguf", None, PRE)
    with open_gguf(model) as a, open_gguf(tmp_path / "y.gguf") as b:
        assert a.tensors.keys() == b.tensors.keys()
        for name, t in a.tensors.items():
            assert (t.type, t.shape) == (b.tensors[name].type, b.tensors[name].shape)
            assert a.data(name).tobytes() == b.data(name).tobytes()
        own = [key for key in a.fields if not key.startswith("general.")]
        assert {key: a.fields[key].encode() for key in own} == {key: b.fields[key].encode() for key in own}


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K_M", "Q4_0_R8", "IQ4_XS", "IQ4_K", "MXFP4", "NVFP4", "TQ2_0"])
def test_quantized_values_are_decoded(model: Path, tmp_path: Path, type_name: str) -> None:
    quantize(model, tmp_path / "q.gguf", type_name, QuantizeOptions(no_provenance=True))
    export(tmp_path / "q.gguf", tmp_path / "back", ExportOptions(outtype="f32"))
    convert(tmp_path / "back", tmp_path / "y.gguf", None, ConvertOptions(pre="gpt-2", outtype="f32"))
    with open_gguf(tmp_path / "q.gguf") as a, open_gguf(tmp_path / "y.gguf") as b:
        for name, t in a.tensors.items():
            rows = a.data(name).reshape(-1, t.type.row_bytes(t.shape[0]))
            values = dequantize(rows, t.type, t.shape[0]).reshape(-1)
            assert np.array_equal(values, b.data(name).view(np.float32)), name


def test_memory_threads_and_shards_do_not_matter(model: Path, tmp_path: Path) -> None:
    for no, ram in enumerate(("16M", "512M")):
        export(model, tmp_path / str(no), max_ram=ram, threads=1 + no)
    assert (tmp_path / "0/model.safetensors").read_bytes() == (tmp_path / "1/model.safetensors").read_bytes()
    assert len(read_checkpoint(tmp_path / "0")) == 1


def test_what_is_there_is_kept(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "back")
    with pytest.raises(ResourceError, match="overwrite"):
        export(model, tmp_path / "back")
    export(model, tmp_path / "back", overwrite=True)
    (tmp_path / "back/model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ResourceError, match="would be taken for it"):
        export(model, tmp_path / "back", overwrite=True)


class Stopping:
    """An observer that ends a run when some tensors are written."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.kept = 0

    def resumed(self, tensors: int, nbytes: int) -> None:
        self.kept = tensors

    def wrote(self, nbytes: int) -> None:
        pass

    def finished(self, tensor: PlannedTensor) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_a_run_that_was_ended_goes_on(model: Path, tmp_path: Path) -> None:
    """Nothing is under a final name until all is written; --resume ends with the bytes of an undisturbed run."""
    options = ExportOptions(max_shard_size="600K")
    export(model, tmp_path / "whole", options)
    with pytest.raises(KeyboardInterrupt):
        export(model, tmp_path / "back", options, threads=1, observer=Stopping(20))
    assert not [p for p in (tmp_path / "back").iterdir() if p.suffix in (".json", ".safetensors")]
    with pytest.raises(ResourceError, match="--resume"):
        export(model, tmp_path / "back", options)
    went_on = Stopping(0)
    export(model, tmp_path / "back", options, resume=True, observer=went_on)
    assert went_on.kept > 0
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    assert all((tmp_path / "back" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)


class Killed(BaseException):
    """Ends a run as SIGKILL does, as far as files are concerned: nothing that is renamed is renamed any more."""


@pytest.mark.parametrize("replaces", [False, True])
def test_a_run_that_is_killed_while_files_get_their_names(
    replaces: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under a final name is whole, config.json is never beside other weights, and --resume ends the run."""
    options, folder = ExportOptions(max_shard_size="1500K"), tmp_path / "back"
    export(model, tmp_path / "whole", options)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    other = ExportOptions(max_shard_size="1500K", outtype="f16")
    rename = Path.replace
    for number in range(len(whole)):
        shutil.rmtree(folder, ignore_errors=True)
        old = {}
        if replaces:
            export(model, folder, other)
            old = {path.name: path.read_bytes() for path in folder.iterdir()}
            assert old.keys() == whole.keys()
        left = [number]

        def stopping(path: Path, target: Path, left: list[int] = left) -> Path:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return rename(path, target)

        monkeypatch.setattr(Path, "replace", stopping)
        with pytest.raises(Killed):
            export(model, folder, options, overwrite=replaces)
        monkeypatch.undo()
        there = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in whole}
        assert all(data in (whole[name], old.get(name)) for name, data in there.items())
        if "config.json" in there:
            weights = [name for name in whole if name.endswith(".safetensors")]
            assert all(there[name] == whole[name] for name in weights)
        export(model, folder, options, resume=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_a_disk_on_which_only_the_weights_have_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_export(model, tmp_path / "back")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=planned.plan.nbytes + 100))
    with pytest.raises(ResourceError, match="are needed and .* are free"):
        export(model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_directory_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no such directory; make it first"):
        export(model, tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="is no directory"):
        export(model, tmp_path / "file")


def test_what_lies_beside_the_file_does_not_matter(model: Path, tmp_path: Path) -> None:
    """The way here reads tokenizer.json and modules.json beside config.json: those that are written, not others."""
    shutil.copy(model, tmp_path / "x.gguf")
    for name in ("tokenizer.json", "modules.json", "config.json"):
        (tmp_path / name).write_text("nonsense")
    export(tmp_path / "x.gguf", tmp_path / "back")


def test_how_tokens_become_one_embedding_is_written(model: Path, tmp_path: Path) -> None:
    """A model for embeddings brings the files of sentence-transformers, and converted again has its key."""
    drawn = checkpoints.write_checkpoint("bert", tmp_path / "drawn")
    own = ConvertOptions(pre="jina-v2-en", outtype="f32")
    convert(drawn, tmp_path / "x.gguf", None, own)
    export(tmp_path / "x.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back/1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"] is True
    convert(tmp_path / "back", tmp_path / "y.gguf", None, own)
    with open_gguf(tmp_path / "y.gguf") as file:
        assert file.get("bert.pooling_type") == 1


@pytest.mark.parametrize("size", ["1", "300K", "1M", "5GB"])
def test_sizes_of_shards(size: str, model: Path, tmp_path: Path) -> None:
    """No shard holds more than was asked for, but for one of a single tensor; the index names them all."""
    export(model, tmp_path / "back", ExportOptions(max_shard_size=size, tokenizer=False))
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    stored = read_checkpoint(tmp_path / "back")
    most = size_of(size)
    held = [[t.nbytes for t in tensors.values()] for tensors in stored]
    assert all(sum(sizes) <= most or len(sizes) == 1 for sizes in held)
    index = tmp_path / "back" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        found = json.loads(index.read_text())
        assert found["metadata"]["total_size"] == sum(map(sum, held))
        assert set(found["weight_map"].values()) == {path.name for path in files}


def test_a_failed_export_leaves_nothing(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    data = bytearray(model.read_bytes())
    with open_gguf(model) as file:
        at = file.tensors["blk.0.ffn_down_exps.weight"].offset
    data[at : at + 2] = np.array([0x7F80], np.uint16).tobytes()
    broken.write_bytes(data)
    with pytest.raises(QuantkitError, match="finite"):
        export(broken, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_cannot_be_exported(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeNotSupported, match="not exported as 'LlamaForCausalLM'"):
        plan_export(model, tmp_path / "back", ExportOptions(architecture="LlamaForCausalLM"))
    quantize(model, tmp_path / "key.gguf", "BF16", QuantizeOptions(override_kv=("qwen3moe.expert_odd=int:3",)))
    with pytest.raises(TypeNotSupported, match="expert_odd = 3 cannot be said"):
        plan_export(tmp_path / "key.gguf", tmp_path / "back")
    quantize(model, tmp_path / "heads.gguf", "BF16", QuantizeOptions(override_kv=("qwen3moe.expert_count=int:3",)))
    with pytest.raises(FormatError, match="not that of 3 experts"):
        plan_export(tmp_path / "heads.gguf", tmp_path / "back")


def test_the_configuration(model: Path, tmp_path: Path) -> None:
    config = json.loads(plan_export(model, tmp_path / "back").files["config.json"])
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_experts"] == 4
    assert config["rms_norm_eps"] == 1e-6
    assert config["norm_topk_prob"] is True


def test_values_of_i2_s_have_their_scale(tmp_path: Path) -> None:
    data = i2_s.drawn()
    with open_gguf(i2_s.model(tmp_path / "x.gguf", data)) as file:
        x = encoded_tensors(file, {})["blk.0.ffn_up.weight"]
        wanted = i2_s.values(data, size_of_tensor(x))
        assert np.array_equal(read_f32(x, 0, wanted.size), wanted.reshape(-1))
        assert np.array_equal(read_f32(x, 300, 1000), wanted.reshape(-1)[300:1300])


@pytest.mark.parametrize("value", [0, 1 << 31, [3, 1], "x", 1.5, True, ["a", "b"], None])
def test_metadata_of_no_model_is_an_error(value: object, model: Path) -> None:
    """Whatever a key says, of whatever type: an error for people, or a model."""
    with open_gguf(model) as file:
        own = [key for key in file.fields if key.startswith(("qwen3moe.", "tokenizer.ggml."))]
    for key in own:
        with open_gguf(model) as file:
            del file.fields[key]
            if value is not None:
                file.fields[key] = Field.of(key, value)
            with suppress(QuantkitError):
                open_export(file)
