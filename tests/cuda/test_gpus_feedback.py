"""Error feedback on GPUs, the shim's: the CPU's file and figures, whatever happens to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cupy
import host_device
import numpy as np
import pytest
from refusals import refuses
from test_calibrate import MODEL, TEXT
from test_feedback_files import EXPERTS, TOKENS, write_covariances
from test_gpus import N, NoteObserver, write_source

from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, write_imatrix
from quantkit.kernels.cuda.feedback import metric as metrics
from quantkit.pipeline import jobs as jobs_module
from quantkit.pipeline.feedback_report import FeedbackReport, feedback_report
from quantkit.pipeline.gpu import batch, choice
from quantkit.pipeline.gpu import executor as cards
from quantkit.quantize import QuantizeOptions, QuantizeResult, plan_quantize, quantize

pytestmark = pytest.mark.skipif(host_device.compiler() is None, reason="no C++ compiler: install g++")

IMATRIX = "importance.gguf"
#: Of each tensor: how it lies in the source, and what becomes of it.
KINDS = {
    "token_embd": ("F16", "Q4_0"),
    "blk.0.attn_q": ("BF16", "Q4_K"),
    "blk.0.attn_k": ("F32", "IQ4_XS"),
    "blk.0.attn_v": ("Q8_0", "TQ1_0"),
    "blk.0.attn_output": ("Q5_0_R4", "IQ2_S"),
    "blk.0.ffn_down": ("F16", "Q4_0_R8"),
    "blk.0.ffn_up_exps": ("BF16", "Q4_0"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("cards") / "source.gguf", kinds=KINDS)


@pytest.fixture(scope="module")
def cov(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write covariances, and an importance matrix beside them; each expert has its own."""
    entries: dict[str, tuple[float, ...]] = {
        "blk.0.attn_q.weight: blk.0.attn_k.weight blk.0.attn_v.weight": (5000,),
        "blk.0.attn_output.weight:": (5000,),
        "blk.0.ffn_down.weight:": (5000,),
        "blk.0.ffn_up_exps.weight:": TOKENS,
    }
    path = write_covariances(tmp_path_factory.mktemp("cov") / "cov.gguf", entries)
    rng, counts = np.random.default_rng(3), {"blk.0.attn_output.weight": 1, "blk.0.ffn_up_exps.weight": EXPERTS}
    importance = {
        name: ImatrixEntry(np.exp(rng.normal(0, 1, (n, N))).astype(np.float32), np.full(n, 4, np.int64), None, None)
        for name, n in counts.items()
    }
    write_imatrix(path.with_name(IMATRIX), Imatrix(path, importance, ["text"], 1, 512))
    return path


def rules(cov: Path, **settings: Any) -> QuantizeOptions:
    types = tuple(f"{name.replace('.', '[.]')}={target}" for name, (_, target) in KINDS.items() if name != "token_embd")
    return QuantizeOptions(
        tensor_type=types, token_embedding_type="Q4_0", allow_requantize=True, feedback=cov,
        imatrix=cov.with_name(IMATRIX), **settings
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def pieces() -> Iterator[None]:
    """Jobs of few rows, so that there are several batches of a matrix; figures are sums over pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs_module, "JOB", 16 * N)
        patch.setattr("quantkit.pipeline.encoding.PIECE", 8 * N)
        patch.setattr(jobs_module, "PIECE", 8 * N)
        patch.setattr("quantkit.pipeline.encoding.TILE", 8)
        patch.setattr(cards, "FEEDBACK_BATCH", 16 * N)
        yield


@pytest.fixture(scope="module")
def expected(pieces: None, source: Path, cov: Path, tmp_path_factory: pytest.TempPathFactory) -> QuantizeResult:
    return quantize(source, tmp_path_factory.mktemp("wanted") / "o.gguf", "Q4_0", rules(cov), measure_error=True)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cupy.Faults]:
    with fake_cupy.install(monkeypatch):
        yield fake_cupy.FAULTS


def on_gpus(source: Path, out: Path, options: QuantizeOptions, **settings: Any) -> tuple[QuantizeResult, list[str]]:
    observer = settings.pop("observer", None) or NoteObserver()
    all_settings = {"backend": "cuda", "threads": 2, "overwrite": True, "observer": observer, **settings}
    return quantize(source, out, "Q4_0", options, **all_settings), observer.notes


def report_of(result: QuantizeResult) -> FeedbackReport | None:
    return feedback_report(result.plan, result.run.losses)


def is_same(result: QuantizeResult, expected: QuantizeResult) -> bool:
    """Return whether two results have the same bytes and figures."""
    assert report_of(result) == report_of(expected)
    return result.paths[0].read_bytes() == expected.paths[0].read_bytes()


def test_the_file_is_the_cpus(source: Path, cov: Path, expected: QuantizeResult, tmp_path: Path) -> None:
    """Also for entries that the cache gets from GPUs."""
    out, cache = tmp_path / "o.gguf", tmp_path / "cache"
    result, notes = on_gpus(source, out, rules(cov), measure_error=True, verify=6, cache=cache)
    assert is_same(result, expected)
    rerun, _ = on_gpus(source, out, rules(cov), measure_error=True, backend="cpu", cache=cache)
    assert is_same(rerun, expected)
    assert rerun.run.cache is not None
    assert rerun.run.cache.hits == rerun.run.cache.tensors == 7
    assert notes[0] == "--backend cuda: CUDA0, CUDA1 encode 7 tensors (the CPU interleaves rows of 1)"
    assert notes[-1] == "--verify: 6 jobs are identical to the CPU's"


def test_an_invalid_covariance_is_an_error(source: Path, cov: Path, tmp_path: Path) -> None:
    """Nonfinite values give the CPU's error, and no other."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(cov.read_bytes())
    (tmp_path / IMATRIX).write_bytes(cov.with_name(IMATRIX).read_bytes())
    with open_gguf(cov) as file:
        offset = file.tensors["blk.0.attn_q.weight.cov"].offset
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(np.float32(1e-30).tobytes())
        f.seek(offset + 4 * 7)
        f.write(np.float32(1e9).tobytes())
    spoiled = write_source(tmp_path / "spoiled.gguf", "blk.0.attn_k", KINDS)
    for options, model, refusal in ((rules(path), source, "QK-E118 broken.gguf 0"), (rules(cov), spoiled, "QK-E108 7")):
        notes = []
        for backend in ("cpu", "cuda"):
            with refuses(FormatError, refusal) as e:
                on_gpus(model, tmp_path / "o.gguf", options, backend=backend)
            notes.append(str(e.value))
        assert notes[0] == notes[1]
    assert not (tmp_path / "o.gguf").exists()


@pytest.mark.parametrize("after", [{0: 30, 1: 0}, {0: 90, 1: 150}])
def test_jobs_of_failing_gpus_are_taken_over(
    source: Path,
    cov: Path,
    expected: QuantizeResult,
    tmp_path: Path,
    two_gpus: fake_cupy.Faults,
    after: dict[int, int],
) -> None:
    """While a metric is made there, or rows are rounded; the CPU makes metrics of its own then."""
    two_gpus.left |= after
    result, notes = on_gpus(source, tmp_path / "o.gguf", rules(cov), measure_error=True)
    assert is_same(result, expected)
    assert sum("is no longer used; the other devices take over its work" in note for note in notes) == 2


def test_a_hung_gpu_is_abandoned(
    source: Path, cov: Path, expected: QuantizeResult, tmp_path: Path, two_gpus: fake_cupy.Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(batch, "PATIENCE", 0.3)
    monkeypatch.setattr(batch, "SLOWEST", 1e9)
    two_gpus.hangs[1] = 60
    result, notes = on_gpus(source, tmp_path / "o.gguf", rules(cov), measure_error=True, devices=[1])
    assert is_same(result, expected)
    assert "CUDA1 does not respond" in notes[1]


def test_gpu_memory_bounds_its_jobs(
    source: Path, cov: Path, expected: QuantizeResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics that have no room are the CPU's; those that have are made again where not all have at once."""
    sizes = list[int]()
    make = metrics.metric

    def noted(*args: Any) -> Any:
        sizes.append(1)
        return make(*args)

    monkeypatch.setattr(metrics, "metric", noted)
    metric = 32 * N * N
    counts = []
    for times in (20, 4, 1):
        sizes.clear()
        result, notes = on_gpus(
            source, tmp_path / "o.gguf", rules(cov), measure_error=True, max_vram=times * metric, devices=[0]
        )
        assert is_same(result, expected), times
        counts.append(len(sizes))
        large = [note for note in notes if "does not fit into GPU memory" in note]
        assert large == ["the CPU encodes blk.0.attn_k.weight .. (5 tensors): a covariance does not fit into GPU "
                         "memory"] * (times == 1)  # fmt: skip
    assert counts[0] == 5, "of each matrix once, of those of an input together"
    assert counts[1] >= 5
    assert counts[2] == 0


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_is_resumed_on_another_device(
    source: Path, cov: Path, expected: QuantizeResult, tmp_path: Path, first: str, then: str
) -> None:
    out, observer = tmp_path / "o.gguf", NoteObserver()
    observer.left = 3
    with pytest.raises(KeyboardInterrupt):
        on_gpus(source, out, rules(cov), measure_error=True, observer=observer, backend=first, threads=1)
    observer = NoteObserver()
    settings: dict[str, Any] = {"observer": observer, "backend": then, "resume": True, "overwrite": False}
    result, _ = on_gpus(source, out, rules(cov), measure_error=True, **settings)
    assert is_same(result, expected)
    assert observer.reused >= 2


def test_unsupported_work_on_gpus_is_noted(
    source: Path, cov: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_quantize(source, tmp_path / "o.gguf", "Q4_0", rules(cov))
    monkeypatch.setattr(choice, "can_round", lambda t: t.name != "Q4_0")
    assert choice.gpus_for(plan, "auto")[1] == (
        "--backend auto: CUDA0, CUDA1 encode 5 tensors (the CPU interleaves rows of 1), the CPU 2 tensors: "
        "no error feedback for Q4_0 on GPUs (2)"
    )


# ---------------------------------------------------------------- layer by layer


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last layer of the model with half of its heads and experts, of which some columns are left."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    with open_gguf(MODEL) as file:
        tensors: list[Any] = []
        shapes = {"attn_q.weight": (2, 128), "attn_k.weight": (2, 64), "attn_v.weight": (2, 64),
               "attn_output.weight": (1, 128)}  # fmt: skip
        for name, info in file.tensors.items():
            if name.startswith("blk.") and not name.startswith("blk.0."):
                continue
            x = file.data(name).view(np.uint8)
            width = info.nbytes // int(np.prod(info.shape))
            x = x.reshape(*info.shape[::-1], width)
            kind = name.removeprefix("blk.0.")
            if kind in shapes:
                axis, size = shapes[kind]
                x = x[:size] if axis == 2 else x[:, :size]
            if "exps" in kind:
                x = x[:4, :32] if "down" not in kind else x[:4, :, :32]
            if kind == "ffn_gate_inp.weight":
                x = x[:4]
            shape = x.shape[:-1][::-1]
            tensors.append((name, shape, info.type, np.ascontiguousarray(x).tobytes()))
        changed = {"block_count": 1, "attention.head_count": 2, "attention.head_count_kv": 1, "expert_count": 4,
                   "expert_feed_forward_length": 32, "feed_forward_length": 32}  # fmt: skip
        fields = [
            Field.of(key, changed[key.removeprefix("qwen3moe.")], field.type)
            if key.removeprefix("qwen3moe.") in changed
            else field
            for key, field in file.fields.items()
        ]
        write_gguf(path, fields, tensors)
    return path


def test_layer_by_layer(small: Path, tmp_path: Path) -> None:
    """Covariances of both streams, corrected targets, routers and experts; activations are the CPU's."""
    text = tmp_path / "bottles.txt"
    text.write_bytes(TEXT)
    options = QuantizeOptions(
        calibrate=(text,), calibrate_ctx=128, calibrate_chunks=5, token_embedding_type="BF16",
        output_tensor_type="BF16",
        tensor_type=("attn_k=IQ4_NL", "attn_output=Q4_0", "gate_exps=Q4_0", "down_exps=Q5_1", "blk=BF16"),
    )  # fmt: skip
    outputs = [
        on_gpus(small, tmp_path / f"{b}.gguf", options, backend=b, verify=int(b == "cuda")) for b in ("cpu", "cuda")
    ]
    assert is_same(outputs[1][0], outputs[0][0])
    notes = outputs[1][1]
    assert notes[0] == (
        "--backend cuda: CUDA0, CUDA1 encode 5 tensors; calibration runs the model on the CPU, so bytes are the same "
        "on every backend"
    )
    assert notes.count("--verify: 1 jobs are identical to the CPU's") == 5
