"""Models larger than --max-ram: resident and streamed weights, resident memory, and equal results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from quantkit.formats.gguf import open_gguf, write_gguf
from quantkit.kernels import quantize
from quantkit.model.backends import Limits
from quantkit.model.backends.cpu.backend import CPUBackend
from quantkit.model.backends.cpu.streaming import mark_streamed, stages
from quantkit.model.batch import Batch
from quantkit.model.engine import load
from quantkit.model.ops import Embed, Matrix, MulMat, Norm, Observe, Value
from quantkit.types import type_by_name

N, WIDE, LAYERS = 512, 4096, 8
MIB = 1 << 20
#: Bytes of a layer: up and down, Q8_0.
LAYER = 2 * N * WIDE // 32 * 34


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rng = np.random.default_rng(9)
    q8_0, f32 = type_by_name("Q8_0"), type_by_name("F32")
    tensors = [("embd", (N, 40), f32, rng.normal(0, 1, (40, N)).astype(np.float32).tobytes())]
    for i in range(LAYERS):
        for name, n_in, n_out in ((f"up{i}", N, WIDE), (f"down{i}", WIDE, N)):
            weights = rng.normal(0, n_in**-0.5, (n_out, n_in)).astype(np.float32)
            tensors.append((name, (n_in, n_out), q8_0, quantize(weights, q8_0, None).tobytes()))
    path = tmp_path_factory.mktemp("streaming") / "layers.gguf"
    write_gguf(path, [], tensors)
    with open_gguf(path) as opened:
        yield opened


def graph(source):
    x = Value("x", N)
    ops = [Embed(out=x, weight=Matrix(source.tensors["embd"]))]
    for i in range(LAYERS):
        wide, y, normed = Value(f"wide{i}", WIDE), Value(f"y{i}", N), Value(f"normed{i}", N)
        ops += [
            MulMat(layer=i, out=wide, x=x, weight=Matrix(source.tensors[f"up{i}"])),
            Observe(layer=i, x=wide, label=f"up{i}"),
            MulMat(layer=i, out=y, x=wide, weight=Matrix(source.tensors[f"down{i}"])),
            Observe(layer=i, x=y, label=f"down{i}"),
            Norm(layer=i, out=normed, x=y, weight=None, eps=1e-5, group=N),
        ]
        x = normed
    return ops, x


def forget_all(source):
    for name in source.tensors:
        source.forget(name)


def resident_file_pages():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssFile:\s+(\d+) kB", status)[1])


def run(source, max_ram):
    """Return the result of two runs and the most file pages that were resident, less those of before."""
    ops, last = graph(source)
    most = []
    backend = CPUBackend(source, 2, max_ram=max_ram, observer=lambda *_: most.append(resident_file_pages()))
    program = backend.compile(ops, Limits(16, 1, 16), [last])
    forget_all(source)
    before = resident_file_pages()
    ids = np.arange(16, dtype=np.int32)
    results = []
    for _ in range(2):
        program.run(Batch(ids, ids, 0 * ids, ids))
        results.append(program.read(last).copy())
    np.testing.assert_array_equal(results[0], results[1])
    return results[0], max(most) - before, max_ram is not None and any(mark_streamed(stages(ops, max_ram), max_ram))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident pages are read from Linux's /proc")
def test_streaming_stays_within_the_budget_with_equal_results(source):
    expected, all_of_it, streams = run(source, None)
    assert not streams
    assert all_of_it > 0.9 * LAYERS * LAYER
    for budget in (1.2 * LAYER, 3.5 * LAYER):  # operations by themselves; layers, some of which stay
        result, resident, streams = run(source, int(budget))
        assert streams
        assert resident < budget + MIB
        np.testing.assert_array_equal(result, expected)
    assert run(source, 2 * LAYERS * LAYER)[2] is False
    assert os.path.getsize(source.paths[0]) > LAYERS * LAYER


def test_stages_are_layers_or_operations(source):
    ops, _ = graph(source)
    plan = stages(ops, 2 * LAYER)
    assert [stage.nbytes for stage in plan] == [0] + [LAYER] * LAYERS
    assert [stage.end for stage in plan[:-1]] == [stage.first for stage in plan[1:]]
    assert plan[-1].end == len(ops)
    plan = stages(ops, LAYER)
    assert [stage.nbytes for stage in plan] == [0] + [LAYER // 2] * 2 * LAYERS
    assert [stage.end for stage in plan[:-1]] == [stage.first for stage in plan[1:]]


def test_the_first_stages_are_resident_within_the_budget(source):
    ops, _ = graph(source)
    for budget in (2 * LAYER, 3 * LAYER, 5.5 * LAYER, LAYERS * LAYER):
        plan = stages(ops, int(budget))
        goes = mark_streamed(plan, int(budget))
        stay = sum(stage.nbytes for stage, is_dropped in zip(plan, goes, strict=True) if not is_dropped)
        assert goes == sorted(goes)
        if budget < LAYERS * LAYER:
            most = max(stage.nbytes for stage in plan)
            assert stay + most <= budget
            assert stay + most + LAYER > budget
        else:
            assert not any(goes)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A mixture of experts of 8 layers, 10 MB each."""
    path = tmp_path_factory.mktemp("streaming") / "moe.gguf"
    shape = {"layers": 8, "experts": 16, "used": 4, "embd": 512, "ff": 192, "heads": 8, "kv": 2, "head-dim": 64}
    options = [word for name, n in shape.items() for word in (f"--{name}", str(n))]
    script = Path(__file__).parents[2] / "scripts" / "make_moe.py"
    root = {**os.environ, "PYTHONPATH": str(script.parent.parent)}
    subprocess.run([sys.executable, script, path, *options, "--vocab", "300"], check=True, env=root)
    return path


def decode(path, max_ram):
    """Return logits of a prompt and of a few tokens one by one, and the most file pages above those of the start."""
    most, finish = [0], threading.Event()

    def watch():
        while not finish.wait(0.0005):
            most[0] = max(most[0], resident_file_pages())

    with load(path, threads=2, max_ram=max_ram) as model:
        session = model.session(64)
        session.decode([1])  # loads kernels
        session.clear()
        forget_all(model.source)
        before = resident_file_pages()
        watcher = threading.Thread(target=watch)
        watcher.start()
        logits = [session.decode(part) for part in (np.arange(40), [7], [8])]
        finish.set()
        watcher.join()
        return np.concatenate(logits), most[0] - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident pages are read from Linux's /proc")
def test_a_moe_larger_than_the_budget_has_the_same_logits(moe):
    expected, all_of_it = decode(moe, None)
    assert all_of_it > 0.9 * moe.stat().st_size
    for budget in (12 * MIB, 40 * MIB):
        logits, resident = decode(moe, budget)
        np.testing.assert_array_equal(logits, expected)
        assert resident < budget + 2 * MIB
