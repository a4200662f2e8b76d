"""Big-endian files, written and read: the bytes of gguf_convert_endian.py of llama.cpp b11434."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import big_endian
import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses

import adapters
import checkpoints
from quantkit.cli import cli
from quantkit.compare import compare
from quantkit.convert import ConvertOptions, convert
from quantkit.edit import plan_edit
from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.formats.gguf import open_gguf
from quantkit.hash import hash as model_hash
from quantkit.inspect import inspect
from quantkit.lora import convert_lora
from quantkit.model.engine import load
from quantkit.options.edit import EditOptions
from quantkit.pipeline.worker import Worker
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
from quantkit.types import BY_NAME

#: SHA-256 of the file of ``big_endian.write_all_types`` after gguf_convert_endian.py.
ALL_TYPES = "33d40d2c5e8f0eec6b353fc568199c9a57ef95c45ba1da5733822c6c3dc2bf04"
#: The same of convert_hf_to_gguf.py's file of the checkpoint "mistral"; of f32 and f16 also what --bigendian writes.
MISTRAL = {
    "f32": "87cfb19e8886df149be61ab9dc936be4751f4a373cb214790b5b2018a83bdf9a",
    "f16": "70aa188c2b36cb6c0970df073ae25184f938d869a5c1ba1ca2d3e58cd1bc796d",
    "bf16": "bf4d82a2e220f224be840dc6364837c7675667b3b74190da81f5c25b1f6090c2",
    "q8_0": "a865776378374e34443d09182a240d0065cf710951ccef5450505776eb550221",
}
#: Of convert_hf_to_gguf.py --mmproj --bigendian --outtype f16, of the checkpoint "mm-internvl3".
INTERNVL = "40b3e014fe766f87524b09e48e4a8334d383adb34c5e45ed92cfe0026871efdd"
#: Of convert_lora_to_gguf.py --bigendian, of adapters by name and type; it writes BF16 and Q8_0 little-endian, too.
ADAPTERS = {
    ("llama", "f32"): "38d341de7d4aee94b97318824dacc109734b0407df325ab5a57c6c4e6745f806",
    ("llama", "f16"): "de0018438655d23ca9e44f0d7e6841893414ca8e14e6205399bfc4ddc9404ca1",
    ("llama", "bf16"): None,
    ("llama", "q8_0"): None,
    ("llama-alora", "f32"): "4eb7f780e3efedad0b2b129a7a2054c70b0c1c401346693534d3a821252f3496",
    ("gemma3-towers", "f32"): "49576137b1bf407b5fdcb49c099aafe3358a00630cbbe91322f1cc6da7efddc1",
}
COPY = {"no_provenance": True, "allow_incomplete": True}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file with all types, in both orders."""
    folder = tmp_path_factory.mktemp("files")
    little, big = big_endian.write_all_types(folder / "little.gguf"), folder / "big.gguf"
    quantize(little, big, "COPY", QuantizeOptions(bigendian=True, **COPY))
    return little, big


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint("mistral", tmp_path_factory.mktemp("checkpoint"))


def test_copies_in_both_directions(files: tuple[Path, Path], tmp_path: Path) -> None:
    little, big = files
    assert sha256(big) == ALL_TYPES
    quantize(big, tmp_path / "back.gguf", "COPY", QuantizeOptions(**COPY))
    assert (tmp_path / "back.gguf").read_bytes() == little.read_bytes()
    quantize(big, tmp_path / "big.gguf", "COPY", QuantizeOptions(bigendian=True, **COPY))
    assert sha256(tmp_path / "big.gguf") == ALL_TYPES


def test_readers_see_the_same_model(files: tuple[Path, Path]) -> None:
    with open_gguf(files[0]) as little, open_gguf(files[1]) as big:
        assert (little.big_endian, big.big_endian) == (False, True)
        assert {key: bytes(f.raw) for key, f in little.fields.items()} == {
            key: bytes(f.raw) for key, f in big.fields.items()
        }
        assert little.tensors == big.tensors
        for tensor in big.tensors.values():
            data = little.data(tensor.name)
            assert np.array_equal(data, big.data(tensor.name))
            for offset, n in ((0, 1), (1, 7), (3, tensor.nbytes - 3), (tensor.nbytes - 1, 1)):
                out = np.empty(n, np.uint8)
                big.read(tensor, out, offset)
                assert np.array_equal(out, data[offset : offset + n])
    assert model_hash(files[0]).model == model_hash(files[1]).model
    comparison = compare(*files)
    assert comparison.identical
    inspection = inspect(files[1])
    assert inspection.big_endian
    assert all("big-endian" in runtime.problems[0] for runtime in inspection.runtimes)
    printed = CliRunner().invoke(cli, ["inspect", str(files[1]), "--json"])
    assert json.loads(printed.stdout)["big_endian"] is True


@pytest.mark.parametrize("outtype", MISTRAL)
def test_conversions_have_the_reference_s_bytes(outtype: str, mistral: Path, tmp_path: Path) -> None:
    """convert_hf_to_gguf.py --bigendian writes BF16 and Q8_0 little-endian: these are converted correctly here."""
    options = ConvertOptions(outtype=outtype, bigendian=True)
    convert(mistral, tmp_path / "big.gguf", None, options)
    assert sha256(tmp_path / "big.gguf") == MISTRAL[outtype]


@pytest.mark.parametrize(("name", "outtype"), ADAPTERS)
def test_adapters_have_the_reference_s_bytes(name: str, outtype: str, tmp_path: Path) -> None:
    adapter, expected = adapters.ADAPTERS[name], ADAPTERS[name, outtype]
    source, base = adapters.write_adapter(adapter, tmp_path / "a"), adapters.write_base(adapter, tmp_path / "b")
    paths = [tmp_path / "little.gguf", tmp_path / "big.gguf"]
    for path in paths:
        convert_lora(source, path, base=base, outtype=outtype, bigendian=path.stem == "big")
    assert expected in (None, sha256(paths[1]))
    with open_gguf(paths[0]) as little, open_gguf(paths[1]) as big:
        assert (little.big_endian, big.big_endian) == (False, True)
        assert {t.type.name for t in big.tensors.values()} >= {outtype.upper()}
        assert {key: field.value for key, field in little.fields.items()} == {
            key: field.value for key, field in big.fields.items()
        }
        assert little.tensors == big.tensors
        assert all(np.array_equal(little.data(t), big.data(t)) for t in big.tensors)


def test_an_mmproj_file_has_the_reference_s_bytes(tmp_path: Path) -> None:
    """Also of a type of llama-quantize, where the order of bytes and the provenance are options of the encoders."""
    folder = checkpoints.write_checkpoint("mm-internvl3", tmp_path)
    for type_name, options in (("f16", ("--bigendian",)), ("Q4_0", ()), ("Q4_0", ("--bigendian",))):
        out = tmp_path / f"{type_name}{len(options)}.gguf"
        line = ["convert", str(folder), str(out), type_name, "--mmproj-only", "--no-provenance", *options]
        assert CliRunner().invoke(cli, line).exit_code == 0
    assert sha256(tmp_path / "f161.gguf") == INTERNVL
    quantize(tmp_path / "Q4_00.gguf", tmp_path / "big.gguf", "COPY", QuantizeOptions(bigendian=True, **COPY))
    assert sha256(tmp_path / "Q4_01.gguf") == sha256(tmp_path / "big.gguf")


def test_quantizations_are_those_of_the_little_endian_model(mistral: Path, tmp_path: Path) -> None:
    """From a checkpoint, from a file of either order, with shards, few bytes of memory, and a cache."""
    paths = {name: tmp_path / f"{name}.gguf" for name in ("little", "big", "q", "expected", "from-big", "one-pass")}
    options = QuantizeOptions(no_provenance=True)
    convert(mistral, paths["little"], None, ConvertOptions(outtype="bf16"))
    convert(mistral, paths["big"], None, ConvertOptions(outtype="bf16", bigendian=True))
    quantize(paths["little"], paths["q"], "Q4_K_M", options)
    quantize(paths["q"], paths["expected"], "COPY", QuantizeOptions(no_provenance=True, bigendian=True))
    run: dict[str, Any] = {"threads": 2, "max_ram": "4MiB", "cache": tmp_path / "cache"}
    for _ in range(2):
        swapped = QuantizeOptions(no_provenance=True, bigendian=True)
        quantize(paths["big"], paths["from-big"], "Q4_K_M", swapped, overwrite=True, **run)
        assert sha256(paths["from-big"]) == sha256(paths["expected"])
    convert(mistral, paths["one-pass"], "Q4_K_M", ConvertOptions(bigendian=True), options, overwrite=True)
    assert sha256(paths["one-pass"]) == sha256(paths["expected"])
    quantize(paths["big"], tmp_path / "s.gguf", "COPY", QuantizeOptions(bigendian=True, split_max_size="1M", **COPY))
    first = sorted(tmp_path.glob("s-*.gguf"))[0]
    quantize(first, tmp_path / "joined.gguf", "COPY", QuantizeOptions(**COPY))
    assert all(tensor.identical for tensor in compare(tmp_path / "joined.gguf", paths["little"]).tensors or ())


def test_an_interrupted_run_is_resumed(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, jobs, run = tmp_path / "x.gguf", 0, Worker.run

    def stop(self: Worker, job: Any, tensor: Any) -> Any:
        nonlocal jobs
        jobs += 1
        if jobs > 6:
            raise KeyboardInterrupt
        return run(self, job, tensor)

    options = QuantizeOptions(bigendian=True, **COPY)
    monkeypatch.setattr(Worker, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(files[0], out, "COPY", options, threads=1)
    monkeypatch.setattr(Worker, "run", run)
    assert quantize(files[0], out, "COPY", options, threads=1, resume=True).run.resumed > 0
    assert sha256(out) == ALL_TYPES


def test_the_engine_runs_a_big_endian_model(tiny_moe: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.gguf"
    quantize(tiny_moe, big, "COPY", QuantizeOptions(bigendian=True, no_provenance=True))
    logits = []
    for path in (tiny_moe, big):
        with load(path, n_ctx=16) as model:
            logits.append(model.session(16).decode(np.arange(8, dtype=np.int32)))
    assert np.array_equal(*logits)


def test_options_that_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    def options(**further: Any) -> QuantizeOptions:
        return QuantizeOptions(bigendian=True, no_provenance=True, allow_incomplete=True, **further)

    out = tmp_path / "x.gguf"
    with refuses(TypeNotSupported, "QK-E300 blk.00.f32.weight Q5_K"):
        plan_quantize(files[0], out, "COPY", options(tensor_type=("f32=Q5_K",)))
    with refuses(TypeNotSupported, "QK-E300 big.gguf"):
        plan_edit(files[1], options=EditOptions(set={"general.name": "x"}), force=True)
    with refuses(RecipeError, "QK-E201 --bigendian --calibrate"):
        plan_quantize(files[0], out, "COPY", options(calibrate=(files[0],)))
    with refuses(RecipeError, "QK-E201 --bigendian --ray"):
        quantize(files[0], out, "COPY", options(), ray="localhost:1")


def test_files_that_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A type without a big-endian form, and a file that ends early."""
    t, q5, short = BY_NAME["Q5_K"], tmp_path / "q5.gguf", tmp_path / "cut.gguf"
    head = struct.pack(">4sIQQ", b"GGUF", 3, 1, 1) + struct.pack(">Q1sII", 1, b"a", 4, 1)
    info = struct.pack(">Q1sIQQIQ", 1, b"w", 2, 256, 2, t.id, 0)
    q5.write_bytes((head + info).ljust(96, b"\0") + bytes(t.tensor_bytes((256, 2))))
    with open_gguf(q5) as file:
        assert file.get("a") == 1
        with refuses(TypeNotSupported, "QK-E300 q5.gguf Q5_K"):
            file.data("w")
        with refuses(TypeNotSupported, "QK-E300 q5.gguf Q5_K"):
            file.read(file.tensors["w"], np.empty(1, np.uint8), 0)
    short.write_bytes(files[1].read_bytes()[:-600])
    with refuses(FormatError, "QK-E103 cut.gguf"):
        open_gguf(short)
