"""``--mmproj`` of convert: the mmproj file beside the text model, or alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import on_command_line, option, options
from quantkit.cli._paths import complete_types
from quantkit.formats.outputs import check_apart
from quantkit.options.convert import ConvertOptions
from quantkit.options.quantize import QuantizeOptions

if TYPE_CHECKING:
    from quantkit.pipeline.plan import Plan

#: Heading of --help.
GROUP = "Vision and audio encoders (mmproj)"
#: Type of an mmproj file beside its text model.
DEFAULT_TYPE = "f16"

mmproj_options = options(
    option(
        "--mmproj",
        group=GROUP,
        is_flag=False,
        flag_value="",
        values=r"[^-].*\.gguf",
        metavar="[FILE]",
        help="Also convert the encoders, to FILE (.gguf) or beside OUT; without OUT and TYPE, only them.",
    ),
    option("--mmproj-only", group=GROUP, is_flag=True, help="Convert only the encoders, to OUT.gguf."),
    option(
        "--mmproj-type",
        group=GROUP,
        metavar="TYPE",
        shell_complete=complete_types,
        help="Type of their matrices: f32, f16, bf16, q8_0, auto, or a TYPE; F16 beside OUT, else that of --outtype.",
    ),
)


@dataclass(frozen=True)
class MmprojArguments:
    """The values of --mmproj, --mmproj-only and --mmproj-type; ``only``: convert no text model."""

    file: Path | None
    type: str | None
    only: bool

    @classmethod
    def parse(
        cls, file: str | None, only: bool, type_name: str | None, positional: tuple[str | None, str | None]
    ) -> MmprojArguments | None:
        """Return the arguments, None for a text model alone; ``positional``: OUT and TYPE."""
        if file is None and not only:
            if type_name is not None:
                raise click.UsageError("--mmproj-type is the type of an mmproj file: add --mmproj")
            return None
        if only and file and positional[0]:
            raise click.UsageError(f"the mmproj file is {positional[0]} and {file}: give one of them")
        return cls(Path(file) if file else None, type_name, only or (file == "" and positional == (None, None)))

    def plan(
        self, folder: Path, output: Path | None, type_name: str | None, convert: ConvertOptions, values: dict[str, Any]
    ) -> Plan:
        """Return the plan of the mmproj file; ``output`` and ``type_name`` are OUT and TYPE."""
        from quantkit.convert import plan_mmproj

        if self.only:
            text_only = {f.name for f in fields(QuantizeOptions)} - {f.name for f in fields(ConvertOptions)}
            text_only.remove("no_provenance")
            names = sorted(name for name in text_only & values.keys() if on_command_line(name))
            if names:
                raise click.UsageError(
                    f"--{names[0].replace('_', '-')} applies to text models only: encoders have no importance matrix "
                    "and no type rules; omit it"
                )
            path, mmproj_type = self.file or output, self.type or type_name
        else:
            default = folder if output is None else output if output.is_dir() else output.parent
            path, mmproj_type = self.file or default, self.type or DEFAULT_TYPE
        return plan_mmproj(folder, path, mmproj_type, convert, no_provenance=values["no_provenance"])


def check_plans_apart(plans: list[Plan]) -> None:
    """Raise ResourceError if two plans have an output in common."""
    check_apart([shard.path for plan in plans for shard in plan.shards])
