"""The transformers class for the export of a GGUF file, and its tensor names.

The name map (``tensor_names``) has many names of one kind of tensor; of a class it is the first of those in its row,
else the first by ``_ORDER``.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.registry import ARCHITECTURES, CLASSES
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import AssignKind
from quantkit.checkpoint.tensor_names import KINDS, PATTERNS
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short

#: Names that most classes use, where there are several.
_USUAL = {
    "lm_head",
    "model.layers.*.self_attn.q_norm",
    "model.layers.*.self_attn.k_norm",
    *(f"model.layers.*.mlp.shared_experts.{w}_proj" for w in ("gate", "up", "down")),
}
_ORDER = ("model.layers.*.self_attn.", "model.layers.*.mlp.", "model.layers.*.", "model.", "lm_head")


def of_architecture(arch: object) -> list[str]:
    """Return the model classes of an architecture."""
    return [name for name, hf_class in CLASSES.items() if arch in (ARCHITECTURES[name].arch, *hf_class.archs)]


def find_class(meta: ModelMetadata, name: str | None = None) -> tuple[str, Architecture, HfClass]:
    """Return the model class of a file, its architecture and its HF names.

    Args:
        meta: the file's metadata.
        name: the requested class, if any.

    Raises:
        TypeNotSupported: no class of this architecture can be exported, or not to the one given.
    """
    classes = of_architecture(meta.arch)
    if name is not None and name not in classes:
        like = f"; choose one of {', '.join(classes)}" if classes else ""
        raise TypeNotSupported(f"{meta.path}: {short(meta.arch)} is not exported as {short(name)}{like}", "QK-E304")
    class_name = name or next((item for item in classes if _matches(CLASSES[item], meta)), None)
    if class_name is None and meta.get(".target_layers") is not None:
        raise TypeNotSupported(
            f"{meta.path}: {short(meta.arch)} is a draft model, which is not exported: export its target, and use the "
            "draft's checkpoint as it was released",
            "QK-E304",
        )
    if class_name is None:
        raise TypeNotSupported(
            f"{meta.path}: the architecture {short(meta.arch)} is not exported by this version; see `quantkit export "
            "--list`",
            "QK-E304",
        )
    if isinstance(meta.get(".expert_used_count"), list) and CLASSES[class_name].keys.get(".expert_used_count") != "":
        raise TypeNotSupported(
            f"{meta.path}: the number of experts per token differs between layers, which config.json of {class_name} "
            "cannot express",
            "QK-E305",
        )
    return class_name, replace(ARCHITECTURES[class_name], arch=meta.arch), CLASSES[class_name]


def _matches(hf_class: HfClass, meta: ModelMetadata) -> bool:
    return hf_class.matches is None or hf_class.matches(meta)


def tensor_names_of(row: Architecture, hf_class: HfClass) -> dict[str, str]:
    """Return the name in a checkpoint of each kind of tensor of an architecture, ``*`` for the layer.

    Those that the name map cannot distinguish have their suffix from the file.
    """
    own_names = hf_class.names.split()
    kinds = {f"{rule.kind}{rule.suffix}": rule.name for rule in row.rules if isinstance(rule, AssignKind)}
    for kind in KINDS[row.arch].split():
        names = PATTERNS.get(kind, "").split()
        if names:
            kinds[kind.partition(":")[0]] = min(names, key=lambda name: _rank(name, own_names))
    return kinds | hf_class.kinds


def _rank(name: str, own_names: list[str]) -> tuple[bool, bool, int]:
    order = next((i for i, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER))
    return name not in own_names, name not in _USUAL, order
