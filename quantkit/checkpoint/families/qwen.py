"""Qwen 2, 3 and their mixtures of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Config, read_json
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Experts, Renamed, Split, transposed
from quantkit.errors import FormatError
from quantkit.formats.outputs import read_text

#: Experts that are stored as one tensor already; gate and up in one.
FUSED_EXPERTS = (
    Renamed(r"(mlp\.experts\.down_proj)$", r"\1.weight"),
    Split(
        r"mlp\.experts\.gate_up_proj(\.weight)?$", ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"), -2
    ),
)
#: Experts of Qwen and those like it: each on its own, or all in one.
QWEN_EXPERTS = (*FUSED_EXPERTS, Experts())

#: Those of Qwen3-VL are stored the other way round: [expert, in, out].
VL_EXPERTS = (Changed(r"mlp\.experts\.(down_proj|gate_up_proj)(\.weight)?$", transposed), *QWEN_EXPERTS)
#: Models that are saved without their head have names without what wraps the rest.
BARE = (Renamed(r"^", "model."),)
#: The names of Qwen 3 Omni's text model begin with it.
UNWRAPPED = (Renamed(r"thinker\.", ""),)

EXPERT_WIDTHS = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size", "count"),
    Copied(".expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)

#: GroveMoE: experts of Qwen 3 in pairs, each pair with a narrow one of its own. Constants of its modeling file.
GROVE_KEYS: tuple[SetKeys, ...] = (
    lambda keys, config: keys.u32(".expert_chunk_feed_forward_length", config.get("head_dim") or 128),
    Always(".experts_per_group", 2),
    Always(".expert_group_scale", 0.05, "f32"),
)

#: The layers whose outputs Qwen3-VL's vision tower adds to the text model, unless the configuration names them.
_DEEPSTACK = (8, 16, 24)


def set_deepstack(keys: Keys, config: Config) -> None:
    """How many outputs of the vision tower the first layers add."""
    vision = config.get("vision_config") or {}
    layers = vision.get("deepstack_visual_indexes", _DEEPSTACK) if isinstance(vision, dict) else None
    if not isinstance(layers, (list, tuple)):
        raise FormatError(f"{config.path}: vision_config does not list the layers of deepstack_visual_indexes")
    keys.u32(".n_deepstack_layers", len(layers))


def _listed(path: Path) -> list[Any]:
    try:
        found = json.loads(read_text(path).decode())
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: not JSON: {e}") from None
    return found if isinstance(found, list) else []


_POOLING = {"mean": 1, "cls": 2, "lasttoken": 3}


def set_pooling(keys: Keys, config: Config) -> None:
    """How tokens become one embedding, where the model is made for that (TextModel._try_set_pooling_type)."""
    folder = config.path.parent
    modules = folder / "modules.json"
    listed = _listed(modules) if modules.is_file() else []
    pools = (m for m in listed if isinstance(m, dict) and str(m.get("type", "")).endswith("Pooling"))
    module = next(pools, None)
    if module is not None:
        path = folder / str(module.get("path", "")) / "config.json"
        pooling = read_json(path)
        chosen = (
            k
            for name, k in (("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "lasttoken"))
            if pooling.get(f"pooling_mode_{name}")
        )
        found = next(chosen, pooling.get("pooling_mode"))
        if found not in _POOLING:
            raise FormatError(f"{path}: only the pooling of {', '.join(_POOLING)} is known")
        keys.u32(".pooling_type", _POOLING[found])
    if (classifier := config.get("classifier_pooling")) is not None:
        if classifier not in ("cls", "mean"):
            raise FormatError(f"{config.path}: classifier_pooling is {classifier!r}; known are cls and mean")
        keys.u32(".classifier.pooling_type", _POOLING[classifier])
