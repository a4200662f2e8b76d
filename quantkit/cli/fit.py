"""``quantkit fit``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.cli._devices import device_dicts, device_table
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import SIZE, SIZES, TOKENS, GroupedCommand, echo_notes, option, setting
from quantkit.cli._paths import MODEL, TEXT_FILE, Place
from quantkit.cli._table import fold, table
from quantkit.fit import Fit, FitOptions, fit
from quantkit.model.kv_types import KV_TYPES
from quantkit.names import printable
from quantkit.units import format_size

_DEVICES, _RUN, _TYPES, _FILES = "Devices", "Run", "Tensor types", "Files"


@click.command("fit", cls=GroupedCommand)
@click.argument("source", metavar="MODEL", type=Place(local=False))
@option("--vram", group=_DEVICES, type=SIZES, metavar="SIZE[,SIZE]", help="Memory of each GPU (24G,24G).")
@option("--ram", group=_DEVICES, type=SIZE, metavar="SIZE", help="Memory of the host (64G).")
@setting(
    "--margin",
    group=_DEVICES,
    type=SIZE,
    default="1GiB",
    metavar="SIZE",
    help="Memory of each GPU that must remain free.",
)
@option(
    "-c",
    "--ctx",
    "--ctx-size",
    "ctx",
    group=_RUN,
    type=TOKENS,
    default=0,
    metavar="N",
    help="Context of all sequences (32k).",
)
@setting(
    "-ctk",
    "--ctk",
    "--cache-type-k",
    "ctk",
    group=_RUN,
    type=click.Choice(KV_TYPES),
    default="f16",
    help="Type of the K cache.",
)
@setting(
    "-ctv",
    "--ctv",
    "--cache-type-v",
    "ctv",
    group=_RUN,
    type=click.Choice(KV_TYPES),
    default="f16",
    help="Type of the V cache.",
)
@setting("-np", "--parallel", group=_RUN, type=int, default=1, help="Parallel sequences.")
@option("-kvu", "--kv-unified", group=_RUN, is_flag=True, help="Sequences share one cache.")
@option("--server", group=_RUN, is_flag=True, help="One row of logits per sequence, as in llama-server.")
@setting("-fa", "--flash-attn", group=_RUN, type=click.Choice(["on", "off"]), default="on", help="Flash attention.")
@setting("-b", "--batch-size", "batch", group=_RUN, type=int, default=2048, help="Logical batch size.")
@setting("-ub", "--ubatch-size", "ubatch", group=_RUN, type=int, default=512, help="Physical batch size.")
@setting(
    "--runtime",
    group=_RUN,
    type=click.Choice(["llama.cpp", "ik"]),
    default="llama.cpp",
    help="The program that runs the model.",
)
@option("-mm", "--mmproj", group=_FILES, type=MODEL, metavar="FILE", help="Mmproj file, loaded beside the model.")
@option(
    "-md",
    "--draft",
    "--model-draft",
    "draft",
    group=_FILES,
    type=MODEL,
    metavar="FILE",
    help="Draft model, loaded beside it.",
)
@option(
    "--types",
    group=_TYPES,
    metavar="TYPE[,TYPE]",
    help="Types whose sizes are planned; default of an unquantized model: Q2_K to Q8_0.",
)
@option(
    "-r",
    "--recipe",
    group=_TYPES,
    type=TEXT_FILE,
    metavar="FILE",
    help="Rules for these types; the first is the type of the model that is shown.",
)
@json_option()
def command(
    source: Path,
    vram: Sequence[int] | None,
    types: str | None,
    flash_attn: str,
    json_to: JsonOutput,
    **settings: Any,
) -> None:
    """Estimate the memory that a model needs, and the options with which it fits.

    MODEL is a GGUF file, or the directory of a checkpoint; only headers are read,
    of URLs too. Without --ctx the context is that of training, or the longest that
    fits the GPUs.

    \b
    quantkit fit model-Q4_K_M.gguf --vram 24G --ram 64G --ctx 32k
    quantkit fit Qwen3-30B-A3B/ --vram 24G,24G --ctk q8_0 --ctv q8_0
    """
    options = FitOptions(
        vram=tuple(vram or ()),
        types=tuple(name.strip() for name in types.split(",")) if types else None,
        flash_attn=flash_attn == "on",
        **settings,
    )
    result = fit(source, options)
    json_to.print(lambda: _text(result), lambda: as_dict(result))
    echo_notes(result.notes)


def _text(result: Fit) -> str:
    parts = [_summary(result), device_table(result.devices), _cache_table(result)]
    if result.sizes:
        parts.append(_size_table(result))
    return "\n\n".join(parts + [result.command])


def _summary(result: Fit) -> str:
    verdict = "fits" if result.fits else "does not fit"
    longest = f"; up to {result.longest} in this layout" if result.longest else ""
    lines = [
        ("model", printable(str(result.path))),
        ("context", f"{result.ctx} of {result.ctx_train} in training{longest}"),
        ("memory", f"{format_size(result.nbytes)}: {verdict}" if _is_limited(result) else format_size(result.nbytes)),
    ]
    return "\n".join(fold(f"{label:<7}  {text}", 9) for label, text in lines)


def _is_limited(result: Fit) -> bool:
    return any(device.limit is not None for device in result.devices)


def _cache_table(result: Fit) -> str:
    rows = [(c.kind, c.layers, c.cells or "", format_size(c.nbytes)) for c in result.caches]
    return table(["cache", "layers", "cells", "size"], rows)


def _size_table(result: Fit) -> str:
    return table(
        ["type", "weights", "total ~", "", "options"], [tuple(row) for row in _size_rows(result)], left=(0, 3, 4)
    )


def _size_rows(result: Fit) -> Iterator[tuple[str, ...]]:
    limited = _is_limited(result)
    for size in result.sizes:
        place = "on the GPUs" if size.all_on_gpus else "fits" if size.fits else "does not fit"
        options = f"-ngl {size.gpu_layers}" + (f" -ncmoe {size.cpu_moe}" if size.cpu_moe and size.gpu_layers else "")
        yield (
            size.type,
            format_size(size.weights),
            format_size(size.nbytes),
            place if limited else "",
            options if size.gpu_layers else "",
        )


def as_dict(result: Fit) -> dict[str, Any]:
    """Return everything, for programs."""
    return {
        "path": str(result.path),
        "architecture": result.architecture,
        "runtime": result.runtime,
        "ctx": result.ctx,
        "ctx_train": result.ctx_train,
        "longest_ctx": result.longest,
        "fits": result.fits,
        "bytes": result.nbytes,
        "devices": device_dicts(result.devices),
        "caches": [{"kind": c.kind, "layers": c.layers, "cells": c.cells, "bytes": c.nbytes} for c in result.caches],
        "gpu_layers": result.gpu_layers,
        "cpu_moe": result.cpu_moe,
        "tensor_split": list(result.tensor_split),
        "command": result.command,
        "types": [
            {
                "type": s.type,
                "weights": s.weights,
                "bytes": s.nbytes,
                "fits": s.fits,
                "all_on_gpus": s.all_on_gpus,
                "gpu_layers": s.gpu_layers,
                "cpu_moe": s.cpu_moe,
            }
            for s in result.sizes
        ],
        "estimated": ["compute"],
        "notes": list(result.notes),
    }
