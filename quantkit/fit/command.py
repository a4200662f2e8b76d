"""The command line of a runtime for a layout."""

from __future__ import annotations

import shlex
from pathlib import Path

from quantkit.fit.caches import Context
from quantkit.fit.layout import Layout
from quantkit.fit.options import FitOptions


def command_line(path: Path, layout: Layout, context: Context, options: FitOptions) -> str:
    """Return the options to type, of llama.cpp or ik_llama.cpp."""
    # A checkpoint is planned, not run.
    model = str(path) if path.suffix == ".gguf" else "model.gguf"
    words = ["llama-server", "-m", model, "-c", str(context.n_ctx)]
    if options.parallel != 1:
        words += ["-np", str(options.parallel)]
        words += ["-kvu"] if options.kv_unified and options.runtime == "llama.cpp" else []
    words += _flash_attention(options)
    for name, value, default in (("-ctk", options.ctk, "f16"), ("-ctv", options.ctv, "f16")):
        words += [name, value] if value != default else []
    for name, number, standard in (("-b", options.batch, 2048), ("-ub", options.ubatch, 512)):
        words += [name, str(number)] if number != standard else []
    words += ["-ngl", str(layout.gpu_layers)]
    if options.vram and not layout.gpu_layers and options.runtime == "llama.cpp":
        words += ["-dev", "none"]  # a GPU would still compute large batches
    if layout.cpu_moe and layout.gpu_layers:
        words += _experts_in_memory(layout, options)
    if len(layout.counts) > 1 and layout.gpu_layers:
        words += ["-ts", ",".join(map(str, layout.counts))]
    if options.mmproj is not None:
        words += ["--mmproj", str(options.mmproj)]
    if options.draft is not None:
        words += ["-md", str(options.draft)]
    return shlex.join(words)


def _flash_attention(options: FitOptions) -> list[str]:
    if options.runtime == "ik":
        return ["-fa"] if options.flash_attn else ["-no-fa"]
    return ["-fa", "on" if options.flash_attn else "off"]


def _experts_in_memory(layout: Layout, options: FitOptions) -> list[str]:
    if options.runtime == "llama.cpp":
        return ["-ncmoe", str(layout.cpu_moe)]
    layers = r"\d+" if layout.cpu_moe >= layout.n_layer else "|".join(map(str, range(layout.cpu_moe)))
    return ["-ot", rf"blk\.({layers})\.ffn_(up|down|gate|gate_up)_exps=CPU"]
