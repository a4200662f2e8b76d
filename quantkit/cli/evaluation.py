"""What perplexity, kld and logits share: the model and how it runs, a text or token ids, progress, results."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import click
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from quantkit.cli.options import SIZE, option
from quantkit.errors import QuantkitError
from quantkit.evaluate import Estimate
from quantkit.evaluate.passes import LoadOptions
from quantkit.formats.tokenizer import read_token_ids

if TYPE_CHECKING:
    from quantkit.model.placement import Placement

F = TypeVar("F", bound=Callable[..., Any])
I32 = npt.NDArray[np.int32]

MODEL, TEXT, RUN, OUT = "The model", "What is evaluated", "The run", "Output"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
KV_TYPES = ("f32", "f16", "q8_0")


def model_option(function: F) -> F:
    """Declare -m."""
    return option(
        "-m", "--model", group=MODEL, type=FILE, required=True, help="The GGUF file; any shard of a split one."
    )(function)


#: On which devices a model runs.
_PLACEMENT = (
    option(
        "--backend",
        group=RUN,
        type=click.Choice(["cpu", "cuda"], case_sensitive=False),
        default="cpu",
        show_default=True,
        help="What computes; cuda takes the whole model, unless -ngl and -ot say otherwise.",
    ),
    option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        "gpu_layers",
        group=RUN,
        type=click.IntRange(0),
        help="Only the last layers on CUDA devices.",
    ),
    option(
        "-ot",
        "--override-tensor",
        "rules",
        group=RUN,
        multiple=True,
        metavar="RE=DEVICE",
        help="Place matching tensors on a device.",
    ),
    option("--max-vram", group=RUN, type=SIZE, metavar="SIZE", help="Weights on each GPU; the rest is sent each time."),
    option("--cublas", group=RUN, is_flag=True, help="On GPUs, prompts by bf16 and cuBLAS: less exact; to compare."),
)


def placement_options(function: F) -> F:
    """Declare on which devices a model runs; ``placement_given`` takes the values."""
    for each in reversed(_PLACEMENT):
        function = each(function)
    return function


def placement_given(run: Mapping[str, Any]) -> Placement:
    """Return the placement, from the values of ``placement_options``."""
    from quantkit.model.devices import cuda_devices
    from quantkit.model.placement import placement_of

    backend, layers = run["backend"].lower(), run["gpu_layers"]
    return placement_of(backend, layers, run["rules"], cuda_devices() if backend == "cuda" or layers else ())


def run_options(function: F) -> F:
    """Declare how the model runs; ``load_options`` takes the values."""
    counts = click.IntRange(1)
    flag: dict[str, Any] = {"group": RUN, "is_flag": True}
    usual: dict[str, Any] = {"group": RUN, "show_default": True}
    kv_types = click.Choice(KV_TYPES, case_sensitive=False)
    declared = (
        option("-b", "--batch-size", "n_batch", **usual, type=counts, default=2048, help="Tokens of a pass."),
        option("-ub", "--ubatch-size", "n_ubatch", **usual, type=counts, default=512, help="Tokens at once within it."),
        option("-t", "--threads", group=RUN, type=click.IntRange(0), help="Threads; 0 or nothing: all CPUs."),
        option(
            "-ctk",
            "--cache-type-k",
            "--kv-type",
            "kv_type",
            **usual,
            type=kv_types,
            default="f16",
            help="Type of the K and V caches.",
        ),
        option("-no-fug", "--no-fused-up-gate", **flag, help="Do not fuse up+gate of dense layers."),
        option("-no-fmoe", "--no-fused-moe", **flag, help="Do not fuse up+gate of experts."),
        option("-muge", "--merge-up-gate-experts", **flag, help="Merge up and gate experts while loading."),
        placement_options,
        option("--max-ram", group=RUN, type=SIZE, metavar="SIZE", help="Weights in memory; the rest is streamed."),
    )
    for each in reversed(declared):
        function = each(function)
    return function


def load_options(run: Mapping[str, Any]) -> LoadOptions:
    """Return what quantkit.load takes, from the values of ``run_options``."""
    from quantkit.model.fusion import Fusion

    return {
        "threads": run["threads"] or None,
        "n_ubatch": run["n_ubatch"],
        "kv_type": run["kv_type"].lower(),
        "max_ram": run["max_ram"],
        "max_vram": run["max_vram"],
        "cublas": run["cublas"],
        "fusion": Fusion(up_gate=not run["no_fused_up_gate"], moe=not run["no_fused_moe"]),
        "merge_up_gate": run["merge_up_gate_experts"],
        "placement": placement_given(run),
    }


def text_options(function: F) -> F:
    """Declare -f, -p and --tokens."""
    declared = (
        option("-f", "--file", group=TEXT, type=FILE, help="A text; a newline at its very end is dropped."),
        option("-p", "--prompt", group=TEXT, metavar="TEXT", help="The text itself."),
        option("--tokens", group=TEXT, metavar="IDS", help="Token ids: 1,2,3, or @FILE.i32, raw int32."),
    )
    for each in reversed(declared):
        function = each(function)
    return function


def json_option(function: F) -> F:
    """Declare --json."""
    return option(
        "--json",
        "json_to",
        group=OUT,
        metavar="FILE|-",
        help="Write the result as JSON; - prints it, and nothing else.",
    )(function)


def given_text(file: Path | None, prompt: str | None, tokens: str | None) -> tuple[str | bytes | None, I32 | None]:
    """Return the text, or None, and the token ids, or None. Raises click.UsageError unless one of three is given.

    A file is read as llama.cpp reads it: its bytes as they are, without one newline at the end.
    """
    if sum(x is not None for x in (file, prompt, tokens)) != 1:
        raise click.UsageError("give one of -f FILE, -p TEXT and --tokens IDS")
    if tokens is not None:
        return None, read_token_ids(tokens)
    return (prompt if file is None else file.read_bytes().removesuffix(b"\n")), None


class Bar:
    """Chunks done, the value so far and the time left, on stderr if that is a terminal."""

    def __init__(self) -> None:
        # Passes bring several chunks, so the speed is the mean from the start; what is done is known after the first.
        shown = sys.stderr.isatty()
        self.bar: tqdm[Any] | None = (
            tqdm(unit="chunk", desc="first pass", leave=False, dynamic_ncols=True, smoothing=0) if shown else None
        )

    def update(self, done: int, todo: int, value: str) -> None:
        """Show a value after ``done`` of ``todo`` chunks."""
        if self.bar is not None:
            self.bar.total = todo
            self.bar.set_description_str(value, refresh=False)
            self.bar.update(done - self.bar.n)

    def print(self, line: str) -> None:
        """Print a line on stdout; the bar makes room."""
        with tqdm.external_write_mode(file=sys.stdout):
            click.echo(line)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()


def estimate(e: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON has it."""
    return {"value": finite(e.value), "error": finite(e.error)}


def finite(x: float) -> float | str:
    """Return a float as JSON can hold it."""
    return x if math.isfinite(x) else str(x)


def check_json_target(json_to: str | None) -> None:
    """Raise QuantkitError when the folder of --json is not there: before the work, not after it."""
    if json_to not in (None, "-") and not Path(str(json_to)).parent.is_dir():
        raise QuantkitError(f"{json_to}: its folder does not exist")


def write_json(json_to: str, result: Mapping[str, Any]) -> None:
    """Print a result as JSON, or write it to a file, which appears when it is complete."""
    text = json.dumps(result, indent=2, allow_nan=False)
    if json_to == "-":
        click.echo(text)
        return
    path = Path(json_to)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n")
    os.replace(part, path)
