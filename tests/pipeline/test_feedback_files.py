"""Files with error feedback: report, metadata and cache, for every executor."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses

from covariances import write_covariances
from quantkit.cli import cli
from quantkit.cli._feedback_report import feedback_lines
from quantkit.cli._run_report import RunReport
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import open_gguf
from quantkit.imatrix import ImatrixOptions
from quantkit.imatrix.covariance import covariance
from quantkit.pipeline import feedback
from quantkit.pipeline import jobs as jobs_module
from quantkit.pipeline.cache import keys
from quantkit.pipeline.feedback_report import FeedbackReport, feedback_report
from quantkit.pipeline.journal import Journal
from quantkit.quantize import QuantizeOptions, QuantizeResult, plan_quantize, quantize
from quantkit.types import BY_NAME
from small_models import llama_fields, llama_tensors, tensor_bytes, write_model
from zoo import write_zoo

EXPERTS = 3
#: All but the embeddings as they are, which takes no time.
SMALL = {"tensor_type": ("attn_k=Q4_0", "^blk=F32"), "token_embedding_type": "Q4_0"}
F32 = BY_NAME["F32"]
#: Tokens of the experts: enough, few, and too few.
TOKENS = (5000, 300, 100)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = llama_tensors(1, ff=256)
    tensors |= {f"blk.0.ffn_{part}_exps.weight": ((256, 96, EXPERTS), "F16") for part in ("gate", "up")}
    return write_model(tmp_path_factory.mktemp("moe") / "moe.gguf", tensors, llama_fields(1, ff=256))


@pytest.fixture(scope="module")
def cov(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries: dict[str, tuple[float, ...]] = {
        "blk.0.attn_q.weight: blk.0.attn_k.weight blk.0.attn_v.weight": (5000,),
        "blk.0.ffn_up_exps.weight: blk.0.ffn_gate_exps.weight": TOKENS,
        "output.weight:": (5000,),
    }
    return write_covariances(tmp_path_factory.mktemp("cov") / "cov.gguf", entries)


def encode(
    source: Path, out: Path, cov: Path, type_name: str = "Q4_0", **settings: Any
) -> tuple[bytes, FeedbackReport]:
    options = QuantizeOptions(feedback=cov, **settings.pop("options", {}))
    result = quantize(source, out, type_name, options, overwrite="resume" not in settings, **settings)
    return out.read_bytes(), report_of(result)


def report_of(result: QuantizeResult) -> FeedbackReport:
    report = feedback_report(result.plan, result.run.losses)
    assert report is not None
    return report


def test_the_report_lists_fallbacks_with_reasons(moe: Path, cov: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    result = quantize(moe, out, "Q4_0", QuantizeOptions(feedback=cov, tensor_type=("attn_k=TQ1_0",)))
    report, plain = report_of(result), tensor_bytes(quantize(moe, tmp_path / "p.gguf", "Q4_0").paths[0])
    by_name = {t.name: t for t in report.tensors}
    assert set(by_name) == {
        *(f"blk.0.{kind}.weight" for kind in ("attn_q", "attn_v", "ffn_gate_exps", "ffn_up_exps")),
        "output.weight", "token_embd.weight",
    }  # fmt: skip
    experts = by_name["blk.0.ffn_up_exps.weight"].matrices
    assert [(m.tokens, m.damping, m.rows) for m in experts] == [(5000, 0.02, 96), (300, 0.1, 96), (100, None, 96)]
    assert [(m.better > 90, m.after < 0.9 * m.before) for m in experts] == [(True, True), (True, True), (False, False)]
    kind, rows = plain["blk.0.ffn_up_exps.weight"]
    assert tensor_bytes(out)["blk.0.ffn_up_exps.weight"][0] == kind == "Q4_0"
    third = len(rows) // 3
    assert tensor_bytes(out)["blk.0.ffn_up_exps.weight"][1][2 * third :] == rows[2 * third :]
    why = {name: reason for name, _, reason in report.without}
    assert why["blk.0.attn_k.weight"] == "this version has no error feedback for TQ1_0"
    assert why["blk.0.ffn_down.weight"] == "no covariance"
    lines = "\n".join(feedback_lines(report))
    assert "2 of 10 matrices without feedback: fewer tokens than columns" in lines
    assert "5 tensors without feedback: " in lines
    summary = RunReport(result.plan, quiet=True)
    output = json.loads(json.dumps(summary.as_dict(result)))["feedback"]
    assert output == json.loads(json.dumps(report.as_dict()))
    assert [m["why_without"] for m in output["tensors"][-1]["matrices"]] == [None, None, "fewer tokens than columns"]
    assert all(line in summary.text(result) for line in feedback_lines(report))


def test_figures_do_not_depend_on_the_executor(
    moe: Path, cov: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of threads, jobs of any size, the cache, and a resumed run."""
    out, cache = tmp_path / "o.gguf", tmp_path / "cache"
    expected = encode(moe, out, cov, threads=1)
    monkeypatch.setattr(jobs_module, "JOB", 1 << 14)
    assert encode(moe, out, cov, threads=3) == expected
    monkeypatch.undo()
    assert encode(moe, out, cov, threads=2, cache=cache) == expected
    assert encode(moe, out, cov, threads=2, cache=cache, measure_error=True)[0] == expected[0]
    result = quantize(moe, out, "Q4_0", QuantizeOptions(feedback=cov), overwrite=True, cache=cache)
    assert result.run.cache is not None
    assert result.run.cache.hits == result.run.cache.tensors
    assert (out.read_bytes(), report_of(result)) == expected
    out.unlink()
    add, count = Journal.add, [0]

    def killed(self: Journal, entries: Any) -> None:
        add(self, entries)
        count[0] += len(entries)
        if count[0] > 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            encode(moe, out, cov, threads=1, resume=True)
    resumed = quantize(moe, out, "Q4_0", QuantizeOptions(feedback=cov), resume=True)
    assert resumed.run.resumed > 4
    assert (out.read_bytes(), report_of(resumed)) == expected


def test_merged_experts_have_the_losses_of_both_halves(moe: Path, cov: Path, tmp_path: Path) -> None:
    separate = {t.name: t for t in encode(moe, tmp_path / "a.gguf", cov)[1].tensors}
    report = encode(moe, tmp_path / "m.gguf", cov, options={"merge_up_gate": True})[1]
    (merged,) = (t for t in report.tensors if t.name == "blk.0.ffn_gate_up_exps.weight")
    gate, up = (separate[f"blk.0.ffn_{half}_exps.weight"] for half in ("gate", "up"))
    assert [(m.before, m.after, m.better) for m in merged.matrices] == [
        (m.before, m.after, m.better) for m in (*gate.matrices, *up.matrices)
    ]


def test_the_file_has_its_provenance(moe: Path, cov: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    encode(moe, out, cov)
    with open_gguf(out) as file:
        facts = {k.removeprefix("quantkit.feedback."): f.value for k, f in file.fields.items() if ".feedback." in k}
    assert facts["method"] == feedback.METHOD
    assert facts["covariance.name"] == "cov.gguf"
    assert len(facts["covariance.fingerprint"]) == 64
    assert facts["damping"] == pytest.approx(0.02)
    assert (facts["tokens"], facts["matrices"], facts["matrices.without"], facts["tensors.without"]) == (5000, 9, 2, 4)
    assert "cov.gguf" in CliRunner().invoke(cli, ["inspect", str(out)]).stdout
    quantize(out, tmp_path / "again.gguf", "Q4_1", QuantizeOptions(allow_requantize=True))
    encode(moe, tmp_path / "exact.gguf", cov, options={"no_provenance": True})
    for name in ("again", "exact"):
        with open_gguf(tmp_path / f"{name}.gguf") as file:
            assert not [key for key in file.fields if key.startswith("quantkit.feedback.")]
            # A later run no longer claims the feedback as its own work; it names it as the source's.
            assert ("quantkit.source.feedback.method" in file.fields) == (name == "again")


def test_the_cache_key_covers_everything_that_determines_the_bytes(
    moe: Path, cov: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The covariance of the entry, whatever the file's name; the damping; whether there is feedback, and its code."""
    reached = {path.name for path in keys._imported_modules("quantkit.kernels.cpu.feedback.rounding")}
    assert reached >= {"rounding.py", "sweeps.py", "tiles.py", "levels.py"}
    f16, q4_0 = BY_NAME["F16"], BY_NAME["Q4_0"]
    assert keys.encoder_digest(f16, q4_0, True) != keys.encoder_digest(f16, q4_0, False)
    cache, out = tmp_path / "cache", tmp_path / "o.gguf"

    def counts(cov: Path | None) -> tuple[int, int]:
        run = quantize(moe, out, "Q4_0", QuantizeOptions(feedback=cov), overwrite=True, cache=cache).run
        assert run.cache is not None
        return run.cache.hits, run.cache.stored

    assert counts(None) == (0, 11)
    assert counts(cov) == (4, 7)  # those without a covariance are the same
    changed_cov = write_covariances(
        tmp_path / "other.gguf", {"blk.0.attn_q.weight:": (5000,), "output.weight:": (5000,)}
    )
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(cov.read_bytes())
    assert counts(copy) == (11, 0)
    assert counts(changed_cov) == (10, 1)  # attn_q has the first that is drawn, as before
    monkeypatch.setattr(feedback, "DAMPING", 0.03)
    assert counts(cov)[1] == 6  # of embeddings nothing is damped
    monkeypatch.undo()
    assert counts(cov) == (11, 0)


def test_a_reference_file_of_higher_quality(moe: Path, cov: Path, tmp_path: Path) -> None:
    pattern, out = tmp_path / "p.gguf", tmp_path / "o.gguf"
    quantize(moe, pattern, "Q4_0", QuantizeOptions(tensor_type=("attn_q=Q5_0", "exps=Q4_1")))
    report = encode(moe, out, cov, "LIKE", options={"like": pattern})[1]
    assert {n: t for n, (t, _) in tensor_bytes(out).items()} == {n: t for n, (t, _) in tensor_bytes(pattern).items()}
    assert all(t.after < 0.9 * t.before for t in report.tensors if t.kind != "token_embd")


def test_embeddings(moe: Path, cov: Path, tmp_path: Path) -> None:
    """All columns count alike: the plain error is less. As the output they have its covariance, which is recorded."""
    out = tmp_path / "o.gguf"
    (embedding,) = (t for t in encode(moe, out, cov)[1].tensors if t.kind == "token_embd")
    assert embedding.uniform
    assert embedding.after < embedding.before
    with open_gguf(moe) as file:
        x = np.array(file.data("token_embd.weight").view(np.float16), np.float64)
    assert embedding.matrices[0].rows * 256 == x.size
    tied, recorded = write_zoo("gemma2-dense", tmp_path / "tied.gguf"), tmp_path / "tied-cov.gguf"
    text = np.random.default_rng(3).integers(0, 128, 600)
    covariance(tied, (), recorded, tokens=text, options=ImatrixOptions(n_ctx=64, process_output=True))
    (embedding,) = (t for t in encode(tied, out, recorded, options=SMALL)[1].tensors if t.kind == "token_embd")
    assert not embedding.uniform
    assert embedding.matrices[0].tokens == 576
    covariance(tied, (), tmp_path / "less.gguf", tokens=text, options=ImatrixOptions(n_ctx=64))
    (embedding,) = (
        t for t in encode(tied, out, tmp_path / "less.gguf", options=SMALL)[1].tensors if t.kind == "token_embd"
    )
    assert embedding.uniform


def test_inputs_pickle(moe: Path, cov: Path, tmp_path: Path) -> None:
    """To the nodes of a cluster: by the name of the file."""
    plan = plan_quantize(moe, tmp_path / "o.gguf", "Q4_0", QuantizeOptions(feedback=cov))
    tensors = pickle.loads(pickle.dumps(plan.tensors))
    pairs = [(t.parts[0].inputs, u.parts[0].inputs) for t, u in zip(plan.tensors, tensors, strict=True)]
    assert [(a and a.digest()) for a, _ in pairs] == [(b and b.digest()) for _, b in pairs]
    assert sum(a is not None for a, _ in pairs) == 7


def test_the_plot(moe: Path, cov: Path, tmp_path: Path) -> None:
    plot, out = tmp_path / "f.svg", tmp_path / "o.gguf"

    def run(*args: object) -> str:
        return CliRunner().invoke(cli, ["quantize", *map(str, args)]).output

    assert "wrote" in run("--feedback", cov, "--plot", plot, moe, out, "Q4_0")
    assert plot.read_bytes().startswith(b"<?xml")
    assert "QK-E202" in run("--plot", plot, moe, out, "Q4_0", "--overwrite")
    assert "plots are .svg" in run("--feedback", cov, "--plot", "f.txt", moe, out, "Q4_0", "--overwrite")


def test_unmatched_covariances_are_an_error(moe: Path, tmp_path: Path) -> None:
    cov = write_covariances(tmp_path / "c.gguf", {"blk.7.attn_q.weight:": (5000,)})
    with refuses(QuantkitError, "QK-E214 c.gguf"):
        encode(moe, tmp_path / "o.gguf", cov, options={"token_embedding_type": "F16"})
