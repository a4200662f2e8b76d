"""Arguments from Python: unknown names are refused, with a suggestion; values get the types that they are used as."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses

import quantkit
from quantkit.arguments import Options, accept
from quantkit.errors import ArgumentError, QuantkitError
from quantkit.evaluate import SaveLogits
from quantkit.types import BY_NAME
from small_models import write_model

ROOT = Path(__file__).parents[2]
Q4_K = BY_NAME["Q4_K"]
PUBLIC = [getattr(quantkit, name) for name in quantkit.__all__ if name != "__version__"]
VERBS = [value for value in PUBLIC if inspect.isfunction(value)]
OPTIONS = [value for value in PUBLIC if inspect.isclass(value) and issubclass(value, Options)]


def needs(verb: Any) -> dict[str, Any]:
    """Return a value for each argument that a verb must have: files that are not there, nothing of what is several."""
    return {
        p.name: {} if "Mapping" in str(p.annotation) else () if _SEVERAL.match(str(p.annotation)) else "nowhere.gguf"
        for p in inspect.signature(verb).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_every_verb_refuses_unknown_names(verb: Any) -> None:
    with pytest.raises(TypeError, match="no_such_name"):
        verb(**needs(verb), no_such_name=1)


@pytest.mark.parametrize(
    ("verb", "name", "parameter", "record"),
    [
        ("quantize", "pure", "options", "QuantizeOptions"),
        ("convert", "pure", "quantize", "QuantizeOptions"),
        ("convert", "vocab_only", "options", "ConvertOptions"),
        ("imatrix", "n_ctx", "options", "ImatrixOptions"),
    ],
)
def test_a_field_of_an_option_record_is_recognized(verb: str, name: str, parameter: str, record: str) -> None:
    function = getattr(quantkit, verb)
    with refuses(ArgumentError, "QK-E210", name, f"{parameter}={record}({name}="):
        function(**needs(function), **{name: True})


@pytest.mark.parametrize(
    ("verb", "name", "suggestion"),
    [
        ("quantize", "backened", "backend"),
        ("quantize", "thread", "threads"),
        ("quantize", "measure_eror", "measure_error"),
        ("convert", "backened", "backend"),
        ("convert_lora", "overwrit", "overwrite"),
        ("merge_up_gate", "thread", "threads"),
        ("split_up_gate", "max_ra", "max_ram"),
        ("perplexity", "kv_typ", "kv_type"),
        ("imatrix", "n_ubatc", "n_ubatch"),
        ("load", "kv_typ", "kv_type"),
    ],
)
def test_a_similar_name_is_suggested(verb: str, name: str, suggestion: str) -> None:
    function = getattr(quantkit, verb)
    with refuses(ArgumentError, "QK-E210", suggestion) as caught:
        function(**needs(function), **{name: 1})
    assert isinstance(caught.value, QuantkitError)
    assert caught.value.exit_code == 2


_SEVERAL = re.compile(r"(Sequence|Iterable|tuple|Collection)\[")
SEQUENCES = [
    (verb, p.name)
    for verb in VERBS
    for p in inspect.signature(verb).parameters.values()
    if _SEVERAL.match(str(p.annotation))
]


@pytest.mark.parametrize(("verb", "name"), SEQUENCES, ids=lambda value: getattr(value, "__name__", value))
def test_verbs_refuse_a_string_as_a_sequence(verb: Any, name: str) -> None:
    with refuses(ArgumentError, "QK-E210 a.txt", name):
        verb(**{**needs(verb), name: "a.txt"})


FIELDS = [(kind, f.name, str(f.type)) for kind in OPTIONS for f in kind.__dataclass_fields__.values()]


@pytest.mark.parametrize(
    ("kind", "name"), [(k, n) for k, n, t in FIELDS if t.startswith("tuple[")], ids=lambda value: str(value)
)
def test_options_refuse_a_string_as_a_sequence(kind: Any, name: str) -> None:
    with refuses(ArgumentError, "QK-E210", name):
        kind(**{name: "Q4_K"})


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, n, t in FIELDS if t == "Path | None"])
def test_options_accept_text_as_a_path(kind: Any, name: str) -> None:
    assert getattr(kind(**{name: "x.gguf"}), name) == Path("x.gguf")
    with refuses(ArgumentError, "QK-E210", name):
        kind(**{name: 3})


def test_options_accept_types_and_any_sequence() -> None:
    options = quantkit.QuantizeOptions(ffn_down_type=Q4_K, recipe=["a.recipe", Path("b")], calibrate=["t.txt"])  # type: ignore[arg-type]
    assert (options.ffn_down_type, options.recipe) == ("Q4_K", (Path("a.recipe"), Path("b")))
    assert options.calibrate == (Path("t.txt"),)
    assert quantkit.SensitivityOptions(types=[Q4_K, "Q6_K"]).types == ("Q4_K", "Q6_K")  # type: ignore[arg-type]
    assert quantkit.SearchOptions(types=(Q4_K,)).types == ("Q4_K",)  # type: ignore[arg-type]
    assert quantkit.ReportOptions(bench=[8, 8, 1]).bench == (8, 8, 1)  # type: ignore[arg-type]
    assert quantkit.ReportOptions().bench == ()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (quantkit.QuantizeOptions, {"pure": "yes"}),
        (quantkit.QuantizeOptions, {"calibrate_ctx": "512"}),
        (quantkit.QuantizeOptions, {"prune_layers": ["1"]}),
        (quantkit.SearchOptions, {"speeds": ["Q4_K"]}),
        (quantkit.SearchOptions, {"target_bpw": "4"}),
        (quantkit.ReportOptions, {"load": {"thread": 2}}),
        (quantkit.ImatrixOptions, {"n_ctx": True}),
        (SaveLogits, {"path": None}),
    ],
)
def test_values_of_another_type_are_refused(kind: Any, arguments: dict[str, Any]) -> None:
    with refuses(ArgumentError, "QK-E210", *arguments):
        kind(**arguments)


def test_numpy_numbers_are_accepted() -> None:
    options = quantkit.SearchOptions(target_size=np.int64(7), target_bpw=np.float32(4.5), merge_up_gate=np.True_)  # type: ignore[arg-type]
    assert (options.target_size, options.target_bpw, options.merge_up_gate) == (7, 4.5, True)
    assert type(options.target_size) is int


def test_annotations_for_type_checkers_are_ignored() -> None:
    anything = object()
    assert accept(anything, Any, "x") is anything


def test_a_type_is_a_valid_target(tmp_path: Path) -> None:
    source = write_model(tmp_path / "s.gguf", {"blk.0.ffn_up.weight": ((256, 8), "F16")})
    by_name = quantkit.plan_quantize(source, tmp_path / "o.gguf", "Q4_K")
    by_type = quantkit.plan_quantize(source, tmp_path / "o.gguf", Q4_K)
    assert [t.type for t in by_type.tensors] == [t.type for t in by_name.tensors] == [Q4_K]
    assert quantkit.quantize(source, tmp_path / "o.gguf", Q4_K, threads=1).plan.title == by_name.title


def test_a_loaded_model_refuses_load_options(data: Path) -> None:
    with quantkit.load(data / "tiny-moe-bf16.gguf", threads=1) as model:
        with refuses(ArgumentError, "QK-E210 kv_type"):
            quantkit.perplexity(model, "a text", n_ctx=8, kv_type="q8_0")
        with refuses(ArgumentError, "QK-E210 tiny-moe-bf16.gguf quantkit.load"):
            quantkit.logits(model, "a text", mmap=False)


def test_the_readme_example_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "example.py").write_text(example)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "example.py")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
