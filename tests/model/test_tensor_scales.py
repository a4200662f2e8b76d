"""Which weights have a ``.scale`` by which llama.cpp multiplies: the table, beside the graph that is equal to it."""

from __future__ import annotations

from pathlib import Path

import pytest

import zoo
from quantkit.formats.gguf import TensorInfo, open_model
from quantkit.model.arch import arch_by_name
from quantkit.model.builder import kind_of, layer_of
from quantkit.model.graph import build_graph
from quantkit.model.ops import MulMat, MulMatId, MultiplyBy
from quantkit.types import BY_NAME

HEADS = sorted(path.stem for path in (zoo.ZOO / "headers").glob("*.head"))


@pytest.mark.parametrize("name", HEADS)
def test_the_graph_multiplies_by_every_scale_of_the_table(name: str, tmp_path: Path) -> None:
    """A scale that the table has, but the graph does not multiply by, would make a weight wrong by its factor."""
    source = open_model(zoo.write_hollow_zoo(name, tmp_path / "model.gguf"))
    arch = arch_by_name(str(source.get("general.architecture")))
    layers = int(source.get(f"{arch.name}.block_count")) - int(source.get(f"{arch.name}.nextn_predict_layers", 0))
    scales = dict[str, TensorInfo]()
    for tensor in list(source.tensors.values()):
        stem = tensor.name.removesuffix(".weight")
        in_graph = (layer_of(stem) or 0) < layers and not tensor.name.startswith("enc.")
        if tensor.name.endswith(".weight") and in_graph and arch.has_scale(kind_of(stem)):
            shape = (tensor.shape[2],) if stem.endswith("_exps") else (1,)
            scales[f"{stem}.scale"] = TensorInfo(f"{stem}.scale", shape, BY_NAME["F32"], 4 * shape[0], 0, 0)
    source.tensors.update(scales)
    used = set[str]()
    for op in build_graph(source).ops:
        if isinstance(op, MulMat | MulMatId) and op.scale is not None:
            used.add(op.scale.tensor.name)
        if isinstance(op, MultiplyBy):
            used.add(op.vector.tensor.name)
    assert not set(scales) - used
