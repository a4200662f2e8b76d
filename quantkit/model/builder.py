"""Builds a graph: tensors by name, new values, and a method for every common pattern."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.model.arch import Arch, arch_by_name
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


class Builder:
    """The operations of a graph being built: tensors by name, new values, and a method for every common pattern."""

    def __init__(self, source: GGUFFile, n_ctx: int) -> None:
        self.source = source
        self.h = HParams(source)
        self.arch: Arch = arch_by_name(self.h.arch)
        self.n_ctx = n_ctx or self.h.n_ctx_train
        self.ops: list[Op] = []
        self.caches: list[Cache] = []
        self.states: list[State] = []
        #: What each layer is given beside its input (Gemma 4).
        self.per_layer: Sequence[Value] = ()
        #: The input of the first layer.
        self.embedded: Value | None = None
        #: Sums of layers that later ones mix (Kimi K3).
        self.checkpoints: list[Value] = []
        #: Values of the first layer, which later ones are drawn to (RWKV 7).
        self.first_values: Value | None = None
        self.layer = -1
        #: Layers below this have names "blk.N."; a prediction layer comes after those of the model.
        self.n_blocks = self.h.n_layer
        self.used: set[str] = set()
        #: The positions that the last lightning indexer chose.
        self.selection: Value | None = None
        self._tables: dict[tuple[RopeConfig, Matrix | None, int, bool], Value] = {}

    # ------------------------------------------------ tensors

    def full_name(self, name: str) -> str:
        """Return a tensor's name in the file: within a layer ``blk.N.`` comes first."""
        return f"blk.{self.layer % self.h.n_stored}.{name}" if 0 <= self.layer < self.n_blocks else name

    def outside(self, name: str) -> Matrix:
        """Return a tensor that belongs to no layer; FormatError if there is none."""
        layer, self.layer = self.layer, -1
        try:
            return self.matrix(name)
        finally:
            self.layer = layer

    def has(self, name: str) -> bool:
        """Tell whether the file has this tensor (of the current layer)."""
        return self.full_name(name) in self.source.tensors

    def has_norm(self, name: str) -> bool:
        """Tell whether the file has the weight of this norm."""
        return self.has(f"{name}.weight") or self.has(name)

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
        ignored = ("rope_freqs", "rope_factors", ".input_scale", ".scale", "nextn.", "cls.", "output_extra.")
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
        full = f"{self.layer}.{name}" if 0 <= self.layer < self.n_blocks else name
        return Value(full, width, per, like is not None and like.outputs)

    def norm(
        self, x: Value, name: str, *, group: int = 0, kind: str = "", out: str = "", eps: float | None = None
    ) -> Value:
        """Normalize the row, or every ``group`` columns, by the weight ``name``."""
        # Falcon H1's ffn_norm has no ending.
        weight, bias = self.maybe(f"{name}.weight") or self.maybe(name), self.maybe(f"{name}.bias")
        if weight is None and not self.arch.plain_norms:
            raise FormatError(f"{self.source.paths[0]}: there is no tensor {self.full_name(name)}.weight")
        y = self.value(out or name, x.width, x, x.per)
        kind, eps = kind or self.norm_kind, self.h.eps if eps is None else eps
        self.add(Norm(out=y, x=x, weight=weight, bias=bias, eps=eps, kind=kind, group=group or x.width))
        return y

    @property
    def norm_kind(self) -> str:
        """The kind of norms, unless said otherwise."""
        if self.arch.norm != "by_eps":
            return self.arch.norm
        return "rms" if self.h.float("attention.layer_norm_rms_epsilon", 0.0) else "layer"

    def plain_norm(self, x: Value, group: int, *, kind: str = "rms", out: str = "", eps: float | None = None) -> Value:
        """Normalize every ``group`` columns without a weight."""
        y = self.value(out or f"{x.name.split('.')[-1]}_normed", x.width, x, x.per)
        eps = self.h.eps if eps is None else eps
        self.add(Norm(out=y, x=x, weight=None, eps=eps, kind=kind, group=group))
        return y

    def mul_mat(
        self, x: Value, name: str, *, scale: bool = True, bias: bool = True, of: str = "", out: str = "", plus: str = ""
    ) -> Value:
        """Multiply by ``name.weight``, with the bias and the ``.scale`` of ``of`` if the file has them.

        plus: the vector of that name is the bias.
        """
        weight = self.matrix(f"{name}.weight")
        if weight.n_in != x.width:
            raise FormatError(
                f"{self.source.paths[0]}: {weight.tensor.name} has rows of {weight.n_in} values, its input "
                f"{x.width}: the shapes of this model do not fit together"
            )
        y = self.value(out or name, weight.n_out, x)
        added = self.matrix(plus) if plus else self.maybe(f"{of or name}.bias")
        scaled = self.maybe(f"{of or name}.scale") if scale else None
        self.add(MulMat(out=y, x=x, weight=weight, bias=added if bias else None, scale=scaled))
        return y

    def times(self, x: Value, name: str, out: str) -> Value:
        """Multiply by the vector ``name``, which repeats along the row."""
        y = self.value(out, x.width, x, x.per)
        self.add(MultiplyBy(out=y, x=x, vector=self.matrix(name)))
        return y

    def sum(self, a: Value, b: Value, name: str) -> Value:
        """Return a + b."""
        y = self.value(name, a.width, a)
        self.add(Add(out=y, a=a, b=b))
        return y

    def scaled(self, x: Value, factor: float, out: str = "") -> Value:
        """Return factor * x."""
        if factor == 1:
            return x
        y = self.value(out or f"{x.name.split('.')[-1]}_scaled", x.width, x, x.per)
        self.add(Scale(out=y, x=x, factor=factor))
        return y

    def softcapped(self, x: Value, cap: float) -> Value:
        """Return cap * tanh(x / cap)."""
        y = self.value(f"{x.name.split('.')[-1]}_capped", x.width, x, x.per)
        self.add(Softcap(out=y, x=x, cap=cap))
        return y

    def take(self, x: Value, name: str, width: int, start: int, period: int = 0) -> Value:
        """Return columns ``start`` ... of x; of every ``period`` columns if one is given."""
        y = self.value(name, width, x)
        self.add(Take(out=y, x=x, start=start, period=period or x.width))
        return y

    def selected(self, x: Value) -> Value:
        """Return the rows of x whose logits are wanted: after the last layer's attention nothing needs the others."""
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
        back: bool = False,
    ) -> Value:
        """Rotate every head of x; tables of angles are made once for all layers. step, back: as RopeTable has them."""
        key = (config, factors, step, back)
        if key not in self._tables:
            self._tables[key] = Value(f"angles_{len(self._tables)}", config.n_rot)
            self.add(RopeTable(out=self._tables[key], config=config, factors=factors, step=step, back=back))
        y = self.value(f"{x.name.split('.')[-1]}_{'unrope' if back else 'rope'}", x.width, x)
        self.add(Rope(out=y, x=x, table=self._tables[key], config=config, head=head, start=start))
        return y
