"""Operations and the tape: a forward pass as a list of (compiled function, argument block), run without Python.

An operation is a numba C callback, void(block, thread, threads), that declares the slots of its block:

    @operation("batch x out width rows_of per factor:f")
    def scale(args, tid, nth):
        x, factor = arg(args, X), farg(args, FACTOR)     # BATCH, X, OUT, WIDTH, ROWS_OF, PER, FACTOR = range(7)

A block is int64 words: integers, addresses, or the bits of a float64 (``:f``). The first is always the address of the
batch block, of the values that change per call, such as the number of tokens; everything else is fixed. A tape is
int64 [n, 3]: address of the function, of its block, and 1 if the next entry does not wait for this one; ``run_tape``,
itself an operation, calls entry after entry with barriers between. Operations compile at first use, are cached on disk
(jit.py), and neither allocate nor raise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from quantkit.kernels.cpu.core.disk_cache import Callback
from quantkit.kernels.cpu.core.jit import inline, to_cache
from quantkit.kernels.cpu.core.library import EntryCompiler
from quantkit.kernels.cpu.core.simd import emits, store
from quantkit.kernels.cpu.core.specialize import rebind
from quantkit.kernels.cpu.core.team import (
    FAILURE,
    Team,
    atomic_load,
    barrier,
    call_operation,
    cycles,
    nanoseconds_per_cycle,
    word_at,
)

SIGNATURE = types.void(types.intp, types.intp, types.intp)

# ---------------------------------------------------------------- inside operations


@emits(lambda args, slot: types.int64(types.int64, types.int64))
def arg(b, sig, args, slot):
    """Return the integer or address in a slot."""
    return b.load(word_at(b, args, slot))


@emits(lambda args, slot: types.float32(types.int64, types.int64))
def farg(b, sig, args, slot):
    """Return the float in a slot, as float32."""
    return b.fptrunc(b.bitcast(b.load(word_at(b, args, slot)), ir.DoubleType()), ir.FloatType())


#: Words of the batch block. 8 to 15 are counters for operations, zero before and after each.
N_TOKENS, N_OUTPUTS, TOKENS, POSITIONS, SEQUENCES, OUTPUT_ROWS, N_CTX, CONTROL = range(8)
BATCH_WORDS = 16


@emits(lambda args, word: types.int64(types.int64, types.int64))
def batch_word(b, sig, args, word):
    """Return a word of the batch block, through slot 0."""
    return b.load(word_at(b, b.load(word_at(b, args, word.type(0))), word))


@inline
def first_of(n, tid, nth):
    """Return where thread ``tid``'s share of n items begins; it ends where the next share begins."""
    return n * tid // nth


# ---------------------------------------------------------------- operations


class TapeOp:
    """A function(args, tid, nth), compiled when its address is first read, and the names of its slots."""

    def __init__(self, function: Callable[..., None], slots: str) -> None:
        names = [slot.partition(":") for slot in slots.split()]
        if not names or names[0][0] != "batch" or len({name for name, _, _ in names}) != len(names):
            raise ValueError(f"{function.__name__}: slots are distinct and begin with batch: {slots!r}")
        if any(kind not in ("", "f") for _, _, kind in names):
            raise ValueError(f"{function.__name__}: a slot is NAME or NAME:f: {slots!r}")
        self.name = function.__name__
        self.slots = tuple(name for name, _, _ in names)
        self._floats = frozenset(name for name, _, kind in names if kind == "f")
        self._spec = slots
        self._function = function
        self._compiled: Any = None
        self._bound: dict[str, TapeOp] = {}

    def __repr__(self) -> str:
        return f"TapeOp({self.name}: {self._spec})"

    @property
    def address(self) -> int:
        """Address of the compiled function; compiles it or loads it from the cache."""
        if self._compiled is None:
            self._compiled = to_cache(_compile, self._function)
        address: int = self._compiled.address
        return address

    @property
    def from_cache(self) -> bool:
        """Whether the compiled function came from disk."""
        return self._compiled is not None and self._compiled.cache_hits > 0

    def bind(self, suffix: str, /, **bound: Any) -> TapeOp:
        """Return this operation with other globals, see ``rebind``, one for each name and content."""
        function = rebind(self._function, suffix, **bound)
        return self._bound.setdefault(function.__qualname__, TapeOp(function, self._spec))

    def block(self, **values: float | TapeOp) -> npt.NDArray[np.int64]:
        """Return an argument block; all slots are required. The caller keeps it alive as long as a tape uses it."""
        if values.keys() != set(self.slots):
            missing, unknown = set(self.slots) - values.keys(), values.keys() - set(self.slots)
            raise ValueError(f"{self.name}: slots missing: {sorted(missing)}, unknown: {sorted(unknown)}")
        return np.array([self.word(name, values[name]) for name in self.slots], np.int64)

    def word(self, slot: str, value: float | TapeOp) -> int:
        """Return the word of ``value`` in ``slot``; TypeError for a float in an integer slot."""
        if isinstance(value, TapeOp):
            return value.address
        if slot in self._floats:
            bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
            return bits
        if isinstance(value, float):
            raise TypeError(f"{self.name}: slot {slot} must be an integer, not {value}")
        return int(value)


def _compile(function: Callable[..., None]) -> Callback:
    """Return a function as a callback, from the cache or compiled into it."""
    options = {"error_model": "numpy", "boundscheck": False}
    callback = Callback(function, (SIGNATURE.args, SIGNATURE.return_type), {}, options, EntryCompiler)
    callback.enable_caching()
    callback.compile()
    return callback


def operation(slots: str) -> Callable[[Callable[..., None]], TapeOp]:
    """Make a function(args, tid, nth) a TapeOp with these slots: ``"batch x out width factor:f"``."""
    return lambda function: TapeOp(function, slots)


# ---------------------------------------------------------------- the tape

_TAPE = 1
_N_ENTRIES = 2
_TIMES = 3


@operation("batch tape n_entries times")
def run_tape(args, tid, nth):
    """Run the entries of a tape, with a barrier after each unless its third word is 1."""
    ctl, tape = batch_word(args, CONTROL), arg(args, _TAPE)
    for i in range(arg(args, _N_ENTRIES)):
        call_operation(arg(tape, 3 * i), arg(tape, 3 * i + 1), tid, nth)
        if arg(tape, 3 * i + 2) == 0:
            barrier(ctl, nth)
            if atomic_load(ctl, FAILURE) != 0:
                return


@operation("batch tape n_entries times")
def run_tape_timed(args, tid, nth):
    """Run a tape as ``run_tape`` does; add the cycles of each entry, its barrier included, to ``times``."""
    ctl = batch_word(args, CONTROL)
    tape = arg(args, _TAPE)
    times = arg(args, _TIMES)
    barrier(ctl, nth)  # all threads are awake
    before = cycles()
    for i in range(arg(args, _N_ENTRIES)):
        call_operation(arg(tape, 3 * i), arg(tape, 3 * i + 1), tid, nth)
        if arg(tape, 3 * i + 2) == 0:
            barrier(ctl, nth)
            if atomic_load(ctl, FAILURE) != 0:
                return
        if tid == 0:
            now = cycles()
            store(times, 8 * i, arg(times, i) + now - before)
            before = now


class Batch:
    """The batch block: the numbers that change between calls of a forward pass, at ``address``; ``set`` fills it."""

    def __init__(self, team: Team, n_max: int, n_ctx: int = 0) -> None:
        self.n_max = n_max
        self._rows = np.zeros((4, n_max), np.int32)
        self.words = np.zeros(BATCH_WORDS, np.int64)
        for word, row in zip((TOKENS, POSITIONS, SEQUENCES, OUTPUT_ROWS), self._rows, strict=True):
            self.words[word] = address_of(row)
        self.words[N_CTX], self.words[CONTROL] = n_ctx, team.control
        self.address = address_of(self.words)

    def set(
        self,
        tokens: npt.ArrayLike,
        positions: npt.ArrayLike | None = None,
        sequences: npt.ArrayLike = 0,
        outputs: npt.ArrayLike | None = None,
    ) -> None:
        """Set tokens, positions (default 0, 1, ...), sequences and the rows that need logits (default all)."""
        ids = np.asarray(tokens, np.int32)
        n = len(ids)
        if not 0 < n <= self.n_max:
            raise ValueError(f"a batch has 1 to {self.n_max} tokens, not {n}")
        rows = np.arange(n) if outputs is None else np.asarray(outputs, np.int32)
        if len(rows) > n or (len(rows) and (rows.min() < 0 or rows.max() >= n)):
            raise ValueError(f"outputs are rows 0 to {n - 1}, each once; got {rows}")
        self._rows[0, :n] = ids
        self._rows[1, :n] = np.arange(n) if positions is None else positions
        self._rows[2, :n] = sequences
        self._rows[3, : len(rows)] = rows
        self.words[N_TOKENS], self.words[N_OUTPUTS] = n, len(rows)


class Tape:
    """Entries (operation, block, independent) laid out to run on a team; keeps the blocks alive."""

    def __init__(
        self,
        team: Team,
        batch: Batch,
        entries: Sequence[tuple[TapeOp, npt.NDArray[np.int64]] | tuple[TapeOp, npt.NDArray[np.int64], bool]],
    ) -> None:
        self._team = team
        self._keep = (batch, [entry[1] for entry in entries])
        self.entries = np.array(
            [(e[0].address, address_of(e[1]), int(len(e) > 2 and bool(e[2]))) for e in entries], np.int64
        ).reshape(-1, 3)
        self._cycles = np.zeros(len(entries), np.int64)
        values = {"batch": batch.address, "tape": address_of(self.entries), "n_entries": len(entries)}
        self._block = run_tape.block(**values, times=address_of(self._cycles))
        self._block_address = address_of(self._block)

    def run(self) -> None:
        """Run all entries once."""
        self._team.launch(run_tape.address, self._block_address)

    def run_timed(self) -> npt.NDArray[np.float64]:
        """Run all entries once and return the nanoseconds each took, float64 [n]."""
        self._cycles[:] = 0
        self._team.launch(run_tape_timed.address, self._block_address)
        return np.asarray(self._cycles * nanoseconds_per_cycle(), np.float64)


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address
