"""Checks of the options of `quantize`, and resolution of the names in them and in TYPE."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.formats.gguf.header import check_room
from quantkit.formats.outputs import resolve_links
from quantkit.formats.remote import locate
from quantkit.kernels.formats import check_encoder
from quantkit.options.quantize import QuantizeOptions
from quantkit.pipeline.custom_encoder import custom_encoders
from quantkit.pipeline.presets import PRESET_ALIASES, RULES, Preset, check_target, preset_by_name
from quantkit.pipeline.reference_types import LIKE, read_reference_types
from quantkit.types import TensorType, type_by_name
from quantkit.units import parse_size


def check_options(type: str, options: QuantizeOptions) -> None:  # noqa: A002
    """Raise RecipeError for contradictory options, before any file is opened."""
    exclusive = (
        ("keep_split", "split_max_size"),
        ("merge_up_gate", "split_up_gate"),
        ("repack", "unrepack"),
        ("feedback", "calibrate"),
        ("prune_layers", "calibrate"),
        ("merge_lora", "calibrate"),
        ("bigendian", "calibrate"),
        ("keep_grid", "like"),
    )
    for pair in exclusive:
        if all(getattr(options, name) not in (None, False, ()) for name in pair):
            first, second = (f"--{name.replace('_', '-')}" for name in pair)
            raise RecipeError(f"{first} and {second} are mutually exclusive: omit one of them", "QK-E201")
    if type != LIKE and options.like is not None:
        raise RecipeError(f"--like sets the type of every tensor: omit {type}", "QK-E201")
    if type == LIKE and options.like is None:
        raise RecipeError("TYPE LIKE needs --like FILE", "QK-E202")
    if options.like is not None and options.pure:
        raise RecipeError(
            "--pure disables the type rules of a preset, which --like replaces: omit one of them", "QK-E201"
        )
    if not options.balance and not options.calibrate:
        raise RecipeError(
            "--no-balance has no effect without calibration: give --calibrate a text, or omit it",
            "QK-E202",
        )
    check_encoder(options.encoder)
    _check_encoders(options)
    _check_repack(options)


def _check_encoders(options: QuantizeOptions) -> None:
    """Refuse encoders from Python that are not functions, or whose tensors another option encodes."""
    encoders = custom_encoders(options.encoders)
    for name in ("feedback", "calibrate"):
        if encoders and getattr(options, name):
            raise RecipeError(f"--{name} and encoders both choose levels: omit one of them", "QK-E201")
    if options.symmetric_q40 and "Q4_0" in encoders:
        raise RecipeError("--symmetric-q40 and encoders both encode Q4_0: omit one of them", "QK-E201")


#: Options that do not concern types and may be given with --repack and --unrepack.
_WITH_REPACK = {"repack", "unrepack", "repack_pattern", "merge_up_gate", "split_up_gate", "prune_layers", "override_kv"}
_WITH_REPACK |= {
    "bigendian",
    "keep_split",
    "split_max_size",
    "reserve",
    "no_provenance",
    "allow_requantize",
    "allow_incomplete",
}


def _check_repack(options: QuantizeOptions) -> None:
    """Refuse type options with --repack and --unrepack, and a pattern without them."""
    verb = "--repack" if options.repack else "--unrepack"
    if not (options.repack or options.unrepack):
        if options.repack_pattern:
            raise RecipeError(
                "--repack-pattern selects tensors for --repack or --unrepack: give one of them", "QK-E202"
            )
        return
    default = QuantizeOptions()
    for f in fields(options):
        if f.name not in _WITH_REPACK and getattr(options, f.name) != getattr(default, f.name):
            raise RecipeError(
                f"{verb} changes no value, so --{f.name.replace('_', '-')} does not apply: omit it, or quantize to "
                "interleaved types",
                "QK-E201",
            )


def size_of(value: int | str) -> int:
    if isinstance(value, int):
        return value
    try:
        return parse_size(value)
    except ValueError as e:
        raise RecipeError(str(e), "QK-E203") from None


def room_of(value: int | str | None) -> int:
    """Return the bytes of ``--reserve``, 0 without. Raises RecipeError."""
    room = 0 if value is None else size_of(value)
    check_room(room)
    return room


def preset_of(type: str, options: QuantizeOptions) -> Preset:  # noqa: A002
    if options.rules not in (None, *RULES):
        raise RecipeError(f"--rules {options.rules}: choose {' or '.join(RULES)}", "QK-E203")
    return preset_by_name(type, options.rules)


def type_of_option(option: str, value: str) -> TensorType:
    """Return the type that an option names. Raises TypeNotSupported, which names the option."""
    try:
        return check_target(type_by_name(value))
    except TypeNotSupported as e:
        raise TypeNotSupported(f"--{option.replace('_', '-')}: {e.message}", e.code) from None


def title_of(type_text: str, options: QuantizeOptions) -> str:
    """Return the preset name of TYPE; with --like, that of the file's general.file_type."""
    preset = (
        preset_by_name(type_text, options.rules) if options.like is None else read_reference_types(options.like).preset
    )
    return preset.name


def output_path(source: str | Path, output: str | Path | None, type_text: str, options: QuantizeOptions) -> Path:
    """Return the output's path; by default ggml-model-TYPE.gguf beside the source, with the preset's name."""
    if output is not None:
        return resolve_links(output)
    if options.like is not None:
        return locate(source).with_name(f"ggml-model-{title_of(type_text, options)}.gguf")
    name = type_text.strip().upper()
    if name.isdecimal():
        name = preset_by_name(name, options.rules).name
        name = next(
            (alias for alias, canonical in PRESET_ALIASES.items() if canonical == name), name
        )  # as in llama-quantize
    return locate(source).with_name(f"ggml-model-{name}.gguf")
