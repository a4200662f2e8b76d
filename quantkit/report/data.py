"""The numbers of a report: plain records that a JSON file keeps, so that a page can be made from them again.

No folder is kept, only names of files: a report is published.
"""

from __future__ import annotations

import json
import types
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from quantkit.errors import FormatError
from quantkit.evaluate import Estimate
from quantkit.formats.outputs import read_whole

T = TypeVar("T")

#: The first keys of every file; another version is refused.
KIND, VERSION = "quantkit.report", 1
_MOST = 256 << 20


class Quantile(NamedTuple):
    """``share`` of the tokens diverge by more than ``kld`` nats."""

    share: float
    kld: float


@dataclass(frozen=True)
class Quality:
    """What a text says of a file. ``key`` identifies text, base and settings; all after ``ppl`` needs a base.

    ``ppl_ratio``: perplexity over that of the base, whose errors cancel in part. ``bound``: how far off ``kld`` can be
    because the base's logits are not kept whole.
    """

    key: str
    n_scored: int
    n_ctx: int
    chunks: int
    ppl: Estimate
    ppl_base: Estimate | None = None
    ppl_ratio: Estimate | None = None
    kld: Estimate | None = None
    bound: float = 0.0
    same_top: Estimate | None = None
    rms_p_diff: Estimate | None = None
    quantiles: tuple[Quantile, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """A tensor of two or more dimensions. ``error``: relative to the base's values, weighted by importance if there is
    one for it (``weighted``); None if it was not measured.
    """

    name: str
    kind: str
    layer: int | None
    type: str
    values: int
    nbytes: int
    error: float | None = None
    weighted: bool = False


@dataclass(frozen=True)
class Speed:
    """Tokens per second in a test, as pp512, and their standard deviation."""

    test: str
    rate: Estimate
    machine: str


@dataclass(frozen=True)
class Support:
    """What a runtime does with a file."""

    runtime: str
    loads: bool
    text: str


@dataclass(frozen=True)
class File:
    """One quantized file. ``fingerprint`` identifies it; ``errors_key`` what its matrices were compared with."""

    name: str
    fingerprint: str
    shards: int
    nbytes: int
    tensor_bytes: int
    values: int
    preset: str
    by_type: tuple[tuple[str, int, int], ...]
    matrices: tuple[Matrix, ...]
    support: tuple[Support, ...]
    provenance: tuple[tuple[str, str], ...]
    command: str
    notes: tuple[str, ...] = ()
    quality: Quality | None = None
    errors_key: str = ""
    speeds: tuple[Speed, ...] = ()

    @property
    def bpw(self) -> float:
        return 8 * self.tensor_bytes / max(1, self.values)


@dataclass(frozen=True)
class Facts:
    """What all files have in common: the model."""

    name: str
    architecture: str
    values: int
    active: int | None
    facts: tuple[tuple[str, str], ...]
    #: general.* that model cards repeat: license, base_model, ...
    card: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Base:
    """The unquantized model."""

    name: str
    fingerprint: str
    nbytes: int
    types: tuple[str, ...]


@dataclass(frozen=True)
class Text:
    """The text that was evaluated."""

    name: str
    sha256: str
    nbytes: int


@dataclass(frozen=True)
class Covered:
    """Coverage of a matrix by the importance matrix: tokens of its experts (one without); None: a .dat lacks them."""

    name: str
    kind: str
    layer: int | None
    present: bool
    experts: int
    never: int
    tokens_min: int | None
    tokens_median: float | None


@dataclass(frozen=True)
class Coverage:
    """An importance matrix: ``share`` of the matrices have data."""

    name: str
    datasets: tuple[str, ...]
    sha256: tuple[str, ...]
    share: float
    hardly: int
    tensors: tuple[Covered, ...]


@dataclass(frozen=True)
class GroupCost:
    """What quantizing a group alone to a type costs, in nats: measured, or guessed, where there is no ``error``."""

    group: str
    kind: str
    layer: int | None
    tensors: tuple[str, ...]
    type: str
    kld: float
    error: float | None


@dataclass(frozen=True)
class Costs:
    """A sensitivity file."""

    name: str
    text: str
    costs: tuple[GroupCost, ...]


@dataclass(frozen=True)
class Report:
    """Everything a page shows."""

    title: str
    made: str
    version: str
    model: Facts
    files: tuple[File, ...]
    base: Base | None = None
    text: Text | None = None
    imatrix: Coverage | None = None
    sensitivity: Costs | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the text of the file of data."""
        return json.dumps({"kind": KIND, "format": VERSION, **asdict(self)}, indent=1) + "\n"


def read_data(path: Path) -> Report:
    """Return the report that a file of data keeps. Raises FormatError, which names the file."""
    try:
        data = json.loads(read_whole(path, _MOST))
        if data.pop("kind") != KIND or data.pop("format") != VERSION:
            raise FormatError(f"{path}: not the data of a quantkit report, version {VERSION}")
        made: Report = _made(Report, data, "")
        return made
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise FormatError(f"{path}: not the data of a quantkit report ({e})") from None


def quality_from(data: object) -> Quality:
    """Return a quality that ``asdict`` made, from JSON. Raises FormatError."""
    try:
        made: Quality = _made(Quality, data, "quality")
        return made
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise FormatError(f"not the quality of a file ({e})") from None


def _made(kind: Any, value: Any, where: str) -> Any:
    """Return ``value``, from JSON, as the type ``kind``. Raises TypeError or ValueError, naming the place."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = next(a for a in arguments if a is not type(None))
        return None if value is None else _made(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{where} is no list")
        if len(arguments) == 2 and arguments[1] is ...:
            return tuple(_made(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value))
        return tuple(_made(a, each, where) for a, each in zip(arguments, value, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() - hints.keys():
            raise TypeError(f"{where or 'it'} is not as expected")
        known = {f.name: hints[f.name] for f in fields(kind) if f.name in value}
        return kind(**{name: _made(hint, value[name], f"{where}.{name}") for name, hint in known.items()})
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = get_type_hints(kind)
        return kind(*(_made(hint, each, where) for hint, each in zip(hints.values(), value, strict=True)))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{where} is no {kind.__name__}")
    return value
