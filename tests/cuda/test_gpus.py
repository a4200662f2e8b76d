"""GPUs as an executor: the CPU's file whatever happens to them. GPUs are the shim's; all they do, they do late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cupy
import host_device
import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses
from test_quantize import StopAfter
from tiny_checkpoints import write_checkpoint

from guide import step
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats.gguf import open_gguf, write_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, write_imatrix
from quantkit.kernels import quantize as encode
from quantkit.kernels.cuda.core import device as devices
from quantkit.kernels.cuda.encode import pipeline as on_gpu
from quantkit.kernels.formats import ENCODERS, SYMMETRIC, has_encoder
from quantkit.pipeline import jobs as jobs_module
from quantkit.pipeline.feedback import UniformInputs
from quantkit.pipeline.gpu import batch, choice
from quantkit.pipeline.gpu import executor as cards
from quantkit.pipeline.row_slices import plan_part
from quantkit.quantize import QuantizeOptions, QuantizeResult, plan_quantize, quantize
from quantkit.types import BY_NAME
from small_models import llama_fields

pytestmark = pytest.mark.skipif(host_device.compiler() is None, reason="no C++ compiler: install g++")

N, ROWS = 256, 40
#: Of each tensor: how it lies in the source, and what becomes of it. Interleaved rows the CPU decodes, or interleaves.
KINDS = {
    "blk.0.attn_q": ("BF16", "Q4_0"),
    "blk.0.attn_k": ("F32", "Q4_K"),
    "blk.0.attn_v": ("Q8_0", "Q6_K"),
    "blk.0.attn_output": ("Q4_0_R8", "IQ3_S"),
    "blk.0.ffn_up": ("F16", "Q4_0_R8"),
    "blk.0.ffn_gate": ("F16", "F16"),
    "blk.0.ffn_down_exps": ("BF16", "Q4_K"),
}
EXPERTS = 3
RULES = QuantizeOptions(
    tensor_type=tuple(f"{name.replace('.', '[.]')}={target}" for name, (_, target) in KINDS.items()),
    allow_requantize=True,
)


class NoteObserver(StopAfter):
    """An observer that keeps what is said, and interrupts the run when ``left`` tensors more are done."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.notes = list[str]()

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_stage(self, stage: int, stages: int, tokens: int, total: int) -> None:
        pass


def rows_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, (count, N)).astype(np.float32)


def write_source(path: Path, spoiled: str = "", kinds: dict[str, tuple[str, str]] = KINDS) -> Path:
    """Write a model of tensors of some kinds; a value of the tensor ``spoiled`` is infinite."""
    tensors: list[Any] = [("output_norm.weight", (N,), BY_NAME["F32"], np.ones(N, np.float32).tobytes())]
    for seed, (name, (source, _)) in enumerate(kinds.items()):
        rows = 128 if name == "token_embd" else ROWS
        shape: tuple[int, ...] = (N, ROWS, EXPERTS) if "exps" in name else (N, rows)
        x = rows_of(seed, int(np.prod(shape[1:])))
        if name == spoiled:
            x[ROWS - 1, 7] = np.inf
        t = BY_NAME[source]
        bits = x.view(np.uint32) >> np.uint32(16)
        data = x if source == "F32" else bits.astype(np.uint16) if source == "BF16" else encode(x, t)
        tensors.append((f"{name}.weight", shape, t, np.ascontiguousarray(data).tobytes()))
    write_gguf(path, llama_fields(layers=1), tensors)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("cards") / "source.gguf")


@pytest.fixture(scope="module")
def imatrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write importances: each expert has its own."""
    rng, path = np.random.default_rng(3), tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    counts = {"blk.0.attn_q.weight": 1, "blk.0.attn_k.weight": 1, "blk.0.ffn_down_exps.weight": EXPERTS}
    entries = {
        name: ImatrixEntry(np.exp(rng.normal(0, 1, (n, N))).astype(np.float32), np.full(n, 4, np.int64), None, None)
        for name, n in counts.items()
    }
    write_imatrix(path, Imatrix(path, entries, ["text"], 1, 512))
    return path


@pytest.fixture(scope="module")
def expected(source: Path, imatrix: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, QuantizeResult]:
    """The CPU's files, without importances and with."""
    folder = tmp_path_factory.mktemp("wanted")
    return {
        weighted: quantize(source, folder / f"{weighted}.gguf", "Q8_0", options(imatrix, weighted))
        for weighted in (False, True)
    }


def options(imatrix: Path, weighted: bool) -> QuantizeOptions:
    return replace(RULES, imatrix=imatrix) if weighted else RULES


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cupy.Faults]:
    """Two GPUs; jobs of few rows, so that there are several batches, and slots serve more than once."""
    monkeypatch.setattr(jobs_module, "JOB", 4 * N)
    monkeypatch.setattr("quantkit.pipeline.encoding.PIECE", 2 * N)
    monkeypatch.setattr(jobs_module, "PIECE", 2 * N)
    monkeypatch.setattr(cards, "BATCH", 12 * N)
    with fake_cupy.install(monkeypatch):
        yield fake_cupy.FAULTS


def on_gpus(
    source: Path, out: Path, rules: QuantizeOptions = RULES, **options: Any
) -> tuple[QuantizeResult, list[str]]:
    """Quantize on GPUs, with two threads for what is not theirs; return the result and what was said."""
    observer = options.pop("observer", None) or NoteObserver()
    settings = {"backend": "cuda", "threads": 2, "overwrite": True, "observer": observer, **options}
    return quantize(source, out, "Q8_0", rules, **settings), observer.notes


def is_same(result: QuantizeResult, expected: QuantizeResult) -> bool:
    """Return whether two results have files with the same bytes; names are ignored."""
    return result.paths[0].read_bytes() == expected.paths[0].read_bytes()


@pytest.mark.parametrize("weighted", [False, True])
def test_the_file_is_the_cpus(
    source: Path, imatrix: Path, expected: dict[bool, QuantizeResult], tmp_path: Path, weighted: bool
) -> None:
    result, notes = on_gpus(
        source, tmp_path / "o.gguf", options(imatrix, weighted), measure_error=True, verify=6, max_ram="64M"
    )
    assert is_same(result, expected[weighted])
    cpu = quantize(source, tmp_path / "cpu.gguf", "Q8_0", options(imatrix, weighted), measure_error=True)
    assert result.run.sums == cpu.run.sums
    assert notes[0] == ("--backend cuda: CUDA0, CUDA1 encode 6 tensors (the CPU interleaves rows of 1)")
    assert notes[1].startswith("--verify: the CPU also encodes 6 of the 70 GPU jobs, sampled with seed ")
    assert notes[2:] == ["--verify: 6 jobs are identical to the CPU's"]


def test_both_gpus_encode(
    source: Path, expected: dict[bool, QuantizeResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of a grid, of IQ3_S, are there before any lane reads them."""
    events, came = list[tuple[str, int]](), {f"CUDA{i}": threading.Event() for i in range(2)}
    start = on_gpu.Slot.start

    def noted(slot: on_gpu.Slot, form: on_gpu.RowConversion, segments: Any) -> None:
        came[slot.device.name].set()
        assert all(event.wait(60) for event in came.values())  # neither takes all before the other is there
        events.append((slot.device.name, sum(segment.rows for segment in segments)))
        start(slot, form, segments)

    monkeypatch.setattr(on_gpu.Slot, "start", noted)
    assert is_same(on_gpus(source, tmp_path / "o.gguf")[0], expected[False])
    assert {name for name, _ in events} == {"CUDA0", "CUDA1"}
    assert sum(rows for _, rows in events) == 8 * ROWS
    assert max(rows for _, rows in events) == 12


def test_memory_bounds_batches(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the host and of the GPU; less than a job takes is no room at all."""
    rooms = list[on_gpu.SlotMemory]()
    slot = on_gpu.Slot.__init__

    def noted(self: on_gpu.Slot, device: Any, room: on_gpu.SlotMemory) -> None:
        rooms.append(room)
        slot(self, device, room)

    monkeypatch.setattr(on_gpu.Slot, "__init__", noted)
    monkeypatch.setattr(cards, "BATCH", 1 << 20)
    plan = plan_quantize(source, tmp_path / "o.gguf", "Q8_0", RULES)
    for ram in (jobs_module.least_ram(list(plan.tensors), 2 + 2 * cards.MIN_SLOTS), 900_000):
        rooms.clear()
        on_gpus(source, tmp_path / "o.gguf", max_ram=ram)
        threads = 2 * jobs_module.worker_ram(list(plan.tensors), 4 * N)
        assert ram / 2 <= threads + 2 * cards.MIN_SLOTS * max(room.host for room in rooms) <= ram
    rooms.clear()
    on_gpus(source, tmp_path / "o.gguf", max_vram=200_000)
    assert max(room.device for room in rooms) * cards.MIN_SLOTS <= 200_000
    _, notes = on_gpus(source, tmp_path / "o.gguf", max_vram=10_000)
    assert [note.partition(":")[0] for note in notes[1:]] == [
        f"CUDA{i} is no longer used; the other devices take over its work" for i in range(2)
    ]
    assert "CUDA0 has too little memory: a job needs" in notes[1]


@pytest.mark.parametrize("after", [0, 30, 90])
def test_jobs_of_a_failing_gpu_are_taken_over(
    source: Path, expected: dict[bool, QuantizeResult], tmp_path: Path, two_gpus: fake_cupy.Faults, after: int
) -> None:
    """To the CPU, when it is the only one; it is lost once for all its slots."""
    two_gpus.left[1] = after
    result, notes = on_gpus(source, tmp_path / "o.gguf", devices=[1])
    assert is_same(result, expected[False])
    assert notes[1:] == [
        "CUDA1 is no longer used; the other devices take over its work: CUDA1 failed: "
        "cudaErrorIllegalAddress: an illegal memory access was encountered"
    ]


@pytest.mark.parametrize("after", [{1: 20}, {0: 40, 1: 70}])
def test_one_or_both_gpus_fail(
    source: Path,
    expected: dict[bool, QuantizeResult],
    tmp_path: Path,
    two_gpus: fake_cupy.Faults,
    after: dict[int, int],
) -> None:
    two_gpus.left |= after
    result, _ = on_gpus(source, tmp_path / "o.gguf", verify=3)
    assert is_same(result, expected[False])


@pytest.mark.parametrize("names", [[1], [0, 1]])
def test_a_hung_gpu_is_abandoned(
    source: Path,
    expected: dict[bool, QuantizeResult],
    tmp_path: Path,
    two_gpus: fake_cupy.Faults,
    names: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for a hung GPU, or freeing its memory, would never end: neither is done."""
    monkeypatch.setattr(batch, "PATIENCE", 0.3)
    monkeypatch.setattr(batch, "SLOWEST", 1e9)
    two_gpus.hangs[1] = 40
    result, notes = on_gpus(source, tmp_path / "o.gguf", devices=names)
    assert is_same(result, expected[False])
    assert not two_gpus.given_back
    (note,) = notes[1:]
    assert note.startswith(
        "CUDA1 is no longer used; the other devices take over its work: CUDA1 does not respond: its work is not "
    )


def test_a_suspended_process_does_not_count_as_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped for an hour does not take a GPU to hang."""
    monkeypatch.setattr(devices, "monotonic", iter(range(0, 3600 * 9, 3600)).__next__)
    monkeypatch.setattr(devices, "sleep", lambda seconds: None)
    looks = iter([False] * 5 + [True])
    assert devices.wait_for(looks.__next__, 60, lambda: False) is None
    assert devices.wait_for(lambda: False, 1, lambda: False) == 2


@pytest.mark.parametrize(("room", "n_failed"), [(2_000, 2), (60_000, 0)])
def test_a_gpu_without_memory(
    source: Path,
    tmp_path: Path,
    two_gpus: fake_cupy.Faults,
    room: int,
    n_failed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process allocates the free memory: fewer slots are used, or none."""
    rules = replace(RULES, tensor_type=tuple(rule.replace("IQ3_S", "Q4_K") for rule in RULES.tensor_type))
    expected = quantize(source, tmp_path / "cpu.gguf", "Q8_0", rules)
    monkeypatch.setattr(cards, "VRAM_SHARE", 1000.0)
    two_gpus.room = room
    result, notes = on_gpus(source, tmp_path / "o.gguf", rules)
    assert is_same(result, expected)
    assert sum("has no memory for" in note for note in notes) == n_failed


def test_wrong_bytes_are_detected(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit in one row: nothing stands under the final name."""
    wait = on_gpu.Slot.wait

    def wrong(slot: on_gpu.Slot, *limits: Any) -> Any:
        data = wait(slot, *limits)
        if data is not None:
            data[0][0] ^= 1
        return data

    monkeypatch.setattr(on_gpu.Slot, "wait", wrong)
    out = tmp_path / "o.gguf"
    with refuses(ResourceError, "QK-E411 1"):
        on_gpus(source, out, verify=1000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["blk.0.attn_q", "blk.0.attn_k"])
def test_nonfinite_values_are_refused(tmp_path: Path, name: str) -> None:
    source, notes = write_source(tmp_path / "source.gguf", name), []
    for backend in ("cpu", "cuda"):
        with pytest.raises(FormatError) as e:
            on_gpus(source, tmp_path / "o.gguf", backend=backend)
        notes.append(str(e.value))
    assert notes[0] == notes[1]
    assert f"tensor {name}.weight, row {ROWS - 1}, column 7 is inf" in notes[0]


def test_a_run_is_resumed_on_another_device(source: Path, expected: dict[bool, QuantizeResult], tmp_path: Path) -> None:
    """One that GPUs began, on the CPU, and the other way round."""
    out = tmp_path / "o.gguf"
    for first, then in (("cuda", "cpu"), ("cpu", "cuda")):
        observer = NoteObserver()
        observer.left = 3
        with pytest.raises(KeyboardInterrupt):
            on_gpus(source, out, observer=observer, backend=first, threads=1)
        observer = NoteObserver()
        result, _ = on_gpus(source, out, observer=observer, backend=then, resume=True, overwrite=False)
        assert is_same(result, expected[False])
        assert observer.reused >= 2


def test_cache_entries_do_not_depend_on_the_device(
    source: Path, expected: dict[bool, QuantizeResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.gguf"
    for first, then in (("cuda", "cpu"), ("cpu", "cuda")):
        folder = tmp_path / first
        assert is_same(on_gpus(source, out, backend=first, cache=folder)[0], expected[False])
        result, _ = on_gpus(source, out, backend=then, cache=folder)
        assert is_same(result, expected[False])
        assert result.run.cache is not None
        assert (result.run.cache.hits, result.run.cache.stored) == (6, 0)
        for memo in folder.rglob("memo*"):
            memo.unlink()  # rows are read, and found by their digests
        assert is_same(on_gpus(source, out, backend=then, cache=folder)[0], expected[False])


def test_auto_reports_its_choice(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_quantize(source, tmp_path / "o.gguf", "Q8_0", RULES)
    assert choice.gpus_for(plan, "cpu") == ((), "")
    assert choice.gpus_for(plan, "auto", [1])[0] == ("CUDA1",)
    with refuses(RecipeError, "QK-E202 --devices"):
        choice.gpus_for(plan, "cpu", [0])
    with refuses(ResourceError, "QK-E411 --devices CUDA2 CUDA1"):
        choice.gpus_for(plan, "auto", [0, 2])
    part = next(t for t in plan.tensors if t.type.name == "Q4_K").parts[0]
    with_feedback = replace(part, inputs=UniformInputs(256, 1))
    assert choice.cpu_reason(part) is None
    assert choice.cpu_reason(plan_part(with_feedback, BY_NAME["Q4_K"])) is None
    monkeypatch.setattr(choice, "can_round", lambda t: False)
    reason = choice.cpu_reason(plan_part(with_feedback, BY_NAME["TQ2_0"]))
    assert reason == "no error feedback for TQ2_0 on GPUs"
    assert choice.cpu_reason(plan_part(with_feedback, BY_NAME["F16"])) == "no CUDA encoder for F16"
    assert choice.cpu_reason(plan_part(part, BY_NAME["Q4_K"], "ik")) is None
    for name, encoder, search, interleaved in (("Q4_0", "symmetric", "symmetric", False), ("Q2_K_R4", "", "ik", True),
                                         ("Q2_K_R4", "mainline", "", False), ("IQ1_M_R4", "", "", True)):  # fmt: skip
        form = choice.conversion_of(plan_part(part, BY_NAME[name], encoder), 0)
        assert form is not None
        assert (form.search, form.interleaved) == (search, interleaved)
    monkeypatch.setattr(choice, "can_encode", lambda t, search="": False)
    assert choice.gpus_for(plan, "auto") == (
        (),
        "--backend auto: the CPU encodes everything: no CUDA encoder for Q4_K (2), no CUDA encoder for IQ3_S (1), "
        "no CUDA encoder for Q4_0 (1), no CUDA encoder for Q6_K (1), no CUDA encoder for Q4_0_R8 (1)",
    )
    monkeypatch.setattr(devices, "count_devices", lambda: 0)
    monkeypatch.setattr(devices, "why_none", lambda: "CuPy finds no CUDA device")
    assert choice.gpus_for(plan, "auto")[1].endswith("the CPU encodes everything: CuPy finds no CUDA device")
    with refuses(QuantkitError, "QK-E411 --backend CuPy"):
        choice.gpus_for(plan, "cuda")


#: What only the CPU encodes: floats, of which a GPU would do nothing but carry them.
NOT_ON_GPUS = {"F32", "F16", "BF16", "BF16_R16"}


def test_gpus_encode_all_other_tensors(source: Path, tmp_path: Path) -> None:
    """Every type, by every search, with an importance and without. The list above only shrinks."""
    plan = plan_quantize(source, tmp_path / "o.gguf", "Q8_0", RULES)
    part = next(t for t in plan.tensors if t.type.name == "Q4_K").parts[0]
    # Of no type that rows are copied or repacked from.
    part = replace(part, source=replace(part.source, type=BY_NAME["F64"]))
    refused = set()
    for t in (t for t in BY_NAME.values() if has_encoder(t) and t.trees != "none"):
        for search in (*ENCODERS, SYMMETRIC):
            if choice.cpu_reason(plan_part(part, t, search)):
                refused.add(t.name)
    assert refused == NOT_ON_GPUS, step("Add a type", 7, TYPE=" ".join(refused ^ NOT_ON_GPUS))


def test_on_the_command_line(source: Path, tmp_path: Path) -> None:
    out, rules = tmp_path / "o.gguf", [f"--tensor-type={rule}" for rule in RULES.tensor_type]

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(
            cli, ["quantize", str(source), str(out), "Q8_0", *rules, "--allow-requantize", *arguments]
        )

    result = run("--backend", "auto", "--devices", "CUDA1", "--verify", "2", "--max-vram", "1M")
    assert result.exit_code == 0, result.output
    assert "note: --backend auto: CUDA1 encodes " in result.output
    assert "note: --verify: 2 jobs are identical to the CPU's" in result.output
    first = out.read_bytes()
    assert run("--overwrite").exit_code == 0
    assert out.read_bytes() == first
    assert "CUDA0, CUDA1 encode" in run("--backend", "cuda", "--dry-run").output
    for options, name in ((["--verify", "2"], "--verify"), (["--devices", "one"], "--devices")):
        result = run(*options)
        assert result.exit_code == 2
        assert name in result.output
    result = run("--backend", "cuda", "--ray", "local", "--overwrite", "--verify", "2")
    assert result.exit_code == 2
    assert "--devices and --verify apply to the GPUs of this machine" in " ".join(result.output.split())


def test_convert_encodes_on_gpus(tmp_path: Path) -> None:
    """Rows of a checkpoint are made while they are read, into pinned memory."""
    folder = write_checkpoint(tmp_path / "Small-Moe")
    outputs = []
    for backend in ("cpu", "cuda"):
        observer = NoteObserver()
        out = tmp_path / f"{backend}.gguf"
        options = QuantizeOptions(pure=True)
        convert(folder, out, "Q4_0", ConvertOptions(pre="gpt-2"), options, backend=backend, observer=observer)
        outputs.append(out.read_bytes())
    assert outputs[0] == outputs[1]
    assert "CUDA0, CUDA1 encode" in observer.notes[0]


def test_the_source_covers_every_kind_of_tensor(source: Path) -> None:
    """Every way to a GPU is taken: as it is, decoded there, decoded here; and by the CPU."""
    with open_gguf(source) as file:
        plan = plan_quantize(source, source.with_name("o.gguf"), "Q8_0", RULES)
        forms = {t.name: choice.conversion_of(t.parts[0], 0) for t in plan.tensors}
        assert len(file.tensors) == len(forms)
    sources_by_name = {name: form and form.source.name for name, form in forms.items()}
    assert [sources_by_name[f"{name}.weight"] for name in KINDS] == ["BF16", "F32", "Q8_0", "F32", "F16", None, "BF16"]
