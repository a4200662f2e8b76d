"""The registry of types: every record has its functions, and a type is at home in few places, which are counted.

A forgotten step of CONTRIBUTING.md, "Add a type", fails here or in test_quality.py, test_kernels.py, test_cli_types.py,
test_gpu_check.py and test_gpus.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blocks import random_rows
from refusals import refuses

import quantkit
from guide import step
from quantkit.errors import TypeNotSupported
from quantkit.kernels import formats, reference
from quantkit.kernels.cuda.core.generated import headers
from quantkit.kernels.cuda.unpack import decoders
from quantkit.kernels.formats import BLOCK_TYPES, FORMATS, Format, cpu_function, format_of, has_encoder
from quantkit.kernels.interleave import is_interleaved
from quantkit.types import BY_NAME, ROWS, TYPES, TensorType
from small_models import llama_tensors, write_model

KERNELS = Path(formats.__file__).parent
PRODUCT = KERNELS.parent

#: Where the functions of a record's family are looked for.
CPU = {verb: KERNELS / "cpu" / verb for verb in ("encode", "unpack")}
#: Types without a record, and why.
WITHOUT_KERNELS = {
    **dict.fromkeys(("I8", "I16", "I32", "I64", "F64"), "tables and positions, which are copied"),
    **dict.fromkeys(("Q8_1", "Q8_K", "Q8_0_X4", "Q8_1_X4", "Q8_2_X4"), "activations, which no file holds"),
    **dict.fromkeys(("Q8_K16", "Q8_K32", "Q8_K64", "Q8_K128", "Q8_KR8"), "activations, which no file holds"),
    "I2_S": "taken apart to IQ2_BN: kernels/tensor_scale.py",
}
#: Types with a record and without an encoder, and why.
WITHOUT_ENCODER: dict[str, str] = {}

by_record = pytest.mark.parametrize("record", FORMATS.values(), ids=lambda record: record.type.name)


def guide_step(number: int, record: Format) -> str:
    """Return a step of the guide for a type."""
    name = record.type.name
    return step("Add a type", number, type=name.lower(), TYPE=name, family=record.family)


def functions(path: Path) -> set[str]:
    """Return the names that a module defines, without importing it."""
    if not path.exists():
        return set()
    body = ast.parse(path.read_text()).body
    names = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    return names | {
        target.id for n in body if isinstance(n, ast.Assign) for target in n.targets if isinstance(target, ast.Name)
    }


def test_a_record_without_a_type_is_an_error() -> None:
    assert "types.py" in step("Add a type", 1)
    with pytest.raises(LookupError, match="Add a type"):
        formats._format("NO_TYPE", "legacy", "q8_0")


@pytest.mark.parametrize("t", [t for t in TYPES if not is_interleaved(t)], ids=str)
def test_a_type_has_a_record_or_a_reason(t: TensorType) -> None:
    assert (t.name in FORMATS) != (t.name in WITHOUT_KERNELS), f"{t}: {step('Add a type', 2)}"


@pytest.mark.parametrize("t", [t for t in TYPES if t.interleave > 1], ids=str)
def test_an_interleaved_type_has_a_layout(t: TensorType) -> None:
    assert is_interleaved(t), f"{t}: {step('Add a type', 8)}"


@by_record
def test_a_record_has_its_functions(record: Format) -> None:
    """A type of neither tree may lack a CUDA twin."""
    name, cuda = record.type.name.lower(), KERNELS / f"cuda/unpack/{record.family}.cuh"
    assert record.is_float or f"unpack_{name}" in functions(CPU["unpack"] / f"{record.family}.py"), guide_step(
        3, record
    )
    encoder_names = functions(CPU["encode"] / f"{record.family}.py")
    assert (f"encode_{name}" in encoder_names) != (record.type.name in WITHOUT_ENCODER), guide_step(4, record)
    assert has_encoder(record.type) == (f"encode_{name}" in encoder_names)
    assert record.ik_encoder == (f"encode_{name}_ik" in encoder_names)
    assert not record.ik_encoder or record.type.trees == "both"
    assert hasattr(reference, f"decode_{name}"), guide_step(5, record)
    if record.type.trees != "none" or record.type.name in decoders():
        assert cuda.is_file(), guide_step(6, record)
        assert f"struct {record.type.name} : traits::{record.type.name} {{" in cuda.read_text(), guide_step(6, record)
        assert f'#include "unpack/{record.family}.cuh"' in (KERNELS / "cuda/unpack/all.cuh").read_text(), guide_step(
            6, record
        )
    assert (
        f"struct {record.type.name} {{ static const int BLOCK = {record.type.block}, " in headers()["unpack/traits.cuh"]
    )
    assert record.type.in_files != (record.type in ROWS)
    if not record.is_float:
        assert record.span in (16, 32)
        assert record.unit_bytes <= 320  # what skeletons keep of a row's end


@pytest.mark.parametrize(("verb", "function"), [("encode", "encoder"), ("unpack", "decoder")])
def test_a_type_without_a_function_is_refused_before_the_journal(
    verb: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a family tells, not the record; nothing is left of the run."""
    definitions = formats._definitions

    def incomplete_definitions(kind: str, family: str) -> frozenset[str]:
        return definitions(kind, family) - {f"{verb}_q4_0"}

    monkeypatch.setattr(formats, "_definitions", incomplete_definitions)
    monkeypatch.delattr(f"quantkit.kernels.cpu.{verb}.legacy.{verb}_q4_0")
    source = write_model(tmp_path / "s.gguf", llama_tensors(1))
    with refuses(TypeNotSupported, "QK-E302 Q4_0", function):
        quantkit.quantize(source, tmp_path / "o.gguf", "Q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["s.gguf"]


def test_a_source_without_an_unpacker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "s.gguf", llama_tensors(1))
    quantized = quantkit.quantize(source, tmp_path / "q.gguf", "Q4_0").paths[0]
    files = sorted(tmp_path.iterdir())
    monkeypatch.delitem(FORMATS, "Q4_0")
    monkeypatch.delattr("quantkit.kernels.cpu.unpack.legacy.unpack_q4_0")
    with refuses(TypeNotSupported, "QK-E302 Q4_0", "decoder"):
        quantkit.quantize(quantized, tmp_path / "o.gguf", "Q8_0", quantkit.QuantizeOptions(allow_requantize=True))
    assert sorted(tmp_path.iterdir()) == files


def test_no_function_without_a_record() -> None:
    """A type's functions that nobody finds would be dead code."""
    type_names = {record.type.name.lower() for record in FORMATS.values()}
    for verb, folder in CPU.items():
        prefix = f"{verb}_"
        functions_by_type = {
            n.removeprefix(prefix) for path in folder.glob("*.py") for n in functions(path) if n.startswith(prefix)
        }
        assert {n for n in functions_by_type if n.upper() in BY_NAME} <= type_names
    assert {n.removeprefix("decode_") for n in vars(reference) if n.startswith("decode_")} == type_names | {"rows"}


#: A type's places, {}: its family. Optional: where a common form is not the fastest one, and rows interleaved.
PLACES = {
    "types.py", "kernels/formats.py", "kernels/reference.py", "kernels/cpu/encode/{}.py", "kernels/cpu/unpack/{}.py",
    "kernels/cuda/unpack/{}.cuh",
}  # fmt: skip
OPTIONAL = {"kernels/cpu/matmul/type_dots.py", "kernels/cuda/unpack/dot_forms.cuh", "kernels/cuda/unpack/folded.cuh"}
OPTIONAL |= {
    "formats/gguf/byte_order.py",
    "kernels/interleave.py",
    "kernels/lattices.py",
    "kernels/levels.py",
    "kernels/cuda/unpack/ik_dot_forms.cuh",
}


def naming(t: TensorType) -> set[str]:
    """Return the product's files of kernels, models and formats that name a type, but for tables' descriptions."""
    sources = [PRODUCT / "types.py", *(p for d in ("kernels", "model", "formats") for p in (PRODUCT / d).rglob("*.*"))]
    pattern = re.compile(rf"(?<![A-Z0-9]){t.name}(?![A-Z0-9]|_[A-Z0-9])", re.IGNORECASE)
    texts = {p: p.read_text() for p in sources if p.suffix in (".py", ".cu", ".cuh") and p.name != "tables.py"}
    return {p.relative_to(PRODUCT).as_posix() for p, text in texts.items() if pattern.search(text)}


@pytest.mark.parametrize("name", ["IQ4_KS", "IQ2_KL", "IQ1_BN", "NVFP4", "Q1_0"])
def test_a_type_has_six_parts(name: str) -> None:
    """Before the registry it was 10 places for any type, and up to 8 more sets of types for some."""
    record = FORMATS[name]
    places = {place.format(record.family) for place in PLACES}
    actual = naming(record.type)
    assert not places - actual
    on_cuda = {f"kernels/cuda/encode/{record.family}.cuh"}
    assert not actual - places - OPTIONAL - on_cuda - NAMED_AS_EXAMPLES.get(name, set())


#: Files that name a type as an example: in comments, or to compile one of each way (``operations``).
NAMED_AS_EXAMPLES = {
    "NVFP4": {
        "kernels/__init__.py",
        "kernels/cuda/matmul/mat_mat.py",
        "kernels/cuda/core/halves.cuh",
        "kernels/cpu/encode/check.py",
    },
    "Q1_0": {"kernels/cuda/matmul/mat_vec.py"},
}


@pytest.mark.parametrize("t", [t for t in BY_NAME.values() if t.row_scale], ids=str)
def test_a_row_scale_is_in_the_header(t: TensorType) -> None:
    assert t.row_header >= {"f16": 2, "f32": 4}[t.row_scale]
    assert t.fields[0] == (True, t.row_scale, 0)


@pytest.mark.parametrize("t", [t for t in BLOCK_TYPES if t.row_scale], ids=str)
def test_a_row_scale_multiplies_the_whole_row(t: TensorType) -> None:
    """A power of two is exact; and the unit of a type is its blocks, not the header."""
    rows = random_rows(t, 3, 512, scale=(0.25, 1))
    doubled = rows.copy()
    kind = {"f16": np.float16, "f32": np.float32}[t.row_scale]
    head = np.ascontiguousarray(rows[:, : np.dtype(kind).itemsize]).view(kind)
    doubled[:, : head.itemsize] = (head * kind(2)).view(np.uint8)
    np.testing.assert_array_equal(reference.decode_rows(t, doubled), 2 * reference.decode_rows(t, rows))
    assert t.row_bytes(512) == t.row_header + 2 * format_of(t).unit_bytes


def test_every_row_and_block_is_aligned() -> None:
    assert {name: FORMATS[name].align for name in ("Q4_K", "IQ4_XS", "IQ4_KS", "IQ2_KS", "MXFP4")} == {
        "Q4_K": 16, "IQ4_XS": 8, "IQ4_KS": 4, "IQ2_KS": 2, "MXFP4": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "verb", "text"), [("IQ4_K_R4", "unpack", "unpacker"), ("Q8_1", "encode", "encoder")])
def test_a_missing_part_is_named(name: str, verb: str, text: str) -> None:
    with refuses(TypeNotSupported, "QK-E302", text, name):
        cpu_function(verb, BY_NAME[name])


def test_capabilities_are_known_without_compilation() -> None:
    code = "import sys, quantkit.model.graph, quantkit.cli.types; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
