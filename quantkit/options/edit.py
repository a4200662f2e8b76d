"""The changes of ``quantkit edit``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.arguments import Options


@dataclass(frozen=True, slots=True)
class ValueText:
    """A value as it is typed: ``VALUE``, ``TYPE:VALUE``, ``@FILE``, ``[ITEM, ..]``, ``TYPE:[ITEM, ..]``."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOptions(Options):
    """Changes to the metadata of a file, applied in the order of these fields.

    Attributes:
        drop_provenance: remove the keys that record how the file was made: quantkit.* but quantkit.merge.*, and
            quantize.imatrix.*.
        remove: keys, or PREFIX* for all keys that begin so.
        rename: new names by key; a key keeps its place.
        set: values by key: bool, int, float, str, a list of one of these, a ``Field``, or a ``ValueText``. A value
            takes the type of the present one; of a new key it is inferred.
        chat_template: files of chat templates by name; "" is the default template. A file is Jinja, or JSON with the
            key chat_template, such as tokenizer_config.json.
        special_token: tokens by name (bos, eos, eot, ..), as text or id.
        pre: the pre-tokenizer.
        name, license: general.name and general.license.
    """

    drop_provenance: bool = False
    remove: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    set: Mapping[str, Any] = field(default_factory=dict)
    chat_template: Mapping[str, Path] = field(default_factory=dict)
    special_token: Mapping[str, str | int] = field(default_factory=dict)
    pre: str | None = None
    name: str | None = None
    license: str | None = None
