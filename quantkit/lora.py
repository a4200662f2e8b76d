"""Convert a LoRA adapter of PEFT: ``quantkit convert-lora``, llama.cpp's convert_lora_to_gguf.py.

plan_convert_lora(...)  ->  Plan    every tensor and byte count, from headers alone, nothing written
convert_lora(...)       ->  QuantizeResult    the plan carried out
"""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from quantkit.arguments import checked
from quantkit.checkpoint.lora.convert import open_adapter
from quantkit.convert import plan_opened
from quantkit.errors import RecipeError
from quantkit.formats.remote import located
from quantkit.options.convert import ConvertOptions
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions
from quantkit.quantize import QuantizeResult, run_quantize

#: What --outtype takes.
OUTTYPES = ("f32", "f16", "bf16", "q8_0", "auto")


@checked
def convert_lora(
    adapter: str | Path,
    output: str | Path | None = None,
    *,
    base: str | Path | None = None,
    outtype: str = "f32",
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> QuantizeResult:
    """Convert the LoRA adapter in the directory ``adapter`` to a GGUF file that llama.cpp loads beside its model.

    The bytes are those of convert_lora_to_gguf.py (b11434, transformers 4.57.6). That program writes lora_alpha and
    nothing else, by which llama.cpp multiplies B @ A after it divided it by the rank. For rsLoRA, rank_pattern and
    alpha_pattern that is not what the adapter was trained with; here every scale is PEFT's: alpha is lora_alpha times
    the root of the rank with rsLoRA, and what differs from one alpha for all is multiplied into B.

    Args:
        adapter: with adapter_config.json and adapter_model.safetensors, as PEFT saves them.
        output: the file to write, in whose name {ftype} stands for the type, or a directory; None for the name that
            llama.cpp's program gives it, in ``adapter``.
        base: the checkpoint that it belongs to; config.json is enough, with the weights their shapes are compared.
            None for the directory that adapter_config.json names.
        outtype: f32, f16, bf16, q8_0 or auto (the type of the first matrix).
        max_ram: bytes (or "2G") that the workers' buffers may take together.
        run: threads, resume, overwrite, observer: see ``RunOptions``.

    Raises:
        FormatError: an adapter that is broken, not of this base, or more than factors: the message says what.
        QuantkitError: see quantkit.errors; then no output has its final name.
    """
    return run_quantize(plan_convert_lora(adapter, output, base=base, outtype=outtype), max_ram=max_ram, **run)


@checked
def plan_convert_lora(
    adapter: str | Path,
    output: str | Path | None = None,
    *,
    base: str | Path | None = None,
    outtype: str = "f32",
) -> Plan:
    """Plan the conversion of an adapter and write nothing; arguments and errors as for ``convert_lora``."""
    if outtype not in OUTTYPES:
        raise RecipeError(f"--outtype {outtype}: there are {', '.join(OUTTYPES)}", "QK-E203")
    opened = open_adapter(located(adapter), base=None if base is None else located(base), outtype=outtype)
    return plan_opened(opened, output, ConvertOptions())
