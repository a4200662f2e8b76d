"""Metadata and shapes of an mmproj file, for the export of its encoders."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.errors import FormatError
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.mmproj import CLIP


class ClipMetadata(ModelMetadata):
    """The keys clip.*, beginning with a dot, and the tensors of an mmproj file; ``text``: those of its text model."""

    def __init__(self, model: GGUFFile, text: ModelMetadata) -> None:
        super().__init__(model, CLIP)
        self.text = text

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost dimension first. Raises FormatError if it is missing."""
        tensor = self.model.tensors.get(name)
        if tensor is None or not tensor.shape:
            raise FormatError(f"{self.path}: has no {name}, so its encoders are not complete", "QK-E105")
        return tensor.shape[::-1]

    def counts(self, keys: Mapping[str, str]) -> Json:
        """Return counts of the vision encoder, by the names that config.json has for these ends of keys."""
        return {name: self.number(f".vision.{key}") for key, name in keys.items()}

    def token_id(self, *texts: str) -> int | None:
        """Return the id of the first of some tokens that the text model has; None without any."""
        tokens = self.text.model.fields.get("tokenizer.ggml.tokens")
        ids = {} if tokens is None else {text: number for number, text in enumerate(tokens.value)}
        return next((ids[text] for text in texts if text in ids), None)


def without_null(values: Json) -> Json:
    """Return the values that are not null."""
    return {name: value for name, value in values.items() if value is not None}
