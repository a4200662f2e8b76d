"""The verb export: converted again, what it writes is the same model; what it cannot say is refused."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_tensor_scale as i2_s
from refusals import refuses
from tiny_checkpoints import write_checkpoint

import checkpoints
from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export.biases import BIASES
from quantkit.checkpoint.export.llama3_rope import FREQUENCIES, llama3_rope
from quantkit.checkpoint.export.source import open_export
from quantkit.checkpoint.export.tensor_values import read_tensors
from quantkit.checkpoint.expressions import read_f32
from quantkit.checkpoint.expressions import size_of as size_of_tensor
from quantkit.checkpoint.registry import ARCHITECTURES, CLASSES
from quantkit.convert import ConvertOptions, convert
from quantkit.errors import FormatError, QuantkitError, ResourceError, TypeNotSupported
from quantkit.export import export, plan_export
from quantkit.formats.gguf import Field, ValueType, open_gguf, write_gguf
from quantkit.formats.safetensors import read_checkpoint
from quantkit.kernels import dequantize
from quantkit.options.export import ExportOptions
from quantkit.pipeline.folded_source import read_scales, scale_of
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.quantize import QuantizeOptions, quantize, size_of
from quantkit.types import BY_NAME

pytestmark = pytest.mark.usefixtures("services_in_process")

PRE = ConvertOptions(pre="gpt-2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    convert(write_checkpoint(folder / "Small-Moe", shards=3), folder / "x.gguf", None, PRE)
    return folder / "x.gguf"


@pytest.mark.parametrize("max_shard_size", ["5GB", "300K"])
def test_round_trip(model: Path, tmp_path: Path, max_shard_size: str) -> None:
    export(model, tmp_path / "back", ExportOptions(max_shard_size=max_shard_size))
    convert(tmp_path / "back", tmp_path / "y.gguf", None, PRE)
    with open_gguf(model) as a, open_gguf(tmp_path / "y.gguf") as b:
        assert a.tensors.keys() == b.tensors.keys()
        for name, t in a.tensors.items():
            assert (t.type, t.shape) == (b.tensors[name].type, b.tensors[name].shape)
            assert a.data(name).tobytes() == b.data(name).tobytes()
        keys = [key for key in a.fields if not key.startswith("general.")]
        assert {key: a.fields[key].encode() for key in keys} == {key: b.fields[key].encode() for key in keys}


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K_M", "Q4_0_R8", "IQ4_XS", "IQ4_K", "MXFP4", "NVFP4", "TQ2_0"])
def test_quantized_values_are_decoded(model: Path, tmp_path: Path, type_name: str) -> None:
    quantize(model, tmp_path / "q.gguf", type_name, QuantizeOptions(no_provenance=True))
    export(tmp_path / "q.gguf", tmp_path / "back", ExportOptions(outtype="f32"))
    convert(tmp_path / "back", tmp_path / "y.gguf", None, ConvertOptions(pre="gpt-2", outtype="f32"))
    with open_gguf(tmp_path / "q.gguf") as a, open_gguf(tmp_path / "y.gguf") as b:
        for name in b.tensors:
            t = a.tensors[name]
            rows = a.data(name).reshape(-1, t.type.row_bytes(t.shape[0]))
            values = dequantize(rows, t.type, t.shape[0])
            if (scale := scale_of(a, t)) is not None:
                values *= np.repeat(read_scales(a, t, scale), len(rows) // math.prod(t.shape[2:]))[:, None]
            assert np.array_equal(values.reshape(-1), b.data(name).view(np.float32)), name
        assert {name for name in a.tensors if not name.endswith(".scale")} == b.tensors.keys()


def test_memory_threads_and_shards_do_not_matter(model: Path, tmp_path: Path) -> None:
    for no, ram in enumerate(("16M", "512M")):
        export(model, tmp_path / str(no), max_ram=ram, threads=1 + no)
    assert (tmp_path / "0/model.safetensors").read_bytes() == (tmp_path / "1/model.safetensors").read_bytes()
    assert len(read_checkpoint(tmp_path / "0")) == 1


def test_existing_files_are_kept(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "back")
    with refuses(ResourceError, "QK-E402 config.json --overwrite"):
        export(model, tmp_path / "back")
    export(model, tmp_path / "back", overwrite=True)
    (tmp_path / "back/model-00001-of-00002.safetensors").write_bytes(b"")
    with refuses(ResourceError, "QK-E402 model-00001-of-00002.safetensors"):
        export(model, tmp_path / "back", overwrite=True)


class Stopping:
    """An observer that ends a run when some tensors are written."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.n_resumed = 0

    def on_resume(self, tensors: int, nbytes: int) -> None:
        self.n_resumed = tensors

    def on_write(self, nbytes: int) -> None:
        pass

    def on_tensor(self, tensor: PlannedTensor) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_an_ended_run_is_resumed(model: Path, tmp_path: Path) -> None:
    """Nothing is under a final name until all is written; --resume ends with the bytes of an undisturbed run."""
    options = ExportOptions(max_shard_size="600K")
    export(model, tmp_path / "whole", options)
    with pytest.raises(KeyboardInterrupt):
        export(model, tmp_path / "back", options, threads=1, observer=Stopping(20))
    assert not [p for p in (tmp_path / "back").iterdir() if p.suffix in (".json", ".safetensors")]
    with refuses(ResourceError, "QK-E408 --resume"):
        export(model, tmp_path / "back", options)
    went_on = Stopping(0)
    export(model, tmp_path / "back", options, resume=True, observer=went_on)
    assert went_on.n_resumed > 0
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    assert all((tmp_path / "back" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)


class Killed(BaseException):
    """Ends a run as SIGKILL does, as far as files are concerned: nothing that is renamed is renamed any more."""


@pytest.mark.parametrize("replaces", [False, True])
def test_a_run_killed_during_renames_is_resumed(
    replaces: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under a final name is whole, config.json is never beside other weights, and --resume ends the run."""
    options, folder = ExportOptions(max_shard_size="1500K"), tmp_path / "back"
    export(model, tmp_path / "whole", options)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    f16_options = ExportOptions(max_shard_size="1500K", outtype="f16")
    rename = Path.replace
    for number in range(len(expected)):
        shutil.rmtree(folder, ignore_errors=True)
        old = {}
        if replaces:
            export(model, folder, f16_options)
            old = {path.name: path.read_bytes() for path in folder.iterdir()}
            assert old.keys() == expected.keys()
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
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in expected}
        assert all(data in (expected[name], old.get(name)) for name, data in files.items())
        if "config.json" in files:
            weights = [name for name in expected if name.endswith(".safetensors")]
            assert all(files[name] == expected[name] for name in weights)
        export(model, folder, options, resume=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def test_a_disk_with_space_only_for_the_weights(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_plan = plan_export(model, tmp_path / "back")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=export_plan.plan.nbytes + 100))
    with refuses(ResourceError, "QK-E406"):
        export(model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_directory_that_cannot_be_created(model: Path, tmp_path: Path) -> None:
    with refuses(ResourceError, "QK-E401"):
        export(model, tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with refuses(ResourceError, "QK-E405"):
        export(model, tmp_path / "file")


def test_files_beside_the_model_do_not_matter(model: Path, tmp_path: Path) -> None:
    """The way here reads tokenizer.json and modules.json beside config.json: those that are written, not others."""
    shutil.copy(model, tmp_path / "x.gguf")
    for name in ("tokenizer.json", "modules.json", "config.json"):
        (tmp_path / name).write_text("nonsense")
    export(tmp_path / "x.gguf", tmp_path / "back")


def test_the_pooling_module_is_written(model: Path, tmp_path: Path) -> None:
    """A model for embeddings brings the files of sentence-transformers, and converted again has its key."""
    checkpoint = checkpoints.write_checkpoint("bert", tmp_path / "drawn")
    # The checkpoint states fewer key heads than its matrices hold, which llama.cpp's loader refuses for BERT.
    options = ConvertOptions(pre="jina-v2-en", outtype="f32", allow_incomplete=True)
    convert(checkpoint, tmp_path / "x.gguf", None, options)
    export(tmp_path / "x.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back/1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"] is True
    convert(tmp_path / "back", tmp_path / "y.gguf", None, options)
    with open_gguf(tmp_path / "y.gguf") as file:
        assert file.get("bert.pooling_type") == 1


@pytest.mark.parametrize("size", ["1", "300K", "1M", "5GB"])
def test_sizes_of_shards(size: str, model: Path, tmp_path: Path) -> None:
    """No shard holds more than was asked for, but for one of a single tensor; the index names them all."""
    export(model, tmp_path / "back", ExportOptions(max_shard_size=size, tokenizer=False))
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    stored = read_checkpoint(tmp_path / "back")
    most = size_of(size)
    tensor_sizes = [[t.nbytes for t in tensors.values()] for tensors in stored]
    assert all(sum(sizes) <= most or len(sizes) == 1 for sizes in tensor_sizes)
    index = tmp_path / "back" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        index_values = json.loads(index.read_text())
        assert index_values["metadata"]["total_size"] == sum(map(sum, tensor_sizes))
        assert set(index_values["weight_map"].values()) == {path.name for path in files}


def test_a_failed_export_leaves_no_files(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    data = bytearray(model.read_bytes())
    with open_gguf(model) as file:
        offset = file.tensors["blk.0.ffn_down_exps.weight"].offset
    data[offset : offset + 2] = np.array([0x7F80], np.uint16).tobytes()
    path.write_bytes(data)
    with refuses(QuantkitError, "QK-E108 broken.gguf model.layers.0.mlp.experts.0.down_proj.weight 0"):
        export(path, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_an_importance_matrix_is_no_model(data: Path, tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E123 tiny-moe-imatrix.gguf general.architecture"):
        plan_export(data / "tiny-moe-imatrix.gguf", tmp_path / "back")


def test_unsupported_models_are_refused(model: Path, tmp_path: Path) -> None:
    with refuses(TypeNotSupported, "QK-E304 LlamaForCausalLM"):
        plan_export(model, tmp_path / "back", ExportOptions(architecture="LlamaForCausalLM"))
    quantize(model, tmp_path / "key.gguf", "BF16", QuantizeOptions(override_kv=("qwen3moe.expert_odd=int:3",)))
    with refuses(TypeNotSupported, "QK-E305 expert_odd 3"):
        plan_export(tmp_path / "key.gguf", tmp_path / "back")
    quantize(
        model,
        tmp_path / "heads.gguf",
        "BF16",
        QuantizeOptions(override_kv=("qwen3moe.expert_count=int:3",), allow_incomplete=True),
    )
    with refuses(FormatError, "QK-E106 3"):
        plan_export(tmp_path / "heads.gguf", tmp_path / "back")


def test_the_configuration(model: Path, tmp_path: Path) -> None:
    config = json.loads(plan_export(model, tmp_path / "back").files["config.json"])
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_experts"] == 4
    assert config["rms_norm_eps"] == 1e-6
    assert config["norm_topk_prob"] is True


# --- settings that transformers would ignore, and round trips ---

_HEADS = "attn_q attn_k attn_v attn_output"


def converted(name: str, folder: Path) -> Path:
    description = checkpoints.describe(name)
    options = ConvertOptions(**description.convert_keywords(), outtype="f32")
    convert(checkpoints.write_checkpoint(name, folder / "drawn"), folder / "x.gguf", None, options, threads=1)
    return folder / "x.gguf"


def with_biases(model: Path, kinds: str) -> list[str]:
    """Add biases to weights of all layers that have them; return their names."""
    with open_gguf(model) as file:
        tensors = [(t.name, t.shape, t.type, file.data(t).tobytes()) for t in file.tensors.values()]
        biases = {
            t.name.replace(".weight", ".bias"): t.shape[1]
            for t in file.tensors.values()
            if t.name.endswith(tuple(f".{kind}.weight" for kind in kinds.split()))
            and t.name.replace(".weight", ".bias") not in file.tensors
        }
        fields = list(file.fields.values())
    f32 = BY_NAME["F32"]
    write_gguf(model, fields, [*tensors, *((n, (w,), f32, np.ones(w, "<f4").tobytes()) for n, w in biases.items())])
    return list(biases)


@pytest.mark.parametrize("name", ["qwen3-next", "kimi-linear", "granite-hybrid", "falcon-h1"])
def test_dimensions_dropped_by_llama_quantize_are_restored(name: str, tmp_path: Path) -> None:
    path = converted(name, tmp_path)
    shapes = {t.name: t.shape for t in plan_export(path, tmp_path / "a").opened.tensors.values()}
    quantize(path, tmp_path / "q.gguf", "F16")
    tensors = plan_export(tmp_path / "q.gguf", tmp_path / "b").opened.tensors
    assert {t.name: t.shape for t in tensors.values()} == shapes


@pytest.mark.parametrize(
    ("name", "kinds", "switches"),
    [
        *((name, _HEADS, "attention_bias") for name in ("olmo2", "olmoe", "gemma3", "dots1", "granite-hybrid")),
        ("deepseek-v2", "attn_kv_a_mqa attn_output", "attention_bias"),
        ("deepseek-v3", "attn_q_a attn_output", "attention_bias"),
        ("seed-oss", f"{_HEADS} ffn_up", "attention_bias attention_out_bias mlp_bias"),
        ("bamba", f"{_HEADS} ffn_down", "attention_bias mlp_bias"),
        ("falcon-h1", f"{_HEADS} ffn_gate ssm_out", "attention_bias mlp_bias projectors_bias"),
        ("llama", "ffn_gate", "mlp_bias"),
    ],
)
def test_biases_have_their_switch(name: str, kinds: str, switches: str, tmp_path: Path) -> None:
    model = converted(name, tmp_path)
    before = plan_export(model, tmp_path / "back").opened.tensors
    added = with_biases(model, kinds)
    plan = plan_export(model, tmp_path / "back")
    assert len(plan.opened.tensors) == len(before) + len(added) > len(before)
    config = json.loads(plan.files["config.json"])
    all_switches = {"attention_bias", "attention_out_bias", "mlp_bias", "projectors_bias", "qkv_bias", "use_bias"}
    assert {key for key in all_switches if config.get(key)} == set(switches.split())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("olmo2", "ffn_up"),
        ("deepseek-v3", "attn_q_b"),
        ("mixtral", "attn_q"),
        ("qwen2", "attn_output"),
        ("phi3", "ffn_up"),
    ],
)
def test_biases_without_a_switch_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    model = converted(name, tmp_path)
    plan_export(model, tmp_path / "back")
    assert with_biases(model, kind)
    with refuses(TypeNotSupported, "QK-E305 x.gguf"):
        plan_export(model, tmp_path / "back")


def test_the_table_of_biases_has_only_exported_classes() -> None:
    """scripts/record_biases.py reads it from sources of transformers (test_scripts.py)."""
    assert BIASES.keys() <= CLASSES.keys()
    # Their tensors have other names than in transformers.
    assert not BIASES.keys() & {"DeepseekV4ForCausalLM", "NomicBertModel"}


@pytest.mark.parametrize(
    ("theta", "width", "factor", "low", "high", "length"),
    [
        *((500000.0, 128, 8.0, 1.0, 4.0, length) for length in (8192, 2048, 5000, 65536, 1 << 20)),
        (500000.0, 64, 32.0, 1.0, 4.0, 8192),
        (500000.0, 128, 8.0, 2.0, 8.0, 12345),
        (1e6, 96, 40.0, 1.5, 3.7, 10000),
        (10000.0, 64, 16.0, 1.0, 4.0, 131072),  # no frequency is divided by all of 16
        (150000.0, 16, 4.0, 1.0, 4.0, 3000),
        (10000.0, 32, 8.0, 1.0, 1.25, 100),  # none between
    ],
)
def test_rope_scaling_of_llama_3_follows_from_its_factors(
    tmp_path: Path, theta: float, width: int, factor: float, low: float, high: float, length: int
) -> None:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    rope["original_max_position_embeddings"] = length
    config = checkpoints.describe("llama").config | {"head_dim": width, "rope_theta": theta, "rope_scaling": rope}
    config_of_model = Config(tmp_path / "config.json", config)
    row = ARCHITECTURES["LlamaForCausalLM"]
    (x,) = (t.x for t in row.synthetic(config_of_model) if t.name_in_file == FREQUENCIES)
    values = read_f32(x, 0, width // 2)
    meta = SimpleNamespace(model=SimpleNamespace(data=lambda _: values.view(np.uint8)), path="file")
    del config["rope_scaling"]
    actual = llama3_rope(meta, row, config)  # type: ignore[arg-type]
    (x,) = (t.x for t in row.synthetic(Config(tmp_path / "config.json", config | {"rope_scaling": actual})))
    assert np.array_equal(read_f32(x, 0, width // 2), values)
    if (low, high, factor) == (1.0, 4.0, 8.0):
        assert actual == rope


def test_unknown_rope_factors_are_refused(tmp_path: Path) -> None:
    values = np.linspace(1, 8, 64, dtype=np.float32)
    meta = SimpleNamespace(model=SimpleNamespace(data=lambda _: values.view(np.uint8)), path="file")
    config = checkpoints.describe("llama").config | {"head_dim": 128}
    with refuses(TypeNotSupported, "QK-E305 rope_freqs.weight config.json 3"):
        llama3_rope(meta, ARCHITECTURES["LlamaForCausalLM"], config)  # type: ignore[arg-type]


def test_general_metadata_round_trips(model: Path, tmp_path: Path) -> None:
    """The keys of a model card and of sampling, ids and flags of tokens; what cannot is named."""
    texts = {
        **{"name": 'Müller\'s: "Best" #1', "author": "- no", "license": "other", "license.name": "x", "version": "1.0"},
        **{"license.link": "https://x.y/z", "description": "two\nlines\u2028", "finetune": "Instruct"},
        **{"source.url": "https://h/m", "base_model.0.name": "Qwen3 0.6B", "base_model.0.organization": "Qwen"},
        **{
            "base_model.0.repo_url": "https://huggingface.co/Qwen/Qwen3-0.6B",
            "dataset.0.name": "D",
            "dataset.0.doi": "1",
        },
    }
    numbers = {"base_model.count": 1, "dataset.count": 1}
    lists = {"tags": ["a", "b: c", "no"], "languages": ["en", "no"]}
    with open_gguf(model) as file:
        tensors = [(t.name, t.shape, t.type, file.data(t).tobytes()) for t in file.tensors.values()]
        fields = {key: field for key, field in file.fields.items() if not key.startswith("general.name")}
    general_fields = [Field.of(f"general.{key}", value) for key, value in {**texts, **numbers, **lists}.items()]
    general_fields += [
        Field.of("general.sampling.mirostat", 2, ValueType.INT32),
        Field.of("general.sampling.temp", 0.7),
    ]
    general_fields += [Field.of("tokenizer.ggml.mask_token_id", 7), Field.of("tokenizer.ggml.add_eos_token", True)]
    path = tmp_path / "said.gguf"
    write_gguf(path, [*fields.values(), *general_fields], tensors)
    plan = plan_export(path, tmp_path / "back")
    assert not [note for note in plan.plan.notes if "longer" in note or "otherwise" in note]
    export(path, tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "y.gguf", None, PRE)
    with open_gguf(tmp_path / "y.gguf") as file:
        assert {f.key: file.get(f.key) for f in general_fields} == {f.key: f.value for f in general_fields}
    types = [*fields["tokenizer.ggml.token_type"].value[:-1], 5]
    missing = [
        Field.of("general.url", "https://x"),
        Field.of("tokenizer.ggml.token_type", types, item_type=ValueType.INT32),
    ]
    write_gguf(path, [*({**fields, **{f.key: f for f in missing}}).values()], tensors)
    notes = "\n".join(plan_export(path, tmp_path / "b").plan.notes)
    assert "general.url" in notes
    assert "tokenizer.ggml.token_type" in notes


def test_values_of_i2_s_have_their_scale(tmp_path: Path) -> None:
    data = i2_s.random_rows()
    with open_gguf(i2_s.model(tmp_path / "x.gguf", data)) as file:
        x = read_tensors(file, {})["blk.0.ffn_up.weight"]
        expected = i2_s.values(data, size_of_tensor(x))
        assert np.array_equal(read_f32(x, 0, expected.size), expected.reshape(-1))
        assert np.array_equal(read_f32(x, 300, 1000), expected.reshape(-1)[300:1300])


@pytest.mark.parametrize("value", [0, 1 << 31, [3, 1], "x", 1.5, True, ["a", "b"], None])
def test_metadata_of_an_unknown_model_is_an_error(value: object, model: Path) -> None:
    """Whatever a key says, of whatever type: an error for people, or a model."""
    with open_gguf(model) as file:
        keys = [key for key in file.fields if key.startswith(("qwen3moe.", "tokenizer.ggml."))]
    for key in keys:
        with open_gguf(model) as file:
            del file.fields[key]
            if value is not None:
                file.fields[key] = Field.of(key, value)
            with suppress(QuantkitError):
                open_export(file)
