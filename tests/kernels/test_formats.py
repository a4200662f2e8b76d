"""The registry of types: every record has its functions, and a type is at home in few places, which are counted."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blocks import random_rows

from quantkit.errors import TypeNotSupported
from quantkit.kernels import formats, reference
from quantkit.kernels.cuda.core.generated import headers
from quantkit.kernels.cuda.unpack import decoders
from quantkit.kernels.formats import BLOCK_TYPES, FORMATS, Format, cpu_function, format_of
from quantkit.types import BY_NAME, ROWS, TensorType

KERNELS = Path(formats.__file__).parent
PRODUCT = KERNELS.parent

#: What a record's family is made of: where its functions are looked for.
CPU = {verb: KERNELS / "cpu" / verb for verb in ("encode", "unpack")}

by_record = pytest.mark.parametrize("record", FORMATS.values(), ids=lambda record: record.type.name)


def functions(path: Path) -> set[str]:
    """Return the names that a module defines, without importing it."""
    body = ast.parse(path.read_text()).body
    names = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    return names | {
        target.id for n in body if isinstance(n, ast.Assign) for target in n.targets if isinstance(target, ast.Name)
    }


@by_record
def test_a_record_has_its_functions(record: Format, golden: dict[str, np.ndarray]) -> None:
    """One encoder if it encodes, one unpacker on either side, a reference; none that the registry does not know of.

    A type of neither tree may lack a CUDA twin, and there is nobody whose bytes it could have.
    """
    name, cuda = record.type.name.lower(), KERNELS / f"cuda/unpack/{record.family}.cuh"
    assert hasattr(reference, f"decode_{name}")
    encoders = CPU["encode"] / f"{record.family}.py"
    encoder_names = functions(encoders) if encoders.exists() else set()
    assert (f"encode_{name}" in encoder_names) == record.encodes
    assert (f"encode_{name}_ik" in encoder_names) == record.ik_encoder
    assert not record.ik_encoder or (record.encodes and record.type.trees == "both")
    is_own = record.type.trees == "none"
    if not is_own or record.type.name in decoders():
        assert f"struct {record.type.name} : traits::{record.type.name} {{" in cuda.read_text()
        assert f'#include "unpack/{record.family}.cuh"' in (KERNELS / "cuda/unpack/all.cuh").read_text()
    assert (
        f"struct {record.type.name} {{ static const int BLOCK = {record.type.block}, " in headers()["unpack/traits.cuh"]
    )
    assert record.type.in_files != (record.type in ROWS)
    if not record.is_float:
        assert f"unpack_{name}" in functions(CPU["unpack"] / f"{record.family}.py")
        assert is_own or {record.type.name, f"{record.type.name}+imatrix"} & golden.keys()
        assert record.span in (16, 32)
        assert record.unit_bytes <= 320  # what skeletons keep of a row's end


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
OPTIONAL |= {"kernels/interleave.py", "kernels/levels.py", "kernels/cuda/unpack/ik_dot_forms.cuh"}


def naming(t: TensorType) -> set[str]:
    """Return the product's files of kernels, models and formats that name a type, but for tables' descriptions."""
    sources = [PRODUCT / "types.py", *(p for d in ("kernels", "model", "formats") for p in (PRODUCT / d).rglob("*.*"))]
    pattern = re.compile(rf"(?<![A-Z0-9]){t.name}(?![A-Z0-9]|_[A-Z0-9])", re.IGNORECASE)
    texts = {p: p.read_text() for p in sources if p.suffix in (".py", ".cu", ".cuh") and p.name != "tables.py"}
    return {p.relative_to(PRODUCT).as_posix() for p, text in texts.items() if pattern.search(text)}


@pytest.mark.parametrize("name", ["IQ4_KS", "IQ2_KL", "IQ1_BN", "NVFP4", "Q1_0"])
def test_a_type_is_at_home_in_six_places(name: str) -> None:
    """Before the registry it was 10 places for any type, and up to 8 more sets of types for some."""
    record = FORMATS[name]
    places = {place.format(record.family) for place in PLACES}
    actual = naming(record.type)
    assert places - actual <= ({f"kernels/cpu/encode/{record.family}.py"} if not record.encodes else set())
    on_cuda = {f"kernels/cuda/encode/{record.family}.cuh"}
    assert not actual - places - OPTIONAL - on_cuda - NAMED_AS_EXAMPLES.get(name, set())


#: Files that name a type as an example: in comments, or to compile one of each way (``operations``).
NAMED_AS_EXAMPLES = {
    "NVFP4": {"kernels/cuda/matmul/mat_mat.py", "kernels/cuda/core/halves.cuh", "kernels/cpu/encode/check.py"},
    "Q1_0": {"kernels/cuda/matmul/mat_vec.py"},
}


@pytest.mark.parametrize("t", [t for t in BY_NAME.values() if t.row_scale], ids=str)
def test_a_row_s_scale_lies_in_its_header(t: TensorType) -> None:
    assert t.row_header >= {"f16": 2, "f32": 4}[t.row_scale]
    assert t.fields[0] == (True, t.row_scale, 0)


@pytest.mark.parametrize("t", [t for t in BLOCK_TYPES if t.row_scale], ids=str)
def test_a_row_s_scale_multiplies_the_whole_row(t: TensorType) -> None:
    """A power of two is exact; and the unit of a type is its blocks, not the header."""
    rows = random_rows(t, 3, 512, scale=(0.25, 1))
    doubled = rows.copy()
    kind = {"f16": np.float16, "f32": np.float32}[t.row_scale]
    head = np.ascontiguousarray(rows[:, : np.dtype(kind).itemsize]).view(kind)
    doubled[:, : head.itemsize] = (head * kind(2)).view(np.uint8)
    np.testing.assert_array_equal(reference.decode_rows(t, doubled), 2 * reference.decode_rows(t, rows))
    assert t.row_bytes(512) == t.row_header + 2 * format_of(t).unit_bytes


def test_alignment_is_what_every_row_and_block_keeps() -> None:
    assert {name: FORMATS[name].align for name in ("Q4_K", "IQ4_XS", "IQ4_KS", "IQ2_KS", "MXFP4")} == {
        "Q4_K": 16, "IQ4_XS": 8, "IQ4_KS": 4, "IQ2_KS": 2, "MXFP4": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "verb", "text"), [("IQ4_K_R4", "unpack", "unpacker"), ("Q8_1", "encode", "encoder")])
def test_what_is_missing_is_named(name: str, verb: str, text: str) -> None:
    with pytest.raises(TypeNotSupported, match=f"there is no {text} for {name}"):
        cpu_function(verb, BY_NAME[name])


def test_nothing_compiles_to_know_what_a_type_can() -> None:
    code = "import sys, quantkit.model.graph, quantkit.cli.types; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
