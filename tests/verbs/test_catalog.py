"""``types`` and ``presets``: the tables of `quantkit types`, as records."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from refusals import refuses

import quantkit
from quantkit.cli import cli
from quantkit.errors import RecipeError
from quantkit.kernels.formats import has_encoder
from quantkit.pipeline.quality import QUALITY
from quantkit.types import TYPES


def test_all_types_with_their_figures() -> None:
    catalog = quantkit.types()
    assert [row.type for row in catalog] == list(TYPES)
    for row in catalog:
        assert row.encoder == has_encoder(row.type)
        quality = QUALITY.get(row.type.name)
        assert (row.error, row.speed) == ((None, None) if quality is None else quality)


@pytest.mark.parametrize("tree", ["mainline", "ik"])
def test_types_of_a_project(tree: str) -> None:
    catalog = quantkit.types(tree)
    assert 0 < len(catalog) < len(TYPES)
    assert quantkit.types({"mainline": "llama.cpp", "ik": "ik_llama.cpp"}[tree]) == catalog
    assert all(row.type.trees in (tree, "both") for row in catalog)
    assert {p.trees for p in quantkit.presets(tree)} == {tree, "both"}
    assert set(quantkit.presets(tree)) < set(quantkit.presets())


def test_the_command_prints_them() -> None:
    result = CliRunner().invoke(cli, ["types", "--tree", "ik", "--presets", "--json"])
    printed = json.loads(result.stdout)
    assert printed["types"] == [row.as_dict() for row in quantkit.types("ik")]
    assert [p["name"] for p in printed["presets"]] == [p.name for p in quantkit.presets("ik")]


@pytest.mark.parametrize("function", [quantkit.types, quantkit.presets])
def test_an_unknown_project_is_refused(function: object) -> None:
    with refuses(RecipeError, "QK-E203", "oak"):
        function("oak")  # type: ignore[operator]
