"""How classes of transformers spell what a file of their architecture says: the part of a row that only the way back
needs.

The name map (``tensor_names``) knows many names of one kind of tensor; of a class it is the first of those in its row
here, else the first by ``_ORDER``. Facts of transformers 4.57.6 (models/*/modeling_*.py, configuration_*.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.architectures import ROWS
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensor_names import KINDS, PATTERNS
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import GGUFFile

Json = dict[str, Any]


def _always(model: GGUFFile) -> bool:
    return True


@dataclass(frozen=True)
class Spelling:
    """A class: its model_type, and what is particular about it."""

    model_type: str
    #: Names of tensors, where the usual ones are not this class's.
    names: str = ""
    #: Values of config.json that no file has: what runtimes compute anyway.
    always: Json = field(default_factory=dict)
    #: Flags of config.json that say whether there are biases.
    biases: tuple[str, ...] = ()
    #: Experts, or projections, are one tensor where others have several.
    fused: bool = False
    #: Changes to names at the very end: regular expression, replacement.
    renamed: tuple[tuple[str, str], ...] = ()
    #: Tells whether a file of the architecture is one of this class, if there are several; the first is taken.
    when: Callable[[GGUFFile], bool] = _always


#: Names that most classes use, where there are several.
_USUAL = {
    *("lm_head", "model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"),
    *(f"model.layers.*.mlp.shared_experts.{w}_proj" for w in ("gate", "up", "down")),
}
_ORDER = ("model.layers.*.self_attn.", "model.layers.*.mlp.", "model.layers.*.", "model.", "lm_head")
_QWEN2_SHARED = " ".join(f"model.layers.*.mlp.shared_expert.{w}_proj" for w in ("gate", "up", "down"))


def _has(key: str) -> Callable[[GGUFFile], bool]:
    return lambda model: bool(model.get(f"{model.get('general.architecture')}.{key}"))


def _no_key_length(model: GGUFFile) -> bool:
    """Tell a file that Mistral's configuration, with head_dim null, becomes."""
    return "llama.attention.key_length" not in model.fields and "rope_freqs.weight" not in model.tensors


#: Class of transformers -> how it spells; of an architecture's classes the first that fits is taken.
SPELLINGS: dict[str, Spelling] = {
    "MixtralForCausalLM": Spelling(
        "mixtral",
        "model.layers.*.block_sparse_moe.gate layers.*.feed_forward.experts.w1 layers.*.feed_forward.experts.w2 "
        "layers.*.feed_forward.experts.w3",
        always={"sliding_window": None},
        when=_has("expert_count"),
    ),
    "MistralForCausalLM": Spelling("mistral", always={"sliding_window": None}, when=_no_key_length),
    "LlamaForCausalLM": Spelling("llama", biases=("attention_bias", "mlp_bias")),
    "Qwen2ForCausalLM": Spelling("qwen2"),
    "Qwen3ForCausalLM": Spelling("qwen3", biases=("attention_bias",)),
    "Qwen2MoeForCausalLM": Spelling("qwen2_moe", _QWEN2_SHARED, always={"norm_topk_prob": False}),
    "SmolLM3ForCausalLM": Spelling("smollm3", always={"sliding_window": None}, biases=("attention_bias", "mlp_bias")),
    "SeedOssForCausalLM": Spelling("seed_oss", biases=("attention_bias",)),
    "OlmoeForCausalLM": Spelling("olmoe", always={"norm_topk_prob": False}),
    "Olmo2ForCausalLM": Spelling("olmo2"),
    "GraniteForCausalLM": Spelling("granite", biases=("attention_bias", "mlp_bias")),
    "Dots1ForCausalLM": Spelling("dots1"),
    "Starcoder2ForCausalLM": Spelling("starcoder2", "model.layers.*.mlp.c_fc model.layers.*.mlp.c_proj"),
    "Qwen3MoeForCausalLM": Spelling("qwen3_moe", always={"norm_topk_prob": True}, biases=("attention_bias",)),
}


def find_class(model: GGUFFile, name: str | None = None) -> tuple[str, Architecture, Spelling]:
    """Return the class of a file, its row and how it spells.

    Args:
        model: the file.
        name: the class, if it was given.

    Raises:
        TypeNotSupported: no class of this architecture can be exported, or not to the one given.
    """
    arch = model.get("general.architecture")
    of_arch = [each for each in SPELLINGS if each in ROWS and ROWS[each].arch == arch]
    if name is not None and name not in of_arch:
        like = f": there are {', '.join(of_arch)}" if of_arch else ""
        raise TypeNotSupported(f"{model.paths[0]}: {arch} is not exported as {name}{like}")
    found = name or next((each for each in of_arch if SPELLINGS[each].when(model)), None)
    if found is None:
        known = ", ".join(sorted({ROWS[each].arch for each in SPELLINGS if each in ROWS}))
        raise TypeNotSupported(
            f"{model.paths[0]}: the architecture {str(arch)[:40]!r} is not exported by this version; there are {known}"
        )
    return found, ROWS[found], SPELLINGS[found]


def spelled_kinds(arch: str, spelling: Spelling) -> dict[str, str]:
    """Return the name in a checkpoint of each kind of tensor of an architecture, ``*`` for the layer."""
    wanted = spelling.names.split()
    found = {}
    for kind in KINDS[arch].split():
        names = PATTERNS.get(kind, "").split()
        if names:
            found[kind] = min(names, key=lambda name: _rank(name, wanted))
    return found


def _rank(name: str, wanted: list[str]) -> tuple[bool, bool, int]:
    order = next((i for i, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER))
    return name not in wanted, name not in _USUAL, order
