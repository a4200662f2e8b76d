"""Inputs that change while they are read, or between a kill and ``--resume``: one model, or one error."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from test_feedback_files import write_covariances
from tiny_checkpoints import write_checkpoint

from quantkit.convert import ConvertOptions, convert
from quantkit.errors import FormatError, QuantkitError
from quantkit.evaluate import Estimate, SaveLogits, perplexity
from quantkit.export import export
from quantkit.formats import files as files_module
from quantkit.formats.covariance import Covariances
from quantkit.formats.gguf import open_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, write_imatrix
from quantkit.imatrix import ImatrixOptions, Watcher, imatrix
from quantkit.imatrix.covariance import CovarianceProgress, covariance
from quantkit.kernels.cpu.digest import digest_of
from quantkit.model.engine import load
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.progress import Progress
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.report import ReportOptions, report
from quantkit.sensitivity import SensitivityOptions, read_sensitivity, sensitivity
from small_models import llama_tensors, write_model

Change = Callable[[Path], None]
OPTIONS, PRE = QuantizeOptions(no_provenance=True), ConvertOptions(pre="gpt-2")


class Position:
    """An observer that acts once, when some tensors are finished."""

    def __init__(self, tensors: int, act: Callable[[], None]) -> None:
        self.left, self.act, self.reused = tensors, act, 0

    def on_resume(self, tensors: int, nbytes: int) -> None:
        self.reused = tensors

    def on_write(self, nbytes: int) -> None:
        pass

    def on_note(self, text: str) -> None:
        pass

    def on_tensor(self, tensor: PlannedTensor) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()


def interrupt() -> None:
    raise KeyboardInterrupt


def other_bytes(path: Path) -> bytes:
    """Return a model of the same header, and of the same ends of all tensors: of the same fingerprint."""
    data = bytearray(path.read_bytes())
    with open_gguf(path) as file:
        before = file.fingerprint()
        for tensor in file.tensors.values():
            if tensor.nbytes > 3 << 12:
                size, ends = tensor.type.block_bytes, 1 << 12
                first, last = -(-ends // size) * size, (tensor.nbytes - ends) // size * size
                middle = slice(tensor.offset + first, tensor.offset + last)
                data[middle] = np.frombuffer(data[middle], f"V{size}")[::-1].tobytes()
    copy = path.with_name(f"{path.name}.other")
    copy.write_bytes(data)
    with open_gguf(copy) as file:
        assert file.fingerprint() == before
    copy.unlink()
    return bytes(data)


def overwrite(path: Path) -> None:
    """Put another model into the same file."""
    data = other_bytes(path)
    with path.open("r+b") as file:
        file.write(data)


def overwrite_secretly(path: Path) -> None:
    """Do so, and put the file's time back."""
    status = path.stat()
    overwrite(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    """Put another file in its place, with the same time."""
    copy, status = path.with_name("other"), path.stat()
    copy.write_bytes(other_bytes(path))
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


IN_PLACE: list[Change] = [overwrite, overwrite_secretly, truncate]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return write_model(tmp_path / "in" / "m.gguf", llama_tensors())


@pytest.mark.parametrize("type_name", ["Q4_K_M", "COPY"])
@pytest.mark.parametrize("change", IN_PLACE)
def test_a_modified_source_is_an_error(model: Path, tmp_path: Path, type_name: str, change: Change) -> None:
    out = tmp_path / "o.gguf"
    with refuses(FormatError, "QK-E103|QK-E109 m.gguf"):
        quantize(model, out, type_name, OPTIONS, threads=1, observer=Position(3, lambda: change(model)))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("descriptors", [128, 0])
def test_a_replaced_source_is_still_read(
    model: Path, tmp_path: Path, descriptors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is open; where it had to be opened again, another file of its name is an error."""
    out, expected = tmp_path / "o.gguf", tmp_path / "whole.gguf"
    quantize(model, expected, "Q4_K_M", OPTIONS)
    monkeypatch.setattr(files_module, "_OPEN", descriptors)
    observer = Position(3, lambda: replace(model))
    if descriptors:
        quantize(model, out, "Q4_K_M", OPTIONS, threads=1, observer=observer)
        assert out.read_bytes() == expected.read_bytes()
    else:
        with refuses(FormatError, "QK-E109 m.gguf"):
            quantize(model, out, "Q4_K_M", OPTIONS, threads=1, observer=observer)
        assert not out.exists()


def link(path: Path) -> None:
    os.link(path, path.with_name("link"))


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.with_name("link").symlink_to("moved")


@pytest.mark.parametrize("change", [link, move, lambda path: path.chmod(0o444), Path.unlink])
def test_names_and_permissions_are_not_content(model: Path, tmp_path: Path, change: Change) -> None:
    quantize(model, tmp_path / "whole.gguf", "Q8_0", OPTIONS)
    quantize(model, tmp_path / "o.gguf", "Q8_0", OPTIONS, threads=1, observer=Position(3, lambda: change(model)))
    assert (tmp_path / "o.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.parametrize("change", [overwrite, overwrite_secretly, replace])
@pytest.mark.parametrize("type_name", ["Q4_K_M", "COPY"])
def test_a_run_is_not_resumed_with_another_source(model: Path, tmp_path: Path, type_name: str, change: Change) -> None:
    out, expected = tmp_path / "o.gguf", tmp_path / "whole.gguf"
    with pytest.raises(KeyboardInterrupt):
        quantize(model, out, type_name, OPTIONS, threads=1, observer=Position(8, interrupt))
    change(model)
    result = quantize(model, out, type_name, OPTIONS, resume=True)
    assert result.run.resumed == 0
    quantize(model, expected, type_name, OPTIONS)
    assert out.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("cuts", [{}, {"max_ram": 20 << 20}])
@pytest.mark.parametrize("type_name", ["Q4_K_M", "COPY"])
def test_a_run_is_resumed_with_a_copy_of_its_source(
    model: Path, tmp_path: Path, type_name: str, cuts: dict[str, int]
) -> None:
    """Whatever the memory was, and is: what was read is compared as it was cut."""
    out, expected = tmp_path / "o.gguf", tmp_path / "whole.gguf"
    quantize(model, expected, type_name, OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, out, type_name, OPTIONS, threads=1, observer=Position(8, interrupt), **cuts)  # type: ignore[arg-type]
    copy = model.with_name("copy")
    shutil.copy(model, copy)
    copy.replace(model)
    for turn in range(2):
        observer = Position(1, interrupt if turn == 0 else lambda: None)
        try:
            quantize(model, out, type_name, OPTIONS, threads=1, resume=True, observer=observer)
        except KeyboardInterrupt:
            assert turn == 0
        assert observer.reused >= 6
    assert out.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("is_other", [True, False])
def test_a_run_is_not_resumed_with_other_covariances(model: Path, tmp_path: Path, is_other: bool) -> None:
    """Of the same header, counts and ends; with a copy it does."""
    names = [f"blk.{layer}.attn_{kind}.weight:" for layer in (0, 1) for kind in "qkv"]
    cov, out, expected = (
        write_covariances(tmp_path / "cov", dict.fromkeys(names, (5000,))),
        tmp_path / "o",
        tmp_path / "w",
    )
    options, identity = QuantizeOptions(feedback=cov), Covariances(cov).identity
    with pytest.raises(KeyboardInterrupt):
        quantize(model, out, "Q4_0", options, threads=1, observer=Position(8, interrupt))
    shutil.copy(cov, tmp_path / "copy")
    if is_other:
        with open_gguf(cov) as file, (tmp_path / "copy").open("r+b") as copy:
            for tensor in file.tensors.values():
                if tensor.nbytes > 3 << 12:
                    copy.seek(tensor.offset + 4 * 257 * 128)  # the middle of the diagonal
                    copy.write(np.float32(1e6).tobytes())
    (tmp_path / "copy").replace(cov)
    assert Covariances(cov).identity == identity
    resumed = quantize(model, out, "Q4_0", options, resume=True).run.resumed
    assert (resumed == 0) is is_other
    quantize(model, expected, "Q4_0", options)
    assert out.read_bytes() == expected.read_bytes()


# ---------------------------------------------------------------- runs of a model that are resumed


IDS = np.random.default_rng(1).integers(0, 64, 128).astype(np.int32)
CHUNKS = {"n_ctx": 16, "n_batch": 16}


class Steps(Watcher):
    """Counts the steps of a run, and acts at one of them."""

    def __init__(self, stop: int = 0, act: Callable[[], None] = interrupt) -> None:
        self.count, self.stop, self.act = 0, stop, act

    def __call__(self, now: CovarianceProgress | Progress) -> None:
        if not isinstance(now, Progress) or now.text.startswith("measure"):
            self.on_chunk()

    def on_chunk(self, *now: object) -> None:
        self.count += 1
        if self.count == self.stop:
            self.act()


Run = Callable[[Path, Path, Steps, bool], object]


def run_imatrix(model: Path, out: Path, steps: Steps, resume: bool) -> None:
    options = ImatrixOptions(**CHUNKS, output_frequency=2, resume=resume)
    imatrix(model, (), out, tokens=IDS, options=options, watcher=steps, threads=1)


def run_covariance(model: Path, out: Path, steps: Steps, resume: bool) -> None:
    options = ImatrixOptions(**CHUNKS, resume=resume)
    covariance(model, (), out, tokens=IDS, options=options, progress=steps, threads=1, max_ram=2 << 20)


def run_sensitivity(model: Path, out: Path, steps: Steps, resume: bool) -> None:
    options = SensitivityOptions(**CHUNKS, types=("Q4_0", "Q8_0"), threads=1, resume=resume, together=False)
    sensitivity(model, out, tokens=IDS, options=options, progress=steps)


@pytest.fixture(
    params=[(run_imatrix, 5), (run_covariance, 18), (run_sensitivity, 5)], ids=lambda case: case[0].__name__
)
def interrupted_run(
    request: pytest.FixtureRequest, zoo: Callable[[str], Path], tmp_path: Path
) -> tuple[Run, Path, Path]:
    """Return a verb, its model, and the output of a run of it that was interrupted."""
    run, stop = request.param
    model, out = tmp_path / "m.gguf", tmp_path / "out"
    shutil.copy(zoo("llama-dense"), model)
    with pytest.raises(KeyboardInterrupt):
        run(model, out, Steps(stop), False)
    return run, model, out


@pytest.mark.parametrize("change", [overwrite_secretly, replace])
def test_a_model_run_is_not_resumed_with_another_model(interrupted_run: tuple[Run, Path, Path], change: Change) -> None:
    run, model, out = interrupted_run
    original, steps = model.read_bytes(), Steps()
    change(model)
    with refuses(QuantkitError, "QK-E409 --overwrite --resume"):
        run(model, out, steps, True)
    assert steps.count == 0
    model.write_bytes(original)
    run(model, out, Steps(), True)  # nothing was lost


def test_a_result_is_valid_while_its_model_is_unchanged(
    interrupted_run: tuple[Run, Path, Path], tmp_path: Path
) -> None:
    run, model, out = interrupted_run
    run(model, out, Steps(), True)
    before, steps = out.read_bytes(), Steps()
    shutil.copy(model, tmp_path / "copy")
    (tmp_path / "copy").replace(model)
    run(model, out, steps, True)
    overwrite_secretly(model)
    with refuses(QuantkitError, "QK-E402 --overwrite"):
        run(model, out, steps, True)
    assert (steps.count, out.read_bytes()) == (0, before)


def test_all_covariance_passes_use_one_model(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """Each pass opens the model."""
    model = tmp_path / "m.gguf"
    shutil.copy(zoo("llama-dense"), model)
    with refuses(FormatError, "QK-E109 m.gguf"):
        run_covariance(model, tmp_path / "out", Steps(5, lambda: replace(model)), False)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_model_run_is_resumed_with_a_copy(interrupted_run: tuple[Run, Path, Path], tmp_path: Path) -> None:
    run, model, out = interrupted_run
    copy = tmp_path / "copy"
    shutil.copy(model, copy)
    copy.replace(model)
    steps, full_steps = Steps(), Steps()
    run(model, out, steps, True)
    run(model, tmp_path / "whole", full_steps, False)
    assert 0 < steps.count < full_steps.count
    if run is not run_sensitivity:
        assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    else:
        assert read_sensitivity(out).costs == read_sensitivity(tmp_path / "whole").costs


@pytest.mark.parametrize("changed", ["base.gguf", "q.gguf", "base.logits"])
def test_a_report_measures_a_changed_file_again(zoo: Callable[[str], Path], tmp_path: Path, changed: str) -> None:
    base, file, logits = (tmp_path / name for name in ("base.gguf", "q.gguf", "base.logits"))
    shutil.copy(zoo("llama-dense"), base)
    quantize(base, file, "Q8_0")

    def save(path: Path) -> None:
        perplexity(base, tokens=IDS, n_ctx=16, save_logits=SaveLogits(path, "llama.cpp"))

    def numbers() -> tuple[Estimate | None, list[float | None]]:
        result = report([file], tmp_path / "o.html", base=base, options=ReportOptions(logits=logits), overwrite=True)
        quality = result.files[0].quality
        assert quality is not None
        return quality.kld, [matrix.error for matrix in result.files[0].matrices]

    save(logits)
    kld, errors = numbers()
    if changed == "base.logits":
        overwrite_secretly(base)
        save(tmp_path / "other")
        assert (tmp_path / "other").stat().st_size == logits.stat().st_size
        (tmp_path / "other").replace(logits)
    else:
        overwrite_secretly(tmp_path / changed)
    kld_now, errors_now = numbers()
    assert errors_now != errors
    assert (kld_now == kld) is (changed == "base.gguf")


def test_a_modified_importance_matrix_is_an_error(model: Path, tmp_path: Path) -> None:
    imatrix, out = tmp_path / "i.gguf", tmp_path / "o.gguf"
    with open_gguf(model) as file:
        entries = {
            name: ImatrixEntry(np.ones((1, t.shape[0]), np.float32), np.array([9]))
            for name, t in file.tensors.items()
            if len(t.shape) == 2
        }
    write_imatrix(imatrix, Imatrix(imatrix, entries, ["t"], 1, 512))

    def change() -> None:
        with imatrix.open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(b"\0" * 64)

    with refuses(FormatError, "QK-E109 i.gguf"):
        quantize(model, out, "Q4_K_M", QuantizeOptions(imatrix=imatrix), threads=1, observer=Position(3, change))
    assert not out.exists()


@pytest.mark.parametrize("verb", ["convert", "export"])
@pytest.mark.parametrize("change", ["written", "replaced"])
def test_modified_inputs_of_convert_and_export(tmp_path: Path, verb: str, change: str) -> None:
    source = folder = write_checkpoint(tmp_path / "in", shards=3)
    if verb == "export":
        source = convert(folder, tmp_path / "x.gguf", None, PRE).plan.shards[0].path
    read = source if source.is_file() else sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(read.read_bytes())
    data[-64:] = bytes(64)

    def act() -> None:
        target = read if change == "written" else read.with_name("other")
        target.write_bytes(data)
        target.replace(read)

    def run(out: Path, observer: Position | None = None) -> None:
        if verb == "convert":
            convert(source, out / "y.gguf", None, PRE, threads=1, observer=observer)
        else:
            export(source, out, threads=1, observer=observer)

    outs = [tmp_path / name for name in ("out", "whole")]
    outs[1].mkdir()
    run(outs[1])
    outs[0].mkdir()
    if change == "replaced":
        run(outs[0], Position(1, act))
        assert {path.name: path.read_bytes() for path in outs[0].iterdir()} == {
            path.name: path.read_bytes() for path in outs[1].iterdir()
        }
    else:
        with refuses(FormatError, "QK-E109", read.name):
            run(outs[0], Position(1, act))
        assert not list(outs[0].iterdir())


# ---------------------------------------------------------------- mapped files


def test_a_running_model_reads_its_opened_file(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    path, tokens = tmp_path / "m.gguf", [1, 2, 3, 4]
    shutil.copy(zoo("llama-dense"), path)
    with load(path, threads=1) as model:
        expected = model.forward(tokens)
    with load(path, threads=1) as model:
        copy = tmp_path / "other"
        copy.write_bytes(path.read_bytes()[:-4096] + b"\1" * 4096)
        copy.replace(path)
        assert np.array_equal(model.forward(tokens), expected)


@pytest.mark.parametrize("change", ["cut", "written"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_changed_model_file_is_an_error(
    zoo: Callable[[str], Path], tmp_path: Path, change: str, threads: int
) -> None:
    """One that is cut does not kill the process, whichever thread reads where nothing is."""
    path = tmp_path / "m.gguf"
    shutil.copy(zoo("llama-dense"), path)
    with load(path, threads=threads) as model:
        session = model.session(16)
        session.decode([1, 2, 3])
        if change == "cut":
            os.truncate(path, 1 << 16)
        else:
            with path.open("r+b") as file:
                file.seek(-64, os.SEEK_END)
                file.write(bytes(64))
        with refuses(FormatError, "QK-E109 m.gguf"):
            session.decode([4])
        with refuses(FormatError, "QK-E109 m.gguf"):
            model.source.data(next(iter(model.source.tensors)))


def test_digests_distinguish_bytes() -> None:
    data = np.random.default_rng(1).integers(0, 256, 1000, np.uint8)
    digests = {digest_of(data[:n].copy()) for n in range(len(data))}
    assert len(digests) == len(data)
    assert digest_of(data[1:]) == digest_of(data[1:].copy())  # wherever it lies
    for offset in range(len(data)):
        data[offset] ^= 1
        digests.add(digest_of(data))
        data[offset] ^= 1
    assert len(digests) == 2 * len(data)


@pytest.mark.skipif(sys.platform != "linux", reason="there is a handler on Linux")
def test_only_own_mappings_are_repaired(tmp_path: Path) -> None:
    """Leave a fault in a foreign mapping to the handler before ours, also one that was installed after our first."""
    program = """if True:
        import faulthandler, mmap, os, sys
        from quantkit.mapping import map_descriptor
        with open(sys.argv[1], "r+b") as file:
            first = map_descriptor(file.fileno(), 1 << 20)
            faulthandler.enable(open(os.devnull, "w"))
            ours = map_descriptor(file.fileno(), 1 << 20)
            theirs = mmap.mmap(file.fileno(), 1 << 20, access=mmap.ACCESS_READ)
        os.truncate(sys.argv[1], 4096)
        print(bytes(ours).count(b"x"), bytes(first[:4097]).count(b"x"), flush=True)
        bytes(theirs)
    """
    path = tmp_path / "x"
    path.write_bytes(b"x" * (1 << 20))
    process = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (-signal.SIGBUS, "4096 4096\n")
