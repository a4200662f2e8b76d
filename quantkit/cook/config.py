"""``Config``: the settings of a cook, from a TOML file or a command line.

All keys except ``model`` and the targets have defaults; ``quantkit cook init`` writes a file with all of them, from the
help and the examples that are declared with each key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit.activations import ACTIVATIONS, EXACT
from quantkit.checkpoint.policy import OUTTYPE_NAMES
from quantkit.cook.tables import (
    TableLocation,
    choice,
    count_or_all,
    flag,
    full_runs,
    integer,
    key,
    keys_of,
    name_of_files,
    path,
    paths,
    positive,
    read_table,
    read_values,
    share,
    size,
    size_or_0,
    sizes,
    word,
    words,
)
from quantkit.cook.targets import Target, parse_target
from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.foreign.child import GRAMMAR, Child
from quantkit.formats.outputs import read_whole
from quantkit.formats.remote import locate
from quantkit.model.kv_types import KV_TYPES
from quantkit.options.convert import ConvertOptions
from quantkit.options.quantize import QuantizeOptions, independent_of_search
from quantkit.options.search import AIMS, SearchOptions
from quantkit.options.sensitivity import GROUPS
from quantkit.pipeline.presets import preset_by_name

#: Largest file of settings in bytes, and the most targets.
_MAX_BYTES, _MAX_TARGETS = 1 << 20, 200
#: The end of a model's name that names its type.
_TYPE_SUFFIX = re.compile(r"[-._](?:bf16|f16|f32|fp16|fp32|auto)$", re.IGNORECASE)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Texts for calibration and measurement, like those the model is used for.

    Without `evaluation`, a corpus is built from files and folders, and a part of it is held out. With it, texts are
    files that are used unchanged.
    """

    text: tuple[Path, ...] = key(paths, "files, or files and folders to build a corpus from", (), '["path/to/texts"]')
    evaluation: Path | None = key(path, "text to measure on; default: a held-out part of `text`", None, '"heldout.txt"')
    chat: tuple[Path, ...] = key(
        paths, "chats in JSON lines, rendered with the model's template (needs jinja2)", (), '["chats.jsonl"]'
    )
    include: tuple[str, ...] = key(words, "only these files in folders", (), '["*.py", "*.md"]')
    size: int = key(size, "maximum size of the corpus", 1_000_000, '"1M"')
    heldout: float = key(share, "held-out share of the corpus", 0.1, '"10%"')
    seed: int = key(integer(0), "seed of the corpus", 0)

    @property
    def is_corpus(self) -> bool:
        """Whether a corpus is built from the texts, with a held-out part."""
        return self.evaluation is None and bool(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImatrixSettings:
    """The importance matrix, and covariances for error feedback."""

    run: bool = key(flag, "false: quantize without an importance matrix", True)
    file: Path | None = key(path, "an existing importance matrix", None, '"imatrix.gguf"')
    ctx: int | None = key(integer(4), "tokens per chunk", None, "512")
    chunks: int | None = key(count_or_all, "100 are enough for dense models; with experts, use all", None, '"all"')
    process_output: bool = key(flag, "collect for output.weight as well", False)
    covariance: Path | None = key(path, "existing covariances, for +feedback", None, '"cov.gguf"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Every file is compared with the model on held-out text that no choice depends on."""

    run: bool = key(flag, "false: no check", True)
    ctx: int | None = key(integer(4), "tokens per chunk", None, "512")
    chunks: int | None = key(count_or_all, 'number of chunks, or "all"', 64)
    logits: str = key(
        choice("auto", "llama.cpp", "compact"), "format of the base logits: auto, llama.cpp, compact", "auto"
    )
    activations: str = key(
        choice(*ACTIVATIONS), "of all divergences: exact, or runtime: rounded as by llama.cpp", EXACT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivitySettings:
    """The divergence that each group of tensors causes in each type, which a search needs.

    The longest step: its time grows with chunks and types.
    """

    types: tuple[str, ...] = key(
        words, "default: those that fit the goals", (), '["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]'
    )
    groups: str = key(choice(*GROUPS), f"quantized together, for example: {', '.join(GROUPS)}", "class-layer")
    ctx: int | None = key(integer(4), "tokens per chunk", None, "512")
    chunks: int | None = key(count_or_all, 'number of chunks, or "all"', 16)
    full_runs: int | None = key(
        full_runs, "types per group that run to the end; the others are estimated from their errors", None, '"auto"'
    )
    proxies_only: bool = key(flag, "true: only estimate, without running the text for each group and type", False)
    feedback: bool = key(
        flag, "true: also measure with error feedback if a goal has +feedback; hours on large models", False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Constraints of searches."""

    types: tuple[str, ...] = key(words, "default: all measured types", (), '["Q3_K", "Q4_K"]')
    same: tuple[str, ...] = key(words, "classes that get the same type in each layer", (), '["up,gate"]')
    allow: tuple[str, ...] = key(words, "only these types", (), '["attn_v=Q6_K,Q8_0"]')
    at_least: tuple[str, ...] = key(words, "minimum type", (), '["output=Q6_K"]')
    at_most: tuple[str, ...] = key(words, "maximum type", (), '["_exps=Q4_K"]')
    candidates: int = key(integer(1, 64), "recipes to measure for each goal; the best is used", 3)
    time_limit: float = key(positive, "time limit of the solver in seconds, for each recipe", 60.0, "60")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """Caches and buffers beside the weights of fit=24G,64G, and the best among the recipes that fit."""

    ctx: int = key(integer(0), "context of all sequences; 0: that of training", 0)
    ctk: str = key(choice(*KV_TYPES), "type of the K cache", "f16")
    ctv: str = key(choice(*KV_TYPES), "type of the V cache", "f16")
    parallel: int = key(integer(1), "parallel sequences", 1)
    margin: int | None = key(size_or_0, "memory of each GPU that must remain free", None, '"1GiB"')
    aim: str = key(choice(*AIMS), "quality, or with `bandwidth` balance or speed", "quality")
    bandwidth: tuple[int, ...] = key(sizes, "bytes per second that each device reads", (), '["936G", "80G"]')


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """A page with charts that needs no network, and a model card for model hubs."""

    run: bool = key(flag, "false: no report", True)
    card: bool = key(flag, "false: no model card", True)
    score: tuple[Path, ...] = key(
        paths, "files of multiple-choice tasks to score model and targets on (HellaSwag, MMLU)", (), '["hellaswag.txt"]'
    )
    score_tasks: int | None = key(integer(0), "tasks of each file; 0: all; default: 400 of HellaSwag", None, "400")
    base_model: str = key(word, "base model on the hub, for the front matter", "", '"Qwen/Qwen3-30B-A3B"')
    license: str = key(word, "license of the base model, for the front matter", "", '"apache-2.0"')


def _target(value: Any, folder: Path) -> Target:
    try:
        return parse_target(word(value, folder))
    except RecipeError as e:
        raise ValueError(e.message) from None


def _targets(value: Any, folder: Path) -> tuple[Target, ...]:
    return tuple(_target(item, folder) for item in (value if isinstance(value, list) else [value]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """A target with its settings; ``quantize``: options of quantize for it alone."""

    target: Target = key(_target, "a preset, 12.3G, 4.2bpw, kld=0.01 or fit=24G,64G", example='"IQ2_M+feedback"')
    name: str | None = key(name_of_files, "ending of the file name", None, '"IQ2_M-better"')
    max_kld: float | None = key(positive, "fail if the mean KL divergence exceeds this", None, "0.2")
    quantize: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The label in names of files and steps."""
        return self.name or self.target.file_suffix


#: Keys of a [[target]], without the options of quantize.
TARGET_KEYS = {name: key for name, key in keys_of(TargetSettings).items() if name != "quantize"}


def _target_settings(table: object, location: TableLocation, tables: Mapping[str, Iterable[str]]) -> TargetSettings:
    values = read_values({**TARGET_KEYS, **keys_of(QuantizeOptions)}, table, location, tables)
    target_values = {name: values.pop(name) for name in TARGET_KEYS if name in values}
    return TargetSettings(**target_values, quantize=values)


def mmproj_files(value: Any, folder: Path) -> tuple[str | Path, ...]:
    """Read types of mmproj files, and existing ones, which end in .gguf; false is none."""
    if value is False:
        return ()
    items = value if isinstance(value, list) and value else [value]
    if not all(isinstance(item, str) for item in items):
        raise ValueError('write a type or a file, several in brackets, or false: "f16", ["f16", "q8_0"], "mmproj.gguf"')
    files = tuple(path(item, folder) if item.endswith(".gguf") else _mmproj_type(item) for item in items)
    if len(set(files)) < len(files):
        raise ValueError("one of them occurs twice")
    return files


def _mmproj_type(name: str) -> str:
    """Return a type as mmproj files are named: F16. Raises ValueError."""
    if name.lower() in OUTTYPE_NAMES:
        return name.upper()
    try:
        return preset_by_name(name).name
    except TypeNotSupported:
        raise ValueError(f"no type {name!r}: f16, bf16, f32, q8_0, auto, or one of `quantkit types`") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSettings:
    """The keys before the first table."""

    model: Path = key(path, "a Hugging Face directory, or a GGUF file of BF16, F16 or F32", example='""')
    targets: tuple[Target, ...] = key(_targets, "presets, sizes, bits per weight, divergences, memory of devices", ())
    name: str | None = key(name_of_files, "output files are named NAME-TARGET.gguf", None)
    output: Path | None = key(path, "folder for the quantized files", None)
    work: Path | None = key(path, "folder for intermediate files: imatrix, logits, recipes", None)
    runtime: str = key(
        choice("llama.cpp", "ik_llama.cpp"),
        ('runtime whose types a search may use; "ik_llama.cpp" has more'),
        "llama.cpp",
    )
    merge_up_gate: bool = key(flag, "merge up and gate experts: faster, in runtimes that support it", False)
    mmproj: tuple[str | Path, ...] | None = key(
        mmproj_files,
        "type of the mmproj file, a checkpoint's vision and audio encoders; or an existing FILE.gguf; or false",
        None,
        '"f16"',
    )
    threads: int = key(integer(0, 1 << 16), "0: all CPUs", 0)
    max_ram: int | None = key(size, "maximum memory for weights; the rest is streamed", None, '"16G"')
    cache: Path | None = key(path, "cache folder for encoded tensors, shared by recipes", None, '"~/.cache/tensors"')
    cache_size: int | None = key(size, "maximum size of the cache folder", None, '"50G"')


#: The tables of a file, by the names of ``Config``'s fields.
TABLES: dict[str, type] = {
    "convert": ConvertOptions,
    "calibration": TextSettings,
    "imatrix": ImatrixSettings,
    "check": CheckSettings,
    "sensitivity": SensitivitySettings,
    "search": SearchSettings,
    "fit": FitSettings,
    "quantize": QuantizeOptions,
    "report": ReportSettings,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a cook. ``origin``: the file, or "the command line", for messages."""

    model: Path
    targets: tuple[TargetSettings, ...]
    output: Path
    name: str
    work: Path
    runtime: str = "llama.cpp"
    merge_up_gate: bool = False
    #: Types and existing files; None: F16 if the checkpoint has encoders.
    mmproj: tuple[str | Path, ...] | None = None
    threads: int = 0
    max_ram: int | None = None
    cache: Path | None = None
    cache_size: int | None = None
    convert: ConvertOptions = field(default_factory=ConvertOptions)
    calibration: TextSettings = field(default_factory=TextSettings)
    imatrix: ImatrixSettings = field(default_factory=ImatrixSettings)
    check: CheckSettings = field(default_factory=CheckSettings)
    sensitivity: SensitivitySettings = field(default_factory=SensitivitySettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    fit: FitSettings = field(default_factory=FitSettings)
    quantize: Mapping[str, Any] = field(default_factory=dict)
    report: ReportSettings = field(default_factory=ReportSettings)
    origin: str = "the command line"

    @cached_property
    def goals(self) -> tuple[TargetSettings, ...]:
        """The targets that need a search."""
        return tuple(t for t in self.targets if t.target.goal is not None)

    def options(self, target: TargetSettings, **overrides: Any) -> QuantizeOptions:
        """Return the options of quantize for a target: its own options override the common ones; a goal ignores those
        that set types."""
        common, specific = dict(self.quantize), dict(target.quantize)
        if target.target.goal is not None:
            common = {name: value for name, value in common.items() if independent_of_search(name)}
        for name in ("recipe", "tensor_type"):  # the first rule that matches decides
            if both := (*specific.get(name, ()), *common.get(name, ())):
                specific[name] = both
        return QuantizeOptions(merge_up_gate=self.merge_up_gate, **{**common, **specific, **overrides})


def read_config(path: str | Path, targets: Sequence[str] = ()) -> Config:
    """Return the settings in a TOML file; ``targets``, if any, replace its own.

    Raises RecipeError with the file, the key and a suggestion.
    """
    path = locate(path)
    try:
        text = read_whole(path, _MAX_BYTES).decode()
    except UnicodeDecodeError as e:
        raise FormatError(f"{path}: not UTF-8, at byte {e.start}", "QK-E121") from None
    try:
        with Child("quantkit.foreign.grammars:Grammars", str(path), limits=GRAMMAR) as child:
            data = child.call("toml", text)
    except FormatError as e:
        raise RecipeError(e.message, e.code) from None
    return config_from(data, str(path), path.parent, targets)


def config_from(data: Mapping[str, Any], origin: str, folder: Path, targets: Sequence[str] = ()) -> Config:
    """Return the checked settings in a parsed file; relative paths start in ``folder``."""
    location = TableLocation(origin, folder)
    keys: dict[str, Iterable[str]] = {name: keys_of(table) for name, table in TABLES.items()}
    keys |= {"": keys_of(TopSettings), "[target]": {**TARGET_KEYS, **keys_of(QuantizeOptions)}}
    top_level = {name: value for name, value in data.items() if name not in TABLES and name != "target"}
    all_keys = {**dict.fromkeys((*TABLES, "target"), ()), **keys}
    top = read_table(TopSettings, top_level, location, all_keys)
    tables: dict[str, Any] = {
        name: read_table(table, data[name], replace(location, table=name), keys)
        for name, table in TABLES.items()
        if name in data and name != "quantize"
    }
    if "quantize" in data:
        quantize = read_values(keys_of(QuantizeOptions), data["quantize"], replace(location, table="quantize"), keys)
        tables["quantize"] = quantize
    target_tables = data.get("target", [])
    if not isinstance(target_tables, list):
        raise location.error("target", "several tables: write [[target]]")
    settings = [TargetSettings(target=target) for target in top.targets]
    settings += [
        _target_settings(target_table, replace(location, table="[target]"), keys) for target_table in target_tables
    ]
    if targets:
        settings = [TargetSettings(target=parse_target(text)) for text in targets]
    return _assemble(top, tuple(settings), tables, location)


def _assemble(
    top: TopSettings, targets: tuple[TargetSettings, ...], tables: dict[str, Any], location: TableLocation
) -> Config:
    """Return the settings, with defaults for missing names."""
    if not targets:
        raise location.error("targets", 'no targets: write targets = ["Q4_K_M", "4.2bpw"]', "QK-E214")
    if len(targets) > _MAX_TARGETS:
        raise location.error("targets", f"{len(targets)} targets, more than {_MAX_TARGETS}")
    name = top.name or model_name(top.model)
    output = top.output or location.folder / f"{name}-cooked"
    values = {
        f.name: getattr(top, f.name) for f in fields(TopSettings) if f.name not in ("targets", "output", "name", "work")
    }
    config = Config(
        **values,
        targets=targets,
        output=output,
        name=name,
        work=top.work or output / "work",
        origin=location.origin,
        **tables,
    )
    _check(config, location)
    return config


def model_name(model: Path) -> str:
    """Return the name of a model: that of its file or folder without the type."""
    base = _SHARD.sub("", Path(os.path.abspath(model)).name.removesuffix(".gguf"))
    return _TYPE_SUFFIX.sub("", base) or "model"


def _check(config: Config, location: TableLocation) -> None:
    """Raise RecipeError for settings that contradict each other."""
    by_label: dict[str, TargetSettings] = {}
    for settings in config.targets:
        if settings.label in by_label:
            raise location.error("targets", f"{settings.target.text} occurs twice; give one of them another name")
        by_label[settings.label] = settings
        if settings.max_kld is not None and not config.check.run:
            raise location.error("max_kld", f"{settings.label} needs the check: omit [check] run = false", "QK-E202")
        if settings.target.goal is not None and (
            refused := sorted(n for n in settings.quantize if not independent_of_search(n))
        ):
            raise location.error(
                refused[0], f"the search chooses the types of {settings.label}: use [search] allow instead"
            )
        _check_fit(config, settings, location)
    texts = config.calibration
    if texts.evaluation is not None and not texts.text and config.imatrix.file is None and config.imatrix.run:
        raise location.error("text", "[calibration] evaluation is set, but there is no calibration text", "QK-E202")
    if len({config.output, config.work, config.model}) < 3:
        raise location.error("output", "model, output and work must be different paths", "QK-E403")


def _check_fit(config: Config, settings: TargetSettings, location: TableLocation) -> None:
    """Raise RecipeError if the settings of [fit] do not suit a target's devices."""
    goal = settings.target.goal
    if goal is None or goal.kind != "fit":
        return
    try:
        SearchOptions(fit=goal.devices, **asdict(config.fit)).check()
    except RecipeError as e:
        raise replace(location, table="fit").error(settings.label, e.message, e.code) from None


def text_consumers(config: Config) -> list[str]:
    """Return the steps that need calibration or held-out text, by name."""
    consumers = []
    if config.imatrix.run and config.imatrix.file is None:
        consumers.append("the importance matrix")
    if any(t.target.feedback for t in config.targets) and config.imatrix.covariance is None:
        consumers.append("the covariances of +feedback")
    if any(t.target.calibrate for t in config.targets):
        consumers.append("+calibrate")
    if config.goals:
        consumers.append("the search")
    if config.check.run:
        consumers.append("the check")
    return consumers
