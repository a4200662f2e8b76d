"""The settings of ``quantkit fit``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import RecipeError
from quantkit.fit.caches import Context
from quantkit.model.kv_types import split_kv_type
from quantkit.types import BY_NAME
from quantkit.units import parse_size

#: Memory of each GPU that remains free, as llama.cpp's --fit-target has it.
MARGIN = 1 << 30
RUNTIMES = ("llama.cpp", "ik")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Memory limits and runtime parameters; sizes are bytes, or texts such as "24G" (10^9) and "24GiB".

    ctx: context length of all sequences; 0 for that of training, or the longest that fits the GPUs.
    ctk, ctv: types of keys and values. vram: memory of each GPU. ram: memory of the host; None if it does not matter.
    margin: memory of each GPU that must remain free. parallel: sequences at once; kv_unified: they share one cache.
    server: logits of one token per sequence, as in llama-server, not of a whole batch. types: planned sizes, None for
    Q2_K to Q8_0 if the model is not quantized; with a ``recipe`` the first is that of the model itself.
    """

    ctx: int = 0
    ctk: str = "f16"
    ctv: str = "f16"
    vram: tuple[int | str, ...] = ()
    ram: int | str | None = None
    margin: int | str = MARGIN
    parallel: int = 1
    kv_unified: bool = False
    server: bool = False
    runtime: str = "llama.cpp"
    flash_attn: bool = True
    batch: int = 2048
    ubatch: int = 512
    mmproj: Path | None = None
    draft: Path | None = None
    recipe: Path | None = None
    types: tuple[str, ...] | None = None

    @property
    def gpus(self) -> tuple[int, ...]:
        """Bytes of each GPU that may be used."""
        margin = bytes_of(self.margin, "margin")
        return tuple(max(0, bytes_of(gpu, "vram") - margin) for gpu in self.vram)

    @property
    def host(self) -> int | None:
        return None if self.ram is None else bytes_of(self.ram, "ram")

    def context(self, n_ctx: int) -> Context:
        """Return the context of ``n_ctx`` positions. Raises RecipeError for values that llama.cpp refuses."""
        for name, value in (
            ("ctx", n_ctx),
            ("parallel", self.parallel),
            ("batch", self.batch),
            ("ubatch", self.ubatch),
        ):
            if value < 1:
                raise RecipeError(f"{name} is {value}: give a number above 0", "QK-E203")
        if self.runtime not in RUNTIMES:
            raise RecipeError(f"unknown runtime {self.runtime!r}: choose {' or '.join(RUNTIMES)}", "QK-E203")
        k, v = split_kv_type(f"{self.ctk}/{self.ctv}")
        v_type = BY_NAME[v.upper()]
        if v_type.block > 1 and not self.flash_attn:
            raise RecipeError(f"values of type {v} require flash attention: omit --flash-attn off", "QK-E202")
        return Context(
            n_ctx,
            BY_NAME[k.upper()],
            v_type,
            n_parallel=self.parallel,
            # ik_llama.cpp has one cache for all sequences.
            kv_unified=self.kv_unified or self.runtime == "ik",
            n_batch=self.batch,
            n_ubatch=self.ubatch,
            flash_attn=self.flash_attn,
            runtime=self.runtime,
            server=self.server,
        )


def bytes_of(size: int | str, name: str) -> int:
    """Return a size in bytes. Raises RecipeError for other texts."""
    try:
        return size if isinstance(size, int) else parse_size(size)
    except ValueError as e:
        raise RecipeError(f"{name}: {e}", "QK-E203") from None
