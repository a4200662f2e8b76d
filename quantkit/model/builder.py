"""Graph construction: tensors by name, new values, and a method for every common pattern."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile, TensorInfo
from quantkit.model.arch import SCALED, Arch, arch_by_name
from quantkit.model.hparams import HParams
from quantkit.model.ops import (
    Add,
    Cache,
    Matrix,
    MulMat,
    MultiplyBy,
    Norm,
    Op,
    Rope,
    RopeConfig,
    RopeTable,
    Scale,
    SelectOutputs,
    Softcap,
    State,
    Take,
    Value,
)
from quantkit.types import BY_NAME

F32 = BY_NAME["F32"]
#: The prefix of quantize --extra-output-tensor, which ik_llama.cpp uses to draft tokens.
EXTRA_OUTPUT = "output_extra."

#: Missing tensors after which the search stops: a file may claim any number of layers.
_MOST_MISSING = 1000


class Builder:
    """A graph under construction. Layers are built one after another; ``layer`` is the current one."""

    def __init__(self, source: GGUFFile, n_ctx: int) -> None:
        self.source = source
        self.h = HParams(source)
        self.arch: Arch = arch_by_name(self.h.arch)
        self.n_ctx = n_ctx or self.h.n_ctx_train
        self.ops: list[Op] = []
        self.caches: list[Cache] = []
        self.states: list[State] = []
        #: The second input of each layer (Gemma 4).
        self.layer_inputs: Sequence[Value] = ()
        #: The input of the first layer.
        self.embeddings: Value | None = None
        #: Residual sums that later layers mix (Kimi K3).
        self.block_sums: list[Value] = []
        #: v of the first layer, with which later layers interpolate (RWKV 7).
        self.first_values: Value | None = None
        self.layer = -1
        #: Layers below this are named "blk.N."; a prediction layer follows those of the model.
        self.n_blocks = self.h.n_layer
        self.used: set[str] = set()
        #: Names of required tensors that the file lacks.
        self.missing: dict[str, None] = {}
        #: The first layer's biases by distance, which layers without biases of their own share (T5).
        self.buckets: Matrix | None = None
        #: The selection of the last lightning indexer.
        self.selection: Value | None = None
        self._tables: dict[tuple[RopeConfig, Matrix | None, int, bool], Value] = {}

    # ------------------------------------------------ tensors

    def full_name(self, name: str) -> str:
        """Return a tensor's name in the file: with ``blk.N.`` within a layer."""
        in_layer = 0 <= self.layer < self.n_blocks
        return f"{self.arch.layer_prefix}blk.{self.layer % self.h.n_stored}.{name}" if in_layer else name

    def global_matrix(self, name: str) -> Matrix:
        """Return a tensor that belongs to no layer."""
        with self._no_layer():
            return self.matrix(name)

    def maybe_global(self, name: str) -> Matrix | None:
        """Return a tensor that belongs to no layer, or None."""
        with self._no_layer():
            return self.maybe(name)

    @contextmanager
    def _no_layer(self) -> Iterator[None]:
        layer, self.layer = self.layer, -1
        try:
            yield
        finally:
            self.layer = layer

    def has(self, *names: str) -> bool:
        """Return whether the file has one of these tensors of the current layer, or the first is required."""
        return names[0] in self.arch.needs or any(self._in_file(name) for name in names)

    def _in_file(self, name: str) -> bool:
        return self.full_name(name) in self.source.tensors and name not in self.arch.ignored

    def has_norm(self, name: str) -> bool:
        """Return whether the file has the weight of this norm."""
        return self.has(f"{name}.weight", name)

    def matrix(self, name: str, rows: tuple[int, int] | None = None) -> Matrix:
        """Return a tensor; a missing one is recorded and replaced, so that all missing ones are reported."""
        full = self.full_name(name)
        info = self.source.tensors.get(full) or self._stand_in(full)
        self.used.add(full)
        return Matrix(info, rows)

    def maybe(self, name: str) -> Matrix | None:
        """Return a tensor, or None."""
        return self.matrix(name) if self.has(name) else None

    def ignore(self, *names: str) -> None:
        """Accept these tensors (of the current layer), which llama.cpp loads but does not use."""
        self.used.update(map(self.full_name, names))

    def _stand_in(self, full: str) -> TensorInfo:
        """Record a missing tensor, and return that of another layer, or one of a plausible shape."""
        self.missing[full] = None
        if len(self.missing) > _MOST_MISSING:
            raise FormatError(f"{self.source.paths[0]}: missing tensor {full}", "QK-E105")
        kind = kind_of(full)
        similar = (t for name, t in self.source.tensors.items() if kind != full and kind_of(name) == kind)
        return next(similar, None) or TensorInfo(full, (self.h.n_embd, self.h.n_embd), F32, 0, 0, 0)

    @contextmanager
    def require_all_tensors(self, prefix: str = "") -> Iterator[None]:
        """Reject a model with missing or unused tensors, when the graph built inside is complete.

        prefix: of the tensors that the graph must read.

        Raises:
            FormatError: tensors are missing.
            TypeNotSupported: tensors are unused, so the model is not of the stated architecture.
        """
        try:
            yield
        except (FormatError, TypeNotSupported):
            if not self.missing:
                raise
        left = [name for name in self.source.tensors if name.startswith(prefix) and not self._is_expected(name)]
        where = self.source.paths[0]
        if self.missing:
            unused = f"; not used: {format_names(left)}" if left else ""
            raise FormatError(
                f"{where}: missing tensors of the architecture {self.h.arch}: {format_names(self.missing)}{unused}; "
                "convert the model again",
                "QK-E105",
            ) from None
        if left:
            raise TypeNotSupported(
                f"{where}: {len(left)} tensors would not be used: {format_names(left)}; the model differs from "
                f"quantkit's {self.h.arch}",
                "QK-E107",
            )

    def _is_expected(self, name: str) -> bool:
        """Return whether a tensor is read by the graph, or also ignored by llama.cpp."""
        kind = kind_of(name)
        is_used = name in self.used or kind in self.arch.ignored or self._in_prediction_layer(name)
        is_used = is_used or bool(self.arch.decoder_prefix and name.startswith(self.arch.decoder_prefix))
        base, _, ending = kind.rpartition(".")
        return is_used or name.startswith(EXTRA_OUTPUT) or (ending in ("scale", "input_scale") and base in SCALED)

    def _in_prediction_layer(self, name: str) -> bool:
        """Return whether a tensor belongs to a prediction layer, after the last layer of the graph."""
        layer = layer_of(name)
        return layer is not None and self.n_blocks <= layer < self.h.n_stored

    # ------------------------------------------------ values

    def add(self, op: Op) -> None:
        """Append an operation of the current layer."""
        object.__setattr__(op, "layer", self.layer)
        self.ops.append(op)

    def value(self, name: str, width: int, like: Value | None = None, per: int = 1) -> Value:
        """Return a new value; its rows are those of ``like``."""
        full = f"{self.layer}.{name}" if 0 <= self.layer < self.n_blocks else name
        return Value(full, width, per, like is not None and like.outputs)

    def norm(
        self, x: Value, name: str, *, group: int = 0, kind: str = "", out: str = "", eps: float | None = None
    ) -> Value:
        """Normalize the row, or every ``group`` columns, by the weight ``name``."""
        # Falcon H1's ffn_norm has no suffix.
        weight = self.maybe(name) or (None if self.arch.plain_norms else self.matrix(f"{name}.weight"))
        bias = self.maybe(f"{name}.bias")
        y = self.value(out or name, x.width, x, x.per)
        kind, eps = kind or self.norm_kind, self.h.eps if eps is None else eps
        self.add(Norm(out=y, x=x, weight=weight, bias=bias, eps=eps, kind=kind, group=group or x.width))
        return y

    @property
    def norm_kind(self) -> str:
        """The default kind of norms."""
        if self.arch.norm != "by_eps":
            return self.arch.norm
        return "rms" if self.h.float("attention.layer_norm_rms_epsilon", 0.0) else "layer"

    def plain_norm(self, x: Value, group: int, *, kind: str = "rms", out: str = "", eps: float | None = None) -> Value:
        """Normalize every ``group`` columns, without a weight."""
        y = self.value(out or f"{x.name.split('.')[-1]}_normed", x.width, x, x.per)
        eps = self.h.eps if eps is None else eps
        self.add(Norm(out=y, x=x, weight=None, eps=eps, kind=kind, group=group))
        return y

    def mul_mat(
        self,
        x: Value,
        name: str,
        *,
        scale: bool = True,
        bias: bool = True,
        base_name: str = "",
        out: str = "",
        bias_name: str = "",
    ) -> Value:
        """Multiply by ``name.weight``, with ``.bias`` and ``.scale`` if the file has them.

        Args:
            base_name: the name that ``.bias`` and ``.scale`` belong to, if not ``name``.
            bias_name: the full name of the bias, if not ``.bias``.
        """
        weight = self.matrix(f"{name}.weight")
        if weight.n_in != x.width:
            raise FormatError(
                f"{self.source.paths[0]}: {weight.tensor.name} has rows of {weight.n_in} values, but its input has "
                f"{x.width}: the shapes of this model are inconsistent",
                "QK-E106",
            )
        y = self.value(out or name, weight.n_out, x)
        added = self.matrix(bias_name) if bias_name else None
        if bias and not bias_name:
            added = self.maybe(f"{base_name or name}.bias")
        scaled = self.maybe(f"{base_name or name}.scale") if scale else None
        self.add(MulMat(out=y, x=x, weight=weight, bias=added, scale=scaled))
        return y

    def times(self, x: Value, name: str, out: str) -> Value:
        """Multiply by the vector ``name``, repeated along the row."""
        y = self.value(out, x.width, x, x.per)
        self.add(MultiplyBy(out=y, x=x, vector=self.matrix(name)))
        return y

    def sum(self, a: Value, b: Value, name: str) -> Value:
        """Return a + b."""
        y = self.value(name, a.width, a)
        self.add(Add(out=y, a=a, b=b))
        return y

    def scale(self, x: Value, factor: float, out: str = "") -> Value:
        """Return factor * x."""
        if factor == 1:
            return x
        y = self.value(out or f"{x.name.split('.')[-1]}_scaled", x.width, x, x.per)
        self.add(Scale(out=y, x=x, factor=factor))
        return y

    def softcap(self, x: Value, cap: float) -> Value:
        """Return cap * tanh(x / cap)."""
        y = self.value(f"{x.name.split('.')[-1]}_capped", x.width, x, x.per)
        self.add(Softcap(out=y, x=x, cap=cap))
        return y

    def take(self, x: Value, name: str, width: int, start: int, period: int = 0) -> Value:
        """Return columns ``start`` ... of x, or of each ``period`` columns of x."""
        y = self.value(name, width, x)
        self.add(Take(out=y, x=x, start=start, period=period or x.width))
        return y

    def select_outputs(self, x: Value) -> Value:
        """Return the rows of x whose logits are requested; after the last attention, only these are computed."""
        y = Value(f"{x.name}_out", x.width, x.per, True)
        self.add(SelectOutputs(out=y, x=x))
        return y

    def rope(
        self,
        x: Value,
        config: RopeConfig,
        head: int,
        start: int = 0,
        factors: Matrix | None = None,
        *,
        step: int = 1,
        inverse: bool = False,
    ) -> Value:
        """Rotate every head of x; layers share tables of angles. step, inverse: see RopeTable."""
        key = (config, factors, step, inverse)
        if key not in self._tables:
            self._tables[key] = Value(f"angles_{len(self._tables)}", config.n_rot)
            self.add(RopeTable(out=self._tables[key], config=config, factors=factors, step=step, inverse=inverse))
        y = self.value(f"{x.name.split('.')[-1]}_{'unrope' if inverse else 'rope'}", x.width, x)
        self.add(Rope(out=y, x=x, table=self._tables[key], config=config, head=head, start=start))
        return y


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor by its name, or None."""
    parts = name.removeprefix("enc.").split(".", 2)
    return int(parts[1]) if parts[0] == "blk" and len(parts) == 3 and parts[1].isdecimal() else None


def kind_of(name: str) -> str:
    """Return a tensor's name without ``blk.N.``."""
    return name.removeprefix("enc.").split(".", 2)[2] if layer_of(name) is not None else name


def format_names(names: Collection[str]) -> str:
    """Return up to four names, and their number if there are more."""
    text = ", ".join(list(names)[:4])
    return text if len(names) <= 4 else f"{text}, ... ({len(names)} tensors)"
