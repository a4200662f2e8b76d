"""Lowering to launches of a CUDA device: weights, caches and states in its memory; the operations: cuda_ops.py.

An entry chooses its kernel, and how many blocks, when it knows how many rows a batch has; everything else about a
launch is known before. Weights that do not fit (--max-vram) are uploaded into a buffer just before their operation: of
experts only those that the batch uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantkit.kernels.activation_formats import activation_format
from quantkit.kernels.cuda import activations, moe
from quantkit.kernels.cuda.operation import Shape
from quantkit.model.backends import Limits
from quantkit.model.backends.arena import Buffer, Entry, Slot, Within
from quantkit.model.backends.cuda_sums import Sums
from quantkit.model.backends.lowering import Lowering, expert_bytes_of, row_bytes_of
from quantkit.model.ops import Cache, Covariance, Matrix, Norm, Similarity, State, SumColumns, Value
from quantkit.types import BY_NAME

if TYPE_CHECKING:
    from quantkit.model.backends.cuda import CUDABackend

#: Up to so many rows a product reads every weight for all of them at once, from registers; above, in tiles.
FEW_ROWS = 8


@dataclass(frozen=True)
class Rows:
    """A slot that holds the number of rows, times ``times``."""

    times: int = 1


@dataclass(eq=False)
class KernelEntry(Entry):
    """A launch: ``choose`` returns its shape for a number of rows, None where there is nothing to do.

    The rows of a value are counted: of ``outputs`` or tokens, ``per`` each. rows_slots hold that number, times so
    much; by_rows gives more slots that depend on it.
    """

    choose: Callable[[int], Shape | None] = lambda rows: None
    outputs: bool = False
    per: int = 1
    rows_slots: dict[str, int] = field(default_factory=dict)
    by_rows: Callable[[int], Mapping[str, int]] = lambda rows: {}


@dataclass(eq=False)
class WorkEntry(Entry):
    """A step of Python's for more than FEW_ROWS rows, counted as those of a launch; it gets how many, and its slots."""

    work: Callable[[int, Mapping[str, int | float]], None] = lambda rows, slots: None
    outputs: bool = False
    per: int = 1


class CUDALowering(Lowering):
    """A lowering for one program of a backend; upload: copies bytes into a buffer, at a byte, during a run."""

    def __init__(
        self,
        backend: CUDABackend,
        limits: Limits,
        view: Callable[[Value], Any],
        upload: Callable[[Buffer, int, npt.NDArray[np.uint8]], None],
    ) -> None:
        super().__init__(backend.source, limits, backend.observer, view)
        self.backend, self.device, self.upload = backend, backend.device, upload
        #: Device memory that the program owns: address and bytes.
        self.owned: list[tuple[int, int]] = []
        self.caches: dict[Cache, tuple[int, int]] = {}
        self.states: dict[State, tuple[int, int]] = {}
        self._counters = self._n_counters = 0
        #: Of ids: how many pairs each expert has, where the host must know (cuda_cublas.py).
        self.counts: dict[Value, object] = {}
        self.looking_on = Sums(self.device, self.owned)

    def emit(
        self,
        choose: Callable[[int], Shape | None],
        of: Value,
        rows_per: int | None = None,
        /,
        **slots: Slot | Rows,
    ) -> KernelEntry:
        """Append a launch over the rows of a value (its own ``per``, unless told otherwise) and return it.

        The slots ``rows`` and ``batch`` need not be given: they are filled in where a kernel has them.
        """
        counted = {name: slot.times for name, slot in slots.items() if isinstance(slot, Rows)}
        fixed = {name: slot for name, slot in slots.items() if not isinstance(slot, Rows)}
        entry = KernelEntry(
            self.op,
            slots=fixed,
            choose=choose,
            outputs=of.outputs,
            per=of.per if rows_per is None else rows_per,
            rows_slots=counted,
        )
        self.entries.append(entry)
        return entry

    def call(self, call: Callable[[], None], uses: Sequence[Buffer]) -> None:
        """Append a step of Python's."""
        self.entries.append(Entry(self.op, call=call, uses=tuple(uses)))

    # ------------------------------------------------------------ memory

    def room(self, nbytes: int) -> int:
        """Return the address of device memory for as long as the program lives, set to zero."""
        address = self.device.allocate(nbytes)
        self.device.zero(address, nbytes)
        self.owned.append((address, nbytes))
        return address

    def counters(self, count: int) -> int:
        """Return the address of so many counters: 0, as every launch leaves them."""
        if count > self._n_counters:
            self._counters, self._n_counters = self.room(4 * count), count
        return self._counters

    def cache(self, of: Cache) -> tuple[int, int, str]:
        """Return the addresses of a layer's keys and values (0: no values), and their type.

        Keys: [n_seq * n_ctx, bytes of k_width values], values the same; cell = sequence * n_ctx + position.
        """
        kind = BY_NAME[self.limits.kv_type.upper()]
        if of not in self.caches:
            cells = self.limits.n_seq * self.limits.n_ctx
            sizes = [cells * kind.row_bytes(width) if width else 0 for width in (of.k_width, of.v_width)]
            keys, values = (self.room(size) if size else 0 for size in sizes)
            self.caches[of] = keys, values
        return *self.caches[of], self.limits.kv_type

    def state(self, of: State) -> int:
        """Return the address of a recurrent layer's state, float32 [n_seq, width]."""
        if of not in self.states:
            size = 4 * self.limits.n_seq * of.width
            self.states[of] = self.room(size), 4 * of.width
        return self.states[of][0]

    def sums(self, op: SumColumns | Covariance | Similarity) -> dict[str, int]:
        """Return where an operation that looks on adds up, by the names of accumulators.py."""
        return self.looking_on.of(op)

    def watch(self, of: str, per: int) -> int:
        """Return where an operation tells of rows that are not finite."""
        return self.looking_on.watch(of, per)

    # ------------------------------------------------------------ weights

    def weight(self, matrix: Matrix, ids: Value | None = None) -> Slot:
        """Return where a weight's first row is; ids: the experts of this batch, if it is one of experts.

        One that stays on the host is uploaded into a buffer by a step of its own.
        """
        first = matrix.first_row * row_bytes_of(matrix)
        address = self.backend.weights.address(matrix.tensor)
        if address is not None:
            return address + first
        staged = Buffer(f"{matrix.tensor.name} (staged)", matrix.tensor.nbytes)
        data = self.source.data(matrix.tensor)
        each = expert_bytes_of(matrix)

        def upload() -> None:
            if ids is None:
                self.upload(staged, 0, data)
                return
            for expert in np.unique(self.view(ids)):
                at = int(expert) * each
                self.upload(staged, at, data[at : at + each])

        self.call(upload, [staged] if ids is None else [staged, self.buffer(ids)])
        return Within(staged, first)

    def vector(self, matrix: Matrix | None) -> int:
        """Return the address of a bias, a norm's weight, ... as float32; 0 for None."""
        return 0 if matrix is None else self.array(self.vector_values(matrix))

    def array(self, values: npt.NDArray[Any]) -> int:
        """Return the address of a copy on the device, kept as long as the program."""
        flat = np.ascontiguousarray(values)
        address = self.device.allocate(flat.nbytes)
        self.device.upload(address, flat)
        self.owned.append((address, flat.nbytes))
        return address

    def norm_vectors(self, op: Norm) -> dict[str, int]:
        """Return the slots of a norm's weight and bias, and how many values they repeat after."""
        parts = {name: self.vector_values(m) for name, m in (("weight", op.weight), ("bias", op.bias)) if m is not None}
        n_weight = max([op.group, *(len(v) for v in parts.values())])
        # One that is shorter, than a group or than the other, is written out: np.resize repeats.
        addresses = {name: self.array(v if len(v) == n_weight else np.resize(v, n_weight)) for name, v in parts.items()}
        return {"weight": 0, "bias": 0, **addresses, "n_weight": n_weight}

    # ------------------------------------------------------------ activations

    def made_activations(self, x: Value, kind: str, n: int = 0) -> Buffer:
        """Return where another operation writes x in a format, from now on; n: columns of its rows there, if fewer."""
        n = n or x.width
        rows = self.limits.n_ubatch * x.per * (x.width // n)
        made = Buffer(f"{x.name} ({kind})", activations.row_bytes(kind, n) * rows)
        self._activations[x, kind, n] = made
        return made

    def activations(self, x: Value, weight: Matrix) -> tuple[Buffer, int]:
        """Return x in the format that a weight multiplies, and the bytes from row to row; made once for each.

        A row of x may be several of the weight's, side by side: heads.
        """
        kind, n = activation_format(weight.tensor.type), weight.n_in
        if kind == "f32":
            return self.buffer(x), 4 * n
        stride, per = activations.row_bytes(kind, n), x.per * (x.width // n)
        if (x, kind, n) not in self._activations:
            made = Buffer(f"{x.name} ({kind})", stride * self.limits.n_ubatch * per)
            self._activations[x, kind, n] = made
            slots: dict[str, Slot] = {"x": self.buffer(x), "x_stride": 4 * n, "n": n, "out": made}
            self.emit(lambda rows: activations.quantize(kind, n, rows), x, per, **slots)
        return self._activations[x, kind, n], stride

    def rows_for_cublas(self, x: Value, n: int, per: int, ids: Value | None = None) -> tuple[Buffer, bool]:
        """Return where rows of n bf16 values of x are, ``per`` of a token, and whether they are still to be made.

        ids: they are gathered by these experts.
        """
        kind = "bf16 rows" if ids is None else f"bf16 rows by {ids.name}"
        new = (x, kind, n) not in self._activations
        if new:
            self._activations[x, kind, n] = Buffer(f"{x.name} ({kind})", 2 * n * per * self.limits.n_ubatch)
        return self._activations[x, kind, n], new

    def remade(self, x: Value, kind: str, n: int, made: Buffer, by: Callable[[int], bool]) -> None:
        """Bring x to a format, rows of n, where its own launch, of so many tokens' rows, has not (``by``)."""
        per = x.width // n
        slots: dict[str, Slot] = {"x": self.buffer(x), "x_stride": 4 * n, "n": n, "out": made}
        self.emit(
            lambda rows: None if by(rows // per) else activations.quantize(kind, n, rows), x, x.per * per, **slots
        )

    def plan(self, ids: Value, n_expert: int) -> Buffer:
        """Return which pairs of token and expert each expert has; made once for each ids."""
        if ids not in self._plans:
            made = Buffer(f"plan of {ids.name}", moe.plan_bytes(n_expert, ids.width, self.limits.n_ubatch))
            self._plans[ids] = made
            self.emit(
                lambda rows: moe.bucket(n_expert) if rows > FEW_ROWS else None,
                ids, plan=made, ids=self.buffer(ids), n_used=ids.width, n_expert=n_expert,
            )  # fmt: skip
        return self._plans[ids]
