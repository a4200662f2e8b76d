"""Write quantkit/checkpoint/class_defaults.json: defaults of transformers' configuration classes, by model type.

    scripts/make_class_defaults.py [OUT] [--add MODEL_TYPE]

Needs ``pip install transformers==4.57.6``, the version that llama.cpp b11434 pins. The file has the keys that
convert_hf_to_gguf.py reads: existing model types keep their keys, those of ``--add`` get every key of any type. A value
is the default of a parameter of ``__init__``; values that a class computes from others are in class_defaults.py.
"""

from __future__ import annotations

import argparse
import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "quantkit/checkpoint/class_defaults.json"
VERSION = "4.57.6"
#: Classes that AutoConfig does not list: parts of others.
PARTS = {
    "qwen3_omni_moe_text": "qwen3_omni_moe.configuration_qwen3_omni_moe.Qwen3OmniMoeTextConfig",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe.configuration_qwen3_omni_moe.Qwen3OmniMoeThinkerConfig",
}
#: Values that ``__init__`` sets instead of a default of None.
COMPUTED: dict[str, dict[str, Any]] = {
    **{kind: {"num_decoder_layers": lambda config: config.num_layers} for kind in ("t5", "mt5", "umt5")},
    "mpt": {"attn_config": lambda config: {}},
}


def class_of(kind: str) -> Any:
    """Return the configuration class of a model type."""
    if kind in PARTS:
        module, _, name = PARTS[kind].rpartition(".")
        return getattr(import_module(f"transformers.models.{module}"), name)
    return import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING[kind]


def parameters(cls: Any) -> dict[str, Any]:
    """Return the defaults of a class and of its sub-configurations."""
    values: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" in base.__dict__:
            signature_parameters = inspect.signature(base.__init__).parameters.values()
            values = {
                p.name: p.default for p in signature_parameters if p.default is not inspect.Parameter.empty
            } | values
    return values


def defaults(kind: str, keys: list[str] | None, keys_of_all: list[str]) -> dict[str, Any]:
    """Return the defaults of a model type; without ``keys``, of those ``keys_of_all`` that it has."""
    cls = class_of(kind)
    class_parameters = parameters(cls)
    values = {
        key: class_parameters.get(key)
        for key in (keys_of_all if keys is None else keys)
        if keys is not None or key in class_parameters
    }
    return values | {key: compute(cls()) for key, compute in COMPUTED.get(kind, {}).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=TARGET, metavar="OUT")
    parser.add_argument("--add", action="append", default=[], metavar="MODEL_TYPE")
    arguments = parser.parse_args()
    version = import_module("transformers").__version__
    if version != VERSION:
        parser.error(f"transformers {version}: {VERSION} is needed")
    current = json.loads(TARGET.read_text())
    all_keys = sorted({key for values in current.values() for key in values})
    rows = {kind: defaults(kind, list(values), all_keys) for kind, values in current.items()}
    rows |= {kind: defaults(kind, None, all_keys) for kind in arguments.add}
    lines = (f"{json.dumps(kind)}: {json.dumps(rows[kind])}" for kind in sorted(rows))
    arguments.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
