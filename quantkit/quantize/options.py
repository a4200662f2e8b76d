"""What `quantize` is asked for, and which options exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.formats.outputs import end_of_links
from quantkit.formats.remote import located
from quantkit.kernels.formats import check_encoder
from quantkit.pipeline.like import LIKE, read_like
from quantkit.pipeline.presets import PRESET_ALIASES, RULES, Preset, check_target, preset_by_name
from quantkit.pipeline.recipe import Rule
from quantkit.types import TensorType, type_by_name
from quantkit.units import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """Everything about a quantization but the two files and TYPE; names as on the command line.

    Types are names from `quantkit types`, in any case. ``rules`` is whose mixture and other rules apply, and whose
    order of tensors and keys, "mainline" or "ik"; None for the tree of TYPE. ``encoder`` is whose search encodes what
    two have: see ``formats.encoder_for``. ``ready_rules`` are a user's rules, before all other sources of them.
    ``like`` is a file whose types tensors get instead of those of TYPE, which is then "LIKE". ``balance`` and
    ``refit_norms`` are part of ``calibrate``.
    """

    rules: str | None = None

    imatrix: Path | None = None
    include_weights: tuple[str, ...] = ()
    exclude_weights: tuple[str, ...] = ()
    ignore_imatrix_rules: bool = False
    hide_imatrix: bool = False
    feedback: Path | None = None
    calibrate: tuple[Path, ...] = ()
    calibrate_ctx: int = 512
    calibrate_chunks: int | None = None
    balance: bool = True
    refit_norms: bool = False
    like: Path | None = None
    ready_rules: tuple[Rule, ...] = ()
    recipe: tuple[Path, ...] = ()
    tensor_type: tuple[str, ...] = ()
    tensor_type_file: tuple[Path, ...] = ()
    custom_q: tuple[str, ...] = ()
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    per_layer_token_embedding_type: str | None = None
    extra_output_tensor: str | None = None
    ffn_gate_inp_type: str | None = None
    attn_q_type: str | None = None
    attn_k_type: str | None = None
    attn_v_type: str | None = None
    attn_qkv_type: str | None = None
    attn_output_type: str | None = None
    ffn_gate_type: str | None = None
    ffn_up_type: str | None = None
    ffn_down_type: str | None = None
    pure: bool = False
    leave_output_tensor: bool = False
    allow_requantize: bool = False
    fallback: str = "next"
    encoder: str | None = None
    symmetric_q40: bool = False
    merge_up_gate: bool = False
    split_up_gate: bool = False
    prune_layers: tuple[int, ...] = ()
    repack: bool = False
    unrepack: bool = False
    repack_pattern: tuple[str, ...] = ()
    override_kv: tuple[str, ...] = ()
    keep_split: bool = False
    split_max_size: str | int | None = None
    no_provenance: bool = False


def check_options(type: str, options: QuantizeOptions) -> None:  # noqa: A002
    """Raise what is wrong with the options, before any file is opened."""
    exclusive = (
        *(("keep_split", "split_max_size"), ("merge_up_gate", "split_up_gate"), ("repack", "unrepack")),
        ("feedback", "calibrate"),
        ("prune_layers", "calibrate"),
    )
    for pair in exclusive:
        if all(getattr(options, name) not in (None, False, ()) for name in pair):
            first, second = (f"--{name.replace('_', '-')}" for name in pair)
            raise RecipeError(f"{first} and {second} exclude each other: give only one of them")
    if type != LIKE and options.like is not None:
        raise RecipeError(f"--like gives every tensor its type: leave {type} away")
    if type == LIKE and options.like is None:
        raise RecipeError("TYPE LIKE needs the file of --like")
    if options.like is not None and options.pure:
        raise RecipeError("--pure is about the mixture of a preset, and --like takes its place: give one of them")
    if not options.balance and not options.calibrate:
        raise RecipeError(
            "--no-balance says how to calibrate, and there is nothing to calibrate on: give --calibrate a text"
        )
    if options.refit_norms and not options.calibrate:
        raise RecipeError("--refit-norms needs to know what norms take: give --calibrate a text")
    check_encoder(options.encoder)
    _check_repack(options)


#: Options that say nothing about types, and may be given with --repack and --unrepack.
_WITH_REPACK = {"repack", "unrepack", "repack_pattern", "merge_up_gate", "split_up_gate", "prune_layers", "override_kv"}
_WITH_REPACK |= {"keep_split", "split_max_size", "no_provenance", "allow_requantize"}


def _check_repack(options: QuantizeOptions) -> None:
    """Refuse options about types beside --repack and --unrepack, and a pattern without them."""
    verb = "--repack" if options.repack else "--unrepack"
    if not (options.repack or options.unrepack):
        if options.repack_pattern:
            raise RecipeError("--repack-pattern chooses tensors for --repack or --unrepack: give one of them")
        return
    default = QuantizeOptions()
    for f in fields(options):
        if f.name not in _WITH_REPACK and getattr(options, f.name) != getattr(default, f.name):
            raise RecipeError(
                f"{verb} changes no value, so --{f.name.replace('_', '-')} has no meaning beside it: "
                "leave it away, or quantize to interleaved types"
            )


def size_of(value: int | str) -> int:
    if isinstance(value, int):
        return value
    try:
        return parse_size(value)
    except ValueError as e:
        raise RecipeError(str(e)) from None


def preset_of(type: str, options: QuantizeOptions) -> Preset:  # noqa: A002
    if options.rules not in (None, *RULES):
        raise RecipeError(f"--rules {options.rules}: there are rules of {' and '.join(RULES)}")
    return preset_by_name(type, options.rules)


def type_of_option(option: str, value: str) -> TensorType:
    """Return the type that an option names. Raises TypeNotSupported, which names the option."""
    try:
        return check_target(type_by_name(value))
    except TypeNotSupported as e:
        raise TypeNotSupported(f"--{option.replace('_', '-')}: {e.message}") from None


def title_of(type_text: str, options: QuantizeOptions) -> str:
    """Return the name of what TYPE stands for; of a file's types, that of its general.file_type."""
    found = preset_by_name(type_text, options.rules) if options.like is None else read_like(options.like).preset
    return found.name


def output_path(source: str | Path, output: str | Path | None, type_text: str, options: QuantizeOptions) -> Path:
    """Return the output's path; without one, ggml-model-TYPE.gguf beside the source, with the name of a number."""
    if output is not None:
        return end_of_links(output)
    if options.like is not None:
        return located(source).with_name(f"ggml-model-{title_of(type_text, options)}.gguf")
    name = type_text.strip().upper()
    if name.isdecimal():
        name = preset_by_name(name, options.rules).name
        name = next((alias for alias, of in PRESET_ALIASES.items() if of == name), name)  # as in llama-quantize
    return located(source).with_name(f"ggml-model-{name}.gguf")
