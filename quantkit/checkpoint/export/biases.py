"""Biases of the modules of transformers' classes, and the switches of config.json for them.

A file may have a bias for any weight, and llama.cpp adds it. transformers ignores biases that the class does not
create, and the model gives other results. Facts of transformers 4.57.6, of 5.18.0 where that lacks the class
(models/*/modeling_*.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from quantkit.checkpoint.config import Json
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short

#: Model class -> switch -> names of modules that have a bias if it is true; "": with any config.json. transformers has
#: no code for other classes, only their own repositories. scripts/record_biases.py writes this table.
BIASES: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "biases.json").read_bytes())


def set_biases(config: Json, architecture: str, tensors: Iterable[str], where: str) -> None:
    """Set the switches of a class' biases by the tensors that a checkpoint has.

    Args:
        config: config.json of the text model, which is modified.
        architecture: the class of transformers.
        tensors: their names in the checkpoint.
        where: the exported file, for messages.

    Raises:
        TypeNotSupported: the class has no such bias with any config.json.
    """
    modules = {name.removesuffix(".bias").rpartition(".")[2]: name for name in tensors if name.endswith(".bias")}
    biases = BIASES.get(architecture)
    if biases is None:
        return
    modules_with_bias = {module for names in biases.values() for module in names.split()}
    for module, name in modules.items():
        if module not in modules_with_bias:
            raise TypeNotSupported(
                f"{where}: {architecture} has no bias for {module}, so transformers would ignore {short(name)}: the "
                "checkpoint would give other results",
                "QK-E305",
            )
    config |= {switch: any(m in modules for m in names.split()) for switch, names in biases.items() if switch}
