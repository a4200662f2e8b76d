"""Search: optima equal exhaustive search for every kind of constraint, and a recipe gives exactly what it promises."""

from __future__ import annotations

import csv
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from test_feedback_files import write_covariances

import quantkit
from quantkit.cli import cli
from quantkit.errors import QuantkitError, RecipeError, ResourceError, TypeNotSupported
from quantkit.evaluate import SaveLogits
from quantkit.formats.gguf import open_model
from quantkit.model.cost import token_cost
from quantkit.model.graph import build_graph
from quantkit.names import tensor_class
from quantkit.pipeline.facts import layer_of
from quantkit.pipeline.recipe import parse_recipe
from quantkit.progress import Progress
from quantkit.quantize import QuantizeOptions, plan_quantize
from quantkit.search import Check, SearchOptions, search
from quantkit.search.combine import Combination, MeasuredAllocation, fit_combination
from quantkit.search.finder import Finder
from quantkit.search.predict import Predictor
from quantkit.search.solve import Exclusion, Limit, solve
from quantkit.search.space import Space
from quantkit.search.speeds import measure_speeds, read_speeds
from quantkit.search.sweep import predict_plan
from quantkit.sensitivity.file import Cost, Group, Sensitivity
from quantkit.types import BY_NAME
from small_models import llama_fields, llama_tensors, write_model
from zoo import write_hollow_zoo

TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q6_K")


def groups_of(path: Path, limit: int | None = None) -> tuple[Group, ...]:
    """Return a group for every matrix of a model, or for the first few."""
    with open_model(path) as file:
        tensors = [t for t in file.tensors.values() if len(t.shape) > 1 and "gate_inp" not in t.name]
    return tuple(
        Group(t.name.removesuffix(".weight"), tensor_class(t.name), max(layer_of(t.name), 0), {t.name: tuple(t.shape)})
        for t in tensors[:limit]
    )


def random_costs(
    path: Path, types: Sequence[str] = TYPES, limit: int | None = None, seed: int = 1, **options: Any
) -> Sensitivity:
    """Return costs drawn from a seed: a sensitivity of the group, times the square of the step of the type."""
    groups, rng = groups_of(path, limit), np.random.default_rng(seed)
    costs = []
    for group in groups:
        scale = math.exp(rng.normal(-4, 1.5))
        for name in types:
            kld = scale * 4.0 ** -BY_NAME[name].bpw * math.exp(rng.normal(0, 0.5))
            costs.append(Cost(group.name, BY_NAME[name], kld, 0.0, None, None))
    return Sensitivity({"path": str(path), "name": path.name}, {}, options, groups, tuple(costs))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers."""
    return write_model(tmp_path_factory.mktemp("dense") / "dense.gguf", llama_tensors())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, of holes."""
    return write_hollow_zoo("qwen3moe-moe", tmp_path_factory.mktemp("moe") / "moe.gguf")


# --- the solver ---


@dataclass(frozen=True)
class Instance:
    costs: list[np.ndarray[Any, Any]]
    limits: list[Limit]

    @property
    def choices(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(len(row)) for row in self.costs))

    def cost(self, picks: Sequence[int]) -> float:
        return math.fsum(row[i] for row, i in zip(self.costs, picks, strict=True))


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    scale = 10.0 ** draw(st.integers(-9, 3))
    digits = draw(st.integers(0, 13))  # bytes of a small model, and of a very large one

    def rows(value: st.SearchStrategy[Any], kind: Any) -> list[np.ndarray[Any, Any]]:
        return [np.array(draw(st.lists(value, min_size=n, max_size=n)), kind) for n in counts]

    costs = [row * scale for row in rows(st.floats(0, 1), np.float64)]
    limits = []
    for _ in range(draw(st.integers(0, 2))):
        weights = rows(st.integers(0, 10**digits), np.int64)
        least, most = (sum(int(f(row)) for row in weights) for f in (np.min, np.max))
        limits.append(Limit(weights, draw(st.integers(least - 1, most + 1))))
    return Instance(costs, limits)


@given(instances(), st.integers(1, 3))
@settings(max_examples=60)
def test_solutions_equal_exhaustive_search(instance: Instance, least: int) -> None:
    """The best answers, one after the other, none beyond a limit, none too near to one before it."""
    exclusions: list[Exclusion] = []
    for _ in range(3):
        allowed = [
            instance.cost(picks)
            for picks in instance.choices
            if all(limit.total(picks) <= limit.most for limit in instance.limits)
            and all(a.allows(picks) for a in exclusions)
        ]
        solution = solve(instance.costs, instance.limits, exclusions=exclusions)
        assert (solution is None) == (not allowed)
        if solution is None:
            return
        assert all(limit.total(solution.picks) <= limit.most for limit in instance.limits)
        assert all(a.allows(solution.picks) for a in exclusions)
        assert solution.cost == pytest.approx(
            min(allowed), rel=1e-9, abs=1e-12 * max(row.max() for row in instance.costs)
        )
        assert solution.gap == 0
        exclusions.append(Exclusion(solution.picks, least))


def test_a_large_instance_is_solved(capfd: pytest.CaptureFixture[str]) -> None:
    """As many groups and types as a large model has; the bound of the relaxation is near. HiGHS prints nothing."""
    rng = np.random.default_rng(1)
    bits, values = np.sort(rng.uniform(1.6, 8.5, 12)), rng.choice([5e6, 2e7, 1e9], 300)
    weights = [np.array([round(n * b / 8 / 32) * 32 for b in bits]) for n in values]
    costs = [np.exp(rng.normal(0, 1)) * np.exp(-1.2 * bits) * np.exp(rng.normal(0, 0.2, 12)) for _ in values]
    least, most = (sum(int(f(row)) for row in weights) for f in (np.min, np.max))
    limit = Limit(weights, least + (most - least) * 2 // 5)
    solution = solve(costs, [limit])
    assert solution is not None
    assert 0 <= limit.most - limit.total(solution.picks) < 1e-5 * limit.most
    assert capfd.readouterr().out == ""


def test_the_best_solution_is_returned_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.optimize

    class Nothing:
        x, status, message = None, 1, "time"

    rng = np.random.default_rng(3)
    costs, weights = [rng.exponential(1, 4) for _ in range(6)], [rng.integers(1, 99, 4) for _ in range(6)]
    limits = [Limit(weights, 200)]
    optimum = solve(costs, limits)
    monkeypatch.setattr(scipy.optimize, "milp", lambda *args, **kwargs: Nothing)
    solution = solve(costs, limits)
    assert optimum is not None
    assert solution is not None
    assert solution.gap > 0
    assert solution.cost - solution.gap <= optimum.cost <= solution.cost


def test_without_scipy_the_error_names_the_extra(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with refuses(ResourceError, "QK-E410 gguf-quantkit[search]"):
        search(random_costs(dense), options=SearchOptions(target_bpw=4))


# --- allocations ---

#: Six groups: q, k, v of the first layer, up and gate, and down.
SIX = (3, 4, 5, 7, 8, 9)


def six(dense: Path) -> Sensitivity:
    all_costs = random_costs(dense)
    groups = tuple(g for g in all_costs.groups if g.layer == 0 and g.kind.startswith(("attn_", "ffn_")))
    groups = tuple(g for g in groups if g.kind != "attn_output")
    names = {g.name for g in groups}
    return replace(all_costs, groups=groups, costs=tuple(c for c in all_costs.costs if c.group in names))


#: Each kind of constraint: options, and what it says of types by class and of totals, in other words.
Types = Mapping[str, str]
CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[Types, int, float], bool]]] = {
    "none": ({}, lambda types, read, seconds: True),
    "types": ({"types": ("Q3_K", "q6_k")}, lambda types, read, seconds: set(types.values()) <= {"Q3_K", "Q6_K"}),
    "allow": (
        {"allow": ("attn_k=Q4_K", "attn_.*=Q2_K,Q6_K")},
        lambda types, read, seconds: (
            types["attn_k"] == "Q4_K" and {types["attn_q"], types["attn_v"]} <= {"Q2_K", "Q6_K"}
        ),
    ),
    "at least": (
        {"at_least": ("ffn_down=Q4_K",)},
        lambda types, read, seconds: types["ffn_down"] in ("Q4_K", "Q6_K"),
    ),
    "at most": (
        {"at_most": ("ffn_(up|gate)=Q3_K",)},
        lambda types, read, seconds: {types["ffn_up"], types["ffn_gate"]} <= {"Q2_K", "Q3_K"},
    ),
    "up and gate": ({"same": ("up,gate",)}, lambda types, read, seconds: types["ffn_up"] == types["ffn_gate"]),
    "q, k and v": (
        {"same": ("q,k,v",)},
        lambda types, read, seconds: len({types[f"attn_{part}"] for part in "qkv"}) == 1,
    ),
    "classes": ({"same": ("attn_q,ffn_down",)}, lambda types, read, seconds: types["attn_q"] == types["ffn_down"]),
    "read": ({"max_read": 1_800_000}, lambda types, read, seconds: read <= 1_800_000),
    "speed": (
        {"min_speed": 610.0, "speeds": {"Q2_K": 1.0, "Q3_K": 1.5, "Q4_K": 3.0, "Q6_K": 2.0}},
        lambda types, read, seconds: seconds <= 1 / 610,
    ),
}


@dataclass(frozen=True)
class Exhaustive:
    """All allocations of six groups to four types: types by class, bytes of data, bytes and seconds to read, kld."""

    rows: list[tuple[Types, int, int, float, float]]

    @classmethod
    def from_costs(cls, costs: Sensitivity, path: Path, speeds: Mapping[str, float]) -> Exhaustive:
        klds = {(c.group, c.type.name): c.kld or 0.0 for c in costs.costs}
        shapes = {g.name: next(iter(g.tensors.values())) for g in costs.groups}
        with open_model(path) as file:
            fixed_tensors = [t for t in file.tensors.values() if t.name.removesuffix(".weight") not in shapes]
        row = {t.name: t.nbytes if t.name != "token_embd.weight" else t.nbytes // t.shape[1] for t in fixed_tensors}
        rows = []
        for picked in itertools.product(TYPES, repeat=len(costs.groups)):
            types_by_name = dict(zip(shapes, picked, strict=True))
            parts = {name: BY_NAME[t].tensor_bytes(shapes[name]) for name, t in types_by_name.items()}
            types: Types = {group.kind: types_by_name[group.name] for group in costs.groups}
            slowest = min(speeds.values(), default=1.0)
            seconds = sum(parts[name] / speeds.get(t, slowest) / 1e9 for name, t in types_by_name.items())
            seconds += sum(row.values()) / slowest / 1e9
            read = sum(parts.values()) + sum(row.values())
            kld = math.fsum(klds[name, t] for name, t in types_by_name.items())
            rows.append((types, sum(parts.values()) + sum(t.nbytes for t in fixed_tensors), read, seconds, kld))
        return cls(rows)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_allocations_equal_exhaustive_search(dense: Path, constraint: str) -> None:
    """Least divergence within some bits per weight, and fewest bytes within some divergence."""
    options, holds = CONSTRAINTS[constraint]
    costs = six(dense)
    exhaustive = Exhaustive.from_costs(costs, dense, options.get("speeds", {}))
    allowed = [(nbytes, kld) for types, nbytes, read, seconds, kld in exhaustive.rows if holds(types, read, seconds)]
    values = sum(math.prod(shape) for shape, _ in llama_tensors().values())
    least, most = min(n for n, _ in allowed), max(n for n, _ in allowed)
    for share in (0.0, 0.3, 0.7):
        bpw = 8 * (least + share * (most - least)) / values + 1e-9
        best = search(costs, options=SearchOptions(target_bpw=bpw, **options)).best
        assert best.kld == pytest.approx(min(kld for n, kld in allowed if n <= bpw * values / 8), rel=1e-9)
        assert best.footprint.data <= bpw * values / 8
        target = best.kld * 1.2
        smallest = search(costs, options=SearchOptions(target_kld=target, **options)).best
        assert smallest.kld <= target
        assert smallest.footprint.data == min(n for n, kld in allowed if kld <= target)


def test_a_size_limit_applies_to_the_file(dense: Path) -> None:
    """Of all files that recipes of four groups make, none is better, within the bytes of a header."""
    costs = random_costs(dense, TYPES[:3], limit=4)
    with open_model(dense) as source:
        finder = Finder(Space(costs, source, SearchOptions(target_size=1)))
        files = [
            (
                finder.space.plan(finder.space.main_type(picks), finder.space.rules(picks)).nbytes,
                finder.space.kld(picks),
            )
            for picks in itertools.product(range(3), repeat=4)
        ]
        sizes = [nbytes for nbytes, _ in files]
        for target in range(min(sizes), max(sizes), 9001):
            allocation = finder.best_for_size(target)
            assert allocation is not None
            assert allocation.nbytes <= target
            assert allocation.nbytes in sizes
            assert allocation.kld >= min(kld for n, kld in files if n <= target) * (1 - 1e-9)
            assert allocation.kld <= min((kld for n, kld in files if n <= target - 256), default=math.inf) * (1 + 1e-9)


def test_a_recipe_gives_the_predicted_size(dense: Path, tmp_path: Path) -> None:
    """Read back, its rules are the same, its file has exactly the types and the size; tensors not measured stay."""
    costs = random_costs(dense, limit=12)
    (tmp_path / "S.json").write_text(costs.to_json())
    out = tmp_path / "found.recipe"
    line = ["search", "-s", str(tmp_path / "S.json"), "--target-size", "2M", "-o", str(out), "--json", "-"]
    result = CliRunner().invoke(cli, line)
    assert result.exit_code == 0, result.output
    allocation = json.loads(result.stdout)["allocations"][0]
    text = out.read_text()
    assert f"{allocation['bytes']} bytes" in text
    rules = parse_recipe(text, out.name)
    assert [f"{rule.pattern} = {rule.type}" for rule in rules] == allocation["rules"]
    quantized = quantkit.quantize(dense, tmp_path / "out.gguf", allocation["type"], QuantizeOptions(recipe=(out,)))
    assert (tmp_path / "out.gguf").stat().st_size == allocation["bytes"] <= 2_000_000
    types = {t.name: t.type.name for t in quantized.plan.tensors}
    assert {g.name: types[f"{g.name}.weight"] for g in costs.groups} == allocation["types"]
    measured_names = {name for g in costs.groups for name in g.tensors}
    assert {t for name, t in types.items() if name not in measured_names} == {"F16", "F32"}


def test_merged_experts_have_one_type_and_their_bytes(moe: Path) -> None:
    allocation = search(random_costs(moe), options=SearchOptions(target_bpw=4, merge_up_gate=True)).best
    merged = [t for t in allocation.plan.tensors if "ffn_gate_up_exps" in t.name]
    assert merged
    for t in merged:
        prefix = t.name.removesuffix("ffn_gate_up_exps.weight")
        assert {allocation.types[f"{prefix}ffn_{part}_exps"] for part in ("gate", "up")} == {t.type}
    separate = search(random_costs(moe), options=SearchOptions(target_bpw=4, same=("up,gate",))).best
    assert separate.kld == pytest.approx(allocation.kld)


def test_a_size_includes_the_scales_of_nvfp4(moe: Path) -> None:
    """They are tensors of their own, which the source does not have."""
    best = search(random_costs(moe, ("NVFP4", "Q8_0")), options=SearchOptions(target_bpw=6)).best
    scales = {t.name for t in best.plan.tensors if t.name.endswith(".scale")}
    assert scales
    assert {name.removesuffix(".scale") for name in scales} <= {
        name for name, t in best.types.items() if t.name == "NVFP4"
    }
    assert best.bpw <= 6


def test_rows_of_partial_blocks_count_as_their_fallback(tmp_path: Path) -> None:
    tensors = {**llama_tensors(1, 256, 288), "output_norm.weight": ((256,), "F32")}
    path = write_model(tmp_path / "odd.gguf", tensors, llama_fields(1, 256, 288))
    allocation = search(random_costs(path, ("Q4_K",)), options=SearchOptions(target_bpw=16)).best
    types = {t.name: t.type.name for t in allocation.plan.tensors}
    assert types["blk.0.ffn_down.weight"] == "Q5_0"
    assert any(rule.type.name == "Q5_0" for rule in allocation.rules)


@pytest.mark.parametrize("arch", ["llama-dense", "qwen3moe-moe", "gemma-dense", "deepseek2-moe", "olmoe-moe"])
def test_bytes_per_token_equal_the_graphs(arch: str, tmp_path: Path) -> None:
    path = write_hollow_zoo(arch, tmp_path / "zoo.gguf")
    with open_model(path) as source:
        space = Space(random_costs(path), source, SearchOptions())
        read = sum(space.footprint(t).read for t in space.plan("COPY", ()).tensors)
        assert read == pytest.approx(token_cost(build_graph(source)).weight_bytes, rel=1e-4)  # rope factors


# --- predictions ---


def noisy(klds: Mapping[tuple[str, str], tuple[float, float]], **options: Any) -> Sensitivity:
    groups = tuple(Group(name, "x", 0, {f"{name}.weight": (256, 1)}) for name in dict.fromkeys(g for g, _ in klds))
    costs = tuple(Cost(g, BY_NAME[t], kld, error, None, None) for (g, t), (kld, error) in klds.items())
    return Sensitivity({}, {}, options, groups, costs)


def test_significant_costs_are_kept_and_noise_is_smoothed() -> None:
    rng = np.random.default_rng(5)
    scales, step = np.exp(rng.normal(0, 1, 40)), dict(zip(TYPES, (1.0, 0.3, 0.1, 0.01), strict=True))
    truth = {(f"g{i}", t): scales[i] * step[t] for i in range(40) for t in TYPES}
    exact = Predictor(noisy({key: (value * math.exp(rng.normal(0, 0.3)), 0.0) for key, value in truth.items()}))
    for key, (value, _) in exact._values.items():
        assert exact.kld(key[0], key[1]) == pytest.approx(value, rel=1e-3)
    poor = {key: (max(rng.normal(value, 0.05), 1e-9), 0.05) for key, value in truth.items()}
    predictor = Predictor(noisy(poor))
    tiny = [key for key in truth if key[1] == "Q6_K"]
    off = [abs(math.log((predictor.kld(g, BY_NAME[t]) or 0) / truth[g, t])) for g, t in tiny]
    raw = [abs(math.log(poor[key][0] / truth[key])) for key in tiny]
    assert np.mean(off) < np.mean(raw) / 2
    assert predictor.kld("g0", BY_NAME["Q8_0"]) is None
    del poor["g3", "Q4_K"]
    assert Predictor(noisy(poor)).extrapolated_kld("g3", BY_NAME["Q4_K"]) == pytest.approx(truth["g3", "Q4_K"], rel=2)


def test_kink_and_scale_are_fitted_to_joint_measurements() -> None:
    rng, rule = np.random.default_rng(2), Combination(10**-2.5, 0.9, 6)
    alone = {(f"g{i}", t): math.exp(rng.normal(-8, 1)) * 4.0**-n for i in range(20) for n, t in enumerate(TYPES)}
    measurements = [
        MeasuredAllocation({f"g{i}": BY_NAME[t] for i in range(20)},
                 rule.total(math.fsum(rule.additive_part(alone[f"g{i}", t]) for i in range(20))), 0.0)
        for t in TYPES
    ]  # fmt: skip
    fit = fit_combination(measurements, lambda group, t: alone[group, t.name])
    assert fit.kink == pytest.approx(rule.kink)
    assert fit.scale == pytest.approx(rule.scale)
    assert fit.n == 4
    assert fit.total(fit.inverse(0.01)) == pytest.approx(0.01)
    assert fit_combination(measurements[:2], lambda group, t: alone[group, t.name]) == Combination()


def test_a_divergence_goal_uses_the_fitted_rule(dense: Path) -> None:
    """What was measured together decides how groups add up, and so which size a divergence needs."""
    plain = random_costs(dense)
    klds = {(c.group, c.type.name): c.kld or 0.0 for c in plain.costs}
    rows = [
        {"types": {g.name: t for g in plain.groups}, "kld": 0.5 * sum(klds[g.name, t] for g in plain.groups)}
        for t in TYPES
    ]
    halved = replace(plain, settings={"together": rows})
    target = SearchOptions(target_kld=1e-3)
    first, second = search(plain, options=target).best, search(halved, options=target).best
    assert second.nbytes < first.nbytes
    assert second.kld <= 1e-3
    assert second.kld == pytest.approx(0.5 * sum(klds[g, t.name] for g, t in second.types.items()), rel=1e-6)


def test_costs_with_feedback_are_used_where_available(dense: Path) -> None:
    costs = random_costs(dense, ("Q4_K", "Q6_K"), limit=3)
    first = costs.costs[0]
    with_feedback = replace(costs, costs=(*costs.costs, replace(first, kld=1e-9, feedback=True)))
    assert Predictor(with_feedback).kld(first.group, first.type) == pytest.approx(first.kld)
    assert Predictor(with_feedback, feedback=True).kld(first.group, first.type) == pytest.approx(1e-9)
    assert Predictor(with_feedback, feedback=True).kld(costs.costs[1].group, costs.costs[1].type) is not None


def test_a_file_with_feedback_has_the_predicted_size(dense: Path, tmp_path: Path) -> None:
    """Its keys are in the header; types that it does not know are sized without it."""
    cov = write_covariances(tmp_path / "cov.gguf", {"blk.0.attn_q.weight: blk.0.attn_k.weight": (5000,)})
    costs = random_costs(dense, ("Q4_0", "Q8_0", "Q4_1"), limit=6)
    allocation = search(costs, options=SearchOptions(target_size=2_400_000, feedback=cov)).best
    quantkit.quantize(dense, tmp_path / "out.gguf", allocation.type_name, allocation.options, threads=2)
    assert (tmp_path / "out.gguf").stat().st_size == allocation.nbytes <= 2_400_000


def test_proxies_replace_missing_measurements(dense: Path) -> None:
    costs = random_costs(dense)
    partial_costs = tuple(
        c if c.type.name == "Q4_K" else replace(c, kld=None, proxies={"bad": 1.0, "good": c.kld or 0.0})
        for c in costs.costs
    )
    predictor = Predictor(replace(costs, costs=partial_costs, settings={"rank_correlation": {"good": 0.9, "bad": 0.1}}))
    poor = [c for c in partial_costs if c.kld is None]
    assert predictor.types == tuple(BY_NAME[t] for t in TYPES)
    assert all((predictor.kld(c.group, c.type) or 0) < 0.5 for c in poor)
    only = replace(costs, costs=tuple(replace(c, kld=None, proxies={"a": 0.0, "b": c.kld or 0.0}) for c in costs.costs))
    first = search(costs, options=SearchOptions(target_bpw=4)).best
    guessed = search(only, options=SearchOptions(target_bpw=4, proxy="b")).best
    klds = {(c.group, c.type): c.kld or 0.0 for c in costs.costs}
    assert math.fsum(klds[pair] for pair in guessed.types.items()) < 1.5 * first.kld  # a guess is not taken as exact


# --- the front, and what is measured ---


def test_the_pareto_front_decreases_and_includes_presets(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "S.json").write_text(random_costs(dense, ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")).to_json())
    line = ["search", "-s", str(tmp_path / "S.json"), "--points", "6", "--front", str(tmp_path / "front.csv")]
    result = CliRunner().invoke(cli, [*line, "--plot", str(tmp_path / "front.svg")])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((tmp_path / "front.csv").read_text().splitlines()))
    searched = [(int(r["bytes"]), float(r["predicted_kld"])) for r in rows if r["kind"] == "search"]
    presets = {r["name"]: (int(r["bytes"]), float(r["predicted_kld"])) for r in rows if r["kind"] == "preset"}
    assert searched == sorted(searched, key=lambda point: (point[0], -point[1]))
    assert all(b < a for (_, a), (_, b) in itertools.pairwise(searched))
    assert {"Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M"} <= presets.keys()
    for nbytes, kld in presets.values():
        assert any(n <= nbytes + 1024 and k <= kld * 1.001 for n, k in searched)  # a recipe is in the header
    assert plan_quantize(dense, tmp_path / "q.gguf", "Q4_K_M").nbytes == presets["Q4_K_M"][0]
    assert b"Q4_K_M" in (tmp_path / "front.svg").read_bytes()


def test_the_best_candidates_are_measured_and_sorted(tiny_moe: Path, tmp_path: Path) -> None:
    quantkit.perplexity(tiny_moe, tokens=np.arange(2, 66), n_ctx=32, save_logits=SaveLogits(tmp_path / "base"))
    check = Check(2, tmp_path / "base", folder=tmp_path)
    events: list[Progress] = []
    result = search(
        random_costs(tiny_moe, ("Q4_0", "Q8_0")),
        options=SearchOptions(target_bpw=5),
        check=check,
        progress=events.append,
    )
    klds = [a.check.sums.kld.mean.value for a in result.allocations if a.check is not None]
    assert len(klds) == 2
    assert klds == sorted(klds)
    assert result.allocations[0].types != result.allocations[1].types
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base"]
    assert [(now.current, now.total) for now in events] == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_already_quantized_tensors(dense: Path, tmp_path: Path) -> None:
    """Only if that is allowed; the plan then is one that quantize takes."""
    path = tmp_path / "q8_0.gguf"
    quantkit.quantize(dense, path, "Q8_0", threads=1)
    costs, target = random_costs(path, limit=6), SearchOptions(target_bpw=8)
    with refuses(TypeNotSupported, "QK-E209 --allow-requantize"):
        search(costs, options=target)
    best = search(costs, options=replace(target, allow_requantize=True)).best
    assert best.bpw <= 8
    assert {t.name for t in best.types.values()} <= set(TYPES)
    assert best.options.allow_requantize


def test_router_changes_combine_quadratically(dense: Path) -> None:
    """What is found for a size, and for a divergence, is the best of all allocations, or nearly; the rule says how bad
    it is, a plan of the same types, too."""
    costs = random_costs(dense, limit=6, seed=5)
    shares = {group.name: 0.05 + 0.9 * (i % 2) for i, group in enumerate(costs.groups)}
    costs = replace(costs, costs=tuple(replace(c, flips=shares[c.group]) for c in costs.costs))

    def total(space: Space, picks: Sequence[int]) -> float:
        choices = [unit.choices[pick] for unit, pick in zip(space.choice_groups, picks, strict=True)]
        return math.fsum(c.kld - c.flips for c in choices) + math.sqrt(math.fsum(c.squares for c in choices))

    with open_model(dense) as source:
        space = Space(costs, source, SearchOptions())
        sizes = [[c.footprint.padded for c in unit.choices] for unit in space.choice_groups]
        most = space.fixed.padded + sum((row[0] + row[-1]) // 2 for row in sizes)
        all_picks = list(itertools.product(*map(range, map(len, sizes))))
        limit = most + Finder(space).header_bytes
        finder = Finder(Space(costs, source, SearchOptions(target_size=limit)))
        first, second = finder.best(2)
        plain = finder.best_for_size(limit, costs=finder.klds)
        by_kld = Finder(Space(costs, source, SearchOptions(target_kld=first.kld)))
        (smallest,) = by_kld.best(1)
        assert predict_plan(space, first.plan) == pytest.approx(first.kld)
    assert plain is not None
    assert second.picks == plain.picks or first.picks == plain.picks
    assert first.kld == pytest.approx(total(space, first.picks))
    assert first.kld <= 1.02 * min(total(space, p) for p in all_picks if space.total(p).padded <= most)
    assert first.kld < 0.97 * total(space, plain.picks)
    assert first.nbytes <= limit
    assert first.gap == 0
    least = min(space.total(p).padded for p in all_picks if total(space, p) <= first.kld)
    assert smallest.kld <= first.kld
    assert smallest.footprint.padded <= 1.02 * least


def test_the_second_candidate_is_the_best_for_linear_sums(dense: Path) -> None:
    """Where a rule discounts small costs, and only for a size: for a divergence the rule is what counts."""
    costs = six(dense)
    klds = {(c.group, c.type.name): c.kld or 0.0 for c in costs.costs}
    rule = Combination(0.1)
    rows = [
        {"types": {g.name: t for g in costs.groups},
         "kld": rule.total(math.fsum(rule.additive_part(klds[g.name, t]) for g in costs.groups))}
        for t in TYPES
    ]  # fmt: skip
    options = SearchOptions(target_bpw=11)
    with open_model(dense) as source:
        finder = Finder(Space(replace(costs, settings={"together": rows}), source, options))
        assert finder.space.combination.kink > 0
        first, second = finder.best(2)
        (plain,) = Finder(Space(costs, source, options)).best(1)
    assert first.kld <= second.kld
    assert first.types != second.types
    total = sum(klds[g, t.name] for g, t in second.types.items())
    assert first.types == plain.types or total == pytest.approx(plain.kld)


def test_speeds_are_measured_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[measure_speeds.__module__]
    monkeypatch.setattr(module, "_SECONDS", 0.01)
    monkeypatch.setattr(module, "_BYTES", 4 << 20)
    assert measure_speeds([BY_NAME["Q4_K"]], threads=1).keys() == {"Q4_K"}
    (tmp_path / "speeds.json").write_text('{"Q4_K": 18.5}')
    assert read_speeds(tmp_path / "speeds.json") == {"Q4_K": 18.5}


# --- what cannot be ---

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too small": ({"target_size": 1000}, "QK-E213 --target-size 1000"),
    "too few bits": ({"target_bpw": 1.0}, "QK-E213 --target-bpw 1"),
    "too good": ({"target_kld": 1e-30}, "QK-E213 --target-kld"),
    "too slow": ({"target_bpw": 4.0, "max_read": 1000}, "QK-E213 --max-read"),
    "much too slow": ({"min_speed": 1e9, "speeds": dict.fromkeys(TYPES, 1.0)}, "QK-E213 --min-speed 2280"),
    "no speeds": ({"min_speed": 1.0}, "QK-E202 --speeds"),
    "unknown type": ({"types": ("Q9_K",)}, "QK-E301 Q9_K"),
    "type not measured": ({"types": ("Q5_K",)}, "QK-E203 Q5_K Q2_K"),
    "integers": ({"types": ("I32",)}, "QK-E302 I32"),
    "of the other tree": ({"types": ("IQ4_KS",), "runtime": "mainline"}, "QK-E203 IQ4_KS Q2_K"),
    "unknown runtime": ({"runtime": "vllm"}, "QK-E203 --runtime"),
    "unknown class": ({"allow": ("attn_z=Q4_K",)}, "QK-E206 token_embd"),
    "no type": ({"allow": ("attn_q=",)}, "QK-E204 RE=TYPE"),
    "broken regex": ({"allow": ("attn_(=Q4_K",)}, "QK-E205 --allow attn_("),
    "nothing left": ({"at_least": ("attn_q=Q6_K",), "at_most": ("attn_q=Q4_K",)}, "QK-E213 blk.0.attn_q --at-least"),
    "two bounds": ({"at_least": ("attn_q=Q6_K,Q4_K",)}, "QK-E203 --at-least attn_q=Q6_K,Q4_K"),
    "no class alike": ({"same": ("up,down,sideways",)}, "QK-E206 sideways"),
    "one alike": ({"same": ("up",)}, "QK-E204 --same"),
    "none in common": ({"same": ("up,gate",), "allow": ("up=Q4_K", "gate=Q6_K")}, "QK-E213 blk.0.ffn_gate Q6_K"),
    "below zero": ({"target_bpw": -1.0}, "QK-E203 0"),
    "two targets": ({"target_bpw": 4.0, "target_kld": 1.0}, "QK-E201 --target-size --target-bpw"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_goals_name_the_possible_range(dense: Path, case: str) -> None:
    options, refusal = REFUSED[case]
    target = {} if any(name.startswith("target") for name in options) else {"target_bpw": 4.0}
    with refuses((RecipeError, TypeNotSupported), refusal):
        search(random_costs(dense), options=SearchOptions(**{**target, **options}))


def test_costs_of_another_model_are_refused(dense: Path, moe: Path, tmp_path: Path) -> None:
    four = SearchOptions(target_bpw=4)
    with refuses(RecipeError, "QK-E207 moe.gguf", "[256, 64]", "[256, 128]"):
        search(random_costs(moe), dense, four)
    larger_model = write_model(tmp_path / "more.gguf", llama_tensors(3), llama_fields(3))
    with refuses(RecipeError, "QK-E207 blk.2.attn_q.weight"):
        search(random_costs(larger_model), dense, four)
    wider = write_model(tmp_path / "wide.gguf", llama_tensors(2, 512), llama_fields(2, 512))
    with refuses(RecipeError, "QK-E207", "[512, 64]"):
        search(random_costs(dense), wider, four)
    costs = random_costs(dense)
    with refuses(RecipeError, "QK-E207 dense.gguf"):
        search(replace(costs, model={**costs.model, "fingerprint": "0" * 64}), dense, four)
    with refuses(RecipeError, "QK-E401 -m"):
        search(replace(costs, model={"path": str(tmp_path / "gone.gguf")}), None, four)
    with refuses(QuantkitError, "QK-E122 token_embd.weight"):
        search(replace(costs, groups=(*costs.groups, replace(costs.groups[0], name="again"))), dense, four)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"kld": 0', '"kld": NaN, "x": 0'),
        ('"kld": 0', '"kld": NaN}, {"x": 0'),
        ('"settings": {}', '"settings": []'),
        ('"settings": {}', '"settings": {"together": 5}'),
        ('"settings": {}', '"settings": {"together": [{"types": {"a": "Q4_K"}, "kld": "much"}]}'),
        ('"model": {', '"model": 7, "was": {'),
    ],
)
def test_a_hostile_file_is_one_error(dense: Path, tmp_path: Path, old: str, new: str) -> None:
    text = random_costs(dense, limit=2).to_json()
    assert old in text
    (tmp_path / "S.json").write_text(text.replace(old, new))
    result = CliRunner().invoke(cli, ["search", "-s", str(tmp_path / "S.json"), "-m", str(dense), "--target-bpw", "4"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert isinstance(result.exception, SystemExit)


def test_nonfinite_costs_are_refused(dense: Path) -> None:
    measured_costs = random_costs(dense, limit=2)
    bad: Any
    for bad in (math.nan, math.inf, "0.1"):
        costs: Any = (replace(measured_costs.costs[0], kld=bad), *measured_costs.costs[1:])
        with refuses(QuantkitError, "QK-E122 token_embd Q2_K"):
            search(replace(measured_costs, costs=costs), options=SearchOptions(target_bpw=15))


def test_usage(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "S.json").write_text(random_costs(dense, limit=4).to_json())
    first = ["search", "-s", str(tmp_path / "S.json")]
    for arguments, message in (
        ([], "give one of --target-size"),
        (["--target-bpw", "4", "--check", "2"], "--base"),
        (["--front", str(tmp_path / "front.txt")], ".csv or .json"),
        (["--front", str(tmp_path / "front.csv"), "-o", str(tmp_path / "r")], "give its target"),
        (["--target-bpw", "4", "-o", str(tmp_path / "S.json"), "--overwrite"], "is the input itself"),
        (["--target-bpw", "4", "--plot", str(tmp_path / "a.gif")], ".svg, .png or .pdf"),
    ):
        result = CliRunner().invoke(cli, [*first, *arguments])
        assert result.exit_code != 0
        assert message in result.output
    printed = CliRunner().invoke(cli, [*first, "--target-bpw", "15"])
    assert printed.exit_code == 0, printed.output
    assert "make the file: quantkit quantize" in printed.output
