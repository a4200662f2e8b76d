"""Factors that go from matrices to what makes their inputs: the model stays the same, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.formats.gguf import open_model
from quantkit.model.engine import load
from quantkit.model.observers import every_token
from quantkit.model.ops import Graph
from quantkit.model.scale_sites import ScaleSite, find_scale_sites
from quantkit.quantize import QuantizeOptions, plan_from, run_quantize
from quantkit.sequential.balance import BalancedSource, Factors, balance_factors, factors_of

F32 = npt.NDArray[np.float32]
MODEL = Path(__file__).parents[1] / "data" / "tiny-moe-bf16.gguf"

#: Norms behind and beside products, latent attention, experts of several kinds, recurrent layers, further tokens.
ZOO_NAMES = (
    "cohere2-dense",
    "deepseek2-moe",
    "gemma2-dense",
    "glm4moe-moe",
    "gpt-oss-moe",
    "llama4-moe",
    "qwen3next-moe",
)


def find_sites(path: Path) -> list[ScaleSite]:
    sites: list[ScaleSite] = []
    with open_model(path) as file:
        names = set(file.tensors)

    def look(graph: Graph) -> Graph:
        graph = every_token(graph)
        sites[:] = find_scale_sites(graph, names)
        return graph

    with load(path, threads=1, n_ctx=8, rewrite=look):
        return sites


def draw_factors(path: Path, sites: list[ScaleSite]) -> list[Factors]:
    """Return random powers of two for all places."""
    rng = np.random.default_rng(3)
    with open_model(path) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    items = []
    for site in sites:
        values = np.exp2(rng.integers(-3, 4, (site.n_mat, shapes[site.consumers[0]][0]))).astype(np.float32)
        items.append(Factors(site.producer, site.consumers, values, len(shapes[site.producer]) > 1))
    return items


def logits(path: Path) -> F32:
    with load(path, threads=1) as model:
        return model.forward(np.arange(3, 15, dtype=np.int32) * 7 % model.n_vocab)


def both_logits(path: Path, factors: list[Factors], out: Path) -> tuple[F32, F32]:
    with open_model(path) as file:
        run_quantize(plan_from(BalancedSource(file, factors), out, "COPY", QuantizeOptions()), threads=1)
    with open_model(path) as file, open_model(out) as balanced_file:
        changed = {name for name in file.tensors if not np.array_equal(file.data(name), balanced_file.data(name))}
    assert changed == {name for site in factors for name in (site.takes, *site.gives)}
    return logits(path), logits(out)


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_logits_are_the_same(zoo: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    path = zoo(name)
    sites = find_sites(path)
    assert sites
    before, after = both_logits(path, draw_factors(path, sites), tmp_path / "balanced.gguf")
    assert (before == after).all()


def test_balanced_tensors() -> None:
    """Norms before products and up projections of the experts; not the norms of heads, whose results are turned."""
    sites = {site.producer: site for site in find_sites(MODEL)}
    assert len(sites) == 4 * 3 + 1
    assert sites["blk.1.attn_norm.weight"].consumers == tuple(f"blk.1.attn_{c}.weight" for c in "qkv")
    assert set(sites["blk.1.ffn_norm.weight"].consumers) == {
        f"blk.1.ffn_{c}.weight" for c in ("gate_inp", "gate_exps", "up_exps")
    }
    up = sites["blk.3.ffn_up_exps.weight"]
    assert (up.consumers, up.n_mat, up.ids is None) == (("blk.3.ffn_down_exps.weight",), 8, False)
    assert sites["output_norm.weight"].consumers == ("output.weight",)


def test_column_magnitudes_become_more_similar(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """A quarter of the differences goes; a column never used keeps its size. The file becomes F32 where it must."""
    assert (factors_of(np.array([1, 1, 1, 0.0])) == 1).all()
    sizes = np.array([0.25, 1, 4, 16, 1e-3])
    balanced = factors_of(np.append(sizes**2, [0]))
    assert np.allclose(np.ptp(np.log(balanced[:5] * sizes)), 0.75 * np.ptp(np.log(sizes)))
    assert balanced[5] == 1
    text = MODEL.with_name("tiny-moe-evaluation.txt").read_bytes()
    with load(MODEL, threads=1) as model:
        tokens = np.asarray(model.tokenizer.encode(text), np.int32)[:512].reshape(4, 128)
    factors = balance_factors(MODEL, tokens, 2)
    assert len(factors) == 13
    with open_model(MODEL) as file:
        source = BalancedSource(file, factors)
        tensor = source.tensors["blk.2.ffn_up_exps.weight"]
        assert tensor.type.name == "F32"
        buffer = np.empty(4 * 700, np.uint8)
        source.read(tensor, buffer, 4 * (256 * 256 * 3 + 1000))
        bits = file.data(tensor.name).view(np.uint16).reshape(-1)[256 * 256 * 3 + 1000 :][:700]
    row, column = (np.arange(1000, 1700) // 256, np.arange(1000, 1700) % 256)
    factors_by_norm = {site.takes: site.values for site in factors}
    by_row, by_column = (
        factors_by_norm["blk.2.ffn_up_exps.weight"][3, row],
        factors_by_norm["blk.2.ffn_norm.weight"][0, column],
    )
    assert np.allclose(buffer.view(np.float32), (bits.astype(np.uint32) << 16).view(np.float32) * by_row / by_column)
    path = zoo("qwen3moe-moe")
    before, after = both_logits(path, balance_factors(path, tokens % 128, 2), tmp_path / "balanced.gguf")
    assert np.square(before - after).mean() < 1e-8 * np.square(before).mean()
