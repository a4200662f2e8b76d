"""Quantization layer by layer: a graph in stages equals the whole graph; the result of a run on a text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu_products import Rows
from refusals import refuses

from quantkit.cli._run_report import DryRunReport
from quantkit.errors import QuantkitError, RecipeError
from quantkit.formats.gguf import open_gguf
from quantkit.model.engine import load
from quantkit.model.observers import every_token, inputs
from quantkit.model.ops import Embed, Graph, Observe, Value
from quantkit.pipeline.feedback_report import feedback_report
from quantkit.pipeline.plan import Plan
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
from quantkit.sequential.inputs import rounded_inputs
from quantkit.sequential.spill import Spill
from quantkit.sequential.streams import Streams, Tokens
from quantkit.types import BY_NAME
from zoo import NAMES, VARIED

F32 = npt.NDArray[np.float32]


def random_tokens(n_vocab: int, windows: int = 3, n_ctx: int = 12) -> Tokens:
    ids = np.random.default_rng(5).integers(0, n_vocab, (windows, n_ctx), np.int32)
    return Tokens(ids, 2)


def observed(path: Path, tokens: Tokens) -> dict[str, F32]:
    """Return every weight's input, as a run shows it that is not cut, by the name of the first weight."""
    rows: dict[str, list[F32]] = {}

    def look(name: str, x: F32, ids: Any) -> None:
        rows.setdefault(name, []).append(x.copy())

    def rewrite(graph: Graph) -> Graph:
        graph = every_token(graph)
        observed_inputs = inputs(graph, process_output=True)
        first = {item.names[0]: item.x for item in reversed(observed_inputs)}  # loops have several
        after: dict[Value, list[Observe]] = {}
        for name, x in first.items():
            after.setdefault(x, []).append(Observe(x=x, label=name))
        ops = [node for op in graph.ops for node in (op, *(look for v in op.outputs() for look in after.get(v, ())))]
        return replace(graph, ops=tuple(ops))

    n_ctx = tokens.windows.shape[1]
    with load(path, threads=1, n_ctx=n_ctx, n_ubatch=2 * n_ctx, observer=look, rewrite=rewrite) as model:
        for first in range(0, len(tokens.windows), 2):
            windows = tokens.windows[first : first + 2]
            sequences = np.repeat(np.arange(len(windows), dtype=np.int32), n_ctx)
            model.session(n_ctx, 2).decode(windows.reshape(-1), sequences, np.zeros(windows.size, bool))
    return {name: np.concatenate(parts) for name, parts in rows.items()}


@pytest.mark.parametrize(
    "name", [name if name in VARIED else pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES]
)
def test_stages_equal_the_whole(zoo: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    """Both streams through the same file: the inputs of matrices are the same in both, and as in an uncut run."""
    path = zoo(name)
    with load(path, threads=1, n_ctx=12, rewrite=every_token) as model:
        embeddings = {op.weight.tensor.name for op in model.unfused.ops if isinstance(op, Embed)}
        items = inputs(model.unfused, process_output=True)
        tokens = random_tokens(model.n_vocab)
    weights = {name for i in items for name in i.names} - embeddings
    expected, spill = observed(path, tokens), Spill(tmp_path / "spill", "", ())
    assert spill.begin() == -1
    names: set[str] = set()
    with Streams(path, weights, tokens, spill, 1) as streams:
        streams.open_output(path, weights)
        for stage in range(len(streams)):
            streams.run(stage, lambda tokens: None)
            for item in streams.inputs(stage):
                x, plain = (spill.map_rows(place, tokens.count) for place in (item.x, item.plain))
                assert (x == plain).all(), item.entry
                assert (x == expected[item.entry].reshape(x.shape)).all(), item.entry
                names.add(item.entry)
    assert names == {i.names[0] for i in items if not weights.isdisjoint(i.names)}


# ---------------------------------------------------------------- a whole run

TEXT = b"".join(b"%d green bottles stood on wall %d of %d.\n" % (i, i * i % 97, 7 * i % 13) for i in range(150))
MODEL = Path(__file__).parents[1] / "data" / "tiny-moe-bf16.gguf"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "bottles.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last two layers of the model, with its embeddings and output."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    quantize(MODEL, path, "COPY", QuantizeOptions(prune_layers=(0, 1)))
    return path


def calibrated(text: Path, **options: Any) -> QuantizeOptions:
    return QuantizeOptions(calibrate=(text,), calibrate_ctx=128, **options)


def logits(path: Path) -> F32:
    with load(path, threads=1) as model:
        return model.forward(model.tokenizer.encode(MODEL.with_name("tiny-moe-evaluation.txt").read_bytes())[:128])


def test_bytes_do_not_depend_on_how_it_runs(
    text: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, memory, shards, a run that was killed in the middle of a stage or of its jobs: the same tensors."""
    first, second = tmp_path / "first.gguf", tmp_path / "other.gguf"
    options = partial(calibrated, text)
    result = quantize(small, first, "Q4_K_M", options(), threads=2)
    assert len([t for t in result.plan.tensors if t.reason.endswith("; corrected")]) == 2  # routers
    assert not list(tmp_path.glob("*.activations"))

    run = Streams.run
    stages: list[int] = []

    def killed(self: Streams, stage: int, progress: Callable[[int], None]) -> None:
        stages.append(stage)
        if stage == 3 and stages.count(3) == 1:
            raise KeyboardInterrupt
        run(self, stage, progress)

    monkeypatch.setattr(Streams, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        quantize(small, second, "Q4_K_M", options(), threads=1, max_ram=16 << 20)
    rerun = quantize(small, second, "Q4_K_M", options(), threads=1, max_ram=16 << 20, resume=True)
    assert second.read_bytes() == first.read_bytes()
    assert stages == [*range(4), *range(3, max(stages) + 1)]  # it continues with the stage
    assert rerun.run.resumed > 6  # tensors of the stages before
    stages.clear()
    shards, split = tmp_path / "split.gguf", options(split_max_size="2M")
    with pytest.raises(KeyboardInterrupt):
        quantize(small, shards, "Q4_K_M", split, threads=2)
    monkeypatch.undo()
    # Activations of a run that goes on, but not what it encoded: all is done again.
    quantize(small, shards, "Q4_K_M", split, threads=2, overwrite=True)
    assert not list(tmp_path.glob("*.activations"))
    with open_gguf(first) as one, open_gguf(next(tmp_path.glob("split-00001-of-*"))) as shard:
        assert all((one.data(name) == shard.data(name)).all() for name in one.tensors)


def test_a_single_matrix_is_calibrated(text: Path, small: Path, tmp_path: Path) -> None:
    rules = (r"blk\.1\.attn_v=q4_K", "blk=bf16", "token_embd=bf16", "output=bf16")
    options = calibrated(text, calibrate_chunks=2, balance=False, tensor_type=rules)
    result = quantize(small, tmp_path / "o.gguf", "Q4_K_M", options, threads=1)
    report = feedback_report(result.plan, result.run.losses)
    assert report is not None
    assert [(t.name, t.type) for t in report.tensors] == [("blk.1.attn_v.weight", "Q4_K")]
    assert report.tensors[0].after < report.tensors[0].before


def test_activations_of_another_model_are_not_resumed(
    text: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose embeddings are others, with the same ends; nothing was encoded yet of what the activations are for."""
    options = calibrated(text, balance=False)  # balance runs the model before it is told from others
    model, out, fresh = tmp_path / "m.gguf", tmp_path / "o.gguf", tmp_path / "fresh.gguf"
    shutil.copy(small, model)
    run = Streams.run

    def killed(self: Streams, stage: int, progress: Callable[[int], None]) -> None:
        if stage == 1:
            raise KeyboardInterrupt
        run(self, stage, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Streams, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            quantize(model, out, "Q4_K_M", options, threads=1)
    with open_gguf(model) as file, model.open("r+b") as target:
        embeddings = file.tensors["token_embd.weight"]
        row = embeddings.nbytes // embeddings.shape[1]
        ends = -(-4096 // row)
        target.seek(embeddings.offset + ends * row)
        target.write(file.data(embeddings).reshape(-1, row)[ends:-ends][::-1].tobytes())
    quantize(model, out, "Q4_K_M", options, threads=1, resume=True)
    quantize(model, fresh, "Q4_K_M", options, threads=1)
    assert out.read_bytes() == fresh.read_bytes()


def test_a_damaged_spill_is_computed_again(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "s", "one", ())
    spill.begin()
    (tmp_path / "s" / "state.json").write_text('{"identity": "one", "stage": 3, "files": {"gone": 1}}')
    assert spill.begin() == -1
    assert not list((tmp_path / "s").iterdir())


@pytest.mark.parametrize("preset", ["Q2_K", "IQ4_XS"])
def test_it_is_closer_than_an_importance_matrix(text: Path, tmp_path: Path, preset: str) -> None:
    """On tokens it was not calibrated on; without an importance matrix, which the calibration takes the place of.

    Of the first and the last layer: the errors of the one reach the other through layers that have none. By the median:
    a few tokens that are sent to other experts, by however little, make most of the mean.
    """
    rules: dict[str, Any] = {"tensor_type": (r"blk\.[12]\.=bf16",)}
    imatrix, calibration = (MODEL.with_name(f"tiny-moe-{name}") for name in ("imatrix.gguf", "calibration.txt"))
    quantize(MODEL, tmp_path / "plain.gguf", preset, QuantizeOptions(imatrix=imatrix, **rules))
    quantize(MODEL, tmp_path / "made.gguf", preset, calibrated(calibration, calibrate_chunks=60, **rules))
    full = logits(MODEL)
    plain, calibrated_error = (np.median(np.square(logits(tmp_path / f"{n}.gguf") - full)) for n in ("plain", "made"))
    assert calibrated_error < (0.4 if preset == "Q2_K" else 0.6) * plain


def test_balanced_columns(tmp_path: Path) -> None:
    """All by itself, without what is kept as it is; an importance matrix counts what columns are multiplied by."""

    def plan(preset: str = "Q4_K_M", **options: Any) -> Plan:
        return plan_quantize(MODEL, tmp_path / "o.gguf", preset, calibrated(text, calibrate_chunks=20, **options))

    def widened(plan: Plan) -> set[str]:
        return {t.name for t in plan.tensors if t.source.type.name == "F32" and t.type.is_quantized}

    imatrix, text = (MODEL.with_name(f"tiny-moe-{name}") for name in ("imatrix.gguf", "calibration.txt"))
    all_of_it, none = plan(imatrix=imatrix), plan(imatrix=imatrix, balance=False)
    assert len(widened(all_of_it)) == 25  # not the embeddings, nor outputs of attention
    assert {t["source_type"] for t in DryRunReport(all_of_it).as_dict()["tensors"]} == {"BF16", "F32"}
    assert "17.54 MiB (16.02 bits per weight) -> 5.64 MiB" in DryRunReport(all_of_it).text()
    assert not widened(none)
    assert [t.nbytes for t in all_of_it.tensors] == [t.nbytes for t in none.tensors]
    message = "equalized blk.0.attn_norm.weight .. output_norm.weight (13 tensors) with the 29 tensors"
    assert any(note.startswith(message) for note in all_of_it.notes)
    plan_of_layer_0 = plan(tensor_type=(r"blk\.[12]\.=bf16",), leave_output_tensor=True)
    assert widened(plan_of_layer_0) == {name for name in widened(all_of_it) if name.startswith(("blk.0.", "blk.3."))}
    name = "blk.2.ffn_down_exps.weight"
    balanced, before = (next(t.importance for t in p.tensors if t.name == name) for p in (all_of_it, none))
    assert balanced is not None
    assert before is not None
    spreads = [
        np.ptp(np.log(importance.weights[3])) for importance in (balanced, before) if importance.weights is not None
    ]
    assert spreads[0] < 0.82 * spreads[1]


def test_inputs_are_rounded_like_products() -> None:
    for n, name in ((512, "Q4_K"), (96, "Q8_0")):
        x = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)
        x[1, : n // 2] = 0
        rounded, by_products = rounded_inputs(x), Rows(BY_NAME[name], x).values()[0]
        assert np.allclose(rounded, by_products, rtol=1e-3)  # of a scale that may be a half float
        assert np.abs(rounded - by_products).max() < 0.1 * np.abs(x - by_products).max()


def test_impossible_calibrations_are_refused(text: Path, tmp_path: Path) -> None:
    with refuses(RecipeError, "QK-E201 --feedback --calibrate"):
        plan_quantize(MODEL, tmp_path / "o.gguf", "Q4_K", calibrated(text, feedback=text))
    with refuses(RecipeError, "QK-E201 --ray"):
        quantize(MODEL, tmp_path / "o.gguf", "Q4_K", calibrated(text), ray="auto")
    with refuses(RecipeError, "QK-E202 --no-balance"):
        plan_quantize(MODEL, tmp_path / "o.gguf", "Q4_K", QuantizeOptions(balance=False))
    with refuses(QuantkitError, "QK-E203 2899"):
        plan_quantize(MODEL, tmp_path / "o.gguf", "Q4_K", QuantizeOptions(calibrate=(text,), calibrate_ctx=100000))
    assert not list(tmp_path.iterdir())
