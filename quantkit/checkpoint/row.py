"""Rows of model classes (``models``): conversion to GGUF, and its inverse for export."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.key_rows import BASE, SetConfig, SetKeys
from quantkit.checkpoint.quantized.scheme import DecodedTensors
from quantkit.checkpoint.tensors import Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.tokenizer import Vocabulary

#: The prefix of layers' tensors.
LAYER = "model.layers.*."


@dataclass(frozen=True)
class Architecture:
    """The conversion of a class's checkpoints to GGUF."""

    arch: str
    #: Applied to names of stored tensors when files are indexed: they may only rename and drop.
    stored: tuple[Rule, ...] = ()
    #: Applied to tensors, in order.
    rules: tuple[Rule, ...] = ()
    #: The keys common to most classes, and those after them; classes with another order set ``base``.
    base: tuple[SetKeys, ...] = BASE
    keys: tuple[SetKeys, ...] = ()
    #: Sets the keys of the vocabulary.
    vocab: Callable[[Vocabulary], None] = write_bpe
    #: The number of layers in the file.
    layers: Callable[[Config], int] = field(default=lambda config: config.layers)
    #: Changes to the configuration before anything else.
    patch_config: Callable[[Config], None] = field(default=lambda config: None)
    #: Changes to the configuration by the names of stored tensors, for settings that config.json lacks.
    inspect_tensors: Callable[[Config, Collection[str]], None] = field(default=lambda config, names: None)
    #: Another row for some configurations of the class.
    dispatch: Callable[[Config], Architecture | None] = field(default=lambda config: None)
    #: Tensors that are computed, not stored; they come first.
    synthetic: Callable[[Config], Iterable[Tensor]] = field(default=lambda config: ())
    #: Reorders tensors before the rules.
    reorder: Callable[[DecodedTensors, Config], DecodedTensors] = field(default=lambda weights, config: weights)
    #: It may have prediction layers (MTP) after the others, which --no-nextn and --mtp select (nextn.py).
    nextn: bool = False
    #: Dense layers after the pooling may be in the file (dense_modules.py).
    dense_modules: bool = False
    #: Keys that are set before general.type.
    head_keys: tuple[SetKeys, ...] = ()
    #: Keys that are set before those, also in files of a vocabulary alone.
    first_keys: tuple[SetKeys, ...] = ()
    #: Tensors in other files of the checkpoint, which follow all others, by name.
    extra: Callable[[Config], dict[str, Expression]] = field(default=lambda config: {})
    #: The number of layers that names of tensors may have, if it is not that of the file.
    name_layers: Callable[[Config], int] | None = None
    #: It is a draft model, which reads its target's checkpoint (draft.py).
    draft: bool = False
    #: The row of the draft model among its tensors, which --dspark selects.
    dspark: Architecture | None = None


@dataclass(frozen=True)
class Layout:
    """A class whose checkpoints are known by their files, not by config.json (ModelBase.register_hparams_loader)."""

    #: Whether a directory is such a checkpoint.
    matches: Callable[[Path], bool]
    #: Its configuration, which names the class.
    read: Callable[[Path], Config] | None = None
    #: The class of a model that is an adapter (adapter_model.py), whose configuration is that of its base.
    adapter: str = ""


@dataclass(frozen=True)
class HfClass:
    """Tensor names and config.json keys of a class of transformers, for export.

    The name map (``tensor_names``) has many names of one kind of tensor: ``names`` has the unusual ones of this
    class. Facts of transformers 4.57.6 (models/*/modeling_*.py, configuration_*.py); of classes of remote code, what
    llama.cpp b11434 (src/models/*.cpp) computes of their files.
    """

    model_type: str
    names: str = ""
    #: Names of kinds that the name map cannot distinguish.
    kinds: dict[str, str] = field(default_factory=dict)
    #: Values of config.json where the file has no key.
    defaults: Json = field(default_factory=dict)
    #: Key of the file -> its name in config.json, if it is unusual.
    keys: dict[str, str] = field(default_factory=dict)
    #: Keys of config.json that must not be null.
    not_null: tuple[str, ...] = ()
    #: Set values of config.json that are more than copies of keys.
    config_setters: tuple[SetConfig, ...] = ()
    #: Experts, or projections, that are one tensor where other classes have several.
    fused: bool = False
    #: Final changes to names: regular expression, replacement.
    renames: tuple[tuple[str, str], ...] = ()
    #: Final changes to names that depend on the configuration, such as the kind of a layer.
    rename_last: Callable[[Config, str], str] = field(default=lambda config, name: name)
    #: Tensors of the checkpoint that GGUF files store as metadata.
    synthetic: Callable[[ModelMetadata], Iterable[Tensor]] = field(default=lambda meta: ())
    #: A note on every export as this class.
    note: str = ""
    #: The model type of a multimodal model with this text model, and the key of config.json under which it is there,
    #: with points between the keys of nested objects.
    outer_type: str = ""
    text_key: str = "text_config"
    #: Whether a file of the architecture is of this class. Classes with a condition are checked first.
    matches: Callable[[ModelMetadata], bool] | None = None
    #: Architectures of this class's files other than that of its row.
    archs: tuple[str, ...] = ()


def add_prefix(prefix: str, names: str) -> str:
    """Return names with a prefix each."""
    return " ".join(f"{prefix}{name}" for name in names.split())


def has_key(key: str) -> Callable[[ModelMetadata], bool]:
    """Return a condition (``HfClass.matches``): the file has a key that is not zero."""
    return lambda meta: bool(meta.get(f".{key}"))
