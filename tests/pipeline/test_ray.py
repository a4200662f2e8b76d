"""On a Ray cluster of two nodes on this machine: the same bytes as on threads, and what happens to nodes."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fake_cupy
import host_device
import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses
from test_gpus import write_source
from test_imatrix_collect import spoilt
from test_nextn import predicting

import checkpoints
from conftest import DATA
from quantkit import cluster as cluster_module
from quantkit.cli import cli
from quantkit.cluster import Cluster, Node, NodeRefusal
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.errors import ClusterError, FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.evaluate import SaveLogits, kld, perplexity
from quantkit.evaluate.on_nodes import NodeModel
from quantkit.evaluate.passes import Nodes
from quantkit.formats.gguf import open_model
from quantkit.formats.imatrix import read_imatrix
from quantkit.formats.ranges import Buffers
from quantkit.imatrix import ImatrixOptions, Watcher, imatrix
from quantkit.imatrix.covariance import CovarianceProgress, covariance
from quantkit.imatrix.on_nodes import add_sums
from quantkit.merge import merge_up_gate, plan_merge_up_gate
from quantkit.pipeline import jobs as jobs_module
from quantkit.pipeline import ray_tasks
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.ray_gpus import choose_gpus
from quantkit.pipeline.source import Source
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize, run_quantize
from small_models import llama_tensors, write_model
from zoo import write_zoo

MODEL = DATA / "tiny-moe-bf16.gguf"
WITH_IMATRIX = QuantizeOptions(imatrix=DATA / "tiny-moe-imatrix.gguf")
#: conftest.py makes it the last line of a run, and .ci/run does not allow it.
NO_RAY = "no Ray for this Python: pip install 'ray>=2.40'"


#: A node that starts little beside what tests need.
SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Nodes of one CPU, where the driver is, and of two with a GPU, of which only the second may be removed."""
    ray = pytest.importorskip("ray", reason=NO_RAY)
    from ray.cluster_utils import Cluster as LocalCluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    local = LocalCluster(initialize_head=True, head_node_args=SMALL | {"no_monitor": True})
    local.add_node(**SMALL | {"num_cpus": 2, "num_gpus": 1})
    local.wait_for_nodes()
    ray.init(address=local.address, log_to_driver=False, logging_level="ERROR")
    yield local
    ray.shutdown()
    local.shutdown()


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many jobs and batches even of a small model."""
    monkeypatch.setattr(jobs_module, "JOB", 1 << 15)
    monkeypatch.setattr(ray_tasks, "BATCH_SECONDS", 0.05)


@pytest.fixture
def both_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's thread takes a job, then the other node a batch, then any: both do some work."""
    took, gave = threading.Event(), threading.Event()
    take, give = ray_tasks._Jobs._next_job, ray_tasks._Jobs.batch

    def take_job(jobs: ray_tasks._Jobs) -> jobs_module.Job | None:
        if took.is_set():
            gave.wait(60)
        job = take(jobs)
        took.set()
        return job

    def batch(jobs: ray_tasks._Jobs, node: Node) -> list[jobs_module.Job] | None:
        took.wait(60)
        jobs_of_batch = give(jobs, node)
        gave.set()
        return jobs_of_batch

    monkeypatch.setattr(ray_tasks._Jobs, "_next_job", take_job)
    monkeypatch.setattr(ray_tasks._Jobs, "batch", batch)


class Watch:
    """An observer that calls ``on_bytes`` with what was written so far."""

    def __init__(self, on_bytes: Callable[[int], None] = lambda nbytes: None) -> None:
        self.on_bytes, self.nbytes, self.texts = on_bytes, 0, list[str]()

    def on_resume(self, tensors: int, nbytes: int) -> None:
        pass

    def on_write(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.on_bytes(self.nbytes)

    def on_tensor(self, tensor: object) -> None:
        pass

    def on_note(self, text: str) -> None:
        self.texts.append(text)


# ---------------------------------------------------------------- what travels


def same_bytes(a: Source, b: Source) -> None:
    """Two sources give the same tensors."""
    assert list(a.tensors) == list(b.tensors)
    assert a.fingerprint() == b.fingerprint()
    one, second = Buffers(), Buffers()
    for name, tensor in a.tensors.items():
        x, y = one.get("x", tensor.nbytes), second.get("x", tensor.nbytes)
        a.read(tensor, x, 0)
        b.read(b.tensors[name], y, 0)
        assert np.array_equal(x, y), name
        assert b.tensors[name].type is tensor.type


def test_a_plan_and_its_source_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name of file, wherever the other process is."""
    split = quantize(MODEL, tmp_path / "split.gguf", "COPY", QuantizeOptions(split_max_size=2_000_000)).paths
    monkeypatch.chdir(tmp_path)
    for path in (MODEL, Path(split[1].name)):
        plan = plan_quantize(path, tmp_path / "o.gguf", "Q4_K_M", WITH_IMATRIX)
        data = pickle.dumps((plan.source, plan.tensors))
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir("/")
            source, tensors = pickle.loads(data)
            with open_model(path.absolute() if path.is_absolute() else tmp_path / path) as opened:
                same_bytes(opened, source)
        assert [(t.name, t.type, t.offset) for t in tensors] == [(t.name, t.type, t.offset) for t in plan.tensors]
        assert all(a.type is b.type for a, b in zip(tensors, plan.tensors, strict=True))
        actual = [
            (a.importance, b.importance) for a, b in zip(tensors, plan.tensors, strict=True) if b.importance is not None
        ]
        assert actual
        assert all(np.array_equal(a.weights, b.weights) for a, b in actual)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_a_checkpoint_pickles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.write_checkpoint(name, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    options = ConvertOptions(pre=checkpoints.describe(name).vocab.get("pre"), allow_other_ids=True)
    data = pickle.dumps(plan_convert(folder.relative_to(tmp_path), tmp_path / "o.gguf", None, options).source)
    source = plan_convert(folder, tmp_path / "o.gguf", None, options).source
    monkeypatch.chdir("/")
    same_bytes(source, pickle.loads(data))


# ---------------------------------------------------------------- the same bytes


def test_quantize_equals_threads(nodes: Any, tmp_path: Path, small_jobs: None, both_work: None) -> None:
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    by_threads = quantize(MODEL, a, "Q4_K_M", WITH_IMATRIX, measure_error=True)
    by_nodes = quantize(MODEL, b, "Q4_K_M", WITH_IMATRIX, measure_error=True, ray="auto")
    assert a.read_bytes() == b.read_bytes()
    assert by_threads.run.sums == by_nodes.run.sums
    assert not by_threads.run.nodes
    assert sorted(node.cpus for node in by_nodes.run.nodes) == [1, 2]
    assert by_nodes.threads == 3
    assert all(node.nbytes for node in by_nodes.run.nodes)
    assert sum(node.nbytes for node in by_nodes.run.nodes) == sum(t.nbytes for t in by_nodes.plan.tensors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


def test_shards_and_copies_equal_threads(nodes: Any, tmp_path: Path) -> None:
    for sub, ray in (("threads", None), ("ray", "auto")):
        (tmp_path / sub).mkdir()
        quantize(MODEL, tmp_path / sub / "o.gguf", "COPY", QuantizeOptions(split_max_size=2_000_000), ray=ray)
        quantize(MODEL, tmp_path / sub / "q.gguf", "Q4_0", QuantizeOptions(split_max_size=2_000_000), ray=ray)
    files = sorted(p.name for p in (tmp_path / "threads").iterdir())
    assert len(files) > 4
    assert files == sorted(p.name for p in (tmp_path / "ray").iterdir())
    assert all((tmp_path / "threads" / f).read_bytes() == (tmp_path / "ray" / f).read_bytes() for f in files)


def test_convert_and_merge_equal_threads(nodes: Any, tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint("qwen3-moe", tmp_path / "model")
    options = ConvertOptions(pre=checkpoints.describe("qwen3-moe").vocab.get("pre"), allow_other_ids=True)
    for type_name in (None, "Q8_0"):
        convert(folder, tmp_path / "a.gguf", type_name, options, overwrite=True)
        convert(folder, tmp_path / "b.gguf", type_name, options, overwrite=True, ray="auto")
        assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    merge_up_gate(MODEL, tmp_path / "a.gguf", overwrite=True)
    merge_up_gate(MODEL, tmp_path / "b.gguf", overwrite=True, ray="auto")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_nodes_use_the_cache(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may be given as it is called from here."""
    monkeypatch.chdir(tmp_path)
    by_threads = quantize(MODEL, "a.gguf", "Q4_0", cache="cache")
    by_nodes = quantize(MODEL, "b.gguf", "Q4_0", cache="cache", ray="auto")
    assert Path("a.gguf").read_bytes() == Path("b.gguf").read_bytes()
    assert by_threads.run.cache is not None
    assert by_nodes.run.cache is not None
    assert by_threads.run.cache.stored == by_nodes.run.cache.hits == by_nodes.run.cache.tensors > 0
    assert by_nodes.run.cache.damaged == 0


class Interruption(Exception):
    pass


def stop_after(share: float, total: int) -> Callable[[int], None]:
    def stop(nbytes: int) -> None:
        if nbytes > share * total:
            raise Interruption

    return stop


@pytest.mark.parametrize(("first", "second"), [("auto", None), (None, "auto")])
def test_runs_are_resumed_across_executors(
    first: str | None, second: str | None, nodes: Any, tmp_path: Path, small_jobs: None
) -> None:
    expected, out = tmp_path / "whole.gguf", tmp_path / "o.gguf"
    quantize(MODEL, expected, "Q4_K_M", WITH_IMATRIX)
    watch = Watch(stop_after(0.6, expected.stat().st_size))
    with pytest.raises(Interruption):
        quantize(MODEL, out, "Q4_K_M", WITH_IMATRIX, observer=watch, ray=first)
    result = quantize(MODEL, out, "Q4_K_M", WITH_IMATRIX, resume=True, ray=second)
    assert 0 < result.run.resumed < len(result.plan.tensors)
    assert out.read_bytes() == expected.read_bytes()


def test_perplexity_and_kld_equal_one_machine(nodes: Any, tmp_path: Path) -> None:
    model, tokens = write_zoo("qwen3moe-moe", tmp_path / "m.gguf"), np.arange(32 * 9) % 97
    # Nodes() may use GPUs, which round activations.
    settings: dict[str, Any] = {"n_ctx": 32, "n_batch": 64, "activations": "runtime"}
    actual = perplexity(model, tokens=tokens, save_logits=SaveLogits(tmp_path / "base"), **settings)
    by_nodes = perplexity(model, tokens=tokens, nodes=Nodes(), **settings)
    choices = [
        note
        for note in by_nodes.notes
        if re.match(r"node .*: --backend auto: the CPU \(CuPy|.*CuPy is not installed", note)
    ]
    assert len(choices) == 2
    notes = tuple(note for note in by_nodes.notes if note not in choices)
    assert replace(actual, seconds=0, saved=None) == replace(by_nodes, seconds=0, notes=notes)
    second_model = write_zoo("qwen3moe-moe", tmp_path / "other.gguf")
    result = kld(second_model, tmp_path / "base", nodes=Nodes(), n_batch=64, activations="runtime")
    alone = kld(second_model, tmp_path / "base", n_batch=64, activations="runtime")
    assert result.sums.kld == alone.sums.kld
    assert result.sums.rms_p_diff == alone.sums.rms_p_diff


@pytest.mark.parametrize("kind", ["llama.cpp", "compact"])
def test_saved_logits_equal_one_machine(kind: str, nodes: Any, tmp_path: Path) -> None:
    model, tokens = write_zoo("qwen3moe-moe", tmp_path / "m.gguf"), np.arange(32 * 9) % 97
    for sub, run in (("a", {}), ("b", {"nodes": Nodes(backend="cpu")})):
        save = SaveLogits(tmp_path / sub, kind, top_k=20)
        result = perplexity(model, tokens=tokens, n_ctx=32, n_batch=64, save_logits=save, **run)  # type: ignore[arg-type]
        assert result.saved == tmp_path / sub
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "m.gguf"]


def test_covariances_equal_one_machine(nodes: Any, tmp_path: Path) -> None:
    """Also a stopped run, resumed by either."""
    model, tokens = write_zoo("qwen3moe-moe", tmp_path / "m.gguf"), np.random.default_rng(1).integers(0, 97, 32 * 6)
    options, out = ImatrixOptions(n_ctx=32, n_batch=64), tmp_path / "c.gguf"
    settings: dict[str, Any] = {"tokens": tokens, "options": options, "max_ram": 12 << 20}
    alone = covariance(model, (), tmp_path / "whole.gguf", **settings)
    by_nodes = covariance(model, (), out, nodes=Nodes(), **settings)
    assert by_nodes.n_passes >= alone.n_passes > 3
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    executors: list[dict[str, Any]] = [{"nodes": Nodes()}, {}]
    for first, second in (executors, executors[::-1]):
        out.unlink()
        with pytest.raises(Interruption):
            covariance(model, (), out, progress=stop_at_pass(3), **first, **settings)
        rerun = covariance(model, (), out, **second, **settings | {"options": replace(options, resume=True)})
        assert rerun.resumed[0] >= 2
        assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.gguf", "m.gguf", "whole.gguf"]


def stop_at_pass(number: int) -> Callable[[CovarianceProgress], None]:
    def stop(now: CovarianceProgress) -> None:
        if now.number >= number:
            raise Interruption

    return stop


@pytest.mark.parametrize(
    "changes",
    [{}, {"all_experts": True, "output_frequency": 2}, {"nextn": True}],
    ids=["plain", "all-experts", "nextn"],
)
def test_an_importance_matrix_equals_one_machine(changes: dict[str, Any], nodes: Any, tmp_path: Path) -> None:
    write: Callable[[Path], Path] = partial(write_zoo, "qwen3moe-moe")
    if "nextn" in changes:
        write = partial(predicting, arch="glm4moe", has_head=True)
    model, tokens = write(tmp_path / "m.gguf"), np.random.default_rng(1).integers(0, 97, 32 * 9)
    options = ImatrixOptions(n_ctx=32, n_batch=64, **changes)
    for sub, run in (("a", {}), ("b", {"nodes": Nodes()})):
        (tmp_path / sub).mkdir()
        result = imatrix(model, (), tmp_path / sub / "i.gguf", tokens=tokens, options=options, **run)  # type: ignore[arg-type]
        assert result.ppl is not None
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


class StopAfter(Watcher):
    """Stops a collection after a chunk."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_chunk(self, chunk: int, n_chunks: int, ppl: object) -> None:
        if chunk >= self.last:
            raise Interruption


@pytest.mark.parametrize("first", ["nodes", "threads"])
def test_collections_are_resumed_across_executors(first: str, nodes: Any, tmp_path: Path) -> None:
    model, tokens = write_zoo("qwen3moe-moe", tmp_path / "m.gguf"), np.random.default_rng(1).integers(0, 97, 32 * 12)
    options = ImatrixOptions(n_ctx=32, n_batch=64, output_frequency=2)
    executors: dict[str, Any] = {"nodes": {"nodes": Nodes()}, "threads": {}}
    imatrix(model, (), tmp_path / "whole.gguf", tokens=tokens, options=options)
    out = tmp_path / "i.gguf"
    with pytest.raises(Interruption):
        imatrix(model, (), out, tokens=tokens, options=options, watcher=StopAfter(9), **executors.pop(first))
    assert out.with_name("i.gguf.state").exists()
    (second,) = executors.values()
    imatrix(model, (), out, tokens=tokens, options=replace(options, resume=True), **second)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_nonfinite_chunks_are_skipped(nodes: Any, tmp_path: Path) -> None:
    model = write_zoo("qwen3moe-moe", tmp_path / "m.gguf")
    bad = spoilt(model, tmp_path / "bad.gguf", "token_embd.weight", 120, np.nan)
    tokens = np.random.default_rng(1).integers(0, 97, 32 * 8)
    tokens[3 * 32 + 5] = tokens[6 * 32 + 9] = 120
    options = ImatrixOptions(n_ctx=32, n_batch=64, output_frequency=2)
    by_nodes = imatrix(bad, (), tmp_path / "b.gguf", tokens=tokens, options=options, nodes=Nodes())
    by_threads = imatrix(bad, (), tmp_path / "a.gguf", tokens=tokens, options=options)
    assert by_threads.dropped.keys() == {3, 6}
    assert by_nodes.dropped == by_threads.dropped
    assert by_nodes.imatrix is not None
    assert by_threads.imatrix is not None
    for name, entry in by_threads.imatrix.entries.items():
        np.testing.assert_allclose(by_nodes.imatrix.entries[name].sums, entry.sums, rtol=1e-5)


def test_sums_are_added_in_order(tmp_path: Path) -> None:
    """Whatever was lost is in the low parts."""
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, 3000) * 10.0 ** rng.integers(-9, 9, 3000)
    totals = {"sums": np.zeros((1, 4, 1)), "counts": np.zeros(1, np.int64)}
    for value in x:
        part = np.zeros((1, 4, 1))
        part[0, 0], part[0, 2] = value * value, value
        add_sums(totals, {"sums": part, "counts": np.ones(1, np.int64)}, columns=True)
    from fractions import Fraction

    exact = sum(Fraction(float(v)) for v in x), sum(Fraction(float(v) * float(v)) for v in x)
    assert float(totals["sums"][0, 2, 0] + totals["sums"][0, 3, 0]) == float(exact[0])
    assert float(totals["sums"][0, 0, 0] + totals["sums"][0, 1, 0]) == float(exact[1])
    assert totals["counts"][0] == 3000


# ---------------------------------------------------------------- what a node refuses


def shared_of(tmp_path: Path, journal: Journal, mark: str) -> ray_tasks.RunSpec:
    """Return the pickled state of a run for a worker process, with reserved files."""
    plan = plan_quantize(MODEL, tmp_path / "o.gguf", "Q4_0")
    part = tmp_path / "o.gguf.part"
    part.write_bytes(bytes(plan.nbytes))
    journal.mark(mark)
    return ray_tasks.RunSpec(
        plan.source,
        plan.source.fingerprint(),
        plan.tensors,
        plan.tensors,
        (part,),
        journal.path,
        mark,
        measure=False,
        max_ram=1 << 28,
    )


def test_a_node_refuses_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_tasks, "_VISIBILITY_SECONDS", 0.0)
    with Journal(tmp_path / "o.gguf.journal", "x", []) as journal:
        good = shared_of(tmp_path, journal, "mark")
        assert callable(ray_tasks.begin(good, 1))
        for bad, why in (
            (replace(good, fingerprint="another"), "differs on this node"),
            (replace(good, mark="another run's"), "is not the file that the driver writes"),
            (replace(good, parts=(tmp_path / "gone.part",)), "cannot be written on this node: No such file"),
            (replace(good, journal=tmp_path / "gone"), "cannot be written on this node: No such file"),
        ):
            with pytest.raises(NodeRefusal, match=why):
                ray_tasks.begin(bad, 1)


def test_a_late_worker_does_not_write_into_a_new_output(tmp_path: Path) -> None:
    with Journal(tmp_path / "o.gguf.journal", "x", []) as journal:
        shared = shared_of(tmp_path, journal, "mark")
        run, part = ray_tasks.begin(shared, 1), shared.parts[0]
        part.unlink()  # --overwrite
        part.write_bytes(b"\xff" * 100)
        jobs = list(jobs_module.cut_jobs(0, shared.tensors[0], jobs_module.JOB))
        assert len(run(jobs).results) == len(jobs)
        assert part.read_bytes() == b"\xff" * 100


def test_a_node_refuses_another_model(tmp_path: Path) -> None:
    node_model = NodeModel.from_path(MODEL, Nodes(), {})
    node_model.check()
    with pytest.raises(NodeRefusal, match="is another file on this node"):
        replace(node_model, fingerprint="another").check()
    with pytest.raises(NodeRefusal, match="cannot be read on this node"):
        replace(node_model, path=tmp_path / "none.gguf").check()


# ---------------------------------------------------------------- what happens to nodes


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


class Numbers:
    """Work for tests: ``n`` batches, each a number; ``begin`` runs on the nodes."""

    def __init__(self, n: int, begin: Callable[[Any, int], Callable[[Any], Any]], shared: Any = None) -> None:
        self.begin, self.shared, self.is_stopping = begin, shared, False
        self.left, self.results, self.texts = list(range(n)), dict[int, Any](), list[str]()

    def fit(self, node: Node) -> None:
        pass

    def batch(self, node: Node) -> int | None:
        return self.left.pop() if self.left else None

    def finish(self, node: Node, batch: int, result: Any) -> None:
        self.results[batch] = result

    def say(self, text: str) -> None:
        self.texts.append(text)


def begin_refusing(refusing: set[str], threads: int) -> Callable[[int], str]:
    if node_id() in refusing:
        raise NodeRefusal("its disk is another")
    return lambda number: node_id()


def test_a_refusing_node_is_named_and_excluded(nodes: Any) -> None:
    nodes_by_id = Cluster().nodes()
    bad, good = sorted(nodes_by_id)
    numbers = Numbers(6, begin_refusing, {bad})
    Cluster().run(numbers)
    assert set(numbers.results) == set(range(6))
    assert set(numbers.results.values()) == {good}
    assert numbers.texts == [f"warning: node {nodes_by_id[bad].name} is not used: its disk is another"]
    with refuses(ClusterError, "QK-E450", nodes_by_id[bad].name):
        Cluster().run(Numbers(6, begin_refusing, {bad, good}))


def test_cpus_of_a_node_are_shared() -> None:
    for cpus, workers, width in ((1, 1, 1), (8, 1, 8), (9, 2, 4), (64, 8, 8), (65, 9, 7)):
        node = Node("id", "name", cpus, gpus=1)
        node.divide(cpus, cluster_module.WIDTH)
        assert (node.workers, node.width, node.gpus) == (workers, width, 0)


def begin_slow(slow: str, threads: int) -> Callable[[int], str]:
    def run(number: int) -> str:
        time.sleep(0.4 if node_id() == slow else 0)
        return node_id()

    return run


def test_a_slow_node_gets_fewer_batches(nodes: Any) -> None:
    slow, fast = sorted(Cluster().nodes())
    numbers = Numbers(40, begin_slow, slow)
    Cluster().run(numbers)
    workers = list(numbers.results.values())
    assert len(workers) == 40
    assert 1 <= workers.count(slow) < workers.count(fast) / 3


def begin_failing(kind: str, threads: int) -> Callable[[int], None]:
    def run(number: int) -> None:
        if kind == "format":
            raise FormatError("x.gguf: row 3 is NaN")
        if kind == "disk":
            raise OSError(28, "No space left on device", "/out/x.part")
        raise ZeroDivisionError("a bug")

    return run


@pytest.mark.parametrize(
    ("kind", "error", "refusal"),
    [
        ("format", FormatError, "QK-E100 x.gguf 3 node"),
        ("disk", ClusterError, "QK-E450 node /out/x.part 3"),
    ],
)
def test_errors_name_their_node(kind: str, error: Any, refusal: str, nodes: Any) -> None:
    with refuses(error, refusal):
        Cluster().run(Numbers(1, begin_failing, kind))  # another would be cancelled, and its worker start again


def test_unexpected_exceptions_name_their_node(nodes: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)on node .*ZeroDivisionError: a bug"):
        Cluster().run(Numbers(1, begin_failing, "bug"))


def begin_without_room(shared: Any, threads: int) -> Callable[[Any], Any]:
    """Begin work on a node whose disk is full."""
    run = importlib.import_module("quantkit.pipeline.ray_tasks").begin(shared, threads)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "/out/x.part")

    def failing(batch: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quantkit.pipeline.target.OpenFiles.write", fail)
            return run(batch)

    return failing


def test_a_full_node_ends_a_resumable_run(
    nodes: Any, tmp_path: Path, small_jobs: None, both_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, out = tmp_path / "whole.gguf", tmp_path / "o.gguf"
    quantize(MODEL, expected, "Q4_0")
    with monkeypatch.context() as patch:
        patch.setattr(ray_tasks, "begin", begin_without_room)
        with refuses(ClusterError, "QK-E450 /out/x.part 3"):
            quantize(MODEL, out, "Q4_0", ray="auto")
    assert out.with_name("o.gguf.journal").exists()
    quantize(MODEL, out, "Q4_0", resume=True)
    assert out.read_bytes() == expected.read_bytes()


def begin_dying(folder: Path, threads: int) -> Callable[[int], int]:
    def run(number: int) -> int:
        tries = sum(1 for _ in folder.glob(f"{number}-*"))
        (folder / f"{number}-{tries}").touch()
        if tries < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    return run


def test_work_of_killed_workers_is_repeated(nodes: Any, tmp_path: Path) -> None:
    numbers = Numbers(1, begin_dying, tmp_path)
    Cluster().run(numbers)
    assert numbers.results == {0: 0}


def test_other_sources_are_refused(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_sources", lambda: "0.0 (another)")
    with refuses(ClusterError, "QK-E450 0.0"):
        Cluster().run(Numbers(2, begin_refusing, set()))


def test_a_damaged_source_fails_like_on_threads(nodes: Any, tmp_path: Path) -> None:
    source = write_model(tmp_path / "s.gguf", llama_tensors())
    with open_model(source) as opened:
        offset = opened.tensors["blk.1.ffn_up.weight"].offset
    with source.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff\x7f")
    with refuses(FormatError, "QK-E108 blk.1.ffn_up.weight 0"):
        quantize(source, tmp_path / "o.gguf", "Q4_0", ray="auto")
    assert [p.name for p in tmp_path.iterdir()] == ["s.gguf"]


def with_gpus(begin: str, shared: Any, threads: int) -> Any:
    """Begin work on a node whose GPUs are the shim's, as many as Ray gives."""
    sys.path[:0] = [str(DATA.parent), str(DATA.parent / "lib")]
    import fake_cupy

    before = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    fake_cupy.install(pytest.MonkeyPatch(), len(before.split(",")) if before else 0).__enter__()
    module, _, name = begin.partition(":")
    return getattr(importlib.import_module(module), name)(shared, threads)


@pytest.mark.skipif(host_device.compiler() is None, reason="no C++ compiler: install g++")
def test_a_node_uses_its_assigned_gpus(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other encodes the same bytes on its CPU, and "cuda" leaves it out."""
    monkeypatch.setattr(ray_tasks, "begin", partial(with_gpus, "quantkit.pipeline.ray_tasks:begin"))
    # The driver's thread begins when the other node has a batch; if it is disabled, there is no wait.
    give, gave = ray_tasks._Jobs.batch, threading.Event()

    def batch(jobs: ray_tasks._Jobs, node: Node) -> list[jobs_module.Job] | None:
        jobs_of_batch = give(jobs, node)
        gave.set()
        return jobs_of_batch

    take = ray_tasks._Jobs._next_job
    monkeypatch.setattr(ray_tasks._Jobs, "batch", batch)
    monkeypatch.setattr(ray_tasks._Jobs, "_next_job", lambda jobs: take(jobs) if gave.wait(60) else None)
    source, expected, out = write_source(tmp_path / "s.gguf"), tmp_path / "whole.gguf", tmp_path / "o.gguf"
    options = QuantizeOptions(pure=True, allow_requantize=True)
    quantize(source, expected, "Q4_0", options)
    names = [node.name for node in sorted(Cluster().nodes().values(), key=lambda node: node.gpus)]
    for backend in ("auto", "cuda"):
        watch = Watch()
        result = quantize(source, out, "Q4_0", options, overwrite=True, observer=watch, ray="auto", backend=backend)
        assert out.read_bytes() == expected.read_bytes()
        worked = [node.name for node in result.run.nodes]
        assert names[1] in worked
        assert backend == "auto" or names[0] not in worked
        on_gpu = f"node {names[1]}: --backend {backend}: CUDA0 encodes 6 tensors"
        assert [text for text in watch.texts if names[1] in text] == [on_gpu]
        if backend == "auto":
            assert f"node {names[0]}: --backend auto: using the CPU, because Ray has no GPU on this node" in watch.texts
    with refuses(RecipeError, "QK-E201 --devices --verify"):
        quantize(source, out, "Q4_0", options, overwrite=True, ray="auto", backend="cuda", verify=3)


@pytest.mark.skipif(host_device.compiler() is None, reason="no C++ compiler: install g++")
def test_a_model_runs_on_a_nodes_assigned_gpus(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a node without one; "cuda" leaves that out. The figures equal the CPU's within rounding."""
    scoring, collect = (sys.modules[f"quantkit.{name}"] for name in ("evaluate.scoring", "imatrix.collect"))
    monkeypatch.setattr(scoring, "begin_scoring", partial(with_gpus, "quantkit.evaluate.scoring:begin_scoring"))
    monkeypatch.setattr(collect, "begin_recording", partial(with_gpus, "quantkit.imatrix.on_nodes:begin_recording"))
    model, tokens = write_zoo("qwen3moe-moe", tmp_path / "m.gguf"), np.random.default_rng(1).integers(0, 97, 16 * 5)
    options, names = ImatrixOptions(n_ctx=16, n_batch=16), [n.name for n in Cluster().nodes().values() if n.gpus]
    base = SaveLogits(tmp_path / "base")
    alone = perplexity(model, tokens=tokens, n_ctx=16, n_batch=16, save_logits=base)
    on_cpu = kld(model, tmp_path / "base", n_batch=16)
    imatrix(model, (), tmp_path / "cpu", tokens=tokens, options=options)
    sums = read_imatrix(tmp_path / "cpu").entries
    for backend in ("auto", "cuda"):
        gpu_nodes, note = Nodes(backend=backend), f"node {names[0]}: --backend {backend}: CUDA0"
        scored = perplexity(model, tokens=tokens, n_ctx=16, n_batch=16, nodes=gpu_nodes)
        assert note in scored.notes
        assert scored.log_ppl != alone.log_ppl, "the CPU's to the last bit: no card was used"
        np.testing.assert_allclose(scored.log_ppl, alone.log_ppl, rtol=1e-5)
        divergence = kld(model, tmp_path / "base", nodes=gpu_nodes, n_batch=16)
        assert note in divergence.notes
        assert divergence.sums.kld.mean.value == pytest.approx(on_cpu.sums.kld.mean.value, abs=1e-6)
        assert divergence.sums.kld != on_cpu.sums.kld
        recorded = imatrix(model, (), tmp_path / backend, tokens=tokens, options=options, nodes=gpu_nodes)
        assert note in recorded.notes
        for name, entry in read_imatrix(tmp_path / backend).entries.items():
            np.testing.assert_allclose(entry.sums, sums[name].sums, rtol=1e-3, atol=1e-6)
            assert np.array_equal(entry.counts, sums[name].counts)


def test_a_node_chooses_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_model = NodeModel.from_path(MODEL, Nodes(backend="auto"), {})
    with fake_cupy.install(monkeypatch, 1):
        assert node_model.placement_note() == "--backend auto: CUDA0"
        placement = node_model.load_options(1)["placement"]
        assert placement is not None
        assert placement.requested_devices() == {"CUDA0"}
        assert replace(node_model, nodes=Nodes(backend="cpu")).placement_note() == ""
    with fake_cupy.install(monkeypatch, 0):
        assert node_model.placement_note() == "--backend auto: the CPU (CuPy finds no CUDA device)"
        with pytest.raises(NodeRefusal, match="CUDA0"):
            replace(node_model, nodes=Nodes(backend="cuda")).load_options(1)
        plan = plan_quantize(MODEL, tmp_path / "o.gguf", "Q4_0")
        with pytest.raises(NodeRefusal, match="--backend cuda: no usable GPU: CuPy finds no CUDA device"):
            choose_gpus(plan, "cuda", 1, 1)
        assert choose_gpus(plan, "auto", 1, 1)[0] == ()
    with fake_cupy.install(monkeypatch, 2):
        for workers, names in ((1, ()), (5, ("CUDA0",)), (99, ("CUDA0", "CUDA1"))):
            assert choose_gpus(plan, "auto", 1, workers)[0] == names


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert condition()


def test_nodes_may_leave_and_join(
    nodes: Any, tmp_path: Path, small_jobs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed in the middle, another joins: the same bytes, and each is named."""
    monkeypatch.setattr(jobs_module, "JOB", 1 << 14)
    monkeypatch.setattr(cluster_module, "_LOOK_SECONDS", 0.0)
    expected, out = tmp_path / "whole.gguf", tmp_path / "o.gguf"
    quantize(MODEL, expected, "Q4_K_M", WITH_IMATRIX)
    before = set(Cluster().nodes())

    first_batch, changed = threading.Event(), threading.Event()

    def wait(nbytes: int) -> None:
        first_batch.set()
        changed.wait()

    watch, plan = Watch(wait), plan_quantize(MODEL, out, "Q4_K_M", WITH_IMATRIX)
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(run_quantize, plan, observer=watch, ray="auto")
        first_batch.wait(60)
        (second,) = nodes.worker_nodes
        nodes.remove_node(second, allow_graceful=False)
        nodes.add_node(**SMALL)
        wait_for(lambda: len(before & set(Cluster().nodes())) == len(set(Cluster().nodes()) - before) == 1)
        changed.set()
        running.result()
    assert out.read_bytes() == expected.read_bytes()
    assert any("is lost" in text for text in watch.texts), watch.texts


# ---------------------------------------------------------------- the command line


def test_without_ray_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(ResourceError, "QK-E410 gguf-quantkit[ray]"):
        quantize(MODEL, tmp_path / "o.gguf", "Q4_0", ray="auto")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--ray"], ["--ray", "auto"]])
def test_ray_needs_no_address(
    arguments: list[str], nodes: Any, tmp_path: Path, small_jobs: None, both_work: None
) -> None:
    """What follows it is an address only if it looks like one."""
    out = tmp_path / "o.gguf"
    result = CliRunner().invoke(cli, ["merge-up-gate", *arguments, str(MODEL), str(out)])
    assert result.exit_code == 0, result.output
    assert "2 nodes: " in result.output
    assert plan_merge_up_gate(MODEL, tmp_path / "other.gguf").plan.nbytes == out.stat().st_size


def test_the_commands_accept_ray(nodes: Any, tmp_path: Path) -> None:
    model = write_zoo("qwen3moe-moe", tmp_path / "m.gguf")
    ids = ["--tokens", ",".join(str(i % 90) for i in range(100)), "-c", "32"]
    covariances = ["--covariance", str(tmp_path / "c.gguf")]
    for command in (["perplexity"], ["imatrix", "-o", str(tmp_path / "i.gguf"), *covariances]):
        result = CliRunner().invoke(cli, [*command, "-m", str(model), *ids, "--ray", "--backend", "auto"])
        assert result.exit_code == 0, result.output


class Stub:
    """Ray as far as connecting goes, which takes until it ``may``."""

    __version__ = "0"

    def __init__(self) -> None:
        self.may, self.connected, self.threads = threading.Event(), False, list[str]()

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, **options: object) -> None:
        assert self.may.wait(60)
        self.connected = True
        self.threads.append(threading.current_thread().name)

    def shutdown(self) -> None:
        assert self.may.wait(60)
        self.connected = False
        self.threads.append(threading.current_thread().name)


def test_connecting_and_leaving_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run in a thread of their own; the next connection waits for it."""
    ray, results = Stub(), list[object]()
    monkeypatch.setattr(Cluster, "_connected_here", False)
    monkeypatch.setattr(cluster_module, "_ray", lambda: ray)
    monkeypatch.setattr(cluster_module, "_check_answers", lambda address: True)
    monkeypatch.setattr("atexit.register", lambda function: None)
    cluster_module.connect_async("auto", results.append)
    assert not ray.connected
    ray.may.set()
    Cluster()
    assert ray.connected
    assert len(results) == 1
    ray.may.clear()
    Cluster().leave()
    assert ray.connected
    ray.may.set()
    Cluster().leave()
    with cluster_module._TURN:
        assert ray.threads == ["connect", "disconnect", "MainThread", "disconnect"]
    cluster_module.connect_async("auto", lambda cluster: 1 / 0)
    Cluster()  # whose own errors count


def test_no_cluster_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason=NO_RAY)
    with refuses(QuantkitError, "QK-E203 --ray"):
        Cluster("ray://host:10001")


def test_a_file_mapped_before_ray_starts_may_be_truncated(tmp_path: Path) -> None:
    """Ray installs a handler of SIGBUS that ends the process: ours replaces it."""
    pytest.importorskip("ray", reason=NO_RAY)
    program = """if True:
        import os, sys
        from quantkit.cluster import Cluster
        from quantkit.mapping import map_descriptor
        with open(sys.argv[1], "rb") as file:
            mapping = map_descriptor(file.fileno(), 1 << 20)
        cluster = Cluster("local")
        os.truncate(sys.argv[1], 4096)
        print(bytes(mapping).count(b"x"))
    """
    path = tmp_path / "x"
    path.write_bytes(b"x" * (1 << 20))
    run = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "4096\n"), run.stderr
