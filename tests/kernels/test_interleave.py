"""Row-interleaved types: ik_llama.cpp's bytes, exact inverses, and that everything else sees their base type."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blocks import random_rows
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_cache import program_answer
from refusals import refuses

from conftest import DATA
from guide import step
from quantkit.cli import cli
from quantkit.compare import compare
from quantkit.errors import FormatError, RecipeError, ResourceError, TypeNotSupported
from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.kernels import dequantize
from quantkit.kernels import quantize as encode
from quantkit.kernels.cpu.encode import encoder
from quantkit.kernels.cpu.encode.check import validate_rows
from quantkit.kernels.cpu.interleave import deinterleave_rows, interleave_rows
from quantkit.kernels.formats import encoder_for, has_decoder, has_encoder
from quantkit.kernels.interleave import (
    BASES,
    base_of,
    can_interleave,
    interleaved_of,
    is_interleaved,
    layout_of,
    plain_of,
    repacks,
)
from quantkit.pipeline import encoding, jobs
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
from quantkit.types import BY_NAME, TYPES, TensorType
from small_models import tensor_bytes, write_model

U8 = np.ndarray

INTERLEAVED = [BY_NAME[name] for name in BASES]
EXACT = [t for t in INTERLEAVED if layout_of(t).is_exact]
GOLDEN = dict(np.load(DATA / "golden-interleaved.npz"))

any_interleaved = pytest.mark.parametrize("t", INTERLEAVED, ids=str)
any_exact = pytest.mark.parametrize("t", EXACT, ids=str)


def interleaved(t: TensorType, rows: U8) -> U8:
    n = (rows.shape[1] - base_of(t).row_header) // base_of(t).block_bytes * base_of(t).block
    out = np.empty((len(rows), t.row_bytes(n)), np.uint8)
    interleave_rows(t, np.ascontiguousarray(rows), out)
    return out


def deinterleave(t: TensorType, rows: U8, target: TensorType | None = None) -> U8:
    n = (rows.shape[1] - t.row_header) // t.block_bytes * t.block
    out = np.empty((len(rows), (target or base_of(t)).row_bytes(n)), np.uint8)
    deinterleave_rows(t, np.ascontiguousarray(rows), out, target)
    return out


def sensible(t: TensorType, rows: int, n: int) -> U8:
    """Return random rows of a base type, interleaved; of a type without a way back, random bytes."""
    if layout_of(t).is_exact:
        return interleaved(t, random_rows(base_of(t), rows, n, scale=(0.01, 1)))
    data = np.random.default_rng(3).integers(0, 256, (rows, t.row_bytes(n)), dtype=np.uint8)
    scales = np.full(t.interleave, 0.125, np.float16).view(np.uint8)
    data.reshape(rows // t.interleave, -1, t.interleave * t.block_bytes)[..., : scales.size] = scales
    return data


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("name", [n for n in GOLDEN if "/" not in n and f"{n}/base" in GOLDEN])
def test_interleaving_golden_base_bytes_gives_golden_interleaved_bytes(name: str) -> None:
    t, base = BY_NAME[name.partition("+")[0]], GOLDEN[f"{name}/base"]
    np.testing.assert_array_equal(interleaved(t, base), GOLDEN[name][:16])
    np.testing.assert_array_equal(deinterleave(t, GOLDEN[name][:16]), base)


def test_golden_bytes_exist_for_all_encoders_of_ik() -> None:
    proven = {n.partition("+")[0] for n in GOLDEN if n.endswith("/base")} | {n.partition("+")[0] for n in GOLDEN}
    arm = {"Q4_0_4X4", "Q4_0_4X8", "Q4_0_8X8"}
    expected = arm | {"MXFP4_R8", "BF16_R16", "Q8_K_R16"}
    missing = {t.name for t in INTERLEAVED} - {n.removesuffix("/base") for n in proven}
    assert missing == expected, step("Add a type", 9, TYPE=" ".join(missing ^ expected))


@any_exact
@settings(max_examples=20)
@given(data=st.data())
def test_both_directions_are_exact_inverses(t: TensorType, data: st.DataObject) -> None:
    layout = layout_of(t)
    rows = t.interleave * data.draw(st.integers(1, 3))
    n = layout.values * data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    plain = rng.integers(0, 256, (rows, layout.base.row_bytes(n)), dtype=np.uint8)
    if layout.base.name == "Q8_KV":  # its sum is counted again
        plain[:, 4:8] = plain[:, 8:].view(np.int8).sum(axis=1, dtype=np.int32)[:, None].view(np.uint8)
    np.testing.assert_array_equal(deinterleave(t, interleaved(t, plain)), plain)
    tangled = rng.integers(0, 256, (rows, t.row_bytes(n)), dtype=np.uint8)
    np.testing.assert_array_equal(interleaved(t, deinterleave(t, tangled)), tangled)


@any_exact
def test_a_layout_is_a_permutation(t: TensorType) -> None:
    interleave = layout_of(t).source_bits
    assert interleave is not None
    np.testing.assert_array_equal(np.sort(interleave), np.arange(interleave.size))


@pytest.mark.parametrize(("name", "size"), [("Q4_0_4X4", 4), ("Q4_0_4X8", 8), ("Q4_0_8X8", 8)])
def test_arm_layouts(name: str, size: int) -> None:
    """Scales first, then pieces of each row in turn, nibbles with a sign: ggml-aarch64.c, make_block_q4_0x4."""
    t, rng = BY_NAME[name], np.random.default_rng(0)
    rows = rng.integers(0, 256, (t.interleave, 18), dtype=np.uint8)
    expected = [*rows[:, :2].reshape(-1)]
    for first in range(2, 18, size):
        expected += [byte ^ 0x88 for row in rows for byte in row[first : first + size]]
    assert interleaved(t, rows).reshape(-1).tolist() == [int(b) for b in expected]


@pytest.mark.parametrize("t", [BY_NAME["BF16_R16"], BY_NAME["MXFP4_R8"]], ids=str)
def test_dwords_alternate(t: TensorType) -> None:
    size = {"BF16_R16": 0, "MXFP4_R8": 1}[t.name]
    rows = np.random.default_rng(0).integers(0, 256, (t.interleave, base_of(t).row_bytes(32)), dtype=np.uint8)
    dwords = rows[:, size:].reshape(t.interleave, -1, 4).swapaxes(0, 1)
    np.testing.assert_array_equal(
        interleaved(t, rows).reshape(-1), np.concatenate([rows[:, :size].reshape(-1), dwords.reshape(-1)])
    )


def test_pairs_of_bf16_are_interleaved() -> None:
    t, rows = BY_NAME["BF16_R16"], np.arange(32 * 68, dtype=np.uint8).reshape(32, 68)
    np.testing.assert_array_equal(deinterleave(t, interleaved(t, rows)), rows)
    np.testing.assert_array_equal(
        interleaved(t, rows)[:16].reshape(17, 16, 4), rows[:16].reshape(16, 17, 4).swapaxes(0, 1)
    )


@pytest.mark.parametrize("n", [32, 66, 96])
def test_floats_are_truncated_to_bf16(n: int) -> None:
    """Whatever they are, a NaN with any bits too; also some rows of a matrix."""
    t, bits = BY_NAME["BF16_R16"], np.random.default_rng(n).integers(0, 1 << 32, (48, n), dtype=np.uint32)
    out = np.zeros((48, t.row_bytes(n)), np.uint8)
    encoder(t, "ik")(bits.view(np.float32), np.zeros(0, np.float32), out, 16, 48)
    assert not out[:16].any()
    np.testing.assert_array_equal(out[16:], interleaved(t, (bits[16:] >> 16).astype(np.uint16).view(np.uint8)))


@pytest.mark.parametrize("n", [32, 96, 256, 288, 544])
def test_rows_of_q8_kv_are_interleaved_as_they_are_encoded(n: int) -> None:
    """Also rows of zeros, and of values so small that their scale is 0; also some rows of a matrix."""
    t, x = BY_NAME["Q8_KV_R8"], np.random.default_rng(n).standard_normal((32, n)).astype(np.float32)
    x[9], x[10], x[11] = 0, 1e-45, x[11] * 1e-42
    out, rows = np.zeros((32, t.row_bytes(n)), np.uint8), np.zeros((32, base_of(t).row_bytes(n)), np.uint8)
    for kind, buffer in ((t, out), (base_of(t), rows)):
        encoder(kind, "ik")(x, np.zeros(0, np.float32), buffer, 8, 24)
    assert not out[:8].any()
    assert not out[24:].any()
    np.testing.assert_array_equal(out[8:24], interleaved(t, rows[8:24]))


def test_what_cannot_be_interleaved_is_refused() -> None:
    t = BY_NAME["Q8_K_R8"]
    with refuses(TypeNotSupported, "QK-E300 Q8_0 Q8_K_R8"):
        interleave_rows(t, np.zeros((8, 272), np.uint8), np.zeros((8, 258), np.uint8))
    with refuses(TypeNotSupported, "QK-E300 Q4_K"):
        layout_of(BY_NAME["Q4_K"])
    with refuses(TypeNotSupported, "QK-E300 IQ1_M_R4 IQ1_M"):
        layout_of(BY_NAME["IQ1_M_R4"], row_type=BY_NAME["IQ1_M"])
    with pytest.raises(ValueError, match="a multiple of 4"):
        deinterleave(BY_NAME["Q4_K_R4"], np.zeros((6, 144), np.uint8))


def test_which_types_repack() -> None:
    q4, r4, r8, arm = (BY_NAME[name] for name in ("Q4_0", "Q4_K_R4", "Q4_0_R8", "Q4_0_4X4"))
    assert repacks(q4, r8)
    assert repacks(r8, q4)
    assert repacks(arm, r8)
    assert not repacks(q4, q4)
    assert not repacks(q4, r4)
    assert repacks(BY_NAME["Q8_K_R8"], BY_NAME["Q8_0"])
    assert not repacks(BY_NAME["Q8_0"], BY_NAME["Q8_K_R8"])
    assert interleaved_of(q4) is r8
    assert interleaved_of(BY_NAME["F16"]) is None
    assert can_interleave(BY_NAME["BF16_R16"], 34, 16)
    assert not can_interleave(BY_NAME["BF16_R16"], 33, 16)
    for name in ("IQ1_S_R4", "IQ1_M_R4"):  # blocks of 32, unlike those of IQ1_S and IQ1_M
        assert can_interleave(BY_NAME[name], 96, 4)
        assert not can_interleave(BY_NAME[name], 96, 6)


def test_converted_formats() -> None:
    """IQ1_S can represent the values of IQ1_S_R4; no other type those of IQ1_M_R4; and neither those of IQ1_S and
    IQ1_M."""
    s, m, s_r4, m_r4 = (BY_NAME[name] for name in ("IQ1_S", "IQ1_M", "IQ1_S_R4", "IQ1_M_R4"))
    assert (plain_of(s_r4), plain_of(m_r4)) == (s, None)
    assert repacks(s_r4, s)
    for pair in ((s, s_r4), (m, m_r4), (m_r4, m), (s_r4, m_r4)):
        assert not repacks(*pair)
    assert interleaved_of(s) is interleaved_of(m) is None


def test_every_interleaved_type_is_known() -> None:
    assert all(is_interleaved(t) for t in TYPES if t.interleave > 1)


# ---------------------------------------------------------------- values

#: Of some ik has no decoder; that of IQ2_BN_R4 leaves the scales of rows to its caller.
NO_DECODER_THERE = {"BF16_R16", "MXFP4_R8", "IQ2_BN_R4"}


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def ik_library(ik_bin: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(ik_bin.parent / "lib/libggml.so"))
    lib.ggml_init.argtypes, lib.ggml_init.restype = [InitParams], ctypes.c_void_p
    assert lib.ggml_init(InitParams(1 << 20, None, False))  # makes the table that halves are widened by
    return lib


@pytest.mark.parametrize("t", [t for t in INTERLEAVED if has_decoder(t)], ids=str)
def test_values_are_those_of_the_base_type(t: TensorType) -> None:
    rows = sensible(t, 2 * t.interleave, 768)
    np.testing.assert_array_equal(dequantize(rows, t, 768), dequantize(deinterleave(t, rows), base_of(t), 768))
    with refuses(FormatError, "QK-E303"):
        dequantize(rows[:-1], t, 768)


@pytest.mark.parametrize("name", ["Q8_K_R8", "Q8_K_R16"])
def test_q8_k_is_a_scale_and_levels(name: str) -> None:
    t = BY_NAME[name]
    r, rows = t.interleave, sensible(t, t.interleave, 512)
    blocks = rows.reshape(2, -1)
    scales = blocks[:, : 2 * r].copy().view(np.float16).astype(np.float32)  # [block, row]
    levels = blocks[:, 2 * r :] ^ (0x80 if r == 16 else 0)
    values = levels.view(np.int8).reshape(2, 64, r, 4).astype(np.float32) * scales[:, None, :, None]
    np.testing.assert_array_equal(dequantize(rows, t, 512), values.transpose(2, 0, 1, 3).reshape(r, 512))


def test_iq1_s_r4_is_iq1_s_with_a_scale_per_row() -> None:
    t, s = BY_NAME["IQ1_S_R4"], BY_NAME["IQ1_S"]
    rows = deinterleave(t, GOLDEN["IQ1_S_R4+imatrix"], s)
    np.testing.assert_array_equal(dequantize(rows, s, 1024), dequantize(GOLDEN["IQ1_S_R4+imatrix"], t, 1024))
    blocks = rows.reshape(48, 4, 50)
    assert (blocks[..., :2] == blocks[:, :1, :2]).all()


@pytest.mark.peer
@pytest.mark.parametrize("t", [t for t in INTERLEAVED if t.id > 100 and t.name not in NO_DECODER_THERE], ids=str)
def test_values_equal_iks(t: TensorType, ik_bin: Path) -> None:
    """Its decoders take a group of rows at a time; where signs are apart, a level 0 may become -0 there."""
    lib = ik_library(ik_bin)
    decode = getattr(lib, f"dequantize_row_{t.ggml_name}")
    decode.argtypes, decode.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    n, rows = 768, sensible(t, 3 * t.interleave, 768)
    expected = np.empty((len(rows), n), np.float32)
    for row in range(0, len(rows), t.interleave):
        group = np.ascontiguousarray(rows[row : row + t.interleave])
        decode(group.ctypes.data, expected[row:].ctypes.data, t.interleave * n)
    np.testing.assert_array_equal(dequantize(rows, t, n), expected)


@any_exact
def test_a_nonfinite_scale_is_detected(t: TensorType) -> None:
    base, n = base_of(t), 256
    assert base.scales
    rows = random_rows(base, 2 * t.interleave, n, scale=(0.5, 1))
    assert validate_rows(t, interleaved(t, rows)) == -1
    of_row, kind, offset = base.fields[-1]
    bad = {"f16": [0, 0x7C], "f32": [0, 0, 0x80, 0x7F], "bf16": [0x80, 0x7F], "e8m0": [0xFF]}[kind]
    start = offset if of_row else base.row_header + offset
    rows[t.interleave + 1, start : start + len(bad)] = bad
    assert validate_rows(t, interleaved(t, rows)) == t.interleave + 1


# ---------------------------------------------------------------- encoders

#: All that is encoded as in ik, with and without importance; where it is ignored, the file has the bytes once.
GOLDEN_TYPES = [n for n in GOLDEN if "/" not in n]


@pytest.mark.parametrize("name", GOLDEN_TYPES)
def test_encoders_equal_iks(name: str, golden: dict[str, np.ndarray]) -> None:
    """By default. Three values make a row of Q2_K_R4 ternary, tiny products silence importances, and Q8_K overflows."""
    t, _, weighted = name.partition("+")
    actual = encode(golden["x"], t, golden["imatrix"] if weighted else None)
    if t == "IQ1_M_R4":  # the first half of zeros in a group has the shift that the group before ended with
        differ = actual ^ GOLDEN[name]
        assert differ[differ != 0].tolist() == [0x88]
        actual ^= differ
    np.testing.assert_array_equal(actual, GOLDEN[name])
    if not weighted and f"{name}+imatrix" not in GOLDEN:
        np.testing.assert_array_equal(encode(golden["x"], t, golden["imatrix"]), GOLDEN[name])


@pytest.mark.parametrize("encoder", ["mainline", "ik"])
@pytest.mark.parametrize("t", [t for t in EXACT if has_encoder(t)], ids=str)
def test_encoding_is_encoding_the_base_type_and_repacking(t: TensorType, encoder: str) -> None:
    x = np.random.default_rng(1).standard_normal((3 * t.interleave, 512)).astype(np.float32)
    if t.name == "BF16_R16" and encoder == "ik":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # other values it cuts off, and BF16 rounds
    weights = np.random.default_rng(2).chisquare(3, 512).astype(np.float32)
    for w in (None, weights) if t.imatrix != "ignored" else (None,):
        if w is None and "required" in (t.imatrix, base_of(t).imatrix):
            continue
        np.testing.assert_array_equal(encode(x, t, w, encoder), interleaved(t, encode(x, base_of(t), w, encoder)))


@pytest.mark.parametrize("t", [t for t in EXACT if has_encoder(t)], ids=str)
def test_encoder_of_interleaved_types(t: TensorType) -> None:
    """ik's by default; mainline's where llama.cpp has the base type."""
    assert (encoder_for(t), encoder_for(t, "ik")) == ("ik", "ik")
    assert encoder_for(t, "mainline") == ("mainline" if base_of(t).trees == "both" else "ik")


@pytest.mark.parametrize(("encoder", "value"), [(None, 1.0), ("ik", 1.0), ("mainline", 1.0078125)])
def test_bf16_r16_truncates_values(encoder: str | None, value: float) -> None:
    x = np.full((16, 2), 1.00585938, np.float32)
    assert dequantize(encode(x, "BF16_R16", encoder=encoder), "BF16_R16", 2)[0, 0] == value


def test_a_missing_encoder_is_reported() -> None:
    missing = next((t for t in INTERLEAVED if not has_encoder(t)), None)
    if missing is not None:
        with refuses(TypeNotSupported, f"QK-E302 {missing}"):
            encode(np.zeros((missing.interleave, 256), np.float32), missing, np.ones(256, np.float32))


# ---------------------------------------------------------------- files


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repack")
    quantize(DATA / "tiny-moe-bf16.gguf", folder / "q4.gguf", "Q4_K_M", QuantizeOptions(no_provenance=True))
    return folder / "q4.gguf"


REPACK, UNREPACK = (QuantizeOptions(no_provenance=True, **{verb: True}) for verb in ("repack", "unrepack"))


def test_repack_and_unrepack_are_inverse(q4: Path, tmp_path: Path) -> None:
    repacked_path, plain_path = tmp_path / "there.gguf", tmp_path / "back.gguf"
    quantize(q4, repacked_path, "COPY", REPACK)
    quantize(repacked_path, plain_path, "COPY", UNREPACK)
    assert plain_path.read_bytes() == q4.read_bytes()
    with open_gguf(repacked_path) as file:
        types = {name: t.type.name for name, t in file.tensors.items()}
        assert file.get("general.file_type") == 214
    assert types["token_embd.weight"] == "Q4_K"
    assert types["output.weight"] == "Q6_K_R4"
    assert types["blk.0.ffn_up_exps.weight"] == "Q4_K_R4"
    assert types["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.peer
def test_a_repacked_file_equals_iks(q4: Path, tmp_path: Path, ik_bin: Path) -> None:
    actual, expected = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    for ours_only, options in (((), []), (("attn,_exps",), ["--repack-pattern", "attn,_exps"])):
        quantize(q4, actual, "COPY", QuantizeOptions(no_provenance=True, repack=True, repack_pattern=ours_only),
                 overwrite=True)  # fmt: skip
        command = [ik_bin / "llama-quantize", "--repack", *options, q4, expected, "Q4_K_R4"]
        assert not program_answer(command, [expected], {"LD_LIBRARY_PATH": f"{ik_bin.parent}/lib"}).code
        assert actual.read_bytes() == expected.read_bytes()


_KILLED = """
import os, signal, sys, time
from quantkit.quantize import QuantizeOptions, quantize

class Killed:
    left = 9
    def on_resume(self, tensors, nbytes): pass
    def on_write(self, nbytes): pass
    def on_tensor(self, tensor):
        self.left -= 1
        if not self.left:
            time.sleep(1)  # what was finished before is journaled meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

quantize(*sys.argv[1:3], "COPY", QuantizeOptions(repack=True), threads=1, observer=Killed())
"""


def test_a_killed_repack_is_resumed(q4: Path, tmp_path: Path) -> None:
    full, out, options = tmp_path / "whole.gguf", tmp_path / "o.gguf", QuantizeOptions(repack=True)
    quantize(q4, full, "COPY", options)
    killed = subprocess.run([sys.executable, "-c", _KILLED, q4, out], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    with refuses(ResourceError, "QK-E409 o.gguf.journal --resume --overwrite"):
        quantize(q4, out, "COPY", QuantizeOptions(repack=True, repack_pattern=("attn",)), resume=True)
    assert quantize(q4, out, "COPY", options, resume=True).run.resumed > 0
    assert out.read_bytes() == full.read_bytes()


def test_kept_shards_round_trip(q4: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(split_max_size=1_000_000, no_provenance=True)
    split = quantize(q4, tmp_path / "split.gguf", "COPY", options).paths
    assert len(split) > 4
    repacked_paths = quantize(split[0], tmp_path / "there.gguf", "COPY", replace(REPACK, keep_split=True)).paths
    plain_paths = quantize(repacked_paths[-1], tmp_path / "back.gguf", "COPY", replace(UNREPACK, keep_split=True)).paths
    assert [path.read_bytes() for path in plain_paths] == [path.read_bytes() for path in split]
    quantize(split[1], tmp_path / "one.gguf", "COPY", REPACK)
    assert tensor_bytes(repacked_paths[0]) == tensor_bytes(tmp_path / "one.gguf")


@pytest.mark.parametrize(("threads", "piece", "job"), [(1, 1 << 17, 1 << 20), (3, 300, 1000)])
@pytest.mark.parametrize("name", ["Q4_K_R4", "Q8_0_R8", "BF16_R16"])
def test_the_bytes_do_not_depend_on_threads_or_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, threads: int, piece: int, job: int
) -> None:
    """Jobs and their pieces are whole groups; so are those of copies, of what is repacked, and of merged experts."""
    monkeypatch.setattr(encoding, "PIECE", piece)
    monkeypatch.setattr(jobs, "JOB", job)
    x = np.random.default_rng(5).standard_normal((3, 64, 256)).astype(np.float32)
    fields, t = [Field.of("general.architecture", "qwen3moe")], BY_NAME[name]
    halves = [(f"blk.0.ffn_{half}_exps.weight", (256, 64, 3), BY_NAME["F32"], (sign * x).tobytes())
              for half, sign in (("gate", 1), ("up", -1))]  # fmt: skip
    write_gguf(tmp_path / "x.gguf", fields, halves)
    quantize(tmp_path / "x.gguf", tmp_path / "a.gguf", name, QuantizeOptions(merge_up_gate=True), threads=threads)
    tensor = tensor_bytes(tmp_path / "a.gguf")["blk.0.ffn_gate_up_exps.weight"]
    both = np.concatenate([x, -x], axis=1).reshape(-1, 256)
    assert tensor == (name, encode(both, t).tobytes())
    for stem, options in (("b", UNREPACK), ("c", REPACK), ("d", QuantizeOptions())):
        quantize(tmp_path / f"{chr(ord(stem) - 1)}.gguf", tmp_path / f"{stem}.gguf", "COPY", options, threads=threads)
    assert tensor_bytes(tmp_path / "b.gguf")["blk.0.ffn_gate_up_exps.weight"][0] == base_of(t).name
    assert tensor_bytes(tmp_path / "c.gguf") == tensor_bytes(tmp_path / "d.gguf") == tensor_bytes(tmp_path / "a.gguf")


def test_unchanged_tensors_have_a_reason(tmp_path: Path) -> None:
    shapes = {"token_embd.weight": (256, 16), "blk.0.attn_q.weight": (256, 6), "blk.0.attn_k.weight": (256, 8)}
    source = write_model(tmp_path / "a.gguf", {name: (shape, "F16") for name, shape in shapes.items()})
    quantize(source, tmp_path / "q.gguf", "Q4_0", QuantizeOptions(pure=True))
    plan = plan_quantize(tmp_path / "q.gguf", tmp_path / "r.gguf", "COPY", REPACK)
    assert {t.name: (t.type.name, t.reason) for t in plan.tensors} == {
        "token_embd.weight": ("Q4_0", "embeddings are read row by row"),
        "blk.0.attn_q.weight": ("Q4_0", "6 rows of 256 are not a multiple of 8 rows"),
        "blk.0.attn_k.weight": ("Q4_0_R8", "--repack"),
    }
    plan = plan_quantize(source, tmp_path / "r.gguf", "COPY", REPACK)
    assert [t.reason.partition(" ")[2] for t in plan.tensors] == [
        "are read row by row",
        "rows of 256 are not a multiple of 16 rows",
        "rows of 256 are not a multiple of 16 rows",
    ]
    only = QuantizeOptions(repack=True, repack_pattern=("attn_q,attn_v",))
    plan = plan_quantize(tmp_path / "q.gguf", tmp_path / "r.gguf", "COPY", only)
    assert [t.reason for t in plan.tensors if t.name.endswith("k.weight")] == ["not matched by --repack-pattern"]


def test_interleaving_is_not_a_requantization(q4: Path, tmp_path: Path) -> None:
    """Rules and types that only change the order of rows need no permission, no encoder and no importance."""
    options = QuantizeOptions(tensor_type=("ffn_up_exps=q4_k_r4",))
    plan = plan_quantize(q4, tmp_path / "r.gguf", "COPY", options)
    assert {t.type.name for t in plan.tensors if "ffn_up_exps" in t.name} == {"Q4_K_R4"}


def test_q8_k_r8_unrepacks_to_q8_0(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf", {"blk.0.attn_q.weight": ((256, 16), "F32")})
    quantize(source, tmp_path / "b.gguf", "Q8_K_R8")
    quantize(tmp_path / "b.gguf", tmp_path / "c.gguf", "COPY", UNREPACK)
    kind, data = tensor_bytes(tmp_path / "c.gguf")["blk.0.attn_q.weight"]
    _, before = tensor_bytes(tmp_path / "b.gguf")["blk.0.attn_q.weight"]
    assert kind == "Q8_0"
    values = dequantize(np.frombuffer(data, np.uint8).reshape(16, -1), "Q8_0", 256)
    np.testing.assert_array_equal(values, dequantize(np.frombuffer(before, np.uint8).reshape(16, -1), "Q8_K_R8", 256))


def test_arm_layouts_are_converted_like_iks(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf", {"blk.0.attn_q.weight": ((256, 16), "F32")})
    quantize(source, tmp_path / "plain.gguf", "Q4_0", QuantizeOptions(pure=True, encoder="ik"))
    for name in ("Q4_0_4X4", "Q4_0_4X8", "Q4_0_8X8"):
        rule = QuantizeOptions(allow_requantize=True)
        quantize(tmp_path / "plain.gguf", tmp_path / f"{name}.gguf", name, rule)
        quantize(tmp_path / f"{name}.gguf", tmp_path / f"{name}-apart.gguf", "COPY", UNREPACK)
        quantize(tmp_path / f"{name}-apart.gguf", tmp_path / f"{name}-again.gguf", "COPY", QuantizeOptions(repack=True))
        kinds = [tensor_bytes(tmp_path / f"{name}{end}.gguf") for end in ("", "-apart", "-again")]
        assert [tensors["blk.0.attn_q.weight"][0] for tensors in kinds] == [name, "Q4_0", "Q4_0_R8"]
        assert kinds[1] == tensor_bytes(tmp_path / "plain.gguf")


def test_converted_formats_unrepack_to_types_with_equal_values(tmp_path: Path) -> None:
    shapes = {"blk.0.attn_q.weight": (256, 4), "blk.0.attn_k.weight": (96, 4), "blk.0.attn_v.weight": (256, 4)}
    source = write_model(tmp_path / "a.gguf", {name: (shape, "F32") for name, shape in shapes.items()})
    rules = QuantizeOptions(tensor_type=("attn_v=iq1_m_r4", ".=iq1_s_r4"), ignore_imatrix_rules=True)
    quantize(source, tmp_path / "b.gguf", "COPY", rules)
    plan = plan_quantize(tmp_path / "b.gguf", tmp_path / "c.gguf", "COPY", UNREPACK)
    assert {t.name[6:12]: (t.type.name, t.reason) for t in plan.tensors} == {
        "attn_q": ("IQ1_S", "--unrepack"),
        "attn_k": ("IQ1_S_R4", "rows of 96 are not a multiple of IQ1_S's blocks of 256"),
        "attn_v": ("IQ1_M_R4", "IQ1_M_R4 has no equivalent type without interleaving"),
    }
    quantize(tmp_path / "b.gguf", tmp_path / "c.gguf", "COPY", UNREPACK)
    before, after = (tensor_bytes(tmp_path / f"{name}.gguf") for name in "bc")
    values = [
        dequantize(np.frombuffer(data, np.uint8).reshape(4, -1), kind, 256)
        for kind, data in (tensors["blk.0.attn_q.weight"] for tensors in (before, after))
    ]
    np.testing.assert_array_equal(*values)
    plan = plan_quantize(tmp_path / "c.gguf", tmp_path / "d.gguf", "COPY", REPACK)
    assert {t.name[6:12]: t.reason for t in plan.tensors}["attn_q"] == "IQ1_S has no interleaved type"


def test_compare_measures_interleaved_tensors(q4: Path, tmp_path: Path) -> None:
    quantize(q4, tmp_path / "r.gguf", "COPY", REPACK)
    tensors_by_name = {t.a.name: t for t in compare(q4, tmp_path / "r.gguf").tensors}
    error = tensors_by_name["blk.0.ffn_up_exps.weight"].error
    assert error is not None
    assert (error.sums.error, error.largest) == (0, 0)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"repack": True, "unrepack": True}, "QK-E201 --repack --unrepack"),
        ({"repack_pattern": ("attn",)}, "QK-E202 --repack-pattern --repack"),
        ({"repack": True, "pure": True}, "QK-E201 --pure"),
        ({"unrepack": True, "attn_q_type": "Q8_0"}, "QK-E201 --attn-q-type"),
        ({"repack": True, "repack_pattern": ("(",)}, "QK-E205 --repack-pattern"),
    ],
)
def test_options_that_contradict_are_refused(q4: Path, tmp_path: Path, options: dict, refusal: str) -> None:
    with refuses(RecipeError, refusal):
        plan_quantize(q4, tmp_path / "r.gguf", "COPY", QuantizeOptions(**options))


@pytest.mark.parametrize("arguments", [["r.gguf"], ["r.gguf", "Q4_K_R4"], ["r.gguf", "Q4_K_R4", "2"]])
def test_the_type_may_be_omitted(q4: Path, tmp_path: Path, arguments: list[str]) -> None:
    out = tmp_path / "r.gguf"
    result = CliRunner().invoke(cli, ["quantize", "--repack", str(q4), str(out), *arguments[1:]])
    assert result.exit_code == 0, result.output
    assert tensor_bytes(out)["output.weight"][0] == "Q6_K_R4"


# ---------------------------------------------------------------- the engine


def test_the_engine_computes_the_same(q4: Path, tmp_path: Path) -> None:
    from quantkit.model.engine import load

    quantize(q4, tmp_path / "r.gguf", "COPY", REPACK)
    logits = []
    for path, merge in ((q4, False), (tmp_path / "r.gguf", False), (tmp_path / "r.gguf", True)):
        with load(path, threads=1, merge_up_gate=merge) as model:
            logits.append(model.forward([1, 5, 9, 100, 7]))
            notes = [note for note in model.notes if "row-interleaved (Q4_K_R4, Q5_K_R4, Q6_K_R4, Q8_0_R8)" in note]
            assert len(notes) == (path != q4)
    for actual in logits[1:]:
        np.testing.assert_array_equal(actual, logits[0])


@pytest.mark.parametrize("name", ["IQ1_S_R4", "IQ1_M_R4"])
def test_the_engine_runs_converted_formats(tmp_path: Path, name: str) -> None:
    """As the values they stand for, but that activations are quantized: where no router can decide otherwise."""
    from quantkit.model.engine import load

    low, wide = tmp_path / "low.gguf", tmp_path / "wide.gguf"
    with open_gguf(DATA / "tiny-moe-bf16.gguf") as file:
        last = file.get("qwen3moe.block_count") - 1
    rules = tuple(f"{names}={name}" for names in (r"^output\.", rf"blk\.{last}\.ffn_(up|gate|down)_exps"))
    options = QuantizeOptions(imatrix=DATA / "tiny-moe-imatrix.gguf", tensor_type=rules, ignore_imatrix_rules=True)
    quantize(DATA / "tiny-moe-bf16.gguf", low, "COPY", options)
    quantize(low, wide, "F32", QuantizeOptions(allow_requantize=True))
    assert [kind for kind, _ in tensor_bytes(low).values()].count(name) == 4
    logits = []
    for path in (low, wide):
        with load(path, threads=1) as model:
            logits.append(model.forward([1, 5, 9, 100, 7]).astype(np.float64))
    off = logits[0] - logits[1]
    assert (off**2).sum() < 1e-3 * (logits[1] ** 2).sum()


def test_rows_of_partial_units_are_refused() -> None:
    """BF16_R16 interleaves pairs of values, and a file may hold rows of one."""
    with refuses(TypeNotSupported, "QK-E303 BF16_R16 1"):
        validate_rows(BY_NAME["BF16_R16"], np.zeros((16, 2), np.uint8))
