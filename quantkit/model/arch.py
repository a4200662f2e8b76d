"""The table of architectures: everything about a model that its tensors do not show.

A layer is: norm, attention, (norm,) add; norm, feed-forward, (norm,) add. Its tensors show which norms, biases, q/k
norms, sinks and experts it has (graph.py); a row has everything else. The reference is llama.cpp b11434's
src/models/*.cpp: metadata keys that it ignores are also ignored by the row.

To add an architecture: write its row; run tests/model/test_engine_zoo.py with a model of it (tests/lib/zoo.py generates
one from a header) against llama.cpp's logits; add a new block (graph.ATTENTION) only for what fields cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from quantkit.errors import TypeNotSupported

#: Weights whose ``.scale`` and ``.input_scale`` llama.cpp loads for any architecture; ``Arch.has_scale`` tells by which
#: the product is multiplied.
# fmt: off
SCALED = frozenset({
    "attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "output",
    *(f"ffn_{name}{part}" for name in ("gate", "down", "up") for part in ("", "_shexp", "_exps")),
    "ssm_in", "ssm_out", "ssm_alpha", "ssm_beta", "nextn.eh_proj", "nextn.shared_head_head",
})
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Window:
    """The layers that attend only to a window of positions.

    period: the last of every ``period`` layers (dense_first: the first) attends to all positions; a pattern in the
    metadata takes precedence. default: the window if the metadata has none (0: no window). fixed: the window,
    regardless of the metadata. only_if_layers: only models with this number of layers have windows (0: all).
    """

    period: int
    dense_first: bool = False
    default: int = 0
    fixed: int = 0
    mask: str = "sliding"
    only_if_layers: int = 0
    #: Rope base of windowed layers if ``rope.freq_base_swa`` is missing; 0: that of the other layers.
    freq_base: float = 0.0
    #: ``rope.freq_base_swa`` is read.
    base_key: bool = True
    #: Rope scaling (factor, yarn) applies to windowed layers, too.
    rope_scaling: bool = True


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Routing of experts. None: by the metadata."""

    gating: str | None = None
    norm: bool | None = None
    #: ``expert_weights_scale`` is read.
    scale_key: bool = False
    #: The gating if ``expert_gating_func`` is missing or 0.
    default_gating: str | None = None
    #: (layers, tokens of the vocabulary) of models that lack the key and use sigmoid.
    sigmoid_sizes: tuple[tuple[int, int], ...] = ()
    #: Inputs of the experts are weighted instead of their outputs (Llama 4).
    weight_inputs: bool = False
    #: The router reads the layer's input without a norm (SmallThinker).
    router_on_input: bool = False
    #: The sum of routed and shared experts is halved (Cohere 2 MoE).
    shared_half: bool = False
    #: The factor of the sum of experts and a parallel dense layer, if there is one (Grok).
    dense_factor: float = 0.0
    #: Groups of experts share a smaller chunk expert, whose output is added (Grove MoE).
    chunk_experts: bool = False
    #: Only layers n with (n + 1) % ``interleave_moe_layer_step`` == 0 have experts (ERNIE 4.5).
    layer_step: bool = False


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Constants without keys (MiniCPM 3), or defaults of missing keys (MiniCPM)::

    embeddings = embed * E
    residual += depth / sqrt(n_layer) * f(x)      unless depth is 0
    logits = (logits or width / n_embd) * logits    divided by it where ``logit_scale`` divides
    """

    embed: float
    depth: float = 0.0
    width: float = 0.0
    logits: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RopeRules:
    """The layers and columns with rope, and the keys that rope reads, if they differ from Llama's."""

    #: Only windowed layers have rope (Cohere 2, EXAONE 4).
    only_windowed: bool = False
    #: With ``only_windowed``: the leading dense layers have rope, too (Cohere 2 MoE).
    dense_lead: bool = False
    #: Only models with this number of layers have rope (Baichuan); 0: all.
    n_layers: int = 0
    #: base *= a^(d / (d - 2)), with a = ``rope.scaling.alpha`` and heads of d columns (Hunyuan VL).
    alpha_key: bool = False
    #: ``attention.rope_pattern`` lists the layers with rope (Granite SWA).
    pattern_key: bool = False
    #: Layers without a window rotate half the columns, and only they use ``rope_freqs`` (Step 3.5).
    half: bool = False
    #: No rope if ``rope.scaling.finetuned`` is false (Granite).
    if_finetuned: bool = False
    #: The last of every n layers has no rope (SmolLM 3, Llama 4); 0: all have. skip_first: the first of every n
    #: instead, if there are windows and more than n layers (SmallThinker).
    skip_step: int = 0
    skip_first: bool = False
    #: Further yarn keys: ``log`` (beta_fast, beta_slow and the log multiplier), ``ext`` (betas and extrapolation
    #: factor).
    yarn_keys: str = ""
    #: yarn's mscale and mscale_all_dim are equal and cancel in cos and sin (DeepSeek 2).
    yarn_cancels: bool = False
    #: Latent attention reads yarn_log_multiplier.
    yarn_log: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionRules:
    """Deviations of attention blocks: norms, clamps and scales of q, k and v, biases, and gates."""

    #: ``attention.clamp_kqv`` clamps q, k and v (OLMo).
    clamp_key: bool = False
    #: q/k norms come after rope (Hunyuan).
    norm_after_rope: bool = False
    #: q/k norms are layer norms with this epsilon (Chameleon); 0: as the other norms.
    head_norm_eps: float = 0.0
    #: q and k are normalized after rope, without weights (Llama 4 except the largest, Talkie).
    plain_qk_norm: bool = False
    #: ``attn_q_norm`` has a factor for each query head, applied after its norm (Talkie).
    head_gains: bool = False
    #: Scale of q by position: ``llama4`` (layers without rope), or ``mistral3`` (attention.temperature_scale).
    temperature: str = ""
    #: The scale of q . k, if not 1 / sqrt(head): ``key`` (attention.scale, if present), ``output``
    #: (attention.output_scale, by default Grok's), ``head`` (1 / head), ``one``.
    scale: str = ""
    #: ``attention.value_scale`` multiplies the output of attention (MiMo 2).
    value_scale_key: bool = False
    #: The function of attn_gate x, one value per head or per column, that multiplies the output of attention.
    gate: str = ""
    #: The softcap of attention scores if the metadata has none (Gemma 2); 0: no softcap.
    softcap: float = 0.0
    #: The largest ALiBi bias; 0: none. None: ``attention.max_alibi_bias``.
    alibi: float | None = 0.0
    #: Only models with this number of layers have ALiBi (Baichuan); 0: all.
    alibi_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture; every field is a deviation from a Llama-like model."""

    name: str
    #: ``normal``, ``neox``, ``mrope`` and ``imrope`` (neox with sections, or interleaved sections), ``none``; ``glm``
    #: and ``glm_moe`` are normal and neox unless the metadata has sections.
    rope: str
    rope_rules: RopeRules = RopeRules()
    #: The attention block, a key of graph.ATTENTION.
    attention: str = "gqa"
    attention_rules: AttentionRules = AttentionRules()
    #: ``rms``, ``layer``, or ``by_eps``: the kind whose epsilon the metadata has.
    norm: str = "rms"
    activation: str = "silu"
    #: The activation if there is a gate (T5); empty: the same.
    gated_activation: str = ""
    #: ``hidden_activation`` takes precedence (ModernBERT).
    activation_key: bool = False
    #: Norms of rows have no weights (OLMo, Talkie).
    plain_norms: bool = False
    #: Position embeddings are required (StarCoder); if the file has them, they are always added.
    position_embeddings: bool = False
    #: Embeddings of tokens are normalized, without weights (Muse Glimmer, Talkie).
    embed_norm: bool = False
    #: Dense feed-forward without a gate tensor: ``ffn_up`` contains gate and up, if it is wider than ``ffn_down``;
    #: otherwise there is no gate.
    glu_in_up: bool = False
    window: Window | None = None
    #: Names of norms: before the feed-forward layer; after attention and after the feed-forward layer.
    ffn_norm: str = "ffn_norm"
    post_norms: tuple[str, ...] = ("post_attention_norm", "post_ffw_norm")
    #: The epsilon of ``post_norms``; 0: that of the other norms.
    post_norm_eps: float = 0.0
    #: ``swin_norm`` moves the norms after attention and the feed-forward layer (Chameleon).
    swin_key: bool = False
    #: Layers may lack attention, or both parts (Deci).
    optional_attention: bool = False
    #: Attention and feed-forward layer are parallel, with one norm (Cohere, Phi 2; StableLM without ffn_norm).
    parallel: bool = False
    #: ``use_parallel_residual`` makes them parallel, with a norm each (GPT-NeoX).
    parallel_key: bool = False
    #: Embeddings are multiplied by sqrt(n_embd) (Gemma).
    embed_sqrt: bool = False
    #: ``logit_scale`` of the metadata: ``multiply`` or ``divide`` the logits.
    logit_scale: str = ""
    fixed_scales: Scales | None = None
    #: Which keys are read: ``embedding`` (embedding_scale), ``residual`` (residual_scale).
    scales: frozenset[str] = frozenset()
    #: The softcap of the logits if the metadata has none (Gemma 2); None: the key is not read.
    final_softcap: float | None = None
    #: ``swiglu_clamp_exp`` and ``_shexp`` clamp up and the gate: ``after`` its activation; ``before`` it, in routed
    #: experts only; ``before_all``: also in the shared expert, by default with the limit of routed experts.
    swiglu_limits: str = ""
    #: Parts whose ``.scale`` tensors llama.cpp uses: ``ffn``, ``exps``, ``shexp``, ``ssm``.
    tensor_scales: frozenset[str] = frozenset()
    #: The activation of the feed-forward layer is divided by ``ffn.act.scales``, if present (AWQ).
    activation_scales: bool = False
    moe: Moe = Moe()
    #: Several residual streams (hyper_connections.py), ``alone`` or ``mixed`` with each other.
    hyper_connections: str = ""
    #: False: tokens attend to the whole sequence (diffusion models, encoders); so they do if ``attention.causal`` is
    #: false.
    causal: bool = True
    #: The output is a row of each token, which are pooled to an embedding; there is no next token.
    encoder: bool = False
    #: Norms of the residual sums, ``attn_output_norm`` and ``layer_output_norm`` (BERT).
    residual_norms: bool = False
    #: The prefix of the encoder's layers, before ``blk.N`` (T5), and of the decoder's tensors, which are not used.
    layer_prefix: str = ""
    decoder_prefix: str = ""
    #: Norms come after attention and the feed-forward layer instead of before (OLMo 2, EXAONE 4).
    norms_after: bool = False
    #: Optional tensors of a graph that llama.cpp requires for this architecture; and usually required ones that it does
    #: not.
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    #: Tensors that llama.cpp loads and does not use.
    ignored: frozenset[str] = frozenset()
    #: Rope of the lightning indexer (indexer.py), ``normal`` or ``neox``; empty: no indexer.
    indexer: str = ""
    #: The indexer rotates its last columns, not the first.
    indexer_tail: bool = False
    #: Value head h of a delta net uses key head h % n_k (Qwen3.5) instead of h // (n_v / n_k) (Qwen3-Next).
    tiled_heads: bool = False
    #: Experts, which llama.cpp loads and ignores, are rejected (Refact).
    dense_only: bool = False
    #: A layer is the attention block alone, without a feed-forward layer (Mamba, Nemotron H).
    single_block: bool = False
    #: Layers of Mamba 2 may lack their norm (Falcon H1).
    scan_norm_optional: bool = False
    #: Channel mixing in place of the feed-forward layer (RWKV).
    channel_mix: bool = False
    #: Layers attend to earlier residual sums (residual_attention.py).
    residual_attention: bool = False
    #: Residuals are residual_scale * the norm's output instead of its input (MiniMax Text 01).
    normed_residual: bool = False
    #: Not 0: if the metadata has ``kda.gate_lower_bound`` b, the decay is b * sigmoid(this * A * x) instead of
    #: A * softplus(x).
    bounded_decay: int = 0
    #: The name of the last norm.
    output_norm: str = "output_norm"
    #: AltUp's residual streams (gemma3n.py); ``final_logit_softcapping`` is not read.
    altup: bool = False
    #: The number of layers with their own caches, which the others share; 0: by the metadata.
    n_own_caches: int = 0
    #: A layer adds layer_output_scale * the embeddings (Talkie).
    embed_skip: bool = False
    #: The first ``hash_layer_count`` layers look up the experts of a token in a table.
    hash_routing: bool = False
    #: The prediction layer has the structure of the other layers (nextn.py).
    nextn: bool = False

    @cached_property
    def needs(self) -> frozenset[str]:
        """The required tensors, of those that are optional in other architectures."""
        return (_USUAL | self.required) - self.optional

    def has_scale(self, weight: str) -> bool:
        """Return whether llama.cpp multiplies the product of a weight by its ``.scale``.

        weight: its name without ``blk.N.`` and ``.weight``. Prediction layers are excluded.
        """
        if weight not in SCALED or f"{weight}.scale" in self.ignored:
            return False
        part = _part_of(weight)
        if part is not None:
            return part in self.tensor_scales
        if weight.startswith("ssm_") or weight in ("attn_gate", "attn_qkv"):
            if self.attention == "delta_net_hybrid":
                return "ssm" in self.tensor_scales
            if weight == "attn_gate" or weight.startswith("ssm_") and weight not in _MAMBA_SCALED:
                return False
        if weight == "attn_q" and self.altup:
            return False
        return weight not in _UNSCALED.get(self.attention, ())


def _part_of(weight: str) -> str | None:
    """Return the name in ``tensor_scales`` of a weight of the feed-forward layer or of prediction; None for others."""
    if weight.startswith("ffn_"):
        kind = weight.rpartition("_")[2]
        return kind if kind in ("exps", "shexp") else "ffn"
    return "nextn" if weight.startswith("nextn.") else None


#: Weights of recurrent layers by whose scale llama.cpp multiplies in Mamba.
_MAMBA_SCALED = frozenset({"ssm_in", "ssm_out"})
#: Weights, by kind of attention, by whose scale it does not.
_UNSCALED: Mapping[str, frozenset[str]] = {
    "kimi_linear": frozenset({"attn_q", "attn_output", "ssm_in", "ssm_out"}),
    "lightning_hybrid": frozenset({"attn_qkv", "attn_output"}),
    **dict.fromkeys(("mla", "mla_plain", "mla_gated"), frozenset({"attn_q"})),
}


def _tensors(names: str) -> frozenset[str]:
    """Return tensor names; ``.weight`` is added to those without a suffix."""
    return frozenset(name if "." in name else f"{name}.weight" for name in names.split())


#: Tensors that feed-forward layers of most architectures require.
_USUAL = _tensors("ffn_gate ffn_gate_exps ffn_gate_shexp")
_HEAD_NORMS = _tensors("attn_q_norm attn_k_norm")
#: Biases and scales of projections, where they are ignored.
_UNUSED_QKV = _tensors(
    "attn_q.bias attn_k.bias attn_v.bias attn_qkv.bias attn_q.scale attn_k.scale attn_v.scale attn_qkv.scale"
)
_POST_NORMS = _tensors("post_attention_norm post_ffw_norm")
_BERT = _tensors(
    "token_embd_norm token_embd_norm.bias attn_output_norm attn_output_norm.bias layer_output_norm "
    "layer_output_norm.bias"
)
#: The usual routers: softmax over all experts, with and without normalizing the weights of the selected ones.
_NORMED, _PLAIN = Moe(gating="softmax", norm=True), Moe(gating="softmax", norm=False)
#: By default sigmoid: Laguna, AFMoE, HY V3, Step 3.5.
_SIGMOID = Moe(scale_key=True, default_gating="sigmoid")
#: By default softmax, except GLM 4.7 Lite: DeepSeek 2 and 2.5.
_DEEPSEEK = Moe(scale_key=True, default_gating="softmax", sigmoid_sizes=((47, 154880), (48, 154880)))
#: Defaults for old files without the keys.
_GROK = Scales(embed=78.38367176906169, logits=0.5773502691896257)
_BOTH_SCALES = frozenset({"embedding", "residual"})
_ALL_SCALES = frozenset({"ffn", "exps", "shexp"})

# fmt: off
_ROWS = (
    Arch(name="llama", rope="normal", tensor_scales=frozenset({"ffn", "exps"}), moe=_NORMED,
         optional=_tensors("ffn_gate_exps")),
    Arch(name="arcee", rope="normal", activation="relu_sqr", optional=_tensors("ffn_gate")),
    Arch(name="llama4", rope="normal", rope_rules=RopeRules(skip_step=4),
         attention_rules=AttentionRules(temperature="llama4", plain_qk_norm=True),
         window=Window(period=4, fixed=8192, mask="chunked"), moe=Moe(gating="sigmoid", norm=False, weight_inputs=True),
         required=_tensors("ffn_up_shexp")),
    Arch(name="mistral3", rope="normal", rope_rules=RopeRules(yarn_keys="log"),
         attention_rules=AttentionRules(temperature="mistral3"), tensor_scales=frozenset({"ffn", "exps"}), moe=_NORMED,
         optional=_tensors("ffn_gate_exps")),
    Arch(name="qwen2", rope="neox"),
    Arch(name="qwen2moe", rope="neox", moe=_PLAIN, required=_tensors("ffn_gate_inp_shexp ffn_up_shexp output")),
    Arch(name="qwen2vl", rope="mrope", ignored=_tensors("output.bias")),
    Arch(name="qwen3", rope="neox", tensor_scales=frozenset({"ffn"}), required=_HEAD_NORMS,
         ignored=_tensors("cls.output.weight")),
    Arch(name="qwen3moe", rope="neox", tensor_scales=frozenset({"exps"}), moe=_NORMED, required=_HEAD_NORMS),
    Arch(name="qwen3next", nextn=True, rope="neox", attention="delta_net_hybrid", ffn_norm="post_attention_norm",
         tensor_scales=frozenset({"exps", "shexp"}), moe=_NORMED, required=_tensors("ffn_gate_inp_shexp ffn_up_shexp")),
    Arch(name="qwen35", nextn=True, rope="imrope", attention="delta_net_hybrid", tiled_heads=True,
         ffn_norm="post_attention_norm", tensor_scales=frozenset({"ffn", "ssm"}),
         ignored=_tensors("cls.output.weight cls.output.bias")),
    Arch(name="qwen35moe", nextn=True, rope="imrope", attention="delta_net_hybrid", tiled_heads=True,
         ffn_norm="post_attention_norm", tensor_scales=frozenset({"exps", "shexp", "ssm"}), moe=_NORMED,
         required=_tensors("ffn_gate_inp_shexp ffn_up_shexp")),
    Arch(name="qwen3vl", rope="imrope", required=_HEAD_NORMS, ignored=_tensors("cls.output.weight")),
    Arch(name="qwen3vlmoe", rope="imrope", moe=_NORMED, required=_HEAD_NORMS),
    Arch(name="gpt-oss", rope="neox", activation="swiglu_oai", window=Window(period=2), ffn_norm="post_attention_norm",
         moe=Moe(gating="softmax_weight", norm=False),
         required=_tensors("attn_output.bias attn_sinks ffn_down_exps.bias ffn_gate_exps.bias ffn_gate_inp.bias "
                           "ffn_up_exps.bias output")),
    Arch(name="deepseek", rope="normal", moe=Moe(gating="softmax", norm=False, scale_key=True),
         required=_tensors("ffn_up_shexp")),
    Arch(name="deepseek2", nextn=True, rope="normal", rope_rules=RopeRules(yarn_cancels=True), attention="mla",
         moe=_DEEPSEEK, required=_tensors("ffn_up_shexp")),
    Arch(name="deepseek32", nextn=True, rope="normal", attention="mla", indexer="neox", moe=Moe(scale_key=True),
         tensor_scales=_ALL_SCALES, required=_tensors("ffn_up_shexp indexer.k_norm.bias")),
    Arch(name="glm-dsa", nextn=True, rope="normal", rope_rules=RopeRules(yarn_log=False), attention="mla",
         indexer="normal", moe=Moe(scale_key=True, default_gating="sigmoid"), tensor_scales=_ALL_SCALES,
         required=_tensors("ffn_up_shexp")),
    Arch(name="deepseek4", rope="normal", attention="compressed_attention", hyper_connections="mixed",
         hash_routing=True, swiglu_limits="before_all", moe=Moe(scale_key=True),
         required=_tensors("exp_probs_b.bias ffn_up_shexp output")),
    Arch(name="mistral4", rope="normal", attention="mla", moe=_DEEPSEEK, required=_tensors("ffn_up_shexp")),
    Arch(name="deepseek2-ocr", rope="neox", attention="gqa_fixed_rope",
         moe=Moe(scale_key=True, default_gating="softmax"), required=_tensors("ffn_up_shexp")),
    Arch(name="minicpm", rope="normal", scales=_BOTH_SCALES, logit_scale="divide",
         fixed_scales=Scales(embed=12.0, depth=1.4, width=256.0), moe=_NORMED, optional=_tensors("ffn_gate_exps")),
    Arch(name="minicpm3", rope="neox", attention="mla_plain", fixed_scales=Scales(embed=12.0, depth=1.4, width=256.0)),
    Arch(name="plm", rope="normal", attention="mla_plain", activation="relu_sqr", optional=_tensors("ffn_gate")),
    Arch(name="dots1", rope="neox", moe=Moe(scale_key=True), required=_HEAD_NORMS | _tensors("ffn_up_shexp output")),
    Arch(name="chatglm", rope="normal", glu_in_up=True, optional=_tensors("ffn_gate")),
    Arch(name="hy_v3", rope="neox", tensor_scales=_ALL_SCALES, moe=_SIGMOID, required=_HEAD_NORMS,
         optional=_tensors("ffn_gate ffn_gate_exps ffn_gate_shexp")),
    Arch(name="glm4", rope="glm", glu_in_up=True, required=_POST_NORMS, optional=_tensors("ffn_gate")),
    Arch(name="glm4moe", nextn=True, rope="glm_moe", ffn_norm="post_attention_norm",
         moe=Moe(scale_key=True, default_gating="sigmoid"), required=_tensors("exp_probs_b.bias ffn_up_shexp")),
    Arch(name="gemma", rope="neox", activation="gelu", embed_sqrt=True),
    Arch(name="gemma2", rope="neox", attention_rules=AttentionRules(softcap=50.0), activation="gelu", embed_sqrt=True,
         final_softcap=30.0, window=Window(period=2, default=4096), required=_POST_NORMS),
    Arch(name="gemma3", rope="neox", activation="gelu", embed_sqrt=True, final_softcap=0.0,
         window=Window(period=6, freq_base=10000.0, rope_scaling=False), required=_HEAD_NORMS | _POST_NORMS,
         ignored=_tensors("dense_2 dense_3")),
    Arch(name="gemma3n", rope="neox", attention="gemma4", activation="gelu", embed_sqrt=True, final_softcap=30.0,
         altup=True, n_own_caches=20, window=Window(period=5, freq_base=10000.0, rope_scaling=False),
         required=_tensors("attn_v")),
    Arch(name="gemma4", rope="neox", attention="gemma4", activation="gelu", embed_sqrt=True, final_softcap=30.0,
         tensor_scales=frozenset({"ffn", "exps"}), moe=_NORMED,
         window=Window(period=1, freq_base=10000.0, rope_scaling=False), required=_POST_NORMS | _tensors("rope_freqs")),
    Arch(name="phi2", rope="neox", norm="layer", activation="gelu", parallel=True,
         required=_tensors("attn_norm.bias attn_output.bias ffn_down.bias ffn_up.bias output output.bias "
                           "output_norm.bias"), optional=_tensors("ffn_gate")),
    Arch(name="phi3", rope="neox", glu_in_up=True, moe=_NORMED, optional=_tensors("ffn_gate")),
    Arch(name="phimoe", rope="neox", glu_in_up=True, moe=_NORMED,
         required=_tensors("attn_norm.bias attn_output.bias ffn_norm.bias output output.bias output_norm.bias")),
    Arch(name="olmo", rope="normal", attention_rules=AttentionRules(clamp_key=True), norm="layer", plain_norms=True),
    Arch(name="olmoe", rope="neox", moe=_PLAIN, required=_HEAD_NORMS | _tensors("output")),
    Arch(name="olmo2", rope="neox", window=Window(period=4, rope_scaling=False), norms_after=True,
         required=_HEAD_NORMS | _POST_NORMS | _tensors("output")),
    Arch(name="granite", rope="normal", rope_rules=RopeRules(if_finetuned=True),
         attention_rules=AttentionRules(scale="key"), scales=_BOTH_SCALES, logit_scale="divide", moe=_NORMED,
         required=_tensors("ffn_up_shexp"), optional=_tensors("ffn_gate_exps")),
    Arch(name="granitemoe", rope="normal", attention_rules=AttentionRules(scale="key"), scales=_BOTH_SCALES,
         logit_scale="divide", moe=_NORMED, required=_tensors("ffn_up_shexp"), optional=_tensors("ffn_gate_exps")),
    Arch(name="granite_swa", rope="normal", rope_rules=RopeRules(pattern_key=True),
         attention_rules=AttentionRules(scale="key"), scales=_BOTH_SCALES, logit_scale="divide", glu_in_up=True,
         window=Window(period=1, base_key=False), moe=_NORMED, required=_tensors("attn_sinks ffn_up_shexp"),
         optional=_tensors("ffn_gate_shexp")),
    Arch(name="granitehybrid", rope="normal", rope_rules=RopeRules(if_finetuned=True), attention="mamba2_hybrid",
         attention_rules=AttentionRules(scale="key"), scales=_BOTH_SCALES, logit_scale="divide", moe=_NORMED,
         required=_tensors("ssm_norm"), optional=_tensors("ffn_gate_exps")),
    Arch(name="mamba", rope="none", attention="mamba", single_block=True,
         required=_tensors("ssm_conv1d.bias ssm_dt.bias")),
    Arch(name="mamba2", rope="none", attention="mamba2", single_block=True,
         required=_tensors("ssm_conv1d.bias ssm_norm")),
    Arch(name="jamba", rope="none", attention="mamba_hybrid", moe=_PLAIN,
         required=_tensors("ssm_b_norm ssm_c_norm ssm_conv1d.bias ssm_dt.bias ssm_dt_norm")),
    Arch(name="falcon-h1", rope="neox", attention="mamba2_parallel", scan_norm_optional=True,
         ignored=_tensors("attn_output.bias rope_freqs")),
    Arch(name="nemotron_h", rope="none", attention="nemotron_h", single_block=True, activation="relu_sqr",
         tensor_scales=frozenset({"ffn"}), required=_tensors("ssm_norm"), optional=_tensors("ffn_gate")),
    Arch(name="nemotron_h_moe", rope="none", attention="nemotron_h", single_block=True, activation="relu_sqr",
         tensor_scales=frozenset({"ffn", "exps", "shexp"}), moe=Moe(gating="sigmoid", scale_key=True),
         required=_tensors("exp_probs_b.bias ffn_up_shexp ssm_norm"),
         optional=_tensors("ffn_gate ffn_gate_exps ffn_gate_shexp")),
    Arch(name="lfm2", rope="neox", attention="short_convolution_hybrid", output_norm="token_embd_norm",
         window=Window(period=0), required=_HEAD_NORMS, ignored=_tensors("dense_2 dense_2.bias")),
    Arch(name="lfm2moe", rope="neox", attention="short_convolution_hybrid", output_norm="token_embd_norm",
         moe=Moe(norm=True), required=_HEAD_NORMS | _tensors("exp_probs_b.bias"),
         ignored=_tensors("dense_2 dense_2.bias")),
    Arch(name="kimi-linear", rope="none", attention="kimi_linear", moe=Moe(norm=True, scale_key=True),
         required=_tensors("exp_probs_b.bias output ssm_f_b ssm_g_b"), optional=_tensors("ffn_gate_shexp"),
         ignored=_UNUSED_QKV),
    Arch(name="kimi-k3", rope="none", attention="kimi_linear", attention_rules=AttentionRules(gate="sigmoid"),
         activation="situ", residual_attention=True, bounded_decay=-1, moe=Moe(scale_key=True),
         required=_tensors("attn_res_score exp_probs_b.bias ffn_routed_down output ssm_f_b ssm_g"),
         optional=_tensors("ffn_gate_shexp"), ignored=_UNUSED_QKV | _tensors("attn_output.scale")),
    Arch(name="bailingmoe3", rope="glm", attention="kimi_linear", attention_rules=AttentionRules(gate="sigmoid"),
         bounded_decay=1, swiglu_limits="after", moe=Moe(scale_key=True),
         required=_tensors("attn_gate exp_probs_b.bias ffn_up_shexp"),
         ignored=_UNUSED_QKV | _tensors("attn_output.scale")),
    Arch(name="minimax-01", rope="neox", attention="lightning_hybrid", normed_residual=True, moe=_NORMED,
         optional=_tensors("ffn_gate_exps")),
    Arch(name="ernie4_5", rope="normal", optional=_tensors("ffn_gate_exps"), ignored=_tensors("attn_output.bias")),
    Arch(name="ernie4_5-moe", rope="normal", moe=replace(_NORMED, layer_step=True), required=_tensors("ffn_up_shexp"),
         optional=_tensors("ffn_gate_exps"), ignored=_tensors("attn_output.bias")),
    Arch(name="paddleocr", rope="mrope", optional=_tensors("ffn_gate_exps")),
    Arch(name="hunyuan-dense", rope="neox", attention_rules=AttentionRules(norm_after_rope=True), required=_HEAD_NORMS),
    Arch(name="hunyuan-moe", rope="neox", attention_rules=AttentionRules(norm_after_rope=True), moe=_NORMED,
         required=_HEAD_NORMS | _tensors("ffn_up_shexp")),
    Arch(name="minimax-m2", rope="neox", moe=Moe(norm=True),
         required=_HEAD_NORMS | _tensors("exp_probs_b.bias output")),
    Arch(name="bailingmoe", rope="normal", moe=Moe(gating="softmax", scale_key=True),
         required=_tensors("ffn_up_shexp output")),
    Arch(name="bailingmoe2", rope="neox", moe=Moe(scale_key=True),
         required=_HEAD_NORMS | _tensors("attn_qkv ffn_up_shexp output")),
    Arch(name="command-r", rope="normal", norm="layer", parallel=True, logit_scale="multiply"),
    Arch(name="cohere2", rope="normal", rope_rules=RopeRules(only_windowed=True), norm="layer", parallel=True,
         logit_scale="multiply", window=Window(period=4), tensor_scales=frozenset({"ffn"})),
    Arch(name="cohere2moe", rope="normal", rope_rules=RopeRules(only_windowed=True, dense_lead=True), norm="by_eps",
         parallel=True, logit_scale="multiply", tensor_scales=_ALL_SCALES,
         window=Window(period=4, dense_first=True, base_key=False),
         moe=Moe(scale_key=True, default_gating="sigmoid", shared_half=True), required=_tensors("ffn_up_shexp"),
         ignored=_tensors("output.scale")),
    Arch(name="smollm3", rope="normal", rope_rules=RopeRules(skip_step=4)),
    Arch(name="seed_oss", rope="neox", ffn_norm="post_attention_norm"),
    Arch(name="exaone", rope="neox"),
    Arch(name="exaone4", rope="neox", rope_rules=RopeRules(only_windowed=True),
         window=Window(period=4, default=4096, only_if_layers=64), norms_after=True,
         required=_HEAD_NORMS | _POST_NORMS),
    Arch(name="exaone-moe", rope="neox", rope_rules=RopeRules(only_windowed=True),
         window=Window(period=4, default=128, base_key=False), moe=Moe(scale_key=True),
         required=_HEAD_NORMS | _tensors("ffn_up_shexp output")),
    Arch(name="gpt2", rope="none", norm="layer", activation="gelu", position_embeddings=True,
         required=_tensors("attn_norm.bias attn_output.bias attn_qkv attn_qkv.bias ffn_down.bias ffn_norm.bias "
                           "ffn_up.bias output_norm.bias"), optional=_tensors("ffn_gate")),
    Arch(name="gptneox", rope="neox", norm="layer", activation="gelu", parallel_key=True,
         required=_tensors("attn_norm.bias attn_output.bias attn_qkv attn_qkv.bias ffn_down.bias ffn_norm.bias "
                           "ffn_up.bias output output_norm.bias"), optional=_tensors("ffn_gate")),
    Arch(name="bloom", rope="none", attention_rules=AttentionRules(alibi=8.0), norm="layer", activation="gelu",
         required=_tensors("attn_norm.bias attn_output.bias attn_qkv attn_qkv.bias ffn_down.bias ffn_norm.bias "
                           "ffn_up.bias output_norm.bias token_embd_norm token_embd_norm.bias"),
         optional=_tensors("ffn_gate")),
    Arch(name="falcon", rope="neox", norm="layer", activation="gelu", parallel=True,
         required=_tensors("attn_norm.bias attn_qkv output_norm.bias"), optional=_tensors("ffn_gate")),
    Arch(name="codeshell", rope="neox", norm="layer", activation="gelu",
         required=_tensors("attn_norm.bias attn_output.bias ffn_down.bias ffn_norm.bias ffn_up.bias output "
                           "output_norm.bias"), optional=_tensors("ffn_gate")),
    Arch(name="starcoder", rope="none", norm="layer", activation="gelu", position_embeddings=True,
         required=_tensors("attn_norm.bias attn_output.bias attn_qkv attn_qkv.bias ffn_down.bias ffn_norm.bias "
                           "ffn_up.bias output_norm.bias"), optional=_tensors("ffn_gate")),
    Arch(name="starcoder2", rope="neox", norm="layer", activation="gelu",
         required=_tensors("attn_norm.bias attn_output.bias ffn_down.bias ffn_norm.bias ffn_up.bias output_norm.bias"),
         optional=_tensors("ffn_gate")),
    Arch(name="stablelm", rope="neox", norm="layer", parallel=True,
         required=_tensors("attn_norm.bias output output_norm.bias")),
    Arch(name="orion", rope="neox", norm="layer",
         required=_tensors("attn_norm.bias ffn_norm.bias output output_norm.bias")),
    Arch(name="nemotron", rope="neox", norm="layer", activation="relu_sqr",
         required=_tensors("attn_norm.bias ffn_norm.bias output output_norm.bias"), optional=_tensors("ffn_gate")),
    Arch(name="jais2", rope="neox", norm="layer", activation="relu_sqr",
         required=_tensors("attn_norm.bias attn_output.bias ffn_down.bias ffn_norm.bias ffn_up.bias output_norm.bias"),
         optional=_tensors("ffn_gate")),
    Arch(name="apertus", rope="neox", activation="xielu", required=_HEAD_NORMS | _tensors("output"),
         optional=_tensors("ffn_gate"), ignored=_tensors("attn_q_norm.bias attn_k_norm.bias")),
    Arch(name="maincoder", rope="normal", attention_rules=AttentionRules(norm_after_rope=True), required=_HEAD_NORMS),
    Arch(name="nanbeige", rope="normal", tensor_scales=frozenset({"ffn"})),
    Arch(name="pangu-embedded", rope="neox", required=_tensors("attn_output.bias"),
         ignored=_tensors("rope_freqs rope_factors_long rope_factors_short")),
    Arch(name="bitnet", rope="neox", tensor_scales=frozenset({"ffn"}), required=_tensors("attn_sub_norm ffn_sub_norm"),
         ignored=_tensors("output.scale")),
    Arch(name="spark2_5", rope="neox", attention_rules=AttentionRules(gate="sigmoid"), activation="gelu",
         window=Window(period=1), required=_tensors("attn_gate"), ignored=_tensors("output.scale")),
    Arch(name="laguna", rope="neox", attention_rules=AttentionRules(gate="softplus"), moe=_SIGMOID,
         window=Window(period=4, dense_first=True, rope_scaling=False),
         required=_HEAD_NORMS | _tensors("attn_gate exp_probs_b.bias ffn_up_shexp"), ignored=_tensors("output.scale")),
    Arch(name="mellum", rope="neox", tensor_scales=frozenset({"exps"}), moe=_NORMED,
         window=Window(period=4, base_key=False, rope_scaling=False), required=_HEAD_NORMS | _tensors("output")),
    Arch(name="afmoe", rope="neox", rope_rules=RopeRules(skip_step=4), attention_rules=AttentionRules(gate="sigmoid"),
         embed_sqrt=True, window=Window(period=4), moe=_SIGMOID,
         required=_HEAD_NORMS | _POST_NORMS | _tensors("attn_gate exp_probs_b.bias ffn_up_shexp")),
    Arch(name="smallthinker", rope="neox", rope_rules=RopeRules(skip_step=4, skip_first=True), activation="relu",
         window=Window(period=4, dense_first=True, fixed=4096), moe=Moe(norm=True, router_on_input=True)),
    Arch(name="mimo2", rope="neox", attention_rules=AttentionRules(value_scale_key=True),
         moe=Moe(gating="sigmoid", norm=True), window=Window(period=1, freq_base=10000.0, rope_scaling=False),
         required=_tensors("output"), optional=_tensors("ffn_gate_exps"), ignored=_UNUSED_QKV),
    Arch(name="dots3note", rope="normal", attention="mla_gated", attention_rules=AttentionRules(gate="sigmoid"),
         indexer="neox", tensor_scales=_ALL_SCALES, window=Window(period=1, freq_base=10000.0), moe=Moe(scale_key=True),
         required=_tensors("attn_gate attn_k_norm exp_probs_b.bias ffn_up_shexp indexer.k_norm.bias"),
         ignored=_tensors("output.scale")),
    Arch(name="hy_v4", rope="normal", attention="mla_gated", attention_rules=AttentionRules(gate="sigmoid"),
         indexer="normal", indexer_tail=True, hyper_connections="alone", swiglu_limits="before",
         moe=Moe(scale_key=True), required=_tensors("attn_gate attn_sinks ffn_up_shexp indexer.k_norm.bias output"),
         ignored=_tensors("output.scale attn_output.scale")),
    Arch(name="grovemoe", rope="neox", moe=Moe(gating="softmax", norm=True, chunk_experts=True),
         required=_HEAD_NORMS | _tensors("ffn_gate_chexps")),
    Arch(name="llada-moe", rope="neox", causal=False, moe=_PLAIN, required=_HEAD_NORMS | _tensors("output")),
    Arch(name="rnd1", rope="neox", causal=False, moe=_NORMED, required=_HEAD_NORMS),
    Arch(name="minimax-m3", rope="neox", activation="swiglu_oai", moe=Moe(scale_key=True),
         required=_HEAD_NORMS | _tensors("exp_probs_b.bias ffn_up_shexp output")),
    Arch(name="step35", rope="neox", rope_rules=RopeRules(half=True), attention_rules=AttentionRules(gate="sigmoid"),
         swiglu_limits="after", window=Window(period=1, freq_base=10000.0, rope_scaling=False), moe=_SIGMOID,
         required=_tensors("output"), optional=_tensors("ffn_gate ffn_gate_exps ffn_gate_shexp")),
    Arch(name="arctic", rope="normal", moe=_NORMED, required=_tensors("ffn_norm_exps")),
    Arch(name="baichuan", rope="normal", rope_rules=RopeRules(n_layers=32),
         attention_rules=AttentionRules(alibi=8.0, alibi_layers=40), required=_tensors("output")),
    Arch(name="chameleon", rope="normal", attention_rules=AttentionRules(head_norm_eps=1e-5), swin_key=True,
         required=_HEAD_NORMS),
    Arch(name="dbrx", rope="neox", attention_rules=AttentionRules(clamp_key=True), norm="layer",
         ffn_norm="attn_output_norm", moe=_NORMED, required=_tensors("attn_qkv output")),
    Arch(name="deci", rope="normal", attention="gqa_or_one", optional_attention=True),
    Arch(name="dream", rope="neox", causal=False, ignored=_tensors("output.bias")),
    Arch(name="grok", rope="neox", rope_rules=RopeRules(yarn_keys="ext"),
         attention_rules=AttentionRules(scale="output", softcap=30.0), activation="gelu", final_softcap=0.0,
         logit_scale="multiply", scales=frozenset({"embedding"}), fixed_scales=_GROK,
         post_norms=("attn_output_norm", "layer_output_norm", "post_ffw_norm"),
         moe=Moe(gating="softmax", norm=True, dense_factor=0.5**0.5),
         required=_tensors("attn_output_norm post_ffw_norm"), optional=_tensors("ffn_gate ffn_gate_exps")),
    Arch(name="hunyuan_vl", rope="glm_moe", rope_rules=RopeRules(alpha_key=True),
         attention_rules=AttentionRules(norm_after_rope=True), required=_HEAD_NORMS),
    Arch(name="internlm2", rope="normal", required=_tensors("output")),
    Arch(name="jais", rope="none", attention_rules=AttentionRules(alibi=None, scale="head"), norm="layer",
         required=_tensors("attn_norm.bias attn_output.bias attn_qkv attn_qkv.bias ffn_down.bias ffn_gate.bias "
                           "ffn_norm.bias ffn_up.bias output output_norm.bias")),
    Arch(name="llada", rope="normal", causal=False,
         ignored=_tensors("attn_output.bias ffn_gate.bias ffn_up.bias ffn_down.bias rope_freqs")),
    Arch(name="maple", rope="neox", rope_rules=RopeRules(only_windowed=True), swiglu_limits="before",
         window=Window(period=1), moe=_NORMED, required=_HEAD_NORMS | _tensors("output")),
    Arch(name="mpt", rope="none", attention_rules=AttentionRules(alibi=None, clamp_key=True), norm="layer",
         activation="gelu", activation_scales=True, required=_tensors("attn_qkv"), optional=_tensors("ffn_gate")),
    Arch(name="muse-glimmer", rope="normal", rope_rules=RopeRules(only_windowed=True),
         attention_rules=AttentionRules(gate="sigmoid"), embed_norm=True, post_norm_eps=1e-8, logit_scale="multiply",
         final_softcap=30.0, window=Window(period=4),
         required=_HEAD_NORMS | _POST_NORMS | _tensors("attn_gate output")),
    Arch(name="talkie", rope="neox", attention_rules=AttentionRules(plain_qk_norm=True, head_gains=True),
         embed_norm=True, plain_norms=True, embed_skip=True, logit_scale="multiply", tensor_scales=frozenset({"ffn"}),
         required=_tensors("output"), ignored=_tensors("output.scale ffn_up.scale ffn_gate.scale")),
    Arch(name="openelm", rope="neox", required=_HEAD_NORMS | _tensors("attn_qkv"), ignored=_tensors("attn_qkv.scale")),
    Arch(name="plamo", rope="neox", parallel=True, required=_tensors("output")),
    Arch(name="plamo2", rope="neox", attention="plamo2", glu_in_up=True,
         required=_HEAD_NORMS | _POST_NORMS | _tensors("attn_qkv"), optional=_tensors("ffn_gate"),
         ignored=_tensors("attn_qkv.scale ssm_in.scale ssm_out.scale")),
    Arch(name="plamo3", rope="neox", glu_in_up=True, window=Window(period=8),
         required=_HEAD_NORMS | _POST_NORMS | _tensors("attn_qkv"), optional=_tensors("ffn_gate"),
         ignored=_tensors("attn_qkv.scale")),
    Arch(name="qwen", rope="neox", required=_tensors("attn_qkv attn_qkv.bias output")),
    Arch(name="refact", rope="none", attention_rules=AttentionRules(alibi=8.0), dense_only=True,
         optional=_tensors("ffn_gate_exps"),
         ignored=_tensors("attn_output.bias ffn_gate.bias ffn_up.bias ffn_down.bias rope_freqs rope_factors_long "
                          "rope_factors_short")),
    Arch(name="xverse", rope="normal", required=_tensors("output")),
    Arch(name="rwkv6", rope="none", attention="time_mix_6", norm="layer", channel_mix=True,
         required=_tensors("attn_norm.bias attn_norm_2.bias channel_mix_receptance output output_norm.bias "
                           "time_mix_first time_mix_ln.bias token_embd_norm token_embd_norm.bias")),
    Arch(name="rwkv6qwen2", rope="none", attention="time_mix_6", required=_tensors("output")),
    Arch(name="rwkv7", rope="none", attention="time_mix_7", norm="layer", channel_mix=True,
         required=_tensors("attn_norm.bias attn_norm_2.bias output output_norm.bias time_mix_g1 time_mix_g2 "
                           "time_mix_ln time_mix_ln.bias time_mix_v0 time_mix_v1 time_mix_v2 token_embd_norm "
                           "token_embd_norm.bias")),
    Arch(name="arwkv7", rope="none", attention="time_mix_7",
         required=_tensors("output time_mix_v0 time_mix_v1 time_mix_v2")),
    Arch(name="bert", rope="none", norm="layer", activation="gelu", causal=False, encoder=True, residual_norms=True,
         position_embeddings=True, required=_BERT, optional=_tensors("ffn_gate")),
    Arch(name="nomic-bert", rope="neox", norm="layer", causal=False, encoder=True, residual_norms=True, required=_BERT,
         ignored=_tensors("ffn_up.bias ffn_down.bias ffn_gate.bias")),
    Arch(name="nomic-bert-moe", rope="neox", norm="layer", activation="gelu", causal=False, encoder=True,
         residual_norms=True, moe=_PLAIN, required=_BERT, optional=_tensors("ffn_gate ffn_gate_exps")),
    Arch(name="jina-bert-v2", rope="none", attention_rules=AttentionRules(alibi=8.0), norm="layer", activation="gelu",
         glu_in_up=True, causal=False, encoder=True, residual_norms=True,
         required=_BERT | _tensors("token_types attn_output.bias ffn_down.bias"), optional=_tensors("ffn_gate")),
    Arch(name="jina-bert-v3", rope="neox", norm="layer", activation="gelu", causal=False, encoder=True,
         residual_norms=True, required=_BERT, optional=_tensors("ffn_gate")),
    Arch(name="neo-bert", rope="normal", glu_in_up=True, causal=False, encoder=True, output_norm="enc.output_norm",
         required=_tensors("attn_qkv"), optional=_tensors("ffn_gate")),
    Arch(name="eurobert", rope="neox", causal=False, encoder=True),
    Arch(name="modern-bert", rope="neox", norm="layer", activation="gelu", activation_key=True, glu_in_up=True,
         causal=False, encoder=True, window=Window(period=3, dense_first=True, mask="symmetric"),
         required=_tensors("attn_qkv token_embd_norm"), optional=_tensors("ffn_gate")),
    Arch(name="gemma-embedding", rope="neox", activation="gelu", embed_sqrt=True, causal=False, encoder=True,
         window=Window(period=6, mask="symmetric"), required=_HEAD_NORMS | _POST_NORMS, ignored=_tensors("output")),
    Arch(name="llama-embed", rope="normal", encoder=True, tensor_scales=frozenset({"ffn", "exps"}),
         moe=_NORMED, optional=_tensors("ffn_gate_exps"), ignored=_tensors("output")),
    *(Arch(name=name, rope="none", attention_rules=AttentionRules(scale="one"), activation="relu",
           gated_activation="gelu", causal=False, encoder=True, layer_prefix="enc.", decoder_prefix="dec.",
           output_norm="enc.output_norm", optional=_tensors("ffn_gate"), ignored=_tensors("output"))
      for name in ("t5", "t5encoder")),
)
# fmt: on

ARCHS: dict[str, Arch] = {row.name: row for row in _ROWS}


def arch_by_name(name: str) -> Arch:
    """Return the row of an architecture. Raises TypeNotSupported."""
    try:
        return ARCHS[name]
    except KeyError:
        names = ", ".join(sorted(ARCHS))
        raise TypeNotSupported(
            f"the architecture {name or '(none)'} is not supported, so the model cannot be run (it can still be "
            f"quantized); supported are: {names}",
            "QK-E304",
        ) from None
