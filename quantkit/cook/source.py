"""The model of a cook, read from headers before any work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.convert import ENCODERS_NOTE, plan_convert
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.extras import MissingPackages
from quantkit.formats.gguf import open_model
from quantkit.formats.gguf.mmproj import check_language_model
from quantkit.options.convert import ConvertOptions
from quantkit.pipeline.grid import grid_note, matrices_of
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.source import Source
from quantkit.quantize import QuantizeOptions, plan_quantize

#: Tokens per chunk, unless the model's context is shorter.
_CTX = 512


@dataclass(frozen=True)
class Model:
    """A model to cook: ``path`` as given, and facts from its headers.

    ``nbytes``: size of the unquantized GGUF file; ``weights``: number of all weights; ``active``: number of weights
    used per token; ``has_encoders``: whether the checkpoint has vision or audio encoders.
    """

    path: Path
    is_checkpoint: bool
    architecture: str
    n_layers: int
    n_vocab: int
    n_ctx: int
    n_experts: int
    nbytes: int
    weights: int
    active: int
    can_merge_experts: bool
    convert: ConvertOptions
    has_encoders: bool = False
    notes: tuple[str, ...] = ()

    @property
    def ctx(self) -> int:
        """Default number of tokens of a chunk."""
        return min(_CTX, self.n_ctx) if self.n_ctx >= 4 else _CTX

    def plan(self, output: Path, type: str, options: QuantizeOptions) -> Plan:  # noqa: A002
        """Return the plan of a quantization straight from ``path``, GGUF file or checkpoint. Raises QuantkitError."""
        if self.is_checkpoint:
            # A conversion that also quantizes takes its first type as --intermediate.
            first = replace(self.convert, outtype="auto", intermediate=self.convert.outtype)
            return plan_convert(self.path, output, type, first, options)
        return plan_quantize(self.path, output, type, options)

    def read_grid(self) -> str:
        """Return the types on whose grid the weights lie, in a sample, in words; "": none."""
        if self.is_checkpoint:
            source = plan_convert(self.path, None, None, self.convert).source
            return grid_note(source, matrices_of(source))
        with open_model(self.path) as source:
            return grid_note(source, matrices_of(source))


def read_source(path: Path, gguf_path: Path, convert: ConvertOptions) -> Model:
    """Return a model, from its headers; ``gguf_path``: the file that a checkpoint will be converted to.

    Raises ResourceError if there is no model, RecipeError if it is already quantized.
    """
    if path.is_dir():
        try:
            plan = plan_convert(path, gguf_path, None, convert)
        except MissingPackages:
            raise
        except QuantkitError as e:
            if e.code != "QK-E115":
                raise
            raise e.extend('; in cook.toml: [convert] pre = "NAME"') from None
        notes = tuple(note for note in plan.notes if note != ENCODERS_NOTE)
        model = _model(path, plan.source, plan.nbytes, convert, notes)
        return replace(model, has_encoders=ENCODERS_NOTE in plan.notes)
    if not path.exists():
        raise ResourceError(
            f"{path}: no such file or directory: give a Hugging Face directory or a GGUF file", "QK-E401"
        )
    with open_model(path) as source:
        check_language_model(source)
        quantized = next((t for t in source.tensors.values() if t.type.is_quantized), None)
        if quantized is not None:
            raise RecipeError(
                f"{path}: {quantized.name} is already {quantized.type}; use the 16- or 32-bit model, or the output of "
                "`quantkit export` for this one",
                "QK-E209",
            )
        nbytes = sum(shard.stat().st_size for shard in source.paths)
        return _model(path, source, nbytes, convert)


def _model(path: Path, source: Source, nbytes: int, convert: ConvertOptions, notes: tuple[str, ...] = ()) -> Model:
    arch = source.get("general.architecture")
    if not isinstance(arch, str):
        raise FormatError(f"{path}: not a model: it has no general.architecture", "QK-E123")

    def read_count(key: str, default: int = 0) -> int:
        value = source.get(f"{arch}.{key}", default)
        return value if isinstance(value, int) and value >= 0 else default

    experts, used = read_count("expert_count"), read_count("expert_used_count")
    weights = active = vocab = 0
    for tensor in source.tensors.values():
        n = 1
        for extent in tensor.shape:
            n *= extent
        weights += n
        if tensor.name == "token_embd.weight":
            vocab = tensor.shape[1]
            active += 0 if "output.weight" in source.tensors else n
        elif len(tensor.shape) > 2 and "_exps" in tensor.name and experts:
            active += n * used // experts
        elif len(tensor.shape) > 1:
            active += n
    return Model(
        path=path,
        is_checkpoint=path.is_dir(),
        architecture=arch,
        n_layers=read_count("block_count"),
        n_vocab=vocab,
        n_ctx=read_count("context_length"),
        n_experts=experts,
        nbytes=nbytes,
        weights=weights,
        active=active,
        can_merge_experts=any("ffn_up_exps" in name for name in source.tensors),
        convert=convert,
        notes=notes,
    )
