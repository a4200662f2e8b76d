"""The mmproj files of a cook: the vision and audio encoders of its model, beside the targets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quantkit.convert import plan_mmproj
from quantkit.cook.config import Config
from quantkit.cook.source import Model
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.formats.gguf import open_gguf
from quantkit.formats.gguf.mmproj import encoder_names, is_mmproj, projectors
from quantkit.options.convert import ConvertOptions
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.source import Source

#: The type of an mmproj file where the settings name none.
_DEFAULT_TYPE = "F16"
#: Options of a conversion that decide the bytes of mmproj files, too.
MMPROJ_OPTIONS = ("model_name", "metadata", "allow_incomplete", "intermediate")


@dataclass(frozen=True)
class MmprojFile:
    """An mmproj file: one that a step makes, of a ``type``, or an existing one, whose ``type`` is None.

    ``encoders``: "vision", "audio" or both; ``projectors``: their projector types.
    """

    path: Path
    type: str | None
    nbytes: int
    encoders: tuple[str, ...]
    projectors: tuple[str, ...]

    @property
    def description(self) -> str:
        """The encoders and their projectors."""
        plural = "s" * (len(self.encoders) > 1)
        return f"the {' and '.join(self.encoders)} encoder{plural}, projector {', '.join(self.projectors)}"

    def plan(self, checkpoint: Path, options: ConvertOptions) -> Plan:
        """Return the plan of a file to make; errors as ``plan_mmproj``."""
        escaped = self.path.name.replace("{", "{{").replace("}", "}}")
        return plan_mmproj(checkpoint, self.path.with_name(escaped), self.type, options)


def mmproj_files(config: Config, model: Model) -> Iterator[MmprojFile]:
    """Yield the mmproj files of a cook, from headers: by default one of F16, if the checkpoint has encoders.

    Raises:
        RecipeError: a type is named, and the model is a GGUF file.
        QuantkitError: the encoders cannot be converted, or an existing file is not an mmproj file.
    """
    default = (_DEFAULT_TYPE,) if model.has_encoders else ()
    for item in default if config.mmproj is None else config.mmproj:
        if isinstance(item, Path):
            with open_gguf(item) as file:
                if not is_mmproj(file):
                    raise FormatError(
                        f"{item}: not an mmproj file; mmproj names one, or a type to convert to", "QK-E207"
                    )
                yield _mmproj_file(item, None, sum(path.stat().st_size for path in file.paths), file)
        elif not model.is_checkpoint:
            raise RecipeError(
                f"mmproj {item}: {model.path} is a GGUF file, without encoders to convert: give the checkpoint, or "
                "an existing FILE.gguf",
                "QK-E202",
            )
        else:
            try:
                plan = plan_mmproj(model.path, config.work / "mmproj.gguf", item, model.convert)
            except QuantkitError as e:
                raise e.extend("; mmproj = false (--no-mmproj) leaves the encoders out") from None
            name = f"mmproj-{config.name}-{plan.title}.gguf"
            yield _mmproj_file(config.output / name, item, plan.nbytes, plan.source)


def _mmproj_file(path: Path, type_name: str | None, nbytes: int, source: Source) -> MmprojFile:
    return MmprojFile(path, type_name, nbytes, encoder_names(source), projectors(source))
