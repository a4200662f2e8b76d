"""mmproj files: vision and audio encoders, with the projector to a text model's embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from quantkit.errors import FormatError

#: The architecture of mmproj files.
CLIP = "clip"


class Metadata(Protocol):
    """The metadata of a model: an open file, or a source of one."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""


def is_mmproj(metadata: Metadata | Mapping[str, Any]) -> bool:
    """Return whether metadata are those of an mmproj file."""
    return metadata.get("general.architecture") == CLIP or metadata.get("general.type") == "mmproj"


def check_language_model(metadata: Metadata) -> None:
    """Raise FormatError for an mmproj file, which no command can run."""
    if is_mmproj(metadata):
        raise no_language_model(metadata.paths[0])


def no_language_model(path: Path) -> FormatError:
    """Return the error for an mmproj file where a model is needed."""
    return FormatError(
        f"{path}: an mmproj file has no language model to run: give the file of its text model", "QK-E306"
    )


def encoder_names(metadata: Metadata | Mapping[str, Any]) -> tuple[str, ...]:
    """Return the encoders of an mmproj file: "vision", "audio" or both."""
    return tuple(name for name in ("vision", "audio") if metadata.get(f"{CLIP}.has_{name}_encoder"))


def projectors(metadata: Metadata) -> tuple[str, ...]:
    """Return the projector type of each encoder, once if all have the same."""
    keys = (f"{CLIP}.projector_type", f"{CLIP}.vision.projector_type", f"{CLIP}.audio.projector_type")
    return tuple(dict.fromkeys(str(value) for key in keys if (value := metadata.get(key)) is not None))
