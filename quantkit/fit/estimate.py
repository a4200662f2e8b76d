"""The verb ``fit``: how much memory a model takes, and the options with which it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from quantkit.arguments import checked
from quantkit.checkpoint import OpenOptions, open_checkpoint
from quantkit.errors import QuantkitError
from quantkit.fit.accuracy import GPU_NOTE, accuracy_note
from quantkit.fit.buffers import WITHOUT_FLASH_ATTENTION
from quantkit.fit.caches import PAD, Context
from quantkit.fit.command import command_line
from quantkit.fit.layout import Device, Estimator, Layout
from quantkit.fit.options import FitOptions
from quantkit.fit.weights import Weights, weights_of
from quantkit.formats.gguf import GGUFFile, open_model
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table
from quantkit.model.graph import build_graph
from quantkit.model.hparams import HParams
from quantkit.pipeline.source import Source
from quantkit.quantize import QuantizeOptions, check_options, plan_from
from quantkit.types import BY_NAME

#: The presets whose sizes are shown of a model that is not quantized, small to large; none needs an imatrix.
PRESETS = (*("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0"),)
#: The shortest context for which weights remain on the GPUs, as in llama.cpp (--fit-ctx).
SHORTEST = 4096


@dataclass(frozen=True)
class CacheKind:
    """A kind of memory of the context: its layers, its cells of all sequences, and its bytes."""

    kind: str
    layers: int
    cells: int
    nbytes: int


@dataclass(frozen=True)
class Size:
    """A type of the model, quantized: bytes of its weights, and where they fit."""

    type: str
    weights: int
    #: Bytes of all devices.
    nbytes: int
    fits: bool
    all_on_gpus: bool
    gpu_layers: int
    cpu_moe: int


@dataclass(frozen=True)
class Fit(HtmlTable):
    """The memory of a model: by device, by kind of cache, and by type."""

    path: Path
    architecture: str
    runtime: str
    ctx: int
    ctx_train: int
    #: The longest context of this layout; 0 if not even the shortest fits.
    longest: int
    devices: tuple[Device, ...]
    caches: tuple[CacheKind, ...]
    #: -ngl, -ncmoe and -ts: layers on GPUs (the output is one), experts of layers in memory, layers by GPU.
    gpu_layers: int
    cpu_moe: int
    tensor_split: tuple[int, ...]
    command: str
    sizes: tuple[Size, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(device.nbytes for device in self.devices)

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    def as_table(self) -> Table:
        """Return a row for each device."""
        header = ("device", "weights", "cache", "compute", "mmproj, draft", "total", "limit")
        rows = tuple((d.name, d.weights, d.cache, d.compute, d.companions, d.nbytes, d.limit) for d in self.devices)
        return Table(header, rows, f"{self.path.name}, {self.ctx} positions")


@checked
def fit(source: str | Path, options: FitOptions | None = None) -> Fit:
    """Return the memory that a model takes in llama.cpp, and the options with which it fits; only headers are read.

    Args:
        source: a GGUF file, any shard of one, or the directory of a checkpoint, which is planned as a BF16 file;
            URLs too.
        options: context, GPUs and runtime: see ``FitOptions``.

    Returns:
        a ``Fit``; its weights and caches are those of llama.cpp b11434, byte for byte, its compute buffers a replay of
        ggml's allocator.

    Raises:
        RecipeError: an option out of range.
        TypeNotSupported: an architecture that quantkit's engine does not have, or a draft model.
        FormatError: a damaged file.
    """
    options = options or FitOptions()
    options.context(options.ctx or 1)
    with ExitStack() as stack:
        path = locate(source)
        opened = _open(path, stack)
        notes: list[str] = []
        companions = _companion_bytes(options, stack, notes)
        model = estimator_of(opened, options, companions)
        planned_type = _model_type(options)
        if planned_type is not None:
            model = model.with_weights(_plan_type(opened, planned_type, options, model))
        context, layout = _choose(model, options)
        notes += _notes(model, options, planned_type)
        types = _ladder(opened) if options.types is None else options.types[1 if planned_type else 0 :]
        sizes = tuple(_sizes(model, opened, types, context, options))
        step = PAD * (1 if context.kv_unified else context.n_parallel)
        return Fit(
            path=path,
            architecture=model.h.arch,
            runtime=options.runtime,
            ctx=context.n_ctx,
            ctx_train=model.h.n_ctx_train,
            longest=model.longest(context, step, layout),
            devices=model.devices(layout, context),
            caches=tuple(_kinds(model, context)),
            gpu_layers=layout.gpu_layers,
            cpu_moe=layout.cpu_moe,
            tensor_split=layout.counts if len(layout.counts) > 1 else (),
            command=command_line(path, layout, context, options),
            sizes=sizes,
            notes=tuple(notes),
        )


def _open(path: Path, stack: ExitStack) -> Source:
    if path.suffix == ".gguf" or (path.is_file() and path.suffix != ".json"):
        return stack.enter_context(open_model(path))
    # The pre-tokenizer does not matter here: an unknown one is accepted.
    return open_checkpoint(
        path, OpenOptions(outtype="bf16", pre="default", allow_other_ids=True, allow_incomplete=True)
    )


def estimator_of(source: Source, options: FitOptions, companions: int = 0) -> Estimator:
    """Return the estimator of an open model. Raises TypeNotSupported for an architecture without a graph."""
    opened = cast(GGUFFile, source)  # the engine reads metadata and shapes alone
    graph, h = build_graph(opened), HParams(opened)
    weights = weights_of(
        ((t.name, t.nbytes) for t in source.tensors.values()), h.n_stored - h.int("nextn_predict_layers", 0)
    )
    return Estimator(graph, h, weights, options.gpus, options.host, companions)


def _companion_bytes(options: FitOptions, stack: ExitStack, notes: list[str]) -> int:
    """Return the bytes of the mmproj file and of the draft."""
    nbytes = 0
    if options.mmproj is not None:
        file = stack.enter_context(open_model(options.mmproj))
        nbytes += sum(tensor.nbytes for tensor in file.tensors.values())
        notes.append("the compute buffer of the mmproj file is not counted: it depends on the size of the images")
    if options.draft is not None:
        draft = stack.enter_context(open_model(options.draft))
        weights = sum(tensor.nbytes for tensor in draft.tensors.values())
        try:
            estimator = estimator_of(draft, replace(options, vram=()), 0)
        except QuantkitError:
            notes.append(
                "the cache and the compute buffer of the draft, which runs only beside its target, are not counted"
            )
            return nbytes + weights
        context = options.context(options.ctx or SHORTEST)
        nbytes += sum(device.nbytes for device in estimator.devices(Layout(estimator.weights.n_layer), context))
    return nbytes


def _choose(model: Estimator, options: FitOptions) -> tuple[Context, Layout]:
    """Return the context and the layout: like llama.cpp, first a shorter context, then fewer weights on the GPUs."""
    if options.ctx:
        context = options.context(options.ctx)
        return context, model.best_layout(context)
    context = options.context(1)
    streams = 1 if context.kv_unified else context.n_parallel
    full = context.with_length(model.h.n_ctx_train * streams)
    if not model.gpus:
        layout = Layout(model.weights.n_layer)
        if model.host is None or model.fits(layout, full):
            return full, layout
        longest = model.longest(context, PAD * streams, layout)
        return context.with_length(longest or PAD * streams), layout
    layout = model.best_layout(full)
    if layout.all_on_gpus:
        return full, layout
    shortest = min(SHORTEST, model.h.n_ctx_train) * streams
    longest = model.longest(context, PAD * streams)
    context = context.with_length(max(longest, shortest))
    return context, model.best_layout(context)


def _kinds(model: Estimator, context: Context) -> Iterator[CacheKind]:
    kinds: dict[tuple[str, int], list[int]] = {}
    for part in model.layers(context):
        kinds.setdefault((part.kind, part.cells), []).append(part.nbytes)
    for (kind, cells), sizes in kinds.items():
        yield CacheKind(kind, len(sizes), cells, sum(sizes))


def _notes(model: Estimator, options: FitOptions, planned_type: str | None) -> Iterator[str]:
    if options.gpus:
        yield GPU_NOTE
    if (note := accuracy_note(model.h.arch)) is not None:
        yield note
    if options.runtime == "ik":
        yield "ik_llama.cpp: caches and buffers are llama.cpp's, but all windows as long as the context; not compared"
    if options.flash_attn and model.h.arch in WITHOUT_FLASH_ATTENTION:
        yield f"{model.h.arch} runs without flash attention"
    if model.weights.unloaded:
        yield f"{model.weights.unloaded} bytes of prediction layers are not counted: llama.cpp loads them only to draft"
    if planned_type is not None:
        yield f"weights are those of a plan as {planned_type}; nothing is written"


# ---------------------------------------------------------------- types


def _model_type(options: FitOptions) -> str | None:
    """Return the type that is planned with a recipe, the first of ``types``."""
    return options.types[0] if options.recipe is not None and options.types else None


def _ladder(source: Source) -> tuple[str, ...]:
    """Return the presets to show: all of a model whose matrices are not quantized."""
    quantized = any(t.type.block > 1 for t in source.tensors.values())
    return () if quantized else PRESETS


def _plan_type(source: Source, type: str, options: FitOptions, model: Estimator) -> Weights:  # noqa: A002
    """Return the weights of the model as a type, from the plan of ``quantize``; nothing is written."""
    quantize = QuantizeOptions(
        allow_requantize=True, allow_incomplete=True, recipe=() if options.recipe is None else (options.recipe,)
    )
    check_options(type, quantize)
    plan = plan_from(source, Path("model.gguf"), type, quantize)
    return weights_of(((t.name, t.nbytes) for t in plan.tensors), model.weights.n_layer)


def _sizes(
    model: Estimator, source: Source, types: Sequence[str], context: Context, options: FitOptions
) -> Iterator[Size]:
    for name in types:
        weights = _plan_type(source, name, options, model)
        variant = model.with_weights(weights)
        layout = variant.best_layout(context)
        devices = variant.devices(layout, context)
        yield Size(
            BY_NAME[name.upper()].name if name.upper() in BY_NAME else name.upper(),
            weights.nbytes,
            sum(device.nbytes for device in devices),
            all(device.fits for device in devices),
            layout.all_on_gpus,
            layout.gpu_layers,
            layout.cpu_moe,
        )
