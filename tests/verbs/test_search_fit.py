"""``search --fit``: nothing beyond the memory of a device, nothing better within it, and ``fit`` agrees on the file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from refusals import refuses
from scaled_zoo import write_scaled_zoo
from test_search import random_costs

import quantkit
from quantkit.cli import cli
from quantkit.errors import RecipeError
from quantkit.fit import FitOptions
from quantkit.fit.estimate import estimator_of
from quantkit.fit.layout import Layout
from quantkit.formats.gguf import open_model
from quantkit.quantize import QuantizeOptions
from quantkit.search import SearchOptions, search
from quantkit.search.placement import Placement, Rates, TensorTable, model_weights
from quantkit.search.space import Space
from quantkit.sensitivity.file import Sensitivity
from zoo import write_hollow_zoo

TYPES = ("Q2_K", "Q4_K", "Q8_0")
CTX = 512
OPTIONS: dict[str, Any] = {"ctx": CTX, "margin": 0, "bandwidth": (900, 50)}


@dataclass(frozen=True)
class Row:
    """An allocation in a layout: bytes of the host and of the GPU, seconds per token."""

    picks: tuple[int, ...]
    layout: Layout
    nbytes: tuple[int, ...]
    seconds: float


class Small:
    """Four groups of a model, and all allocations of them in all layouts; no dataclass, which hypothesis prints."""

    def __init__(self, costs: Sensitivity, rows: list[Row]) -> None:
        self.costs, self.rows = costs, rows

    def kld(self, picks: Sequence[int], klds: Sequence[Sequence[float]]) -> float:
        return sum(row[pick] for row, pick in zip(klds, picks, strict=True))


@pytest.fixture(scope="module", params=["qwen3moe-moe", "llama-dense"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    path = write_hollow_zoo(request.param, tmp_path_factory.mktemp("small") / "model.gguf")
    experts = "_exps" if "moe" in request.param else ""
    names = [f"blk.0.ffn_up{experts}", f"blk.1.ffn_down{experts}", "blk.0.attn_q", "output"]
    costs = random_costs(path, TYPES)
    groups = tuple(group for group in costs.groups if group.name in names)
    assert len(groups) == 4
    costs = replace(costs, groups=groups, costs=tuple(cost for cost in costs.costs if cost.group in names))
    with open_model(path) as source:
        return Small(costs, list(all_rows(Space(costs, source, SearchOptions(fit=(1, 1), **OPTIONS)))))


def all_rows(space: Space) -> Iterator[Row]:
    options = FitOptions(ctx=CTX, vram=(1,), ram=1, margin=0)
    model, context = estimator_of(space.source, options), options.context(CTX)
    n, has_experts = model.weights.n_layer, model.weights.has_experts
    layouts = [Layout(n, (n + 1,), k) for k in range(n + 1 if has_experts else 1)]
    layouts += [Layout(n, (k,), n if has_experts else 0) for k in range(n + 1)]
    table = TensorTable(space)
    placements = [Placement(table, layout, Rates(space.options)) for layout in layouts]
    for picks in itertools.product(range(len(TYPES)), repeat=len(space.choice_groups)):
        allocation = model.with_weights(model_weights(space, picks, n))
        for placement in placements:
            devices = allocation.devices(placement.layout, context)
            yield Row(picks, placement.layout, tuple(d.nbytes for d in devices), placement.total_seconds(picks))


@given(
    klds=st.lists(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), min_size=4, max_size=4),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    aim=st.sampled_from(("quality", "speed")),
)
@settings(max_examples=6, phases=(Phase.generate,))
def test_optima_within_two_budgets_equal_exhaustive_search(
    small: Small, klds: list[list[float]], shares: tuple[float, float], aim: str
) -> None:
    """Least divergence; most tokens per second within a divergence; and an error only if nothing fits."""
    klds = [sorted(row, reverse=True) for row in klds]
    # In the order of groups, then of types.
    costs = [replace(cost, kld=klds[i // 3][i % 3]) for i, cost in enumerate(small.costs.costs)]
    budgets = tuple(
        1 + min(sizes) + round(share * (max(sizes) - min(sizes)))
        for share, sizes in zip(shares, zip(*(r.nbytes for r in small.rows), strict=True), strict=True)
    )
    options = SearchOptions(fit=budgets[::-1], aim=aim, **OPTIONS)
    fitting = [r for r in small.rows if all(n <= most for n, most in zip(r.nbytes, budgets, strict=True))]
    n_layer = fitting[0].layout.n_layer if fitting else 0
    if any(r.layout == Layout(n_layer, (n_layer + 1,), n_layer) and r.nbytes[1] <= budgets[1] for r in small.rows):
        # Layers stay on the GPU if they fit there without experts, as in fit.
        fitting = [r for r in fitting if r.layout.gpu_layers > n_layer]
    sensitivity = replace(small.costs, costs=tuple(costs))
    if not fitting:
        with refuses(RecipeError, "QK-E213", str(CTX)):
            search(sensitivity, options=options)
        return
    best = search(sensitivity, options=options).best
    assert best.fit is not None
    assert all(d.nbytes <= most for d, most in zip(best.fit.devices, budgets, strict=True))
    least = min(small.kld(r.picks, klds) for r in fitting)
    if aim == "quality":
        assert best.kld == pytest.approx(least, rel=1e-6)
    else:
        assert best.kld <= 1.5 * least * (1 + 1e-6)
        fastest = min(r.seconds for r in fitting if small.kld(r.picks, klds) <= 1.5 * least * (1 + 1e-9))
        assert best.fit.seconds == pytest.approx(fastest, rel=1e-6)


def test_the_file_fits_by_the_same_line(tiny_moe: Path, tmp_path: Path) -> None:
    """The recipe's file takes the predicted bytes on each device, and fit types the same options."""
    (tmp_path / "S.json").write_text(random_costs(tiny_moe, TYPES).to_json())
    recipe, out = tmp_path / "fit.recipe", tmp_path / "OUT.gguf"
    devices = ["--margin", "0", "-c", "2k", "-ctk", "q8_0", "-ctv", "q8_0"]
    line = ["search", "-s", str(tmp_path / "S.json"), "--fit", "14M,7600K", "--bandwidth", "900G,50G", *devices]
    run = CliRunner().invoke(cli, [*line, "-o", str(recipe), "--json", "-"])
    assert run.exit_code == 0, run.output
    (allocation,) = json.loads(run.stdout)["allocations"]
    prediction = allocation["fit"]
    assert prediction["cpu_moe"] > 0
    assert all(device["fits"] for device in prediction["devices"])
    assert prediction["command"] in recipe.read_text()
    quantkit.quantize(tiny_moe, out, allocation["type"], QuantizeOptions(recipe=(recipe,)))
    run = CliRunner().invoke(cli, ["fit", str(out), "--vram", "14M", "--ram", "7600K", *devices, "--json"])
    result = json.loads(run.stdout)
    assert result["fits"]
    assert result["devices"] == prediction["devices"]
    assert result["command"].replace(str(out), "OUT.gguf") == prediction["command"]


def test_two_gpus_and_the_aims(tmp_path: Path) -> None:
    """Layers are divided between GPUs; from quality to speed divergence and speed rise."""
    costs = random_costs(write_scaled_zoo("qwen3moe-moe", tmp_path / "model.gguf"), TYPES)
    sizes = (300_000_000, 360_000_000, 400_000_000)
    options: dict[str, Any] = {"fit": sizes, "ctx": CTX, "margin": 0, "bandwidth": (10**12, 10**12, 10**10)}
    aims = [search(costs, options=SearchOptions(aim=aim, **options)).best for aim in ("quality", "balance", "speed")]
    for allocation in aims:
        assert allocation.fit is not None
        assert len(allocation.fit.devices) == 3
        assert all(d.nbytes <= most for d, most in zip(allocation.fit.devices, (sizes[2], *sizes[:2]), strict=True))
        assert sum(allocation.fit.tensor_split) == allocation.fit.gpu_layers
    assert aims[0].kld <= aims[1].kld <= aims[2].kld <= 1.5 * aims[0].kld * (1 + 1e-6)
    speeds = [allocation.fit.tokens_per_second or 0.0 for allocation in aims if allocation.fit is not None]
    assert 0 < speeds[0] <= speeds[1] <= speeds[2]


def test_refusals(small: Small) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"aim": "speed"}, "QK-E202"),
        ({"bandwidth": (1, 1, 1, 1)}, "QK-E203"),
        ({"min_speed": 1.0, "speeds": {"Q4_K": 1.0}}, "QK-E201"),
        ({"target_bpw": 4.0}, "QK-E201"),
        ({"bandwidth": (900, 50), "aim": "speed", "max_kld": 1e-12}, "QK-E213"),
        ({"parallel": 0}, "QK-E203"),
    ]
    for options, code in cases:
        with refuses(RecipeError, code):
            search(small.costs, options=SearchOptions(fit=(10**9, 10**9), ctx=CTX, **options))
