"""Text models of those that also see: Chameleon, Janus, Muse Glimmer, Hunyuan-VL, DeepSeek-OCR.

Facts of llama.cpp b11434, conversion/chameleon.py, conversion/januspro.py, conversion/muse_glimmer.py,
conversion/hunyuan.py, conversion/deepseek.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Constant, Expression, taken
from quantkit.checkpoint.families import hunyuan
from quantkit.checkpoint.keys import Keys, set_base_keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Dropped, Tensor, plus_one
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

# --- Chameleon -------------------------------------------------------------------------------------------------------


#: More than any model has; each takes memory.
_MOST_HEADS = 1 << 16


@dataclass(frozen=True)
class FirstHead:
    """A norm of heads is that of the first, its halves in turns, once for each of ``heads``."""

    heads: str

    def back(self) -> Callable[[Tensor, Context], Expression]:
        """Return what puts the halves of all heads one behind the other again."""
        return _halves_behind

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        width = tensor.x.shape[1]
        pairs = [range(i, width, width // 2) for i in range(width // 2)]
        heads = context.config.number(self.heads, "num_attention_heads")
        if heads > _MOST_HEADS:
            raise ValueError(f"it is of {heads} heads")
        first = (range(1),) * heads
        return taken(taken(tensor.x, 1, *pairs), 0, *first)


def _halves_behind(tensor: Tensor, context: Context) -> Expression:
    width = tensor.x.shape[1]
    return taken(tensor.x, 1, range(0, width, 2), range(1, width, 2))


CHAMELEON_RULES = (
    Changed(r"q_norm\.(weight|bias)$", FirstHead("num_attention_heads")),
    Changed(r"k_norm\.(weight|bias)$", FirstHead("num_key_value_heads")),
)
CHAMELEON_STORED = (Dropped(r"^model\.vqmodel"),)


def set_swin_norm(keys: Keys, config: Config) -> None:
    """Say whether norms are behind attention and feed forward."""
    keys.flag(".swin_norm", config.get("swin_norm", False))


# --- Janus -----------------------------------------------------------------------------------------------------------

JANUS_PARTS = Dropped(
    r"^model\.(vision_model|aligner|vqmodel|generation_(embeddings|aligner|head))\.",
)

# --- Muse Glimmer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledQueries:
    """Queries and keys are normed without weights, queries scaled: weights of norms that do that come before them."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        stem, found, rest = tensor.name.partition(".self_attn.q_proj.")
        if not found or rest != "weight" or tensor.layer is None:
            return None
        config, rows = context.config, tensor.x.shape[0]
        width, scale = config.number("head_dim"), float(config["qk_scale_factor"])
        if width < 1 or rows % width:
            raise FormatError(f"{config.path}: head_dim is {short(width)}, of {rows} rows of {tensor.name}")
        norms = (("q", scale), ("k", 1.0))
        return (
            *(
                replace(tensor, name=f"{stem}.self_attn.{of}_norm.weight", x=Constant((value,) * width))
                for of, value in norms
            ),
            tensor,
        )


MUSE_RULES = (Changed(r"layernorm\.weight$", plus_one), ScaledQueries())


def _set_muse_windows(keys: Keys, config: Config) -> None:
    keys.u32(".attention.sliding_window", config["sliding_window"])
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    keys.array(".attention.sliding_window_pattern", slides)


MUSE_KEYS: tuple[SetKeys, ...] = (
    Copied(".final_logit_softcapping", "final_logit_softcapping", "f32", needed=True),
    Copied(".logit_scale", "output_multiplier", "f32", needed=True),
    _set_muse_windows,
)

# --- Hunyuan-VL ------------------------------------------------------------------------------------------------------


def name_rope(config: Config) -> None:
    """Call rope of sections what it is: newer configurations call it dynamic (HunyuanVLTextModel)."""
    rope = config.rope
    if rope.get("rope_type") == "dynamic" and "mrope_section" in rope:
        rope |= {"rope_type": "xdrope", "xdrope_section": rope["mrope_section"]}


def _set_sections(keys: Keys, config: Config) -> None:
    rope = config.rope
    if rope.get("rope_type") != "xdrope":
        return
    sections, length = rope.get("xdrope_section"), config.number("max_position_embeddings")
    if not isinstance(sections, list):
        raise FormatError(f"{config.path}: xdrope_section of rope is {short(sections)}, not a list")
    keys.f32(".rope.freq_base", float(rope["rope_theta"]))
    keys.text(".rope.scaling.type", "none")
    keys.f32(".rope.scaling.factor", float(rope.get("factor", 1)))
    keys.f32(".rope.scaling.alpha", float(rope["alpha"]))
    keys.u32(".rope.scaling.original_context_length", length)
    keys.u32(".context_length", length)
    keys.array(".rope.dimension_sections", sections)


HUNYUAN_KEYS: tuple[SetKeys, ...] = (*hunyuan.DENSE_KEYS, _set_sections)

# --- DeepSeek-OCR ----------------------------------------------------------------------------------------------------

_OCR = ("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM", "UnlimitedOCRForCausalLM")


def reads_text(config: Config) -> bool:
    """Tell whether a DeepSeek model is part of one that reads pictures of text."""
    found = config.outer.get("architectures") or [None]
    return found[0] in _OCR


def set_ocr_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """The base keys, with an epsilon that the configuration may lack."""
    changed = config.with_values({"rms_norm_eps": config.get("rms_norm_eps", 1e-6)})
    set_base_keys(keys, changed, layers, file_type)


#: Unless the tokenizer has one.
OCR_TEMPLATE = Always("tokenizer.chat_template", "{% for m in messages %}{{m['content']}}{% endfor %}", "text")
