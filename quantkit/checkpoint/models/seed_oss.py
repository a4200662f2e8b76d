"""Seed-OSS."""

from __future__ import annotations

from quantkit.checkpoint.row import Architecture, HfClass

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "SeedOssForCausalLM": Architecture("seed_oss"),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "SeedOssForCausalLM": HfClass("seed_oss"),
}
