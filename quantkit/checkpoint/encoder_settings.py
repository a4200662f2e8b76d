"""Settings of vision encoders that no GGUF key represents: clip.cpp has one value for each projector.

Source: llama.cpp b11434 tools/mtmd/clip.cpp (load_hparams, set_input) and tools/mtmd/models/*.cpp.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.config import Config
from quantkit.formats.gguf.rules import short


@dataclass(frozen=True)
class EncoderSetting:
    """A setting in ``vision_config``, and the value that clip.cpp assumes for some projector types."""

    name: str
    value: float
    projectors: frozenset[str]

    def read(self, vision: Config) -> Any:
        """Return the value of a checkpoint; None if it has none."""
        rope = vision.get("rope_parameters")
        nested = rope.get(self.name) if isinstance(rope, dict) else None
        return vision.get(self.name, nested)


#: Projectors whose rope has the base 10000.
_ROPE_10000 = frozenset({
    *("deepseek4v", "dots3note_v", "dots_ocr", "exaone4_5", "glm4v", "glm5v", "kimik25", "kimivl", "lightonocr"),
    *("ling3vl", "llama4", "mimovl", "minimax_m3", "muse-glimmer", "paddleocr", "pixtral", "qwen2.5vl_merger"),
    *("qwen2vl_merger", "qwen3vl_merger", "step3vl", "youtuvl"),
})  # fmt: skip
SETTINGS = (
    EncoderSetting("rope_theta", 10000, _ROPE_10000),
    EncoderSetting("rope_theta", 100, frozenset({"gemma4uv", "gemma4v"})),
    EncoderSetting("rope_theta", 1000000, frozenset({"deepseekocr2"})),
    EncoderSetting("pooling_kernel_size", 3, frozenset({"gemma4uv", "gemma4v"})),
    EncoderSetting("window_size", 112, frozenset({"exaone4_5", "qwen2.5vl_merger"})),
)


def unsupported_encoder_settings(vision: Config, projectors: Collection[str]) -> list[str]:
    """Return a sentence for each setting of a vision encoder whose value clip.cpp does not use."""
    return [
        f"{vision.path}: vision_config has {setting.name} {short(value)}: llama.cpp uses {setting.value:g}"
        for setting in SETTINGS
        if not setting.projectors.isdisjoint(projectors)
        and (value := setting.read(vision)) is not None
        and value != setting.value
    ]
