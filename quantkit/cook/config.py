"""What to cook: a TOML file, or a command line, as one checked value.

Every key has a default but ``model`` and the targets; ``quantkit cook init`` writes a file with all of them, and why.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit.convert import ConvertOptions
from quantkit.cook.tables import (
    Where,
    choice,
    count_or_all,
    flag,
    full_runs,
    key,
    name_of_files,
    path,
    paths,
    positive,
    read_table,
    share,
    size,
    whole,
    word,
    words,
)
from quantkit.cook.targets import Target, parse_target
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.outputs import read_whole
from quantkit.names import printable
from quantkit.quantize import QuantizeOptions
from quantkit.sensitivity.encode import GROUPS

#: The largest file of settings that is read.
_MOST = 1 << 20
#: The end of a model's name that says no more than its type.
_TYPE_END = re.compile(r"[-._](?:bf16|f16|f32|fp16|fp32|auto)$", re.IGNORECASE)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """How a checkpoint is converted."""

    outtype: str = key(choice("auto", "bf16", "f16", "f32"), "type of the matrices", "auto")
    pre: str | None = key(word, "name of the pre-tokenizer, where it is not known", None)
    merge_lora: tuple[str, ...] = key(words, "adapters to merge: directories, each with :SCALE or without", ())
    no_nextn: bool = key(flag, "leave out layers that predict more tokens", False)

    def options(self) -> ConvertOptions:
        """Return them as ``convert`` takes them."""
        return ConvertOptions(outtype=self.outtype, pre=self.pre, merge_lora=self.merge_lora, no_nextn=self.no_nextn)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """The texts: what to calibrate on, and what to measure on."""

    text: tuple[Path, ...] = key(paths, "texts to calibrate on: files, or files and folders to make a corpus of", ())
    evaluation: Path | None = key(path, "a text to measure on; without one, a part of `text` is held out", None)
    chat: tuple[Path, ...] = key(paths, "conversations, JSON lines, rendered by the model's chat template", ())
    size: int = key(size, "most bytes of a corpus", 1_000_000)
    heldout: float = key(share, "share of a corpus that is held out", 0.1)
    seed: int = key(whole(0), "seed of a corpus", 0)
    include: tuple[str, ...] = key(words, "patterns for names of files in folders", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImatrixSettings:
    """The importance matrix, and covariances for error feedback."""

    file: Path | None = key(path, "an importance matrix that is there already", None)
    run: bool = key(flag, "false: quantize without an importance matrix", True)
    ctx: int | None = key(whole(4), "tokens of a chunk; by default 512, or the model's context", None)
    chunks: int | None = key(count_or_all, 'how many; "all"', None)
    process_output: bool = key(flag, "also for the output matrix", False)
    covariance: Path | None = key(path, "covariances that are there already, for +feedback", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """How every file is checked: its divergence from the model on held-out text."""

    run: bool = key(flag, "false: check nothing", True)
    ctx: int | None = key(whole(4), "tokens of a chunk; by default 512, or the model's context", None)
    chunks: int | None = key(count_or_all, 'how many; "all"', 64)
    logits: str = key(choice("auto", "llama.cpp", "compact"), "format of the base logits", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivitySettings:
    """What each group of tensors costs in each type, which a search needs."""

    types: tuple[str, ...] = key(words, "types to measure; by default those that fit the targets", ())
    groups: str = key(choice(*GROUPS), "what is quantized together", "class-layer")
    ctx: int | None = key(whole(4), "tokens of a chunk; by default 512, or the model's context", None)
    chunks: int | None = key(count_or_all, 'how many; "all"', 16)
    full_runs: int | None = key(full_runs, 'types of a group that run to the end of the model; "auto", "all"', None)
    proxies_only: bool = key(flag, "true: estimate instead of measuring", False)
    feedback: bool = key(flag, "true: also as +feedback encodes, where a goal has it", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """What a search may choose."""

    types: tuple[str, ...] = key(words, "types that groups may become; by default all that were measured", ())
    same: tuple[str, ...] = key(words, 'classes of one type: ["up,gate", "q,k,v"]', ())
    allow: tuple[str, ...] = key(words, 'only these types: ["attn_v=Q6_K,Q8_0"]', ())
    at_least: tuple[str, ...] = key(words, 'no type of fewer bits: ["output=Q6_K"]', ())
    at_most: tuple[str, ...] = key(words, 'no type of more bits: ["ffn_.*_exps=Q4_K"]', ())
    candidates: int = key(whole(1, 64), "measure so many recipes for each goal, and take the best", 3)
    time_limit: float = key(positive, "seconds of the solver for each recipe", 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """The report: a page, and a card for model hubs."""

    run: bool = key(flag, "false: no report", True)
    card: bool = key(flag, "false: no model card", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """Options of quantize, for all targets, or for one."""

    recipe: tuple[Path, ...] = key(paths, "files of rules for types", ())
    tensor_type: tuple[str, ...] = key(words, 'rules for types: ["attn_v=Q8_0"]', ())
    output_tensor_type: str | None = key(word, "type of the output matrix", None)
    token_embedding_type: str | None = key(word, "type of the token embeddings", None)
    ffn_gate_inp_type: str | None = key(word, "type of the router", None)
    encoder: str | None = key(word, "whose search encodes what two trees have: mainline or ik", None)
    rules: str | None = key(choice("mainline", "ik"), "whose mixtures apply", None)
    split_max_size: int | None = key(size, "begin a new file beyond this size", None)

    def options(self) -> dict[str, Any]:
        """Return what is set, by the names that ``QuantizeOptions`` has."""
        return {f.name: value for f in fields(QuantizeSettings) if (value := getattr(self, f.name)) not in (None, ())}


#: Options of quantize that say nothing about types.
_OF_GOALS = {"encoder", "split_max_size"}


def _target(value: Any, folder: Path) -> Target:
    try:
        return parse_target(word(value, folder))
    except RecipeError as e:
        raise ValueError(e.message) from None


def _targets(value: Any, folder: Path) -> tuple[Target, ...]:
    return tuple(_target(each, folder) for each in (value if isinstance(value, list) else [value]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings(QuantizeSettings):
    """One target, with settings of its own."""

    target: Target = key(_target, "a preset, 12.3G, 4.2bpw or kld=0.01")
    name: str | None = key(name_of_files, "the end of its file's name", None)
    max_kld: float | None = key(positive, "fail if it diverges more", None)

    @property
    def called(self) -> str:
        """What its file and its steps are called by."""
        return self.name or self.target.file_part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Top:
    """The keys outside of tables."""

    model: Path = key(path, "a directory of Hugging Face, or a GGUF file of BF16, F16 or F32")
    targets: tuple[Target, ...] = key(_targets, "presets, sizes, bits per weight, divergences", ())
    output: Path | None = key(path, "the folder of what is cooked", None)
    name: str | None = key(name_of_files, "the beginning of the files' names", None)
    work: Path | None = key(path, "the folder of all that is in between", None)
    runtime: str = key(choice("llama.cpp", "ik_llama.cpp"), "whose types a search may use", "llama.cpp")
    merge_up_gate: bool = key(flag, "merge up and gate experts", False)
    threads: int = key(whole(0, 1 << 16), "threads; 0: all CPUs", 0)
    max_ram: int | None = key(size, "memory for weights and buffers", None)
    cache: Path | None = key(path, "the folder of encoded tensors, to share between models of one kind", None)
    cache_size: int | None = key(size, "the most that folder may take", None)


#: The tables of a file, by the names of ``Config``'s fields.
_TABLES: dict[str, type] = {
    "convert": ConvertSettings,
    "calibration": TextSettings,
    "imatrix": ImatrixSettings,
    "check": CheckSettings,
    "sensitivity": SensitivitySettings,
    "search": SearchSettings,
    "quantize": QuantizeSettings,
    "report": ReportSettings,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that ``cook`` is told. ``origin``: the file, or "the command line", for messages."""

    model: Path
    targets: tuple[TargetSettings, ...]
    output: Path
    name: str
    work: Path
    runtime: str = "llama.cpp"
    merge_up_gate: bool = False
    threads: int = 0
    max_ram: int | None = None
    cache: Path | None = None
    cache_size: int | None = None
    convert: ConvertSettings = field(default_factory=ConvertSettings)
    calibration: TextSettings = field(default_factory=TextSettings)
    imatrix: ImatrixSettings = field(default_factory=ImatrixSettings)
    check: CheckSettings = field(default_factory=CheckSettings)
    sensitivity: SensitivitySettings = field(default_factory=SensitivitySettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    quantize: QuantizeSettings = field(default_factory=QuantizeSettings)
    report: ReportSettings = field(default_factory=ReportSettings)
    origin: str = "the command line"

    @cached_property
    def goals(self) -> tuple[TargetSettings, ...]:
        """The targets that need a search."""
        return tuple(t for t in self.targets if t.target.goal is not None)

    def options(self, target: TargetSettings, **more: Any) -> QuantizeOptions:
        """Return the options of quantize for a target: its own before those of all; a search has its own limits."""
        common, own = self.quantize.options(), target.options()
        if target.target.goal is not None:
            common = {name: value for name, value in common.items() if name in _OF_GOALS}
        for name in ("recipe", "tensor_type"):  # the first rule that matches decides
            if both := (*own.get(name, ()), *common.get(name, ())):
                own[name] = both
        return QuantizeOptions(merge_up_gate=self.merge_up_gate, **{**common, **own, **more})


def read_config(path: str | Path, targets: Sequence[str] = ()) -> Config:
    """Return what a TOML file says; ``targets``, if any, replace its own.

    Raises RecipeError, which names the file and the key, and what was probably meant.
    """
    path = Path(path)
    try:
        given = tomllib.loads(read_whole(path, _MOST).decode())
    except UnicodeDecodeError as e:
        raise FormatError(f"{path}: not UTF-8, at byte {e.start}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise RecipeError(f"{path}: {printable(e)}") from None
    except ValueError as e:  # an integer of thousands of digits
        raise RecipeError(f"{path}: {printable(e)}") from None
    return config_from(given, str(path), path.parent, targets)


def config_from(given: Mapping[str, Any], origin: str, folder: Path, targets: Sequence[str] = ()) -> Config:
    """Return the checked settings of a file that is read, whose paths begin in ``folder``."""
    where = Where(origin, folder)
    keys = {name: [f.name for f in fields(made)] for name, made in _TABLES.items()}
    keys |= {"": [f.name for f in fields(_Top)], "[target]": [f.name for f in fields(TargetSettings)]}
    own = {name: value for name, value in given.items() if name not in _TABLES and name != "target"}
    known = {**dict.fromkeys((*_TABLES, "target"), ()), **keys}
    top = read_table(_Top, own, where, known)
    tables: dict[str, Any] = {
        name: read_table(made, given[name], replace(where, table=name), keys)
        for name, made in _TABLES.items()
        if name in given
    }
    listed = given.get("target", [])
    if not isinstance(listed, list):
        raise where.fail("target", "several tables: write [[target]]")
    chosen = [TargetSettings(target=target) for target in top.targets]
    chosen += [read_table(TargetSettings, each, replace(where, table="[target]"), keys) for each in listed]
    if targets:
        chosen = [TargetSettings(target=parse_target(text)) for text in targets]
    return _whole(top, tuple(chosen), tables, where)


def _whole(top: _Top, targets: tuple[TargetSettings, ...], tables: dict[str, Any], where: Where) -> Config:
    """Return everything together, with the names that were not given."""
    if not targets:
        raise where.fail("targets", 'nothing to cook: write targets = ["Q4_K_M", "4.2bpw"]')
    name = top.name or model_name(top.model)
    output = top.output or where.folder / f"{name}-cooked"
    given = {f.name: getattr(top, f.name) for f in fields(_Top) if f.name not in ("targets", "output", "name", "work")}
    config = Config(
        **given,
        targets=targets,
        output=output,
        name=name,
        work=top.work or output / "work",
        origin=where.origin,
        **tables,
    )
    _check(config, where)
    return config


def model_name(model: Path) -> str:
    """Return what a model is called, by its file or folder, without its type."""
    base = _SHARD.sub("", Path(os.path.abspath(model)).name.removesuffix(".gguf"))
    return _TYPE_END.sub("", base) or "model"


def _check(config: Config, where: Where) -> None:
    """Refuse what contradicts itself."""
    called: dict[str, TargetSettings] = {}
    for each in config.targets:
        if each.called in called:
            raise where.fail("targets", f"{each.target.text} is there twice; give one of them a name of its own")
        called[each.called] = each
        if each.max_kld is not None and not config.check.run:
            raise where.fail("max_kld", f"{each.called} is not checked: leave [check] run away")
        if each.target.goal is not None and (own := sorted(each.options().keys() - _OF_GOALS)):
            raise where.fail(own[0], f"{each.called} gets the types that are searched for; see [search] allow")
    texts = config.calibration
    if texts.evaluation is not None and not texts.text and config.imatrix.file is None and config.imatrix.run:
        raise where.fail("text", "[calibration] evaluation is given, but no text to calibrate on")
    if len({config.output, config.work, config.model}) < 3:
        raise where.fail("output", "model, output and work are places of their own")


def needs_text(config: Config) -> list[str]:
    """Return for what held-out or calibration text is needed, in words; nothing if it is not."""
    why = []
    if config.imatrix.run and config.imatrix.file is None:
        why.append("the importance matrix")
    if any(t.target.feedback for t in config.targets) and config.imatrix.covariance is None:
        why.append("the covariances of +feedback")
    if any(t.target.calibrate for t in config.targets):
        why.append("+calibrate")
    if config.goals:
        why.append("the search")
    if config.check.run:
        why.append("the check")
    return why
