"""Weights in a device's memory: uploaded once, as they lie in the file, for all programs of a backend.

With a budget (--max-vram) dense weights come first, experts after them, layer by layer, as far as it goes; the others
stay in the mapped file and are uploaded for every batch (lowering.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.formats.gguf import GGUFFile, TensorInfo
from quantkit.kernels.cuda.core.device import Device
from quantkit.model.ops import Op


class Weights:
    """The weights of a model on one device; budget: bytes that they may take, all of the device's without."""

    def __init__(self, device: Device, source: GGUFFile, budget: int | None) -> None:
        self.device, self.source, self.budget = device, source, budget
        self.nbytes = 0
        self._at: dict[str, int] = {}
        self._staged: set[str] = set()

    def settle(self, ops: Sequence[Op]) -> None:
        """Decide which weights of these operations stay on the host; earlier ones keep their place."""
        tensors = {m.tensor.name: m.tensor for op in ops for m in op.matrices()}
        new = [t for name, t in tensors.items() if name not in self._at and name not in self._staged]
        left = None if self.budget is None else self.budget - self.nbytes
        for tensor in sorted(new, key=lambda t: len(t.shape) > 2):  # stable: in the order of layers
            if left is not None:
                if tensor.nbytes > left:
                    self._staged.add(tensor.name)
                    continue
                left -= tensor.nbytes

    def address(self, tensor: TensorInfo) -> int | None:
        """Return where a tensor is, uploading it the first time; None if it stays on the host."""
        if tensor.name in self._staged:
            return None
        if tensor.name not in self._at:
            address = self.device.allocate(tensor.nbytes)
            self.device.upload(address, self.source.data(tensor))
            if tensor.offset < 0:  # made in memory, and not needed there anymore
                self.source.forget(tensor)
            self._at[tensor.name] = address
            self.nbytes += tensor.nbytes
        return self._at[tensor.name]

    def close(self) -> None:
        """Free the memory."""
        for address in self._at.values():
            self.device.free(address)
        self._at.clear()
