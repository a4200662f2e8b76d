"""What ``sensitivity`` measured, as a JSON file: how much each group of tensors costs in each type, quantized alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError
from quantkit.formats.outputs import read_whole
from quantkit.types import TensorType, type_by_name

#: The first keys of every file; another version is refused.
KIND, VERSION = "quantkit.sensitivity", 1
#: The proxy that is the error at the end of a group's layer.
LAYER = "layer_error"
#: The largest file that is read: a model of a thousand groups and forty types has 10 MiB.
_MOST = 256 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are quantized together, to one type.

    ``name``: unique in a file, as ``blk.3.ffn_gate_exps``. ``kind``: the class of its tensors, as ``ffn_gate_exps``.
    ``layer``: its layer, None for tensors outside of layers. ``tensors``: their shapes in ggml's order, by full name.
    """

    name: str
    kind: str
    layer: int | None
    tensors: Mapping[str, tuple[int, ...]] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Cost:
    """What quantizing one group alone to one type does on held-out text, with standard errors.

    ``kld``: mean KL divergence per token, in nats. ``ln_ppl``: change of the mean negative log-likelihood, in nats, so
    that exp(ln_ppl) is the ratio of the perplexities. None where only ``proxies`` were computed. ``proxies``: cheap
    predictors of ``kld``, by name, in nats. ``feedback``: encoded with error feedback. ``flips``: about which share of
    ``kld`` goes with the size of the error, not its square (layer_errors.py); None where nothing tells.
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
class Sensitivity:
    """The content of a file. ``model`` and ``text``: what was measured on what, for people and for checks."""

    model: Mapping[str, Any]
    text: Mapping[str, Any]
    settings: Mapping[str, Any]
    groups: tuple[Group, ...]
    costs: tuple[Cost, ...]

    def to_json(self) -> str:
        """Return the text of the file: one group and one cost a line."""
        head = {"kind": KIND, "version": VERSION, "model": self.model, "text": self.text, "settings": self.settings}
        lines = ["{", *(f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items())]
        for key, rows, end in (("groups", self.groups, ","), ("costs", self.costs, "")):
            texts = ",\n  ".join(json.dumps(_plain(row)) for row in rows)
            lines.append(f"{json.dumps(key)}: [\n  {texts}\n]{end}")
        return "\n".join([*lines, "}"]) + "\n"


def _plain(row: Group | Cost) -> dict[str, Any]:
    values = {f.name: getattr(row, f.name) for f in fields(row)}
    return {k: v.name if isinstance(v, TensorType) else v for k, v in values.items()}


def read_sensitivity(path: Path) -> Sensitivity:
    """Return the content of a file of ``sensitivity``. Raises FormatError, which names the file."""
    try:
        data = json.loads(read_whole(path, _MOST))
        if data["kind"] != KIND or data["version"] != VERSION:
            raise FormatError(f"{path}: not a file of quantkit sensitivity, version {VERSION}")
        groups = tuple(
            Group(g["name"], g["kind"], g["layer"], {n: tuple(map(int, s)) for n, s in g["tensors"].items()})
            for g in data["groups"]
        )
        costs = tuple(Cost(**{**c, "type": type_by_name(c["type"])}) for c in data["costs"])
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise FormatError(f"{path}: not a file of quantkit sensitivity ({e!r})") from None
    known = {g.name for g in groups}
    if missing := next((c.group for c in costs if c.group not in known), None):
        raise FormatError(f"{path}: a cost of {missing}, which is no group of the file")
    return Sensitivity(data["model"], data["text"], data["settings"], groups, costs)
