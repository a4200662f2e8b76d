"""Convert a LoRA adapter of PEFT: ``quantkit convert-lora``, llama.cpp's convert_lora_to_gguf.py.

plan_convert_lora(...)  ->  Plan    every tensor and byte count, from headers alone, nothing written
convert_lora(...)       ->  QuantizeResult    carry out the plan
"""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from quantkit.arguments import checked
from quantkit.checkpoint.lora.convert import open_adapter
from quantkit.convert import plan_opened
from quantkit.errors import RecipeError
from quantkit.formats.remote import locate
from quantkit.options.convert import ConvertOptions
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions
from quantkit.quantize import QuantizeResult, run_quantize

#: Values of --outtype.
OUTTYPES = ("f32", "f16", "bf16", "q8_0", "auto")


@checked
def convert_lora(
    adapter: str | Path,
    output: str | Path | None = None,
    *,
    base: str | Path | None = None,
    outtype: str = "f32",
    bigendian: bool = False,
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> QuantizeResult:
    """Convert the LoRA adapter in the directory ``adapter`` to a GGUF file that llama.cpp loads beside its model.

    The bytes are those of convert_lora_to_gguf.py (b11434, transformers 4.57.6). That program only writes lora_alpha;
    llama.cpp multiplies B @ A by it, divided by the rank. For rsLoRA, rank_pattern and alpha_pattern this differs from
    training. quantkit uses PEFT's scales: with rsLoRA, alpha is lora_alpha times the root of the rank, and differences
    from a common alpha are multiplied into B.

    Args:
        adapter: with adapter_config.json and adapter_model.safetensors, as PEFT saves them.
        output: the file to write, with {ftype} in its name replaced by the type, or a directory; None for the default
            name of llama.cpp's program, in ``adapter``.
        base: the checkpoint of the base model; config.json is enough, but with its weights shapes are checked. None for
            the directory named in adapter_config.json.
        outtype: f32, f16, bf16, q8_0 or auto (the type of the first matrix).
        bigendian: write a big-endian file.
        max_ram: limit of the workers' buffers together, in bytes (or "2G").
        run: threads, resume, overwrite, observer: see ``RunOptions``.

    Raises:
        FormatError: the adapter is damaged, belongs to another base, or has more than LoRA factors.
        QuantkitError: see quantkit.errors; no output has its final name then.
    """
    plan = plan_convert_lora(adapter, output, base=base, outtype=outtype, bigendian=bigendian)
    return run_quantize(plan, max_ram=max_ram, **run)


@checked
def plan_convert_lora(
    adapter: str | Path,
    output: str | Path | None = None,
    *,
    base: str | Path | None = None,
    outtype: str = "f32",
    bigendian: bool = False,
) -> Plan:
    """Plan the conversion of an adapter without writing anything; arguments and errors as for ``convert_lora``."""
    if outtype not in OUTTYPES:
        raise RecipeError(f"--outtype {outtype}: choose one of {', '.join(OUTTYPES)}", "QK-E203")
    opened = open_adapter(locate(adapter), base=None if base is None else locate(base), outtype=outtype)
    return plan_opened(opened, output, ConvertOptions(bigendian=bigendian))
