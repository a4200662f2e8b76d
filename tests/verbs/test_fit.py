"""Memory of models: weights, caches and buffers beside llama.cpp's own figures, layouts, and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import refuses
from scaled_zoo import write_scaled_zoo

from checkpoints import write_checkpoint
from quantkit.cli import cli
from quantkit.errors import RecipeError
from quantkit.fit import Fit, FitOptions, fit
from quantkit.fit.ik_nodes import expanded_tensors
from quantkit.formats.gguf import open_gguf
from runtime_memory import runtime_memory

MIB = 1 << 20
Memory = Callable[[Fit, FitOptions], dict[str, list[float]]]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("scaled")

    def make(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_scaled_zoo(name, path)

    return make


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes models of half the width, of which logits are a smaller part of the buffer."""
    folder = tmp_path_factory.mktemp("half")

    def make(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_scaled_zoo(name, path, factor=4, n_vocab=16384)

    return make


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Memory:
    """Return a function that returns MiB as the runtime allocates them; a peer that is not needed may be missing."""

    def of_runtime(result: Fit, options: FitOptions) -> dict[str, list[float]]:
        folder = request.getfixturevalue("ik_lib" if options.runtime == "ik" else "llama_bin")
        return runtime_memory(result, options, folder)

    return of_runtime


@pytest.mark.peer
@pytest.mark.parametrize("runtime", ["llama.cpp", "ik"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-dense", {"ctx": 32768}),
        ("qwen2-dense", {"ctx": 8192}),
        ("qwen3-dense", {"ctx": 32768, "ctk": "q8_0", "ctv": "q8_0"}),
        ("qwen3moe-moe", {"ctx": 8192, "flash_attn": False}),
        ("gpt-oss-moe", {"ctx": 16384}),
        ("deepseek2-moe", {"ctx": 16384}),
        ("deepseek2-moe", {"ctx": 8192, "ubatch": 64}),
        ("deepseek2-moe", {"ctx": 4096, "flash_attn": False}),
        ("ernie4_5-moe-moe", {"ctx": 8192, "ubatch": 256}),
        *((name, {"ctx": 16384}) for name in ("mistral3-dense", "minimax-m2-moe", "smollm3-dense")),
    ],
)
def test_scaled_models_take_what_runtimes_allocate(
    name: str, options: dict[str, Any], runtime: str, half: Callable[[str], Path], memory: Memory
) -> None:
    """Weights, caches and states to the last digit of the log; compute buffers within 3 %."""
    check_memory(half(name), FitOptions(types=(), runtime=runtime, **options), memory, compute=0.03)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3next-moe", {"ctx": 32768}),
        ("lfm2-dense", {"ctx": 8192, "ubatch": 256}),
        ("gemma3-dense", {"ctx": 32768, "parallel": 4, "ctk": "q8_0", "ctv": "q8_0"}),
        *((name, {"ctx": 16384}) for name in ("llama4-moe", "glm4-dense", "hunyuan-moe-moe")),
        *((name, {"ctx": 16384}) for name in ("phi3-dense", "granitemoe-moe", "gemma2-dense", "exaone4-dense")),
    ],
)
def test_scaled_models_take_what_llama_cpp_allocates(
    name: str, options: dict[str, Any], half: Callable[[str], Path], memory: Memory
) -> None:
    """Architectures that ik_llama.cpp does not load, or not with the zoo's layers."""
    check_memory(half(name), FitOptions(types=(), **options), memory, compute=0.03)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("name", "compute"),
    [
        *((name, 0.001) for name in ("qwen3next-moe", "llada-dense", "dream-dense", "gemma3n-dense", "gemma4-dense")),
        *((name, 0.001) for name in ("minimax-m3-moe", "qwen3vl-dense", "llada-moe-moe", "jamba-moe")),
        *((name, 0.01) for name in ("mamba2-dense", "hy_v4-moe", "dots3note-moe")),
        ("deepseek2-moe", 0.03),
        ("kimi-k3-moe", 0.1),
        ("openelm-dense", 0.12),
    ],
)
def test_other_memory_takes_what_llama_cpp_allocates(
    name: str, compute: float, zoo: Callable[[str], Path], memory: Memory
) -> None:
    """Latent keys, states of recurrent layers, and indexers; ``compute``: the difference that the note admits."""
    check_memory(zoo(name), FitOptions(ctx=8192, types=()), memory, compute)


@pytest.mark.peer
@pytest.mark.parametrize("runtime", ["llama.cpp", "ik"])
@pytest.mark.parametrize(("name", "ctx"), [("tiny_moe", 4096), ("smollm2", 8192), ("gemma3", 32768)])
def test_real_models_take_what_runtimes_allocate(
    name: str, ctx: int, runtime: str, request: pytest.FixtureRequest, memory: Memory
) -> None:
    check_memory(request.getfixturevalue(name), FitOptions(ctx=ctx, types=(), runtime=runtime), memory, 0.01)


def check_memory(path: Path, options: FitOptions, memory: Memory, compute: float) -> None:
    """Compare a result without GPUs with the runtime's log, whose figures have two digits each."""
    result = fit(path, options)
    reference = memory(result, options)
    kinds = {"cache": 0.0, "state": 0.0}
    for cache in result.caches:
        kinds["state" if cache.kind == "state" else "cache"] += cache.nbytes / MIB
    for kind, total in kinds.items():
        figures = reference.get(kind, [])
        assert total == pytest.approx(sum(figures), abs=0.0051 * max(1, len(figures)))
    assert result.devices[0].compute / MIB == pytest.approx(reference["compute"][0], rel=compute, abs=0.006)
    if "weights" in reference:
        with open_gguf(path, header_only=True) as file:
            products = sum(expanded_tensors(file.tensors).values())
        loaded = result.devices[0].weights - products
        assert loaded / MIB == pytest.approx(reference["weights"][0], abs=0.0051)


def test_gpus_are_filled_before_memory(scaled: Callable[[str], Path]) -> None:
    """The less memory, the fewer parts on the GPU: everything, then without experts, then without layers."""
    model = scaled("qwen3moe-moe")

    def layout(vram: str) -> tuple[bool, int, int]:
        result = fit(model, FitOptions(ctx=8192, vram=(vram,), margin=0, types=()))
        assert all(device.fits for device in result.devices[1:])
        return result.gpu_layers == 3, result.cpu_moe, result.gpu_layers

    assert layout("4GiB") == (True, 0, 3)
    assert layout("2200M") == (True, 1, 3)
    assert layout("1400M") == (True, 2, 3)
    assert layout("100M") == (False, 0, 0)


def test_layers_are_split_between_gpus(scaled: Callable[[str], Path]) -> None:
    options = FitOptions(ctx=8192, vram=("460M", "1G"), margin=0, types=("Q4_K_M",))
    result = fit(scaled("llama-dense"), options)
    assert sum(result.tensor_split) == result.gpu_layers == 3
    assert all(device.weights for device in result.devices)
    assert f"-ts {','.join(map(str, result.tensor_split))}" in result.command
    (size,) = result.sizes
    assert (size.type, size.all_on_gpus) == ("Q4_K_M", True)
    assert size.weights < result.nbytes / 4


def test_the_longest_context_fits_and_the_next_does_not(scaled: Callable[[str], Path]) -> None:
    options = FitOptions(vram=("1500M",), margin=0, types=())
    result = fit(scaled("llama-dense"), options)
    assert result.ctx == result.longest < result.ctx_train
    longer = fit(result.path, FitOptions(ctx=result.longest + 256, vram=("1500M",), margin=0, types=()))
    assert result.gpu_layers > longer.gpu_layers


def test_server_parallel_and_windows_change_memory(scaled: Callable[[str], Path]) -> None:
    model = scaled("gemma3-dense")
    alone, server, four, ik = (
        fit(model, FitOptions(ctx=8192, types=(), **extra))
        for extra in ({}, {"server": True}, {"parallel": 4}, {"runtime": "ik"})
    )
    # Logits of 512 tokens are 128 MiB; without them the buffer is smaller.
    assert server.devices[0].compute < alone.devices[0].compute - 64 * MIB
    assert [c.cells for c in alone.caches] == [768, 8192]
    assert [c.cells for c in four.caches] == [4 * 768, 8192]
    assert [c.cells for c in ik.caches] == [8192]


def test_a_checkpoint_and_a_recipe(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3-moe", tmp_path)
    (rules := tmp_path / "rules.recipe").write_text("ffn_.*_exps=Q2_K\n")
    plain = fit(folder, FitOptions(ctx=2048, types=("Q8_0",)))
    by_recipe = fit(folder, FitOptions(ctx=2048, types=("Q8_0",), recipe=rules))
    (size,) = plain.sizes
    assert by_recipe.devices[0].weights < size.weights < plain.devices[0].weights
    assert not by_recipe.sizes


def test_refusals(tiny_moe: Path) -> None:
    with refuses(RecipeError, "QK-E202", "q8_0"):
        fit(tiny_moe, FitOptions(ctv="q8_0", flash_attn=False))
    with refuses(RecipeError, "QK-E203", "-1"):
        fit(tiny_moe, FitOptions(ubatch=-1))
    with refuses(RecipeError, "QK-E203", "24X"):
        fit(tiny_moe, FitOptions(vram=("24X",)))


def test_command_line(tiny_moe: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(cli, ["fit", str(tiny_moe), "-c", "4k", "--vram", "2G,2G", "--runtime", "ik", "--json"])
    result = json.loads(run.stdout)
    assert run.exit_code == 0
    assert (result["ctx"], result["fits"], len(result["devices"])) == (4096, True, 3)
    assert result["estimated"] == ["compute"]
    assert {size["type"] for size in result["types"]} >= {"Q2_K", "Q4_K_M", "Q8_0"}
    run = CliRunner().invoke(cli, ["fit", str(tiny_moe), "-c", "many"])
    assert run.exit_code == 2
