"""One forward pass, written once: a model's tensors and its architecture's row become a list of operations.

``build_graph`` walks the layers; a layer asks its tensors for what there is (biases, norms, experts, a shared expert)
and the row of arch.py for what tensors cannot say. Blocks that only some architectures have (MLA, delta nets) lie in
files of their own and are entered in attention_blocks. No backend is known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.model.arch import Arch, arch_by_name
from quantkit.model.hparams import HParams
from quantkit.model.ops import (
    Activate,
    Activation,
    Add,
    Attention,
    Cache,
    CacheWrite,
    Combine,
    Embed,
    Glu,
    Graph,
    Matrix,
    MulMat,
    MulMatId,
    MultiplyBy,
    Norm,
    Op,
    Repeat,
    Rope,
    RopeConfig,
    RopeTable,
    Route,
    Routing,
    Scale,
    ScaleByPosition,
    SelectOutputs,
    Softcap,
    State,
    Take,
    Value,
)

#: Kinds of rope that read ``rope.dimension_sections``.
_SECTIONED = ("imrope", "glm", "glm_moe")

#: expert_gating_func of the metadata.
GATING: Mapping[int, str] = {1: "softmax", 2: "sigmoid", 3: "softmax_weight"}


def build_graph(source: GGUFFile, n_ctx: int = 0) -> Graph:
    """Return the forward pass of a model.

    Args:
        source: the opened model; its tensors' data are not read.
        n_ctx: tokens a sequence can have; some models choose their rope factors by it (0: those of training).

    Raises:
        TypeNotSupported: the architecture, or a part of this model, is not known here.
        FormatError: a tensor or key that the model needs is missing.
    """
    b = Builder(source, n_ctx)
    x = b.value("embeddings", b.h.n_embd)
    b.add(Embed(out=x, weight=b.matrix("token_embd.weight"), scale=_embed_scale(b)))
    for layer in range(b.h.n_layer):
        b.layer = layer
        x = _layer(b, x)
    b.layer = b.h.n_layer
    x = b.norm(x, "output_norm")
    logits = b.mul_mat(x, "output" if b.has("output.weight") else "token_embd", out="logits", of="output")
    logits = _logits(b, logits)
    b.check_all_used()
    return Graph(tuple(b.ops), logits, tuple(b.caches), tuple(b.states))


class Builder:
    """Operations in the making: tensors by name, new values, and one method for every common pattern."""

    def __init__(self, source: GGUFFile, n_ctx: int) -> None:
        self.source = source
        self.h = HParams(source)
        self.arch: Arch = arch_by_name(self.h.arch)
        self.n_ctx = n_ctx or self.h.n_ctx_train
        self.ops: list[Op] = []
        self.caches: list[Cache] = []
        self.states: list[State] = []
        self.layer = -1
        self.used: set[str] = set()
        self._tables: dict[tuple[RopeConfig, Matrix | None], Value] = {}

    # ------------------------------------------------ tensors

    def full_name(self, name: str) -> str:
        """Return a tensor's name in the file: within a layer ``blk.N.`` comes first."""
        return f"blk.{self.layer}.{name}" if 0 <= self.layer < self.h.n_layer else name

    def has(self, name: str) -> bool:
        """Tell whether the file has this tensor (of the current layer)."""
        return self.full_name(name) in self.source.tensors

    def matrix(self, name: str, rows: tuple[int, int] | None = None) -> Matrix:
        """Return a tensor; FormatError if there is none."""
        found = self.source.tensors.get(self.full_name(name))
        if found is None:
            raise FormatError(
                f"{self.source.paths[0]}: there is no tensor {self.full_name(name)}, which a model of the architecture "
                f"{self.h.arch} needs here; convert the model again"
            )
        self.used.add(found.name)
        return Matrix(found, rows)

    def maybe(self, name: str) -> Matrix | None:
        """Return a tensor, or None."""
        return self.matrix(name) if self.has(name) else None

    def check_all_used(self) -> None:
        """Refuse a model with weights that the graph does not read: it would compute something else."""
        ignored = ("rope_freqs", "rope_factors", ".input_scale", ".scale", "nextn.", "cls.")
        left = [
            name
            for name in self.source.tensors
            if name not in self.used and not any(part in name for part in ignored) and not self._beyond(name)
        ]
        if left:
            raise TypeNotSupported(
                f"{self.source.paths[0]}: {len(left)} tensors would not be used ({', '.join(left[:4])}): this is not "
                f"the model that quantkit knows as {self.h.arch}"
            )

    def _beyond(self, name: str) -> bool:
        """Tell whether a tensor belongs to a layer after the last (multi-token prediction)."""
        parts = name.split(".")
        return parts[0] == "blk" and parts[1].isdigit() and int(parts[1]) >= self.h.n_layer

    # ------------------------------------------------ values

    def add(self, op: Op) -> None:
        """Append an operation of the current layer."""
        object.__setattr__(op, "layer", self.layer)
        self.ops.append(op)

    def value(self, name: str, width: int, like: Value | None = None, per: int = 1) -> Value:
        """Return a new value; its rows are those of ``like``."""
        full = f"{self.layer}.{name}" if 0 <= self.layer < self.h.n_layer else name
        return Value(full, width, per, like is not None and like.outputs)

    def norm(self, x: Value, name: str, *, group: int = 0, kind: str = "", out: str = "") -> Value:
        """Normalize the row, or every ``group`` columns, by the weight ``name``."""
        weight, bias = self.maybe(f"{name}.weight"), self.maybe(f"{name}.bias")
        if weight is None:
            raise FormatError(f"{self.source.paths[0]}: there is no tensor {self.full_name(name)}.weight")
        y = self.value(out or name, x.width, x, x.per)
        kind = kind or self.arch.norm
        self.add(Norm(out=y, x=x, weight=weight, bias=bias, eps=self.h.eps, kind=kind, group=group or x.width))
        return y

    def plain_norm(self, x: Value, group: int, *, kind: str = "rms", eps: float | None = None) -> Value:
        """Normalize every ``group`` columns without a weight."""
        y = self.value(f"{x.name.split('.')[-1]}_normed", x.width, x, x.per)
        eps = self.h.eps if eps is None else eps
        self.add(Norm(out=y, x=x, weight=None, eps=eps, kind=kind, group=group))
        return y

    def mul_mat(
        self, x: Value, name: str, *, scale: bool = True, bias: bool = True, of: str = "", out: str = ""
    ) -> Value:
        """Multiply by ``name.weight``, with the bias and the ``.scale`` of ``of`` if the file has them."""
        weight = self.matrix(f"{name}.weight")
        if weight.n_in != x.width:
            raise FormatError(
                f"{self.source.paths[0]}: {weight.tensor.name} has rows of {weight.n_in} values, its input "
                f"{x.width}: the shapes of this model do not fit together"
            )
        y = self.value(out or name, weight.n_out, x)
        added = self.maybe(f"{of or name}.bias")
        scaled = self.maybe(f"{of or name}.scale") if scale else None
        self.add(MulMat(out=y, x=x, weight=weight, bias=added if bias else None, scale=scaled))
        return y

    def sum(self, a: Value, b: Value, name: str) -> Value:
        """Return a + b."""
        y = self.value(name, a.width, a)
        self.add(Add(out=y, a=a, b=b))
        return y

    def scaled(self, x: Value, factor: float) -> Value:
        """Return factor * x."""
        if factor == 1:
            return x
        y = self.value(f"{x.name.split('.')[-1]}_scaled", x.width, x, x.per)
        self.add(Scale(out=y, x=x, factor=factor))
        return y

    def take(self, x: Value, name: str, width: int, start: int, period: int = 0) -> Value:
        """Return columns ``start`` ... of x; of every ``period`` columns if one is given."""
        y = self.value(name, width, x)
        self.add(Take(out=y, x=x, start=start, period=period or x.width))
        return y

    def selected(self, x: Value) -> Value:
        """Return the rows of x whose logits are wanted; from the last layer's attention on, only they matter."""
        y = Value(f"{x.name}_out", x.width, x.per, True)
        self.add(SelectOutputs(out=y, x=x))
        return y

    def rope(self, x: Value, config: RopeConfig, head: int, start: int = 0, factors: Matrix | None = None) -> Value:
        """Rotate every head of x; tables of angles are made once for all layers."""
        key = (config, factors)
        if key not in self._tables:
            self._tables[key] = Value(f"angles_{len(self._tables)}", config.n_rot)
            self.add(RopeTable(out=self._tables[key], config=config, factors=factors))
        y = self.value(f"{x.name.split('.')[-1]}_rope", x.width, x)
        self.add(Rope(out=y, x=x, table=self._tables[key], config=config, head=head, start=start))
        return y


# ---------------------------------------------------------------- beginning and end


def _embed_scale(b: Builder) -> float:
    if b.arch.embed_sqrt:
        return math.sqrt(b.h.n_embd)
    if b.arch.fixed_scales:
        return b.arch.fixed_scales.embed
    return (b.h.float("embedding_scale", 0.0) if b.arch.scales else 0.0) or 1.0


def _logits(b: Builder, logits: Value) -> Value:
    scale = b.h.float("logit_scale", 0.0) if b.arch.logit_scale else 0.0
    if scale:
        logits = b.scaled(logits, scale if b.arch.logit_scale == "multiply" else 1.0 / scale)
    if b.arch.fixed_scales:
        logits = b.scaled(logits, b.arch.fixed_scales.width / b.h.n_embd)
    cap = 0.0
    if b.arch.final_softcap is not None:
        cap = b.h.float("final_logit_softcapping", b.arch.final_softcap)
    if not cap:
        return logits
    capped = Value("logits_capped", logits.width, 1, logits.outputs)
    b.add(Softcap(out=capped, x=logits, cap=cap))
    return capped


# ---------------------------------------------------------------- a layer


def _layer(b: Builder, x: Value) -> Value:
    normed = b.norm(x, "attn_norm") if b.has("attn_norm.weight") else x
    attended = attention_blocks()[b.arch.attention](b, normed)
    if b.layer == b.h.n_layer - 1:
        attended, x, normed = b.selected(attended), b.selected(x), b.selected(normed)
    own_ffn_norm = b.has("ffn_norm.weight")
    if not b.arch.ffn_norm_is_post_attention:
        attended = _post_norm(b, attended, "post_attention_norm")
    attended = b.scaled(attended, _residual_scale(b))
    if b.arch.parallel and not own_ffn_norm:
        fed = _feed_forward(b, normed)
        return b.sum(b.sum(fed, x, "ffn_residual"), attended, "layer_out")
    middle = b.sum(attended, x, "attn_residual")
    if own_ffn_norm:
        ready = b.norm(middle, "ffn_norm")
    elif b.arch.ffn_norm_is_post_attention:
        ready = b.norm(middle, "post_attention_norm")
    else:
        ready = middle
    fed = _post_norm(b, _feed_forward(b, ready), "post_ffw_norm")
    return b.sum(b.scaled(fed, _residual_scale(b)), middle, "layer_out")


def _post_norm(b: Builder, x: Value, name: str) -> Value:
    return b.norm(x, name) if b.has(f"{name}.weight") else x


def _residual_scale(b: Builder) -> float:
    if b.arch.fixed_scales:
        return b.arch.fixed_scales.depth / math.sqrt(b.h.n_layer)
    return (b.h.float("residual_scale", 0.0) if b.arch.scales else 0.0) or 1.0


# ---------------------------------------------------------------- attention


def attention_blocks() -> Mapping[str, Callable[[Builder, Value], Value]]:
    """Return the blocks an attention layer can be. Those in files of their own import this one: hence here."""
    from quantkit.model import delta_net, mla

    return {
        "gqa": gqa,
        "unscaled": mla.unscaled,
        "mla": mla.mla,
        "mla_plain": mla.mla_plain,
        "delta_nets": delta_net.delta_nets,
    }


def has_windows(b: Builder) -> bool:
    """Tell whether any layer of the model may look at a window only."""
    w = b.arch.window
    return w is not None and window_size(b) > 0 and w.only_if_layers in (0, b.h.n_layer)


def is_windowed(b: Builder) -> bool:
    """Tell whether the current layer looks at a window only."""
    w = b.arch.window
    if w is None or not has_windows(b):
        return False
    pattern = b.h.get("attention.sliding_window_pattern", None)
    if isinstance(pattern, list):
        return bool(pattern[b.layer])
    period = int(pattern) if pattern is not None else w.period
    if period == 0:
        return True
    return b.layer % period != 0 if w.dense_first else b.layer % period < period - 1


def window_size(b: Builder) -> int:
    """Return the window of windowed layers; 0 if the model has none."""
    w = b.arch.window
    if w is None:
        return 0
    given = b.h.get("attention.sliding_window", None)
    if w.fixed:
        return 0 if given is not None and int(given) == 0 else w.fixed
    return int(given) if given is not None else w.default


def rotates(b: Builder) -> bool:
    """Tell whether the current layer's q and k rotate."""
    if b.arch.rope == "none" or (b.arch.rope_only_windowed and has_windows(b) and not is_windowed(b)):
        return False
    if b.arch.rope_if_finetuned and not b.h.flag("rope.scaling.finetuned", True):
        return False
    return not b.arch.no_rope_step or (b.layer + 1) % b.arch.no_rope_step != 0


def rope_config(b: Builder, head: int, n_rot: int = 0) -> RopeConfig:
    """Return how the current layer rotates heads of ``head`` columns."""
    h, windowed = b.h, is_windowed(b)
    base, scaled = h.float("rope.freq_base", 10000.0), True
    if windowed and b.arch.window is not None:
        base = h.float("rope.freq_base_swa", b.arch.window.freq_base or base)
        scaled = b.arch.window.scaled
    sections = tuple(int(s) for s in h.get("rope.dimension_sections", ()))[:4] if b.arch.rope in _SECTIONED else ()
    yarn = scaled and h.rope_scaling == "yarn"
    keys = b.arch.yarn_keys
    log_mul = h.float("rope.scaling.yarn_log_multiplier", 0.0) if keys else 0.0
    return RopeConfig(
        n_rot=n_rot or h.int("rope.dimension_count_swa" if windowed else "rope.dimension_count", head) or head,
        kind=_rope_kind(b.arch.rope, sections),
        freq_base=base,
        freq_scale=h.freq_scale if scaled else 1.0,
        ext_factor=1.0 if yarn else 0.0,
        attn_factor=h.yarn_attn_factor(log_mul) if scaled else 1.0,
        beta_fast=h.float("rope.scaling.yarn_beta_fast", 32.0) if keys else 32.0,
        beta_slow=h.float("rope.scaling.yarn_beta_slow", 1.0) if keys else 1.0,
        n_ctx_orig=h.n_ctx_orig,
        sections=sections if any(sections) else (),
        interleaved=b.arch.rope == "imrope",
    )


def _rope_kind(rope: str, sections: tuple[int, ...]) -> str:
    return "normal" if rope == "normal" or (rope == "glm" and not any(sections)) else "neox"


def rope_factors(b: Builder) -> Matrix | None:
    """Return the divisors of the angles: Llama 3's, or Phi's for short or long contexts."""
    for scope in (b.layer, b.h.n_layer):
        name = f"blk.{scope}." if scope < b.h.n_layer else ""
        if f"{name}rope_freqs.weight" in b.source.tensors:
            return Matrix(b.source.tensors[f"{name}rope_freqs.weight"])
        which = "long" if b.n_ctx > b.h.n_ctx_orig else "short"
        if f"{name}rope_factors_{which}.weight" in b.source.tensors:
            return Matrix(b.source.tensors[f"{name}rope_factors_{which}.weight"])
    return None


def gqa(b: Builder, x: Value) -> Value:
    """Attention with grouped queries: q, k, v, their norms and rope, the cache, and the output matrix."""
    h = b.h
    n_head, n_kv = h.layer_int("attention.head_count", b.layer), _n_head_kv(b)
    windowed = is_windowed(b)
    head_k = h.int("attention.key_length_swa", h.head_k) if windowed else h.head_k
    head_v = h.int("attention.value_length_swa", h.head_v) if windowed else h.head_v
    q, k, v = qkv(b, x, n_head * head_k, n_kv * head_k, n_kv * head_v)
    if not b.arch.norm_after_rope:
        q, k = _head_norm(b, q, "attn_q_norm", head_k), _head_norm(b, k, "attn_k_norm", head_k)
    if rotates(b):
        config, factors = rope_config(b, head_k), rope_factors(b)
        q, k = b.rope(q, config, head_k, factors=factors), b.rope(k, config, head_k, factors=factors)
    if b.arch.norm_after_rope:
        q, k = _head_norm(b, q, "attn_q_norm", head_k), _head_norm(b, k, "attn_k_norm", head_k)
    q, k = _after_rope(b, q, k, head_k)
    attended = attend(b, q, k, v, n_head, n_kv, head_k, head_v, _attention_scale(b, head_k))
    return b.mul_mat(attended, "attn_output", bias=b.arch.output_bias)


def attend(
    b: Builder,
    q: Value,
    k: Value,
    v: Value | None,
    n_head: int,
    n_kv: int,
    head_k: int,
    head_v: int,
    scale: float,
) -> Value:
    """Keep keys and values and attend: the part that all kinds of attention share."""
    cache = Cache(f"cache_{b.layer}", k.width, 0 if v is None else v.width)
    b.caches.append(cache)
    b.add(CacheWrite(cache=cache, k=k, v=v))
    out = b.value("attended", n_head * head_v, q)
    windowed = is_windowed(b)
    b.add(
        Attention(
            out=out,
            q=q,
            cache=cache,
            n_head=n_head,
            n_head_kv=n_kv,
            head_k=head_k,
            head_v=head_v,
            scale=scale,
            softcap=b.h.float("attn_logit_softcapping", 50.0) if b.arch.attn_softcap else 0.0,
            sinks=b.maybe("attn_sinks.weight"),
            mask=b.arch.window.mask if windowed and b.arch.window else "causal",
            window=window_size(b) if windowed else 0,
        )
    )
    return out


def _n_head_kv(b: Builder) -> int:
    return b.h.layer_int("attention.head_count_kv", b.layer, b.h.layer_int("attention.head_count", b.layer))


def qkv(b: Builder, x: Value, q_width: int, k_width: int, v_width: int) -> tuple[Value, Value, Value]:
    """Return q, k and v, of three matrices or of one."""
    if not b.has("attn_qkv.weight"):
        return b.mul_mat(x, "attn_q"), b.mul_mat(x, "attn_k"), b.mul_mat(x, "attn_v")
    both = b.mul_mat(x, "attn_qkv")
    if both.width != q_width + k_width + v_width:
        raise FormatError(
            f"{b.source.paths[0]}: {b.full_name('attn_qkv.weight')} has {both.width} rows, not q, k and v"
        )
    parts = (("attn_q", q_width, 0), ("attn_k", k_width, q_width), ("attn_v", v_width, q_width + k_width))
    q, k, v = (_biased(b, b.take(both, name, width, start), f"{name}.bias") for name, width, start in parts)
    return q, k, v


def _biased(b: Builder, x: Value, name: str) -> Value:
    bias = b.maybe(name)
    if bias is None:
        return x
    y = b.value(f"{x.name.split('.')[-1]}_biased", x.width, x)
    b.add(MultiplyBy(out=y, x=x, vector=bias, add=True))
    return y


def _head_norm(b: Builder, x: Value, name: str, head: int) -> Value:
    """Normalize q or k: every head, unless the weight covers the whole row in one dimension."""
    if not b.has(f"{name}.weight"):
        return x
    shape = b.matrix(f"{name}.weight").tensor.shape
    return b.norm(x, name, group=x.width if shape[0] == x.width and x.width != head else head)


def _after_rope(b: Builder, q: Value, k: Value, head: int) -> tuple[Value, Value]:
    """Llama 4's norms of rotated heads; factors of q that grow with the position."""
    if b.arch.plain_qk_norm and rotates(b) and b.h.n_expert != 128:
        q, k = b.plain_norm(q, head), b.plain_norm(k, head)
    if b.arch.temperature == "llama4" and not rotates(b) and has_windows(b):
        q = _by_position(b, q, 8192, 0.1, 1.0)
    if b.arch.temperature == "mistral3" and (alpha := b.h.float("attention.temperature_scale", 0.0)):
        q = _by_position(b, q, b.h.n_ctx_orig, alpha, 0.0)
    return q, k


def _by_position(b: Builder, q: Value, floor_scale: int, alpha: float, offset: float) -> Value:
    y = b.value("q_by_position", q.width, q)
    b.add(ScaleByPosition(out=y, x=q, floor_scale=floor_scale, alpha=alpha, offset=offset))
    return y


def _attention_scale(b: Builder, head: int) -> float:
    given = b.h.float("attention.scale", 0.0) if b.arch.attention_scale else 0.0
    return given or 1.0 / math.sqrt(head)


# ---------------------------------------------------------------- feed-forward


def _feed_forward(b: Builder, x: Value) -> Value:
    if not b.has("ffn_gate_inp.weight"):
        return dense(b, x, "ffn_gate", "ffn_up", "ffn_down", "ffn")
    routed = experts(b, x)
    if not b.has("ffn_up_shexp.weight"):
        return routed
    shared = dense(b, x, "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "shexp")
    if b.has("ffn_gate_inp_shexp.weight"):
        gate = b.mul_mat(x, "ffn_gate_inp_shexp")
        y = b.value("shexp_gated", shared.width, shared)
        b.add(Glu(out=y, gate=gate, up=shared, activation=Activation("sigmoid")))
        shared = y
    return b.sum(routed, shared, "ffn_sum")


def _activation(b: Builder, part: str) -> Activation:
    limit = 0.0
    if b.arch.clamps:
        key = "swiglu_clamp_exp" if part == "exps" else "swiglu_clamp_shexp"
        limit = b.h.layer_float(key, b.layer, 0.0)
    return Activation(b.arch.activation, act_limit=limit, up_limit=limit)


def dense(b: Builder, x: Value, gate: str, up: str, down: str, part: str) -> Value:
    """A feed-forward layer: gate and up, activation, down; or up alone, or both in one tensor."""
    ups = _dense_mul_mat(b, x, up, part)
    activation = _activation(b, part)
    if b.has(f"{gate}.weight"):
        gates = _dense_mul_mat(b, x, gate, part)
        hidden = b.value(f"{part}_hidden", ups.width, x)
        b.add(Glu(out=hidden, gate=gates, up=ups, activation=activation))
    elif b.arch.glu_in_up:
        hidden = b.value(f"{part}_hidden", ups.width // 2, x)
        b.add(Glu(out=hidden, gate=ups, up=None, activation=activation))
    else:
        hidden = b.value(f"{part}_hidden", ups.width, x)
        b.add(Activate(out=hidden, x=ups, activation=activation))
    return _dense_mul_mat(b, hidden, down, part)


def _dense_mul_mat(b: Builder, x: Value, name: str, part: str) -> Value:
    """Of a feed-forward layer ``.scale`` multiplies the bias, too (elsewhere the bias is added after it)."""
    scaled = part in b.arch.tensor_scales and b.has(f"{name}.scale")
    if not (scaled and b.has(f"{name}.bias")):
        return b.mul_mat(x, name, scale=scaled)
    plain = b.mul_mat(x, name, scale=False)
    y = b.value(f"{name}_scaled", plain.width, x)
    b.add(MultiplyBy(out=y, x=plain, vector=b.matrix(f"{name}.scale")))
    return y


def routing(b: Builder) -> Routing:
    """Return how the current layer's router chooses, by its row or the metadata; FormatError if neither says."""
    h, moe = b.h, b.arch.moe
    gating = moe.gating or _gating(b)
    if gating is None:
        raise FormatError(
            f"{b.source.paths[0]}: {h.arch}.expert_gating_func is {h.get('expert_gating_func', 'missing')}; it must be "
            "1 (softmax), 2 (sigmoid) or 3 (softmax of the chosen)"
        )
    return Routing(
        n_expert=h.n_expert,
        n_used=h.layer_int("expert_used_count", b.layer),
        gating=gating,
        norm=h.flag("expert_weights_norm") if moe.norm is None else moe.norm,
        scale=h.float("expert_weights_scale", 0.0) if moe.scaled else 0.0,
        n_group=max(h.int("expert_group_count", 0), 1),
        n_group_used=max(h.int("expert_group_used_count", 0), 1),
    )


def _gating(b: Builder) -> str | None:
    given = b.h.int("expert_gating_func", 0)
    if given:
        return GATING.get(given)
    size = (b.h.n_layer, b.source.tensors["token_embd.weight"].shape[1])
    return "sigmoid" if size in b.arch.moe.sigmoid_sizes else b.arch.moe.default_gating


def experts(b: Builder, x: Value) -> Value:
    """A mixture of experts: the router's choice, up and gate, activation, down, the weighted sum."""
    r = routing(b)
    logits = b.mul_mat(x, "ffn_gate_inp")
    ids = Value(f"{b.layer}.experts", r.n_used, 1, x.outputs, True)
    weights = b.value("expert_weights", r.n_used, x)
    b.add(Route(ids=ids, weights=weights, logits=logits, bias=b.maybe("exp_probs_b.bias"), routing=r))
    if b.arch.moe.weight_before:
        weighted = b.value("weighted", x.width, x, r.n_used)
        b.add(Repeat(out=weighted, x=x, weights=weights))
        x = weighted
    hidden = _expert_hidden(b, x, ids, r.n_used)
    down = mul_mat_id(b, hidden, ids, "ffn_down_exps", r.n_used)
    out = b.value("ffn_moe", down.width, x)
    b.add(Combine(out=out, x=down, weights=None if b.arch.moe.weight_before else weights))
    return out


def mul_mat_id(b: Builder, x: Value, ids: Value, name: str, n_used: int, rows: tuple[int, int] | None = None) -> Value:
    """Multiply by the chosen experts' matrices, with their biases and scales if the file has them."""
    weight = b.matrix(f"{name}.weight", rows)
    scale = b.maybe(f"{name}.scale") if "exps" in b.arch.tensor_scales else None
    out = b.value(name, weight.n_out, ids, n_used)
    b.add(MulMatId(out=out, x=x, ids=ids, weight=weight, bias=b.maybe(f"{name}.bias"), scale=scale))
    return out


def _expert_hidden(b: Builder, x: Value, ids: Value, n_used: int) -> Value:
    activation = _activation(b, "exps")
    if b.has("ffn_gate_up_exps.weight"):
        both = mul_mat_id(b, x, ids, "ffn_gate_up_exps", n_used)
        hidden = b.value("exps_hidden", both.width // 2, ids, n_used)
        b.add(Glu(out=hidden, gate=both, up=None, activation=activation))
        return hidden
    up = mul_mat_id(b, x, ids, "ffn_up_exps", n_used)
    hidden = b.value("exps_hidden", up.width, ids, n_used)
    if b.has("ffn_gate_exps.weight"):
        gate = mul_mat_id(b, x, ids, "ffn_gate_exps", n_used)
        b.add(Glu(out=hidden, gate=gate, up=up, activation=activation))
    else:
        b.add(Activate(out=hidden, x=up, activation=activation))
    return hidden
