"""ggml's graph allocator (ggml-alloc.c of llama.cpp b11434), without memory: the size of a compute buffer.

Tensors get the smallest free block that is large enough, or the end of the buffer. They are freed after the last node
that reads them; a node of an operation that works in place takes over the block of an input that nothing else reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quantkit.units import round_up

#: Bytes to which ggml aligns tensors; 32 on the CPU, 128 on CUDA.
ALIGNMENT = 128


@dataclass(eq=False, slots=True)
class Tensor:
    """A tensor of a graph: its bytes, and what decides whether a node may take over its block.

    ``view_of``: the tensor whose bytes these are. ``shape``: of two contiguous tensors with the same bytes, equal.
    """

    nbytes: int
    shape: tuple[int, ...] = ()
    sources: tuple[Tensor, ...] = ()
    view_of: Tensor | None = None
    in_place: bool = False
    is_output: bool = False
    n_children: int = field(default=0, init=False)
    n_views: int = field(default=0, init=False)
    offset: int = field(default=-1, init=False)


class _Buffer:
    """Free blocks by offset; the last one has no end."""

    def __init__(self) -> None:
        self.free: list[list[int]] = [[0, 1 << 62]]
        self.size = 0

    def take(self, n: int) -> int:
        """Return the offset of n bytes."""
        fitting = [block for block in self.free[:-1] if block[1] >= n]
        # Of equal blocks, ggml takes the last.
        block = min(reversed(fitting), key=lambda b: b[1]) if fitting else self.free[-1]
        offset = block[0]
        block[0] += n
        block[1] -= n
        if not block[1]:
            self.free.remove(block)
        self.size = max(self.size, offset + n)
        return offset

    def give_back(self, offset: int, n: int) -> None:
        """Free n bytes and join neighbouring blocks."""
        if n <= 0:
            return
        i = next(i for i, block in enumerate(self.free) if block[0] > offset)
        self.free.insert(i, [offset, n])
        if self.free[i][0] + self.free[i][1] == self.free[i + 1][0]:
            self.free[i][1] += self.free.pop(i + 1)[1]
        if i and self.free[i - 1][0] + self.free[i - 1][1] == self.free[i][0]:
            self.free[i - 1][1] += self.free.pop(i)[1]


def buffer_size(inputs: Sequence[Tensor], nodes: Sequence[Tensor]) -> int:
    """Return the bytes of the buffer in which a graph is computed.

    inputs: tensors that are filled before the graph runs; nodes: in the order of computation.
    """
    return _Allocation().run(inputs, nodes)


class _Allocation:
    def __init__(self) -> None:
        self.buffer = _Buffer()

    def run(self, inputs: Sequence[Tensor], nodes: Sequence[Tensor]) -> int:
        """Allocate and free all tensors in order, and return the largest size of the buffer."""
        for tensor in inputs:
            tensor.offset = self.buffer.take(_align(tensor))
        for node in nodes:
            if node.view_of is not None:
                node.view_of.n_views += 1
            for source in node.sources:
                source.n_children += 1
        for node in nodes:
            if node.view_of is None and node.offset < 0 and node.nbytes:
                self._place(node)
            for source in node.sources:
                source.n_children -= 1
                self._free_unless_read(source)
        return self.buffer.size

    def _place(self, node: Tensor) -> None:
        for source in node.sources if node.in_place else ():
            # Blocks of views are never taken over, not even of mere reshapes.
            if source.view_of is not None or source.offset < 0 or source.is_output or source.shape != node.shape:
                continue
            if source.n_children == 1 and not source.n_views:
                node.offset, source.offset = source.offset, -1
                return
        node.offset = self.buffer.take(_align(node))

    def _free_unless_read(self, tensor: Tensor) -> None:
        if tensor.n_children or tensor.n_views:
            return
        owner = tensor
        if tensor.view_of is not None:
            owner = tensor.view_of
            owner.n_views -= 1
            if owner.n_views or owner.n_children:
                return
        if owner.offset >= 0 and not owner.is_output:
            self.buffer.give_back(owner.offset, _align(owner))
            owner.offset = -1


def _align(tensor: Tensor) -> int:
    return round_up(tensor.nbytes, ALIGNMENT)
