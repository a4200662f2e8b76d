"""A device that records the launches of a program, without running or compiling any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from host_device import check_launch

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.model.engine import Model, load
from quantkit.model.placement import ALL_LAYERS, Placement


class NullDevice:
    """Addresses without memory, and the requested launches."""

    name, capability, multiprocessors = "CUDA0", 90, 132

    def __init__(self) -> None:
        self._end, self.launches = 1 << 40, list[Launch]()

    def allocate(self, nbytes: int) -> int:
        self._end += (nbytes // 256 + 2) * 256
        return self._end - (nbytes // 256 + 2) * 256

    def free(self, address: int) -> None:
        pass

    def upload(self, address: int, data: npt.NDArray[Any]) -> None:
        pass

    def download(self, address: int, out: npt.NDArray[Any]) -> None:
        out[...] = 0

    def zero(self, address: int, nbytes: int) -> None:
        pass

    def host_array(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.zeros(count, dtype)

    def gemm_bf16(self, rows: int, n_out: int, n_in: int, x: int, w: int, out: int) -> None:
        pass

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        pass

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            check_launch(launch, self.capability)
        self.launches += launches

    def record(self, launches: Sequence[Launch]) -> Callable[[], None]:
        self.run(launches)
        return lambda: self.run(launches)

    def synchronize(self) -> None:
        pass


def load_on(monkeypatch: pytest.MonkeyPatch, device: NullDevice, path: Path, **options: Any) -> Model:
    """Load a model entirely on a device."""
    monkeypatch.setattr("quantkit.kernels.cuda.core.device.open_device", {"CUDA0": device}.__getitem__)
    monkeypatch.setattr("quantkit.model.placement.cuda_devices", lambda: ("CUDA0",))
    return load(path, placement=Placement(ALL_LAYERS, (), ("CUDA0",), embeddings=True), **options)


def launches_of(
    monkeypatch: pytest.MonkeyPatch, path: Path, n_tokens: int = 1, n_ctx: int = 4096, **options: Any
) -> list[str]:
    """Return the kernels that a batch of n tokens launches, all on one device."""
    device = NullDevice()
    with load_on(monkeypatch, device, path, **options) as model:
        session = model.session(n_ctx)
        device.launches.clear()
        session.decode(np.ones(n_tokens, np.int32))
    return [launch.kernel.name for launch in device.launches]
