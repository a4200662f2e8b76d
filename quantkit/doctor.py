"""Diagnosis of this machine: Python, packages, CPU, kernel cache, memory, disk, GPUs and other programs."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from quantkit.arguments import checked
from quantkit.cpus import available_cpus, available_memory
from quantkit.extras import ALL, ON_REQUEST, Extra
from quantkit.units import format_size
from quantkit.version import __version__

State = Literal["ok", "warning", "error"]

#: Packages that quantkit needs, by module.
_REQUIRED = {"numpy": "numpy", "numba": "numba", "llvmlite": "llvmlite", "click": "click", "tqdm": "tqdm"}
_PYTHON = (3, 11)
#: CPU features that speed up kernels most, and the minimum for fast kernels.
_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512vnni",
    "avxvnni",
    "neon",
    "dotprod",
    "i8mm",
)
_FAST = ("avx2", "neon")
_MIN_MEMORY, _MIN_DISK = 2 << 30, 5 << 30
#: Programs that quantkit is compared with, or works with.
_PEERS = ("llama-quantize", "llama-imatrix", "llama-perplexity", "llama-bench", "llama-cli", "hf")
#: The file that NVIDIA's driver creates.
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """A finding about this machine: ok, a limit (warning), or an obstacle to all work (error)."""

    name: str
    state: State
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The findings of ``doctor``."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0: all is well; 1: there are warnings; 2: quantkit cannot work."""
        return max(("ok", "warning", "error").index(f.state) for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings for programs."""
        return {"version": __version__, "exit_code": self.exit_code, "findings": [asdict(f) for f in self.findings]}


@checked
def doctor() -> Diagnosis:
    """Check this machine for quantkit; nothing is downloaded, and no kernel is compiled.

    Raises nothing: a check that fails is a finding.
    """
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        *(_python, _packages, _extras, _cpu, _kernel_cache, _tensor_cache, _memory, _disk, _gpus, _peers),
    )
    return Diagnosis(tuple(finding for check in checks for finding in _findings(check)))


def _findings(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return the findings of a check, one that fails included."""
    try:
        return list(check())
    except Exception as e:  # a broken package may raise anything when it is imported
        return [Finding(check.__name__.strip("_").replace("_", " "), "error", f"{type(e).__name__}: {e}")]


def _python() -> Iterator[Finding]:
    text = f"{platform.python_version()}, {sys.executable}"
    is_supported = sys.version_info >= _PYTHON
    minimum = ".".join(map(str, _PYTHON))
    yield Finding(
        "Python", "ok" if is_supported else "error", text, "" if is_supported else f"install Python {minimum}"
    )


def _installed_version(package: str) -> str | None:
    try:
        return version(package.partition("[")[0])
    except PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    versions = {package: _installed_version(package) for package in _REQUIRED.values()}
    missing = [package for package, v in versions.items() if v is None]
    text = ", ".join(f"{package} {v}" for package, v in versions.items() if v is not None)
    if missing:
        yield Finding(
            "packages", "error", f"missing: {', '.join(missing)}", "pip install --force-reinstall gguf-quantkit"
        )
    else:
        yield Finding("packages", "ok", f"quantkit {__version__}, {text}")


def _extras() -> Iterator[Finding]:
    for group in (ALL, ON_REQUEST):
        by_name: dict[str, list[Extra]] = {}
        for extra in group:
            by_name.setdefault(extra.name, []).append(extra)
        for name, extras in by_name.items():
            missing = list(dict.fromkeys(package for extra in extras for package in extra.missing()))
            purposes = ", ".join(dict.fromkeys(extra.purpose for extra in extras))
            if not missing:
                yield Finding(f"[{name}]", "ok", f"installed, for {purposes}")
                continue
            state: State = "warning" if group is ALL else "ok"
            text = f"not installed: {', '.join(missing)}, for {purposes}"
            yield Finding(f"[{name}]", state, text, f"pip install 'gguf-quantkit[{name}]'")


def _cpu() -> Iterator[Finding]:
    from quantkit.bench import cpu_name
    from quantkit.kernels.cpu.core.simd import FEATURES

    features = [name for name in _FEATURES if name in FEATURES]
    text = f"{cpu_name()}, {available_cpus()} CPUs; {', '.join(features) or 'no vector features'}"
    is_fast = not FEATURES.isdisjoint(_FAST)
    yield Finding(
        "CPU", "ok" if is_fast else "warning", text, "" if is_fast else "kernels are slow without AVX2 or NEON"
    )


def _kernel_cache() -> Iterator[Finding]:
    from quantkit.kernels.cpu.core.jit import kernel_folder

    folder = kernel_folder()
    home = Path.home()
    text = f"{folder}: {format_size(_size(folder))}, {format_size(_size(folder.parents[1]))} with other versions"
    if not any(folder.iterdir()):
        text += "; kernels are compiled when they are first used"
    is_lasting = folder.is_relative_to(home) or "QUANTKIT_CACHE" in os.environ
    remedy = "" if is_lasting else "it is temporary: make ~/.cache writable, or set QUANTKIT_CACHE"
    yield Finding("kernel cache", "ok" if is_lasting else "warning", text, remedy)


def _tensor_cache() -> Iterator[Finding]:
    configured = os.environ.get("QUANTKIT_TENSOR_CACHE")
    if configured:
        is_writable = os.access(configured, os.W_OK)
        remedy = "" if is_writable else "not writable: create it, or change QUANTKIT_TENSOR_CACHE"
        state: State = "ok" if is_writable else "warning"
        yield Finding("tensor cache", state, f"{configured}: {format_size(_size(Path(configured)))}", remedy)


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    n_bytes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                n_bytes += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # another process removed it
                continue
    return n_bytes


def _memory() -> Iterator[Finding]:
    free = available_memory()
    state: State = "ok" if free >= _MIN_MEMORY else "warning"
    remedy = "" if state == "ok" else "use --max-ram and fewer threads (-j)"
    yield Finding("memory", state, f"{format_size(free)} available", remedy)


def _disk() -> Iterator[Finding]:
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    is_writable = os.access(folder, os.W_OK)
    state: State = "ok" if free >= _MIN_DISK and is_writable else "warning"
    text = f"{folder}: {format_size(free)} free{'' if is_writable else ', not writable'}"
    yield Finding("disk", state, text, "" if state == "ok" else "write outputs to another folder")


def _gpus() -> Iterator[Finding]:
    from quantkit.kernels.cuda.core.device import count_devices, open_device, why_none

    n = count_devices()
    if not n:
        has_driver = _DRIVER.exists()
        remedy = "pip install 'gguf-quantkit[cuda12]' or [cuda13], by the version of the driver" if has_driver else ""
        yield Finding("GPU", "warning" if has_driver else "ok", f"none: {why_none()}", remedy)
    for i in range(n):
        device: Any = open_device(f"CUDA{i}")
        yield Finding(f"CUDA{i}", "ok", f"{device.card}, compute capability {device.capability / 10:.1f}; {_driver()}")


def _driver() -> str:
    import cupy

    runtime = cupy.cuda.runtime
    number = runtime.driverGetVersion()
    return f"driver for CUDA {number // 1000}.{number % 1000 // 10}, CuPy {cupy.__version__}"


def _peers() -> Iterator[Finding]:
    paths = {name: shutil.which(name) for name in _PEERS}
    text = ", ".join(f"{name}: {path}" for name, path in paths.items() if path) or "none on PATH, and none is required"
    yield Finding("other programs", "ok", text)
