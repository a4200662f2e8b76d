"""Options, progress and output shared by the commands that run a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import numpy as np
import numpy.typing as npt

from quantkit.activations import ACTIVATIONS
from quantkit.cli._compat_options import ignored_options
from quantkit.cli._json import json_option as declare_json
from quantkit.cli._options import SIZE, GPULayers, claim, echo_notes, option, options, setting, threads_option, to_json
from quantkit.cli._paths import MODEL_FILE, TEXT_FILE
from quantkit.evaluate.passes import EvaluationOptions, LoadOptions, Nodes
from quantkit.formats.outputs import atomic_write, check_apart, read_text
from quantkit.formats.remote import locate
from quantkit.formats.tokenizer import read_token_ids
from quantkit.model.kv_types import KV_TYPES, is_rounded, join_kv_types

if TYPE_CHECKING:
    from quantkit.model.placement import Placement

F = TypeVar("F", bound=Callable[..., Any])
I32 = npt.NDArray[np.int32]

MODEL = "Model"
TEXT = "Text"
RUN = "Run"
OUT = "Output"


#: A model of the Hub instead of a file; ``hub_model`` takes the values.
hub_options = options(
    option(
        "-hf",
        "-hfr",
        "--hf-repo",
        "hf_repo",
        group=MODEL,
        metavar="ORG/REPO[:TYPE]",
        help="Download the model from the Hugging Face Hub, once; TYPE is Q4_K_M if omitted.",
    ),
    option("-hff", "--hf-file", "hf_file", group=MODEL, metavar="FILE", help="File of -hf, instead of TYPE."),
)


def hub_model(model: Path | None, hf_repo: str | None, hf_file: str | None) -> Path | None:
    """Return the model of -m, or download that of -hf; None if neither is given."""
    if hf_repo is None:
        if hf_file is not None:
            raise click.UsageError("-hff selects a file of the repository -hf ORG/REPO: give both")
        return model
    if model is not None:
        raise click.UsageError(f"the model is {model} and {hf_repo}: give one of -m and -hf")
    from quantkit.formats.hub import download_model

    return download_model(hf_repo, hf_file, lambda line: click.echo(line, err=True))


def model_option(function: F) -> F:
    """Declare -m and -hf, one of which a command needs."""

    @wraps(function)
    def run(*args: Any, model: Path | None, hf_repo: str | None, hf_file: str | None, **values: Any) -> Any:
        model = hub_model(model, hf_repo, hf_file)
        if model is None:
            raise click.UsageError("Missing option '-m' / '--model'.")
        return function(*args, model=model, **values)

    declare = option("-m", "--model", group=MODEL, type=MODEL_FILE, help="GGUF file; any shard of a split model.")
    return cast(F, options(declare, hub_options)(run))


#: Values of -sm; the last two are ik_llama.cpp's.
SPLIT_MODES = ("none", "layer", "row", "tensor", "graph", "attn")


class DeviceNames(click.ParamType[tuple[str, ...]]):
    """Names of CUDA devices; () for none."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        if value.strip().lower() in ("none", "cpu"):
            return ()
        numbers = [item.strip().upper().removeprefix("CUDA") for item in value.split(",")]
        if not all(item.isdecimal() for item in numbers):
            self.fail(f"{value!r}: give GPUs, such as CUDA0,CUDA1, or none", param, ctx)
        return tuple(dict.fromkeys(f"CUDA{int(number)}" for number in numbers))


class Shares(click.ParamType[tuple[float, ...]]):
    """Numbers separated by commas or slashes."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in value.replace("/", ",").split(","))
        except ValueError:
            self.fail(f"{value!r}: give a share for each GPU, such as 3,1", param, ctx)


DEVICES, SHARES = DeviceNames(), Shares()

#: Placement of a model; ``placement_from`` takes the values.
placement_options = options(
    setting(
        "--backend",
        group=RUN,
        type=click.Choice(["cpu", "cuda", "auto"], case_sensitive=False),
        default="cpu",
        help="Device that computes: cuda is all layers on GPUs, without -ngl and -ot; auto is cuda if available.",
    ),
    option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        "gpu_layers",
        group=RUN,
        type=GPULayers(),
        help="Offload the last N layers to GPUs, or all.",
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
    option(
        "-dev",
        "--device",
        "devices",
        group=RUN,
        type=DEVICES,
        metavar="NAME,..",
        help="Use only these GPUs (CUDA0,CUDA1, or 0,1), for all layers without -ngl; none: the CPU.",
    ),
    option(
        "-ts",
        "--tensor-split",
        "shares",
        group=RUN,
        type=SHARES,
        metavar="N,N,..",
        help="Share of the offloaded layers for each GPU, such as 3,1.",
    ),
    option(
        "-sm",
        "--split-mode",
        "split_mode",
        group=RUN,
        type=click.Choice(SPLIT_MODES),
        help="Use of several GPUs: none uses one (-mg), all other modes split by layer.",
    ),
    option("-mg", "--main-gpu", "main_gpu", group=RUN, type=click.IntRange(0), help="The GPU of -sm none."),
    option("-cmoe", "--cpu-moe", group=RUN, is_flag=True, help="Keep all experts on the CPU."),
    option(
        "-ncmoe",
        "--n-cpu-moe",
        group=RUN,
        type=click.IntRange(0),
        help="Keep the experts of the first N layers on the CPU.",
    ),
    option(
        "--max-vram",
        group=RUN,
        type=SIZE,
        metavar="SIZE",
        help="Maximum memory for weights per GPU; the rest is uploaded for each batch.",
    ),
    option(
        "--cublas",
        group=RUN,
        is_flag=True,
        help="Use cuBLAS in bf16 for prompts on GPUs: less exact, for comparison.",
    ),
)


def placement_from(run: Mapping[str, Any]) -> Placement:
    """Return the placement, from the values of ``placement_options``."""
    from quantkit.model.placement import cuda_devices, placement_of

    backend, layers, requested = run["backend"].lower(), run["gpu_layers"], run["devices"]
    if requested == ():  # -dev none
        backend, layers, requested = "cpu", 0, None
    elif layers is None and backend == "cpu" and (requested or run["shares"]):
        backend = "auto"
    devices = cuda_devices() if backend != "cpu" or layers else ()
    if not devices and backend != "cuda":
        _note_no_gpu(run, layers, requested)
        return placement_of("cpu", 0, _rules(run), ())
    backend = "cuda" if backend == "auto" else backend
    selected = _select_devices(devices, run, requested)
    return placement_of(backend, layers, _rules(run), selected, run["shares"] or ())


def _note_no_gpu(run: Mapping[str, Any], layers: int | None, requested: Sequence[str] | None) -> None:
    """Print a note if options request GPUs that are missing."""
    if layers or requested or run["shares"]:
        from quantkit.kernels.cuda.core.device import why_none

        name = "-ngl" if layers else "-dev" if requested else "-ts"
        echo_notes([f"{name}: all layers run on the CPU; {why_none()}"])


def _select_devices(devices: Sequence[str], run: Mapping[str, Any], requested: Sequence[str] | None) -> Sequence[str]:
    """Return the devices that -dev, -sm and -mg select; -mg counts those of -dev."""
    selected = requested or devices
    if run["split_mode"] == "none":
        index = run["main_gpu"] or 0
        if index >= len(selected):
            raise click.BadParameter(
                f"{index}: not the number of one of the selected GPUs ({', '.join(selected) or 'none'})",
                param_hint="-mg",
            )
        return selected[index : index + 1]
    if run["split_mode"] not in (None, "layer") and len(selected) > 1:
        echo_notes([f"-sm {run['split_mode']}: the model is split by layer"])
    return selected


def _rules(run: Mapping[str, Any]) -> list[str]:
    return [*run["rules"], *_experts_on_cpu(run["cpu_moe"], run["n_cpu_moe"])]


def _experts_on_cpu(all_layers: bool, first: int | None) -> list[str]:
    """Return the -ot rules equivalent to -cmoe and -ncmoe."""
    layers = r"\d+" if all_layers else "|".join(map(str, range(first or 0)))
    return [rf"blk\.({layers})\.ffn_\w+_(ch)?exps=CPU"] if layers else []


_KV_TYPE: dict[str, Any] = {"group": RUN, "type": click.Choice(KV_TYPES, case_sensitive=False)}


def kv_options_of(default: str) -> Callable[[F], F]:
    """Declare the types of the caches; ``kv_type_from`` takes the values."""
    return options(
        setting("--kv-type", "kv_type", default=default, help="Type of both K and V cache.", **_KV_TYPE),
        option("-ctk", "--cache-type-k", "k_type", help="Type of the K cache.", **_KV_TYPE),
        option("-ctv", "--cache-type-v", "v_type", help="Type of the V cache.", **_KV_TYPE),
    )


kv_options = kv_options_of("f16")


def kv_type_from(run: dict[str, Any]) -> str:
    """Remove the values of ``kv_options`` and return the type of caches."""
    both, k, v = (run.pop(name) for name in ("kv_type", "k_type", "v_type"))
    kv_type = join_kv_types((k or both).lower(), (v or both).lower())
    if is_rounded(kv_type):
        echo_notes([f"caches of {kv_type} are stored as f32, rounded to the type: the memory is not that of the type"])
    return kv_type


def activations_option(default: str) -> Callable[[F], F]:
    """Declare --activations; ``default``: the sentence on its default."""
    return option(
        "--activations",
        group=RUN,
        type=click.Choice(ACTIVATIONS),
        help="Activations: exact (f32, times decoded weights: figures of the weights alone) or runtime (rounded as by "
        f"llama.cpp).  [default: {default}]",
    )


_COUNT = click.IntRange(1)
_ON: dict[str, Any] = {"group": RUN, "default": True}
_BATCH = setting("-b", "--batch-size", "n_batch", group=RUN, type=_COUNT, default=2048, help="Logical batch size.")
#: Options of loading a model; ``load_options`` takes the values of these, a physical batch and types of caches.
engine_options = options(
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
        help="Memory-map weights (default), or copy them to memory.",
    ),
    placement_options,
    option(
        "--override-kv",
        "override_kv",
        group=MODEL,
        multiple=True,
        metavar="KEY=T:V",
        help="Use this metadata instead of the file's; T is int, float, bool or str. Repeatable.",
    ),
    ignored_options,
    option(
        "--max-ram",
        group=RUN,
        type=SIZE,
        metavar="SIZE",
        help="Maximum memory for weights; the rest is streamed from the file.",
    ),
)

ubatch_option = setting(
    "-ub", "--ubatch-size", "n_ubatch", group=RUN, type=_COUNT, default=512, help="Physical batch size."
)
#: Options of a run; ``load_options`` takes the values.
run_options = options(_BATCH, ubatch_option, threads_option, kv_options, engine_options)


def load_options(run: Mapping[str, Any]) -> LoadOptions:
    """Return the options of quantkit.load, from the values of ``run_options``."""
    from quantkit.model.fusion import Fusion

    result: LoadOptions = {
        "threads": run["threads"] or None,
        "n_ubatch": run["n_ubatch"],
        "kv_type": kv_type_from(dict(run)),
        "mmap": run["mmap"],
        "max_ram": run["max_ram"],
        "max_vram": run["max_vram"],
        "cublas": run["cublas"],
        "fusion": Fusion(*(run[f"fused_{name}"] for name in ("up_gate", "moe", "qkv", "launches"))),
        "merge_up_gate": run["merge_up_gate_experts"],
        "override_kv": run["override_kv"],
    }
    if run.get("activations") is not None:
        result["activations"] = run["activations"]
    return {**result, "placement": placement_from(run)}


def evaluation_options(run: Mapping[str, Any]) -> EvaluationOptions:
    """Return the options of perplexity, kld and imatrix, from the values of ``run_options`` and --ray."""
    if run["ray"] is None:
        return cast(EvaluationOptions, load_options(run))
    if any(run[name] is not None for name in ("devices", "shares", "split_mode", "main_gpu")):
        raise click.UsageError("-dev, -ts, -sm and -mg apply to the GPUs of this machine: omit them with --ray")
    nodes = Nodes(run["ray"], run["backend"].lower(), run["gpu_layers"], tuple(_rules(run)))
    result = cast(EvaluationOptions, load_options({**run, "backend": "cpu", "gpu_layers": None, "rules": ()}))
    return {**result, "nodes": nodes}


#: The text, as ``given_text`` takes it.
text_options = options(
    option("-f", "--file", group=TEXT, type=TEXT_FILE, help="Text file; - for stdin. A final newline is dropped."),
    option("-p", "--prompt", group=TEXT, metavar="TEXT", help="Text."),
    option("--tokens", group=TEXT, metavar="IDS", help="Token ids, such as 1,2,3, or @FILE of raw int32."),
)

json_option = options(
    declare_json(raw=True),
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


def ids_file(tokens: str | None) -> str | None:
    """Return the file that --tokens names, if it names one."""
    return tokens[1:] or None if tokens is not None and tokens.startswith("@") else None


def claim_json(
    json_to: str | None, outputs: Iterable[Path | None], inputs: Iterable[str | Path | None], *, overwrite: bool
) -> Path | None:
    """Return the file of --json, held until the command ends; None without it.

    Raises ResourceError, before any work, if it or another of the command's ``outputs`` is an input or another output.
    """
    path = None if json_to in (None, "-") else locate(str(json_to))
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
