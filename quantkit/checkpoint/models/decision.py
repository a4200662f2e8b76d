"""Decision models, which score the options of questions: OpenJev, Clef, Laya, Julia, Lev, Kev and Nimble.

Facts of llama.cpp b11434, conversion/qwen.py (OpenJevModel), conversion/clef.py, conversion/bert.py
(ModernBertDecisionModel), conversion/lev.py. Files beside config.json distinguish them from the model that they are
made of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quantkit.checkpoint.adapter_model import ADAPTER_FILE, adapter_of
from quantkit.checkpoint.class_defaults import with_defaults
from quantkit.checkpoint.config import Config, Json, optional_json, read_json, unify_text_config
from quantkit.checkpoint.expressions import TYPE_F32, Expression, Stored, concatenate, read_f32
from quantkit.checkpoint.key_rows import Always, Copied, SetKeys, write_rows
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import modern_bert, qwen3_next
from quantkit.checkpoint.row import Architecture, Layout
from quantkit.checkpoint.rules import Drop, Rename, Split, Transform
from quantkit.checkpoint.templates import TEMPLATES
from quantkit.checkpoint.tensors import Context, OneWayRule, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.special import write_template
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor, read_header
from quantkit.formats.torch_file import read_torch_file
from quantkit.types import TensorType


def write_prompt(v: Vocabulary, template: str) -> None:
    """Set the prompt of a decision model, beside a chat template."""
    write_template(v.keys, [{"name": "systemone", "template": template}])


def prompt_writer(name: str, vocab: Callable[[Vocabulary], None] = write_bpe) -> Callable[[Vocabulary], None]:
    """Return a function that writes a vocabulary and the prompt ``name`` of ``TEMPLATES``."""

    def write(v: Vocabulary) -> None:
        vocab(v)
        write_prompt(v, TEMPLATES[name])

    return write


def decision_type(name: str) -> Always:
    """Return the row of the kind of decision model."""
    return Always(".decision.type", name, "text")


def temperatures(values: Json, path: Path) -> tuple[Always, ...]:
    """Return the rows of temperatures, by kind of question. Raises FormatError for a value that is not a number."""
    wrong = next((name for name, value in values.items() if type(value) not in (int, float)), None)
    if wrong is not None:
        raise FormatError(f"{path}: the temperature {short(wrong)} is {short(values[wrong])}, not a number", "QK-E112")
    return tuple(Always(f".decision.temperature.{name}", value, "f32") for name, value in values.items())


def _own_config(folder: Path, name: str, values: Json) -> Config:
    """Return config.json as that of the class ``name``, with other ``values``."""
    path = folder / "config.json"
    config = unify_text_config(with_defaults(read_json(path)))
    return Config(path, {**config, "architectures": [name], **values})


# --- OpenJev and Clef: Qwen 3.5 without MTP layers -------------------------------------------------------------------

_QWEN35 = replace(
    qwen3_next.QWEN35,
    stored=(Drop(r"^(model\.)?(language_model\.)?mtp\."), *qwen3_next.QWEN35.stored),
    inspect_tensors=lambda config, names: qwen3_next.count_mtp_layers(config, ()),
    nextn=False,
)
_OPENJEV_TEMPERATURE, _OPENJEV_NOUL = 0.85, 0.85 * 1.829074

#: The head's configuration, and its tensors.
_CLEF_CONFIG, _CLEF_HEAD = "joint_head_config.json", "joint_head.safetensors"


def _is_clef(folder: Path) -> bool:
    return (folder / _CLEF_CONFIG).is_file() and (folder / "config.json").is_file()


def _read_clef(folder: Path) -> Config:
    return _own_config(folder, "ClefModel", {"decision": read_json(folder / _CLEF_CONFIG)})


def _head_tensors(config: Config) -> dict[str, Expression]:
    """Return the tensors of Clef's head, in the order of the file."""
    stored = read_header(config.path.parent / _CLEF_HEAD).values()
    return {f"joint_head.{t.name}": Stored(t) for t in sorted(stored, key=lambda t: t.offset)}


def _head_layers(config: Config, name: str) -> int:
    """Return a count of the head's configuration."""
    return Config.number(config.with_values(config.table("decision")), name)


@dataclass(frozen=True)
class _HeadScales:
    """Clef's learned scalars as the head applies them: exp(x), at most 100, and a sigmoid."""

    scales: tuple[Expression, Expression]
    gate: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return (3,)

    @property
    def type(self) -> TensorType:
        return TYPE_F32

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        prior, joint, gate = (float(read_f32(x, 0, 1)[0]) for x in (*self.scales, self.gate))
        values = [*(math.exp(min(x, math.log(100.0))) for x in (prior, joint)), 1.0 / (1.0 + math.exp(-gate))]
        out.view(np.float32)[...] = np.array(values, np.float32)[start : start + out.size // 4]

    def parts(self) -> Iterator[StoredTensor]:
        for x in (*self.scales, self.gate):
            yield from x.parts()


@dataclass(frozen=True)
class _GatherScales(OneWayRule):
    """Gathers the scalars of Clef's head into one tensor, in the place of the last."""

    names = ("joint_head.prior_logit_scale", "joint_head.joint_logit_scale", "joint_head.residual_gate")

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.x.shape or tensor.name not in self.names:
            return None
        parts = context.gather(self, "joint_head", tensor.name, tensor, len(self.names))
        if parts is None:
            return ()
        prior, joint, gate = (parts[name].x for name in self.names)
        return (replace(tensor, x=_HeadScales((prior, joint), gate), name_in_file="decision.scales"),)


@dataclass(frozen=True)
class _NumberHeadLayers(OneWayRule):
    """Numbers the layers of Clef's head after its routing layers."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"joint_head\.layers\.(\d{1,9})\.", tensor.name)
        if match is None:
            return None
        layer = int(match[1]) + _head_layers(context.config, "routing_layers")
        return (replace(tensor, name=f"joint_head.layers.{layer}.{tensor.name[match.end() :]}", layer=layer),)


_CLEF_RULES = (
    _GatherScales(),
    _NumberHeadLayers(),
    *(
        Split(rf"(joint_head\..*)\.in_proj_{end}$", tuple(rf"\1.{x}.{end}" for x in "qkv"))
        for end in ("weight", "bias")
    ),
)


def _not_of_head(rule: Rule) -> Rule:
    """Return a rule of Qwen 3.5 that leaves the head's tensors unchanged."""
    return replace(rule, pattern=rf"^(?!joint_head\.).*?{rule.pattern}") if isinstance(rule, Transform) else rule


@dataclass(frozen=True)
class _OfHead:
    """A count of the configuration of Clef's head."""

    key: str
    name: str

    def __call__(self, keys: Keys, config: Config) -> None:
        keys.u32(self.key, _head_layers(config, self.name))


_CLEF_KEYS: tuple[SetKeys, ...] = (
    decision_type("clef"),
    _OfHead(".decision.routing_block_count", "routing_layers"),
    _OfHead(".decision.block_count", "layers"),
    _OfHead(".decision.head_count", "heads"),
    Always(".attention.layer_norm_epsilon", 1e-5, "f32"),
)


# --- Laya and Julia: ModernBERT with a head --------------------------------------------------------------------------

_JULIA, _LAYA = "julia_config.json", "rl_agent_config.json"


def _is_laya(folder: Path) -> bool:
    return any((folder / n).is_file() for n in (_JULIA, _LAYA)) and (folder / "encoder" / "config.json").is_file()


def _read_laya(folder: Path) -> Config:
    """Return the encoder's configuration, with the head's layers after its own, each 4 times as wide as the model."""
    encoder, path = folder / "encoder" / "config.json", folder / _JULIA
    path = path if path.is_file() else folder / _LAYA
    values, decision = with_defaults(read_json(encoder)), read_json(path)
    config, head = Config(encoder, {**values, "architectures": ["ModernBertDecisionModel"]}), Config.number
    layers, added = (
        config.layers,
        head(Config(path, {**decision, "architectures": ["ModernBertDecisionModel"]}), "head_layers"),
    )
    widths = [config.number("intermediate_size")] * layers + [4 * config.number("hidden_size")] * added
    changed = {"num_hidden_layers": layers + added, "intermediate_size": widths, "decision": decision}
    return Config(path, {**config.outer, **changed})


def _decision(config: Config) -> Config:
    """Return the configuration of Laya's head."""
    return config.with_values(config.table("decision"))


def _write_laya_keys(keys: Keys, config: Config) -> None:
    """Write the head's size, and the temperature of each kind of question, or number of options."""
    decision = _decision(config)
    rows: list[SetKeys] = [
        decision_type("laya"),
        Copied(".decision.block_count", "head_layers", required=True),
        Copied(".decision.max_head_tokens", "head_max_len", default=256),
    ]
    kinds, by_options = decision.get("temperature", []), decision.get("temperature_by_options", {})
    if not isinstance(kinds, list) or not isinstance(by_options, dict):
        raise FormatError(
            f"{config.path}: temperature and temperature_by_options must be a list and an object", "QK-E112"
        )
    values = dict(zip(("choice", "score", "noul"), kinds, strict=False))
    values |= {name.replace(":", ".").replace("-", "_").rstrip("+"): x for name, x in by_options.items()}
    write_rows((*rows, *temperatures(values, config.path)), keys, decision)


def _write_laya(v: Vocabulary) -> None:
    """Write the vocabulary in the folder of the tokenizer, and the prompt with its special tokens."""
    julia = _decision(v.config).get("architecture") == "JuliaDecisionModel"
    v.folder = v.folder / "tokenizer"
    modern_bert.write_modern_bert(v)
    v.keys.u32("tokenizer.ggml.token_type_count", 3)
    template = TEMPLATES["julia" if julia else "laya"]
    for kind in ("cls", "sep", "mask"):
        token = v.tokenizer_config.get(f"{kind}_token")
        if not isinstance(token, str):
            raise FormatError(
                f"{v.folder / 'tokenizer_config.json'}: {kind}_token is {short(token)}, not a text", "QK-E114"
            )
        template = template.replace(f"[{kind.upper()}]", token)
    write_prompt(v, template)


@dataclass(frozen=True)
class _AppendHeadLayers(OneWayRule):
    """Numbers the layers of Laya's head after those of the encoder."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.match(r"head\.layers\.(\d{1,9})\.(.+)", tensor.name)
        if match is None:
            return None
        layer = int(match[1]) + context.config.layers - _decision(context.config).number("head_layers")
        name = f"head.layers.{layer}.{match[2].replace('in_proj_', 'in_proj.')}"
        return (replace(tensor, name=name, layer=layer),)


# --- Lev, Kev and Nimble: LoRA adapters of Qwen 3.5 ------------------------------------------------------------------

_CALIBRATION, _HEAD_FILE, _TRAINING, _SCHEMA = (
    "calibration.json",
    "head.pt",
    "training_config.json",
    "schema_config.json",
)
_KEV_TENSORS = ("q.weight", "k.weight", "q.bias", "k.bias")


def _is_kev(folder: Path) -> bool:
    """Return whether a directory is an adapter with a head, and the configuration of Kev's training."""
    if not all((folder / name).is_file() for name in (ADAPTER_FILE, _HEAD_FILE, _TRAINING)):
        return False
    args = (optional_json(folder / _TRAINING) or {}).get("args")
    return isinstance(args, dict) and "head_dim" in args


def _is_nimble(folder: Path) -> bool:
    """Return whether a directory is an adapter with the configuration of Nimble's prompt."""
    if not (folder / ADAPTER_FILE).is_file():
        return False
    return (optional_json(folder / _SCHEMA) or {}).get("task") == "schema_candidate_classification_v2"


def _write_lev_keys(keys: Keys, config: Config) -> None:
    """Write the temperatures of the readout of labels (mode A): "choice:A:small" is "choice.small"."""
    path = adapter_of(config) / _CALIBRATION
    values = read_json(path).get("temperatures")
    if not isinstance(values, dict):
        raise FormatError(f"{path}: temperatures is {short(values)}, not an object", "QK-E112")
    of_labels: Json = {}
    for name, value in values.items():
        kind, *parts = name.split(":")
        if parts[:1] == ["A"]:
            of_labels[".".join((kind, *parts[1:]))] = value
    write_rows((decision_type("lev"), *temperatures(of_labels, path)), keys, config)


@dataclass(frozen=True)
class _KevHead:
    """Kev's head: two matrices with biases that turn the state of a token into a query and a key."""

    tensors: dict[str, StoredTensor]
    width: int
    temperature: float


def _read_kev(config: Config) -> _KevHead:
    """Return the head in head.pt. Raises FormatError."""
    path = adapter_of(config) / _HEAD_FILE
    saved = read_torch_file(path)
    saved = saved if isinstance(saved, dict) else {}
    head, width, temperature = saved.get("head"), saved.get("head_dim"), saved.get("temperature")
    if not isinstance(head, dict) or head.keys() != set(_KEV_TENSORS):
        raise FormatError(f"{path}: its head does not have the tensors {', '.join(_KEV_TENSORS)}", "QK-E110")
    if type(width) is not int or isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise FormatError(
            f"{path}: head_dim is {short(width)} and temperature {short(temperature)}, not numbers", "QK-E110"
        )
    for name, t in head.items():
        shape = (width, config.number("hidden_size")) if name.endswith("weight") else (width,)
        if not isinstance(t, StoredTensor) or t.dtype not in ("F32", "F16", "BF16") or t.shape != shape:
            raise FormatError(f"{path}: {name} is not a tensor of floats of the shape {list(shape)}", "QK-E106")
    return _KevHead({name: replace(t, name=name) for name, t in head.items()}, width, float(temperature))


def _write_kev_keys(keys: Keys, config: Config) -> None:
    head = _read_kev(config)
    values = dict.fromkeys(("choice", "score", "noul"), head.temperature)
    rows = (decision_type("kev"), Always(".embedding_length_out", 2 * head.width, "u32"))
    write_rows((*rows, *temperatures(values, adapter_of(config) / _HEAD_FILE)), keys, config)


def _kev_tensors(config: Config) -> Iterable[Tensor]:
    """Yield the tensors of Kev's head: the query, then the key."""
    tensors = _read_kev(config).tensors
    for end in ("weight", "bias"):
        x = concatenate([Stored(tensors[f"{part}.{end}"]) for part in "qk"])
        yield Tensor(f"classifier.out_proj.{end}", x, None)


ARCHITECTURES: dict[str, Architecture] = {
    "LevModel": replace(_QWEN35, keys=(*_QWEN35.keys, _write_lev_keys), vocab=prompt_writer("lev")),
    "KevModel": replace(
        _QWEN35, keys=(*_QWEN35.keys, _write_kev_keys), vocab=prompt_writer("kev"), synthetic=_kev_tensors
    ),
    "NimbleModel": replace(_QWEN35, keys=(*_QWEN35.keys, decision_type("nimble")), vocab=prompt_writer("nimble")),
    "OpenJevModel": replace(
        _QWEN35,
        keys=(
            *_QWEN35.keys,
            decision_type("openjev"),
            *(Always(f".decision.temperature.{kind}", _OPENJEV_TEMPERATURE, "f32") for kind in ("choice", "score")),
            Always(".decision.temperature.noul", _OPENJEV_NOUL, "f32"),
        ),
        vocab=prompt_writer("openjev"),
    ),
    "ClefModel": replace(
        _QWEN35,
        arch="clef",
        rules=(*_CLEF_RULES, *map(_not_of_head, _QWEN35.rules)),
        keys=(*_QWEN35.keys, *_CLEF_KEYS),
        vocab=prompt_writer("clef"),
        extra=_head_tensors,
        name_layers=lambda config: max(
            config.layers, _head_layers(config, "routing_layers") + _head_layers(config, "layers")
        ),
    ),
    "ModernBertDecisionModel": replace(
        modern_bert.MODERN_BERT,
        stored=(Drop(r"^act_head\.|^temperature$"), Rename(r"^encoder\.", ""), *modern_bert.MODERN_BERT.stored),
        rules=(_AppendHeadLayers(), *modern_bert.MODERN_BERT.rules),
        keys=(*modern_bert.MODERN_BERT.keys, _write_laya_keys),
        vocab=_write_laya,
    ),
}

LAYOUTS = (
    Layout(lambda folder: (folder / "lev_release.json").is_file(), adapter="LevModel"),
    Layout(_is_kev, adapter="KevModel"),
    Layout(_is_nimble, adapter="NimbleModel"),
    Layout(_is_laya, _read_laya),
    Layout(_is_clef, _read_clef),
    Layout(
        lambda folder: (folder / "helper" / "shim.py").is_file() and (folder / "config.json").is_file(),
        lambda folder: _own_config(folder, "OpenJevModel", {}),
    ),
)
