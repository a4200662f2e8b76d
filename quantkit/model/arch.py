"""THE table of architectures: what each does that its tensors do not say.

A layer is: norm, attention, (norm,) add; norm, feed-forward, (norm,) add. Its tensors say which norms, biases,
q/k norms, sinks and experts it has (graph.py); a row says the rest. The authority is llama.cpp b11434's
src/models/*.cpp: where that ignores a key of the metadata, the row must, too.

To add an architecture: write its row; run tests/test_engine_zoo.py with a model of it (tests/zoo.py draws one from a
header) against llama.cpp's logits; only what no field can say becomes a block of its own (graph.ATTENTION).
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import TypeNotSupported


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which layers attend to a window of positions only.

    period: of every ``period`` layers the last (dense_first: the first) attends to all; a pattern in the metadata comes
    first. default: the window where the metadata has none (0: then there is no window at all).
    """

    period: int
    dense_first: bool = False
    default: int = 0
    fixed: int = 0
    mask: str = "sliding"
    only_if_layers: int = 0
    #: rope base of windowed layers where ``rope.freq_base_swa`` is missing: 0 for that of the others.
    freq_base: float = 0.0
    #: ``rope.freq_base_swa`` holds.
    own_base: bool = True
    #: Rope scaling (factor, yarn) holds for windowed layers, too.
    scaled: bool = True


@dataclass(frozen=True, kw_only=True)
class Moe:
    """How an architecture routes. None: as the metadata says."""

    gating: str | None = None
    norm: bool | None = None
    #: ``expert_weights_scale`` of the metadata holds.
    scaled: bool = False
    #: Where ``expert_gating_func`` is missing or 0.
    default_gating: str | None = None
    #: Numbers of layers and tokens of those models that lack it and use sigmoid anyway.
    sigmoid_sizes: tuple[tuple[int, int], ...] = ()
    #: The inputs of the experts are weighted, not their outputs; the choice falls on the logits (Llama 4).
    weight_before: bool = False
    #: The router reads the layer's input as it is (SmallThinker).
    on_input: bool = False
    #: The experts and the shared one count half each (Cohere 2 MoE).
    shared_half: bool = False
    #: A factor of the sum of experts and the dense feed-forward layer beside them, if there is one (Grok).
    dense_factor: float = 1.0
    #: Neighbouring experts share a smaller one, which adds its part (Grove MoE).
    chunks: bool = False


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors that no metadata holds (MiniCPM 3), or where they hold none (MiniCPM).

    Embeddings are multiplied by ``embed``, what a layer adds by depth / sqrt(n_layer) if that is not 0, logits by
    width / n_embd, or by ``logits`` (where ``logit_scale`` divides, they are divided by it).
    """

    embed: float
    depth: float = 0.0
    width: float = 0.0
    logits: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture."""

    name: str
    #: ``normal``, ``neox``, ``mrope`` and ``imrope`` (neox with sections, interleaved ones), ``none``; ``glm`` and
    #: ``glm_moe`` are normal and neox unless the metadata has sections.
    rope: str
    #: The block of an attention layer, see graph.ATTENTION.
    attention: str = "gqa"
    #: ``rms``, ``layer``, or ``by_eps``: the one whose epsilon the metadata has.
    norm: str = "rms"
    activation: str = "silu"
    #: Norms of rows have no weights (OLMo, Talkie).
    plain_norms: bool = False
    #: Embeddings of positions are added to those of tokens (StarCoder); where the file has some, they always are.
    position_embeddings: bool = False
    #: Embeddings of tokens are normalized, without weights (Muse Glimmer, Talkie).
    embed_norm: bool = False
    #: q, k and v are clamped where ``attention.clamp_kqv`` says so (OLMo).
    clamp_qkv: bool = False
    #: Dense feed-forward without a gate tensor: ``ffn_up`` holds gate and up (glu), or there is no gate.
    glu_in_up: bool = False
    window: Window | None = None
    #: Only windowed layers rotate (Cohere 2, EXAONE 4); beside them, the leading dense ones (Cohere 2 MoE).
    rope_only_windowed: bool = False
    #: The largest bias of attention by distance (ALiBi); 0: there is none. None: ``attention.max_alibi_bias`` says.
    alibi: float | None = 0.0
    #: Numbers of layers of the models that rotate, and of those that have the bias (Baichuan); 0: all.
    rope_layers: int = 0
    alibi_layers: int = 0
    #: ``rope.scaling.alpha`` a multiplies the base, by a^(d / (d - 2)) for heads of d columns (Hunyuan VL).
    rope_alpha: bool = False
    rope_dense_lead: bool = False
    #: ``attention.rope_pattern`` says which layers rotate (Granite SWA).
    rope_pattern: bool = False
    #: Layers without a window rotate half the columns, and only they by ``rope_freqs`` (Step 3.5).
    rope_half: bool = False
    #: Nothing rotates if ``rope.scaling.finetuned`` is false (Granite).
    rope_if_finetuned: bool = False
    #: Every n-th layer does not rotate (SmolLM 3, Llama 4); 0: all do. first: the first of n does not, if there are
    #: windows and more than n layers (SmallThinker).
    no_rope_step: int = 0
    no_rope_first: bool = False
    #: q/k norms come after rope (Hunyuan).
    norm_after_rope: bool = False
    #: q/k norms are layer norms of this epsilon (Chameleon); 0: as the others.
    head_norm_eps: float = 0.0
    #: Names of norms: before the feed-forward layer, after attention, and after the feed-forward layer.
    ffn_norm: str = "ffn_norm"
    post_norms: tuple[str, ...] = ("post_attention_norm", "post_ffw_norm")
    #: The epsilon of the last two; 0: that of all.
    post_norm_eps: float = 0.0
    #: Where ``swin_norm`` says so, the norms before attention and the feed-forward layer come after them (Chameleon).
    swin_key: bool = False
    #: Layers may lack attention, or be nothing at all (Deci).
    uneven: bool = False
    #: Attention and feed-forward layer read the same norm and are added together (Cohere, Phi 2; StableLM without
    #: ffn_norm).
    parallel: bool = False
    #: They are added together, each with a norm of its own, where ``use_parallel_residual`` says so (GPT-NeoX).
    parallel_key: bool = False
    #: Embeddings are multiplied by sqrt(n_embd) (Gemma).
    embed_sqrt: bool = False
    #: ``logit_scale`` multiplies or divides the logits.
    logit_scale: str = ""
    fixed_scales: Scales | None = None
    #: embedding_scale, residual_scale of the metadata hold (Granite, MiniCPM).
    scales: bool = False
    #: The factor of q . k, if it is not 1 / sqrt(head): ``attention.scale`` of the metadata if it has one (``key``),
    #: ``attention.output_scale``, without which Grok's (``output``), 1 / head (``head``).
    attention_scale: str = ""
    #: ``attention.value_scale``, a factor of what attention gives (MiMo 2), does.
    value_scale: bool = False
    #: What attention gives is multiplied by this function of ``attn_gate``'s product, a value a head or a column.
    attention_gate: str = ""
    #: Attention logits are capped (Gemma 2), by this where the metadata do not say; so are the model's logits.
    attn_softcap: float = 0.0
    final_softcap: float | None = None
    #: What ``swiglu_clamp_exp`` and ``_shexp`` limit beside up: the gate ``after`` its activation; or ``before`` it; of
    #: experts alone unless ``before_all``, where the shared one without its key has theirs.
    swiglu_limits: str = ""
    #: ``.scale`` tensors beside weights that llama.cpp multiplies by: of ``ffn``, ``exps``, ``shexp``.
    tensor_scales: frozenset[str] = frozenset()
    moe: Moe = Moe()
    #: A factor of q by position: llama4 (of layers that do not rotate), or mistral3 (attention.temperature_scale).
    temperature: str = ""
    #: q and k are normalized after rope, without weights (Llama 4 but its largest, Talkie).
    plain_qk_norm: bool = False
    #: Several streams run beside the layers (hyper.py), ``alone`` or ``mixed`` with each other.
    hyper: str = ""
    #: Every token sees all of its sequence (models of diffusion).
    causal: bool = True
    #: The bias of attn_output, which llama.cpp reads from any file, is added.
    output_bias: bool = True
    #: What else of yarn is read of the metadata: ``log``, beta_fast, beta_slow and log multiplier; ``ext``, the betas
    #: and the extrapolation factor.
    yarn_keys: str = ""
    #: yarn's two multipliers are one, so that cos and sin keep their length (DeepSeek 2).
    yarn_cancels: bool = False
    #: So is the log multiplier where keys are latent rows.
    yarn_log: bool = True
    #: How columns of the lightning indexer rotate, ``normal`` or ``neox``; empty: there is none (indexer.py).
    indexer: str = ""
    #: The last columns do, not the first.
    indexer_tail: bool = False
    #: Value head h of a delta net has key head h % n (Qwen3.5), and not h // (heads of a key head) (Qwen3-Next).
    tiled_heads: bool = False
    #: A layer is one block, what ``attention`` names: no feed-forward layer follows (Mamba, Nemotron H).
    single_block: bool = False
    #: Layers of Mamba 2 may lack their norm (Falcon H1).
    scan_norm_optional: bool = False
    #: In place of a feed-forward layer, one that mixes channels of a row and the one before it (RWKV).
    mixes_channels: bool = False
    #: Layers mix what earlier ones have added up (residuals.py).
    mixtures: bool = False
    #: What is added to is what a norm gives, times residual_scale of the metadata (MiniMax Text 01).
    residual_of_norms: bool = False
    #: Decays of delta attention are ``kda.gate_lower_bound`` times the sigmoid of this times A times what they come of
    #: (0: A times its softplus), if the metadata has one.
    bounded_decay: int = 0
    #: The name of the last norm.
    output_norm: str = "output_norm"
    #: A layer has several residual streams (gemma3n.py); ``final_logit_softcapping`` of the metadata is ignored.
    altup: bool = False
    #: As many layers have caches of their own, others share them; 0: as the metadata say.
    own_caches: int = 0
    #: Every head of queries is multiplied by a factor of its own, ``attn_q_norm``, after its norm (Talkie).
    head_gains: bool = False
    #: A layer adds the model's input once more, times ``layer_output_scale`` (Talkie).
    embed_skip: bool = False
    #: In the first ``hash_layer_count`` layers a table says which experts a token has.
    hashed: bool = False
    #: Its prediction layer is one like the others (nextn.py).
    nextn: bool = False


#: The usual routers: weights of the chosen experts made to add up to 1, and as the softmax over all gives them.
_NORMED, _PLAIN = Moe(gating="softmax", norm=True), Moe(gating="softmax", norm=False)
#: Without the key: Laguna, AFMoE, HY V3, Step 3.5.
_SIGMOID = Moe(scaled=True, default_gating="sigmoid")
#: Without the key: DeepSeek 2 and 2.5, and GLM 4.7 Lite.
_DEEPSEEK = Moe(scaled=True, default_gating="softmax", sigmoid_sizes=((47, 154880), (48, 154880)))
#: Where old files do not say.
_GROK = Scales(embed=78.38367176906169, logits=0.5773502691896257)
_ALL_SCALES = frozenset({"ffn", "exps", "shexp"})

# fmt: off
_ROWS = (
    Arch(name="llama", rope="normal", tensor_scales=frozenset({"ffn", "exps"}), moe=_NORMED),
    Arch(name="arcee", rope="normal", activation="relu_sqr"),
    Arch(name="llama4", rope="normal", window=Window(period=4, fixed=8192, mask="chunked"), temperature="llama4",
         plain_qk_norm=True, no_rope_step=4, moe=Moe(gating="sigmoid", norm=False, weight_before=True)),
    Arch(name="mistral3", rope="normal", temperature="mistral3", yarn_keys="log",
         tensor_scales=frozenset({"ffn", "exps"}), moe=_NORMED),
    Arch(name="qwen2", rope="neox"),
    Arch(name="qwen2moe", rope="neox", moe=_PLAIN),
    Arch(name="qwen2vl", rope="mrope"),
    Arch(name="qwen3", rope="neox", tensor_scales=frozenset({"ffn"})),
    Arch(name="qwen3moe", rope="neox", tensor_scales=frozenset({"exps"}), moe=_NORMED),
    Arch(name="qwen3next", nextn=True, rope="neox", attention="delta_nets", ffn_norm="post_attention_norm",
         output_bias=False, tensor_scales=frozenset({"exps", "shexp"}), moe=_NORMED),
    Arch(name="qwen35", nextn=True, rope="imrope", attention="delta_nets", tiled_heads=True,
         ffn_norm="post_attention_norm", output_bias=False, tensor_scales=frozenset({"ffn", "ssm"})),
    Arch(name="qwen35moe", nextn=True, rope="imrope", attention="delta_nets", tiled_heads=True,
         ffn_norm="post_attention_norm", output_bias=False, tensor_scales=frozenset({"exps", "shexp", "ssm"}),
         moe=_NORMED),
    Arch(name="qwen3vl", rope="imrope"),
    Arch(name="qwen3vlmoe", rope="imrope", moe=_NORMED),
    Arch(name="gpt-oss", rope="neox", activation="swiglu_oai", window=Window(period=2), ffn_norm="post_attention_norm",
         moe=Moe(gating="softmax_weight", norm=False)),
    Arch(name="deepseek", rope="normal", moe=Moe(gating="softmax", norm=False, scaled=True)),
    Arch(name="deepseek2", nextn=True, rope="normal", attention="mla", yarn_cancels=True, output_bias=False,
         moe=_DEEPSEEK),
    Arch(name="deepseek32", nextn=True, rope="normal", attention="mla", indexer="neox", output_bias=False,
         moe=Moe(scaled=True)),
    Arch(name="glm-dsa", nextn=True, rope="normal", attention="mla", indexer="normal", yarn_log=False,
         output_bias=False, moe=Moe(scaled=True, default_gating="sigmoid")),
    Arch(name="deepseek4", rope="normal", attention="compressed", hyper="mixed", hashed=True,
         swiglu_limits="before_all", output_bias=False, moe=Moe(scaled=True)),
    Arch(name="mistral4", rope="normal", attention="mla", output_bias=False, moe=_DEEPSEEK),
    Arch(name="deepseek2-ocr", rope="neox", attention="unscaled", output_bias=False,
         moe=Moe(scaled=True, default_gating="softmax")),
    Arch(name="minicpm", rope="normal", scales=True, logit_scale="divide",
         fixed_scales=Scales(embed=12.0, depth=1.4, width=256.0)),
    Arch(name="minicpm3", rope="neox", attention="mla_plain", output_bias=False,
         fixed_scales=Scales(embed=12.0, depth=1.4, width=256.0)),
    Arch(name="plm", rope="normal", attention="mla_plain", activation="relu_sqr", output_bias=False),
    Arch(name="dots1", rope="neox", moe=Moe(scaled=True)),
    Arch(name="chatglm", rope="normal", glu_in_up=True, output_bias=False),
    Arch(name="hy_v3", rope="neox", tensor_scales=_ALL_SCALES, moe=_SIGMOID),
    Arch(name="glm4", rope="glm", glu_in_up=True, output_bias=False),
    Arch(name="glm4moe", nextn=True, rope="glm_moe", ffn_norm="post_attention_norm", output_bias=False,
         moe=Moe(scaled=True, default_gating="sigmoid")),
    Arch(name="gemma", rope="neox", output_bias=False, activation="gelu", embed_sqrt=True),
    Arch(name="gemma2", rope="neox", output_bias=False, activation="gelu", embed_sqrt=True, attn_softcap=50.0,
         final_softcap=30.0, window=Window(period=2, default=4096)),
    Arch(name="gemma3", rope="neox", output_bias=False, activation="gelu", embed_sqrt=True, final_softcap=0.0,
         window=Window(period=6, freq_base=10000.0, scaled=False)),
    Arch(name="gemma3n", rope="neox", attention="gemma4", output_bias=False, activation="gelu", embed_sqrt=True,
         final_softcap=30.0, altup=True, own_caches=20, window=Window(period=5, freq_base=10000.0, scaled=False)),
    Arch(name="gemma4", rope="neox", attention="gemma4", output_bias=False, activation="gelu", embed_sqrt=True,
         final_softcap=0.0, tensor_scales=frozenset({"ffn", "exps"}), moe=_NORMED,
         window=Window(period=1, freq_base=10000.0, scaled=False)),
    Arch(name="phi2", rope="neox", norm="layer", activation="gelu", parallel=True),
    Arch(name="phi3", rope="neox", glu_in_up=True, moe=_NORMED),
    Arch(name="phimoe", rope="neox", glu_in_up=True, moe=_NORMED),
    Arch(name="olmo", rope="normal", norm="layer", plain_norms=True, clamp_qkv=True, output_bias=False),
    Arch(name="olmoe", rope="neox", output_bias=False, moe=_PLAIN),
    Arch(name="olmo2", rope="neox", output_bias=False, window=Window(period=4, scaled=False)),
    Arch(name="granite", rope="normal", rope_if_finetuned=True, scales=True, attention_scale="key",
         logit_scale="divide"),
    Arch(name="granitemoe", rope="normal", scales=True, attention_scale="key", logit_scale="divide", moe=_NORMED),
    Arch(name="granite_swa", rope="normal", scales=True, attention_scale="key", logit_scale="divide", glu_in_up=True,
         rope_pattern=True, window=Window(period=1, own_base=False), moe=_NORMED),
    Arch(name="granitehybrid", rope="normal", attention="mamba2_hybrid", rope_if_finetuned=True, scales=True,
         attention_scale="key", logit_scale="divide", moe=_NORMED),
    Arch(name="mamba", rope="none", attention="mamba", single_block=True),
    Arch(name="mamba2", rope="none", attention="mamba2", single_block=True),
    Arch(name="jamba", rope="none", attention="mamba_hybrid", output_bias=False, moe=_PLAIN),
    Arch(name="falcon-h1", rope="neox", attention="mamba2_beside", scan_norm_optional=True, output_bias=False),
    Arch(name="nemotron_h", rope="none", attention="nemotron_h", single_block=True, activation="relu_sqr",
         tensor_scales=frozenset({"ffn"})),
    Arch(name="nemotron_h_moe", rope="none", attention="nemotron_h", single_block=True, activation="relu_sqr",
         tensor_scales=frozenset({"ffn", "exps", "shexp"}), moe=Moe(gating="sigmoid", scaled=True)),
    Arch(name="lfm2", rope="neox", attention="short_convolutions", output_norm="token_embd_norm", output_bias=False,
         window=Window(period=0)),
    Arch(name="lfm2moe", rope="neox", attention="short_convolutions", output_norm="token_embd_norm",
         output_bias=False, moe=Moe(norm=True)),
    Arch(name="kimi-linear", rope="none", attention="kimi_linear", output_bias=False,
         moe=Moe(norm=True, scaled=True)),
    Arch(name="kimi-k3", rope="none", attention="kimi_linear", activation="situ", mixtures=True, bounded_decay=-1,
         attention_gate="sigmoid", output_bias=False, moe=Moe(scaled=True)),
    Arch(name="bailingmoe3", rope="glm", attention="kimi_linear", bounded_decay=1, swiglu_limits="after",
         attention_gate="sigmoid", output_bias=False, moe=Moe(scaled=True)),
    Arch(name="minimax-01", rope="neox", attention="lightning", residual_of_norms=True, output_bias=False,
         moe=_NORMED),
    Arch(name="ernie4_5", rope="normal", output_bias=False),
    Arch(name="ernie4_5-moe", rope="normal", output_bias=False, moe=_NORMED),
    Arch(name="paddleocr", rope="mrope"),
    Arch(name="hunyuan-dense", rope="neox", norm_after_rope=True),
    Arch(name="hunyuan-moe", rope="neox", norm_after_rope=True, moe=_NORMED),
    Arch(name="minimax-m2", rope="neox", output_bias=False, moe=Moe(norm=True)),
    Arch(name="bailingmoe", rope="normal", moe=Moe(gating="softmax", scaled=True)),
    Arch(name="bailingmoe2", rope="neox", moe=Moe(scaled=True)),
    Arch(name="command-r", rope="normal", norm="layer", parallel=True, logit_scale="multiply"),
    Arch(name="cohere2", rope="normal", norm="layer", parallel=True, logit_scale="multiply", rope_only_windowed=True,
         window=Window(period=4)),
    Arch(name="cohere2moe", rope="normal", norm="by_eps", parallel=True, logit_scale="multiply",
         rope_only_windowed=True, rope_dense_lead=True, tensor_scales=_ALL_SCALES,
         window=Window(period=4, dense_first=True, own_base=False),
         moe=Moe(scaled=True, default_gating="sigmoid", shared_half=True)),
    Arch(name="smollm3", rope="normal", no_rope_step=4),
    Arch(name="seed_oss", rope="neox", ffn_norm="post_attention_norm"),
    Arch(name="exaone", rope="neox"),
    Arch(name="exaone4", rope="neox", rope_only_windowed=True, output_bias=False,
         window=Window(period=4, default=4096, only_if_layers=64)),
    Arch(name="exaone-moe", rope="neox", rope_only_windowed=True, output_bias=False,
         window=Window(period=4, default=128, own_base=False), moe=Moe(scaled=True)),
    Arch(name="gpt2", rope="none", norm="layer", activation="gelu", position_embeddings=True),
    Arch(name="gptneox", rope="neox", norm="layer", activation="gelu", parallel_key=True),
    Arch(name="bloom", rope="none", norm="layer", activation="gelu", alibi=8.0),
    Arch(name="falcon", rope="neox", norm="layer", activation="gelu", parallel=True, output_bias=False),
    Arch(name="codeshell", rope="neox", norm="layer", activation="gelu"),
    Arch(name="starcoder", rope="none", norm="layer", activation="gelu", position_embeddings=True),
    Arch(name="starcoder2", rope="neox", norm="layer", activation="gelu"),
    Arch(name="stablelm", rope="neox", norm="layer", parallel=True, output_bias=False),
    Arch(name="orion", rope="neox", norm="layer", output_bias=False),
    Arch(name="nemotron", rope="neox", norm="layer", activation="relu_sqr"),
    Arch(name="jais2", rope="neox", norm="layer", activation="relu_sqr"),
    Arch(name="apertus", rope="neox", activation="xielu"),
    Arch(name="maincoder", rope="normal", norm_after_rope=True),
    Arch(name="nanbeige", rope="normal", tensor_scales=frozenset({"ffn"})),
    Arch(name="pangu-embedded", rope="neox"),
    Arch(name="bitnet", rope="neox", tensor_scales=frozenset({"ffn"})),
    Arch(name="spark2_5", rope="neox", activation="gelu", window=Window(period=1), attention_gate="sigmoid",
         output_bias=False),
    Arch(name="laguna", rope="neox", attention_gate="softplus", output_bias=False, moe=_SIGMOID,
         window=Window(period=4, dense_first=True, scaled=False)),
    Arch(name="mellum", rope="neox", tensor_scales=frozenset({"exps"}), moe=_NORMED,
         window=Window(period=4, own_base=False, scaled=False)),
    Arch(name="afmoe", rope="neox", embed_sqrt=True, attention_gate="sigmoid", output_bias=False, no_rope_step=4,
         window=Window(period=4), moe=_SIGMOID),
    Arch(name="smallthinker", rope="neox", activation="relu", no_rope_step=4, no_rope_first=True,
         window=Window(period=4, dense_first=True, fixed=4096), moe=Moe(norm=True, on_input=True)),
    Arch(name="mimo2", rope="neox", value_scale=True, output_bias=False, moe=Moe(gating="sigmoid", norm=True),
         window=Window(period=1, freq_base=10000.0, scaled=False)),
    Arch(name="dots3note", rope="normal", attention="mla_gated", attention_gate="sigmoid", indexer="neox",
         output_bias=False, tensor_scales=_ALL_SCALES, window=Window(period=1, freq_base=10000.0),
         moe=Moe(scaled=True)),
    Arch(name="hy_v4", rope="normal", attention="mla_gated", attention_gate="sigmoid", indexer="normal",
         indexer_tail=True, hyper="alone", swiglu_limits="before", output_bias=False, moe=Moe(scaled=True)),
    Arch(name="grovemoe", rope="neox", moe=Moe(gating="softmax", norm=True, chunks=True)),
    Arch(name="llada-moe", rope="neox", causal=False, output_bias=False, moe=_PLAIN),
    Arch(name="rnd1", rope="neox", causal=False, moe=_NORMED),
    Arch(name="minimax-m3", rope="neox", activation="swiglu_oai", output_bias=False, moe=Moe(scaled=True)),
    Arch(name="step35", rope="neox", rope_half=True, attention_gate="sigmoid", swiglu_limits="after",
         output_bias=False, window=Window(period=1, freq_base=10000.0, scaled=False), moe=_SIGMOID),
    Arch(name="arctic", rope="normal", output_bias=False, moe=_NORMED),
    Arch(name="baichuan", rope="normal", alibi=8.0, rope_layers=32, alibi_layers=40, output_bias=False),
    Arch(name="chameleon", rope="normal", swin_key=True, head_norm_eps=1e-5, output_bias=False),
    Arch(name="dbrx", rope="neox", norm="layer", clamp_qkv=True, ffn_norm="attn_output_norm", output_bias=False,
         moe=_NORMED),
    Arch(name="deci", rope="normal", attention="gqa_or_one", uneven=True),
    Arch(name="dream", rope="neox", causal=False),
    Arch(name="grok", rope="neox", activation="gelu", yarn_keys="ext", attention_scale="output", attn_softcap=30.0,
         final_softcap=0.0, logit_scale="multiply", scales=True, fixed_scales=_GROK,
         post_norms=("attn_output_norm", "layer_output_norm", "post_ffw_norm"),
         moe=Moe(gating="softmax", norm=True, dense_factor=0.5**0.5)),
    Arch(name="hunyuan_vl", rope="glm_moe", rope_alpha=True, norm_after_rope=True),
    Arch(name="internlm2", rope="normal"),
    Arch(name="jais", rope="none", norm="layer", alibi=None, attention_scale="head"),
    Arch(name="llada", rope="normal", causal=False, output_bias=False),
    Arch(name="maple", rope="neox", rope_only_windowed=True, swiglu_limits="before", output_bias=False,
         window=Window(period=1), moe=_NORMED),
    Arch(name="mpt", rope="none", norm="layer", activation="gelu", alibi=None, clamp_qkv=True),
    Arch(name="muse-glimmer", rope="normal", embed_norm=True, post_norm_eps=1e-8, rope_only_windowed=True,
         attention_gate="sigmoid", logit_scale="multiply", final_softcap=0.0, output_bias=False,
         window=Window(period=4)),
    Arch(name="talkie", rope="neox", embed_norm=True, plain_norms=True, plain_qk_norm=True, head_gains=True,
         embed_skip=True, logit_scale="multiply", tensor_scales=frozenset({"ffn"}), output_bias=False),
    Arch(name="openelm", rope="neox", output_bias=False),
    Arch(name="plamo", rope="neox", parallel=True, output_bias=False),
    Arch(name="plamo2", rope="neox", attention="plamo2", glu_in_up=True, output_bias=False),
    Arch(name="plamo3", rope="neox", glu_in_up=True, output_bias=False, window=Window(period=8)),
    Arch(name="qwen", rope="neox", output_bias=False),
    Arch(name="refact", rope="none", alibi=8.0, output_bias=False),
    Arch(name="xverse", rope="normal", output_bias=False),
    Arch(name="rwkv6", rope="none", attention="time_mix_6", norm="layer", mixes_channels=True),
    Arch(name="rwkv6qwen2", rope="none", attention="time_mix_6"),
    Arch(name="rwkv7", rope="none", attention="time_mix_7", norm="layer", mixes_channels=True),
    Arch(name="arwkv7", rope="none", attention="time_mix_7"),
)
# fmt: on

ARCHS: dict[str, Arch] = {row.name: row for row in _ROWS}


def arch_by_name(name: str) -> Arch:
    """Return the row of an architecture; TypeNotSupported if there is none."""
    try:
        return ARCHS[name]
    except KeyError:
        known = ", ".join(sorted(ARCHS))
        raise TypeNotSupported(
            f"the architecture {name or '(none)'} is not known here, so its model cannot be run (it can still be "
            f"quantized); these are: {known}"
        ) from None
