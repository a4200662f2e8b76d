"""Tables of loaders: every row compiles, and no value of metadata makes following one fail or last."""

from __future__ import annotations

import pytest

import zoo
from quantkit.formats.gguf import Field, ValueType, open_gguf
from quantkit.loaders import Problem, ProblemKind, architectures, describe, load
from quantkit.loaders.table import FILES, section, table

#: Values that no sound file has.
HOSTILE = (0, 1, 3, 7, 513, 2**32 - 1)


@pytest.mark.parametrize("runtime", FILES)
def test_every_row_compiles(runtime: str) -> None:
    rows = table(runtime)
    assert len(architectures(runtime)) > 80
    for name in rows.lines:
        assert section(runtime, name).tensors or name == "common" or (name, runtime) == ("scales", "ik_llama.cpp")


@pytest.mark.parametrize("name", zoo.NAMES)
def test_no_value_crashes_a_loader(name: str) -> None:
    """Each number of the architecture in turn is another: the verdict is a verdict, and not everything loads."""
    with open_gguf(zoo.ZOO / "headers" / f"{name}.head", header_only=True) as file:
        shapes = {t.name: t.shape for t in file.tensors.values()}
        arch = str(file.get("general.architecture"))
        numbers = [f.key for f in file.fields.values() if f.key.startswith(arch) and f.type is ValueType.UINT32]
        for runtime in FILES:
            verdicts = [
                load(runtime, {**file.fields, key: Field.of(key, value, ValueType.UINT32)}, shapes)
                for key in numbers
                for value in HOSTILE
            ]
            if arch in table(runtime).architectures:
                assert any(verdicts)
            else:
                assert not any(verdicts)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_whole_models_load_in_llama_cpp(name: str) -> None:
    with open_gguf(zoo.ZOO / "headers" / f"{name}.head", header_only=True) as file:
        shapes = {t.name: t.shape for t in file.tensors.values()}
        assert load("llama.cpp", file.fields, shapes) == ()
        less = [{n: shape for n, shape in shapes.items() if n != name} for name in shapes]
        refused = sum(bool(load("llama.cpp", file.fields, remaining_tensors)) for remaining_tensors in less)
        assert refused > len(shapes) // 8  # the others are optional, scales above all
        extra = load("llama.cpp", file.fields, {**shapes, "surplus.weight": (4,)})
        assert extra == (Problem(ProblemKind.UNKNOWN, "surplus.weight"),)


def test_problems_are_counted() -> None:
    problems = [Problem(ProblemKind.MISSING, f"blk.{i}.ffn_up.weight") for i in range(3)]
    problems.append(Problem(ProblemKind.SHAPE, "output.weight", "has shape [1], not [2]"))
    assert describe(problems) == (
        "no tensor blk.0.ffn_up.weight (and 2 more)",
        "output.weight has shape [1], not [2]",
    )
