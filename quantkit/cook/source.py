"""What a cook knows of its model before any work, from headers alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.convert import ConvertOptions, plan_convert
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats.gguf import open_model
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.source import Source
from quantkit.quantize import QuantizeOptions, plan_quantize

#: Tokens of a chunk, if the model's context is no shorter.
_CTX = 512


@dataclass(frozen=True)
class Model:
    """A model to cook: ``path`` as it was given, and what its headers say.

    ``nbytes``: of the file of 16 bits that everything else is made from; ``weights``: all, those a token multiplies
    by, and those of matrices.
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
    merges: bool
    convert: ConvertOptions
    notes: tuple[str, ...] = ()

    @property
    def ctx(self) -> int:
        """Tokens of a chunk unless told otherwise."""
        return min(_CTX, self.n_ctx) if self.n_ctx >= 4 else _CTX

    def plan(self, output: Path, type: str, options: QuantizeOptions) -> Plan:  # noqa: A002
        """Return the plan of a quantization straight from what was given. Raises QuantkitError."""
        if self.is_checkpoint:
            # A conversion that also quantizes takes its first type as --intermediate.
            first = replace(self.convert, outtype="auto", intermediate=self.convert.outtype)
            return plan_convert(self.path, output, type, first, options)
        return plan_quantize(self.path, output, type, options)


def read_source(path: Path, converted: Path, convert: ConvertOptions) -> Model:
    """Return what the headers of a model say; ``converted``: where a checkpoint would be converted to.

    Raises ResourceError if there is none, RecipeError if it is quantized already.
    """
    if path.is_dir():
        try:
            plan = plan_convert(path, converted, None, convert)
        except QuantkitError as e:
            more = '; for quantkit cook that is [convert] pre = "NAME"' if "--pre " in e.message else ""
            raise type(e)(e.message + more) from None
        return _model(path, plan.source, plan.nbytes, convert, plan.notes)
    if not path.exists():
        raise ResourceError(f"{path}: there is no such model: name a directory of Hugging Face, or a GGUF file")
    with open_model(path) as source:
        quantized = next((t for t in source.tensors.values() if t.type.is_quantized), None)
        if quantized is not None:
            raise RecipeError(
                f"{path}: {quantized.name} is {quantized.type} already; cook from the model of 16 or 32 bits"
            )
        nbytes = sum(each.stat().st_size for each in source.paths)
        return _model(path, source, nbytes, convert)


def _model(path: Path, source: Source, nbytes: int, convert: ConvertOptions, notes: tuple[str, ...] = ()) -> Model:
    arch = source.get("general.architecture")
    if not isinstance(arch, str):
        raise FormatError(f"{path}: no model: it has no general.architecture")

    def number(key: str, default: int = 0) -> int:
        value = source.get(f"{arch}.{key}", default)
        return value if isinstance(value, int) and value >= 0 else default

    experts, used = number("expert_count"), number("expert_used_count")
    weights = active = 0
    vocab = 0
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
    merges = any("ffn_up_exps" in name for name in source.tensors)
    ctx, layers = number("context_length"), number("block_count")
    return Model(
        *(path, path.is_dir(), arch, layers, vocab, ctx, experts, nbytes, weights, active, merges, convert),
        notes=notes,
    )
