"""The JSON file that ``sensitivity`` writes: the cost of each group of tensors in each type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quantkit.arguments import checked
from quantkit.errors import FormatError
from quantkit.formats.own_json import read_own_json
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.records import record
from quantkit.types import TensorType

#: The first keys of every file; another version is refused.
KIND, VERSION = "quantkit.sensitivity", 1
#: The proxy that is the error at the end of a group's layer.
LAYER = "layer_error"


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that get the same type.

    ``name``: unique in a file, such as ``blk.3.ffn_gate_exps``. ``kind``: the class of its tensors (``ffn_gate_exps``).
    ``layer``: None for tensors outside layers. ``tensors``: shapes in ggml's order, by full name.
    """

    name: str
    kind: str
    layer: int | None
    tensors: Mapping[str, tuple[int, ...]] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of quantizing one group alone to one type, on held-out text, with standard errors.

    ``kld``: mean KL divergence per token, in nats. ``ln_ppl``: change of the mean negative log-likelihood, in nats, so
    that exp(ln_ppl) is the ratio of the perplexities. Both are None where only ``proxies`` were computed. ``proxies``:
    cheap predictors of ``kld``, by name, in nats. ``feedback``: encoded with error feedback. ``flips``: share of
    ``kld`` that is proportional to the error rather than to its square (layer_errors.py); None if unknown.
    """

    group: str
    type: TensorType
    kld: float | None
    kld_error: float | None
    ln_ppl: float | None
    ln_ppl_error: float | None
    proxies: Mapping[str, float] = field(default_factory=dict)
    feedback: bool = False
    flips: float | None = None


@dataclass(frozen=True, slots=True)
class Sensitivity(HtmlTable):
    """The content of a file. ``model`` and ``text`` identify the measured model and text, for people and for checks."""

    model: Mapping[str, Any]
    text: Mapping[str, Any]
    settings: Mapping[str, Any]
    groups: tuple[Group, ...]
    costs: tuple[Cost, ...]

    def to_json(self) -> str:
        """Return the text of the file, one group and one cost per line."""
        head = {"kind": KIND, "version": VERSION, "model": self.model, "text": self.text, "settings": self.settings}
        lines = ["{", *(f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items())]
        for key, rows, end in (("groups", self.groups, ","), ("costs", self.costs, "")):
            texts = ",\n  ".join(json.dumps(_plain(row)) for row in rows)
            lines.append(f"{json.dumps(key)}: [\n  {texts}\n]{end}")
        return "\n".join([*lines, "}"]) + "\n"

    def as_table(self) -> Table:
        """Return the costs, in nats per token, the largest divergence first; unmeasured ones last."""
        ordered = sorted(self.costs, key=lambda c: math.inf if c.kld is None else -c.kld)
        rows = ((c.group, str(c.type), c.kld, c.kld_error, c.ln_ppl, c.ln_ppl_error) for c in ordered)
        header = "group, type, KL divergence, its standard error, ln(perplexity ratio), its standard error"
        return table_of(header, rows, f"{len(self.groups)} groups")


def _plain(row: Group | Cost) -> dict[str, Any]:
    values = {f.name: getattr(row, f.name) for f in fields(row)}
    return {k: v.name if isinstance(v, TensorType) else v for k, v in values.items()}


@checked
def read_sensitivity(path: Path) -> Sensitivity:
    """Return the content of a file of ``sensitivity``. Raises FormatError, which names the file."""

    def parse(data: Any) -> Sensitivity:
        if data.pop("kind") != KIND or data.pop("version") != VERSION:
            raise ValueError(f"not a sensitivity file of version {VERSION}")
        sensitivity: Sensitivity = record(Sensitivity, data)
        return sensitivity

    content = read_own_json(path, "a sensitivity file", parse)
    names = {g.name for g in content.groups}
    if missing := next((c.group for c in content.costs if c.group not in names), None):
        raise FormatError(f"{path}: has a cost of {missing}, which is not a group of the file", "QK-E122")
    return content
