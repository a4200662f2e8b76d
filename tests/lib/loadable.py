"""Checkpoints of the table with the sizes and counts that transformers' class of the whole computes or requires."""

from __future__ import annotations

from dataclasses import replace

import checkpoints

#: Sizes of Step's encoder that are not those of the release: for ``quantkit.checkpoint.models.step._STEP_SIZES``.
STEP_SIZES = (2, 16, 64, 3)


def describe_loadable(name: str) -> checkpoints.Description:
    """Return the description of a checkpoint that transformers can load, if it has its class."""
    description = checkpoints.describe(name)
    config, tensors = dict(description.config), dict(description.tensors)
    if name == "mm-granite4-vision":  # four areas of an image; layers counted from the last, one or more a projector
        config |= {"deepstack_layer_map": [[-4, 1], [-1, 0]], "spatial_target_layers": [2, 3, 4, 5]}
        config |= {part: config[part] | {"num_hidden_layers": 6} for part in ("text_config", "vision_config")}
        tensors = {entry.replace(".layers.{0-3}", ".layers.{0-5}"): x for entry, x in tensors.items()}
        both = "{layerwise_projectors|spatial_projectors}.{0-1}"
        for entry in [entry for entry in tensors if both in entry]:
            shape = tensors.pop(entry)
            for projectors in ("layerwise_projectors.{0-1}", "spatial_projectors.{0-3}"):
                tensors[entry.replace(both, projectors)] = shape
        tensors.pop("lm_head.weight")  # tied
    if name == "mm-qwen2-vl-model":  # transformers 5 requires an integer
        config["vision_config"] = config["vision_config"] | {"mlp_ratio": 2}
        tensors = {entry: [96 if n == 80 else n for n in shape] for entry, shape in tensors.items()}
    if name.startswith("mm-minicpm-v4.6"):  # a merger four times as wide as a layer
        width = 4 * config["vision_config"]["intermediate_size"]
        merger = "model.vision_tower.vit_merger."
        tensors.pop("model.vision_tower.{vit_merger.pre_norm|vit_merger.linear_1}.bias")
        tensors |= {f"{merger}pre_norm.bias": [256], f"{merger}linear_1.bias": [width]}
        tensors |= {f"{merger}linear_1.weight": [width, 256], f"{merger}linear_2.weight": [64, width]}
    if name.startswith("mm-step3"):
        _, side, width, layers = STEP_SIZES
        sizes = {"image_size": side, "patch_size": 4, "width": width, "layers": layers, "heads": 4, "mlp_ratio": 1.5}
        config["vision_config"] = config["vision_config"] | sizes
    return replace(description, config=config, tensors=tensors)
