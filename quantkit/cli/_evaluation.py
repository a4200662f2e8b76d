"""Options, progress and output shared by the commands that run a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from quantkit.cli._compat_options import ignored_options
from quantkit.cli._options import SIZE, GPULayers, claim, echo_notes, option, options, setting, to_json
from quantkit.cli._paths import MODEL_FILE, TEXT_FILE
from quantkit.evaluate.passes import EvaluationOptions, LoadOptions, Nodes
from quantkit.formats.outputs import atomic_write, check_apart, read_text
from quantkit.formats.remote import located
from quantkit.formats.tokenizer import read_token_ids

if TYPE_CHECKING:
    from quantkit.model.placement import Placement

F = TypeVar("F", bound=Callable[..., Any])
I32 = npt.NDArray[np.int32]

MODEL = "Model"
TEXT = "Text"
RUN = "Run"
OUT = "Output"
KV_TYPES = ("f32", "f16", "q8_0")


model_option = option(
    "-m", "--model", group=MODEL, type=MODEL_FILE, required=True, help="GGUF file; any shard of a split model."
)

#: Placement of a model; ``placement_from`` takes the values.
placement_options = options(
    setting(
        "--backend",
        group=RUN,
        type=click.Choice(["cpu", "cuda", "auto"], case_sensitive=False),
        default="cpu",
        help="Device that computes; cuda: all of the model without -ngl and -ot; auto: cuda if available.",
    ),
    option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        "gpu_layers",
        group=RUN,
        type=GPULayers(),
        help="Offload the last N layers, or all, to GPUs.",
    ),
    option(
        "-ot",
        "--override-tensor",
        "rules",
        group=RUN,
        multiple=True,
        metavar="RE=DEVICE",
        help="Place matching tensors on a device; repeatable.",
    ),
    option("-cmoe", "--cpu-moe", group=RUN, is_flag=True, help="Keep all experts on the CPU."),
    option(
        "-ncmoe",
        "--n-cpu-moe",
        group=RUN,
        type=click.IntRange(0),
        help="Keep experts of the first N layers on the CPU.",
    ),
    option(
        "--max-vram",
        group=RUN,
        type=SIZE,
        metavar="SIZE",
        help="Memory for weights per GPU; the rest is streamed for each batch.",
    ),
    option(
        "--cublas",
        group=RUN,
        is_flag=True,
        help="Process prompts in bf16 by cuBLAS on GPUs: less exact, for comparison.",
    ),
)


def placement_from(run: Mapping[str, Any]) -> Placement:
    """Return the placement, from the values of ``placement_options``."""
    from quantkit.model.placement import cuda_devices, placement_of

    backend, layers = run["backend"].lower(), run["gpu_layers"]
    devices = cuda_devices() if backend != "cpu" or layers else ()
    if backend == "auto":
        backend = "cuda" if devices else "cpu"
    if layers and not devices and backend != "cuda":
        from quantkit.kernels.cuda.core.device import why_none

        echo_notes([f"-ngl: all layers run on the CPU; {why_none()}"])
        layers = 0
    return placement_of(backend, layers, _rules(run), devices)


def _rules(run: Mapping[str, Any]) -> list[str]:
    return [*run["rules"], *_experts_on_cpu(run["cpu_moe"], run["n_cpu_moe"])]


def _experts_on_cpu(all_layers: bool, first: int | None) -> list[str]:
    """Return the -ot rules equivalent to -cmoe and -ncmoe."""
    layers = r"\d+" if all_layers else "|".join(map(str, range(first or 0)))
    return [rf"blk\.({layers})\.ffn_\w+_(ch)?exps=CPU"] if layers else []


#: -ctk and -ctv are one option, as both caches have the same type.
KV_NAMES = ("-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-type", "kv_type")


def parse_kv_type(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str:
    """Return the type that -ctk and -ctv give; click.BadParameter if they differ."""
    types = {value.lower() for value in values}
    if len(types) > 1:
        raise click.BadParameter(f"K and V caches have one type here, not {' and '.join(sorted(types))}", ctx, param)
    return types.pop()


_COUNT = click.IntRange(1)
_ON: dict[str, Any] = {"group": RUN, "default": True}
#: Options of a run; ``load_options`` takes the values.
run_options = options(
    setting("-b", "--batch-size", "n_batch", group=RUN, type=_COUNT, default=2048, help="Logical batch size."),
    setting("-ub", "--ubatch-size", "n_ubatch", group=RUN, type=_COUNT, default=512, help="Physical batch size."),
    option("-t", "--threads", group=RUN, type=click.IntRange(0), help="Threads; 0 or by default, all CPUs."),
    setting(
        *KV_NAMES,
        group=RUN,
        multiple=True,
        type=click.Choice(KV_TYPES, case_sensitive=False),
        default=["f16"],
        callback=parse_kv_type,
        help="Type of both K and V cache.",
    ),
    option("-fug/-no-fug", "--fused-up-gate/--no-fused-up-gate", **_ON, help="Fuse dense up+gate (default)."),
    option("-fmoe/-no-fmoe", "--fused-moe/--no-fused-moe", **_ON, help="Fuse up+gate of experts (default)."),
    option("-fqkv/-no-fqkv", "--fused-qkv/--no-fused-qkv", **_ON, help="Fuse q, k and v (default)."),
    option("-flaunch/-no-flaunch", "--fused-launches/--no-fused-launches", **_ON, help="Fuse GPU launches (default)."),
    option(
        "-muge", "--merge-up-gate-experts", group=RUN, is_flag=True, help="Merge up and gate experts while loading."
    ),
    option(
        "--mmap/--no-mmap",
        group=RUN,
        default=True,
        help="Memory-map weights (default), or copy them to memory for faster generation.",
    ),
    placement_options,
    ignored_options,
    option("--max-ram", group=RUN, type=SIZE, metavar="SIZE", help="Memory for weights; the rest is streamed."),
)


def load_options(run: Mapping[str, Any]) -> LoadOptions:
    """Return the options of quantkit.load, from the values of ``run_options``."""
    from quantkit.model.fusion import Fusion

    result: LoadOptions = {
        "threads": run["threads"] or None,
        "n_ubatch": run["n_ubatch"],
        "kv_type": run["kv_type"],
        "mmap": run["mmap"],
        "max_ram": run["max_ram"],
        "max_vram": run["max_vram"],
        "cublas": run["cublas"],
        "fusion": Fusion(*(run[f"fused_{name}"] for name in ("up_gate", "moe", "qkv", "launches"))),
        "merge_up_gate": run["merge_up_gate_experts"],
    }
    return {**result, "placement": placement_from(run)}


def evaluation_options(run: Mapping[str, Any]) -> EvaluationOptions:
    """Return the options of perplexity, kld and imatrix, from the values of ``run_options`` and --ray."""
    if run["ray"] is None:
        return cast(EvaluationOptions, load_options(run))
    nodes = Nodes(run["ray"], run["backend"].lower(), run["gpu_layers"], tuple(_rules(run)))
    result = cast(EvaluationOptions, load_options({**run, "backend": "cpu", "gpu_layers": None, "rules": ()}))
    return {**result, "nodes": nodes}


#: The text, as ``given_text`` takes it.
text_options = options(
    option("-f", "--file", group=TEXT, type=TEXT_FILE, help="Text file, - for stdin; one final newline is dropped."),
    option("-p", "--prompt", group=TEXT, metavar="TEXT", help="Text given inline."),
    option("--tokens", group=TEXT, metavar="IDS", help="Token ids: 1,2,3, or @FILE.i32, raw int32."),
)

json_option = options(
    option("--json", "json_to", group=OUT, metavar="FILE|-", help="Write the result as JSON; - prints only that."),
    option("--overwrite", group=OUT, is_flag=True, help="Replace existing outputs."),
)


def text_or_tokens(file: Path | None, prompt: str | None, tokens: str | None) -> tuple[str | bytes | None, I32 | None]:
    """Return the text or None, and the token ids or None. Raises click.UsageError unless exactly one is given.

    A file is read as llama.cpp reads it: as bytes, without one newline at the end.
    """
    if sum(x is not None for x in (file, prompt, tokens)) != 1:
        raise click.UsageError("give one of -f FILE, -p TEXT and --tokens IDS")
    if tokens is not None:
        return None, read_token_ids(tokens)
    return (prompt if file is None else read_text(file).removesuffix(b"\n")), None


class Bar:
    """A bar with chunks, the value so far and the time left, if stderr is a terminal."""

    def __init__(self) -> None:
        # A pass completes several chunks at once, so the speed is the mean since the start.
        is_visible = sys.stderr.isatty()
        self.bar: tqdm[Any] | None = (
            tqdm(unit="chunk", desc="first pass", leave=False, dynamic_ncols=True, smoothing=0) if is_visible else None
        )

    def update(self, n_done: int, total: int, value: str) -> None:
        """Show the value after ``done`` of ``todo`` chunks."""
        if self.bar is not None:
            self.bar.total = total
            self.bar.set_description_str(value, refresh=False)
            self.bar.update(n_done - self.bar.n)

    def print(self, line: str) -> None:
        """Print a line on stdout, above the bar."""
        with tqdm.external_write_mode(file=sys.stdout):
            click.echo(line)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()


def ids_file(tokens: str | None) -> str | None:
    """Return the file that --tokens names, if it names one."""
    return tokens[1:] or None if tokens is not None and tokens.startswith("@") else None


def claim_json(
    json_to: str | None, outputs: Iterable[Path | None], inputs: Iterable[str | Path | None], *, overwrite: bool
) -> Path | None:
    """Return the file of --json, held until the command ends; None if there is none.

    Raises ResourceError, before any work, if it or another of the command's ``outputs`` is an input or another output.
    """
    path = None if json_to in (None, "-") else located(str(json_to))
    check_apart([path, *outputs], inputs)
    return None if path is None else claim(path, overwrite=overwrite)


def report(json_to: str | None, path: Path | None, text: str, result: Mapping[str, Any]) -> None:
    """Print a result, and write it as JSON to the file of --json; with --json - print the JSON alone."""
    if json_to != "-":
        click.echo(text)
    if json_to is None:
        return
    text_json = to_json(result)
    if path is None:
        click.echo(text_json)
        return
    with atomic_write(path) as part:
        part.write_text(text_json + "\n")
