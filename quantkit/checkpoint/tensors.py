"""Rules that convert the tensors of a checkpoint to those of a GGUF file.

A rule is a function of one tensor: it returns the replacements in order, nothing if it drops or holds back the tensor,
or None if it does not apply. The rules of an architecture (``architectures.ROWS``) are applied one after another, each
to the results of the previous one; ``TensorNames`` names the results. For export a rule also has an inverse
(``Rule.invert``); those of a row are inverted from the last to the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import (
    Expression,
)
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short
from quantkit.types import TensorType

#: The type of the file.
OF_FILE = "of the file"


@dataclass(frozen=True)
class Tensor:
    """A tensor during conversion: its name in the checkpoint, its expression, and its layer (the first number there).

    ``name_in_file``: set by rules that know it, instead of the name map. ``file_type``: its type in every file, or
    OF_FILE: that of the file, regardless of its kind.
    """

    name: str
    x: Expression
    layer: int | None
    name_in_file: str | None = None
    file_type: TensorType | str | None = None


@dataclass
class Context:
    """Configuration and tensor names for rules; ``waiting``: incomplete groups of tensors, by rule and place."""

    config: Config
    names: TensorNames
    waiting: dict[tuple[int, int | str], dict[str, Tensor]] = field(default_factory=dict)

    def gather(self, rule: Rule, place: int | str, part: str, tensor: Tensor, count: int) -> dict[str, Tensor] | None:
        """Hold a tensor back until all ``count`` parts of a place are complete; then return them.

        A place is a layer, or the name of the joined tensor.
        """
        parts = self.waiting.setdefault((id(rule), place), {})
        parts[part] = tensor
        return None if len(parts) < count else self.waiting.pop((id(rule), place))

    def fail(self, tensor: Tensor, problem: str, code: str = "QK-E106") -> FormatError:
        """Return an error that names a tensor and its file."""
        part = next(tensor.x.parts(), None)
        where = self.config.path.parent if part is None else part.path
        return FormatError(f"{where}: tensor {short(tensor.name)}: {problem}", code)

    def name_in_file(self, tensor: Tensor) -> str:
        """Return the GGUF name of a checkpoint's tensor. Raises FormatError if the architecture lacks it."""
        name, layers = self.names.find(tensor.name), self.names.layers
        if name is not None:
            return name
        if tensor.layer is not None and tensor.layer >= layers:
            raise self.fail(tensor, f"but {self.config.path} has {layers} layers: one of them is wrong", "QK-E107")
        raise self.fail(
            tensor, "this architecture has no such tensor, and quantkit does not drop tensors silently", "QK-E107"
        )


@dataclass
class InverseContext(Context):
    """The context of inverses, from a file's tensors to a checkpoint's.

    ``fused``: the class stores as one tensor several tensors of the file or of another class.
    """

    fused: bool = False


#: The default reason why tensors that a rule holds back are never written.
_MISSING = "they are missing"


class Rule(ABC):
    """A rule of a row: see the module."""

    @abstractmethod
    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        """Return the tensors that replace ``tensor``, in order; None if the rule does not apply to it."""

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Return the tensors from which the rule computes ``tensor``, in the form of ``__call__``.

        Raises:
            TypeNotSupported: the rule has no inverse, so its architecture cannot be exported.
        """
        raise TypeNotSupported(
            f"{context.config.architecture} cannot be exported by this version: its rule {type(self).__name__} has "
            f"no inverse",
            "QK-E304",
        )

    def missing(self, waiting: Collection[str], place: int | str, context: Context) -> str:
        """Return the reason why tensors that the rule holds back are incomplete."""
        return _MISSING


class OneWayRule(Rule):
    """A rule without an inverse: its tensors are absent from GGUF files, or are exported unchanged."""

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        return None


#: Names with these suffixes are buffers of old checkpoints, not weights.
_BUFFERS = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
#: Vision and audio parts of multimodal models, which are not part of the text model.
_OTHER_STARTS = (
    "mlp",
    "vit.",
    "vpm.",
    "siglip2.",
    "conformer.",
    "merger.",
    "resampler.",
    "sound_encoder.",
    "sound_projection.",
    "speech_embeddings.",
)
_OTHER_PARTS = (
    "visual.",
    "vision.",
    "audio.",
    "talker.",
    "vision_",
    "audio_",
    "token2wav.",
    "code2wav.",
    "projector.",
    "pre_mm_projector_norm",
    "image_newline",
    "view_seperator",
    "patch_embed",
    "patch_embedding",
    "patch_merger.",
    "patch_merge_mlp.",
    "model.connector.",
)


def text_name(name: str) -> str | None:
    """Return a stored name without the text model's prefix; None if another part of the model owns the tensor."""
    if name.startswith(_OTHER_STARTS) or any(part in name for part in _OTHER_PARTS):
        return None
    if name.endswith("e_score_correction_bias"):
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return name.replace("language_model.", "")


def text_tensors(
    stored: Sequence[Rule], name: str, x: Expression, context: Context
) -> Iterator[tuple[str, Expression]]:
    """Yield the results of ``stored``, the rules of an index, for a tensor, by their names in the text model."""
    for tensor in apply_rules(stored, Tensor(name, x, None), context):
        text = text_name(tensor.name)
        if text is not None:
            yield text, tensor.x


def layer_of(name: str) -> int | None:
    """Return the first number in a name."""
    return next((int(part) for part in name.split(".") if part.isdecimal() and len(part) < 10), None)


def named_tensors(
    stored: Mapping[str, Expression],
    rules: Sequence[Rule],
    context: Context,
    extra: Iterable[Tensor] = (),
    first: Mapping[str, Expression] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the output, in order, with its name there.

    Args:
        stored: the tensors of the checkpoint, under the names of its text model.
        rules: of the architecture.
        context: for the rules.
        extra: tensors that are not stored, which come first.
        first: tensors that precede all others.

    Raises:
        FormatError: a tensor has no name in files, or belongs to an incomplete group.
    """
    names: set[str] = set()
    repackable, unsorted = (
        [Tensor(name, x, layer_of(name)) for name, x in tensors.items()] for tensors in (first or {}, stored)
    )
    repacked = _sort_by_parts(_apply_to_weights(repackable, rules, context), repackable)
    for tensor in chain(repacked, _apply_to_weights((*extra, *unsorted), rules, context)):
        name = tensor.name_in_file or context.name_in_file(tensor)
        if name in names:
            raise context.fail(tensor, f"{name} occurs twice", "QK-E107")
        names.add(name)
        yield name, tensor
    by_id = {id(rule): rule for rule in rules}
    for (rule_id, place), waiting in context.waiting.items():
        rule = by_id.get(rule_id)
        reason = _MISSING if rule is None else rule.missing(waiting, place, context)
        raise context.fail(
            next(iter(waiting.values())),
            f"{len(waiting)} tensors need others of their layer: {reason}",
            "QK-E105",
        )


def _apply_to_weights(tensors: Iterable[Tensor], rules: Sequence[Rule], context: Context) -> Iterator[Tensor]:
    """Yield the results of rules for tensors that are not buffers."""
    for tensor in tensors:
        if not tensor.name.endswith(_BUFFERS):
            yield from apply_rules(rules, tensor, context)


def _sort_by_parts(tensors: Iterable[Tensor], stored: Sequence[Tensor]) -> list[Tensor]:
    """Sort tensors by the position of the last source tensor of each.

    This is the order in which convert_hf_to_gguf.py writes repacked tensors: the experts of a layer, weight by weight,
    when all of a weight are complete, possibly across shards.
    """
    places = {(part.path, part.offset): i for i, tensor in enumerate(stored) for part in tensor.x.parts()}
    return sorted(tensors, key=lambda t: max((places[part.path, part.offset] for part in t.x.parts()), default=0))


def apply_rules(rules: Sequence[Rule], tensor: Tensor, context: Context) -> list[Tensor]:
    """Apply rules to a tensor, one after another, and return the results."""
    tensors = [tensor]
    for rule in rules:
        results = [(t, rule(t, context)) for t in tensors]
        tensors = [new for t, replacement in results for new in ((t,) if replacement is None else replacement)]
    return tensors


def invert_rules(rules: Sequence[Rule], tensor: Tensor, context: InverseContext) -> list[Tensor]:
    """Return the original tensors, by the rules' inverses from last to first."""
    tensors = [tensor]
    for rule in reversed(rules):
        results = [(t, rule.invert(t, context)) for t in tensors]
        tensors = [new for t, originals in results for new in ((t,) if originals is None else originals)]
    return tensors
