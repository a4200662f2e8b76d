"""The tensor cache: the same bytes whatever comes from it, and nothing that is not known to be theirs."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from refusals import refuses
from tiny_checkpoints import moe_arrays, write_checkpoint
from type_params import ENCODABLE, ENCODERS

from conftest import DATA
from quantkit.cache import prune_cache, show_cache, verify_cache
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert
from quantkit.errors import FormatError, QuantkitError, ResourceError
from quantkit.formats import cache_entry
from quantkit.formats.cache_entry import DATA as BEGIN
from quantkit.formats.cache_entry import RECORD, DamagedEntry, Entry, Header, Pieces, parse_header
from quantkit.formats.gguf import GGUFFile, open_gguf, write_gguf
from quantkit.formats.ranges import write_range
from quantkit.kernels import quantize as encode
from quantkit.kernels.formats import has_decoder, has_encoder
from quantkit.merge import plan_merge_up_gate, run_merge
from quantkit.pipeline import jobs as jobs_module
from quantkit.pipeline import row_slices, worker
from quantkit.pipeline import run as run_module
from quantkit.pipeline.cache import keys
from quantkit.pipeline.cache.memo import Memo
from quantkit.pipeline.cache.run_cache import CacheUse
from quantkit.pipeline.cache.store import Store, open_store
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.ledger import Ledger
from quantkit.pipeline.target import Files
from quantkit.quantize import QuantizeOptions, QuantizeResult, plan_quantize, quantize
from quantkit.types import BY_NAME
from small_models import llama_fields, llama_tensors, write_model

#: Tensors of ``llama`` that Q4_0 encodes; the others are norms.
ENCODES = 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "llama.gguf", llama_tensors())


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors have many pieces, and jobs several."""
    monkeypatch.setattr("quantkit.pipeline.encoding.PIECE", 4096)
    monkeypatch.setattr(jobs_module, "JOB", 3 * 4096)


def plain(source: Path, out: Path, type_name: str, **options: Any) -> bytes:
    quantize(source, out, type_name, overwrite=True, **options)
    return out.read_bytes()


def used(result: QuantizeResult) -> tuple[int, int]:
    """Return the numbers of tensors read from the cache, and stored in it."""
    assert result.run.cache is not None
    return result.run.cache.hits, result.run.cache.stored


def use_of(result: QuantizeResult) -> CacheUse:
    assert result.run.cache is not None
    return result.run.cache


def cached(source: Path, out: Path, type_name: str, folder: Path, options: Any = None, **run: Any) -> QuantizeResult:
    return quantize(source, out, type_name, options, cache=folder, overwrite=True, **run)


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "entries").rglob("*") if p.is_file())


def entry_of(folder: Path, tensor: str) -> Path:
    for path in entries(folder):
        with Entry(path) as entry:
            if entry.header.origin["tensor"] == tensor:
                return path
    raise AssertionError(tensor)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


# ---------------------------------------------------------------- the bytes


@pytest.mark.usefixtures("pieces")
def test_bytes_do_not_depend_on_the_cache(llama: Path, tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    expected = plain(llama, out, "Q4_0")
    assert used(cached(llama, out, "Q4_0", cache)) == (0, ENCODES)
    assert out.read_bytes() == expected
    for threads in (1, 3):
        assert used(cached(llama, out, "Q4_0", cache, threads=threads)) == (ENCODES, 0)
        assert out.read_bytes() == expected
    assert not verify_cache(cache).damaged
    assert list(open_store(cache).temporary()) == []


@pytest.mark.usefixtures("pieces")
def test_a_second_recipe_encodes_what_it_changes(llama: Path, tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    cached(llama, out, "Q4_0", cache)
    options = QuantizeOptions(attn_v_type="Q5_0")
    expected = plain(llama, out, "Q4_0", options=options)
    assert used(cached(llama, out, "Q4_0", cache, options)) == (ENCODES - 2, 2)
    assert out.read_bytes() == expected
    assert used(cached(llama, out, "Q4_0", cache)) == (ENCODES, 0)


def test_source_rows_of_cached_tensors_are_not_read(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run reads every byte once; the second reads nothing of what it takes, whatever file it is in."""
    cache, out, read = tmp_path / "cache", tmp_path / "o.gguf", dict[str, int]()
    plain_read = GGUFFile.read

    def count_read(self: GGUFFile, tensor: Any, out: Any, offset: int, readahead: int = 0) -> None:
        read[tensor.name] = read.get(tensor.name, 0) + out.size
        plain_read(self, tensor, out, offset, readahead)

    monkeypatch.setattr(GGUFFile, "read", count_read)
    cached(llama, out, "Q4_0", cache)
    with open_gguf(llama) as file:
        assert read == {t.name: t.nbytes for t in file.tensors.values()}
    read.clear()
    moved = tmp_path / "elsewhere.gguf"
    moved.symlink_to(llama)
    assert used(cached(moved, out, "Q4_0", cache)) == (ENCODES, 0)
    assert all("norm" in name for name in read)


@pytest.mark.usefixtures("pieces")
def test_without_known_digests_rows_are_digested_and_found(llama: Path, tmp_path: Path) -> None:
    """A copy of the model, as on another machine, whose files nobody has seen."""
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    cached(llama, out, "Q4_0", cache)
    copy = shutil.copyfile(llama, tmp_path / "copy.gguf")
    expected = plain(copy, out, "Q4_0")
    assert used(cached(copy, out, "Q4_0", cache)) == (ENCODES, 0)
    assert out.read_bytes() == expected
    shutil.rmtree(cache / "sources")
    assert used(cached(copy, out, "Q4_0", cache)) == (ENCODES, 0)


@pytest.mark.usefixtures("pieces")
def test_models_with_equal_ends_are_distinguished(llama: Path, tmp_path: Path) -> None:
    """A fingerprint sees both ends of tensors only; digests see all rows, also where only the last piece differs."""
    cache, out, changed_path = tmp_path / "cache", tmp_path / "o.gguf", tmp_path / "other.gguf"
    cached(llama, out, "Q4_0", cache)
    data = bytearray(llama.read_bytes())
    with open_gguf(llama) as file:
        t = file.tensors["blk.1.ffn_down.weight"]
        fingerprint = file.fingerprint()
    offset = t.offset + t.nbytes - 5000
    data[offset : offset + 2] = np.float16(0.75).tobytes()
    changed_path.write_bytes(data)
    with open_gguf(changed_path) as file:
        assert file.fingerprint() == fingerprint
    expected = plain(changed_path, out, "Q4_0")
    result = cached(changed_path, out, "Q4_0", cache)
    assert used(result) == (ENCODES - 1, 1)
    assert out.read_bytes() == expected


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("case", ["time put back", "no trace"])
def test_a_changed_source_with_equal_metadata_is_detected(
    llama: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where size and both ends stay, and where no time changes, either: then as soon as a row has to be read."""
    if case == "no trace":
        monkeypatch.setattr(keys, "stamp_of", lambda path: [path.stat().st_size])
    cache, out, source = tmp_path / "cache", tmp_path / "o.gguf", tmp_path / "s.gguf"
    shutil.copyfile(llama, source)
    cached(source, out, "Q4_0", cache)
    times, name = source.stat(), "blk.1.ffn_down.weight"
    with open_gguf(source) as file:
        offset = file.tensors[name].offset + file.tensors[name].nbytes - 6000
    with open(source, "r+b") as file:
        file.seek(offset)
        file.write(np.float16(0.75).tobytes())
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    path = entry_of(cache, name)
    with Entry(path) as entry:  # its last piece is to be encoded again, beside those that are taken
        flip(path, BEGIN + entry.header.pieces.nbytes - 1)
    if case == "no trace":
        with refuses(FormatError, "QK-E109 ffn_down.weight"):
            cached(source, out, "Q4_0", cache)
    expected = plain(source, out, "Q4_0")
    assert used(cached(source, out, "Q4_0", cache))[0] == ENCODES - 1
    assert out.read_bytes() == expected


def test_measured_errors_are_cached(llama: Path, tmp_path: Path, pieces: None) -> None:
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    sums = quantize(llama, out, "Q4_0", measure_error=True).run.sums
    cached(llama, out, "Q4_0", cache)
    assert used(cached(llama, out, "Q4_0", cache, measure_error=True)) == (0, ENCODES)
    rerun = cached(llama, out, "Q4_0", cache, measure_error=True)
    assert used(rerun) == (ENCODES, 0)
    assert rerun.run.sums == sums
    assert used(cached(llama, out, "Q4_0", cache)) == (ENCODES, 0)


@pytest.mark.parametrize("type_name", ["Q4_K_R4", "IQ4_KS", "Q8_0_R8"])
def test_types_of_every_kind(llama: Path, tmp_path: Path, type_name: str, pieces: None) -> None:
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    expected = plain(llama, out, type_name)
    _, records = used(cached(llama, out, type_name, cache))
    assert records >= 10
    assert used(cached(llama, out, type_name, cache)) == (records, 0)
    assert out.read_bytes() == expected


def test_copies_and_rounded_values_are_not_cached(llama: Path, tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    for type_name in ("COPY", "BF16"):
        use = use_of(cached(llama, out, type_name, cache))
        assert (use.tensors, use.stored) == (0, 0)
    cached(llama, tmp_path / "q4.gguf", "Q4_0", cache)
    count = len(entries(cache))
    assert count == ENCODES
    quantize(tmp_path / "q4.gguf", out, "REPACK", QuantizeOptions(repack=True), cache=cache, overwrite=True)
    assert len(entries(cache)) == count


def test_a_scale_after_the_rows_is_part_of_the_key(tmp_path: Path) -> None:
    """I2_S: rows are the same, the tensor's scale is not."""
    shape, cache, out = (256, 32), tmp_path / "cache", tmp_path / "o.gguf"
    t = BY_NAME["I2_S"]
    options, outputs = QuantizeOptions(allow_requantize=True), list[bytes]()
    for scale in (1.5, 2.5):
        path = tmp_path / f"{scale}.gguf"
        data = np.random.default_rng(3).integers(0, 256, t.tensor_bytes(shape), np.uint8) & 0xA5
        data[-32:] = 0
        data[-32:-28] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
        write_gguf(path, llama_fields(), [("blk.0.ffn_up.weight", shape, t, data.tobytes())])
        expected = plain(path, out, "Q8_0", options=options)
        assert used(cached(path, out, "Q8_0", cache, options)) == (0, 1)
        assert used(cached(path, out, "Q8_0", cache, options)) == (1, 0)
        assert out.read_bytes() == expected
        outputs.append(expected)
    assert outputs[0] != outputs[1]


# ---------------------------------------------------------------- experts, checkpoints, shards


MOE = DATA / "tiny-moe-bf16.gguf"
IMATRIX = DATA / "tiny-moe-imatrix.gguf"


def test_merged_experts_use_cached_halves(tmp_path: Path) -> None:
    """Parts are kept, not tensors: gate and up, encoded apart, serve a file that merges them."""
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    separate = cached(MOE, out, "Q4_0", cache, QuantizeOptions(imatrix=IMATRIX, pure=True))
    options = QuantizeOptions(imatrix=IMATRIX, pure=True, merge_up_gate=True)
    expected = plain(MOE, out, "Q4_0", options=options)
    result = cached(MOE, out, "Q4_0", cache, options)
    assert out.read_bytes() == expected
    assert used(result) == (use_of(result).tensors, 0)
    assert use_of(result).tensors < use_of(separate).tensors
    shutil.rmtree(cache)
    cached(MOE, out, "Q4_0", cache, options)
    assert used(cached(MOE, out, "Q4_0", cache, QuantizeOptions(imatrix=IMATRIX, pure=True)))[1] == 0


def test_reencoded_halves_are_cached(tmp_path: Path) -> None:
    cache, mixed = tmp_path / "cache", tmp_path / "mixed.gguf"
    quantize(MOE, mixed, "Q8_0", QuantizeOptions(ffn_up_type="Q5_0", ffn_gate_type="Q4_0"))
    runs = [
        run_merge(plan_merge_up_gate(mixed, tmp_path / f"{i}.gguf", reencode="Q5_0"), cache=folder)
        for i, folder in enumerate((None, cache, cache))
    ]
    files = [(tmp_path / f"{i}.gguf").read_bytes() for i in range(3)]
    assert files[0] == files[1] == files[2]
    assert [run.cache and (run.cache.tensors > 0, run.cache.hits == run.cache.tensors) for run in runs] == [
        None,
        (True, False),
        (True, True),
    ]


def test_checkpoints(tmp_path: Path) -> None:
    """Computed rows are digested like read ones; the code that computes them is part of the known digests' key."""
    folder = write_checkpoint(tmp_path / "Small-Moe", shards=3)
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    pre = ConvertOptions(pre="gpt-2")

    def run(type_name: str | None = "Q4_0", options: ConvertOptions = pre, **run_options: Any) -> QuantizeResult:
        return convert(folder, out, type_name, options, overwrite=True, **run_options)

    run()
    expected = out.read_bytes()
    n_tensors = used(run(cache=cache))[1]
    assert n_tensors > 10
    assert out.read_bytes() == expected
    assert used(run(cache=cache)) == (n_tensors, 0)
    assert out.read_bytes() == expected
    # Stacked experts of another value: those tensors alone are encoded.
    arrays = moe_arrays()
    arrays["model.layers.1.mlp.experts.2.down_proj.weight"][7] = 0x3F80
    write_checkpoint(folder, shards=3, arrays=arrays)
    assert used(run(cache=cache)) == (n_tensors - 1, 1)
    assert out.read_bytes() != expected
    # Rounded otherwise on the way, rows are others.
    run(options=replace(pre, intermediate="f16"))
    expected = out.read_bytes()
    run(options=replace(pre, intermediate="f16"), cache=cache)
    assert out.read_bytes() == expected
    # A conversion alone encodes, too.
    run(None, replace(pre, outtype="q8_0"))
    expected = out.read_bytes()
    n_tensors = used(run(None, replace(pre, outtype="q8_0"), cache=cache))[1]
    assert used(run(None, replace(pre, outtype="q8_0"), cache=cache)) == (n_tensors, 0)
    assert n_tensors
    assert out.read_bytes() == expected


def test_shards(llama: Path, tmp_path: Path) -> None:
    cache, options = tmp_path / "cache", QuantizeOptions(split_max_size=60_000)
    cached(llama, tmp_path / "one.gguf", "Q4_0", cache)
    expected = quantize(llama, tmp_path / "a.gguf", "Q4_0", options).paths
    result = cached(llama, tmp_path / "b.gguf", "Q4_0", cache, options)
    assert used(result) == (ENCODES, 0)
    assert [p.read_bytes() for p in result.paths] == [p.read_bytes() for p in expected]


# ---------------------------------------------------------------- what decides the bytes


def test_other_importance_is_another_entry(tmp_path: Path) -> None:
    from quantkit.formats.imatrix import read_imatrix, write_imatrix

    cache, out, changed_path = tmp_path / "cache", tmp_path / "o.gguf", tmp_path / "other.gguf"
    name = "blk.1.ffn_down_exps.weight"
    imatrix = read_imatrix(IMATRIX)
    changed = replace(imatrix.entries[name], sums=imatrix.entries[name].sums * np.linspace(1, 2, 1, dtype=np.float32))
    changed.sums.reshape(-1)[5] *= 3
    write_imatrix(changed_path, replace(imatrix, entries={**imatrix.entries, name: changed}), imatrix.format)
    one, two = (QuantizeOptions(imatrix=path, pure=True) for path in (IMATRIX, changed_path))
    n = used(cached(MOE, out, "Q4_0", cache, one))[1]
    assert used(cached(MOE, out, "Q4_0", cache, one)) == (n, 0)
    expected = plain(MOE, out, "Q4_0", options=two)
    assert used(cached(MOE, out, "Q4_0", cache, two)) == (n - 1, 1)
    assert out.read_bytes() == expected
    expected = plain(MOE, out, "Q4_0", options=QuantizeOptions(pure=True))
    cached(MOE, out, "Q4_0", cache, QuantizeOptions(pure=True))
    assert out.read_bytes() == expected
    # Q8_0 ignores it.
    n = used(cached(MOE, out, "Q8_0", cache, one))[1]
    assert used(cached(MOE, out, "Q8_0", cache, two)) == (n, 0)
    # But not the errors, which are weighted by it.
    sums = quantize(MOE, out, "Q8_0", two, overwrite=True, measure_error=True).run.sums
    cached(MOE, out, "Q8_0", cache, one, measure_error=True)
    result = cached(MOE, out, "Q8_0", cache, two, measure_error=True)
    assert result.run.sums == sums
    assert used(result)[0] < n


@pytest.mark.parametrize("t", [t for t in ENCODABLE if t.imatrix == "ignored" and t.block > 1], ids=str)
def test_types_that_ignore_importance(t: Any) -> None:
    """Keys omit it for these types, because the bytes of every encoder do not depend on it."""
    n = max(256, t.block)
    x = np.random.default_rng(1).normal(0, 1, (4, n)).astype(np.float32)
    importance = np.random.default_rng(2).uniform(0.01, 9, n).astype(np.float32)
    for encoder in [name for have, name in ENCODERS if have is t]:
        assert (encode(x, t, None, encoder) == encode(x, t, importance, encoder)).all()


def test_another_encoder_is_another_entry(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    cached(llama, out, "Q4_0", cache)
    for options in (QuantizeOptions(encoder="ik"), QuantizeOptions(symmetric_q40=True)):
        expected = plain(llama, out, "Q4_0", options=options)
        assert used(cached(llama, out, "Q4_0", cache, options))[1] >= ENCODES - 2
        assert out.read_bytes() == expected
    monkeypatch.setattr(keys, "encoder_digest", lambda source, target, feedback: "other code")
    assert used(cached(llama, out, "Q4_0", cache)) == (0, ENCODES)


def test_a_changed_encoder_source_is_another_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = shutil.copytree(
        keys._PACKAGE, tmp_path / "quantkit", ignore=shutil.ignore_patterns("cuda", "model", "__pycache__")
    )
    monkeypatch.setattr(keys, "_PACKAGE", root)
    f16, q4_k, iq4_ks = (BY_NAME[name] for name in ("F16", "Q4_K", "IQ4_KS"))

    def digests() -> tuple[str, str]:
        keys._imports.cache_clear()
        keys._file_digest.cache_clear()
        return keys.encoder_digest.__wrapped__(f16, q4_k), keys.encoder_digest.__wrapped__(f16, iq4_ks)

    before = digests()
    for name, changes in (
        ("kernels/cpu/encode/k_quants.py", (True, False)),
        ("kernels/cpu/encode/search.py", (True, True)),
        ("kernels/cpu/core/simd.py", (True, True)),
        ("kernels/tables.npz", (True, True)),
        ("pipeline/jobs.py", (True, True)),
        ("pipeline/worker.py", (True, True)),
        ("types.py", (True, True)),
        ("kernels/cpu/matmul/panel.py", (False, False)),
    ):
        path = root / name
        data = path.read_bytes()
        path.write_bytes(data + b"\n")
        after = digests()
        assert (after[0] != before[0], after[1] != before[1]) == changes, name
        path.write_bytes(data)
    keys._imports.cache_clear()
    keys._file_digest.cache_clear()


REACHED = """
import sys
from pathlib import Path
import quantkit.kernels.cpu.encode as encode
from quantkit.pipeline.cache import keys
from quantkit.types import BY_NAME
import numpy as np
source, target = (BY_NAME[name] for name in sys.argv[1:])
from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows
from quantkit.kernels.cpu.encode.check import error_sums
[*keys._imported_modules("quantkit.kernels.cpu.encode")]
digested = []
digest = keys._files_digests
keys._files_digests = lambda paths: (digested.append(set(paths)), digest(paths))[1]
keys.encoder_digest(source, target)
encode.encoder(target)
from quantkit.kernels.cpu.unpack import unpacker
from quantkit.kernels.interleave import base_of
if base_of(source).block > 1:
    unpacker(base_of(source))
loaded = {Path(m.__file__) for n, m in sys.modules.items() if n.startswith("quantkit.kernels.cpu.") and m.__file__}
loaded -= {path for path in loaded if path.name == "__init__.py" and not path.read_text().count("def ")}
print(sorted(str(path) for path in loaded - digested[0]))
"""


@pytest.mark.parametrize(
    ("source", "target"), [("BF16", "Q4_K"), ("Q6_K", "IQ2_KS"), ("F32", "IQ1_S"), ("F16", "Q4_K_R4")]
)
def test_all_code_of_an_encoder_is_part_of_the_key(source: str, target: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", REACHED, source, target], check=True, capture_output=True, text=True
    )
    assert process.stdout.strip() == "[]"


def test_every_type_has_a_digest() -> None:
    actual = {keys.encoder_digest(BY_NAME["BF16"], t) for t in BY_NAME.values() if has_encoder(t) and t.block > 1} | {
        keys.encoder_digest(t, BY_NAME["Q4_0"]) for t in BY_NAME.values() if has_decoder(t)
    }
    assert len(actual) > 10


# ---------------------------------------------------------------- damage


def spoil(path: Path, damage: str) -> None:
    """Damage an entry of Q4_0."""
    data = path.read_bytes()
    header = parse_header(data[:BEGIN])
    record = BEGIN + header.pieces.nbytes
    match damage:
        case "rows":
            flip(path, BEGIN + header.pieces.nbytes // 2)
        case "header":
            flip(path, 9)
        case "padding and all":
            path.write_bytes(bytes(len(data)))
        case "source digest":
            flip(path, record + 3)
        case "check":
            flip(path, record + 35)
        case "sums":
            flip(path, record + 50)
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "longer":
            path.write_bytes(data + b"\0")
        case "another entry":
            neighbour = next(p for p in path.parent.parent.rglob("*-*") if p != path)
            shutil.copyfile(neighbour, path)
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "link":
            path.unlink()
            path.symlink_to("/dev/zero")
        case "folder":
            path.unlink()
            path.mkdir()
        case "deep":
            path.write_bytes(_headed(b"[" * 4000))
        case "no entry":
            path.write_bytes(_headed(b'{"kind": "quantkit cached tensor, 1", "pieces": [1, 2]}'))
        case "huge":
            pieces = {"matrices": 1 << 40, "rows": 1 << 40, "row_bytes": 1, "piece": 1}
            values = {
                "kind": "quantkit cached tensor, 1",
                "how": header.settings,
                "source": header.source,
                "pieces": pieces,
            }
            path.write_bytes(_headed(json.dumps(values).encode()))


def _headed(line: bytes) -> bytes:
    import hashlib

    return (line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n").ljust(BEGIN)


DAMAGE = (
    *("rows", "header", "padding and all", "source digest", "check", "sums", "cut", "empty", "longer"),
    *("another entry", "pipe", "link", "folder", "deep", "no entry", "huge"),
)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("with_memo", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_encoded_again(llama: Path, tmp_path: Path, damage: str, with_memo: bool) -> None:
    cache, out, name = tmp_path / "cache", tmp_path / "o.gguf", "blk.0.ffn_down.weight"
    cached(llama, out, "Q4_0", cache)
    expected = out.read_bytes()
    path = entry_of(cache, name)
    spoil(path, damage)
    if not with_memo:
        shutil.rmtree(cache / "sources")
    result = cached(llama, out, "Q4_0", cache)
    assert out.read_bytes() == expected
    # A link is nobody's entry, and a folder is left alone.
    assert used(result) == (ENCODES - 1, damage != "folder")
    assert use_of(result).damaged == (damage not in ("link",))
    assert any("damaged" in note for note in use_of(result).notes) == (damage != "link")
    assert used(cached(llama, out, "Q4_0", cache))[0] == ENCODES - (damage == "folder")
    assert out.read_bytes() == expected


@pytest.mark.usefixtures("pieces")
def test_verify_finds_damaged_entries(llama: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for damage in DAMAGE:
        cached(llama, tmp_path / "o.gguf", "Q4_0", cache)
        path = entry_of(cache, "blk.0.ffn_down.weight")
        spoil(path, damage)
        result = verify_cache(cache)
        # Only regular files are entries.
        assert [Path(p) for p, _ in result.damaged] == [path] * (damage not in ("pipe", "link", "folder")), damage
        assert result.entries == ENCODES - (damage in ("pipe", "link", "folder"))
        assert not verify_cache(cache).damaged
        shutil.rmtree(cache)


def test_random_damage_never_reaches_the_output(llama: Path, tmp_path: Path, pieces: None) -> None:
    cache, out, rng = tmp_path / "cache", tmp_path / "o.gguf", random.Random(5)
    cached(llama, out, "Q4_0", cache)
    expected = out.read_bytes()
    for _ in range(12):
        for path in entries(cache):
            match rng.randrange(4):
                case 0:
                    flip(path, rng.randrange(path.stat().st_size))
                case 1:
                    os.truncate(path, rng.randrange(path.stat().st_size))
                case 2:
                    offset, data = rng.randrange(path.stat().st_size), path.read_bytes()
                    path.write_bytes(data[:offset] + rng.randbytes(8) + data[offset + 8 :])
        cached(llama, out, "Q4_0", cache, threads=rng.randrange(1, 4))
        assert out.read_bytes() == expected
    assert not verify_cache(cache).damaged


# ---------------------------------------------------------------- the folder is not ours alone


def test_hostile_files_are_skipped(llama: Path, tmp_path: Path) -> None:
    """Nothing in the folder is interpreted, beyond JSON of numbers and texts, nor waited for."""
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    cached(llama, out, "Q4_0", cache)
    expected = out.read_bytes()
    evil = pickle.dumps(Unpickled())
    [source] = (cache / "sources").iterdir()
    [memo] = source.iterdir()
    (source / "evil").write_bytes(evil + b"\n" + b"0" * 64 + b" " + b"1" * 64 + b" 00000000\n" + b"\xff" * 999)
    os.mkfifo(source / "pipe")
    (source / "zero").symlink_to("/dev/zero")
    line = memo.read_bytes().splitlines()[0][:129]
    wrong = line[:65] + b"f" * 64
    (source / "wrong").write_bytes(b"%b %08x\n" % (wrong, zlib.crc32(wrong)))
    (cache / "runs.jsonl").write_bytes(evil + b'\n{"tensors": "x", "taken": [1], "bytes": true}\n[]\n' + b"[" * 99999)
    (cache / "entries" / "00").mkdir(exist_ok=True)
    (cache / "entries" / "00" / "evil.pickle").write_bytes(evil)
    (cache / "entries" / "zz").symlink_to(tmp_path)
    result = cached(llama, out, "Q4_0", cache)
    assert use_of(result).hits >= ENCODES - 1  # of one, the digest was made up
    assert out.read_bytes() == expected
    assert show_cache(cache).tensors == use_of(result).tensors
    assert (cache / "entries" / "00" / "evil.pickle").exists()
    prune_cache(cache, to=0)
    assert (cache / "entries" / "00" / "evil.pickle").exists()
    assert out.exists()


@pytest.mark.parametrize("name", ["tmp", "entries", "entries/xx", "sources", "sources/xx", "runs.jsonl"])
def test_links_in_the_folder_are_not_followed(llama: Path, tmp_path: Path, name: str) -> None:
    """The targets of links are not read, written, moved or removed, although pruning takes the oldest files first."""
    cache, out, target = tmp_path / "cache", tmp_path / "o.gguf", tmp_path / "outside"
    cached(llama, out, "Q4_0", cache)
    expected = out.read_bytes()
    folder = next((cache / Path(name).parent).iterdir()) if name.endswith("xx") else cache / name
    folder.rename(target)
    folder.symlink_to(target)
    inner = sorted(target.rglob("*"))
    victim = target / "dear" if target.is_dir() else target
    if target.is_dir():
        victim.write_bytes(b"dear")
    for path in (victim, *inner):
        os.utime(path, (0, 0))
    before = {path: (path.is_file() and path.read_bytes(), path.stat().st_mtime) for path in (victim, *inner)}
    result = cached(llama, out, "Q4_0", cache)
    assert out.read_bytes() == expected
    if name in ("tmp", "runs.jsonl"):
        assert any("cannot be written" in note for note in use_of(result).notes) == (name == "runs.jsonl")
    show_cache(cache)
    verify_cache(cache)
    prune_cache(cache, to=0)
    assert {path: (path.is_file() and path.read_bytes(), path.stat().st_mtime) for path in before} == before
    assert sorted(target.rglob("*")) == sorted({*inner, *([victim] if target.is_dir() else [])})


class Unpickled:
    """Ends the tests when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os._exit, (9,)


@pytest.mark.parametrize(
    "data", [b"", b"{}", pickle.dumps(Unpickled()), b"[" * 9999, b'{"kind": "quantkit tensor cache, 1", "size": "9"}']
)
def test_an_unknown_configuration_is_refused(llama: Path, tmp_path: Path, data: bytes) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "cache.json").write_bytes(data)
    with refuses(ResourceError, "QK-E122 cache.json"):
        cached(llama, tmp_path / "o.gguf", "Q4_0", cache)
    assert not (tmp_path / "o.gguf").exists()


def test_other_folders_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.jpg").touch()
    with refuses(ResourceError, "QK-E402 a.jpg"):
        cached(llama, tmp_path / "o.gguf", "Q4_0", folder)
    for verb in (show_cache, prune_cache, verify_cache):
        with pytest.raises(ResourceError):
            verb(folder)
    (folder / "a.jpg").unlink()
    with refuses(ResourceError, "QK-E401 --cache"):
        show_cache(folder)
    assert used(cached(llama, tmp_path / "o.gguf", "Q4_0", folder)) == (0, ENCODES)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_readonly_folder_is_read(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Read-only, another user's, full: existing entries are used, the rest is encoded, with one note."""
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    cached(llama, out, "Q4_0", cache, QuantizeOptions(attn_v_type="Q5_0"))
    expected = plain(llama, out, "Q4_0")

    def refuse(*args: object, **options: object) -> Any:
        raise OSError(number, os.strerror(number), str(cache))

    with monkeypatch.context() as patch:
        for name in ("add", "note", "_write"):
            patch.setattr(Store, name, refuse)
        for name in ("add", "tidy"):
            patch.setattr(Memo, name, refuse)
        patch.setattr(os, "utime", refuse)
        result = cached(llama, out, "Q4_0", cache)
    assert used(result) == (ENCODES - 2, 0)
    assert out.read_bytes() == expected
    [note] = use_of(result).notes
    assert os.strerror(number) in note
    assert not list(open_store(cache).temporary())


@pytest.mark.usefixtures("pieces")
def test_unreadable_outputs_are_not_cached(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store, say: jobs write what they encode to the cache themselves."""
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    expected = plain(llama, out, "Q4_0")
    monkeypatch.setattr(Files, "file", lambda self, shard: None)
    assert used(cached(llama, out, "Q4_0", cache)) == (0, ENCODES)
    assert not verify_cache(cache).damaged
    assert used(cached(llama, out, "Q4_0", cache)) == (ENCODES, 0)
    assert out.read_bytes() == expected
    flip(entry_of(cache, "blk.0.ffn_up.weight"), BEGIN)
    assert used(cached(llama, out, "Q4_0", cache)) == (ENCODES - 1, 0)
    assert used(cached(llama, out, "Q4_0", cache)) == (ENCODES - 1, 1)
    assert not list(open_store(cache).temporary())

    def refuse(path: Path, *args: object) -> None:
        if cache in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *args)  # type: ignore[arg-type]

    def interrupt(self: worker.Worker, job: jobs_module.Job, tensor: row_slices.PlannedTensor) -> jobs_module.JobResult:
        run(self, job, tensor)
        raise KeyboardInterrupt

    run = worker.Worker.run
    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cached(llama, out, "Q8_0", cache)
    assert not list(open_store(cache).temporary())
    write = write_range
    monkeypatch.setattr(worker, "write_range", refuse)
    expected = plain(llama, out, "Q5_0")
    assert used(cached(llama, out, "Q5_0", cache))[1] == 0
    assert out.read_bytes() == expected
    assert not list(open_store(cache).temporary())


def test_a_full_disk_leaves_no_partial_entry(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, out, copied = tmp_path / "cache", tmp_path / "o.gguf", 0
    expected = plain(llama, out, "Q4_0")
    from quantkit.pipeline.cache import store as store_module

    copy = store_module._copy

    def fills_up(source: int, target: int, offset: int, nbytes: int) -> None:
        nonlocal copied
        copied += 1
        copy(source, target, offset, nbytes // 2 if copied == 5 else nbytes)
        if copied == 5:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "_copy", fills_up)
    result = cached(llama, out, "Q4_0", cache)
    assert out.read_bytes() == expected
    assert used(result) == (0, 4)
    assert len(use_of(result).notes) == 1
    assert len(entries(cache)) == 4
    assert not verify_cache(cache).damaged
    assert not list(open_store(cache).temporary())


def test_permissions(llama: Path, other_user: Path) -> None:
    """The cache of another user, readable or not."""
    source, cache, out = other_user / "llama.gguf", other_user / "cache", other_user / "o.gguf"
    shutil.copyfile(llama, source)
    cached(source, out, "Q4_0", cache)
    expected = out.read_bytes()
    other_q5 = plain(source, out, "Q5_0")
    folders = [p for p in [cache, *cache.rglob("*")] if p.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    with as_nobody():
        result = cached(source, out, "Q5_0", cache)
        assert (used(result)[1], out.read_bytes() == other_q5) == (0, True)
        assert any("cannot be written" in note for note in use_of(result).notes)
        assert used(cached(source, out, "Q4_0", cache)) == (ENCODES, 0)
        assert out.read_bytes() == expected
    for path in entries(cache):
        path.chmod(0o200)
    with as_nobody():
        assert used(cached(source, out, "Q4_0", cache)) == (0, 0)
        assert out.read_bytes() == expected
    for folder in folders:
        folder.chmod(0o755)
    cache.chmod(0o300)
    with as_nobody(), refuses(ResourceError, "QK-E405"):
        cached(source, out, "Q4_0", cache)


@pytest.fixture
def other_user() -> Iterator[Path]:
    """A folder in which anybody may write, also as no user of this machine."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user without rights, if this one may do anything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_an_impossible_folder_is_refused_before_the_run(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "cache", Path("/proc/nothing/cache")):
        with refuses(ResourceError, "QK-E401|QK-E405", folder):
            cached(llama, tmp_path / "o.gguf", "Q4_0", folder)
    assert not list(tmp_path.glob("o.gguf*"))


# ---------------------------------------------------------------- size


def test_least_recently_used_entries_are_evicted_first(llama: Path, tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    cached(llama, out, "Q4_0", cache)
    cached(llama, out, "Q5_0", cache)
    for path in entries(cache):  # Q4_0 and Q5_0, all used long ago
        os.utime(path, (1e9, 1e9))
    cached(llama, out, "Q4_0", cache)
    size, before = show_cache(cache).nbytes, {g.type: g.entries for g in show_cache(cache).groups}
    # Room for Q8_0 where Q5_0 was, but not for all three.
    q8 = use_of(cached(llama, out, "Q8_0", tmp_path / "other")).stored_bytes
    limit = (size - sum(g.nbytes for g in show_cache(cache).groups if g.type == "Q5_0") + q8) * 100 // 94
    result = cached(llama, out, "Q8_0", cache, cache_size=limit)
    assert used(result) == (0, ENCODES)
    report = show_cache(cache)
    assert report.nbytes <= limit == report.limit
    types = {g.type: g.entries for g in report.groups}
    assert (types["Q4_0"], types["Q8_0"]) == (before["Q4_0"], ENCODES)
    assert types.get("Q5_0", 0) < before["Q5_0"]
    assert used(cached(llama, out, "Q4_0", cache)) == (ENCODES, 0)
    assert open_store(cache).limit == limit


def test_a_run_does_not_evict_its_own_entries(llama: Path, tmp_path: Path) -> None:
    """What does not fit is not kept: else a model larger than the cache would find nothing the next time."""
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    result = cached(llama, out, "Q4_0", cache, cache_size=200_000)
    hits, stored = used(result)
    assert (hits, 0 < stored < ENCODES) == (0, True)
    assert any("is full" in note and "--cache-size" in note for note in use_of(result).notes)
    assert show_cache(cache).nbytes <= 200_000
    assert used(cached(llama, out, "Q4_0", cache))[0] == stored
    # For what is larger than the whole cache nothing goes.
    left = entries(cache)
    assert used(cached(llama, out, "Q8_0", cache, cache_size=show_cache(cache).nbytes))[1] < ENCODES
    cached(llama, out, "Q6_K", cache, cache_size=20_000)
    assert not set(left) & set(entries(cache)) or show_cache(cache).nbytes <= 20_000


def test_a_refused_run_creates_no_cache(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "o.gguf").touch()
    with refuses(ResourceError, "QK-E402 o.gguf --overwrite"):
        quantize(llama, tmp_path / "o.gguf", "Q4_0", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("pieces")
def test_disappearing_entries_are_encoded_again(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run evicts what this one is about to take, at any moment."""
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    cached(llama, out, "Q4_0", cache)
    expected = out.read_bytes()
    jobs, plain_jobs = 0, Ledger.jobs

    def evicted(self: Ledger) -> Iterator[Any]:
        nonlocal jobs
        for job in plain_jobs(self):
            jobs += 1
            if jobs in (5, 60):
                prune_cache(cache, to=show_cache(cache).nbytes // 2)
            yield job

    monkeypatch.setattr(Ledger, "jobs", evicted)
    hits, stored = used(cached(llama, out, "Q4_0", cache))
    assert out.read_bytes() == expected
    assert 0 < hits < ENCODES
    assert hits + stored == ENCODES


def test_prune(llama: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cached(llama, tmp_path / "o.gguf", "Q4_0", cache)
    old = entries(cache)[:5]
    for path in old:
        os.utime(path, (time.time() - 10 * 86400,) * 2)
    size = sum(path.stat().st_size for path in entries(cache))
    assert prune_cache(cache).removed == 0
    result = prune_cache(cache, older_than=9 * 86400)
    assert (result.removed, result.entries, result.removed_bytes + result.nbytes) == (5, ENCODES - 5, size)
    assert not any(path.exists() for path in old)
    assert prune_cache(cache, to="100K").nbytes <= 100_000
    assert prune_cache(cache, to=0).entries == 0


# ---------------------------------------------------------------- many at once, and kills

HAMMER = """
import sys
from quantkit.quantize import QuantizeOptions, quantize
source, out, cache, *types = sys.argv[1:]
for type_name in types:
    quantize(source, out, type_name, QuantizeOptions(no_provenance=True), cache=cache, overwrite=True, threads=2)
"""


def hammer(source: Path, out: Path, cache: Path, *types: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HAMMER, *map(str, (source, out, cache)), *types]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_many_processes_share_a_cache(llama: Path, tmp_path: Path) -> None:
    cache, options = tmp_path / "cache", QuantizeOptions(no_provenance=True)
    runs = [hammer(llama, tmp_path / f"{i}.gguf", cache, *["Q5_0", "Q4_0", "Q8_0"] * 2, "Q4_0") for i in range(3)]
    while any(run.poll() is None for run in runs):  # prune runs at the same time
        if (cache / "cache.json").exists():
            prune_cache(cache, to=400_000)
            assert not verify_cache(cache).damaged
        time.sleep(0.1)
    outputs = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * 3, outputs
    expected = plain(llama, tmp_path / "o.gguf", "Q4_0", options=options)
    assert all((tmp_path / f"{i}.gguf").read_bytes() == expected for i in range(3))
    assert not verify_cache(cache).damaged
    assert not list(open_store(cache).temporary())


def test_killed_runs_leave_no_valid_looking_entries(llama: Path, tmp_path: Path) -> None:
    cache, out, rng = tmp_path / "cache", tmp_path / "o.gguf", random.Random(3)
    types = ["Q4_0", "Q5_0", "Q8_0", "Q4_1"]
    for trial in range(6):
        run = hammer(llama, tmp_path / f"{trial}.gguf", cache, *types * 50)
        while not entries(cache) and run.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        run.send_signal(signal.SIGKILL)
        run.communicate()
        if trial % 2:
            for path in entries(cache)[::3]:
                path.unlink()
    assert not verify_cache(cache).damaged
    for type_name in types:
        expected = plain(llama, out, type_name)
        cached(llama, out, type_name, cache)
        assert out.read_bytes() == expected


def test_leftovers_of_killed_runs_are_removed_after_a_day(llama: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cached(llama, tmp_path / "o.gguf", "Q4_0", cache)
    left, fresh = cache / "tmp" / "left", cache / "tmp" / "fresh"
    left.write_bytes(b"x" * 1000)
    fresh.write_bytes(b"x")
    os.utime(left, (time.time() - 90_000,) * 2)
    assert show_cache(cache).unfinished == 1001
    cached(llama, tmp_path / "o.gguf", "Q5_0", cache)
    assert not left.exists()
    assert fresh.exists()


@pytest.mark.usefixtures("pieces")
def test_resume_with_and_without(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run has kept what it journaled; its journal agrees with what a resume finds."""
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"
    expected = plain(llama, out, "Q4_0")
    out.unlink()

    class Stop:
        left = 7

        def on_resume(self, tensors: int, nbytes: int) -> None: ...

        def on_write(self, nbytes: int) -> None: ...

        def on_tensor(self, tensor: row_slices.PlannedTensor) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    for folders in ((cache, None), (None, cache), (cache, cache)):
        with pytest.raises(KeyboardInterrupt):
            quantize(llama, out, "Q4_0", cache=folders[0], threads=1, observer=Stop())
        result = quantize(llama, out, "Q4_0", cache=folders[1], resume=True)
        assert result.run.resumed > 0
        assert out.read_bytes() == expected
        out.unlink()
    assert not verify_cache(cache).damaged


def test_the_journal_has_the_crc_of_cached_tensors(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: None
) -> None:
    cache, out, crcs = tmp_path / "cache", tmp_path / "o.gguf", list[dict[str, int]]()
    seal = Journal.seal

    def sealed(self: Any) -> None:
        crcs.append(dict(self.crcs))
        seal(self)

    monkeypatch.setattr(Journal, "seal", sealed)
    plain(llama, out, "Q4_0")
    cached(llama, out, "Q4_0", cache)
    cached(llama, out, "Q4_0", cache)
    assert crcs[0] == crcs[1] == crcs[2]
    with open_gguf(out) as file:
        assert crcs[0]["output.weight"] == zlib.crc32(file.data("output.weight").data)


# ---------------------------------------------------------------- jobs


@pytest.mark.usefixtures("pieces")
def test_jobs_are_whole_pieces_and_pickle(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor on other machines needs nothing but the job."""
    cache, jobs = tmp_path / "cache", list[jobs_module.Job]()
    cached(llama, tmp_path / "o.gguf", "Q4_0", cache)
    run = worker.Worker.run

    def send(self: worker.Worker, job: jobs_module.Job, tensor: row_slices.PlannedTensor) -> jobs_module.JobResult:
        jobs.append(job)
        result: jobs_module.JobResult = pickle.loads(pickle.dumps(run(self, pickle.loads(pickle.dumps(job)), tensor)))
        return result

    monkeypatch.setattr(worker.Worker, "run", send)
    cached(llama, tmp_path / "o.gguf", "Q4_0", cache)
    encoder_jobs = [job for job in jobs if job.cached is not None]
    assert len(encoder_jobs) > 3 * ENCODES
    assert all(job.cached is not None and job.cached.verified for job in encoder_jobs)


def test_too_little_memory_is_an_error(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "JOB", 1024)
    result = cached(llama, tmp_path / "o.gguf", "Q4_0", tmp_path / "cache")
    assert used(result)[1] < ENCODES
    assert any("--max-ram" in note for note in use_of(result).notes)


def test_pieces() -> None:
    pieces = Pieces(matrices=3, rows=10, row_bytes=7, piece=4)
    assert (pieces.per_matrix, pieces.count, pieces.nbytes) == (3, 9, 210)
    assert pieces.span(1, 4, 6) == slice(4, 6)
    assert [pieces.is_aligned(*rows) for rows in ((0, 4), (4, 6), (4, 4), (2, 4), (0, 10), (0, 5))] == [
        *(True, True, True),
        *(False, True, False),
    ]
    assert pieces.row_offset(2, 1) == BEGIN + 21 * 7


def test_an_entry_header_round_trips() -> None:
    header = Header(
        "a" * 64, "b" * 64, Pieces(2, 30, 18, 4), True, "c" * 64, {"model": "\U0001f9ca" * 100, "tensor": "é" * 100}
    )
    data = header.encode()
    assert len(data) == BEGIN
    assert parse_header(data) == header
    for offset in range(0, 400, 7):
        with pytest.raises(DamagedEntry):
            parse_header(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
    assert RECORD.itemsize == 120
    assert cache_entry.parse_name("x") is None


def test_known_digests_of_many_runs_are_one_file(tmp_path: Path) -> None:
    pairs = [(f"{i:064x}", f"{i * 7:064x}") for i in range(30)]
    for i, (identity, digest) in enumerate(pairs):
        Memo(tmp_path, (), f"run{i}").add(identity, digest)
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 9999,) * 2)
    Memo(tmp_path, (), "last").tidy()
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    assert all(Memo(tmp_path, (), "x").get(identity) == digest for identity, digest in pairs)


# ---------------------------------------------------------------- the command line


def invoke(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], env=environment)


def test_the_command_line(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dry = ("quantize", "--dry-run", "--cache", "c", llama, "o.gguf", "Q4_0")
    assert f"from the cache c: 0 of {ENCODES} tensors that would be encoded\n" in invoke(*dry).stdout
    assert not Path("c").exists()
    result = invoke("quantize", "--cache", "c", "--cache-size", "2M", llama, "o.gguf", "Q4_0")
    assert f"0 of {ENCODES} tensors from the cache c, 0 B; kept {ENCODES} for other runs" in result.stdout
    assert f"from the cache c: {ENCODES} of {ENCODES} tensors that would be encoded\n" in invoke(*dry).stdout
    arguments = ("quantize", "--json", "--overwrite", llama, "o.gguf", "Q4_0")
    assert json.loads(invoke(*arguments, QUANTKIT_TENSOR_CACHE="c").stdout)["cache"]["taken"] == ENCODES
    assert "cache" not in json.loads(invoke(*arguments, QUANTKIT_TENSOR_CACHE="").stdout)
    damaged_entry = entry_of(Path("c"), "output.weight")
    flip(damaged_entry, 5)
    assert f"from the cache c: {ENCODES - 1} of {ENCODES} tensors" in invoke(*dry).stdout
    assert len(entries(Path("c"))) == ENCODES  # a dry run removes nothing
    flip(damaged_entry, 5)
    copy = shutil.copyfile(llama, "copy.gguf")
    unread = json.loads(invoke(*dry[:4], "--json", copy, "o.gguf", "Q4_0").stdout)["cache"]
    assert (unread["taken"], unread["unread"]) == (0, ENCODES)

    text = invoke("cache", "show", "c").stdout
    assert f"{ENCODES} tensors, " in text
    assert " of 1.91 MiB (" in text
    assert f"2 runs took {ENCODES} of {2 * ENCODES} tensors (50%) from it" in text
    assert "llama.gguf  Q4_0" in text
    output = json.loads(invoke("cache", "show", "--json", QUANTKIT_TENSOR_CACHE="c").stdout)
    assert (output["entries"], output["limit"], output["taken"]) == (ENCODES, 2_000_000, ENCODES)
    assert f"{ENCODES} tensors" in invoke("cache", "verify", "c", "-j", 2).stdout
    flip(entries(Path("c"))[0], BEGIN)
    damaged = invoke("cache", "verify", "c", "--json")
    assert damaged.exit_code == 1
    assert len(json.loads(damaged.stdout)["damaged"]) == 1
    assert invoke("cache", "verify", "c").exit_code == 0
    assert "removed 0 tensors" in invoke("cache", "prune", "c", "--older-than", "1d").stdout
    assert json.loads(invoke("cache", "prune", "c", "--to", "0", "--json").stdout)["entries"] == 0


def test_merge_up_gate_on_the_command_line(tmp_path: Path) -> None:
    mixed, cache = tmp_path / "mixed.gguf", tmp_path / "c"
    quantize(MOE, mixed, "Q8_0", QuantizeOptions(ffn_up_type="Q5_0", ffn_gate_type="Q4_0"))
    command = ("merge-up-gate", "--reencode", "Q5_0", "--cache", cache, "--overwrite", mixed, tmp_path / "o.gguf")
    assert "kept" in invoke(*command).stdout
    n = json.loads(invoke(*command, "--json").stdout)["cache"]["taken"]
    assert n > 0
    assert f"from the cache {cache}: {n} of {n} tensors" in invoke(*command, "--dry-run").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "--cache-size", "5G", "M", "o", "Q4_0"], "--cache-size needs --cache"),
        (["convert", "--cache-size", "5G", "M", "o", "Q4_0"], "--cache-size needs --cache"),
        (["merge-up-gate", "--cache-size", "5G", "M", "o"], "--cache-size needs --cache"),
        (["quantize", "--cache", "M", "M", "o", "Q4_0"], "is a file"),
        (["quantize", "--cache", "c", "--cache-size", "much", "M", "o", "Q4_0"], "is not a size"),
        (["split-up-gate", "--cache", "c", "M", "o"], "No such option"),
        (["cache", "show", "M"], "is a file"),
        (["cache", "show", "nowhere"], "does not exist"),
        (["cache", "prune", "F", "--older-than", "soon"], "is not a time span"),
        (["cache", "show"], "Missing argument"),
    ],
)
def test_refusals(llama: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    names = {"M": str(llama), "F": str(tmp_path)}
    result = CliRunner().invoke(cli, [names.get(a, a) for a in arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_folder_of_other_files_is_refused(llama: Path, tmp_path: Path) -> None:
    result = invoke("quantize", "--cache", llama.parent, llama, tmp_path / "o.gguf", "Q4_0")
    assert (result.exit_code, "is not a tensor cache and contains other files" in result.stderr) == (1, True)
    dry = invoke("quantize", "--dry-run", "--cache", llama.parent, llama, tmp_path / "o.gguf", "Q4_0")
    assert dry.exit_code == 1


def test_threads_that_prepare_and_evict(tmp_path: Path) -> None:
    """Puts, evictions and looks at the same folder, all at once."""
    store = open_store(tmp_path / "cache", size=50_000)
    file = tmp_path / "rows"
    file.write_bytes(os.urandom(9000))
    pieces = Pieces(1, 90, 100, 90)

    def add_entry(i: int) -> None:
        header = Header(f"{i % 7:064x}", f"{i % 5:064x}", pieces)
        name = cache_entry.EntryName(header.settings, "0" * 16, header.source)
        store.make_room(13_200, set())
        store.add(name, header, file, [(0, 4000), (4000, 5000)], bytes(RECORD.itemsize))
        store.touch(store.path(name))
        list(store.entries())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_entry, range(200)))
    assert store.nbytes() <= 50_000 + 8 * 13_200
    for remaining in store.entries():
        with Entry(remaining.path) as entry:
            data = np.empty(9000, np.uint8)
            entry.read(data, BEGIN)
            assert data.tobytes() == file.read_bytes()


def test_errors_are_the_same_with_a_cache(llama: Path, tmp_path: Path) -> None:
    """Broken values are refused with and without, and leave no entry."""
    source, cache = tmp_path / "nan.gguf", tmp_path / "cache"
    data = bytearray(llama.read_bytes())
    with open_gguf(llama) as file:
        offset = file.tensors["blk.1.attn_k.weight"].offset
    data[offset : offset + 2] = np.float16(np.nan).tobytes()
    source.write_bytes(data)
    messages = []
    for folder in (None, cache, cache):
        with pytest.raises(QuantkitError) as e:
            quantize(source, tmp_path / "o.gguf", "Q4_0", cache=folder, threads=1)
        messages.append(e.value.message)
    assert len(set(messages)) == 1
    assert not verify_cache(cache).damaged
    plan = plan_quantize(source, tmp_path / "o.gguf", "Q4_0")
    assert run_module.forecast_cache(plan, cache) is not None
