"""Models that transformers has no class for, or that it does not read, as classes of its own that compute the same.

The checkpoints hold what remote code reads; weights are renamed, and permuted where a class rotates other pairs. Of
models with pictures only the text is there: the rest is not computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import checkpoints

State = dict[str, Tensor]


def state_of(description: checkpoints.Description, renamed: Mapping[str, str] | None = None) -> State:
    """Return the weights of a checkpoint in float32; renamed: patterns and what they become."""
    state: State = {}
    for name, dtype, shape, data in checkpoints.stored_tensors(description):
        for old, new in (renamed or {}).items():
            name = re.sub(old, new, name)
        x = torch.frombuffer(bytearray(data), dtype=torch.bfloat16 if dtype == "BF16" else torch.float32)
        state[name] = x.reshape(shape).float()
    return state


#: What config.json says of itself.
_CLASS_KEYS = ("architectures", "torch_dtype", "model_type")


def model_of(cls: Any, config: Mapping[str, Any], state: State, optional: str = r"(?!)") -> Any:
    """Return a model with these weights; ValueError if it lacks some, or has others, but for those that match
    ``optional``."""
    settings = cls.config_class(**{key: value for key, value in config.items() if key not in _CLASS_KEYS})
    settings._attn_implementation = "eager"
    model = cls(settings)
    if settings.tie_word_embeddings:
        state = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    keys_loaded = model.load_state_dict(state, strict=False)
    bad = [name for name in (*keys_loaded.missing_keys, *keys_loaded.unexpected_keys) if not re.search(optional, name)]
    if bad:
        raise ValueError(f"missing or unexpected: {bad[:5]}")
    return model


def split_rows(state: State, name: str, part: str, rows: Tensor, q: int, kv: int) -> None:
    """Enter q, k and v, which are stored in one matrix."""
    for letter, rows_of_letter in zip("qkv", rows.split([q, kv, kv]), strict=True):
        state[name.replace(part, f"{letter}_proj")] = rows_of_letter


def text_of(cls: str, renamed: Mapping[str, str]) -> Callable[[checkpoints.Description], Any]:
    """Return a factory of models of this class from the text part of another; other parts are omitted."""

    def make(description: checkpoints.Description) -> Any:
        config = description.config.get("text_config") or description.config
        state = {name: x for name, x in state_of(description, renamed).items() if re.match(_OF_TEXT, name)}
        if "lm_head.weight" not in state:  # tied, or without a head
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        return model_of(getattr(transformers, cls), config, state)

    return make


_OF_TEXT = r"(model\.(embed_tokens|layers|norm)|lm_head)\."


def qwen2_vl(description: checkpoints.Description) -> Any:
    state = {
        k: v for k, v in state_of(description, {r"^model\.": "model.language_model."}).items() if "visual" not in k
    }
    return model_of(transformers.Qwen2VLForConditionalGeneration, description.config, state, r"\.visual\.")


def paddleocr(description: checkpoints.Description) -> Any:
    state = {
        k: v for k, v in state_of(description, {r"^model\.": "model.language_model."}).items() if "visual" not in k
    }
    own_keys = ("vision_config", "architectures", "model_type", "torch_dtype")
    text = {key: value for key, value in description.config.items() if key not in own_keys}
    config = {"text_config": text, "tie_word_embeddings": False}
    return model_of(transformers.PaddleOCRVLForConditionalGeneration, config, state, r"\.(visual|projector)\.")


def minicpm(description: checkpoints.Description) -> Any:
    """Its factors of rope are all 1 for short contexts."""
    c = description.config
    scales = {
        "embedding_multiplier": c["scale_emb"],
        "residual_multiplier": c["scale_depth"] / math.sqrt(c["num_hidden_layers"]),
        "logits_scaling": c["hidden_size"] / c["dim_model_base"],
        "attention_multiplier": 1 / math.sqrt(c["hidden_size"] / c["num_attention_heads"]),
    }
    return model_of(transformers.GraniteForCausalLM, c | scales | {"rope_scaling": None}, state_of(description))


#: Names as GPT-2 has them, and as Llama has them.
_GPT_2 = {
    r"^transformer\.": "model.",
    r"\.h\.": ".layers.",
    r"\.wte\.": ".embed_tokens.",
    r"\.ln_f\.": ".norm.",
    r"\.ln_1\.": ".input_layernorm.",
    r"\.ln_2\.": ".post_attention_layernorm.",
}


def exaone(description: checkpoints.Description) -> Any:
    c = description.config
    names = {
        **_GPT_2,
        r"\.attn\.attention\.": ".self_attn.",
        r"\.out_proj\.": ".o_proj.",
        r"\.c_fc_0\.": ".gate_proj.",
        r"\.c_fc_1\.": ".up_proj.",
        r"\.c_proj\.": ".down_proj.",
    }
    changes = {"num_hidden_layers": c["num_layers"], "rms_norm_eps": c["layer_norm_epsilon"]}
    return model_of(transformers.LlamaForCausalLM, c | changes, state_of(description, names))


def codeshell(description: checkpoints.Description) -> Any:
    """StarCoder 2 with q, k and v in one matrix."""
    c = description.config
    names = {
        **_GPT_2,
        r"\.attn\.c_proj\.": ".self_attn.o_proj.",
        r"\.attn\.": ".self_attn.",
    }
    state = state_of(description, names)
    width, kv = c["n_embd"], c["n_embd"] // c["n_head"] * c["num_query_groups"]
    for name in [name for name in state if "c_attn" in name]:
        split_rows(state, name, "c_attn", state.pop(name), width, kv)
    changes = {"num_key_value_heads": c["num_query_groups"], "intermediate_size": 4 * width, "use_bias": True}
    changes |= {"norm_epsilon": c["layer_norm_epsilon"], "sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}
    return model_of(transformers.Starcoder2ForCausalLM, c | changes, state)


def pangu(description: checkpoints.Description) -> Any:
    return model_of(transformers.LlamaForCausalLM, description.config, state_of(description))


def orion(description: checkpoints.Description) -> Any:
    """Llama with layer norms."""
    state = state_of(description)
    biases = {name for name in state if name.endswith("norm.bias")}
    model = model_of(
        transformers.LlamaForCausalLM, description.config, {k: v for k, v in state.items() if k not in biases}
    )
    for name in biases:
        path, _, last = name.removesuffix(".bias").rpartition(".")
        norm = nn.LayerNorm(description.config["hidden_size"], description.config["rms_norm_eps"])
        norm.weight.data, norm.bias.data = state[name.removesuffix("bias") + "weight"], state[name]
        setattr(model.get_submodule(path), last, norm)
    return model


def nanbeige(description: checkpoints.Description) -> Any:
    """Llama whose layers come several times, with the last norm between."""
    model = model_of(transformers.LlamaForCausalLM, description.config, state_of(description))
    once, norm = list(model.model.layers), model.model.norm
    last, end = once[-1], Ending(once[-1], norm)
    model.model.layers = nn.ModuleList([*once[:-1], end] * (description.config["num_loops"] - 1) + [*once[:-1], last])
    model.config.num_hidden_layers = len(model.model.layers)
    return model


class Ending(nn.Module):  # type: ignore[misc]
    """A layer, then a norm."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, x: Tensor, **keywords: Any) -> Any:
        out = self.layer(x, **keywords)
        return (self.norm(out[0]), *out[1:]) if isinstance(out, tuple) else self.norm(out)

    def __getattr__(self, name: str) -> Any:
        own_names = ("layer", "norm")
        return super().__getattr__(name) if name in own_names else getattr(super().__getattr__("layer"), name)


def maincoder(description: checkpoints.Description) -> Any:
    """Hunyuan, which norms rotated heads, too, but rotates halves of them where these are pairs side by side."""
    head = description.config["head_dim"]
    order = torch.cat([torch.arange(0, head, 2), torch.arange(1, head, 2)])
    state = state_of(description, {r"q_norm": "query_layernorm", r"k_norm": "key_layernorm"})
    for name, x in state.items():
        if re.search(r"(q_proj|k_proj|query_layernorm|key_layernorm)\.weight$", name):
            state[name] = x.reshape(-1, head, *x.shape[1:])[:, order].reshape(x.shape)
    return model_of(transformers.HunYuanDenseV1ForCausalLM, description.config, state)


def bitnet(description: checkpoints.Description) -> Any:
    """With ternary weights, as the converter makes them, and activations that are not rounded."""
    state = state_of(description, {"inner_attn_ln": "attn_sub_norm", "ffn_layernorm": "ffn_sub_norm"})
    for name, x in state.items():
        if name.endswith("_proj.weight"):
            scale = 1 / x.abs().mean().clamp(min=1e-5)
            state[name] = (x * scale).round().clamp(-1, 1) / scale
    return model_of(transformers.BitNetForCausalLM, description.config, state)


def bailing_v2(description: checkpoints.Description) -> Any:
    """GLM 4.5, with q, k and v in one matrix; prediction layers are not run."""
    return as_glm(description, {}, state_of(description, _BAILING_NAMES))


def sarvam(description: checkpoints.Description) -> Any:
    """Bailing V2 whose biases of experts are taken from their mean."""
    state = state_of(description, _BAILING_NAMES)
    state |= {name: x - x.mean() for name, x in state.items() if name.endswith(".e_score_correction_bias")}
    return as_glm(description, {"partial_rotary_factor": 1.0, "use_qk_norm": True}, state)


def as_glm(description: checkpoints.Description, changes: dict[str, Any], state: State) -> Any:
    c = description.config
    after = f"model.layers.{c['num_hidden_layers']}."
    state = {name: x for name, x in state.items() if not name.startswith(after)}
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    for name in [name for name in state if "query_key_value" in name]:
        rows = state.pop(name)
        head = rows.shape[0] // (heads + 2 * kv)
        split_rows(state, name, "query_key_value", rows, heads * head, kv * head)
    renamed = ("use_qkv_bias", "num_experts", "num_shared_experts")
    config = {key: value for key, value in c.items() if key not in renamed}
    config |= {"n_routed_experts": c["num_experts"], "n_shared_experts": c["num_shared_experts"]}
    return model_of(transformers.Glm4MoeForCausalLM, config | changes, state)


_BAILING_NAMES = {
    "word_embeddings": "embed_tokens",
    r"\.attention\.dense\.": ".self_attn.o_proj.",
    r"\.attention\.": ".self_attn.",
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
    "expert_bias": "e_score_correction_bias",
}


def minimax_m1(description: checkpoints.Description) -> Any:
    """MiniMax Text 01, which make_convert_goldens.py makes rotate a part of a head. What decays is not stored."""
    c = description.config
    factors = {
        f"{short}_{factor}_factor": c[f"layernorm_{name}_{factor}"]
        for short, name in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
        for factor in ("alpha", "beta")
    }
    kinds = ["full_attention" if kind else "linear_attention" for kind in c["attn_type_list"]]
    changes = {"layer_types": kinds, "partial_rotary_factor": c["rotary_dim"] / c["head_dim"]}
    state = state_of(description)
    return model_of(transformers.MiniMaxForCausalLM, c | factors | changes, state, r"(_decay|slope_rate)$")


#: Names as LLaDA has them.
_LLADA = {
    r"^model\.transformer\.blocks\.": "model.layers.",
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ff_norm\.": ".post_attention_layernorm.",
    r"\.([qkv]_proj)\.": r".self_attn.\1.",
    r"\.attn_out\.": ".self_attn.o_proj.",
    r"\.ff_proj\.": ".mlp.gate_proj.",
    r"\.up_proj\.": ".mlp.up_proj.",
    r"\.ff_out\.": ".mlp.down_proj.",
}


class FullModel(nn.Module):  # type: ignore[misc]
    """A model whose tokens see those after them, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, **keywords: Any) -> Any:
        n = tokens.shape[1]
        return self.model(tokens, attention_mask=torch.zeros(1, 1, n, n), **keywords)


def llada(description: checkpoints.Description) -> Any:
    return FullModel(model_of(transformers.LlamaForCausalLM, description.config, state_of(description, _LLADA)))


def dream(description: checkpoints.Description) -> Any:
    return FullModel(model_of(transformers.Qwen2ForCausalLM, description.config, state_of(description)))


def qwen(description: checkpoints.Description) -> Any:
    """Qwen 2, with q, k and v in one matrix, and both halves of the feed-forward layer counted in its width."""
    c = description.config
    names = {
        **_GPT_2,
        r"\.attn\.c_proj\.": ".self_attn.o_proj.",
        r"\.attn\.": ".self_attn.",
        r"\.mlp\.w1\.": ".mlp.up_proj.",
        r"\.mlp\.w2\.": ".mlp.gate_proj.",
        r"\.mlp\.c_proj\.": ".mlp.down_proj.",
    }
    state, width = state_of(description, names), c["hidden_size"]
    for name in [name for name in state if "c_attn" in name]:
        split_rows(state, name, "c_attn", state.pop(name), width, width)
    changes = {"num_key_value_heads": c["num_attention_heads"], "intermediate_size": c["intermediate_size"] // 2}
    changes |= {"rms_norm_eps": c["layer_norm_epsilon"], "rope_theta": c["rotary_emb_base"]}
    return model_of(transformers.Qwen2ForCausalLM, c | changes, state)


def internlm2(description: checkpoints.Description) -> Any:
    """Llama, with q, k and v of a key head side by side."""
    c = description.config
    names = {
        "tok_embeddings": "embed_tokens",
        r"^output\.": "lm_head.",
        r"\.attention_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.attention\.wo\.": ".self_attn.o_proj.",
        r"\.attention\.": ".self_attn.",
        r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
        r"\.feed_forward\.w2\.": ".mlp.down_proj.",
        r"\.feed_forward\.w3\.": ".mlp.up_proj.",
    }
    state, kv = state_of(description, names), c["num_key_value_heads"]
    q, head = c["num_attention_heads"] // kv, c["hidden_size"] // c["num_attention_heads"]
    for name in [name for name in state if "wqkv" in name]:
        groups = state.pop(name).reshape(kv, q + 2, head, -1)
        rows = torch.cat([part.reshape(-1, groups.shape[-1]) for part in groups.split([q, 1, 1], 1)])
        split_rows(state, name, "wqkv", rows, kv * q * head, kv * head)
    return model_of(transformers.LlamaForCausalLM, c, state)


def baichuan(description: checkpoints.Description) -> Any:
    """Llama, with q, k and v in one matrix; it rotates, as the smaller one does."""
    state, width = state_of(description), description.config["hidden_size"]
    for name in [name for name in state if "W_pack" in name]:
        split_rows(state, name, "W_pack", state.pop(name), width, width)
    return model_of(transformers.LlamaForCausalLM, description.config, state)


def deci(description: checkpoints.Description) -> Any:
    """Llama whose layers differ: in heads of keys, a matrix in place of attention, or nothing at all."""
    c, state = description.config, state_of(description)
    width = state["model.layers.0.mlp.up_proj.weight"].shape[0]
    settings: dict[str, Any] = {key: value for key, value in c.items() if key not in _CLASS_KEYS} | {
        "intermediate_size": width
    }
    if "rope_scaling" in c:  # what config.json leaves out
        settings["rope_scaling"] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **c["rope_scaling"]}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.config._attn_implementation = "eager"
    head, layers = c["hidden_size"] // c["num_attention_heads"], []
    for i, layer in enumerate(model.model.layers):
        name = f"model.layers.{i}.self_attn."
        if f"{name}linear_attn.weight" in state:
            layer.self_attn = Linear(state[f"{name}linear_attn.weight"])
        elif f"{name}k_proj.weight" in state:
            keys = state[f"{name}k_proj.weight"].shape[0]
            attention = layer.self_attn
            attention.k_proj = nn.Linear(c["hidden_size"], keys, bias=False)
            attention.v_proj = nn.Linear(c["hidden_size"], keys, bias=False)
            attention.num_key_value_groups = c["num_attention_heads"] * head // keys
        else:
            continue
        for part in list(state):
            if part.startswith(f"model.layers.{i}.") and "linear_attn" not in part:
                layer.get_parameter(part.removeprefix(f"model.layers.{i}.")).data = state.pop(part)
        layers.append(layer)
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    model.model.embed_tokens.weight.data = state["model.embed_tokens.weight"]
    model.model.norm.weight.data, model.lm_head.weight.data = state["model.norm.weight"], state["lm_head.weight"]
    return model


class Linear(nn.Module):  # type: ignore[misc]
    """A matrix where attention is expected."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states @ self.weight.T, None


def hunyuan_vl(description: checkpoints.Description) -> Any:
    """The text model is Hunyuan; of text its rope has one position, and a base scaled by alpha."""
    c = description.config
    state = {name: x for name, x in state_of(description).items() if not name.startswith("vit.")}
    base = c["rope_theta"] * c["rope_scaling"]["alpha"] ** (c["head_dim"] / (c["head_dim"] - 2))
    changes = {"rope_theta": base, "rope_scaling": None}
    return model_of(transformers.HunYuanDenseV1ForCausalLM, c | changes, state)


def mpt(description: checkpoints.Description) -> Any:
    """With the largest bias by distance that config.json names: transformers always takes 8."""
    c, state = description.config, state_of(description)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    config = {key: value for key, value in c.items() if key != "tie_word_embeddings"}
    model = model_of(transformers.MptForCausalLM, config | {"tie_word_embeddings": False}, state)
    build, most = model.transformer.build_mpt_alibi_tensor, c["attn_config"]["alibi_bias_max"]
    model.transformer.build_mpt_alibi_tensor = lambda heads, n, device=None: build(heads, n, most, device)
    return model


def chameleon(description: checkpoints.Description) -> Any:
    """The model without what makes pictures; all heads have the norm of the first, which the converter takes."""
    own_settings = {
        "vocabulary_map": {"<image>": 4},
        "vq_config": {"base_channels": 32, "num_embeddings": 8, "embed_dim": 8},
    }
    state = {name: x for name, x in state_of(description).items() if "vqmodel" not in name}
    state |= {name: x[:1].expand(x.shape) for name, x in state.items() if re.search("[qk]_norm", name)}
    return model_of(
        transformers.ChameleonForConditionalGeneration, description.config | own_settings, state, r"vqmodel"
    )


#: By the class that config.json names.
STAND_INS: Mapping[str, Callable[[checkpoints.Description], Any]] = {
    "BaichuanForCausalLM": baichuan,
    "BailingMoeV2ForCausalLM": bailing_v2,
    "BitnetForCausalLM": bitnet,
    "ChameleonForConditionalGeneration": chameleon,
    "CodeShellForCausalLM": codeshell,
    "DeciLMForCausalLM": deci,
    "DreamModel": dream,
    "ExaoneForCausalLM": exaone,
    "HunYuanVLForConditionalGeneration": hunyuan_vl,
    "InternLM2ForCausalLM": internlm2,
    "InternLM3ForCausalLM": text_of("LlamaForCausalLM", {}),
    "JanusForConditionalGeneration": text_of("LlamaForCausalLM", {r"^model\.language_model\.": "model."}),
    "LLaDAModelLM": llada,
    "LlamaModel": text_of("LlamaForCausalLM", {"^": "model."}),
    "LlavaForConditionalGeneration": text_of("LlamaForCausalLM", {r"^language_model\.": ""}),
    "MaincoderForCausalLM": maincoder,
    "MiniCPMForCausalLM": minicpm,
    "MiniCPMV4_6ForConditionalGeneration": text_of("Qwen3_5ForCausalLM", {r"^model\.language_model\.": "model."}),
    "MiniMaxM1ForCausalLM": minimax_m1,
    "MPTForCausalLM": mpt,
    "NanbeigeForCausalLM": nanbeige,
    "OrionForCausalLM": orion,
    "PaddleOCRVLForConditionalGeneration": paddleocr,
    "PanguEmbeddedForCausalLM": pangu,
    "Qwen2VLForConditionalGeneration": qwen2_vl,
    "QWenLMHeadModel": qwen,
    "SarvamMoEForCausalLM": sarvam,
    "XverseForCausalLM": text_of("LlamaForCausalLM", {}),
}
