"""More rows of the table of classes (``classes``): text models of those that also see, those that fill in masked tokens
or make embeddings, and drafts; what their rules did undone, and what is derived for them.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.checkpoint.back import derived as d
from quantkit.checkpoint.back.rules import Backward, undone
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.back.spelling import Json, Spelling, spelled
from quantkit.checkpoint.families import seeing
from quantkit.checkpoint.tensors import Tensor
from quantkit.errors import TypeNotSupported

_BLOCK = "model.layers.*."
_BARE = (r"^model\.", "")

# --- Chameleon, Muse Glimmer, Hunyuan-VL -----------------------------------------------------------------------------


def _pictures(said: Said, config: Json) -> None:
    """Name the tokens that stand for parts of pictures."""
    texts = said.model.get("tokenizer.ggml.tokens")
    named = enumerate(() if texts is None else map(str, texts))
    config["vocabulary_map"] = {text: i for i, text in named if text == "<image>" or text.startswith("IMGIMG")}


_CHAMELEON = Spelling(
    "chameleon",
    keys={".swin_norm": "swin_norm"},
    derived=(_pictures,),
    biases=("attention_bias", "mlp_bias"),
    note="no file holds what makes tokens of pictures (model.vqmodel): transformers makes one of random numbers; texts "
    "do not use it. Of the norms of single heads a file has that of the first",
)


@undone.register
def _(rule: seeing.ScaledQueries, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Leave out norms that only scale: config.json says by how much."""
    return () if tensor.name.endswith((".self_attn.q_norm.weight", ".self_attn.k_norm.weight")) else None


def _scaled_queries(said: Said, config: Json) -> None:
    """Say what queries are multiplied by; refuse norms that do more than that."""
    found: dict[str, set[float]] = {"q": {1.0}, "k": {1.0}}
    for of in found:
        names = [name for name in said.model.tensors if name.endswith(f".attn_{of}_norm.weight")]
        found[of] = {each for name in names for each in said.values(name)} or {1.0}
    if len(found["q"]) > 1 or found["k"] != {1.0}:
        raise TypeNotSupported(
            f"{said.where}: norms of queries and keys do more than scale queries by one number, which is all that "
            "config.json of this class can say"
        )
    config["qk_scale_factor"] = found["q"].pop()


_MUSE = Spelling(
    "muse_glimmer_text",
    spelled(
        _BLOCK, "self_attn.gate_proj post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"
    ),
    keys={".logit_scale": "output_multiplier"},
    derived=(
        d.kinds_of_layers,
        _scaled_queries,
        d.Tower({"num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}),
    ),
    renamed=((r"^model\.", "model.language_model."),),
    inside="text_config",
    beside={"model_type": "muse_glimmer"},
)


def _sections(said: Said, config: Json) -> None:
    """Say how rope is scaled, and what part of a head turns by which position (Hunyuan-VL)."""
    config["rope_scaling"] = None
    if (sections := said.get(".rope.dimension_sections")) is not None:
        config["rope_scaling"] = {
            **{"type": "xdrope", "rope_type": "xdrope", "alpha": said.get(".rope.scaling.alpha")},
            **{"factor": said.get(".rope.scaling.factor"), "xdrope_section": sections},
        }


_HUNYUAN = Spelling(
    "hunyuan_vl",
    spelled(_BLOCK, "self_attn.query_layernorm self_attn.key_layernorm"),
    otherwise={"pad_token_id": -1},
    derived=(_sections,),
    biases=("attention_bias",),
)

# --- embeddings, masked tokens, drafts -------------------------------------------------------------------------------


def _both_ways(said: Said, config: Json) -> None:
    """Tokens see those behind them, too."""
    config["use_bidirectional_attention"] = True
    config["sliding_window"] = config.get("sliding_window") or 0


def _mean(said: Said, config: Json) -> None:
    """Say how tokens become one embedding by this class' own name, too."""
    config["pooling"] = {1: "avg", 2: "cls", 3: "last"}.get(said.get(".pooling_type") or 1)


def _causal(said: Said) -> bool:
    return said.get(".attention.causal") is not False


def _llada(said: Said, config: Json) -> None:
    """Say what LLaDA has names of its own for."""
    d.mask_token(said, config)
    config |= {
        **{"embedding_size": config["vocab_size"], "weight_tying": config["tie_word_embeddings"], "rope": True},
        **{"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "include_bias": False},
    }


_LLADA = Spelling(
    "llada",
    "model.transformer.wte model.transformer.ln_f model.transformer.ff_out "
    + spelled("model.transformer.blocks.*.", "attn_norm ff_norm q_proj k_proj v_proj attn_out ff_proj up_proj ff_out"),
    keys={
        **{".block_count": "n_layers", ".context_length": "max_sequence_length", ".embedding_length": "d_model"},
        **{".feed_forward_length": "mlp_hidden_size", ".attention.head_count": "n_heads"},
        ".attention.head_count_kv": "n_kv_heads",
    },
    derived=(_llada,),
)

#: Class of transformers -> how it spells.
SEEING: dict[str, Spelling] = {
    "ChameleonForConditionalGeneration": _CHAMELEON,
    "MuseGlimmerForConditionalGeneration": _MUSE,
    "HunYuanVLForConditionalGeneration": _HUNYUAN,
    "LlamaBidirectionalModel": Spelling(
        "llama_bidirec", derived=(_mean,), biases=("attention_bias", "mlp_bias"), renamed=(_BARE,)
    ),
    "Gemma3TextModel": Spelling("gemma3_text", derived=(d.QueryScale(0), _both_ways), renamed=(_BARE,)),
    "DreamModel": Spelling("Dream", derived=(d.mask_token,)),
    "LLaDAModelLM": _LLADA,
}
