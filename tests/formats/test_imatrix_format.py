"""formats/imatrix: both formats in and out, the exact values encoders see, and files that lie."""

from __future__ import annotations

import shutil
import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from peer_cache import program_answer
from refusals import refuses

from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, ValueType, open_gguf, write_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from quantkit.types import BY_NAME

F32 = BY_NAME["F32"]

# Two entries and a trailer, written out by hand from the layout.
TINY_DAT = bytes.fromhex(
    "02000000"  # n_entries
    "01000000" "61" "03000000" "02000000" "0000c03f" "00004040"  # "a", ncall 3, 2 values: 1.5, 3
    "05000000" "622e632e64" "00000000" "01000000" "00000041"  # "b.c.d", ncall 0, 1 value: 8
    "07000000" "04000000" "632e7478"  # 7 chunks of "c.tx"
)  # fmt: skip

ONE = np.ones(4, np.float32)


def required_fields(**changed: Field | None) -> list[Field]:
    fields: dict[str, Field | None] = {
        "type": Field.of("general.type", "imatrix"),
        "datasets": Field.of("imatrix.datasets", ["text"]),
        "count": Field.of("imatrix.chunk_count", 2, ValueType.UINT32),
        "size": Field.of("imatrix.chunk_size", 8, ValueType.UINT32),
        **changed,
    }
    return [field for field in fields.values() if field is not None]


def f32(name: str, values: object, shape: tuple[int, ...] | None = None) -> tuple[object, ...]:
    array = np.asarray(values, "<f4").reshape(-1)
    return name, shape or (array.size,), F32, array.tobytes()


def write_file(path: Path, tensors: list[tuple[object, ...]], fields: list[Field] | None = None) -> Path:
    write_gguf(path, required_fields() if fields is None else fields, tensors)  # type: ignore[arg-type]
    return path


def assert_equal(a: Imatrix, b: Imatrix) -> None:
    assert (a.datasets, a.chunk_count, a.chunk_size, a.format) == (b.datasets, b.chunk_count, b.chunk_size, b.format)
    assert (a.n_layer_nextn, a.stats_schema) == (b.n_layer_nextn, b.stats_schema)
    assert sorted(a.entries) == sorted(b.entries)
    for name, x in a.entries.items():
        y = b.entries[name]
        assert np.array_equal(x.sums.view(np.uint32), y.sums.view(np.uint32))
        assert np.array_equal(x.counts, y.counts)
        for p, q in ((x.in_sum, y.in_sum), (x.stats, y.stats)):
            assert (p is None) == (q is None)
            assert p is None or q is None or np.array_equal(p, q, equal_nan=True)


# --- the reference files ---


def test_gguf_of_llama_cpp(data: Path) -> None:
    imatrix = read_imatrix(data / "tiny-moe-imatrix.gguf")
    assert (imatrix.format, imatrix.chunk_count, imatrix.chunk_size) == ("gguf", 343, 256)
    assert imatrix.datasets == ["calibration.txt"]
    assert len(imatrix.entries) == 32
    assert imatrix.sha256 == "d13062cf6fec79a138c0d9bd258440d7081e9c0c797b803f40d05f1c1798543f"
    experts = imatrix.entries["blk.0.ffn_down_exps.weight"]
    assert experts.sums.shape == (8, 256)
    assert experts.counts.tolist() == [15899, 30858, 16913, 15784, 15066, 25660, 28299, 27137]
    reader = gguf.GGUFReader(data / "tiny-moe-imatrix.gguf")
    peer = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, entry in imatrix.entries.items():
        assert np.array_equal(entry.sums.reshape(-1), peer[f"{name}.in_sum2"].reshape(-1))
        assert entry.in_sum is not None
        assert np.array_equal(entry.in_sum.reshape(-1), peer[f"{name}.in_sum"].reshape(-1))


@pytest.mark.parametrize("tree", ["", "-ik"])
def test_dat_of_both_projects(data: Path, tree: str) -> None:
    imatrix = read_imatrix(data / f"tiny-moe-imatrix{tree}.dat")
    assert (imatrix.format, imatrix.chunk_count, imatrix.datasets) == ("dat", 343, ["calibration.txt"])
    assert imatrix.entries.keys() == read_imatrix(data / "tiny-moe-imatrix.gguf").entries.keys()
    assert imatrix.entries["blk.3.ffn_up_exps.weight"].sums.shape == (1, 8 * 256)


def test_both_formats_of_one_calibration_agree(data: Path) -> None:
    a, b = (read_imatrix(data / f"tiny-moe-imatrix.{kind}") for kind in ("gguf", "dat"))
    for name in a.entries:
        np.testing.assert_allclose(a.values(name), b.values(name), rtol=2e-7, atol=0)


def test_both_projects_collected_on_the_same_text(data: Path) -> None:
    a, b = (read_imatrix(data / f"tiny-moe-imatrix{tree}.dat") for tree in ("", "-ik"))
    for name in a.entries:
        ratio = np.median(b.values(name) / a.values(name))
        assert 0.98 < ratio < 1.02, name


@pytest.mark.parametrize("kind", ["gguf", "dat"])
def test_written_files_equal_llama_cpps_byte_for_byte(data: Path, tmp_path: Path, kind: str) -> None:
    imatrix = read_imatrix(data / "tiny-moe-imatrix.gguf")
    write_imatrix(tmp_path / "out", imatrix, kind)  # type: ignore[arg-type]
    assert (tmp_path / "out").read_bytes() == (data / f"tiny-moe-imatrix.{kind}").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- golden bytes ---


def test_golden_dat(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"  # the name says nothing about the format
    path.write_bytes(TINY_DAT)
    imatrix = read_imatrix(path)
    assert (imatrix.datasets, imatrix.chunk_count, imatrix.format) == (["c.tx"], 7, "dat")
    assert imatrix.values("a").tolist() == [0.5, 1.0]
    assert imatrix.values("b.c.d").tolist() == [8.0]  # ncall 0: as it is
    write_imatrix(path, imatrix, "dat")
    assert path.read_bytes() == TINY_DAT


def test_trailer_is_optional(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(TINY_DAT[:-12])
    imatrix = read_imatrix(path)
    assert (imatrix.datasets, imatrix.chunk_count, len(imatrix.entries)) == ([], 0, 2)


def test_one_division_in_float32(tmp_path: Path) -> None:
    """Not the float64 quotient, not the product with the reciprocal: one float32 division."""
    sums = np.random.default_rng(1).gamma(1, 1000, (3, 1000)).astype(np.float32)
    counts = np.array([7, 0, 2**24 + 1])
    path = write_file(tmp_path / "x.gguf", [f32("w.in_sum2", sums, (1000, 3)), f32("w.counts", counts, (1, 3))])
    values = read_imatrix(path).values("w").reshape(3, -1)
    assert values.dtype == np.float32
    for row, x in zip(values[0], sums[0], strict=True):
        assert row == np.float32(float(x) / 7)  # a float64 quotient of floats rounds to the float32 quotient
    assert (values[0] != sums[0] * np.float32(1 / 7)).any()
    assert (values[1] == 1).all()
    assert np.array_equal(values[2], sums[2] / np.float32(2**24))


def test_counts_are_rounded_like_lround(tmp_path: Path) -> None:
    counts = [0.4, 0.5, 1.5, 2.5]
    path = write_file(tmp_path / "x.gguf", [f32("w.in_sum2", ONE), f32("w.counts", counts, (1, 4))])
    assert read_imatrix(path).entries["w"].counts.tolist() == [0, 1, 2, 3]


def test_several_datasets_and_nextn_layers(tmp_path: Path) -> None:
    fields = [
        *required_fields(datasets=Field.of("imatrix.datasets", ["a", "é", "c"])),
        Field.of("imatrix.n_layer_nextn", 1, ValueType.UINT32),
    ]
    path = write_file(tmp_path / "x.gguf", [f32("w.in_sum2", ONE), f32("w.counts", [1])], fields)
    imatrix = read_imatrix(path)
    assert imatrix.datasets == ["a", "é", "c"]
    write_imatrix(tmp_path / "y.gguf", imatrix)
    assert_equal(imatrix, read_imatrix(tmp_path / "y.gguf"))
    write_imatrix(tmp_path / "y.dat", imatrix, "dat")
    assert read_imatrix(tmp_path / "y.dat").datasets == ["c"]  # the last one, as llama.cpp


def test_a_dataset_is_always_written(tmp_path: Path) -> None:
    imatrix = Imatrix(tmp_path / "x", {"w": ImatrixEntry(ONE[None], np.array([3]))}, chunk_size=3)
    write_imatrix(tmp_path / "x.gguf", imatrix)
    assert open_gguf(tmp_path / "x.gguf").get("imatrix.datasets") == ["unknown"]


# --- round trips ---

NAMES = st.text("abcdefghijklmnopqrstuvwxyz_.0123456789é", min_size=1, max_size=20).filter(lambda s: s.strip("."))
SUMS = st.floats(0, 2.0**100, width=32)


@st.composite
def imatrices(draw: st.DrawFn, kind: str) -> Imatrix:
    entries = {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)):
        n_mat = draw(st.integers(1, 4)) if kind == "gguf" else 1
        shape = (n_mat, draw(st.integers(1, 9)))
        sums = draw(arrays(np.float32, shape, elements=SUMS))
        counts = draw(arrays(np.int64, (n_mat,), elements=st.integers(0, 2**24)))
        with_in_sum = kind == "gguf" and draw(st.booleans())
        in_sum = draw(arrays(np.float32, shape, elements=st.floats(-1e3, 1e3, width=32))) if with_in_sum else None
        entries[name] = ImatrixEntry(sums, counts, in_sum)
    dataset = st.text("xyz/é", min_size=1, max_size=9)
    datasets = draw(st.lists(dataset, min_size=1, max_size=3 if kind == "gguf" else 1))
    chunk_size = draw(st.integers(1, 4096)) if kind == "gguf" else 0
    return Imatrix(Path("memory"), entries, datasets, draw(st.integers(0, 9999)), chunk_size, kind)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", ["gguf", "dat"])
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject) -> None:
    imatrix = data.draw(imatrices(kind))
    path = tmp_path_factory.getbasetemp() / f"round-trip.{kind}"
    write_imatrix(path, imatrix, kind)  # type: ignore[arg-type]
    copy = read_imatrix(path)
    assert list(copy.entries) == sorted(imatrix.entries)
    assert_equal(imatrix, copy)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_dat_to_gguf_changes_no_value(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    imatrix = data.draw(imatrices("dat"))
    path = tmp_path_factory.getbasetemp() / "converted.gguf"
    write_imatrix(path, imatrix)
    copy = read_imatrix(path)
    assert copy.chunk_size == 512
    for name in imatrix.entries:
        assert np.array_equal(imatrix.values(name), copy.values(name))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gguf_to_dat_agrees_to_rounding(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    imatrix = data.draw(imatrices("gguf").filter(lambda m: all(e.counts.any() for e in m.entries.values())))
    path = tmp_path_factory.getbasetemp() / "converted.dat"
    write_imatrix(path, imatrix, "dat")
    copy = read_imatrix(path)
    for name in imatrix.entries:
        np.testing.assert_allclose(copy.values(name), imatrix.values(name), rtol=3e-7, atol=1e-37)


def test_experts_and_weights_without_tokens(tmp_path: Path) -> None:
    entries = {
        "half": ImatrixEntry(np.full((2, 4), 6, np.float32), np.array([0, 3])),
        "none": ImatrixEntry(np.zeros((2, 4), np.float32), np.array([0, 0])),
    }
    imatrix = Imatrix(tmp_path / "x", entries, ["t"], 1, 2)
    assert imatrix.values("half").tolist() == [1] * 4 + [2] * 4
    write_imatrix(tmp_path / "x.dat", imatrix, "dat")
    copy = read_imatrix(tmp_path / "x.dat")
    assert list(copy.entries) == ["half"]  # llama.cpp leaves the other one out
    assert copy.entries["half"].counts.tolist() == [2]  # ceil(3 tokens / chunk of 2)
    assert copy.values("half").tolist() == [1] * 4 + [2] * 4
    write_imatrix(tmp_path / "x.gguf", imatrix)
    assert read_imatrix(tmp_path / "x.gguf").entries["none"].counts.tolist() == [0, 0]
    del imatrix.entries["half"]
    with refuses(FormatError, "QK-E305 y.dat"):
        write_imatrix(tmp_path / "y.dat", imatrix, "dat")


def test_weights_survive_the_file_being_replaced(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    shutil.copy(data / "tiny-moe-imatrix.gguf", path)
    imatrix = read_imatrix(path)
    write_imatrix(path, Imatrix(path, {"w": ImatrixEntry(ONE[None], np.array([1]))}))
    assert_equal(imatrix, read_imatrix(data / "tiny-moe-imatrix.gguf"))


# --- what cannot be written ---


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    long = Imatrix(path, {"n" * 56: ImatrixEntry(ONE[None], np.array([1]))}, chunk_size=1)
    with refuses(FormatError, "QK-E305 63 55 .in_sum2"):
        write_imatrix(path, long)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    write_imatrix(path, long, "dat")
    assert list(read_imatrix(path).entries) == ["n" * 56]


def test_limits_of_the_formats(tmp_path: Path) -> None:
    calls = Imatrix(tmp_path, {"w": ImatrixEntry(ONE[None], np.array([2**40]))}, chunk_size=1)
    with refuses(FormatError, "QK-E305 .dat int32"):
        write_imatrix(tmp_path / "x", calls, "dat")
    huge = Imatrix(tmp_path, {"w": ImatrixEntry(np.full((1, 1), 3e38, np.float32), np.array([1]))}, format="dat")
    with refuses(FormatError, "QK-E305 float32"):
        write_imatrix(tmp_path / "x", huge)
    write_imatrix(tmp_path / "x", huge, chunk_size=1)
    assert read_imatrix(tmp_path / "x").values("w")[0] == np.float32(3e38)
    with refuses(FormatError, "QK-E118"):
        write_imatrix(tmp_path / "x", Imatrix(tmp_path, {}))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ImatrixEntry(ONE, np.array([1])), "sums must be"),
        (ImatrixEntry(ONE[None].astype(np.float64), np.array([1])), "sums must be"),  # type: ignore[arg-type]
        (ImatrixEntry(ONE[None], np.array([1, 2])), "counts must be"),
        (ImatrixEntry(ONE[None], np.array([-1])), "counts must be"),
        (ImatrixEntry(ONE[None], np.array([1]), ONE), "in_sum must have"),
    ],
)
def test_misshapen_entries_raise_value_error(tmp_path: Path, entry: ImatrixEntry, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_imatrix(tmp_path / "x", Imatrix(tmp_path, {"w": entry}))


# --- hostile .dat ---


def patched(offset: int, value: int) -> bytes:
    return TINY_DAT[:offset] + struct.pack("<i", value) + TINY_DAT[offset + 4 :]


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (b"", "QK-E118 bad.dat"),
        (b"\x01\x00", "QK-E118 0 4 2"),
        (patched(0, 0), "QK-E118 0"),
        (patched(0, -5), "QK-E118 0 -5"),
        (patched(0, 2**31 - 1), "QK-E118 0 2147483647 58"),
        (patched(0, 3), "QK-E118 3 \\x04 57 4 1"),
        (patched(4, -1), "QK-E118 1 4 -1"),
        (patched(4, 0), "QK-E118 1 4 0"),
        (patched(4, 2**31 - 1), "QK-E118 1 8 2147483647"),
        (patched(9, -3), "QK-E118 1 9 -3"),
        (patched(13, 0), "QK-E118 1 13 0"),
        (patched(13, -2), "QK-E118 1 13 -2"),
        (patched(13, 2**31 - 1), "QK-E118 1 17 2147483647 8589934588"),
        (patched(46, -1), "QK-E118 46 -1"),
        (patched(50, -1), "QK-E118 50 -1"),
        (patched(50, 5), "QK-E118 54 5 4"),
        (patched(50, 3), "QK-E118 57 1"),
        (TINY_DAT.replace(b"b.c.d", b"b.\xff.d"), "QK-E118 2 31 UTF-8"),
        (TINY_DAT.replace(b"b.c.d", b"\0.c.d"), "QK-E118 2 29"),
        (TINY_DAT.replace(b"b.c.d", b"a\0c.d"), "QK-E118 2 25"),
    ],
)
def test_hostile_dat(tmp_path: Path, content: bytes, refusal: str) -> None:
    path = tmp_path / "bad.dat"
    path.write_bytes(content)
    with refuses(FormatError, refusal) as caught:
        read_imatrix(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("n", range(len(TINY_DAT)))
def test_every_truncation_is_detected(tmp_path: Path, n: int) -> None:
    path = tmp_path / "cut.dat"
    path.write_bytes(TINY_DAT[:n])
    if n == len(TINY_DAT) - 12:
        assert len(read_imatrix(path).entries) == 2  # exactly the trailer is missing: an old file
    else:
        with refuses(FormatError, "QK-E118 cut.dat"):
            read_imatrix(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_dat_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(TINY_DAT)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.dat"
    path.write_bytes(content)
    with suppress(FormatError):
        imatrix = read_imatrix(path)
        assert sum(entry.sums.nbytes for entry in imatrix.entries.values()) <= len(content)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E401"):
        read_imatrix(tmp_path / "missing")
    with refuses(FormatError, "QK-E120"):
        read_imatrix(tmp_path)


# --- hostile GGUF ---

PAIR = [f32("w.in_sum2", ONE), f32("w.counts", [1])]


@pytest.mark.parametrize("key", ["datasets", "count", "size"])
def test_required_keys(tmp_path: Path, key: str) -> None:
    path = write_file(tmp_path / "x", PAIR, required_fields(**{key: None}))
    with refuses(FormatError, "QK-E118"):
        read_imatrix(path)


def test_a_model_is_not_an_imatrix(tiny_moe: Path) -> None:
    with refuses(FormatError, "QK-E118 imatrix.datasets general.type model"):
        read_imatrix(tiny_moe)


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"datasets": Field.of("imatrix.datasets", "text")}, "QK-E118 imatrix.datasets"),
        ({"datasets": Field.of("imatrix.datasets", [1, 2])}, "QK-E118 imatrix.datasets"),
        ({"count": Field.of("imatrix.chunk_count", 1, ValueType.INT32)}, "QK-E118 uint32 int32"),
        ({"size": Field.of("imatrix.chunk_size", "8")}, "QK-E118 uint32"),
    ],
)
def test_keys_of_the_wrong_type(tmp_path: Path, changed: dict[str, Field | None], refusal: str) -> None:
    path = write_file(tmp_path / "x", PAIR, required_fields(**changed))
    with refuses(FormatError, refusal):
        read_imatrix(path)


@pytest.mark.parametrize(
    ("tensors", "refusal"),
    [
        ([], "QK-E118 *.in_sum2"),
        ([f32("w.stats", [1.0])], "QK-E118 *.in_sum2"),
        ([f32("w.in_sum2", ONE)], "QK-E118 w w.counts"),
        ([f32("w.counts", [1])], "QK-E118 w w.in_sum2"),
        ([*PAIR, f32("v.in_sum", ONE)], "QK-E118 v v.in_sum2"),
        ([*PAIR, f32("w.in_sum", ONE[:2])], "QK-E118 w.in_sum 2 w.in_sum2 4"),
        ([f32(".in_sum2", ONE), f32(".counts", [1])], "QK-E118 .in_sum2 288"),
        ([("w.in_sum2", (4,), BY_NAME["F16"], bytes(8)), PAIR[1]], "QK-E118 w.in_sum2 F32 F16"),
        ([PAIR[0], f32("w.counts", [1, 1, 1], (1, 3))], "QK-E118 [4] 3"),
        ([f32("w.in_sum2", ONE, (1, 4)), f32("w.counts", [1, 1], (1, 2))], "QK-E118 2"),
        ([PAIR[0], f32("w.counts", [-1])], "QK-E118 0 -1.0"),
        ([f32("w.in_sum2", ONE), f32("w.counts", [1, np.nan], (1, 2))], "QK-E118 1"),
        ([PAIR[0], f32("w.counts", [np.inf])], "QK-E118 0"),
        ([PAIR[0], f32("w.counts", [1e30])], "QK-E118 0 1"),
    ],
)
def test_hostile_gguf(tmp_path: Path, tensors: list[tuple[object, ...]], refusal: str) -> None:
    path = write_file(tmp_path / "x.gguf", tensors)
    with refuses(FormatError, refusal) as caught:
        read_imatrix(path)
    assert str(path) in str(caught.value)


def test_truncated_gguf(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    content = (data / "tiny-moe-imatrix.gguf").read_bytes()
    for n in (4, 8, 24, 1000, 8000, len(content) // 2, len(content) - 64):
        path.write_bytes(content[:n])
        with refuses(FormatError, "QK-E102|QK-E103 cut.gguf"):
            read_imatrix(path)


def test_shapes_llama_cpp_reads(tmp_path: Path) -> None:
    """It looks at element counts alone: flat experts, and 3-D weights with one count, are fine."""
    flat = [f32("e.in_sum2", np.arange(8)), f32("e.counts", [1, 2], (1, 2))]
    heads = [f32("h.in_sum2", np.arange(8), (4, 2)), f32("h.counts", [2])]
    imatrix = read_imatrix(write_file(tmp_path / "x.gguf", flat + heads))
    assert imatrix.values("e").tolist() == [0, 1, 2, 3, 2, 2.5, 3, 3.5]
    assert imatrix.values("h").tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]


# --- peers ---


def quantized(llama_bin: Path, model: Path, imatrix: Path, out: Path) -> dict[str, bytes]:
    command = [llama_bin / "llama-quantize", "--imatrix", imatrix, model, out, "Q4_K_M", "2"]
    output = program_answer(command, [out])
    assert output.code == 0, output.text[-4000:]
    assert "did not find weights for blk" not in output.text
    with open_gguf(out) as file:
        return {name: file.data(name).tobytes() for name in file.tensors}


@pytest.mark.peer
@pytest.mark.parametrize(
    ("source", "kind"),
    [("tiny-moe-imatrix.gguf", "gguf"), ("tiny-moe-imatrix.dat", "dat"), ("tiny-moe-imatrix-ik.dat", "gguf")],
)
def test_llama_quantize_reads_the_written_file(
    llama_bin: Path, tiny_moe: Path, data: Path, tmp_path: Path, source: str, kind: str
) -> None:
    """Equal tensor bytes from the original and from our copy, the last one converted from .dat to GGUF."""
    path = tmp_path / f"ours.{kind}"
    imatrix = read_imatrix(data / source)
    del imatrix.stats_schema[:]
    for entry in imatrix.entries.values():
        entry.stats = None
    write_imatrix(path, imatrix, kind)  # type: ignore[arg-type]
    a = quantized(llama_bin, tiny_moe, data / source, tmp_path / "a.gguf")
    b = quantized(llama_bin, tiny_moe, path, tmp_path / "b.gguf")
    assert a == b
    plain = open_gguf(tiny_moe)
    assert any(a[name] != plain.data(name).tobytes() for name in a)
