"""What ``sensitivity`` measures is what ``quantize`` of a group alone and ``kld`` give, and it survives kills."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from refusals import refuses

from quantkit.cli import cli
from quantkit.errors import QuantkitError, RecipeError, ResourceError, TypeNotSupported
from quantkit.evaluate import SaveLogits, kld, perplexity
from quantkit.formats.gguf import open_gguf
from quantkit.imatrix import ImatrixOptions, imatrix
from quantkit.imatrix.covariance import covariance
from quantkit.pipeline.cache.store import open_store
from quantkit.pipeline.jobs import ErrorSums
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.search.combine import fit_combination, read_measured_allocations
from quantkit.search.predict import Predictor
from quantkit.sensitivity import Cost, Group, Sensitivity, SensitivityOptions, read_sensitivity, sensitivity
from quantkit.sensitivity.encode import Encoder, Encoding, Pair, groups_of
from quantkit.sensitivity.experts import Routing, experts_summary
from quantkit.sensitivity.layer_errors import with_layer_errors
from quantkit.sensitivity.measure import full_runs_of
from quantkit.sensitivity.proxies import rank_correlations, with_proxies
from quantkit.types import type_by_name

#: Of models: separate experts, merged ones, delta net beside attention, caches that layers share, tied embeddings.
MODELS = ("qwen3moe-moe", "gemma4-moe", "qwen3next-moe", "gemma3n-dense", "qwen3-dense")
N_CTX, CHUNKS = 16, 5


def ids_of(path: Path) -> npt.NDArray[np.int32]:
    with open_gguf(path) as source:
        n_vocab = source.tensors["token_embd.weight"].shape[1]
    return np.random.default_rng(3).integers(0, n_vocab, N_CTX * CHUNKS, np.int32)


def options(**changes: object) -> SensitivityOptions:
    settings = {"types": ("Q4_0",), "n_ctx": N_CTX, "n_batch": 3 * N_CTX, **changes}
    return SensitivityOptions(**settings)  # type: ignore[arg-type]


def with_groups(model: Path, groups: Sequence[Group], name: str, base: Path, folder: Path) -> tuple[float, float]:
    """Return the divergence and ln(perplexity) of a file with quantized groups."""
    path = folder / "with.gguf"
    rules = tuple(f"^{t.replace('.', '[.]')}$={name}" for group in groups for t in group.tensors)
    quantize(model, path, "COPY", QuantizeOptions(tensor_type=rules), overwrite=True, threads=2)
    result = perplexity(path, activations="exact", tokens=ids_of(model), n_ctx=N_CTX)
    return kld(path, base).sums.kld.mean.value, result.log_ppl.value


@pytest.mark.parametrize("name", MODELS)
def test_costs_equal_those_of_files(zoo: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    """Every class of tensors of the first, a middle and the last layer, and those outside of layers."""
    model, base = zoo(name), tmp_path / "base"
    ids = ids_of(model)
    # All windows at once, as kld has them: a product of few rows is computed in another order than one of many.
    result = sensitivity(model, tmp_path / "s.json", tokens=ids, options=options(n_batch=512))
    assert read_sensitivity(tmp_path / "s.json") == result
    save = SaveLogits(base, "compact", top_k=1 << 20, residual=0)
    before = perplexity(model, tokens=ids, n_ctx=N_CTX, save_logits=save).log_ppl.value
    costs = {c.group: c for c in result.costs}
    assert costs.keys() == {g.name for g in result.groups}
    last = max(g.layer for g in result.groups if g.layer is not None)
    kinds: dict[str, Group] = {}
    for group in result.groups:  # of each class one, of changing layers
        if group.kind not in kinds or group.layer == (last if len(kinds) % 2 else 1):
            kinds[group.kind] = group
    for group in kinds.values():
        divergence, after = with_groups(model, [group], "Q4_0", base, tmp_path)
        cost = costs[group.name]
        assert cost.kld == pytest.approx(divergence, rel=1e-4, abs=2e-6), group.name
        assert cost.ln_ppl == pytest.approx(after - before, abs=1e-12), group.name  # the logits, bit for bit
        assert cost.kld is not None
        assert cost.kld > 0, group.name
    (uniform,) = result.settings["together"]
    assert uniform["types"] == {group.name: "Q4_0" for group in result.groups}
    divergence, after = with_groups(model, result.groups, "Q4_0", base, tmp_path)
    assert uniform["kld"] == pytest.approx(divergence, rel=1e-4, abs=2e-6)
    assert uniform["ln_ppl"] == pytest.approx(after - before, abs=1e-12)


@pytest.fixture(scope="module")
def observed(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An importance matrix and covariances of qwen3moe-moe: of experts there are too few tokens."""
    model, folder = zoo("qwen3moe-moe"), tmp_path_factory.mktemp("observed")
    ids, settings = np.tile(ids_of(model), 5), ImatrixOptions(n_ctx=N_CTX, n_batch=8 * N_CTX)
    imatrix(model, (), folder / "imatrix.gguf", tokens=ids, options=settings)
    covariance(model, (), folder / "cov.gguf", tokens=ids, options=settings)
    return folder / "imatrix.gguf", folder / "cov.gguf"


@pytest.mark.parametrize("kind", ["ffn_down_exps", "attn_q"])
def test_bytes_equal_quantizes(
    zoo: Callable[[str], Path], observed: tuple[Path, Path], kind: str, tmp_path: Path
) -> None:
    """With importance and error feedback, where there is any; the second time out of the cache."""
    model, (imatrix, cov) = zoo("qwen3moe-moe"), observed
    encoding = Encoding(imatrix, cov)
    group = next(g for g in groups_of(model, encoding, "class-layer") if g.kind == kind)
    rules, encodings, notes = tuple(f"{name}=Q4_0" for name in group.tensors), set[bytes](), list[list[str]]()
    for pair in (Pair(group, type_by_name("Q4_0"), has_feedback) for has_feedback in (False, True)):
        quantize_options = QuantizeOptions(imatrix=imatrix, feedback=cov if pair.feedback else None, tensor_type=rules)
        quantize(model, tmp_path / "q.gguf", "COPY", quantize_options, threads=2, overwrite=True)
        for _ in range(2):
            store = open_store(tmp_path / "cache")
            encoder = Encoder(model, [pair], encoding, 2, 1 << 28, store)
            encoded_group = encoder.encode(pair, tmp_path)
            notes.append(encoder.close())
            with open_gguf(tmp_path / "q.gguf") as file:
                for name, (info, data) in encoded_group.data.items():
                    assert info.type.name == "Q4_0"
                    assert (file.data(name) == data).all()
            assert 0 < encoded_group.sums.error < encoded_group.sums.square
        encodings.add(b"".join(data.tobytes() for _, data in encoded_group.data.values()))
        assert not pair.feedback or encoder.has_feedback(pair) == (kind == "attn_q")
    assert len(encodings) == (2 if kind == "attn_q" else 1)
    assert ["came from the cache" in " ".join(texts) for texts in notes] == [False, True] * 2


def test_costs_with_feedback(zoo: Callable[[str], Path], observed: tuple[Path, Path], tmp_path: Path) -> None:
    model, fed_too = zoo("qwen3moe-moe"), options(feedback=observed[1])
    result = sensitivity(model, tmp_path / "s.json", tokens=ids_of(model), options=fed_too)
    feedback_costs = {c.group: c for c in result.costs if c.feedback}
    assert {g.name for g in result.groups if g.kind == "attn_q"} <= feedback_costs.keys()
    plain = {c.group: c for c in result.costs if not c.feedback}
    assert plain.keys() == {g.name for g in result.groups}
    for name, cost in feedback_costs.items():
        assert cost.kld
        assert cost.kld != plain[name].kld
        assert 0 < cost.proxies["covariance_loss"] < plain[name].proxies["covariance_loss"]
    assert result.settings["together"][0]["types"].keys() == plain.keys()


def test_command(tiny_moe: Path, tmp_path: Path) -> None:
    """A text from stdin, a process's own and a caller's, weights that are streamed, and a cache."""
    text = Path(__file__).parents[1].joinpath("data").joinpath("tiny-moe-evaluation.txt").read_bytes()
    command = ["sensitivity", "-m", str(tiny_moe), "-f", "-", "-c", "32", "--chunks", "1", "--types", "Q8_0"]
    command += ["--proxies-only", "--cache", str(tmp_path / "cache"), "-o"]
    python = [sys.executable, "-m", "quantkit"]
    subprocess.run([*python, *command, tmp_path / "1.json", "--max-ram", "4M"], input=text, check=True)
    process_result = CliRunner().invoke(cli, [*command, str(tmp_path / "2.json"), "--no-together"], input=text)
    assert process_result.exit_code == 0, process_result.output
    assert "of 30 encoded tensors came from the cache" in process_result.stderr
    table = [line.split() for line in process_result.stdout.splitlines() if " Q8_0 " in line]
    assert len({len(cells[-1].partition(".")[2]) for cells in table}) == 1  # decimals
    results = [read_sensitivity(tmp_path / name) for name in ("1.json", "2.json")]
    assert not any("cache" in note for costs_of_run in results for note in costs_of_run.settings["notes"])
    assert [costs_of_run.text["sha256"] for costs_of_run in results] == 2 * [[hashlib.sha256(text).hexdigest()]]
    assert results[0].costs == results[1].costs


_SLOW = """
import os, signal, sys
from pathlib import Path
import numpy as np
from quantkit.sensitivity import SensitivityOptions, sensitivity
count = 0
def progress(now):
    global count
    count += now.text.startswith("measure")
    if count == 20:
        os.kill(os.getpid(), signal.SIGKILL)
ids = np.load(sys.argv[2])
options = SensitivityOptions(types=("Q4_0", "Q8_0"), n_ctx=16, n_batch=48, threads=1)
sensitivity(sys.argv[1], sys.argv[3], tokens=ids, options=options, progress=progress)
"""


def test_resumes_after_a_kill(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """The same costs to the last bit, and nothing measured twice; a finished output is not made again."""
    model, out, both = zoo("qwen3-dense"), tmp_path / "s.json", ("Q4_0", "Q8_0")
    ids = ids_of(model)
    np.save(tmp_path / "ids.npy", ids)
    command = [sys.executable, "-c", _SLOW, str(model), str(tmp_path / "ids.npy"), str(out)]
    process = subprocess.run(command, env={**os.environ}, check=False)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    with refuses(ResourceError, "QK-E408 --resume"):
        sensitivity(model, out, tokens=ids, options=options(types=both))
    with refuses(ResourceError, "QK-E409 s.json.journal --overwrite --resume"):
        sensitivity(model, out, tokens=ids[::-1].copy(), options=options(types=both, resume=True))
    steps: list[str] = []
    resumed = sensitivity(
        model, out, tokens=ids, options=options(types=both, resume=True), progress=lambda now: steps.append(now.text)
    )
    full = sensitivity(model, tmp_path / "other.json", tokens=ids, options=options(types=both))
    assert resumed.costs == full.costs
    assert resumed.settings["together"] == full.settings["together"]
    assert sum(s.startswith("measure") for s in steps) == 2 * len(full.costs) - 20
    assert {p.name for p in tmp_path.iterdir()} == {"ids.npy", "other.json", "s.json"}
    rerun = sensitivity(model, out, tokens=ids, options=options(types=both, resume=True), progress=_fail)
    assert rerun == resumed
    with refuses(ResourceError, "QK-E402 s.json --overwrite"):
        sensitivity(model, out, tokens=ids, options=options(types=both))


def _fail(now: object) -> None:
    raise AssertionError(now)


def test_proxies_only_measures_one_type_of_each_group(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """And all of them together, to which search fits how costs combine."""
    model = zoo("qwen3-dense")
    three = options(types=("Q4_0", "Q5_0", "Q8_0"), proxies_only=True, groups="tensor")
    result = sensitivity(model, tmp_path / "s.json", tokens=ids_of(model), options=three)
    for group in result.groups:
        costs = {c.type.name: c for c in result.costs if c.group == group.name}
        assert [name for name, c in costs.items() if c.kld is not None] == ["Q5_0"]
        guessed = [costs[name].proxies["weighted_error"] for name in ("Q4_0", "Q5_0", "Q8_0")]
        assert guessed == sorted(guessed, reverse=True)
        assert guessed[1] == pytest.approx(costs["Q5_0"].kld)
    assert fit_combination(read_measured_allocations(result), Predictor(result).extrapolated_kld).n == 3


def test_other_runs_stop_at_the_end_of_their_layer(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    model, both = zoo("gemma3n-dense"), ("Q4_0", "Q8_0")
    ids = ids_of(model)
    full = sensitivity(model, tmp_path / "all.json", tokens=ids, options=options(types=both, together=False))
    partial_options = options(types=both, together=False, full_runs=1)
    result = sensitivity(model, tmp_path / "some.json", tokens=ids, options=partial_options)
    costs_by_pair = {(c.group, c.type): c for c in full.costs}
    guessed = [c for c in result.costs if c.kld is None]
    assert all(c.kld == costs_by_pair[c.group, c.type].kld for c in result.costs if c.kld is not None)
    assert len(guessed) > len(result.groups) / 2
    assert {c.type.name for c in guessed} == {"Q8_0"}
    assert "output" not in {c.group for c in guessed}  # its layer ends with the model
    for cost in guessed:
        coarser = costs_by_pair[cost.group, type_by_name("Q4_0")].kld
        assert coarser is not None
        assert 0 < cost.proxies["layer_error"] < coarser
    assert 0 < full.settings["rank_correlation"]["layer_error"] <= 1
    assert Predictor(result).types == Predictor(full).types
    resume_options = options(types=both, full_runs=2, resume=True)
    with refuses(ResourceError, "QK-E402 some.json --overwrite"):
        sensitivity(model, tmp_path / "some.json", tokens=ids, options=resume_options)


def test_estimates_follow_the_rule_of_all_groups() -> None:
    """Costs that go with errors as a * (e + kink * sqrt(e)): two types of a group tell the others, one nearly does."""
    names, kink, rng = ("IQ1_M", "Q2_K", "Q4_K", "Q8_0"), 0.03, np.random.default_rng(1)
    costs, errors, truth = dict[Pair, Cost](), dict[Pair, float](), dict[Pair, float]()
    for number in range(12):
        group, factor = Group(f"g{number}", "g", number, {}), math.exp(rng.normal())
        for i, name in enumerate(names):
            pair = Pair(group, type_by_name(name))
            e = errors[pair] = 0.2 * 0.08**i * math.exp(rng.normal() / 4)
            truth[pair] = factor * (e + kink * math.sqrt(e))
            is_measured = i == 1 or i == 2 and number > 0
            costs[pair] = Cost(
                group.name, pair.type, *((truth[pair], 0.01 * truth[pair], 0, 0) if is_measured else [None] * 4)
            )
    predictions = with_layer_errors(costs, errors)
    for pair, cost in predictions.items():
        measured_pairs = [p for p in costs if p.group is pair.group and p is not pair and costs[p].kld is not None]
        if not measured_pairs:
            assert "layer_error" not in cost.proxies
            continue
        tolerance = 0.05 if len(measured_pairs) == 2 else 0.3  # a group of one type has the kink that suits all
        assert cost.proxies["layer_error"] == pytest.approx(truth[pair], rel=tolerance)
        flips = kink * math.sqrt(errors[pair])
        assert cost.flips == pytest.approx(flips / (errors[pair] + flips), rel=0.3)
    alone = {p: c for p, c in costs.items() if p.type.name != "Q4_K"}  # one of each group: in proportion to errors
    ratios = [
        c.proxies["layer_error"] / errors[p]
        for p, c in with_layer_errors(alone, {p: errors[p] for p in alone}).items()
        if p.group.name == "g3" and c.proxies
    ]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=0.02)


@pytest.mark.parametrize(
    ("full_runs", "types", "runs"), [(None, 4, None), (None, 5, 2), (3, 4, 3), (-1, 9, None), (9, 5, 9)]
)
def test_number_of_full_runs(full_runs: int | None, types: int, runs: int | None) -> None:
    assert full_runs_of(full_runs, types) == runs


def test_a_class_in_all_layers(zoo: Callable[[str], Path], observed: tuple[Path, Path], tmp_path: Path) -> None:
    """And what an importance matrix tells of experts, which have one type whatever the groups."""
    model, base = zoo("qwen3moe-moe"), tmp_path / "base"
    save = SaveLogits(base, "compact", top_k=1 << 20, residual=0)
    perplexity(model, tokens=ids_of(model), n_ctx=N_CTX, save_logits=save)
    class_options = options(groups="class", together=False, n_batch=512, imatrix=observed[0])
    result = sensitivity(model, tmp_path / "s.json", tokens=ids_of(model), options=class_options)
    assert "ffn_down_exps" in {g.name for g in result.groups}
    group, cost = next((g, c) for g, c in zip(result.groups, result.costs, strict=True) if g.name == "attn_v")
    assert len(group.tensors) > 1
    assert group.layer is None
    rules = tuple(f"^{name}$=Q4_0" for name in group.tensors)
    quantize(model, tmp_path / "q.gguf", "COPY", QuantizeOptions(tensor_type=rules, imatrix=observed[0]), threads=2)
    assert cost.kld == pytest.approx(kld(tmp_path / "q.gguf", base, threads=2).sums.kld.mean.value, rel=1e-4, abs=2e-6)
    experts = result.settings["experts"]
    assert experts.keys() == {g.name for g in result.groups if g.name.endswith("_exps")}
    for row in experts.values():
        assert all(sum(shares) == pytest.approx(1, abs=1e-3) for shares in row["shares"].values())
        assert 0 <= row["rare_tokens"] <= 0.5
        assert 0 <= row["rare_errors"]["Q4_0"] < 1


def test_errors_of_rare_experts() -> None:
    routing = Routing({"a": np.array([90.0, 10.0, 100.0, 0.0])})
    sums = {"a": [ErrorSums(weighted_error=e) for e in (1.0, 5.0, 2.0, 9.0)]}
    assert routing.errors(sums) == [50.0, 340.0]
    row = routing.settings_row()
    assert (row["rare"], row["never"], row["rare_tokens"]) == (2, 1, 0.05)
    assert "1" in experts_summary({"g": {**row, "rare_errors": {"Q4_0": 50 / 340}}})


def test_rank_correlation_of_proxies() -> None:
    pairs = [Pair(Group(f"g{i}", "g", i, {}), type_by_name(t)) for i in range(3) for t in ("Q4_0", "Q5_0", "Q8_0")]
    costs = {p: Cost(p.group.name, p.type, k * 1.0, 0, 0, 0) for k, p in enumerate(pairs, 1)}
    sums = {p: ErrorSums(1, k, 1, k) for k, p in enumerate(pairs, 1)}
    costs_of_pairs = with_proxies(costs, sums, {pairs[1], pairs[4], pairs[7]})
    assert rank_correlations(costs_of_pairs, {pairs[1], pairs[4], pairs[7]}) == {
        "weighted_error": 1,
        "relative_error": 1,
    }


def test_unmeasurable_requests_are_refused(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    model, out = zoo("qwen3-dense"), tmp_path / "s.json"
    ids = ids_of(model)

    def refused(error: type[QuantkitError], refusal: str, **changes: object) -> None:
        with refuses(error, refusal):
            sensitivity(model, out, tokens=changes.pop("tokens", ids), options=options(**changes))  # type: ignore[arg-type]

    refused(TypeNotSupported, "QK-E301 Q9_Z", types=("QK-E301 Q9_Z",))
    refused(TypeNotSupported, "QK-E203 Q4_0_R8", types=("Q4_0_R8",))
    refused(RecipeError, "QK-E206 IQ2_XXS --ignore-imatrix-rules", types=("IQ2_XXS",))
    refused(RecipeError, "QK-E203", groups="layer")
    refused(RecipeError, "QK-E203 0 -1", full_runs=0)
    refused(QuantkitError, "QK-E203 7 16", tokens=ids[:7])
    with refuses(RecipeError, "QK-E202"):
        sensitivity(model, out, options=options())
    assert not list(tmp_path.iterdir())


def test_file_of_sensitivity() -> None:
    empty = Sensitivity({}, {}, {}, (), ())
    assert '"kind": "quantkit.sensitivity"' in empty.to_json()
