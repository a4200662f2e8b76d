"""Weights in a device's memory: uploaded once, in the file's format, for all programs of a backend.

A budget (--max-vram) is spent on dense weights first, then on experts, layer by layer; other weights stay in the mapped
file and are uploaded for every batch (lowering.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import GGUFFile, TensorInfo
from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.cuda.unpack import decoders
from quantkit.model.ops import Op
from quantkit.types import OWN_IDS


class Weights:
    """The weights of a model on one device; budget: their limit in bytes, None: no limit."""

    def __init__(self, device: Device, source: GGUFFile, budget: int | None) -> None:
        self.device = device
        self.source = source
        self.budget = budget
        self.nbytes = 0
        self._addresses: dict[str, int] = {}
        self._staged: set[str] = set()

    def place(self, ops: Sequence[Op]) -> None:
        """Decide which weights of these operations remain on the host; earlier decisions remain valid."""
        tensors = {m.tensor.name: m.tensor for op in ops for m in op.matrices()}
        if lacking := [t for t in tensors.values() if t.type.id in OWN_IDS and t.type.name not in decoders()]:
            raise TypeNotSupported(
                f"{lacking[0].name}: {lacking[0].type} has no CUDA kernels: keep it on the CPU (-ot)", "QK-E302"
            )
        new = [t for name, t in tensors.items() if name not in self._addresses and name not in self._staged]
        left = None if self.budget is None else self.budget - self.nbytes
        for tensor in sorted(new, key=lambda t: len(t.shape) > 2):  # stable: in the order of layers
            if left is not None:
                if tensor.nbytes > left:
                    self._staged.add(tensor.name)
                    continue
                left -= tensor.nbytes

    def address(self, tensor: TensorInfo) -> int | None:
        """Return the address of a tensor, uploading it the first time; None if it stays on the host."""
        if tensor.name in self._staged:
            return None
        if tensor.name not in self._addresses:
            address = self.device.allocate(tensor.nbytes)
            self.device.upload(address, self.source.data(tensor))
            if tensor.offset < 0:  # computed in memory, where it is no longer needed
                self.source.forget(tensor)
            self._addresses[tensor.name] = address
            self.nbytes += tensor.nbytes
        return self._addresses[tensor.name]

    def close(self) -> None:
        """Free the memory."""
        for address in self._addresses.values():
            self.device.free(address)
        self._addresses.clear()
