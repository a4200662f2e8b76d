"""general.*: name and origin of a model, guessed as convert_hf_to_gguf.py (b11434) does.

Sources, in order of precedence: the front matter of README.md, _name_or_path of config.json, the name of the directory
(gguf-py/gguf/metadata.py); generation_config.json gives sampling; --metadata overrides, and --model-name last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import optional_json, read_json
from quantkit.checkpoint.keys import Keys
from quantkit.errors import FormatError
from quantkit.extras import MODEL_CARD, missing_packages
from quantkit.foreign.child import GRAMMAR, Child
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_text

Json = dict[str, Any]

#: general.sampling.* in order: key, names in generation_config.json, how it is written.
SAMPLING = (
    ("sequence", ("sequence",), "text"),
    ("top_k", ("top_k",), "i32"),
    ("top_p", ("top_p",), "f32"),
    ("min_p", ("min_p",), "f32"),
    ("xtc_probability", ("xtc_probability",), "f32"),
    ("xtc_threshold", ("xtc_threshold",), "f32"),
    ("temp", ("temperature",), "f32"),
    ("penalty_last_n", ("penalty_last_n",), "i32"),
    ("penalty_repeat", ("penalty_repeat", "repetition_penalty"), "f32"),
    ("mirostat", ("mirostat",), "i32"),
    ("mirostat_tau", ("mirostat_tau",), "f32"),
    ("mirostat_eta", ("mirostat_eta",), "f32"),
)
#: general.* in order, up to the models it is based on.
_KEYS = (
    "name",
    "author",
    "version",
    "organization",
    "finetune",
    "basename",
    "description",
    "quantized_by",
    "size_label",
    "license",
    "license.name",
    "license.link",
    "url",
    "doi",
    "uuid",
    "repo_url",
    "source.url",
    "source.doi",
    "source.uuid",
    "source.repo_url",
)
#: Keys of a model card, in order of precedence -> general.* key.
_CARD = (
    *((name, name) for name in ("name", "author", "version", "organization", "description", "finetune", "basename")),
    ("size_label", "size_label"),
    *((name, f"source.{name}") for name in ("url", "doi", "uuid", "repo_url")),
    *((f"model_{name}", name) for name in ("name", "author", "version", "organization", "description", "finetune")),
    ("model_basename", "basename"),
    ("model_size_label", "size_label"),
    *((f"model_{name}", f"source.{name}") for name in ("url", "doi", "uuid", "repo_url")),
    ("model_creator", "author"),
    ("model_type", "basename"),
)
_LICENSE = (("license", "license"), ("license_name", "license.name"), ("license_link", "license.link"))
#: Keys of an entry about another model or a dataset, in order.
RELATED = ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url")
_PARTS_OF_NAME = ("basename", "finetune", "version", "size_label")


@dataclass(frozen=True)
class ParameterCount:
    """The number of weights of a model: all, outside of experts, of one expert; and of experts."""

    total: int
    shared: int
    expert: int
    experts: int

    @classmethod
    def from_shapes(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> ParameterCount:
        """Count over the tensors of a GGUF file, their shapes outermost first.

        Adapters in the file count as the weights that they change, and the total as from ``from_adapter``; it is 0 if
        a factor B does not follow its A.
        """
        total = shared = expert = experts = n = 0
        factor: tuple[str, tuple[int, ...]] | None = None
        for name, shape in shapes:
            if name.endswith(".lora_a"):
                factor = name, shape
                continue
            if name.endswith(".lora_b"):
                if factor is None or factor[0] != f"{name[:-1]}a":
                    return cls(0, 0, 0, 0)
                shape = (*shape[:-1], factor[1][-1])
            size = math.prod(shape)
            total += size
            if "_exps." in name and len(shape) >= 3:
                count = shape[-2 if ".bias" in name else -3]
                expert = expert + size // count
                experts = experts + count
                n = n + 1
            else:
                shared += size
        return cls(total if factor is None else -total, shared, expert, experts // n if n else 0)

    @classmethod
    def from_adapter(cls, total: int) -> ParameterCount:
        """Count the weights that an adapter changes, as a negative number: it may not change the whole model."""
        return cls(-total, 0, 0, 0)

    @property
    def label(self) -> str:
        """general.size_label: 8x7B, 1.1B."""
        if self.experts:
            return f"{self.experts}x{_format_count(self.shared + self.expert)}"
        return _format_count(self.total)


def _format_count(n: int) -> str:
    units = ((1e12, 1e-12, "T"), (1e9, 1e-9, "B"), (1e6, 1e-6, "M"), (-1.0, 1e-3, "K"))
    _, factor, letter = next(unit for unit in units if n > unit[0])
    scaled = n * factor
    digits = max(2 - len(str(round(scaled)).lstrip("0")), 0)
    return f"{scaled:.{digits}f}{letter}"


@dataclass
class General:
    """A model's name, authors, license and more: ``values`` by the key after ``general.``"""

    values: Json
    sampling: Json
    base_models: list[Json] | None = None
    datasets: list[Json] | None = None
    tags: list[Any] | None = None
    languages: list[Any] | None = None
    #: The checkpoint, --metadata, and the keys that it sets.
    folder: Path = Path()
    metadata: Path | None = None
    overridden: frozenset[str] = frozenset()
    #: Why generation_config.json is not read, "" if it is.
    unread: str = ""

    def write(self, keys: Keys) -> None:
        """Set the keys, in the converter's order."""
        if self.unread:
            keys.omissions.append(f"{self.unread}: the GGUF file has no sampling parameters")
        for name, _, kind in SAMPLING:
            if self.sampling.get(name) is not None:
                with keys.blame(self._source(f"general.sampling.{name}", "generation_config.json")):
                    getattr(keys, kind)(f"general.sampling.{name}", self.sampling[name])
        with keys.blame(self.folder / "README.md"):
            self._write_card(keys)

    def _source(self, key: str, file: str) -> Path:
        """Return the file that a key's value is from: ``file``, unless --metadata sets it."""
        return self.metadata if self.metadata is not None and key in self.overridden else self.folder / file

    def _write_card(self, keys: Keys) -> None:
        for name in _KEYS:
            value = self.values.get(name)
            if name == "license" and isinstance(value, list):
                value = ",".join(map(str, value))
            if value is not None:
                with keys.blame(self._source(f"general.{name}", "README.md")):
                    keys.text(f"general.{name}", value)
        for kind, entries in (("base_model", self.base_models), ("dataset", self.datasets)):
            if entries is not None:
                keys.u32(f"general.{kind}.count", len(entries))
                for i, entry in enumerate(entries):
                    for name in RELATED:
                        if name in entry:
                            keys.text(f"general.{kind}.{i}.{name}", entry[name])
        for name, items in (("tags", self.tags), ("languages", self.languages)):
            if items is not None:
                keys.array(f"general.{name}", items)

    def file_name(self, encoding: str | None, *, kind: str = "") -> str:
        """Return the default name of the output: Llama-3.2-1B-Instruct-BF16.gguf.

        ``encoding`` is None for a file without tensors; ``kind`` is "vocab", "mtp" or "mmproj" for a part of the model,
        whose name has no size, and "lora" for an adapter.
        """
        v = self.values
        base = v.get("basename") if v.get("basename") is not None else v.get("name")
        name = "ggml-model" if base is None else str(base).strip().replace(" ", "-").replace("/", "-")
        size = f"-{v['size_label']}" if v.get("size_label") is not None and kind in ("", "lora") else ""
        tags = [f"-{str(v[k]).strip().replace(' ', '-')}" for k in ("finetune", "version") if v.get(k) is not None]
        end = "-vocab" if encoding is None else f"-{encoding.upper()}"
        end += "-LoRA" if kind == "lora" else ""
        start = f"{kind}-" if kind in ("mtp", "mmproj") else ""
        return f"{start}{name}{size}{''.join(tags)}{end}.gguf"


def read_general(
    folder: Path, count: ParameterCount, *, model_name: str | None = None, metadata: Path | None = None
) -> General:
    """Return name, authors, license and sampling of the model in ``folder``.

    Args:
        folder: the checkpoint.
        count: its weights; a number in a name that is far from it is not a size.
        model_name: --model-name, which takes precedence.
        metadata: --metadata, a JSON file with keys of GGUF.
    """
    overrides = {} if metadata is None else read_json(metadata)
    general = General({}, {}, folder=folder, metadata=metadata, overridden=frozenset(overrides))
    card = read_card(folder / "README.md")
    _from_card(general, card, count.total)
    path = (optional_json(folder / "config.json") or {}).get("_name_or_path")
    if isinstance(path, str) and path.count("/") <= 1:
        _from_name(general, path, count.total)
    _from_name(general, folder.resolve().name if folder.name in ("", ".", "..") else folder.name, count.total)
    generation, general.unread = _generation_config(folder / "generation_config.json")
    for name, names, _ in SAMPLING:
        general.sampling[name] = next((generation[n] for n in names if n in generation), None)
    _override(general, overrides)
    if model_name is not None:
        general.values["name"] = model_name
    if general.values.get("name") is None:
        general.values["name"] = folder.name
    if general.values.get("size_label") is None and count.total > 0:
        general.values["size_label"] = count.label
    return general


def _generation_config(path: Path) -> tuple[Json, str]:
    """Return the object in generation_config.json, or an empty one and the error of a damaged file."""
    try:
        return optional_json(path) or {}, ""
    except FormatError as e:
        return {}, e.message


def _override(general: General, overrides: Json) -> None:
    for name, _, _ in SAMPLING:
        general.sampling[name] = overrides.get(f"general.sampling.{name}", general.sampling[name])
    for name in _KEYS:
        if name != "license" and f"general.{name}" in overrides:
            general.values[name] = overrides[f"general.{name}"]
    for name in ("base_models", "datasets", "tags", "languages"):
        if f"general.{name}" in overrides:
            value = overrides[f"general.{name}"]
            if not isinstance(value, list):
                raise FormatError(f"--metadata: general.{name} is {short(value)}, not a list", "QK-E203")
            setattr(general, name, value)


def read_card(path: Path) -> Json:
    """Return the front matter of a model card, {} without one."""
    if not path.exists():
        return {}
    lines = read_text(path).decode("utf-8", "replace").splitlines()
    if not lines or lines[0] != "---":
        return {}
    end = lines.index("---", 1) if "---" in lines[1:] else len(lines)
    # "no" is Norwegian, not false, and YAML has no tabs.
    text = ("\n".join(lines[1:end]) + "\n").replace("- no\n", '- "no"\n').replace("\t", "  ")
    if MODEL_CARD.missing():
        raise missing_packages(MODEL_CARD, hint=f"or remove the front matter of {path}")
    with Child("quantkit.foreign.grammars:Grammars", f"{path}: its front matter", limits=GRAMMAR) as child:
        front_matter = child.call("yaml", text)
    return front_matter if isinstance(front_matter, dict) else {}


def _from_card(general: General, card: Json, total: int) -> None:
    values = general.values
    for key, name in _CARD:
        if key in card and values.get(name) is None:
            values[name] = card[key]
    for attribute, keys in (
        ("base_models", ("base_model", "base_models", "base_model_sources")),
        ("datasets", ("datasets", "dataset", "dataset_sources")),
    ):
        if present := [key for key in keys if key in card]:
            value = card[present[0]]
            items = [value] if isinstance(value, str) else value
            items = items if isinstance(items, list) else []
            setattr(general, attribute, [parse_related(item, total) for item in items])
    for key, name in _LICENSE:
        if key in card and values.get(name) is None:
            values[name] = card[key]
    for key, attribute in (
        ("tags", "tags"),
        ("pipeline_tag", "tags"),
        ("languages", "languages"),
        ("language", "languages"),
    ):
        value = card.get(key)
        if value is not None:
            items = [value] if isinstance(value, str) else value
            items_before = getattr(general, attribute) or []
            setattr(general, attribute, [*items_before, *items] if isinstance(items, list) else items_before)


def parse_related(item: object, total: int) -> Json:
    """Return the facts about another model, or a dataset, in its name or address."""
    if isinstance(item, dict):
        return {str(key): value for key, value in item.items()}
    if not isinstance(item, str):
        return {}
    entry: Json = {}
    model_id: Any = item
    is_address = item.startswith(("http://", "https://", "ssh://"))
    if is_address:
        entry["repo_url"] = item
        match = re.match(r"https?://huggingface.co/([^/]+/[^/]+)$", item)
        model_id = match[1] if match else None
    if model_id is None:
        return entry
    name = split_name(model_id, total)
    entry["name"] = title_case(name["full"] or "")
    if name["organization"] is not None:
        entry["organization"] = title_case(name["organization"])
    if name["version"] is not None:
        entry["version"] = name["version"]
    if name["organization"] is not None and not is_address:
        entry["repo_url"] = f"https://huggingface.co/{name['organization']}/{name['full']}"
    return entry


def _from_name(general: General, model_id: str, total: int) -> None:
    name, values = split_name(model_id, total), general.values
    for key, part_name in (("name", "full"), ("organization", "organization")):
        part = name[part_name]
        if values.get(key) is None and part is not None:
            values[key] = title_case(part)
    for key in _PARTS_OF_NAME:
        if values.get(key) is None and name[key] is not None:
            values[key] = name[key]


def title_case(text: str) -> str:
    """Capitalize the words of a name, except versions and words that already have capitals."""

    def capitalize(word: str) -> str:
        return word.title() if word.islower() and not re.match(r"^(v\d+(?:\.\d+)*|\d.*)$", word) else word

    return " ".join(map(capitalize, text.strip().replace("-", " ").split()))


_VERSION = re.compile(r"(v|iter)?\d+([.]\d+)*", re.IGNORECASE)
_TYPE = re.compile(r"i?q\d(_\w)*|b?fp?(16|32)", re.IGNORECASE)
_SIZE = re.compile(r"(([A]|\d+[x])?\d+([._]\d+)?[KMBT][\d]?|small|mini|medium|large|x?xl)", re.IGNORECASE)
_TUNED = re.compile(r"chat|instruct|vision|lora", re.IGNORECASE)


def split_name(model_id: str, total: int) -> Mapping[str, str | None]:
    """Return the parts of ORGANIZATION/NAME: full (the name), organization, basename, finetune, version, size_label.

    ``total`` is the number of weights, 0 if unknown: a size that is far from it is a context length. Less than 0: the
    number of weights changed by an adapter, of a model of any larger size.
    """
    empty = dict.fromkeys(("full", "organization", *_PARTS_OF_NAME))
    if " " in model_id:  # a name for people
        return {**empty, "full": model_id}
    organization, slash, full = model_id.partition("/")
    if not slash:
        organization, full = "", model_id
    parts = [part for part in full.split("-") if part]
    kinds: list[set[str]] = []
    for i, part in enumerate(parts):
        parts[i], kind = _kind_of(part, i, total)
        kinds.append(kind)
    sizes = [part for part, kind in zip(parts, kinds, strict=True) if "size_label" in kind]
    if any(c.isdecimal() for size in sizes for c in size):  # words are ignored if there are numbers
        for part, kind in zip(parts, kinds, strict=True):
            if part.isalpha():
                kind.discard("size_label")
    _find_basename(parts, kinds)

    def of_kind(name: str) -> list[str]:
        return [part for part, kind in zip(parts, kinds, strict=True) if name in kind]

    versions = [part for part, kind in zip(parts, kinds, strict=True) if "version" in kind and "basename" not in kind]
    parts_of_kind = {
        "basename": "-".join(of_kind("basename")) or None,
        "finetune": "-".join(of_kind("finetune")) or None,
        "version": "-".join(versions) or None,
        "size_label": "-".join(dict.fromkeys(of_kind("size_label"))) or None,
    }
    if not any(parts_of_kind[key] for key in ("finetune", "version", "size_label")):  # too short to decide
        parts_of_kind["basename"] = None
    owner = organization if slash and not organization.startswith(".") else None
    return {"full": full, "organization": owner, **parts_of_kind}


def _kind_of(part: str, place: int, total: int) -> tuple[str, set[str]]:
    """Return a part of a name in its usual spelling, and its kinds."""
    if _VERSION.fullmatch(part):
        return part, {"version"}
    if _TYPE.fullmatch(part):
        return part.upper(), {"type"}
    if place == 0:
        return part, set()
    if not _SIZE.fullmatch(part):
        tuned = {"type"} if total < 0 and part.lower() == "lora" else {"finetune"}
        return part, tuned if _TUNED.fullmatch(part) else set()
    part = part.replace("_", ".")
    if part[-1].isdecimal():  # bloom-7b1
        part = f"{part[:-2]}.{part[-1]}{part[-2]}"
    if len(part) > 1 and part[-2].isdecimal() and part[-1] in "kmbt":
        part = part[:-1] + part[-1].upper()
    if total:
        try:
            weights = float(part[:-1]) * pow(1000, " KMBT".find(part[-1]))
        except ValueError:
            return part, {"size_label"}
        if weights < -total // 8 if total < 0 else abs(weights - total) > 7 * total // 8:
            return part[:-1] + part[-1].lower(), {"finetune"}
    return part, {"size_label"}


def _find_basename(parts: list[str], kinds: list[set[str]]) -> None:
    """Mark the leading parts as the basename, and other parts of unknown kind as the finetune."""
    at_start = True
    for part, kind in zip(parts, kinds, strict=True):
        if at_start and ((not kind and part[0].isalpha()) or "version" in kind):
            kind.add("basename")
        else:
            at_start = False
            if not kind:
                kind.add("finetune")
    for kind in reversed(kinds):  # except a version at its end
        if "basename" not in kind or len(kind) == 1:
            break
        kind.remove("basename")


def fill_template(name: str, encoding: str) -> str:
    """Return a file name with {ftype}, {outtype} (or in capitals) replaced by the name of its encoding."""
    low, high = encoding.lower(), encoding.upper()
    try:
        return name.format(low, outtype=low, ftype=low, OUTTYPE=high, FTYPE=high)
    except (LookupError, ValueError):
        raise FormatError(f"{name}: only ftype, outtype, FTYPE and OUTTYPE are allowed in braces", "QK-E203") from None
